"""Events as Kafka records and back, and the copies that carry retries and dead letters. Pure.

CloudEvents binary mode: `ce_*` headers, `content-type`, the record's key is the event's. A stranger's record without
them is read too; its key, value and headers (which may repeat and be null) are copied to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeAlias

from eventbus import headers as reserved
from eventbus import wire
from eventbus.adapter import BodyMapping, Parked
from eventbus.deadletter import DeadLetter
from eventbus.errors import InvalidEvent, Undecodable
from eventbus.event import BINARY, JSON, NO_HEADERS, Event
from eventbus.settlement import HeaderDelta

TP: TypeAlias = tuple[str, int]
"""Topic and partition."""
Headers: TypeAlias = Sequence[tuple[str, bytes | None]]

ORIGIN: Final = "x-eventbus-origin"
"""On the copy of a message without an id: the topic, partition and offset it had first, which are its id."""
EMBEDDED: Final = "x-eventbus-embedded"
"""On a dead letter whose body has a `dlq_metadata`: where that begins, and how long it is."""
NO_STORY: Final[Mapping[str, object]] = MappingProxyType({})
CONTENT_TYPE: Final = "content-type"
_OURS: Final = frozenset({ORIGIN, EMBEDDED})
_COMMON: Final = ("ce_id", "ce_type", "ce_source", "ce_time")
_VERSION: Final = ("ce_specversion", wire.SPEC_VERSION.encode())
_from_iso: Final = datetime.fromisoformat
_shared: Final = wire.shared_text
_known: Final = wire.shared_texts.get
_KEY: Final = "ce_partitionkey"
_LATEST: Final = datetime(9999, 12, 31, tzinfo=timezone.utc).timestamp()
_PLAIN: Final[dict[bytes | None, str]] = {JSON.encode(): JSON, BINARY.encode(): BINARY}
"""Content types of which one knows without looking that the body is no envelope."""


class Record(Protocol):
    """What a consumer reads."""

    offset: int
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers


class Outgoing(NamedTuple):
    """What a producer writes."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    partition: int | None = None


def outgoing(event: Event, topic: str) -> Outgoing:
    """An event as a record. Raises InvalidEvent for what cannot be written."""
    bare = event.key is None and event.tenant is None and event.correlation_id is None
    bare = bare and event.process_after is None and event.expires_at is None
    found: list[tuple[str, bytes | None]]
    try:
        if bare and not event.headers and not event.extensions:
            found = [
                _VERSION,
                ("ce_id", event.id.encode()),
                ("ce_type", event.type.encode()),
                ("ce_source", (event.source or "/").encode()),
                ("ce_time", event.time.isoformat().encode()),
            ]
            if event.content_type is not None:
                found.append((CONTENT_TYPE, event.content_type.encode()))
            return Outgoing(topic, None, event.body, found)
        found = [("ce_" + name, text.encode()) for name, text in wire.attributes(event)]
        if event.content_type is not None:
            found.append((CONTENT_TYPE, event.content_type.encode()))
        for name, value in event.headers.items():
            if name in _OURS or name == CONTENT_TYPE or name.startswith("ce_"):
                continue  # forged: these are the event's own attributes
            found.append((name, _bytes(value)))
        key = None if event.key is None else event.key.encode()
    except UnicodeEncodeError as error:
        raise InvalidEvent(f"{error.object!r} is not valid Unicode and cannot be written") from error
    return Outgoing(topic, key, event.body, found)


def size_of(record: Outgoing) -> int:
    """Bytes that a record takes, with room for its framing."""
    size = 100 + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += len(name) + len(value or b"") + 4
    return size


def incoming(
    record: Record, where: TP, mapping: BodyMapping, *, told: bool, letter: bool = False
) -> tuple[Event, Mapping[str, object], str]:
    """The event in a record, the reserved headers it carries, and why it cannot be read (or "").

    `told`: the record is a copy of ours, and its reserved headers are true. On a shared topic they are a stranger's,
    and count for nothing. `letter`: they are headers of the event too, for readers of dead letters.
    """
    attrs: dict[str, str] = {}
    story: dict[str, object] = {}
    own: dict[str, object] = {}
    content_type: str | None = None
    origin = embedded = None
    for name, raw in record.headers:
        if name[:3] == "ce_":
            if raw is not None:
                attrs[name[3:]] = _shared(raw) if name in _FEW else raw.decode("utf-8", "replace")
        elif name == CONTENT_TYPE:
            content_type = None if raw is None else _shared(raw)
        elif name == ORIGIN:
            origin = raw if told else None
        elif name == EMBEDDED:
            embedded = raw if told else None
        elif reserved.is_reserved(name):
            if told and raw is not None:
                story[name] = raw.decode("utf-8", "replace")
        else:
            _collect(own, name, _text(raw))
    body = b"" if record.value is None else record.value
    if embedded is not None:
        body = without_metadata(body, embedded)
    if letter:
        own |= story
    taken = datetime.fromtimestamp(written_at(record), timezone.utc)
    if record.key is not None and "partitionkey" not in attrs:
        attrs["partitionkey"] = record.key.decode("utf-8", "replace")
    headers: Mapping[str, object] = own or NO_HEADERS
    id = origin.decode("utf-8", "replace") if origin else address(record, where)
    try:
        event = wire.decode(attrs, headers, body, content_type, fallback_id=id, fallback_time=taken, mapping=mapping)
    except Undecodable as error:
        # It claims to be a CloudEvent in an envelope, and is none.
        outer = attrs.get("id") or id
        return wire.unreadable(headers, body, content_type, id=outer, time=taken), story, str(error)
    return event, story, ""


def usual(record: Record) -> Event | None:
    """The event in a record of the shared topic that looks as nearly all of ours do, with a key or without.

    None for any other: see `incoming`, which takes four times as long.
    """
    key = None
    if len(record.headers) == 6:
        first, (second, id), (third, type), (fourth, source), (fifth, time), (last, kind) = record.headers
        if record.key is not None:
            return None
    elif len(record.headers) == 7:
        first, (second, id), (third, type), (fourth, source), (fifth, time), (named, key), (last, kind) = record.headers
        if named != _KEY or not key:
            return None
    else:
        return None
    if first != _VERSION or last != CONTENT_TYPE or (second, third, fourth, fifth) != _COMMON:
        return None
    if not (id and type and time) or source is None or kind not in _PLAIN:
        return None
    try:
        moment = _from_iso(time.decode())
        if moment.tzinfo is None:
            return None
        text, key_ = id.decode(), None if key is None else key.decode()
    except ValueError:
        return None
    type_, source_ = _known(type) or _shared(type), _known(source) or _shared(source)
    return Event.from_wire(text, type_, source_, moment, record.value or b"", _PLAIN[kind], key_)


def written_at(record: Record) -> float:
    """When a record was written, in seconds. It is what its producer says, be it nothing, or a year no calendar has."""
    return min(max(0, record.timestamp or 0) / 1000, _LATEST)


def address(record: Record, where: TP) -> str:
    """Where a record stands, in full: the id of a message that has none."""
    return f"{where[0]}/{where[1]}/{record.offset}"


def copy(record: Record, where: TP, topic: str, delta: HeaderDelta, *, told: bool) -> Outgoing:
    """A copy of a record with changed reserved headers; all else to the byte."""
    found: list[tuple[str, bytes | None]] = []
    identified = False
    for name, raw in record.headers:
        if name == "ce_id" or name == ORIGIN:
            identified = identified or name == "ce_id" or told
        ours = name in _OURS or reserved.is_reserved(name)
        if ours and (not told or name in delta or name == EMBEDDED):
            continue
        found.append((name, raw))
    if not identified:
        found.append((ORIGIN, address(record, where).encode()))
    for name, value in delta.items():
        if value is not None:
            found.append((name, str(value).encode("utf-8", "replace")))
    return Outgoing(topic, record.key, _original(record, told=told), found)


def with_body(record: Outgoing, body: bytes) -> bytes:
    """What the value of a record becomes when its event gets another body."""
    kind = next((raw for name, raw in record.headers if name == CONTENT_TYPE), None)
    return wire.with_body(record.value or b"", None if kind is None else kind.decode("utf-8", "replace"), body)


def with_metadata(letter: Outgoing, event: Event, service: str) -> Outgoing:
    """A dead letter with seed 3's `dlq_metadata` in its body, if that is a JSON object; it can be taken out again."""
    body = letter.value
    if not body or body.rstrip()[-1:] != b"}":
        return letter
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return letter
    if not isinstance(found, dict) or "dlq_metadata" in found:
        return letter
    story = {
        name: (raw or b"").decode("utf-8", "replace") for name, raw in letter.headers if reserved.is_reserved(name)
    }
    told = DeadLetter.read(Parked("", event, story), service).dlq_metadata()
    comma = b"," if found else b""
    piece = comma + b'"dlq_metadata":' + json.dumps(told, ensure_ascii=False).encode()
    at = body.rindex(b"}")
    mark = (EMBEDDED, f"{at}:{len(piece)}".encode())
    return letter._replace(value=body[:at] + piece + body[at:], headers=[*letter.headers, mark])


def without_metadata(body: bytes, mark: bytes) -> bytes:
    """The body as it was before `with_metadata`, to the byte."""
    at, _, length = mark.partition(b":")
    if not (at.isdigit() and length.isdigit()) or len(mark) > 30:
        return body
    start, end = int(at), int(at) + int(length)
    piece = body[start:end]
    if end > len(body) or not piece.lstrip(b",").startswith(b'"dlq_metadata":'):
        return body
    return body[:start] + body[end:]


def _original(record: Record, *, told: bool) -> bytes | None:
    if told and record.value:
        for name, raw in record.headers:
            if name == EMBEDDED and raw:
                return without_metadata(record.value, raw)
    return record.value


def _collect(own: dict[str, object], name: str, value: object) -> None:
    """A header that repeats is a list."""
    if name not in own:
        own[name] = value
        return
    known = own[name]
    own[name] = [*known, value] if isinstance(known, list) else [known, value]


def _text(raw: bytes | None) -> str | bytes | None:
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _bytes(value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return str(value).encode()


_FEW: Final = frozenset({"ce_type", "ce_source", "ce_specversion"})
