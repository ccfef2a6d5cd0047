"""What a handler is called with, and which bodies never reach one."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from eventbus import (
    Batch,
    ConfigError,
    ConsumerStatus,
    Delivery,
    Event,
    InvalidPayload,
    Outcome,
    Service,
    Undecodable,
)
from eventbus.event import BINARY, JSON
from eventbus.payload import decoder, is_async, read_batch_handler, read_handler


class Order(BaseModel):
    id: int
    note: str = ""


@dataclass
class Line:
    sku: str
    amount: int


class Row(TypedDict):
    sku: str


def delivery(data: object = None, **attributes: object) -> Delivery:
    return Delivery(Event("order.created", data, **attributes), "wms", "q")  # type: ignore[arg-type]


def raw(body: bytes, content_type: str | None = JSON) -> Delivery:
    return Delivery(Event.from_wire("1", "a", "", Event("a").time, body, content_type), "wms", "q")


def argument(annotation: object, given: Delivery) -> object:
    return decoder(annotation)(given)


# --- every annotation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "data", "expected"),
    [
        pytest.param(Order, {"id": 1, "note": "é"}, Order(id=1, note="é"), id="pydantic"),
        pytest.param(Order | None, None, None, id="optional pydantic, no body"),
        pytest.param(Line, {"sku": "a", "amount": 1}, Line("a", 1), id="dataclass"),
        pytest.param(Row, {"sku": "a"}, {"sku": "a"}, id="TypedDict"),
        pytest.param(dict, {"a": 1}, {"a": 1}, id="dict"),
        pytest.param(dict[str, object], {"a": 1}, {"a": 1}, id="dict[str, object]"),
        pytest.param(dict[str, Any], {"a": 1}, {"a": 1}, id="dict[str, Any]"),
        pytest.param(dict[str, int], {"a": 1}, {"a": 1}, id="dict[str, int]"),
        pytest.param(list, [1], [1], id="list"),
        pytest.param(list[Order], [{"id": 1}], [Order(id=1)], id="list of pydantic"),
        pytest.param(int, 5, 5, id="int"),
        pytest.param(float, 1.5, 1.5, id="float"),
        pytest.param(bool, False, False, id="bool"),
        pytest.param(Annotated[int, Field(gt=0)], 5, 5, id="Annotated"),
        pytest.param(object, {"a": 1}, {"a": 1}, id="object"),
        pytest.param(Any, [1], [1], id="Any"),
        pytest.param(object, b"\xff", b"\xff", id="object of bytes"),
        pytest.param(bytes, {"a": 1}, b'{"a":1}', id="bytes"),
        pytest.param(bytes, None, b"", id="bytes of nothing"),
        pytest.param(str, {"a": 1}, '{"a":1}', id="str is the body's text"),
        pytest.param(str, "é".encode(), "é", id="str of bytes"),
    ],
)
def test_an_annotation_gets(annotation, data, expected):
    """Each kind of annotation turns the body into its own argument."""
    assert argument(annotation, delivery(data)) == expected


@pytest.mark.parametrize("annotation", [Event, inspect.Parameter.empty], ids=["Event", "unannotated"])
def test_the_event_itself(annotation):
    """An Event, or no annotation, is the event: nothing is decoded."""
    given_ = raw(b"\xff not json")
    assert argument(annotation, given_) is given_.event


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic takes typing's own from Python 3.12 on")
def test_a_typed_dict_that_pydantic_cannot_read_says_which_one_to_use():
    """On Python 3.11 pydantic needs the TypedDict of typing_extensions: the ConfigError says so."""
    with pytest.raises(ConfigError, match="typing_extensions"):
        decoder(typing.TypedDict("Old", {"sku": str}))  # type: ignore[operator]


def test_the_delivery_itself():
    """A Delivery is the delivery: nothing is decoded."""
    given_ = raw(b"\xff not json")
    assert argument(Delivery, given_) is given_


# --- bad bodies ----------------------------------------------------------------------------------------------

DECODED = [Order, Line, Row, dict, list, dict[str, int], object, Order | None]


@pytest.mark.parametrize("annotation", DECODED, ids=str)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"NaN", id="NaN"),
        pytest.param(b'{"id":NaN,"sku":"a","amount":1}', id="NaN inside"),
        pytest.param(b'{"id":1e999,"sku":"a","amount":1}', id="infinity by overflow"),
        pytest.param(b'{"id":1,"id":1,"sku":"a","amount":1}', id="duplicate keys"),
        pytest.param(b"[" * 10_000 + b"]" * 10_000, id="10,000 deep"),
        pytest.param(b'{"a":' * 10_000 + b"1" + b"}" * 10_000, id="10,000 objects deep"),
        pytest.param(b'{"id":"\xff"}', id="invalid UTF-8"),
        pytest.param(b"{", id="cut off"),
        pytest.param(b"\x00\x01", id="binary"),
    ],
)
def test_a_body_that_is_not_json_is_undecodable(annotation, body):
    """All payload types agree on what JSON is; none guesses."""
    with pytest.raises(Undecodable):
        argument(annotation, raw(body))


@pytest.mark.parametrize(
    ("annotation", "given_"),
    [
        pytest.param(Order, delivery(None), id="empty body, pydantic"),
        pytest.param(Line, delivery(None), id="empty body, dataclass"),
        pytest.param(dict, delivery(None), id="empty body, dict"),
        pytest.param(list, delivery(None), id="empty body, list"),
        pytest.param(int, delivery(None), id="empty body, int"),
        pytest.param(Order, delivery({}), id="field missing"),
        pytest.param(Order, delivery({"id": "x"}), id="wrong type"),
        pytest.param(Order, delivery([1]), id="array for an object"),
        pytest.param(Line, delivery({"sku": "a"}), id="dataclass field missing"),
        pytest.param(Row, delivery({}), id="TypedDict key missing"),
        pytest.param(dict, delivery([1]), id="array for a dict"),
        pytest.param(dict, delivery("x"), id="text for a dict"),
        pytest.param(dict, delivery(5), id="number for a dict"),
        pytest.param(dict, delivery(True), id="boolean for a dict"),
        pytest.param(list, delivery({}), id="object for a list"),
        pytest.param(Order, raw(b'{"id":1}', "text/plain"), id="text/plain for pydantic"),
        pytest.param(Order, raw(b'{"id":1}', BINARY), id="octets for pydantic"),
        pytest.param(dict, raw(b'{"id":1}', BINARY), id="octets for a dict"),
        pytest.param(dict, raw(b'{"id":1}', "text/plain"), id="text/plain for a dict"),
        pytest.param(list, raw(b"[" * 300 + b"]" * 300, "application/xml"), id="xml for a list"),
        pytest.param(list[Any], raw(b"[" * 500 + b"]" * 500), id="deeper than pydantic goes"),
        pytest.param(Order, raw(b'{"id":1,"note":"\\ud800"}'), id="half a character"),
    ],
)
def test_a_body_that_does_not_fit_is_an_invalid_payload(annotation, given_):
    """Good JSON of the wrong shape, or a content type that is no JSON: InvalidPayload."""
    with pytest.raises(InvalidPayload):
        argument(annotation, given_)


def test_text_must_be_utf8():
    """A str argument is the body's text, or Undecodable."""
    with pytest.raises(Undecodable):
        argument(str, raw(b"\xff"))


@given(st.binary(max_size=100), st.sampled_from([None, JSON, BINARY, "text/plain", "x", ""]))
def test_any_body_gives_an_argument_or_one_of_two_errors(body, content_type):
    """No bytes under any content type raise anything but Undecodable and InvalidPayload."""
    for decode in ANY_DECODERS:
        try:
            decode(raw(body, content_type))
        except (Undecodable, InvalidPayload):
            continue


ANY_DECODERS = [decoder(annotation) for annotation in (*DECODED, str, bytes, Event, Delivery, int)]


def test_the_error_names_the_field_and_hides_the_value():
    """A rejected value may be a secret; where it stood is enough."""
    with pytest.raises(InvalidPayload, match="id: ") as caught:
        argument(Order, delivery({"id": "hunter2"}))
    assert "hunter2" not in str(caught.value)


def test_only_the_first_five_errors_are_told():
    """A body with a thousand mistakes makes a short error."""
    with pytest.raises(InvalidPayload, match="and 995 more") as caught:
        argument(list[Order], delivery([{}] * 1000))
    assert len(str(caught.value)) < 500


# --- reading a handler ---------------------------------------------------------------------------------------


async def coroutine(order: Order) -> None: ...
def plain(order: Order) -> None: ...


class Handler:
    async def __call__(self, order: Order, delivery: Delivery) -> None: ...

    async def method(self, order: Order) -> None: ...
    def plain_method(self, event: Event) -> None: ...

    @staticmethod
    async def static(order: Order) -> None: ...

    @classmethod
    def of_class(cls, order: Order) -> None: ...


class PlainHandler:
    def __call__(self, event: Event) -> None: ...


async def with_extras(client: object, order: Order, delivery: Delivery) -> None: ...
def with_default(order: Order, times: int = 3) -> None: ...
def with_known_default(order: Order, delivery: Delivery = None) -> None: ...  # type: ignore[assignment]


def decorated(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    async def wrapper(*args: object, **kwargs: object) -> object:
        return await function(*args, **kwargs)  # type: ignore[misc]

    return wrapper


@pytest.mark.parametrize(
    ("function", "arguments", "awaited"),
    [
        pytest.param(coroutine, 1, True, id="async def"),
        pytest.param(plain, 1, False, id="def"),
        pytest.param(lambda event: None, 1, False, id="lambda"),
        pytest.param(Handler(), 2, True, id="callable object, async"),
        pytest.param(PlainHandler(), 1, False, id="callable object, plain"),
        pytest.param(Handler().method, 1, True, id="method"),
        pytest.param(Handler().plain_method, 1, False, id="plain method"),
        pytest.param(Handler.static, 1, True, id="static method"),
        pytest.param(Handler.of_class, 1, False, id="class method"),
        pytest.param(functools.partial(with_extras, object()), 2, True, id="partial"),
        pytest.param(functools.partial(functools.partial(with_extras, object())), 2, True, id="partial of a partial"),
        pytest.param(functools.partial(Handler()), 2, True, id="partial of a callable object"),
        pytest.param(functools.partial(Handler().plain_method), 1, False, id="partial of a plain method"),
        pytest.param(decorated(coroutine), 1, True, id="decorated"),
        pytest.param(with_default, 1, False, id="its own defaults are left alone"),
        pytest.param(with_known_default, 2, False, id="a Delivery is passed although it has a default"),
    ],
)
def test_a_handler_is_read(function, arguments, awaited):
    """Functions, methods, callable objects, partials: how many arguments, and whether it is awaited."""
    signature = read_handler(function, {})
    assert len(signature.arguments) == arguments
    assert signature.is_async is awaited
    assert is_async(function) is awaited


def test_string_annotations_with_local_classes():
    """This file has `from __future__ import annotations`: a class of the test itself is found."""

    class Local(BaseModel):
        size: int

    made = Service("wms")

    @made.on("a")
    async def handle(local: Local, delivery: Delivery) -> Outcome | None: ...

    @made.batch("b")
    async def many(locals: list[Local], batch: Batch) -> None: ...

    first, second = made.routes
    assert first.signature.arguments[0](delivery({"size": 1})) == Local(size=1)  # type: ignore[misc]
    assert second.signature.arguments[0](delivery({"size": 2})) == Local(size=2)  # type: ignore[misc]
    assert second.signature.arguments[1] is None


def test_a_local_class_that_needs_another_local_class():
    """A payload type may be built from others of the same function."""

    class Part(BaseModel):
        size: int

    class Whole(BaseModel):
        parts: list[Part]

    made = Service("wms")

    @made.on("a")
    def handle(whole: Whole) -> None: ...

    decode = made.routes[0].signature.arguments[0]
    assert decode is not None
    assert decode(delivery({"parts": [{"size": 1}]})) == Whole(parts=[Part(size=1)])


def nothing() -> None: ...
def keyword_only(event: Event, *, client: object) -> None: ...
def anything(*args: object) -> None: ...
def only_defaults(times: int = 3) -> None: ...
def batch_of_one(batch: Batch) -> None: ...
def list_of_events(events: list[Event]) -> None: ...
def unknown_name(event: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def unknown_attribute(event: functools.Nowhere) -> None: ...  # type: ignore[name-defined]


class Opaque:
    pass


def opaque(thing: Opaque) -> None: ...


def syntax_error(event: object) -> None: ...


syntax_error.__annotations__["event"] = "list["


@pytest.mark.parametrize(
    "function",
    [
        nothing,
        keyword_only,
        anything,
        only_defaults,
        batch_of_one,
        list_of_events,
        unknown_name,
        unknown_attribute,
        opaque,
        syntax_error,
        5,
        "app:handle",
        None,
    ],
    ids=lambda function: getattr(function, "__name__", repr(function)),
)
def test_what_cannot_be_a_handler_is_a_config_error(function):
    """Refused at registration, with the reason; never a raw NameError or TypeError."""
    with pytest.raises(ConfigError):
        read_handler(function, {})


def returns_bool(event: Event) -> bool: ...  # type: ignore[empty-body]
def returns_str(event: Event) -> str: ...  # type: ignore[empty-body]
def returns_dict(event: Event) -> dict[str, int]: ...  # type: ignore[empty-body]
def returns_maybe_bool(event: Event) -> Optional[bool]: ...  # noqa: UP045
def returns_int_or_str(event: Event) -> int | str: ...  # type: ignore[empty-body]
async def returns_bare_dict(event: Event) -> dict: ...  # type: ignore[empty-body, type-arg]
async def returns_float(event: Event) -> float: ...  # type: ignore[empty-body]
def returns_bytes(event: Event) -> bytes: ...  # type: ignore[empty-body]
async def generates(event: Event):
    yield 200


@pytest.mark.parametrize(
    "function",
    [
        returns_bool,
        returns_str,
        returns_dict,
        returns_maybe_bool,
        returns_int_or_str,
        returns_bare_dict,
        returns_float,
        returns_bytes,
        generates,
    ],
    ids=lambda function: function.__name__,
)
def test_a_result_that_is_no_verdict_is_refused_at_registration(function):
    """Where the annotation shows it, the mistake is found before the first message."""
    with pytest.raises(ConfigError):
        read_handler(function, {})


def returns_none(event: Event) -> None: ...
def returns_int(event: Event) -> int: ...  # type: ignore[empty-body]
def returns_status(event: Event) -> ConsumerStatus | Outcome | int | None: ...
def returns_object(event: Event) -> object: ...
def returns_whatever(event: Event): ...


@pytest.mark.parametrize(
    "function",
    [returns_none, returns_int, returns_status, returns_object, returns_whatever],
    ids=lambda function: function.__name__,
)
def test_a_result_that_may_be_a_verdict_is_taken(function):
    """Everything a handler may return can be annotated."""
    assert len(read_handler(function, {}).arguments) == 1


# --- batch handlers ------------------------------------------------------------------------------------------


def many_orders(orders: list[Order], batch: Batch) -> None: ...
def many_events(events: list[Event]) -> None: ...
def many_sequence(orders: Sequence[Order]) -> None: ...
def many_bare(orders: list) -> None: ...  # type: ignore[type-arg]
def many_unannotated(orders): ...
def many_with_outcomes(orders: list[Order]) -> list[Outcome]: ...  # type: ignore[empty-body]
def only_batch(batch: Batch) -> None: ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (many_orders, [Order(id=1), None]),
        (many_events, [Event]),
        (many_sequence, [Order(id=1)]),
        (many_bare, [Event]),
        (many_unannotated, [Event]),
        (many_with_outcomes, [Order(id=1)]),
        (only_batch, [None]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_batch_handler_is_read(function, expected):
    """Lists of payloads, decoded one by one; the Batch itself is passed as it is."""
    given_ = delivery({"id": 1})
    got = [None if decode is None else decode(given_) for decode in read_batch_handler(function, {}).arguments]
    assert got == [given_.event if value is Event else value for value in expected]


def one_order(order: Order) -> None: ...
def a_dict(orders: dict[str, Order]) -> None: ...
def batch_returns_bool(orders: list[Order]) -> bool: ...  # type: ignore[empty-body]
def batch_returns_str(orders: list[Order]) -> str: ...  # type: ignore[empty-body]
def batch_returns_dict(orders: list[Order]) -> dict[str, int]: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    "function",
    [one_order, a_dict, nothing, batch_returns_bool, batch_returns_str, batch_returns_dict],
    ids=lambda function: function.__name__,
)
def test_what_cannot_be_a_batch_handler_is_a_config_error(function):
    """A single payload, no payload, or a result that is no verdict."""
    with pytest.raises(ConfigError):
        read_batch_handler(function, {})
