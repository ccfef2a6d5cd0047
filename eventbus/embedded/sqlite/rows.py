"""Events to rows and back, without loss. Pure.

Times are ISO 8601 texts (exact, with their offset), headers and extensions one JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias

from eventbus import wire
from eventbus.errors import InvalidEvent
from eventbus.event import NO_HEADERS, Event

Row: TypeAlias = tuple[Any, ...]

EVENT_COLUMNS: Final = (
    "id, type, source, time, body, content_type, key, tenant, correlation_id, process_after, expires_at, extra"
)
"""In the order of Event.from_wire; `extra` is a JSON text with headers and extensions, NULL without any."""

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
        headers = {name: wire.unpack_header(value) for name, value in found["headers"].items()} or NO_HEADERS
        extensions = found.get("extensions")
        if after is None:
            after = wire.delay_header(headers, created)
    return Event.from_wire(
        id, type, source, created, body, content_type, key, tenant, correlation_id, after, expires, headers, extensions
    )


def to_json(headers: Mapping[str, object]) -> str | None:
    """Reserved headers as they stand beside a message; None for none."""
    return _dumps({name: wire.pack_header(value) for name, value in headers.items()}) if headers else None


def from_json(text: str | None) -> dict[str, object]:
    """Reserved headers from their JSON text."""
    return {name: wire.unpack_header(value) for name, value in _loads(text).items()} if text else {}


def is_unicode(text: str) -> bool:
    """Whether SQLite can hold a text: a lone surrogate has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _extra(headers: Mapping[str, object], extensions: Mapping[str, str]) -> str:
    extra: dict[str, object] = {"headers": {name: wire.pack_header(value) for name, value in headers.items()}}
    if extensions:
        extra["extensions"] = dict(extensions)
    try:
        return _dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(f"the event's headers cannot be written: {error}") from error
