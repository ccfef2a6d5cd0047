"""Requests as the CloudEvents HTTP binding has them, decoded by the official package; and which headers pass."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from hypothesis import given
from hypothesis import strategies as st

from eventbus.event import Event
from eventbus.forward.cloudevents_http import MODES, build
from eventbus.settlement import Delivery, History

TIME = datetime(2025, 6, 1, 12, 0, 0, 123456, tzinfo=timezone.utc)


def delivery(event: Event, **values) -> Delivery:
    return Delivery(event, "wms-cincout", "wms.queue.wms-cincout", **values)


def foreign(headers: dict, mode: str = "binary") -> dict[str, str]:
    """What a delivery with these broker headers sends beyond one without them."""
    event = Event.from_wire("1", "t", "/", TIME, b"{}", "application/json", headers=headers)
    bare = dict(build(delivery(event.replace(headers={})), mode)[0])
    return {name: value for name, value in build(delivery(event), mode)[0] if bare.get(name) != value}


def order(**values) -> Event:
    defaults = {"id": "o-1", "source": "/wms/über uns", "time": TIME, "key": "k%1", "tenant": 'a "b"'}
    return Event("order.created", {"n": 1.5, "name": "Müller"}, **(defaults | values))


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_the_official_package_reads_the_event(mode):
    """Every attribute and the data arrive, however they are spelled."""
    event = order(
        correlation_id="c ☃",
        process_after=timedelta(hours=1),
        extensions={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "shard": "7 %"},
    )
    headers, body = build(delivery(event), mode)
    read = from_http_event(HTTPMessage(dict(headers), body))
    assert (read.get_id(), read.get_type(), read.get_source()) == ("o-1", "order.created", "/wms/über uns")
    assert read.get_time() == TIME
    assert read.get_datacontenttype() == "application/json"
    assert read.get_data() == {"n": 1.5, "name": "Müller"}
    extensions = {name: read.get_extension(name) for name in ("partitionkey", "tenant", "correlationid", "shard")}
    assert extensions == {"partitionkey": "k%1", "tenant": 'a "b"', "correlationid": "c ☃", "shard": "7 %"}
    assert dict(headers)["traceparent"] == event.extensions["traceparent"]


def test_binary_mode_leaves_the_body_untouched():
    """Bytes in, the same bytes out, with their content type."""
    event = Event("t", b'{"a" : 1.10}\n', content_type="application/json; charset=utf-8", source="/")
    headers, body = build(delivery(event))
    assert body == b'{"a" : 1.10}\n'
    assert dict(headers)["content-type"] == "application/json; charset=utf-8"


def test_attributes_are_escaped_as_the_binding_says():
    """Space, double quote, percent and what is not ASCII; nothing else."""
    headers = dict(build(delivery(Event("t", id="a b\"c%d~é!'/", source="/")))[0])
    assert headers["ce-id"] == "a%20b%22c%25d~%C3%A9!'/"
    assert headers["idempotency-key"] == headers["ce-id"]
    assert headers["ce-specversion"] == "1.0"


@pytest.mark.parametrize("body", [b'{"a" : 1.10, "big": 1e40}', b"[1]", b'"text"', b"0", b" null "])
def test_structured_mode_keeps_json_to_the_letter(body):
    """Numbers are not decoded and written again: 1.10 stays 1.10."""
    headers, sent = build(delivery(Event("t", body, content_type="application/json", source="/")), "structured")
    assert dict(headers)["content-type"] == "application/cloudevents+json"
    assert not any(name.startswith("ce-") for name, _ in headers)
    assert body in sent
    assert json.loads(sent)["data"] == json.loads(body)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(b"\x00\xff", "application/octet-stream"), (b"{broken", "application/json"), (b'{"a":1,"a":2}', None)],
)
def test_structured_mode_carries_anything_else_as_base64(body, content_type):
    """What is not JSON, whatever it says it is, arrives as the bytes it was."""
    event = Event.from_wire("1", "t", "/", TIME, body, content_type)
    headers, sent = build(delivery(event), "structured")
    assert from_http_event(HTTPMessage(dict(headers), sent)).get_data() == body


def test_an_event_without_data_is_sent_without_a_body():
    """No body, no content type, in binary mode; no data in structured mode."""
    headers, body = build(delivery(Event("t", source="/")))
    assert body == b""
    assert "content-type" not in dict(headers)
    assert "data" not in json.loads(build(delivery(Event("t", source="/")), "structured")[1])


def test_raw_mode_sends_the_body_alone():
    """No CloudEvents headers; attempt and idempotency key stay."""
    headers, body = build(delivery(order()), "raw")
    names = {name for name, _ in headers}
    assert body == order().body
    assert not any(name.startswith("ce-") for name in names)
    assert {"content-type", "idempotency-key", "x-eventbus-attempt"} <= names


@pytest.mark.parametrize(
    ("body", "expected"), [(b'{"id": 1}', "application/json"), (b"[1]", "application/json"), (b"\x01\x02", None)]
)
def test_plain_json_of_a_broker_without_content_types_is_named(body, expected):
    """Kafka and Redis say nothing; a web framework parses only what is called JSON."""
    headers, _ = build(delivery(Event.from_wire("1", "t", "", TIME, body)))
    assert dict(headers).get("content-type") == expected


@pytest.mark.parametrize("mode", MODES)
def test_the_endpoint_is_told_the_attempt(mode):
    """Number, maximum, whether it is the last, and for which service."""
    first = dict(build(delivery(order(), max_attempts=3), mode)[0])
    last = dict(build(delivery(order(), max_attempts=3, history=History(retries=2)), mode)[0])
    unknown = dict(build(delivery(order()), mode)[0])
    assert (first["x-eventbus-attempt"], first["x-eventbus-max-attempts"]) == ("1", "3")
    assert (first["x-eventbus-last-attempt"], last["x-eventbus-last-attempt"]) == ("false", "true")
    assert last["x-eventbus-attempt"] == "3"
    assert first["x-eventbus-service"] == "wms-cincout"
    assert first["idempotency-key"] == "o-1"
    assert "x-eventbus-max-attempts" not in unknown


@pytest.mark.parametrize(
    ("name", "value", "sent"),
    [
        ("X-Customer", "7", ("x-customer", "7")),
        ("x-count", 7, ("x-count", "7")),
        ("x-share", 0.5, ("x-share", "0.5")),
        ("x-flag", True, ("x-flag", "true")),
        ("x-kafka", b"text", ("x-kafka", "text")),
        ("x-padded", "  a b ", ("x-padded", "a b")),
        ("traceparent", "00-ab-cd-01", ("traceparent", "00-ab-cd-01")),
        ("b3", "1", ("b3", "1")),
    ],
)
def test_a_safe_broker_header_passes(name, value, sent):
    """Text and numbers under a plain name."""
    assert foreign({name: value}) == dict([sent])


@pytest.mark.parametrize(
    "name",
    [
        *("Host", "Content-Length", "Content-Type", "Content-Encoding", "Transfer-Encoding", "TE", "Trailer"),
        *("Upgrade", "Connection", "Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "Expect", "HTTP2-Settings"),
        *("Authorization", "Cookie", "Set-Cookie", "Accept-Encoding", "If-None-Match", "Range", "User-Agent"),
        *("ce-id", "ce-anything", "CE_id", "cloudEvents_id", "cloudEvents:id", "webhook-signature"),
        *("x-eventbus-attempt", "X_Eventbus_Attempt", "x-eventbus-verdict", "idempotency-key", "content_length"),
        *("X-Forwarded-For", "Forwarded", "X-Real-IP", "X-HTTP-Method-Override", "X-Original-URL"),
        *("x-retries", "x-final-error", "x-redriven-by", "x-death", "x-first-death-queue"),
        *("", " ", "a b", "a:b", "a\r\nb", "a\x00", "ä", "x" * 200, "(x)"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_header_that_is_not_the_publishers_to_set_is_left_out(mode, name):
    """What concerns the connection, the body, the sender or the bus, in any spelling; and what is no name at all."""
    assert foreign({name: "evil"}, mode) == {}


@pytest.mark.parametrize(
    "value",
    [
        *("a\r\nx-evil: 1", "a\nb", "a\rb", "a\x00b", "a\x1bb", "a\x7fb", "Müller", "\ud800", "x" * 5000),
        *(b"\xff", b"a\r\nb", None, [1], {"a": 1}, TIME, object(), pytest.param(10**5000, id="huge")),
    ],
)
def test_a_value_that_cannot_be_sent_is_left_out(value):
    """Control characters, what is not ASCII, what is not text, and what is too long."""
    assert foreign({"x-odd": value, "x-good": "1"}) == {"x-good": "1"}


def test_a_name_that_is_no_text_is_left_out():
    """Brokers allow more than HTTP does."""
    assert foreign({b"x-bytes": "1", 7: "1", None: "1"}) == {}


def test_a_header_is_sent_once():
    """Of two spellings of one name the first counts, and ours before both."""
    event = order(extensions={"traceparent": "ours"}, headers={"Traceparent": "theirs", "X-A": "1", "x-a": "2"})
    headers, _ = build(delivery(event))
    assert [value for name, value in headers if name == "traceparent"] == ["ours"]
    assert [value for name, value in headers if name == "x-a"] == ["1"]


def test_many_headers_do_not_make_a_request_that_servers_refuse():
    """Together they stay under 8 KiB; the first ones pass."""
    sent = foreign({f"x-{number}": "v" * 1000 for number in range(100)})
    assert 5 <= len(sent) <= 8
    assert "x-0" in sent


@pytest.mark.parametrize("name", ["id", "ID", "datacontenttype", "data", "data_base64", "a\r\nb", "ä", ""])
@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_an_extension_cannot_stand_in_for_an_attribute_or_break_a_line(mode, name):
    """Extensions of a stranger's message are not checked by anybody before."""
    event = Event.from_wire("real", "t", "/", TIME, b"", extensions={name: "forged", "shard": "7"})
    headers, body = build(delivery(event), mode)
    read = from_http_event(HTTPMessage(dict(headers), body))
    assert (read.get_id(), read.get_extension("shard")) == ("real", "7")
    assert "forged" not in str(headers) + body.decode()


def test_a_content_type_with_a_line_break_is_left_out():
    """It may come from a broker as it is."""
    event = Event.from_wire("1", "t", "/", TIME, b"x", "text/plain\r\nx-evil: 1")
    assert "content-type" not in dict(build(delivery(event))[0])


anything = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.text()))


@given(
    st.text(),
    st.text(),
    st.binary(),
    st.one_of(st.none(), st.text()),
    st.dictionaries(st.text(), anything),
    st.dictionaries(st.text(), st.text()),
    st.sampled_from(MODES),
)
def test_every_event_makes_a_request_that_http_allows(id, type, body, content_type, headers, extensions, mode):
    """Nothing a broker can deliver raises, and no header holds anything but printable ASCII and tabs."""
    event = Event.from_wire(id, type, "", TIME, body, content_type, key=id, headers=headers, extensions=extensions)
    sent, sent_body = build(delivery(event), mode)
    if mode == "structured":
        assert json.loads(sent_body)["id"] == id
    else:
        assert sent_body == body
    for name, value in sent:
        assert name == name.lower()
        assert name.isascii()
        assert name.isprintable()
        assert " " not in name
        assert ":" not in name
        assert value.isascii()
        assert value.replace("\t", " ").isprintable()
