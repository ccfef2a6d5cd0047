"""The Event: an immutable CloudEvents 1.0 envelope around a body of bytes.

The body stays bytes from publisher to handler; `Event.data` decodes it when somebody asks.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import time as _time
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from types import MappingProxyType
from typing import Final, NoReturn

from eventbus.errors import InvalidEvent, Undecodable

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
NO_HEADERS: Final[Mapping[str, object]] = MappingProxyType({})

# Control characters would split a header line on its way to an HTTP endpoint, or end a C string in a broker.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class Event:
    """What happened, once and for all. Built by publishers, read by handlers; never changed.

    `data` is anything JSON can say, a pydantic model, a dataclass, or bytes (sent as they are).
    """

    __slots__ = (
        "body",
        "content_type",
        "correlation_id",
        "expires_at",
        "extensions",
        "headers",
        "id",
        "key",
        "process_after",
        "source",
        "tenant",
        "time",
        "type",
    )

    id: str
    type: str
    source: str
    time: datetime
    body: bytes
    content_type: str | None
    key: str | None
    tenant: str | None
    correlation_id: str | None
    process_after: datetime | None
    expires_at: datetime | None
    headers: Mapping[str, object]
    extensions: Mapping[str, str]

    def __init__(
        self,
        type: str,
        data: object = None,
        *,
        id: str | None = None,
        source: str = "",
        time: datetime | None = None,
        key: str | None = None,
        tenant: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, object] | None = None,
        process_after: datetime | timedelta | None = None,
        expires_at: datetime | None = None,
        ttl: timedelta | None = None,
        content_type: str | None = None,
        extensions: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(type, str) or not type:
            raise InvalidEvent(f"event type must be a text such as 'order.created', not {type!r}")
        for name, text in (("type", type), ("id", id), ("source", source), ("key", key), ("tenant", tenant)):
            if text is not None:
                _check_text(name, text)
        if correlation_id is not None:
            _check_text("correlation_id", correlation_id)
        if expires_at is not None and ttl is not None:
            raise InvalidEvent("give expires_at or ttl, not both")
        if time is None:
            time = datetime.now(timezone.utc)
        if ttl is not None:
            expires_at = time + ttl
        if isinstance(process_after, timedelta):
            process_after = time + process_after
        if headers:
            headers = MappingProxyType({_check_header(k, v): v for k, v in headers.items()})
        if extensions:
            for name, text in extensions.items():
                _check_text(name, text)
        body, guessed = encode(data)
        put = object.__setattr__
        put(self, "id", id or new_id())
        put(self, "type", type)
        put(self, "source", source)
        put(self, "time", _aware(time))
        put(self, "body", body)
        put(self, "content_type", content_type or guessed)
        put(self, "key", key)
        put(self, "tenant", tenant)
        put(self, "correlation_id", correlation_id)
        put(self, "process_after", _aware(process_after))
        put(self, "expires_at", _aware(expires_at))
        put(self, "headers", headers or NO_HEADERS)
        put(self, "extensions", extensions or {})

    @classmethod
    def from_wire(
        cls,
        id: str,
        type: str,
        source: str,
        time: datetime,
        body: bytes,
        content_type: str | None = None,
        key: str | None = None,
        tenant: str | None = None,
        correlation_id: str | None = None,
        process_after: datetime | None = None,
        expires_at: datetime | None = None,
        headers: Mapping[str, object] = NO_HEADERS,
        extensions: Mapping[str, str] | None = None,
    ) -> Event:
        """Build an event from what a broker delivered: nothing is checked and nothing is encoded again."""
        self = cls.__new__(cls)
        put = object.__setattr__
        put(self, "id", id)
        put(self, "type", type)
        put(self, "source", source)
        put(self, "time", time)
        put(self, "body", body)
        put(self, "content_type", content_type)
        put(self, "key", key)
        put(self, "tenant", tenant)
        put(self, "correlation_id", correlation_id)
        put(self, "process_after", process_after)
        put(self, "expires_at", expires_at)
        put(self, "headers", headers)
        put(self, "extensions", extensions or {})
        return self

    @property
    def data(self) -> object:
        """The body, decoded by its content type: JSON value, text, or bytes. Empty body: None."""
        return decode(self.body, self.content_type)

    def replace(self, **changes: object) -> Event:
        """A copy with some attributes changed; the id stays unless it is given."""
        copy = Event.__new__(Event)
        put = object.__setattr__
        for name in self.__slots__:
            put(copy, name, changes.pop(name) if name in changes else getattr(self, name))
        if changes:
            raise TypeError(f"Event has no attribute {next(iter(changes))!r}")
        return copy

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise dataclasses.FrozenInstanceError(f"an Event is never changed; use event.replace({name}=...)")

    def __delattr__(self, name: str) -> NoReturn:
        raise dataclasses.FrozenInstanceError("an Event is never changed")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def __hash__(self) -> int:
        return hash((self.source, self.id))

    def __reduce__(self) -> tuple[object, ...]:
        values = [getattr(self, name) for name in _WIRE_ORDER]
        values[_WIRE_ORDER.index("headers")] = dict(self.headers)
        return (Event.from_wire, tuple(values))

    def __repr__(self) -> str:
        return f"Event(type={self.type!r}, id={self.id!r}, source={self.source!r}, {len(self.body)} bytes)"


_WIRE_ORDER: Final = (
    "id",
    "type",
    "source",
    "time",
    "body",
    "content_type",
    "key",
    "tenant",
    "correlation_id",
    "process_after",
    "expires_at",
    "headers",
    "extensions",
)


def new_id() -> str:
    """A unique id of 32 hex digits that sorts by time: 48 bits of milliseconds, then 80 random bits."""
    # The module's own generator is seeded from the system at start and again after a fork; an id is not a secret.
    return f"{int(_time.time() * 1000):012x}{random.getrandbits(80):020x}"


def encode(data: object) -> tuple[bytes, str | None]:
    """Body and content type of what a publisher passed as data."""
    if data is None:
        return b"", None
    if isinstance(data, bytes):
        return data, BINARY
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data), BINARY
    dump = getattr(data, "model_dump_json", None)
    if dump is not None:
        return dump().encode(), JSON
    try:
        return _to_json(data), JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(f"data cannot be written as JSON: {error or type(error).__name__}") from error


def decode(body: bytes, content_type: str | None) -> object:
    """The value in a body. Raises Undecodable when the body is not what its content type says."""
    if not body:
        return None
    kind = content_type or JSON
    if is_json(kind):
        return from_json(body)
    if kind.startswith("text/"):
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            raise Undecodable(f"the body is not UTF-8 text: {error}") from error
    return body


def is_json(content_type: str) -> bool:
    """Whether a content type is JSON or one of its +json relatives."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == JSON or kind.endswith("+json") or kind == "text/json"


def from_json(body: bytes) -> object:
    """Strict JSON: NaN, repeated keys, bad UTF-8 and bottomless nesting are refused, not guessed at."""
    try:
        return _decoder.decode(body.decode())
    except UnicodeDecodeError as error:
        raise Undecodable(f"the body is not UTF-8: {error}") from error
    except RecursionError as error:
        raise Undecodable("the body is not usable JSON: nested too deeply") from error
    except ValueError as error:
        raise Undecodable(f"the body is not JSON: {error}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Two parsers may choose differently between repeated keys; a message must mean the same to everybody.
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {repeated!r} appears twice in one object")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


_encoder: Final = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)


def _to_json(data: object) -> bytes:
    return _encoder.encode(data).encode()


def _aware(value: datetime | None) -> datetime | None:
    # A naive datetime is what datetime.now() gives: local time.
    return value.astimezone() if value is not None and value.tzinfo is None else value


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidEvent(f"{name} must be text, not {type(text).__name__}")
    if _CONTROL.search(text):
        raise InvalidEvent(f"{name} has a control character: {text!r}")
    if len(text) > 1024:
        raise InvalidEvent(f"{name} has {len(text)} characters; at most 1024 are allowed")


def _check_header(name: object, value: object) -> str:
    if not isinstance(name, str) or not name or _CONTROL.search(name):
        raise InvalidEvent(f"header name must be text without control characters, not {name!r}")
    if value is not None and not isinstance(value, (str, bytes, int, float)):
        raise InvalidEvent(f"header {name!r} must be text, bytes or a number, not {type(value).__name__}")
    if isinstance(value, str) and _CONTROL.search(value):
        raise InvalidEvent(f"header {name!r} has a control character (CR, LF, NUL ...); send it as bytes or in data")
    return name
