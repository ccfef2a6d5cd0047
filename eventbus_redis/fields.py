"""Events to the fields of a stream entry and back, without loss. Pure.

`XADD {wms}:main * id .. type .. source .. time .. data ..`: the CloudEvents attributes are fields of their own, in
binary mode; the body is the field `data`, to the byte. A message that another program added without them is read too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Final, TypeAlias

from eventbus import wire
from eventbus.adapter import BodyMapping
from eventbus.errors import InvalidEvent
from eventbus.event import JSON, NO_HEADERS, Event
from eventbus.facets import facets

Fields: TypeAlias = list[bytes]
"""Names and values, one after the other, as Redis gives them."""

Story: TypeAlias = Mapping[str, object]
"""The reserved headers of a message."""

NO_STORY: Final[Story] = MappingProxyType({})
STORY: Final = b"x-eventbus"
ORIGIN: Final = b"x-stream-id"
EVENT_ID: Final = b"x-event-id"
FACETS: Final = b"x-facets"
BODIES: Final = (b"data", b"body", b"payload", b"message", b"__data__")
"""Where a foreign message keeps its body; with none of them, all its fields together are the body, as JSON."""

_OWN: Final = frozenset({STORY, ORIGIN, EVENT_ID, FACETS})
_ATTRIBUTES: Final = {
    b"id": "id",
    b"type": "type",
    b"source": "source",
    b"time": "time",
    b"datacontenttype": "datacontenttype",
    b"partitionkey": "partitionkey",
    b"tenant": "tenant",
    b"correlationid": "correlationid",
    b"processafter": "processafter",
    b"expirytime": "expirytime",
}
_COMMON: Final = [b"id", b"type", b"source", b"time", b"data", b"datacontenttype"]
_JSON: Final = JSON.encode()
_dumps: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_from_iso: Final = datetime.fromisoformat
_shared: Final = wire.shared_text
_NO_MAPPING: Final = BodyMapping()


def encode(event: Event) -> Fields:
    """The fields of an event. Raises InvalidEvent for what cannot be written."""
    try:
        fields = [
            b"id", event.id.encode(),
            b"type", event.type.encode(),
            b"source", event.source.encode(),
            b"time", event.time.isoformat().encode(),
            b"data", event.body,
        ]  # fmt: skip
        if event.content_type is not None:
            fields += (b"datacontenttype", event.content_type.encode())
        if event.key is not None:
            fields += (b"partitionkey", event.key.encode())
        if event.tenant is not None:
            fields += (b"tenant", event.tenant.encode())
        if event.correlation_id is not None:
            fields += (b"correlationid", event.correlation_id.encode())
    except UnicodeEncodeError as error:
        raise InvalidEvent(f"{error.object!r} is not valid Unicode and cannot be written") from error
    if event.process_after is not None:
        fields += (b"processafter", event.process_after.isoformat().encode())
    if event.expires_at is not None:
        fields += (b"expirytime", event.expires_at.isoformat().encode())
    if event.extensions:
        fields += (b"extensions", _dumps(dict(event.extensions)).encode())
    if event.headers:
        fields += (b"headers", to_json(event.headers))
    return fields


def with_body(entry: Fields, body: bytes) -> bytes:
    """What the field `data` of an entry becomes when its event gets another body."""
    found = dict(zip(entry[::2], entry[1::2], strict=False))
    kind = found.get(b"datacontenttype")
    return wire.with_body(found.get(b"data", b""), None if kind is None else _text(kind), body)


def size_of(fields: Iterable[bytes]) -> int:
    """Bytes that fields take."""
    return sum(map(len, fields))


def decode(id: bytes, fields: Fields, mapping: BodyMapping) -> tuple[Event, Story, str, float]:
    """The event in an entry, its story, what is wrong with it ("" if nothing), and when Redis took it."""
    if len(fields) == 12 and fields[::2] == _COMMON and fields[11] == _JSON:
        _, id_, _, type_, _, source, _, time, _, body, _, _ = fields
        try:  # what nearly every message looks like, without a detour
            created = _from_iso(time.decode())
            event = Event.from_wire(id_.decode(), _shared(type_), _shared(source), created, body, JSON)
        except ValueError:
            pass
        else:
            if created.tzinfo is not None:
                return event, NO_STORY, "", _moment(id)
    pairs = iter(fields)
    found = dict(zip(pairs, pairs, strict=False))
    story = NO_STORY
    origin = id
    if ORIGIN in found:
        origin = found.pop(ORIGIN)
        found.pop(EVENT_ID, None)
        found.pop(FACETS, None)
        if STORY in found:
            story = from_json(found.pop(STORY))
    elif STORY in found:
        story = from_json(found.pop(STORY))
    taken = _moment(origin)
    if b"id" in found and b"type" in found and b"data" in found:
        event = _ours(found, taken)
    else:
        event = _foreign(found, origin, taken, mapping)
    content_type = event.content_type
    if content_type is not None and "cloudevents" in content_type.lower():
        event, problem = wire.unwrap(event, mapping)
        return event, story, problem, taken
    return event, story, "", taken


def to_json(headers: Mapping[str, object]) -> bytes:
    """Headers as one JSON text; b"" for none."""
    if not headers:
        return b""
    try:
        return _dumps({name: wire.pack_header(value) for name, value in headers.items()}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(f"the headers cannot be written: {error}") from error


def facets_of(id: bytes, fields: Fields, story: Story) -> bytes:
    """What the letter made of an entry is counted by: what its readers, who know no mapping, will see in it."""
    event, _, _, _ = decode(id, fields, _NO_MAPPING)
    return _dumps(list(facets(event, story).values())).encode()


def from_json(text: bytes) -> dict[str, object]:
    """Headers from their JSON text; whatever a stranger put there instead counts as none."""
    try:
        found = json.loads(text)
        return {name: wire.unpack_header(value) for name, value in found.items()} if isinstance(found, dict) else {}
    except (ValueError, TypeError, RecursionError):
        return {}


def _ours(found: dict[bytes, bytes], taken: float) -> Event:
    time = _time(found[b"time"]) if b"time" in found else None
    created = time or datetime.fromtimestamp(taken, timezone.utc)
    after = _time(found.get(b"processafter"))
    headers: Mapping[str, object] = NO_HEADERS
    if b"headers" in found:
        headers = from_json(found[b"headers"]) or NO_HEADERS
        if after is None:
            after = wire.delay_header(headers, created)
    extensions = None
    if b"extensions" in found:
        extensions = {name: str(text) for name, text in from_json(found[b"extensions"]).items()}
    return Event.from_wire(
        found[b"id"].decode("utf-8", "replace"),
        _shared(found[b"type"]),
        _shared(found[b"source"]) if b"source" in found else "",
        created,
        found[b"data"],
        _optional(found, b"datacontenttype", shared=True),
        _optional(found, b"partitionkey"),
        _optional(found, b"tenant"),
        _optional(found, b"correlationid"),
        after,
        _time(found.get(b"expirytime")),
        headers,
        extensions,
    )


def _foreign(found: dict[bytes, bytes], origin: bytes, taken: float, mapping: BodyMapping) -> Event:
    attributes = {_ATTRIBUTES[name]: _text(value) for name, value in found.items() if name in _ATTRIBUTES}
    where = next((name for name in BODIES if name in found), None)
    headers: dict[str, object] = {}
    content_type = attributes.get("datacontenttype")
    if where is None:
        body = json.dumps({_text(name): _text(value) for name, value in found.items()}).encode()
        content_type = content_type or JSON
    else:
        body = found[where]
        for name, value in found.items():
            if name != where and name not in _ATTRIBUTES and name not in _OWN:
                headers[_text(name)] = _text_or_bytes(value)
        if b"headers" in found:
            headers.pop("headers", None)
            headers |= from_json(found[b"headers"])
    return wire.decode(
        attributes,
        headers or NO_HEADERS,
        body,
        content_type,
        fallback_id=_text(origin),
        fallback_time=datetime.fromtimestamp(taken, timezone.utc),
        mapping=mapping,
    )


def _moment(id: bytes) -> float:
    """When an entry was added: the first part of its id is the server's clock in milliseconds."""
    head = id.partition(b"-")[0]
    return int(head) / 1000 if head.isdigit() and len(head) < 15 else 0.0


def _time(text: bytes | None) -> datetime | None:
    if not text:
        return None
    try:
        parsed = _from_iso(text.decode())
    except (ValueError, UnicodeDecodeError):
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)


def _optional(found: dict[bytes, bytes], name: bytes, *, shared: bool = False) -> str | None:
    value = found.get(name)
    if value is None:
        return None
    return _shared(value) if shared else value.decode("utf-8", "replace")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
