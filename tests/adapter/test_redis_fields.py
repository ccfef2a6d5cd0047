"""Events to stream fields and back; messages of strangers; the driver's errors. No server needed."""

from __future__ import annotations

import inspect
import json
from datetime import datetime, timedelta, timezone

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions

from eventbus.adapter import BodyMapping
from eventbus.errors import BrokerError, InvalidEvent
from eventbus.event import Event
from eventbus_redis import _errors, fields

ID = b"1700000000000-0"
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
HEADERS = st.dictionaries(
    PLAIN.filter(bool), st.one_of(PLAIN, st.binary(max_size=20), st.integers(-(2**60), 2**60), st.none()), max_size=4
)


@given(
    body=st.binary(max_size=200),
    key=st.none() | PLAIN,
    tenant=st.none() | PLAIN,
    headers=HEADERS,
    after=st.none() | st.datetimes(timezones=st.just(timezone.utc)),
)
def test_whatever_is_published_arrives(
    body: bytes, key: str | None, tenant: str | None, headers: dict[str, object], after: datetime | None
) -> None:
    """Every attribute, header and byte survives the way into fields and back."""
    headers.pop("processAfterDelayMs", None)
    event = Event("a.b", body, key=key, tenant=tenant, headers=headers, process_after=after, extensions={"x": "y"})
    written = fields.encode(event)
    found, story, problem, taken = fields.decode(ID, written, BodyMapping())
    assert found == event
    assert unpacked(event) == written
    assert (story, problem, taken) == ({}, "", 1700000000.0)


def unpacked(event: Event) -> list[bytes]:
    """What Redis makes of a packed event: its fields, without their number."""
    number, packed = fields.pack(event)
    reader = hiredis.Reader()
    reader.feed(b"*%d\r\n%b" % (number, packed))
    count, *found = reader.gets()
    assert (int(count), number) == (len(found), len(found) + 1)
    return found


@given(data=st.none() | PLAIN | st.binary(), id=PLAIN.filter(bool), source=PLAIN)
def test_a_plain_event_is_packed_as_it_is_written(data: object, id: str, source: str) -> None:
    """The short way for what nearly every event looks like says the same as the long one."""
    event = Event("order.created", data, id=id, source=source)
    assert unpacked(event) == fields.encode(event)


@pytest.mark.parametrize("wrong", [{"key": "\ud800"}, {"source": "\ud800"}])
def test_what_is_no_unicode_is_refused(wrong: dict[str, object]) -> None:
    """A lone surrogate has no UTF-8."""
    event = Event("a", {"n": 1}).rewritten(**wrong)
    for write in (fields.encode, fields.pack):
        with pytest.raises(InvalidEvent):
            write(event)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ([b"data", b'{"a":1}'], ("1700000000000-0", "message", b'{"a":1}', {})),
        ([b"payload", b"x", b"lang", b"pt"], ("1700000000000-0", "message", b"x", {"lang": "pt"})),
        ([b"type", b"order.created", b"body", b"\xff"], ("1700000000000-0", "order.created", b"\xff", {})),
        ([b"data", b"x", b"raw", b"\xff\xfe"], ("1700000000000-0", "message", b"x", {"raw": b"\xff\xfe"})),
        ([b"a", b"1", b"b", b"2"], ("1700000000000-0", "message", b'{"a": "1", "b": "2"}', {})),
        ([b"data", b"x", fields.ORIGIN, b"5-1", fields.STORY, b"{}"], ("5-1", "message", b"x", {})),
        ([], ("1700000000000-0", "message", b"{}", {})),
    ],
    ids=["data", "payload", "type", "bytes", "fields", "copied", "empty"],
)
def test_messages_of_strangers_are_read(entry: list[bytes], expected: tuple[object, ...]) -> None:
    """Without CloudEvents attributes the stream id is the id, and the body is where others put it."""
    event, _, problem, _ = fields.decode(ID, entry, BodyMapping())
    assert (event.id, event.type, event.body, dict(event.headers)) == expected
    assert problem == ""


def test_a_mapping_takes_attributes_from_the_body() -> None:
    """[mapping] works on Redis as everywhere."""
    body = json.dumps({"companyId": "acme", "jobId": 7}).encode()
    event, _, _, _ = fields.decode(ID, [b"data", body], BodyMapping(tenant="data.companyId", id="jobId"))
    assert (event.tenant, event.id) == ("acme", "7")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 5000, b'{"a": {"time": "no"}}'])
def test_a_malformed_story_counts_as_absent(text: bytes) -> None:
    """Whatever stands in the reserved field, reading it raises nothing."""
    _, story, problem, _ = fields.decode(ID, [*fields.encode(Event("a")), fields.STORY, text], BodyMapping())
    assert (story, problem) == ({}, "")


@given(st.lists(st.binary(max_size=30), max_size=12))
def test_no_entry_can_break_the_reader(entry: list[bytes]) -> None:
    """Any fields at all give an event, even an odd number of them."""
    event, _, _, _ = fields.decode(ID, entry, BodyMapping())
    assert event.id


@given(st.sampled_from(["id", "type", "time", "source", "headers", "extensions", "expirytime"]), st.binary(max_size=30))
def test_no_attribute_can_break_the_reader(name: str, value: bytes) -> None:
    """Garbage in one of our own fields is read as well as it can be."""
    entry = fields.encode(Event("a"))
    event, _, _, _ = fields.decode(ID, [*entry, name.encode(), value], BodyMapping())
    assert event.time.tzinfo is not None


def test_a_delay_header_is_read() -> None:
    """Seed 4's processAfterDelayMs."""
    event = Event("a", headers={"processAfterDelayMs": "1500"})
    found, _, _, _ = fields.decode(ID, fields.encode(event), BodyMapping())
    assert found.process_after == event.time + timedelta(seconds=1.5)


ERRORS = [
    kind for _, kind in inspect.getmembers(exceptions, inspect.isclass) if issubclass(kind, exceptions.RedisError)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_of_the_driver_becomes_one_of_ours(kind: type[Exception]) -> None:
    """None is left out, new ones of a new redis-py included; secrets do not come along."""
    error = kind.__new__(kind)
    Exception.__init__(error, "redis://ana:hunter2@host went wrong")
    with pytest.raises(BrokerError) as caught, _errors.translated("host:1"):
        raise error
    assert "host:1" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (exceptions.ResponseError("NOGROUP No such key"), _errors.NoGroup),
        (exceptions.ResponseError("Error running script: @user_script: 8: NOGROUP No such"), _errors.NoGroup),
        (exceptions.OutOfMemoryError("OOM command not allowed"), _errors.MemoryFull),
        (exceptions.ResponseError("@user_script: 1: OOM command not allowed when"), _errors.MemoryFull),
        (exceptions.ResponseError("WRONGTYPE"), _errors.Refused),
        (exceptions.NoPermissionError("NOPERM"), _errors.Refused),
        (exceptions.ConnectionError("gone"), _errors.FateUnknown),
        (exceptions.TimeoutError("late"), _errors.FateUnknown),
        (ConnectionResetError(), _errors.FateUnknown),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:30],
)
def test_what_happened_is_told_apart(error: Exception, expected: type[Exception]) -> None:
    """Refused is nothing done; unknown is maybe; a missing group and a full memory have answers of their own."""
    with pytest.raises(expected), _errors.translated("host:1"):
        raise error
