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
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NoReturn, TypeVar

from eventbus.errors import InvalidEvent, Undecodable

T = TypeVar("T")

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
NO_HEADERS: Final[Mapping[str, object]] = MappingProxyType({})
NO_EXTENSIONS: Final[Mapping[str, str]] = MappingProxyType({})

type_: Final = type  # `type` is an attribute of events

# Control characters would split a header line on its way to an HTTP endpoint, or end a C string in a broker.
# Half of a surrogate pair is no text: UTF-8 cannot say it.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class _Draft:
    """The attributes of an Event, while they are being filled in.

    An Event refuses to be changed, so setting its thirteen attributes means going round its own guard, at five times
    the price. A draft has no guard; it becomes an Event by changing its class, and then it has one.
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


class Event(_Draft):
    """What happened, once and for all. Built by publishers, read by handlers; never changed.

    `data` is anything JSON can say, a pydantic model, a dataclass, or bytes (sent as they are).
    """

    __slots__ = ()

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
        if expires_at is not None and ttl is not None:
            raise InvalidEvent("give expires_at or ttl, not both")
        time = datetime.now(timezone.utc) if time is None else _moment("time", time)
        body, guessed = encode(data)
        put = object.__setattr__
        put(self, "id", _text("id", id) if id else new_id())
        put(self, "type", _type(type))
        put(self, "source", _text("source", source))
        put(self, "time", time)
        put(self, "body", body)
        put(self, "content_type", guessed if content_type is None else _text("content_type", content_type))
        put(self, "key", None if key is None else _text("key", key))
        put(self, "tenant", None if tenant is None else _text("tenant", tenant))
        put(self, "correlation_id", None if correlation_id is None else _text("correlation_id", correlation_id))
        put(self, "process_after", None if process_after is None else _moment("process_after", process_after, time))
        if ttl is not None:
            expires_at = _moment("ttl", ttl, time)
        put(self, "expires_at", None if expires_at is None else _moment("expires_at", expires_at))
        put(self, "headers", _headers(headers) if headers else NO_HEADERS)
        put(self, "extensions", _extensions(extensions) if extensions else NO_EXTENSIONS)

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
        draft = _Draft()
        draft.id = id
        draft.type = type
        draft.source = source
        draft.time = time
        draft.body = body
        draft.content_type = content_type
        draft.key = key
        draft.tenant = tenant
        draft.correlation_id = correlation_id
        draft.process_after = process_after
        draft.expires_at = expires_at
        draft.headers = MappingProxyType(headers) if type_(headers) is dict else headers
        draft.extensions = MappingProxyType(dict(extensions)) if extensions else NO_EXTENSIONS
        draft.__class__ = cls
        return draft  # type: ignore[return-value]

    @property
    def data(self) -> object:
        """The body, decoded by its content type: JSON value, text, or bytes. Empty body: None."""
        return decode(self.body, self.content_type)

    def replace(self, **changes: object) -> Event:
        """A copy with some attributes changed; the id stays unless it is given."""
        for name in changes.keys() & _CHECKS.keys():
            changes[name] = _CHECKS[name](changes[name])
        return self.rewritten(**changes)

    def rewritten(self, **changes: object) -> Event:
        """The same for adapters, whose events may come from strangers: nothing is checked."""
        copy = _Draft()
        copy.id = self.id
        copy.type = self.type
        copy.source = self.source
        copy.time = self.time
        copy.body = self.body
        copy.content_type = self.content_type
        copy.key = self.key
        copy.tenant = self.tenant
        copy.correlation_id = self.correlation_id
        copy.process_after = self.process_after
        copy.expires_at = self.expires_at
        copy.headers = self.headers
        copy.extensions = self.extensions
        for name, value in changes.items():
            if name not in _Draft.__slots__:
                raise TypeError(f"Event has no attribute {name!r}")
            setattr(copy, name, value)
        copy.__class__ = Event
        return copy  # type: ignore[return-value]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise dataclasses.FrozenInstanceError(f"an Event is never changed; use event.replace({name}=...)")

    def __delattr__(self, name: str) -> NoReturn:
        raise dataclasses.FrozenInstanceError("an Event is never changed")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return NotImplemented
        return bool(_all_of(self) == _all_of(other))

    def __hash__(self) -> int:
        return hash((self.source, self.id))

    def __reduce__(self) -> tuple[object, ...]:
        values = [getattr(self, name) for name in _WIRE_ORDER]
        values[-2:] = dict(self.headers), dict(self.extensions)  # a mapping proxy cannot be pickled
        return (Event.from_wire, tuple(values))

    def __repr__(self) -> str:
        return f"Event(type={self.type!r}, id={self.id!r}, source={self.source!r}, {len(self.body)} bytes)"


_all_of: Final = attrgetter(*_Draft.__slots__)

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
    try:
        if dump is None or isinstance(data, type):
            return _to_json(data), JSON
        body: bytes = dump().encode()
        if b"NaN" in body or b"Infinity" in body:
            from_json(body)  # a model may be told to write them; JSON has none
        return body, JSON
    # pydantic's own serialization error is a ValueError too
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


@lru_cache(maxsize=256)
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


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is beyond what a number can say")
    return number


_decoder: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


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


def _moment(name: str, value: object, since: datetime | None = None) -> datetime:
    """A time with a zone. A naive one is what datetime.now() gives: local time. A duration counts from `since`."""
    try:
        if isinstance(value, timedelta) and since is not None:
            value = since + value
        if isinstance(value, datetime):
            value = value if value.tzinfo is not None else value.astimezone()
            value.timestamp()
            return value
    except (OverflowError, ValueError, OSError) as error:
        raise InvalidEvent(f"{name} = {value!r} is beyond the calendar: {error}") from error
    wanted = "a datetime" if since is None else "a datetime or a timedelta"
    raise InvalidEvent(f"{name} = {value!r}: must be {wanted}")


def _text(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidEvent(f"{name} must be text, not {type(text).__name__}")
    if _CONTROL.search(text):
        raise InvalidEvent(f"{name} has a control character or half a character: {text!r}")
    if len(text) > 1024:
        raise InvalidEvent(f"{name} has {len(text)} characters; at most 1024 are allowed")
    return text


def _type(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidEvent(f"event type must be a text such as 'order.created', not {text!r}")
    return _text("type", text)


def _headers(headers: object) -> Mapping[str, object]:
    if not isinstance(headers, Mapping):
        raise InvalidEvent(f"headers must be a mapping, not {type(headers).__name__}")
    return MappingProxyType({_header_name(name, value): value for name, value in headers.items()})


def _header_name(name: object, value: object) -> str:
    if not isinstance(name, str) or not name or _CONTROL.search(name):
        raise InvalidEvent(f"header name must be text without control characters, not {name!r}")
    if value is not None and not isinstance(value, (str, bytes, int, float)):
        raise InvalidEvent(f"header {name!r} must be text, bytes or a number, not {type(value).__name__}")
    if isinstance(value, str) and _CONTROL.search(value):
        raise InvalidEvent(f"header {name!r} has a control character (CR, LF, NUL ...); send it as bytes or in data")
    return name


def _extensions(extensions: object) -> Mapping[str, str]:
    if not isinstance(extensions, Mapping):
        raise InvalidEvent(f"extensions must be a mapping, not {type(extensions).__name__}")
    for name in extensions:
        if not isinstance(name, str) or not _EXTENSION.fullmatch(name):
            raise InvalidEvent(f"extension {name!r}: CloudEvents names are 1 to 40 letters a-z and digits")
        if name in _TAKEN:
            raise InvalidEvent(f"extension {name!r} is an attribute of every event; set that instead")
    return MappingProxyType({name: _text(name, text) for name, text in extensions.items()})


def _bytes(body: object) -> bytes:
    if not isinstance(body, bytes):
        raise InvalidEvent(f"body must be bytes, not {type(body).__name__}; to change the data, make a new Event")
    return body


def _optional(name: str, check: Callable[[str, object], T]) -> Callable[[object], T | None]:
    return lambda value: None if value is None else check(name, value)


_EXTENSION: Final = re.compile(r"[a-z0-9]{1,40}")
# Spellings of the wire, see wire.py: an extension never stands in for an attribute.
_TAKEN: Final = frozenset(
    {"specversion", "id", "type", "source", "time", "datacontenttype", "data", "partitionkey", "tenant"}
    | {"correlationid", "processafter", "expirytime"}
)
_CHECKS: Final[Mapping[str, Callable[[object], object]]] = {
    "body": _bytes,
    "content_type": _optional("content_type", _text),
    "correlation_id": _optional("correlation_id", _text),
    "expires_at": _optional("expires_at", _moment),
    "extensions": _extensions,
    "headers": _headers,
    "id": lambda value: _text("id", value),
    "key": _optional("key", _text),
    "process_after": _optional("process_after", _moment),
    "source": lambda value: _text("source", value),
    "tenant": _optional("tenant", _text),
    "time": lambda value: _moment("time", value),
    "type": _type,
}
