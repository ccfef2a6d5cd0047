"""Records and events: to and fro without loss, whatever a stranger sent."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import Event, InvalidEvent, headers
from eventbus.adapter import BodyMapping
from eventbus_kafka import records

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=30)


WHERE = ("wms.main", 2)


@dataclass
class Seen:
    offset: int = 7
    timestamp: int | None = 1_700_000_000_000
    key: bytes | None = None
    value: bytes | None = b"{}"
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)


def _read(record: Seen, *, told: bool = False, mapping: BodyMapping | None = None) -> tuple[Event, dict, str]:
    event = None if told else records.usual(record)
    if event is not None:
        return event, {}, ""
    return records.incoming(record, WHERE, mapping or BodyMapping(), told=told)


@given(
    TEXT.filter(bool), TEXT.filter(bool), TEXT, st.none() | TEXT.filter(bool), st.none() | TEXT, st.binary(max_size=50)
)
def test_an_event_arrives_as_it_was_sent(
    id: str, type: str, source: str, key: str | None, tenant: str | None, body: bytes
) -> None:
    """By the short way and by the long one."""
    sent = Event(type, body, id=id, source=source or "/", key=key, tenant=tenant or None, headers={"a": "b"})
    bare = sent.replace(headers={}, tenant=None)
    for event in (sent, bare, bare.replace(key=None), bare.replace(key=None, content_type="application/json")):
        out = records.outgoing(event, "wms.main")
        record = Seen(key=out.key, value=out.value, headers=list(out.headers))
        assert _read(record) == (event, {}, "")
        assert records.incoming(record, WHERE, BodyMapping(), told=False) == (event, {}, "")


def test_a_strangers_key_is_the_events_key() -> None:
    """Also where all else looks like a message of ours without one."""
    out = records.outgoing(Event("a", {}), "wms.main")
    event, _, _ = _read(Seen(key=b"k", value=out.value, headers=list(out.headers)))
    assert event.key == "k"


def test_headers_may_repeat_and_be_null() -> None:
    """A repeated header is a list, a null one None, bytes that are no text stay bytes."""
    given = [("a", b"1"), ("b", None), ("a", b"2"), ("c", b"\xff"), ("a", b"3")]
    event, _, problem = _read(Seen(headers=given))
    assert (dict(event.headers), problem) == ({"a": ["1", "2", "3"], "b": None, "c": b"\xff"}, "")


def test_a_copy_keeps_everything_to_the_byte() -> None:
    """Key, value and headers in their order; only our own story is changed."""
    given = [("a", b"1"), ("b", None), ("a", b"\xff"), ("x-retries", b"1"), ("ce_id", b"i")]
    record = Seen(key=b"\x00k", value=None, headers=given)
    out = records.copy(record, WHERE, "t", {"x-retries": 2, "x-due-at": None}, told=True)
    assert (out.topic, out.key, out.value) == ("t", b"\x00k", None)
    assert list(out.headers) == [("a", b"1"), ("b", None), ("a", b"\xff"), ("ce_id", b"i"), ("x-retries", b"2")]


def test_a_strangers_past_counts_for_nothing() -> None:
    """Reserved headers on the shared topic are forged; on our own topics they are the message's story."""
    record = Seen(headers=[("x-retries", b"9"), ("x-park-reason", b"p"), ("mine", b"1")])
    event, story, _ = _read(record)
    assert (dict(event.headers), story) == ({"mine": "1"}, {})
    assert all(name != "x-retries" for name, _ in records.copy(record, WHERE, "t", {}, told=False).headers)
    _, story, _ = _read(record, told=True)
    assert headers.read_history(story).retries == 9


def test_a_message_without_an_id_has_its_place_as_one_and_keeps_it() -> None:
    """The id is the same at every attempt and in the dead letter."""
    record = Seen(value=b"plain", headers=[("h", b"1")])
    event, _, _ = _read(record)
    assert (event.id, event.type, event.body) == ("wms.main/2/7", "message", b"plain")
    copy = records.copy(record, WHERE, "t", {}, told=False)
    again = Seen(99, value=copy.value, headers=list(copy.headers))
    assert _read(again, told=True)[0].id == "wms.main/2/7"
    third = records.copy(again, WHERE, "u", {"x-retries": 1}, told=True)
    assert [name for name, _ in third.headers] == ["h", records.ORIGIN, "x-retries"]


def test_a_foreign_message_is_mapped_by_its_body() -> None:
    """`[mapping]` finds type, tenant and key; the record's own key is the key otherwise."""
    mapping = BodyMapping(type="data.kind", tenant="companyId")
    event, _, _ = _read(Seen(key=b"k", value=b'{"kind":"order","companyId":7}'), mapping=mapping)
    assert (event.type, event.tenant, event.key) == ("order", "7", "k")


@pytest.mark.parametrize(
    "headers_",
    [
        [("ce_id", None), ("ce_type", b"t")],
        [("ce_specversion", b"1.0"), ("ce_id", b"i"), ("ce_type", b"t"), ("ce_source", None), ("ce_time", b"x"),
         ("content-type", b"application/json")],
        [("ce_id", b"i"), ("ce_type", b"t"), ("ce_time", b"yesterday")],
        [("content-type", None)],
        [("", b"")],
        [("ce_", b"1")],
    ],
)  # fmt: skip
def test_odd_headers_are_never_an_exception(headers_: list[tuple[str, bytes | None]]) -> None:
    """A message is read as far as it can be."""
    event, _, problem = _read(Seen(headers=headers_))
    assert event.id
    assert not problem


@pytest.mark.parametrize(
    ("timestamp", "year"),
    [(None, 1970), (-1, 1970), (0, 1970), (1_700_000_000_000_000, 9999), (2**63 - 1, 9999), (-(2**63), 1970)],
)
def test_a_time_that_no_calendar_has_is_never_an_exception(timestamp: int | None, year: int) -> None:
    """Records of old formats have none, and a producer that counts microseconds is in the year 55,000."""
    event, _, problem = _read(Seen(timestamp=timestamp))
    assert (event.time.year, problem) == (year, "")
    assert datetime.fromtimestamp(records.written_at(Seen(timestamp=timestamp)), timezone.utc).year == year


def test_a_broken_envelope_is_said_to_be_broken() -> None:
    """It is parked as it is."""
    _, _, problem = _read(Seen(value=b"{", headers=[("content-type", b"application/cloudevents+json")]))
    assert problem


def test_what_is_no_unicode_is_refused() -> None:
    """Half a character cannot be written."""
    with pytest.raises(InvalidEvent):
        records.outgoing(Event("a").rewritten(type="\ud800"), "t")


@pytest.mark.parametrize(
    "body", [b'{"a": 1}', b"{}", b'{ "a": {"b": 1} }  ', b'{"a":"}"}', '{"nome": "João"}'.encode()], ids=repr
)
def test_seed_3s_metadata_goes_in_and_comes_out_to_the_byte(body: bytes) -> None:
    """`dlq_format = "embedded"`: the body has `dlq_metadata`, and a reader of ours sees the body as it was sent."""
    event = Event("order.created", body, time=datetime(2026, 1, 1, tzinfo=timezone.utc))
    story = {headers.FINAL_ERROR: "500: broken", headers.ERROR_TYPE: "ValueError", headers.FINAL_RETRIES: 3}
    story |= {headers.LAST_FAILED_AT: "2026-01-01T00:00:00.000Z", headers.PARKED_AT: "2026-01-01T00:00:01.000Z"}
    plain = records.copy(Seen(value=body, headers=[("ce_id", b"1")]), WHERE, "dlq", story, told=False)
    letter = records.with_metadata(plain, event, "wms-stock")
    assert json.loads(letter.value or b"")["dlq_metadata"] == {
        "original_error": "500: broken",
        "error_type": "ValueError",
        "retry_count": 3,
        "last_failure_timestamp": 1767225600000,
        "dlq_published_at": 1767225601000,
    }
    stored = Seen("dlq", value=letter.value, headers=list(letter.headers))
    assert _read(stored, told=True)[0].body == body
    back = records.copy(stored, WHERE, "wms.retry.wms-stock.0", {}, told=True)
    assert (back.value, [name for name, _ in back.headers if name == records.EMBEDDED]) == (body, [])


@pytest.mark.parametrize("body", [b"", b"[1]", b"no json}", b'{"dlq_metadata": 1}', b'"}"'], ids=repr)
def test_what_is_no_object_keeps_its_body(body: bytes) -> None:
    """The story is in the headers anyway."""
    letter = records.Outgoing("dlq", None, body, [("ce_id", b"1")])
    assert records.with_metadata(letter, Event("a", body), "s") is letter


@pytest.mark.parametrize("mark", [b"", b"x:y", b"1", b"0:99999", b"1:2", b"9" * 40], ids=repr)
def test_a_forged_mark_takes_nothing_out(mark: bytes) -> None:
    """Only what looks like our metadata is cut."""
    assert records.without_metadata(b'{"a": 1}', mark) == b'{"a": 1}'
