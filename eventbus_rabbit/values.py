"""AMQP field values, tables and message properties, to and from bytes. Pure.

Values stay as they came, byte for byte, until somebody asks for one: a copy of a foreign message carries its tables,
arrays, times and decimals exactly, and no header of a stranger can break the reader.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from decimal import Decimal
from functools import lru_cache
from types import MappingProxyType
from typing import Final

MAX_SHORT: Final = 255
_LENGTH: Final = struct.Struct(">I")
_SIGNED: Final = struct.Struct(">ci")
_LONG: Final = struct.Struct(">cq")
_DOUBLE: Final = struct.Struct(">cd")
_TIME: Final = struct.Struct(">Q")
_FLAGS: Final = struct.Struct(">H")
_FIXED: Final = {
    **dict.fromkeys(b"tbB", 1),
    **dict.fromkeys(b"su", 2),
    **dict.fromkeys(b"Iif", 4),
    **dict.fromkeys(b"lLdT", 8),
    ord("D"): 5,
    ord("V"): 0,
}
_SIZED: Final = frozenset(b"SAFx")
_NUMBERS: Final = {
    ord(kind): struct.Struct(">" + code)
    for kind, code in zip("bBsuIilLfd", ("b", "B", "h", "H", "i", "I", "q", "q", "f", "d"), strict=True)
}

RawTable = dict[str, bytes]
"""Values by name, each as its type byte and data."""


@lru_cache(maxsize=4096)
def short(text: str) -> bytes:
    """A short string: names of headers, queues, keys."""
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > MAX_SHORT:
        raise ValueError(f"{text[:40]!r}... has {len(data)} bytes; AMQP takes at most {MAX_SHORT} here")
    return bytes((len(data),)) + data


def encode(value: object) -> bytes:
    """A value with its type byte."""
    kind = value.__class__
    if kind is str:
        text: bytes = value.encode("utf-8", "replace")  # type: ignore[attr-defined]
        return b"S" + _LENGTH.pack(len(text)) + text
    if kind is int:
        if -(2**31) <= value < 2**31:  # type: ignore[operator]
            return _SIGNED.pack(b"I", value)
        return _LONG.pack(b"l", value) if -(2**63) <= value < 2**63 else encode(str(value))  # type: ignore[operator]
    if isinstance(value, bool):
        return b"t\x01" if value else b"t\x00"
    if value is None:
        return b"V"
    if isinstance(value, (bytes, bytearray)):
        return b"x" + _LENGTH.pack(len(value)) + value
    if isinstance(value, float):
        return _DOUBLE.pack(b"d", value)
    if isinstance(value, datetime):
        return b"T" + _TIME.pack(max(0, int(value.timestamp())))
    if isinstance(value, Mapping):
        return b"F" + encode_table({str(name): encode(part) for name, part in value.items()})
    if isinstance(value, (list, tuple)):
        data = b"".join([encode(part) for part in value])
        return b"A" + _LENGTH.pack(len(data)) + data
    return encode(str(value))


def encode_table(values: RawTable) -> bytes:
    """A table of values that are encoded already."""
    data = b"".join([part for name, value in values.items() for part in (short(name), value)])
    return _LENGTH.pack(len(data)) + data


def split_table(data: bytes, start: int = 0) -> tuple[RawTable, int]:
    """The values of the table at `start`, undecoded, and where it ends. Raises ValueError if it is none."""
    (size,) = _LENGTH.unpack_from(data, start)
    at, end = start + 4, start + 4 + size
    if end > len(data):
        raise ValueError("a header table is cut off")
    found: RawTable = {}
    while at < end:
        begin = at + 1
        at = begin + data[at]
        name = _name(data[begin:at])
        if data[at] == 83:  # S, as nearly all of them
            after = at + 5 + _LENGTH.unpack_from(data, at + 1)[0]
            if after > end:
                raise ValueError("a header value is cut off")
        else:
            after = _end_of(data, at)
        found[name] = data[at:after]
        at = after
    return found, end


@lru_cache(maxsize=4096)
def _name(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def decode(value: bytes) -> object:
    """The Python value of an encoded one; None for what cannot be read."""
    kind = value[0]
    if kind == 83:  # S
        try:
            return value[5:].decode()
        except UnicodeDecodeError:
            return value[5:]
    try:
        if kind in _NUMBERS:
            return _NUMBERS[kind].unpack_from(value, 1)[0]
        if kind == 116:  # t
            return value[1] != 0
        if kind == 120:  # x
            return value[5:]
        if kind == 84:  # T
            return _time(_TIME.unpack_from(value, 1)[0])
        if kind == 70:  # F
            return {name: decode(part) for name, part in split_table(value, 1)[0].items()}
        if kind == 65:  # A
            return list(_array(value))
        if kind == 68:  # D
            return Decimal(struct.unpack_from(">i", value, 2)[0]).scaleb(-value[1])
    except (ValueError, struct.error, RecursionError):
        return None
    return None


def _array(value: bytes) -> Iterator[object]:
    at = 5
    while at < len(value):
        after = _end_of(value, at)
        yield decode(value[at:after])
        at = after


def _end_of(data: bytes, at: int) -> int:
    kind = data[at]
    fixed = _FIXED.get(kind)
    if fixed is not None:
        return at + 1 + fixed
    if kind in _SIZED:
        after = at + 5 + int(_LENGTH.unpack_from(data, at + 1)[0])
        if after > len(data):
            raise ValueError("a header value is cut off")
        return after
    raise ValueError(f"a header has the unknown type {chr(kind)!r}")


def _time(number: int) -> datetime | int:
    # Some clients send milliseconds where AMQP says seconds.
    try:
        return datetime.fromtimestamp(number if number <= 0xFFFFFFFF else number / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return number


class Properties:
    """The properties of a message, as texts and raw values. What one does not have costs nothing to leave out."""

    content_type = content_encoding = correlation_id = reply_to = b""
    message_id = type = user_id = app_id = b""
    headers: Mapping[str, bytes] = MappingProxyType({})
    priority: int | None = None
    timestamp: int | None = None


def read_properties(data: bytes) -> Properties:
    """The properties in a content header, from its flags on. Raises ValueError for what is none."""
    found = Properties()
    try:
        (flags,) = _FLAGS.unpack_from(data)
        at = 2
        if flags & 0x8000:
            found.content_type, at = _short(data, at)
        if flags & 0x4000:
            found.content_encoding, at = _short(data, at)
        if flags & 0x2000:
            found.headers, at = split_table(data, at)
        if flags & 0x1000:
            at += 1
        if flags & 0x0800:
            found.priority = data[at]
            at += 1
        if flags & 0x0400:
            found.correlation_id, at = _short(data, at)
        if flags & 0x0200:
            found.reply_to, at = _short(data, at)
        if flags & 0x0100:
            _, at = _short(data, at)  # expiration: never copied, see write_properties
        if flags & 0x0080:
            found.message_id, at = _short(data, at)
        if flags & 0x0040:
            (found.timestamp,) = _TIME.unpack_from(data, at)
            at += 8
        if flags & 0x0020:
            found.type, at = _short(data, at)
        if flags & 0x0010:
            found.user_id, at = _short(data, at)
        if flags & 0x0008:
            found.app_id, at = _short(data, at)
    except (struct.error, IndexError) as error:
        raise ValueError(f"a content header is cut off: {error}") from error
    return found


def write_properties(given: Properties, table: bytes) -> bytes:
    """Flags and values of a persistent message.

    `expiration` and `user_id` are left out: the first would make a copy vanish from the dead-letter queue, and
    RabbitMQ closes the channel of a publisher whose user is not the `user_id`. A text over 255 bytes cannot be a
    property; the CloudEvents headers carry it.
    """
    flags, parts = 0x3000, [b""]
    for flag, text in ((0x8000, given.content_type), (0x4000, given.content_encoding)):
        if text and len(text) <= MAX_SHORT:
            flags |= flag
            parts += (bytes((len(text),)), text)
    parts += (table, b"\x02")
    if given.priority is not None:
        flags |= 0x0800
        parts.append(bytes((given.priority,)))
    for flag, text in ((0x0400, given.correlation_id), (0x0200, given.reply_to), (0x0080, given.message_id)):
        if text and len(text) <= MAX_SHORT:
            flags |= flag
            parts += (bytes((len(text),)), text)
    if given.timestamp is not None:
        flags |= 0x0040
        parts.append(_TIME.pack(given.timestamp))
    for flag, text in ((0x0020, given.type), (0x0008, given.app_id)):
        if text and len(text) <= MAX_SHORT:
            flags |= flag
            parts += (bytes((len(text),)), text)
    parts[0] = _FLAGS.pack(flags)
    return b"".join(parts)


def _short(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end], end
