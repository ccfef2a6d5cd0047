"""AMQP 0-9-1 frames of the hot path as bytes: publish with its content, ack, nack; and reading them. Pure.

The client builds an object per frame and per property; writing 256 messages in one go costs a sixth of that.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from eventbus_rabbit.values import short

END: Final = b"\xce"
OVERHEAD: Final = 8
"""Bytes of a frame around its payload."""
METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"

RETURN: Final = b"\x00\x3c\x00\x32"
DELIVER: Final = b"\x00\x3c\x00\x3c"
GET_OK: Final = b"\x00\x3c\x00\x47"
GET_EMPTY: Final = b"\x00\x3c\x00\x48"
ACK: Final = b"\x00\x3c\x00\x50"
NACK: Final = b"\x00\x3c\x00\x78"

FRAME: Final = struct.Struct(">BHI")
_SETTLE: Final = struct.Struct(">BHIHHQBB")
_CONTENT: Final = struct.Struct(">HHQ")
_HEADER: Final = struct.Struct(">BHIHHQ")
_TAG: Final = struct.Struct(">QB")


def ack(channel: int, tag: int, *, multiple: bool) -> bytes:
    """basic.ack of one delivery, or of all up to it."""
    return _SETTLE.pack(METHOD, channel, 13, 60, 80, tag, multiple, 0xCE)


def nack(channel: int, tag: int, *, multiple: bool, requeue: bool) -> bytes:
    """basic.nack: back to its queue, or to the queue's dead-letter exchange."""
    return _SETTLE.pack(METHOD, channel, 13, 60, 120, tag, multiple | requeue << 1, 0xCE)


def get(channel: int, queue: str) -> bytes:
    """basic.get of one message, to be settled."""
    payload = b"\x00\x3c\x00\x46\x00\x00" + short(queue) + b"\x00"
    return FRAME.pack(METHOD, channel, len(payload)) + payload + END


def as_deliver(payload: bytes) -> bytes:
    """A basic.get-ok as the basic.deliver of a consumer without a name: the fields are the same."""
    return DELIVER + b"\x00" + payload[4:]


@lru_cache(maxsize=4096)
def publish(channel: int, exchange: str, key: str) -> bytes:
    """basic.publish, mandatory: what no queue takes is returned."""
    payload = b"\x00\x3c\x00\x28\x00\x00" + short(exchange) + short(key) + b"\x01"
    return FRAME.pack(METHOD, channel, len(payload)) + payload + END


def content(channel: int, properties: bytes, body: bytes, frame_max: int) -> list[bytes]:
    """The header frame and the body frames."""
    size, room = len(body), frame_max - OVERHEAD
    parts = [FRAME.pack(HEADER, channel, len(properties) + 12), _CONTENT.pack(60, 0, size), properties, END]
    if 0 < size <= room:
        parts += (FRAME.pack(BODY, channel, size), body, END)
    elif size:
        for start in range(0, size, room):
            piece = body[start : start + room]
            parts += (FRAME.pack(BODY, channel, len(piece)), piece, END)
    return parts


def read_deliver(payload: bytes) -> tuple[int, bool, str, str]:
    """Tag, redelivered, exchange and routing key of a basic.deliver."""
    at = 5 + payload[4]  # after the consumer's tag
    tag, redelivered = _TAG.unpack_from(payload, at)
    at += 9
    end = at + 1 + payload[at]
    exchange = payload[at + 1 : end].decode("utf-8", "replace")
    return tag, redelivered != 0, exchange, payload[end + 1 : end + 1 + payload[end]].decode("utf-8", "replace")


def read_return(payload: bytes) -> tuple[str, str, str]:
    """Reason, exchange and routing key of a basic.return."""
    texts, at = [], 6  # after the reply code
    for _ in range(3):
        end = at + 1 + payload[at]
        texts.append(payload[at + 1 : end].decode("utf-8", "replace"))
        at = end
    return texts[0], texts[1], texts[2]


def read_confirm(payload: bytes) -> tuple[int, bool]:
    """Tag and multiple of a basic.ack or basic.nack from the broker."""
    tag, bits = _TAG.unpack_from(payload, 4)
    return tag, bool(bits & 1)


def content_in(buffer: bytes, at: int, channel: int) -> tuple[int, int] | None:
    """Where the header frame at `at` and its only body frame end; None unless both are here, one after the other."""
    have = len(buffer)
    if have - at < _HEADER.size:
        return None
    kind, number, size, _, _, body = _HEADER.unpack_from(buffer, at)
    middle = at + size + OVERHEAD
    if kind != HEADER or number != channel or have - middle < FRAME.size:
        return None
    if FRAME.unpack_from(buffer, middle) != (BODY, channel, body):
        return None
    end = middle + body + OVERHEAD
    return (middle, int(end)) if end <= have else None


def body_size(payload: bytes) -> int:
    """The size of the body that a content header announces."""
    return int.from_bytes(payload[4:12])
