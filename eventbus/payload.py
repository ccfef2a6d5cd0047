"""What a handler is called with: its annotations decide, once, at registration.

`Event`, `Delivery`, `Batch`, `bytes`, `str`, `dict`, `list`, a pydantic model, a dataclass, or any type pydantic
can validate. A body that does not fit raises Undecodable or InvalidPayload before the handler is called.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from eventbus.batch import Batch
from eventbus.errors import ConfigError, InvalidPayload, Undecodable
from eventbus.event import Event, decode, from_json, is_json
from eventbus.settlement import Delivery

Decode = Callable[[Delivery], object]


@dataclass(frozen=True, slots=True)
class Signature:
    """How to call a handler: one decoder per argument; for a batch handler one per element, or None for the Batch."""

    arguments: tuple[Decode | None, ...]
    is_async: bool

    @property
    def read(self) -> Callable[[Delivery], Sequence[object]]:
        """A function from a delivery to all arguments; None stands for the Batch, which is not its own."""
        arguments = self.arguments
        if len(arguments) == 1 and (only := arguments[0]) is not None:
            return lambda delivery: (only(delivery),)  # by far the most
        return lambda delivery: [decode(delivery) if decode else None for decode in arguments]


def read_handler(function: Callable[..., object], names: Mapping[str, object]) -> Signature:
    """The signature of a handler of single events."""
    arguments = []
    for parameter in _parameters(function, names):
        if parameter.annotation is Batch or _is_list_of_known(parameter.annotation):
            raise ConfigError(f"handler {_name(function)}: {parameter.name} is for @service.batch handlers")
        arguments.append(decoder(parameter.annotation))
    _check_result(function, names)
    return Signature(tuple(arguments), is_async(function))


def read_batch_handler(function: Callable[..., object], names: Mapping[str, object]) -> Signature:
    """The signature of a batch handler: lists of payloads, and the Batch."""
    arguments: list[Decode | None] = []
    for parameter in _parameters(function, names):
        if parameter.annotation is Batch:
            arguments.append(None)
            continue
        origin = typing.get_origin(parameter.annotation) or parameter.annotation
        if origin not in (list, Sequence, inspect.Parameter.empty):
            raise ConfigError(f"batch handler {_name(function)}: {parameter.name} must be a list[...] or a Batch")
        element = (*typing.get_args(parameter.annotation), inspect.Parameter.empty)[0]
        arguments.append(decoder(element))
    _check_result(function, names, _NO_BATCH_VERDICT)
    return Signature(tuple(arguments), is_async(function))


def decoder(annotation: object) -> Decode:
    """A function from a delivery to the argument that an annotation asks for."""
    if annotation is Delivery:
        return lambda delivery: delivery
    if annotation is Event or annotation is inspect.Parameter.empty:
        return attrgetter("event")
    if annotation is bytes:
        return lambda delivery: delivery.event.body
    if annotation is str:
        return _text
    if annotation is object or annotation is typing.Any:
        return lambda delivery: delivery.event.data
    origin = typing.get_origin(annotation) or annotation
    if annotation in (dict, list) or (origin is dict and typing.get_args(annotation) in (_PLAIN, (str, typing.Any))):
        return _instance_of(typing.cast("type", origin))
    return _validated(annotation)


_PLAIN = (str, object)


def _text(delivery: Delivery) -> str:
    try:
        return delivery.event.body.decode()
    except UnicodeDecodeError as error:
        raise Undecodable(f"the body is not UTF-8 text: {error}") from error


def _instance_of(kind: type) -> Decode:
    def decode_(delivery: Delivery) -> object:
        value = decode(delivery.event.body, delivery.event.content_type)
        if not isinstance(value, kind):
            raise InvalidPayload(f"expected a JSON {_JSON_NAMES[kind]}, got {_json_name(value)}")
        return value

    return decode_


def _validated(annotation: object) -> Decode:
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

    try:
        adapter: TypeAdapter[object] = TypeAdapter(annotation)  # type: ignore[arg-type]
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ConfigError(
            f"payload type {annotation!r} cannot be validated; annotate with a pydantic model, a dataclass, "
            f"dict, bytes, Event or Delivery ({str(error).splitlines()[0]})"
        ) from error

    def decode_(delivery: Delivery) -> object:
        event = delivery.event
        if event.content_type is not None and not is_json(event.content_type):
            raise InvalidPayload(f"content type {event.content_type} is not JSON; annotate the handler with bytes")
        if event.body:
            # pydantic's own parser takes NaN and repeated keys; ours looks first, so that all payload types agree.
            from_json(event.body)
        try:
            return adapter.validate_json(event.body or b"null")
        except ValidationError as error:
            raise InvalidPayload(_first_errors(error)) from error

    return decode_


def _first_errors(error: object) -> str:
    # The rejected value itself stays out: it may be a secret, and it is in the parked body anyway.
    from pydantic import ValidationError

    assert isinstance(error, ValidationError)
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    texts = [f"{'.'.join(str(step) for step in p['loc']) or 'body'}: {p['msg']}" for p in problems[:5]]
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    return "; ".join(texts) + more


def _parameters(function: Callable[..., object], names: Mapping[str, object]) -> list[inspect.Parameter]:
    signature = _signature(function, names)
    parameters = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    used = [p for p in parameters if p.default is p.empty or p.annotation in (Event, Delivery, Batch)]
    keyword_only = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if not used or keyword_only:
        raise ConfigError(
            f"handler {_name(function)} must take its payload as a plain argument, such as (event: Event)"
        )
    if used != parameters[: len(used)]:
        raise ConfigError(f"handler {_name(function)}: arguments with defaults must come last")
    return used


_NO_VERDICT = (bool, str, bytes, dict, list, tuple, float)
_NO_BATCH_VERDICT = (bool, str, bytes, dict, float)  # a list has one outcome for each event


def _signature(function: Callable[..., object], names: Mapping[str, object]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True, locals=dict(names))
    except NameError as error:
        raise ConfigError(f"handler {_name(function)}: annotation {error.name!r} cannot be found") from error
    except (AttributeError, SyntaxError) as error:
        raise ConfigError(f"handler {_name(function)}: an annotation cannot be read: {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{function!r} is not a handler: {error}") from error


def _check_result(
    function: Callable[..., object], names: Mapping[str, object], refused: tuple[type, ...] = _NO_VERDICT
) -> None:
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"handler {_name(function)} yields; a handler returns its verdict")
    annotation = _signature(function, names).return_annotation
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for member in members:
        if (typing.get_origin(member) or member) in refused:
            raise ConfigError(
                f"handler {_name(function)} returns {member!r}, which is no verdict: return None, an HTTP status, "
                f"a ConsumerStatus or an Outcome (retry(), requeue(), park())"
            )


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_list_of_known(annotation: object) -> bool:
    return typing.get_origin(annotation) is list and typing.get_args(annotation)[0] in (Event, Delivery)


def is_async(function: Callable[..., object]) -> bool:
    """Whether a handler is awaited; a plain one is run in a thread."""
    target = function.func if hasattr(function, "func") else function
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", function))


_JSON_NAMES: dict[type, str] = {dict: "object", list: "array"}


def _json_name(value: object) -> str:
    if value is None:
        return "nothing"
    return {dict: "an object", list: "an array", str: "a text", bool: "a boolean", bytes: "bytes"}.get(
        type(value), "a number"
    )
