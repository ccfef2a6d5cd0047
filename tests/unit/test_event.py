"""The Event: what may be put into one, what comes out, and that it never changes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from eventbus import Event, InvalidEvent, Undecodable
from eventbus import event as event_module
from eventbus.event import BINARY, JSON, decode, encode, from_json, is_json, new_id

WHEN = datetime(2025, 6, 1, 12, 0, tzinfo=timezone.utc)
LONE_SURROGATE = "\ud800"


class Order(BaseModel):
    id: int
    note: str = "é"


class Reading(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    value: float


class Anything(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    value: Any


@dataclasses.dataclass
class Line:
    sku: str
    amount: int


@dataclasses.dataclass
class Basket:
    lines: list[Line]


def test_an_event_gets_an_id_a_time_and_nothing_else():
    """What the publisher leaves out is made up (id, time) or absent."""
    event = Event("order.created")
    assert len(event.id) == 32
    assert int(event.id, 16)
    assert event.time.tzinfo is not None
    assert (event.body, event.content_type, event.data) == (b"", None, None)
    assert (event.key, event.tenant, event.correlation_id, event.process_after, event.expires_at) == (None,) * 5
    assert dict(event.headers) == {}
    assert dict(event.extensions) == {}


def test_ids_are_unique():
    """Ten thousand ids made in the same instant all differ."""
    assert len({new_id() for _ in range(10_000)}) == 10_000


def test_ids_sort_by_time(monkeypatch):
    """An id made later sorts after one made a millisecond before."""
    moments = iter([1_700_000_000.000, 1_700_000_000.001, 1_700_000_001.0, 1_800_000_000.0])
    monkeypatch.setattr(event_module._time, "time", lambda: next(moments))
    ids = [new_id() for _ in range(4)]
    assert ids == sorted(ids)


@pytest.mark.parametrize(
    ("data", "body", "content_type"),
    [
        pytest.param(None, b"", None, id="nothing"),
        pytest.param(b"\x00\xff", b"\x00\xff", BINARY, id="bytes"),
        pytest.param(bytearray(b"ab"), b"ab", BINARY, id="bytearray"),
        pytest.param(memoryview(b"abcd")[::2], b"ac", BINARY, id="memoryview"),
        pytest.param(b"", b"", BINARY, id="no bytes"),
        pytest.param({"a": 1}, b'{"a":1}', JSON, id="dict"),
        pytest.param([1, None, True], b"[1,null,true]", JSON, id="list"),
        pytest.param({}, b"{}", JSON, id="empty dict"),
        pytest.param("é", '"é"'.encode(), JSON, id="text"),
        pytest.param("", b'""', JSON, id="empty text"),
        pytest.param(0, b"0", JSON, id="zero"),
        pytest.param(False, b"false", JSON, id="false"),
        pytest.param(Order(id=1), '{"id":1,"note":"é"}'.encode(), JSON, id="pydantic"),
        pytest.param(
            Basket([Line("a", 1)]), b'{"lines":[{"sku":"a","amount":1}]}', JSON, id="dataclass within a dataclass"
        ),
        pytest.param({"order": Order(id=1)}, '{"order":{"id":1,"note":"é"}}'.encode(), JSON, id="pydantic in a dict"),
        pytest.param({"at": WHEN}, b'{"at":"2025-06-01T12:00:00+00:00"}', JSON, id="datetime"),
        pytest.param([uuid.UUID(int=1)], b'["00000000-0000-0000-0000-000000000001"]', JSON, id="uuid"),
        pytest.param({"s": {1}, "t": (1, 2)}, b'{"s":[1],"t":[1,2]}', JSON, id="set and tuple"),
    ],
)
def test_data_is_written_as(data, body, content_type):
    """Each kind of data has one body and one content type."""
    assert encode(data) == (body, content_type)
    event = Event("a", data)
    assert (event.body, event.content_type) == (body, content_type)


def _circle() -> list[object]:
    circle: list[object] = []
    circle.append(circle)
    return circle


def _deep(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(float("nan"), id="NaN"),
        pytest.param({"a": [float("inf")]}, id="infinity inside"),
        pytest.param(Line("a", float("-inf")), id="infinity in a dataclass"),  # type: ignore[arg-type]
        pytest.param(Reading(value=float("nan")), id="NaN in a pydantic model that writes it"),
        pytest.param(Anything(value=object()), id="pydantic model that cannot be written"),
        pytest.param(Order, id="a pydantic class instead of an instance"),
        pytest.param(object(), id="object"),
        pytest.param({"a": 1j}, id="complex number"),
        pytest.param({(1, 2): 3}, id="tuple as a key"),
        pytest.param(_circle(), id="circle"),
        pytest.param(_deep(10_000), id="10,000 deep"),
        pytest.param(LONE_SURROGATE, id="half a character"),
        pytest.param({LONE_SURROGATE: 1}, id="half a character as a key"),
    ],
)
def test_data_without_a_json_form_is_refused(data):
    """What cannot be written as strict JSON is an InvalidEvent, not a broken message and not another exception."""
    with pytest.raises(InvalidEvent):
        Event("a", data)


@pytest.mark.parametrize(
    ("body", "content_type", "value"),
    [
        pytest.param(b"", JSON, None, id="empty"),
        pytest.param(b"", None, None, id="empty without a type"),
        pytest.param(b'{"a":1}', None, {"a": 1}, id="no type is JSON"),
        pytest.param(b"[1]", "application/json; charset=utf-8", [1], id="parameters"),
        pytest.param(b"[1]", "Application/JSON", [1], id="capital letters"),
        pytest.param(b"[1]", "application/vnd.acme.order+json", [1], id="+json"),
        pytest.param(b"[1]", "text/json", [1], id="text/json"),
        pytest.param("é".encode(), "text/plain", "é", id="text"),
        pytest.param(b"\xff", BINARY, b"\xff", id="binary"),
        pytest.param(b"<a/>", "application/xml", b"<a/>", id="xml stays bytes"),
    ],
)
def test_a_body_is_read_by_its_content_type(body, content_type, value):
    """JSON becomes a value, text a text, everything else stays bytes."""
    assert decode(body, content_type) == value


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"NaN", id="NaN"),
        pytest.param(b'{"a":Infinity}', id="Infinity"),
        pytest.param(b"[-Infinity]", id="-Infinity"),
        pytest.param(b"1e999", id="a number that overflows to infinity"),
        pytest.param(b'{"a":1,"a":1}', id="duplicate keys"),
        pytest.param(b'[{"b":{"a":1,"a":2}}]', id="duplicate keys inside"),
        pytest.param(b"[" * 10_000 + b"]" * 10_000, id="10,000 deep"),
        pytest.param(b'{"a":' * 10_000 + b"1" + b"}" * 10_000, id="10,000 objects deep"),
        pytest.param(b"[" * 100_000, id="100,000 deep and never closed"),
        pytest.param(b'"\xff\xfe"', id="invalid UTF-8"),
        pytest.param(b"\xed\xa0\x80", id="a surrogate in UTF-8"),
        pytest.param(b"\xef\xbb\xbf{}", id="byte order mark"),
        pytest.param(b"{} {}", id="two values"),
        pytest.param(b"{'a':1}", id="single quotes"),
        pytest.param(b"   ", id="only spaces"),
        pytest.param(b"\x00", id="NUL"),
        pytest.param(b"9" * 5000, id="5,000 digits"),
        pytest.param(b'"a\nb"', id="line feed in a text"),
    ],
)
def test_what_is_not_strict_json_is_undecodable(body):
    """Bad JSON is Undecodable with a reason, never another exception and never a guess."""
    with pytest.raises(Undecodable, match=r"JSON|UTF-8"):
        from_json(body)


@given(st.binary(max_size=200))
def test_reading_any_bytes_gives_a_value_or_undecodable(body):
    """No body of bytes makes the JSON reader raise anything but Undecodable."""
    try:
        value = from_json(body)
    except Undecodable:
        return
    assert json.loads(json.dumps(value)) == value


def test_text_that_is_not_utf8_is_undecodable():
    """A text body must be UTF-8."""
    with pytest.raises(Undecodable, match="UTF-8"):
        decode(b"\xff", "text/plain")


@pytest.mark.parametrize("content_type", ["", "json", "application/jsonx", "application/xml", "text/plain", "+json2"])
def test_other_content_types_are_not_json(content_type):
    """Only application/json, text/json and +json are JSON."""
    assert not is_json(content_type)


ATTRIBUTES = ["type", "id", "source", "key", "tenant", "correlation_id"]


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize(
    "value",
    [
        pytest.param("a\r\nx-evil: 1", id="CR LF"),
        pytest.param("a\nb", id="LF"),
        pytest.param("a\x00b", id="NUL"),
        pytest.param("a\x7f", id="DEL"),
        pytest.param("x" * 1025, id="too long"),
        pytest.param(5, id="number"),
        pytest.param(b"a", id="bytes"),
        pytest.param(LONE_SURROGATE, id="half a character"),
    ],
)
def test_a_bad_attribute_is_refused(name, value):
    """Every text attribute is short, whole and without control characters; else InvalidEvent."""
    with pytest.raises(InvalidEvent):
        Event(**({"type": "a"} | {name: value}))


@pytest.mark.parametrize("type", ["", None, 0, ["a"]])
def test_an_event_needs_a_type(type):
    """An empty or missing type is refused."""
    with pytest.raises(InvalidEvent, match="type"):
        Event(type)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_long_unicode_attribute_is_taken(name):
    """1,024 characters of any script are allowed."""
    assert getattr(Event(**({"type": "a"} | {name: "é" * 1024})), name) == "é" * 1024


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"": "x"}, id="empty name"),
        pytest.param({1: "x"}, id="name not text"),
        pytest.param({"a\r\nb": "x"}, id="CR LF in the name"),
        pytest.param({"a\x00": "x"}, id="NUL in the name"),
        pytest.param({"a": "x\r\ny: z"}, id="CR LF"),
        pytest.param({"a": "x\ny"}, id="LF"),
        pytest.param({"a": "x\x00y"}, id="NUL"),
        pytest.param({"a": ["x"]}, id="list"),
        pytest.param({"a": {"b": 1}}, id="dict"),
        pytest.param({"a": object()}, id="object"),
        pytest.param({"a": LONE_SURROGATE}, id="half a character"),
        pytest.param({LONE_SURROGATE: "a"}, id="half a character in the name"),
    ],
)
def test_a_bad_header_is_refused(headers):
    """Header names and values are one line of text, bytes or a number; else InvalidEvent."""
    with pytest.raises(InvalidEvent, match="header"):
        Event("a", headers=headers)


def test_good_headers_are_kept():
    """Text, bytes (whatever is in them), numbers and null are carried as they are."""
    headers = {"text": "é", "bytes": b"a\r\n\x00\xff", "int": 7, "float": 0.5, "bool": True, "null": None}
    assert dict(Event("a", headers=headers).headers) == headers


@pytest.mark.parametrize(
    "content_type",
    ["text/plain\r\nx-evil: 1", "text/plain\x00", 5],
    ids=["CR LF", "NUL", "number"],
)
def test_a_bad_content_type_is_refused(content_type):
    """The content type becomes a header on the way: it is checked like one."""
    with pytest.raises(InvalidEvent):
        Event("a", b"x", content_type=content_type)


@pytest.mark.parametrize(
    "extensions",
    [
        pytest.param({"a": "x\r\ny"}, id="CR LF in the value"),
        pytest.param({"a": 5}, id="value not text"),
        pytest.param({"a\r\nb": "x"}, id="CR LF in the name"),
        pytest.param({"": "x"}, id="empty name"),
        pytest.param({"id": "another"}, id="id again"),
        pytest.param({"type": "another"}, id="type again"),
        pytest.param({"specversion": "9"}, id="specversion"),
        pytest.param({"data": "x"}, id="data"),
    ],
)
def test_a_bad_extension_is_refused(extensions):
    """An extension is one line of text under a name of its own: it cannot forge the event's attributes."""
    with pytest.raises(InvalidEvent):
        Event("a", extensions=extensions)


def test_times_are_reckoned_from_the_events_own_time():
    """A ttl and a relative process_after begin at the event's time."""
    event = Event("a", time=WHEN, ttl=timedelta(days=1), process_after=timedelta(hours=2))
    assert event.expires_at == WHEN + timedelta(days=1)
    assert event.process_after == WHEN + timedelta(hours=2)


def test_a_naive_time_is_local_time():
    """datetime.now() means what its caller means; every time of an event is aware."""
    naive = datetime(2025, 6, 1, 12, 0)
    event = Event("a", time=naive, process_after=naive, expires_at=naive)
    assert event.time == event.process_after == event.expires_at == naive.astimezone()
    assert event.time.tzinfo is not None


def test_expires_at_and_ttl_exclude_each_other():
    """Two answers to one question are refused."""
    with pytest.raises(InvalidEvent, match="not both"):
        Event("a", expires_at=WHEN, ttl=timedelta(1))


@pytest.mark.parametrize(
    "times",
    [
        pytest.param({"ttl": timedelta.max}, id="ttl beyond the calendar"),
        pytest.param({"process_after": timedelta.max}, id="delay beyond the calendar"),
        pytest.param({"expires_at": datetime.min}, id="naive and before the calendar"),
        pytest.param({"expires_at": "2025-06-01"}, id="text"),
        pytest.param({"process_after": 5}, id="number"),
        pytest.param({"ttl": 5}, id="number as ttl"),
        pytest.param({"time": "now"}, id="text as time"),
    ],
)
def test_an_impossible_time_is_refused(times):
    """A time that is none, or that no calendar has, is an InvalidEvent."""
    with pytest.raises(InvalidEvent):
        Event("a", **times)


@pytest.mark.parametrize("name", sorted(inspect.get_annotations(Event.__base__)))
def test_no_attribute_can_be_set_or_deleted(name):
    """An event is never changed."""
    event = Event("a", 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, name, "x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(event, name)


@pytest.mark.parametrize("name", ["headers", "extensions"])
def test_what_the_publisher_passed_can_change_without_the_event(name):
    """The event keeps its own copy of a mapping."""
    mine = {"a": "1"}
    event = Event("a", **{name: mine})
    mine["a"] = "2"
    assert dict(getattr(event, name)) == {"a": "1"}


@pytest.mark.parametrize("name", ["headers", "extensions"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda event: event, id="published"),
        pytest.param(lambda event: event.replace(key="k"), id="replaced"),
        pytest.param(lambda event: pickle.loads(pickle.dumps(event)), id="unpickled"),
        pytest.param(lambda event: event.replace(headers={"a": "1"}, extensions={"a": "1"}), id="replaced mappings"),
    ],
)
def test_the_mappings_of_an_event_cannot_be_written(name, make):
    """Headers and extensions are shared by all services of a bus in memory: nobody writes into them."""
    event = make(Event("a", headers={"a": "1"}, extensions={"a": "1"}))
    with pytest.raises(TypeError):
        getattr(event, name)["a"] = "2"


def test_a_bytearray_is_copied():
    """Changing the buffer after publishing does not change the event."""
    buffer = bytearray(b"ab")
    event = Event("a", buffer)
    buffer[0] = 0
    assert event.body == b"ab"


def test_decoded_data_is_fresh_each_time():
    """What one handler does to the data another does not see."""
    event = Event("a", {"a": []})
    event.data["a"].append(1)  # type: ignore[index]
    assert event.data == {"a": []}


def test_replace_keeps_everything_else():
    """A copy differs in what was asked for, and nothing else."""
    event = Event("a", {"x": 1}, key="k", tenant="t", headers={"h": 1}, time=WHEN)
    copied = event.replace(tenant="u")
    assert copied.tenant == "u"
    assert copied.replace(tenant="t") == event
    with pytest.raises(TypeError, match="no attribute 'data'"):
        event.replace(data=1)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_copies_are_equal(clone):
    """Copies, also those that went through another process, are equal and hash alike."""
    event = Event("a", {"x": 1}, key="k", headers={"h": b"1"}, extensions={"e": "1"}, ttl=timedelta(1))
    assert clone(event) == event
    assert hash(clone(event)) == hash(event)


def test_events_differ_by_any_attribute():
    """Equality looks at everything, and a stranger is never equal."""
    event = Event("a", time=WHEN, id="1")
    assert event == Event("a", time=WHEN, id="1")
    assert event != event.replace(body=b"x")
    assert event != "a"


def test_the_repr_shows_no_data():
    """Payloads may hold secrets: the repr gives only their size."""
    assert repr(Event("a", {"password": "hunter2"}, id="1")) == "Event(type='a', id='1', source='', 22 bytes)"


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_json_data_comes_back_as_it_was(value):
    """Data goes through the body unchanged."""
    assert Event("a", value).data == value
