"""CloudEvents out of HTTP requests, and what is refused at the door."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest
from cloudevents.core.bindings.http import HTTPMessage, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from eventbus.adapter import STORED, PublishResult
from eventbus.event import Event
from eventbus.headers import RESERVED
from eventbus.ingest.answers import of_refusal, of_results
from eventbus.ingest.requests import Refused, head_of, read

TIME = datetime(2026, 1, 31, 8, 0, 0, 123456, tzinfo=timezone.utc)
JSON = {"content-type": "application/json"}
ATTRIBUTES = {
    "id": "o-1",
    "type": "order.created",
    "source": "/shop/über uns",
    "time": TIME,
    "datacontenttype": "application/json",
    "subject": "5 %",
    "partitionkey": "k",
    "tenant": 'a "b"',
    "correlationid": "c ☃",
    "processafter": "2030-01-01T00:00:00+00:00",
    "expirytime": "2031-01-01T00:00:00+00:00",
}


def official(**changes: object) -> CloudEvent:
    return CloudEvent({**ATTRIBUTES, **changes}, data={"n": 1.5, "name": "Müller"})


def lower(message: HTTPMessage) -> dict[str, str]:
    return head_of([(name.encode(), value.encode()) for name, value in message.headers.items()])


def refusal(head: dict[str, str], body: bytes) -> tuple[int, str]:
    with pytest.raises(Refused) as caught:
        read(head, body)
    assert "\n" not in str(caught.value)
    return caught.value.status, str(caught.value)


@pytest.mark.parametrize("mode", ["binary", "structured", "batch"])
def test_what_the_official_package_writes_is_read(mode: str) -> None:
    """Every attribute, extension and byte of data arrives, in all three modes."""
    message = to_binary_event(official()) if mode == "binary" else to_structured_event(official())
    head, body = lower(message), message.body
    if mode == "batch":
        head["content-type"] = "application/cloudevents-batch+json; charset=utf-8"
        body = b"[" + body + b"]"
    [event], batched = read(head, body)
    assert batched is (mode == "batch")
    assert (event.id, event.type, event.source, event.time) == ("o-1", "order.created", "/shop/über uns", TIME)
    assert (event.key, event.tenant, event.correlation_id) == ("k", 'a "b"', "c ☃")
    assert event.process_after == datetime(2030, 1, 1, tzinfo=timezone.utc)
    assert event.expires_at == datetime(2031, 1, 1, tzinfo=timezone.utc)
    assert event.extensions == {"subject": "5 %"}
    assert event.content_type == "application/json"
    assert event.data == {"n": 1.5, "name": "Müller"}


@given(st.binary(max_size=200), st.sampled_from(["application/octet-stream", "text/plain", "image/png"]))
def test_binary_mode_leaves_the_body_untouched(body: bytes, content_type: str) -> None:
    """Bytes in, the same bytes out, with their content type."""
    [event], _ = read({"ce-type": "t", "content-type": content_type}, body)
    assert (event.body, event.content_type) == (body, content_type)


def test_a_type_and_some_json_are_enough() -> None:
    """The id is made here, or taken from the idempotency key; the source is the bus's own."""
    [event], _ = read({"ce-type": "order.created"}, b'{"id": 1.10}')
    assert (len(event.id), event.source, event.body, event.data) == (32, "", b'{"id": 1.10}', {"id": 1.1})
    [event], _ = read({"ce-type": "order.created", "idempotency-key": "k-1"}, b"")
    assert (event.id, event.data, event.content_type) == ("k-1", None, None)


def test_the_trace_goes_on() -> None:
    """The traceparent of the request becomes the event's, unless the event has its own."""
    head = {"ce-type": "t", "traceparent": "00-aa-bb-01", "tracestate": "x=1"}
    assert read(head, b"")[0][0].extensions == {"traceparent": "00-aa-bb-01", "tracestate": "x=1"}
    assert read(head | {"ce-traceparent": "own"}, b"")[0][0].extensions["traceparent"] == "own"


def test_headers_that_go_along_and_those_that_do_not() -> None:
    """`x-` headers become the event's; reserved ones, credentials and those of proxies never do."""
    never = [
        *RESERVED,
        "x-redriven-by",
        "x-death",
        "x-api-key",
        "x-auth-token",
        "x-forwarded-for",
        "x-eventbus-attempt",
    ]
    head = {"ce-type": "t", "x-shop": "7", "user-agent": "curl", "cookie": "a=b"} | dict.fromkeys(never, "forged")
    assert read(head, b"")[0][0].headers == {"x-shop": "7"}


@pytest.mark.parametrize(
    ("head", "body", "status", "words"),
    [
        (JSON, b"{}", 400, "add a 'ce-type: order.created' header"),
        ({}, b"", 400, "add a 'ce-type"),
        (JSON | {"ce-type": ""}, b"{}", 400, "event type must be a text"),
        (JSON | {"ce-type": "a", "ce-id": ""}, b"{}", 400, "the id is empty"),
        (JSON | {"ce-type": "a", "ce-specversion": "0.3"}, b"{}", 400, "specversion '0.3'"),
        (JSON | {"ce-type": "a", "ce-time": "yesterday"}, b"{}", 400, "time 'yesterday' is no time"),
        (JSON | {"ce-type": "a", "ce-processafter": "2h"}, b"{}", 400, "processafter '2h' is no time"),
        (JSON | {"ce-type": "a", "ce-tenant": "%FF"}, b"{}", 400, "ce-tenant is not percent-encoded UTF-8"),
        (JSON | {"ce-type": "a", "ce-tenant": "a%0Ab"}, b"{}", 400, "control character"),
        (JSON | {"ce-type": "a", "ce-x_y": "1"}, b"{}", 400, "extension 'x_y'"),
        (JSON | {"ce-type": "a" * 2000}, b"{}", 400, "at most 1024"),
        (JSON | {"ce-type": "a"}, b"{broken", 400, "the body is not JSON"),
        (JSON | {"ce-type": "a"}, b'{"a": 1, "a": 2}', 400, "appears twice"),
        (JSON | {"ce-type": "a"}, b"[" * 100_000, 400, "nested too deeply"),
        ({"ce-type": "a"}, b"plain text", 400, "say what it is by a content-type header"),
        ({"ce-type": "a", "content-type": "application/x-www-form-urlencoded"}, b"{}", 415, "content-type"),
        ({"ce-type": "a", "content-encoding": "gzip"}, b"\x1f\x8b", 415, "send the body as it is"),
        ({"content-type": "application/cloudevents+xml"}, b"<a/>", 415, "is not read"),
        ({"content-type": "application/cloudevents+json"}, b"[]", 400, "must be a JSON object"),
        ({"content-type": "application/cloudevents+json"}, b'{"id": "1", "type": "a"}', 400, "'source'"),
        ({"content-type": "application/cloudevents-batch+json"}, b"{}", 400, "must be a JSON list"),
        ({"content-type": "application/cloudevents-batch+json"}, b"[{}]", 400, "event 0 of the batch"),
        ({"content-type": "application/cloudevents-batch+json"}, b"[" + b"0," * 10_000 + b"0]", 413, "10001 events"),
    ],
)
def test_what_is_refused(head: dict[str, str], body: bytes, status: int, words: str) -> None:
    """A status, the reason, and what to do, on one line."""
    found, text = refusal(head, body)
    assert (found, words in text) == (status, True), text


def test_a_batch_with_a_bad_event_is_refused_whole() -> None:
    """Its publisher mends it and sends it again: nothing of it may be there already."""
    fine = json.loads(to_structured_event(official()).body)
    body = json.dumps([fine, fine | {"time": "soon"}]).encode()
    status, text = refusal({"content-type": "application/cloudevents-batch+json"}, body)
    assert status == 400
    assert "event 1 of the batch, and so none of it is taken" in text


def test_a_header_said_twice() -> None:
    """Two ce-id headers are two ids; other headers are joined."""
    with pytest.raises(Refused, match="two ce-id headers"):
        head_of([(b"Ce-Id", b"1"), (b"ce-id", b"2")])
    assert head_of([(b"X-A", b"1"), (b"x-a", b"2")]) == {"x-a": "1, 2"}


def test_quoted_header_values() -> None:
    """A value in double quotes is one without them (section 3.1.3.2 of the binding)."""
    [event], _ = read({"ce-type": "t", "ce-tenant": r'"a \"b\" %E2%98%83"'}, b"")
    assert event.tenant == 'a "b" ☃'


REFUSED = PublishResult("refused", "its header is too long")
FULL = PublishResult("refused", "the disk is full", later=True)
UNKNOWN = PublishResult("unknown", "amqp://guest:secret@host did not answer")


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([STORED, STORED], 202),
        ([STORED, REFUSED], 400),
        ([STORED, FULL], 503),
        ([STORED, UNKNOWN], 503),
        ([REFUSED, UNKNOWN], 503),
    ],
)
def test_the_answer_to_a_batch(results: list[PublishResult], status: int) -> None:
    """202 only if all are stored; else one result per event, and no secret."""
    events = [Event("a", id="1"), Event("a", id="2")]
    answer = of_results(events, results, True)
    body = json.loads(answer.body)
    assert answer.status == status
    assert dict(answer.headers).get("retry-after") == ("2" if status == 503 else None)
    assert b"secret" not in answer.body
    if status == 202:
        assert body == {"ids": ["1", "2"]}
    else:
        assert [(row["id"], row["status"]) for row in body["results"]] == [
            (event.id, result.status) for event, result in zip(events, results, strict=True)
        ]


def test_the_answer_to_one() -> None:
    """Its id, or why not."""
    event = Event("a", id="1")
    assert json.loads(of_results([event], [STORED], False).body) == {"id": "1"}
    assert "send it again later, with the same id" in json.loads(of_results([event], [UNKNOWN], False).body)["error"]
    assert dict(of_refusal(Refused(405, "no")).headers) == {"allow": "POST"}
    assert dict(of_refusal(Refused(401, "no")).headers) == {"www-authenticate": "Bearer"}
