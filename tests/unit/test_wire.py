"""CloudEvents on the wire: binary, structured, foreign and broken messages."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import BodyMapping, Event, Undecodable, wire
from eventbus.event import JSON

WHEN = datetime(2025, 6, 1, 12, 0, tzinfo=timezone.utc)
ENVELOPE = {"specversion": "1.0", "id": "1", "type": "order.created", "source": "/wms"}
PLAIN = BodyMapping()


def from_binary(event: Event) -> Event:
    return wire.decode(
        dict(wire.attributes(event)), event.headers, event.body, event.content_type, fallback_id="x", mapping=PLAIN
    )


def from_structured(body: bytes | dict[str, object], content_type: str = wire.STRUCTURED, **headers: object) -> Event:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return wire.decode({}, headers, data, content_type, fallback_id="x", fallback_time=WHEN, mapping=PLAIN)


def foreign(body: bytes, mapping: BodyMapping = PLAIN, attrs: dict[str, str] | None = None, **more: object) -> Event:
    arguments = {"fallback_id": "fallback", "fallback_time": WHEN} | more
    headers = arguments.pop("headers", {})
    return wire.decode(attrs or {}, headers, body, None, mapping=mapping, **arguments)  # type: ignore[arg-type]


LINE = st.text(
    st.characters(codec="utf-8", exclude_characters=[chr(c) for c in (*range(32), 127)]), min_size=1, max_size=30
)
INSTANTS = st.datetimes(timezones=st.just(timezone.utc))
EVENTS = st.builds(
    Event,
    LINE,
    st.binary(max_size=100),
    id=LINE,
    source=LINE,
    time=INSTANTS,
    key=st.none() | LINE,
    tenant=st.none() | LINE,
    correlation_id=st.none() | LINE,
    process_after=st.none() | INSTANTS,
    expires_at=st.none() | INSTANTS,
    headers=st.dictionaries(LINE, LINE | st.binary(max_size=10) | st.integers(), max_size=3),
    extensions=st.dictionaries(st.sampled_from(["traceparent", "tracestate", "sequence"]), LINE, max_size=3),
    content_type=st.sampled_from([None, "application/octet-stream", "text/plain", "application/avro"]),
)


@given(EVENTS)
def test_binary_mode_round_trip(event):
    """Body to the byte and every attribute come back, whatever script they are written in."""
    assert from_binary(event) == event


@given(EVENTS)
def test_structured_mode_round_trip(event):
    """The same through one JSON object; headers travel beside it."""
    body = wire.to_structured(event)
    read = from_structured(body)
    assert read.replace(headers=event.headers) == event


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_json_data_in_structured_mode(value):
    """JSON data stands in the envelope as JSON, and comes back equal."""
    event = Event("a", value, source="/wms")
    envelope = json.loads(wire.to_structured(event))
    assert "data_base64" not in envelope
    assert from_structured(json.dumps(envelope).encode()).data == value


@pytest.mark.parametrize("body", [b"not json", b"\xff", b"NaN", b'{"a":1,"a":2}', b"[" * 5000])
def test_a_body_that_only_claims_to_be_json_is_carried_as_bytes(body):
    """Nothing is changed and nothing raises when an event with a bad body is written in structured mode."""
    event = Event.from_wire("1", "a", "/wms", WHEN, body, JSON)
    envelope = json.loads(wire.to_structured(event))
    assert base64.b64decode(str(envelope["data_base64"])) == body
    assert from_structured(json.dumps(envelope).encode()).body == body


def test_attributes_in_binary_mode():
    """The names are CloudEvents' own, or its registry's; what is absent is left out."""
    event = Event(
        "a",
        id="1",
        source="/wms",
        time=WHEN,
        key="k",
        tenant="t",
        correlation_id="c",
        process_after=WHEN,
        expires_at=WHEN,
        extensions={"traceparent": "00"},
    )
    assert dict(wire.attributes(event)) == {
        "specversion": "1.0",
        "id": "1",
        "type": "a",
        "source": "/wms",
        "time": "2025-06-01T12:00:00Z",
        "partitionkey": "k",
        "tenant": "t",
        "correlationid": "c",
        "processafter": "2025-06-01T12:00:00+00:00",
        "expirytime": "2025-06-01T12:00:00+00:00",
        "traceparent": "00",
    }
    assert set(dict(wire.attributes(Event("a")))) == {"specversion", "id", "type", "source", "time"}


@pytest.mark.parametrize(
    ("envelope", "body", "content_type"),
    [
        pytest.param({}, b"", None, id="no data"),
        pytest.param({"data": None}, b"", None, id="null data"),
        pytest.param({"data": {"a": 1}}, b'{"a":1}', JSON, id="object"),
        pytest.param({"data": "é"}, '"é"'.encode(), JSON, id="text without a type is JSON"),
        pytest.param({"data": "é", "datacontenttype": "text/plain"}, "é".encode(), "text/plain", id="plain text"),
        pytest.param({"data": "<a/>", "datacontenttype": "application/xml"}, b"<a/>", "application/xml", id="xml"),
        pytest.param({"data": "é", "datacontenttype": JSON}, '"é"'.encode(), JSON, id="JSON text"),
        pytest.param({"data": 0}, b"0", JSON, id="zero"),
        pytest.param({"data": False}, b"false", JSON, id="false"),
        pytest.param({"data_base64": "AP8="}, b"\x00\xff", None, id="bytes"),
        pytest.param({"data_base64": ""}, b"", None, id="no bytes"),
        pytest.param({"data_base64": None}, b"", None, id="null data_base64 is absent"),
        pytest.param({"data_base64": None, "data": 1}, b"1", JSON, id="null data_base64 beside data"),
    ],
)
def test_data_of_a_structured_event(envelope, body, content_type):
    """Each way to carry data in an envelope gives one body and one content type."""
    event = from_structured(ENVELOPE | envelope)
    assert (event.body, event.content_type) == (body, content_type)


@pytest.mark.parametrize(
    "content_type",
    ["application/cloudevents+json", "application/cloudevents+json; charset=utf-8", "Application/CloudEvents+JSON"],
)
def test_structured_mode_is_known_by_its_content_type(content_type):
    """Parameters and capital letters do not matter."""
    assert from_structured(ENVELOPE, content_type).id == "1"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'"x"', id="text"),
        pytest.param(b"not json", id="not JSON"),
        pytest.param(b"\xff\xfe", id="invalid UTF-8"),
        pytest.param(b'{"id":"1","id":"2","type":"a","source":"/"}', id="duplicate keys"),
        pytest.param(b"[" * 10_000, id="10,000 deep"),
        pytest.param(json.dumps({**ENVELOPE, "id": ""}).encode(), id="empty id"),
        pytest.param(json.dumps({**ENVELOPE, "id": 1}).encode(), id="id a number"),
        pytest.param(json.dumps({"id": "1", "source": "/"}).encode(), id="no type"),
        pytest.param(json.dumps({"id": "1", "type": "a"}).encode(), id="no source"),
        pytest.param(json.dumps({**ENVELOPE, "data": 1, "data_base64": "AA=="}).encode(), id="data twice"),
        pytest.param(json.dumps({**ENVELOPE, "data_base64": "A"}).encode(), id="broken base64"),
        pytest.param(json.dumps({**ENVELOPE, "data_base64": "é==="}).encode(), id="base64 of letters"),
        pytest.param(json.dumps({**ENVELOPE, "data_base64": 1234}).encode(), id="base64 a number"),
        pytest.param(json.dumps({**ENVELOPE, "data_base64": ["AAAA"]}).encode(), id="base64 a list"),
        pytest.param(json.dumps({**ENVELOPE, "datacontenttype": 5}).encode(), id="content type a number"),
        pytest.param(json.dumps({**ENVELOPE, "data": "\ud800"}).encode(), id="half a character in data"),
        pytest.param(
            json.dumps({**ENVELOPE, "data": "\ud800", "datacontenttype": "text/plain"}).encode(),
            id="half a character in a text",
        ),
        pytest.param(json.dumps({**ENVELOPE, "data": {"\udfff": 1}}).encode(), id="half a character in a key"),
        pytest.param(json.dumps({**ENVELOPE, "id": "\ud800"}).encode(), id="half a character in the id"),
        pytest.param(json.dumps(ENVELOPE).encode()[:-1] + b',"data":1e999}', id="a number that overflows"),
        pytest.param(json.dumps(ENVELOPE).encode()[:-1] + b',"data":NaN}', id="NaN"),
    ],
)
def test_a_broken_structured_event_is_undecodable(body):
    """A message that claims to be a CloudEvent and is none: Undecodable, never another exception."""
    with pytest.raises(Undecodable):
        from_structured(body)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)


@given(
    st.dictionaries(
        st.sampled_from(
            ["id", "type", "source", "time", "data", "data_base64", "datacontenttype", "expirytime", "ext"]
        ),
        SCALARS | st.lists(SCALARS, max_size=2) | st.sampled_from(["1", "AA==", "text/plain", "9999-12-31T23:59:59Z"]),
    ),
    st.none() | st.integers(0, 10**12) | st.text(max_size=5) | st.binary(max_size=5),
)
def test_any_envelope_is_an_event_or_undecodable(envelope, delay):
    """No envelope of any values, under any delay header, makes decode raise anything but Undecodable."""
    body = json.dumps({"id": "1", "type": "a", "source": "/"} | envelope).encode()
    try:
        event = from_structured(body, **{wire.PROCESS_AFTER_DELAY: delay})
    except Undecodable:
        return
    assert isinstance(event.body, bytes)
    assert event.time.tzinfo is not None


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("2025-06-01T12:00:00Z", WHEN),
        ("2025-06-01T14:00:00+02:00", WHEN),
        ("2025-06-01T12:00:00", WHEN),
        ("yesterday", None),
        ("", None),
        ("2025-13-01T00:00:00Z", None),
    ],
)
def test_a_bad_time_counts_as_absent(time, expected):
    """An event is not undecodable for a time that cannot be read: the broker's own is taken."""
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    attrs = {"id": "1", "type": "a", "time": time, "expirytime": time, "processafter": time}
    event = wire.decode(attrs, {}, b"", None, fallback_id="x", fallback_time=now, mapping=PLAIN)
    assert event.time == (expected or now)
    assert event.expires_at == expected
    assert event.process_after == expected


# --- foreign messages ----------------------------------------------------------------------------------------


def test_plain_json_is_not_undecodable():
    """Every seed publishes plain JSON: id, type and time come from the broker."""
    event = foreign(b'{"a":1}', fallback_type="order.created")
    assert (event.id, event.type, event.time, event.data) == ("fallback", "order.created", WHEN, {"a": 1})


@pytest.mark.parametrize(
    ("attrs", "fallback_type", "expected"),
    [
        ({"type": "from.amqp"}, "routing.key", "from.amqp"),
        ({}, "routing.key", "routing.key"),
        ({}, "", "message"),
        ({"id": "1"}, "", "message"),
    ],
)
def test_the_type_of_a_foreign_message(attrs, fallback_type, expected):
    """AMQP's type, else the routing key, else default_type."""
    assert foreign(b"{}", attrs=attrs, fallback_type=fallback_type).type == expected


def test_a_foreign_message_always_has_an_id():
    """Without any id at all it gets one of ours."""
    assert len(foreign(b"", fallback_id="").id) == 32


COMPANY = BodyMapping(id="data.job.id", type="kind", key="data.account", tenant="data.companyId")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            {"job": {"id": 7}, "kind": "mail", "account": "a", "companyId": "acme"},
            ("7", "mail", "a", "acme"),
            id="all there",
        ),
        pytest.param({"companyId": ""}, ("fallback", "message", None, None), id="empty text is absent"),
        pytest.param({"companyId": True}, ("fallback", "message", None, None), id="a boolean is no tenant"),
        pytest.param({"companyId": 1.5}, ("fallback", "message", None, None), id="a fraction is no tenant"),
        pytest.param({"companyId": None}, ("fallback", "message", None, None), id="null"),
        pytest.param({"companyId": {"a": 1}}, ("fallback", "message", None, None), id="object"),
        pytest.param({"job": [1]}, ("fallback", "message", None, None), id="a list on the way"),
        pytest.param({"job": "x"}, ("fallback", "message", None, None), id="a text on the way"),
        pytest.param([], ("fallback", "message", None, None), id="no object at all"),
    ],
)
def test_mapping_takes_attributes_from_the_body(body, expected):
    """[mapping] finds id, type, key and tenant where they are; what is not usable counts as absent."""
    event = foreign(json.dumps(body).encode(), COMPANY)
    assert (event.id, event.type, event.key, event.tenant) == expected


@pytest.mark.parametrize("body", [b"", b"\xff", b"not json", b"[" * 10_000, b'{"a":1,"a":1}', b"NaN"])
def test_a_body_that_cannot_be_mapped_is_left_to_the_handler(body):
    """A foreign message is never undecodable by itself: its body is untouched."""
    event = foreign(body, COMPANY)
    assert (event.id, event.tenant, event.body) == ("fallback", None, body)


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [
        (5000, 5000),
        ("5000", 5000),
        (b"5000", 5000),
        (0, 0),
        ("", None),
        ("-5", None),
        (-5, None),
        (1.5, None),
        ("soon", None),
        ("٣", None),
        (b"\xff", None),
        (None, None),
        (True, None),
        ([], None),
        (10**13, None),
        ("9" * 5000, None),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_process_after_delay_ms(value, milliseconds):
    """Seed 4's header is whole milliseconds from the message's time; a bad one counts as absent."""
    due = wire.delay_header({wire.PROCESS_AFTER_DELAY: value}, WHEN)
    assert due == (None if milliseconds is None else WHEN + timedelta(milliseconds=milliseconds))


def test_process_after_of_the_event_goes_before_the_header():
    """An attribute of its own says more than seed 4's header."""
    attrs = {"id": "1", "type": "a", "processafter": WHEN.isoformat()}
    event = wire.decode(attrs, {wire.PROCESS_AFTER_DELAY: 10**6}, b"", None, fallback_id="x", mapping=PLAIN)
    assert event.process_after == WHEN


def test_a_delay_beyond_the_calendar_counts_as_absent():
    """An event of the year 9999 with a delay on top is decoded, not an OverflowError."""
    attrs = {"id": "1", "type": "a", "time": "9999-12-31T23:59:59Z"}
    event = wire.decode(attrs, {wire.PROCESS_AFTER_DELAY: 10**11}, b"", None, fallback_id="x", mapping=PLAIN)
    assert event.process_after is None


def test_a_stand_in_for_what_cannot_be_decoded():
    """Enough to park it: id, headers and body untouched."""
    event = wire.unreadable({"h": 1}, b"\xff", wire.STRUCTURED, id="7", time=WHEN)
    assert (event.id, event.type, event.body, dict(event.headers)) == ("7", "undecodable", b"\xff", {"h": 1})


# --- the official package ------------------------------------------------------------------------------------


def test_the_official_sdk_reads_our_structured_mode():
    """What we write, CloudEvents' own Python package accepts and understands."""
    from cloudevents.core.formats.json import JSONFormat
    from cloudevents.core.v1.event import CloudEvent

    event = Event("order.created", {"é": [1]}, source="/wms", key="k", tenant="t", ttl=timedelta(1), time=WHEN)
    theirs = JSONFormat().read(CloudEvent, wire.to_structured(event))
    assert (theirs.get_id(), theirs.get_type(), theirs.get_source()) == (event.id, event.type, event.source)
    assert theirs.get_time() == event.time
    assert theirs.get_data() == {"é": [1]}
    assert theirs.get_extension("partitionkey") == "k"
    assert theirs.get_extension("tenant") == "t"


@pytest.mark.parametrize("data", [{"é": [1, None]}, "text", b"\x00\xff", None], ids=["JSON", "text", "bytes", "none"])
def test_we_read_the_official_sdks_structured_mode(data):
    """What CloudEvents' own Python package writes, we read."""
    from cloudevents.core.formats.json import JSONFormat
    from cloudevents.core.v1.event import CloudEvent

    attributes = {"id": "1", "type": "order.created", "source": "/wms", "time": WHEN, "partitionkey": "k"}
    if isinstance(data, bytes):
        attributes["datacontenttype"] = "application/octet-stream"
    written = JSONFormat().write(CloudEvent(attributes, data))
    event = from_structured(written if isinstance(written, bytes) else written.encode())
    assert (event.id, event.type, event.source, event.time, event.key) == ("1", "order.created", "/wms", WHEN, "k")
    assert event.data == data


def test_the_official_sdk_reads_our_binary_mode():
    """Our attributes behind `ce_` are a Kafka CloudEvent to its package."""
    from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event

    event = Event("order.created", b"\x00\xff", source="/wms", key="k", time=WHEN)
    headers = {f"ce_{name}": text.encode() for name, text in wire.attributes(event)}
    headers["content-type"] = b"application/octet-stream"
    theirs = from_binary_event(KafkaMessage(headers=headers, key=b"k", value=event.body))
    assert (theirs.get_id(), theirs.get_type(), theirs.get_time()) == (event.id, event.type, event.time)
    assert theirs.get_data() == b"\x00\xff"
