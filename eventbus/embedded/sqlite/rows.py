"""Events to rows and back, without loss. Pure.

Times are ISO 8601 texts (exact, with their offset), headers and extensions one JSON text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias

from eventbus import wire
from eventbus.adapter import BodyMapping
from eventbus.errors import InvalidEvent, Undecodable
from eventbus.event import NO_HEADERS, Event

Row: TypeAlias = tuple[Any, ...]

_PLAIN: Final = (str, int, float, bool, type(None))
_dumps: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_loads: Final = json.JSONDecoder().decode
_from_iso: Final = datetime.fromisoformat


def to_row(event: Event) -> Row:
    """The values of EVENT_COLUMNS. Raises InvalidEvent for what no row can hold."""
    after, expires = event.process_after, event.expires_at
    texts = (event.id, event.type, event.source, event.content_type, event.key, event.tenant, event.correlation_id)
    for text in texts:
        if text is not None and not text.isascii() and not is_unicode(text):
            raise InvalidEvent(f"{text!r} is not valid Unicode and cannot be written")
    return (
        event.id,
        event.type,
        event.source,
        event.time.isoformat(),
        event.body,
        event.content_type,
        event.key,
        event.tenant,
        event.correlation_id,
        after if after is None else after.isoformat(),
        expires if expires is None else expires.isoformat(),
        _extra(event.headers, event.extensions) if event.headers or event.extensions else None,
    )


def to_event(
    id: str,
    type: str,
    source: str,
    time: str,
    body: bytes,
    content_type: str | None,
    key: str | None,
    tenant: str | None,
    correlation_id: str | None,
    process_after: str | None,
    expires_at: str | None,
    extra: str | None,
) -> Event:
    """The event in a row of EVENT_COLUMNS."""
    created = _from_iso(time)
    after = None if process_after is None else _from_iso(process_after)
    expires = None if expires_at is None else _from_iso(expires_at)
    headers: Mapping[str, object] = NO_HEADERS
    extensions = None
    if extra is not None:
        found = _loads(extra)
        headers = {name: _unpack(value) for name, value in found["headers"].items()} or NO_HEADERS
        extensions = found.get("extensions")
        if after is None:
            after = wire.delay_header(headers, created)
    return Event.from_wire(
        id, type, source, created, body, content_type, key, tenant, correlation_id, after, expires, headers, extensions
    )


def unwrap(event: Event, mapping: BodyMapping) -> tuple[Event, str]:
    """A structured CloudEvent taken out of its envelope; or the event as it is, and what is wrong with it."""
    if event.content_type is None or "cloudevents" not in event.content_type.lower():
        return event, ""
    if event.content_type.partition(";")[0].strip().lower() != wire.STRUCTURED:
        return event, ""
    try:
        inner = wire.decode(
            {},
            event.headers,
            event.body,
            event.content_type,
            fallback_id=event.id,
            fallback_time=event.time,
            mapping=mapping,
        )
    except Undecodable as error:
        return event, str(error)
    return inner, ""


def to_json(headers: Mapping[str, object]) -> str | None:
    """Reserved headers as they stand beside a message; None for none."""
    return _dumps({name: _pack(value) for name, value in headers.items()}) if headers else None


def from_json(text: str | None) -> dict[str, object]:
    """Reserved headers from their JSON text."""
    return {name: _unpack(value) for name, value in _loads(text).items()} if text else {}


def is_unicode(text: str) -> bool:
    """Whether SQLite can hold a text: a lone surrogate has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _extra(headers: Mapping[str, object], extensions: Mapping[str, str]) -> str:
    extra: dict[str, object] = {"headers": {name: _pack(value) for name, value in headers.items()}}
    if extensions:
        extra["extensions"] = dict(extensions)
    try:
        return _dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(f"the event's headers cannot be written: {error}") from error


def _pack(value: object) -> object:
    """A header value as JSON; what JSON does not know is an object with one key that names its kind."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, datetime):
        return {"time": value.isoformat()}
    # Headers from other brokers may repeat (lists) or nest (AMQP tables).
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    if isinstance(value, Mapping):
        return {"table": {str(name): _pack(item) for name, item in value.items()}}
    raise InvalidEvent(f"a header of type {type(value).__name__} cannot be written; send text, bytes or a number")


def _unpack(value: object) -> object:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "time":
        return _from_iso(content)
    return {name: _unpack(item) for name, item in content.items()}
