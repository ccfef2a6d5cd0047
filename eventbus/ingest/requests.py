"""The events in a request: CloudEvents in binary, structured and batch mode. Pure.

What cannot be an event is Refused here, at the publisher's door, and not parked later at every consumer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Final
from urllib.parse import unquote

from eventbus import wire
from eventbus.errors import EventBusError, InvalidEvent, Undecodable
from eventbus.event import JSON, Event, from_json, is_json
from eventbus.headers import is_reserved

MAX_EVENTS: Final = 10_000
"""In one batch: its answer names every one of them."""

_HOW: Final = (
    "add a 'ce-type: order.created' header, or send the whole event as application/cloudevents+json "
    '{"specversion": "1.0", "id": "1", "type": "order.created", "source": "/shop", "data": {...}}'
)
_FORMS: Final = ("application/x-www-form-urlencoded", "multipart/form-data")

# `x-` headers go with the event, but for those that proxies add and those that open doors.
_OF_PROXIES: Final = ("x-forwarded-", "x-real-ip", "x-envoy-", "x-amzn-", "x-eventbus-")
_CREDENTIAL: Final = re.compile(r"key|token|secret|auth|passw|pwd|cookie|session|signature|credential|jwt")
_ESCAPED: Final = re.compile(r"\\(.)")


class Refused(EventBusError):
    """A request that is not taken; the text says why and what to do."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


def read(head: Mapping[str, str], body: bytes) -> tuple[list[Event], bool]:
    """The events of a request, and whether they came as a batch. `head`: names in lower case. Raises Refused."""
    if head.get("content-encoding", "identity").lower() != "identity":
        raise Refused(415, f"content-encoding {head['content-encoding']!r} is not read; send the body as it is")
    content_type = head.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == wire.STRUCTURED:
            return [_enveloped(from_json(body), head)], False
        if kind == wire.BATCHED:
            return _batch(body, head), True
        if kind.startswith("application/cloudevents"):
            raise Refused(415, f"{kind} is not read; send {wire.STRUCTURED}, {wire.BATCHED}, or ce-* headers")
        return [_binary(head, body, content_type, kind)], False
    except (InvalidEvent, Undecodable) as error:
        raise Refused(400, str(error)) from None


def _binary(head: Mapping[str, str], body: bytes, content_type: str, kind: str) -> Event:
    if "ce-type" not in head:
        raise Refused(400, f"this is no CloudEvent: {_HOW}")
    if kind in _FORMS:  # what curl says of every body unless it is told better; no handler could read it
        raise Refused(415, f"{kind} is a form; say what the data is, such as 'content-type: {JSON}'")
    attributes = {name[3:]: _unescaped(name, text) for name, text in head.items() if name.startswith("ce-")}
    if "id" not in attributes and "idempotency-key" in head:
        attributes["id"] = head["idempotency-key"]
    if body and is_json(content_type or JSON):
        try:
            from_json(body)
        except Undecodable as error:
            hint = "" if content_type else "; say what it is by a content-type header"
            raise Refused(400, f"{error}{hint}") from None
    return _event(attributes, body, content_type or (JSON if body else None), head)


def _batch(body: bytes, head: Mapping[str, str]) -> list[Event]:
    envelopes = from_json(body)
    if not isinstance(envelopes, list):
        raise Refused(400, "a batch must be a JSON list of events, such as [{...}, {...}]")
    if len(envelopes) > MAX_EVENTS:
        raise Refused(413, f"{len(envelopes)} events in one batch; at most {MAX_EVENTS} are taken, send more batches")
    events = []
    for number, envelope in enumerate(envelopes):
        try:
            events.append(_enveloped(envelope, head))
        except (InvalidEvent, Undecodable, Refused) as error:
            raise Refused(400, f"event {number} of the batch, and so none of it is taken: {error}") from None
    return events


def _enveloped(envelope: object, head: Mapping[str, str]) -> Event:
    attributes, body, content_type = wire.unpack(envelope)
    return _event(attributes, body, content_type, head)


def _event(attributes: Mapping[str, str], body: bytes, content_type: str | None, head: Mapping[str, str]) -> Event:
    if attributes.get("specversion", wire.SPEC_VERSION) != wire.SPEC_VERSION:
        raise Refused(400, f"specversion {attributes['specversion']!r} is not known; write {wire.SPEC_VERSION!r}")
    if attributes.get("id") == "":
        raise Refused(400, "the id is empty; give every event its own, or leave ce-id away to be given one")
    known = {name: attributes.get(spelling) for name, spelling in wire.EXTENSIONS.items()}
    extensions = {name: text for name, text in attributes.items() if name not in wire.KNOWN}
    for name in ("traceparent", "tracestate"):
        if name in head:
            extensions.setdefault(name, head[name])
    return Event(
        attributes.get("type", ""),
        body or None,
        id=attributes.get("id"),
        source=attributes.get("source", ""),
        time=_moment("time", attributes.get("time")),
        key=known["key"],
        tenant=known["tenant"],
        correlation_id=known["correlation_id"],
        process_after=_moment(wire.EXTENSIONS["process_after"], known["process_after"]),
        expires_at=_moment(wire.EXTENSIONS["expires_at"], known["expires_at"]),
        content_type=content_type,
        extensions=extensions,
        headers={name: text for name, text in head.items() if name.startswith("x-") and _goes_along(name)},
    )


def _goes_along(name: str) -> bool:
    return not (name.startswith(_OF_PROXIES) or is_reserved(name) or _CREDENTIAL.search(name))


def _moment(name: str, text: str | None) -> datetime | None:
    """A time, checked: one that is ignored would deliver an event too early, or never let it expire."""
    if not text:
        return None
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise Refused(400, f"{name} {text[:40]!r} is no time; write it as 2026-01-31T08:00:00Z") from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)


def _unescaped(name: str, text: str) -> str:
    """An attribute out of its header: quoted or not, percent-encoded UTF-8 (section 3.1.3.2 of the HTTP binding)."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = _ESCAPED.sub(r"\1", text[1:-1])
    if "%" not in text:
        return text
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise Refused(400, f"{name} is not percent-encoded UTF-8: {text[:40]!r}") from None


def head_of(lines: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by their names in lower case. Raises Refused for a CloudEvents attribute that is said twice."""
    head: dict[str, str] = {}
    for raw_name, raw in lines:
        name = raw_name.decode("latin-1").lower()
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            if name.startswith("ce-"):
                raise Refused(400, f"{name} is not UTF-8; percent-encode it") from None
            text = raw.decode("latin-1")
        if name not in head:
            head[name] = text
        elif name.startswith("ce-") or name in ("content-type", "authorization"):
            raise Refused(400, f"there are two {name} headers; send one")
        else:
            head[name] += f", {text}"
    return head
