"""The request: an event as HTTP headers and a body, by the CloudEvents HTTP binding. Pure; never raises.

binary      attributes in `ce-*` headers, the body untouched (default)
structured  one JSON object with everything in it, `application/cloudevents+json`
raw         the body alone
batch       many events as one JSON array, `application/cloudevents-batch+json` (see batching.py)

The first three carry `idempotency-key`, `traceparent`, `x-eventbus-*` and those broker headers that are safe to pass.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from functools import lru_cache
from typing import Final, Literal, TypeAlias
from urllib.parse import quote

from eventbus import wire
from eventbus.event import JSON, Event
from eventbus.headers import is_reserved
from eventbus.settlement import Delivery
from eventbus.telemetry import TRACE_FIELDS

Mode: TypeAlias = Literal["binary", "structured", "raw"]
MODES: Final[tuple[Mode, ...]] = ("binary", "structured", "raw")

HeaderList: TypeAlias = list[tuple[str, str]]

# Section 3.1.3.2 of the binding: printable ASCII but space, double quote and percent stays as it is.
_UNESCAPED: Final = "".join(c for c in map(chr, range(0x21, 0x7F)) if c not in '"%')
_NEEDS_NO_ESCAPE: Final = re.compile(r"[!#$&-~]*")

_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_VALUE: Final = re.compile(r"[\t\x20-\x7e]*")
_MAX_VALUE: Final = 4096
_MAX_FOREIGN: Final = 8192
"""Common servers refuse a request with more than 8 or 16 KiB of headers; a publisher must not be able to cause it."""

# Said elsewhere than in an extension, and so never by one.
_ATTRIBUTES: Final = frozenset({"datacontenttype", "data", "data_base64"})

# What says how this very request is sent, by whom, and what its body is: ours to say, or nobody's.
_NEVER: Final = frozenset(
    {
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "http2-settings", "expect"),
        *("host", "via", "forwarded", "x-real-ip", "origin", "referer", "range", "user-agent"),
        *("authorization", "www-authenticate", "cookie", "cookie2", "set-cookie", "set-cookie2"),
        *("x-http-method-override", "x-http-method", "x-method-override", "x-original-url", "x-rewrite-url"),
        *("idempotency-key", "x-death", "x-delivery-count"),
    }
)
_NEVER_PREFIXES: Final = (
    *("ce-", "cloudevents-", "x-eventbus-", "webhook-", "content-", "accept", "if-", "sec-", "proxy-"),
    *("x-forwarded-", "x-first-death-", "x-last-death-"),
)


def build(delivery: Delivery, mode: Mode = "binary") -> tuple[HeaderList, bytes]:
    """Headers and body of the request for one attempt; signature and authorization are added by the endpoint."""
    event = _without_odd_extensions(delivery.event)
    body = event.body
    headers: HeaderList = []
    if mode == "structured":
        headers.append(("content-type", wire.STRUCTURED))
        body = wire.to_structured(event)
    else:
        content_type = _content_type(event)
        if content_type:
            headers.append(("content-type", content_type))
        if mode == "binary":
            headers += [("ce-" + name, escape(text)) for name, text in wire.attributes(event)]
    headers.append(("idempotency-key", escape(event.id)))
    if event.extensions:
        for name in TRACE_FIELDS:
            value = _text(event.extensions.get(name))
            if value:
                headers.append((name, value))
    headers += _told(delivery.attempt, delivery.max_attempts, delivery.is_last_attempt, delivery.service)
    if event.headers:
        headers += _foreign(event, {name for name, _ in headers})
    return headers, body


@lru_cache(maxsize=1024)
def _told(attempt: int, max_attempts: int, last: bool, service: str) -> tuple[tuple[str, str], ...]:
    """What the endpoint is told about the attempt: the same few lines for nearly every event."""
    limit = (("x-eventbus-max-attempts", str(max_attempts)),) if max_attempts else ()
    return (
        ("x-eventbus-attempt", str(attempt)),
        *limit,
        ("x-eventbus-last-attempt", "true" if last else "false"),
        ("x-eventbus-service", escape(service)),
    )


def escape(text: str) -> str:
    """An attribute as a header value: percent-encoded UTF-8 where the binding asks for it."""
    if text.isalnum() and text.isascii():  # most ids, and much quicker to see
        return text
    return text if _NEEDS_NO_ESCAPE.fullmatch(text) else quote(text, safe=_UNESCAPED, errors="replace")


def _without_odd_extensions(event: Event) -> Event:
    """The event with only those extensions that cannot break a line nor stand in for an attribute."""
    # Those of a stranger's message were checked by nobody before.
    if not event.extensions:
        return event
    taken = _ATTRIBUTES | {name for name, _ in wire.attributes(event.rewritten(extensions={}))}
    kept: dict[str, str] = {}
    for name, text in event.extensions.items():
        low = name.lower()
        if low not in taken and low not in kept and _TOKEN.fullmatch(low) and isinstance(text, str):
            kept[low] = text
    return event if kept == event.extensions else event.rewritten(extensions=kept)


def structured(event: Event, more: str, taken: Container[str]) -> bytes:
    """The event as one JSON object, with some members more, whose names are `taken`."""
    return wire.to_structured(_without_odd_extensions(event), more, taken)


def _content_type(event: Event) -> str | None:
    if event.content_type:
        return _content_types(event.content_type)
    # Plain JSON from a broker without content types (Kafka, Redis): web frameworks parse a body only if it is named.
    return JSON if event.body[:1] in (b"{", b"[") else None


@lru_cache(maxsize=256)
def _content_types(content_type: str) -> str | None:
    return _text(content_type)


def _foreign(event: Event, taken: set[str]) -> Iterator[tuple[str, str]]:
    room = _MAX_FOREIGN
    for name, value in event.headers.items():
        low = _passable(name) if isinstance(name, str) else None
        text = _text(value)
        if low is None or low in taken or text is None:
            continue
        size = len(low) + len(text) + 4
        if size <= room:
            room -= size
            taken.add(low)
            yield low, text


@lru_cache(maxsize=1024)
def _passable(name: str) -> str | None:
    """The name as it is sent; None if a header of this name is not for a publisher to set."""
    if not _TOKEN.fullmatch(name):
        return None
    low = name.lower()
    # CGI, WSGI and PHP take `x_eventbus_attempt` for `x-eventbus-attempt`.
    plain = low.replace("_", "-")
    if plain in _NEVER or plain.startswith(_NEVER_PREFIXES) or is_reserved(plain):
        return None
    return low


def _text(value: object) -> str | None:
    """A header value that is safe to send, or None."""
    if isinstance(value, bytes):  # what Kafka has for text
        value = value.decode("latin-1") if value.isascii() else None
    elif isinstance(value, bool):
        value = "true" if value else "false"
    elif isinstance(value, (int, float)):
        # Python refuses to print an integer of more than 4,300 digits.
        value = str(value) if isinstance(value, float) or value.bit_length() <= 64 else None
    if not isinstance(value, str) or len(value) > _MAX_VALUE or not _VALUE.fullmatch(value):
        return None
    return value.strip(" \t")
