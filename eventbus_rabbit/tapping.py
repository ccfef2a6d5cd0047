"""The tap: a transport under the client that takes the frames of busy channels out of the stream.

Deliveries, confirms and returns of a tapped channel go straight to their receiver, as bytes; every other frame goes on
to the client. The client decodes each frame into objects, one task per message; here it is a slice and a call.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, Protocol

from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from yarl import URL

from eventbus_rabbit import frames
from eventbus_rabbit.frames import ACK, BODY, DELIVER, GET_EMPTY, GET_OK, HEADER, METHOD, NACK, RETURN

_CHUNK: Final = 256 * 1024
_SIGN_OF_LIFE: Final = 1.0
_CONTENT: Final = (DELIVER, RETURN)
_CONFIRMS: Final = (ACK, NACK)


class Receiver(Protocol):
    """Who gets what is tapped off a channel. Called from the reader: nothing here may wait or raise."""

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        """A basic.deliver with its content."""

    def confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        """The broker's word on publishes."""

    def returned(self, method: bytes, properties: bytes) -> None:
        """A publish that no queue took."""


class Tap:
    """Puts the frames of one channel together again: method, header, body."""

    __slots__ = ("_body", "_left", "_method", "_properties", "_receiver")

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._method: bytes | None = None
        self._properties = b""
        self._body: list[bytes] = []
        self._left = 0

    def take(self, kind: int, payload: bytes) -> bool:
        """Use a frame; False if it is not for us."""
        if kind == METHOD:
            name = payload[:4]
            if name in _CONTENT:
                self._method = payload
                return True
            if name == GET_OK:
                self._method = frames.as_deliver(payload)
                return True
            if name == GET_EMPTY:  # who asks for many knows by the next answer that all of these have come
                return True
            if name in _CONFIRMS:
                self._receiver.confirmed(*frames.read_confirm(payload), name == ACK)
                return True
            return False
        if self._method is None:
            return False
        if kind == HEADER:
            self._left = frames.body_size(payload)
            self._properties = payload[12:]
        elif kind == BODY:
            self._left -= len(payload)
            self._body.append(payload)
        else:
            return False
        if self._left <= 0:
            self._complete()
        return True

    def take_whole(self, buffer: bytes, at: int, end: int, channel: int) -> int:
        """Use a delivery that stands in the buffer as a whole, in three frames, as nearly all do.

        `at` and `end` are those of its first frame. Returns where the last one ends, or 0: then they go one by one.
        """
        found = frames.content_in(buffer, end, channel) if buffer[at + 7 : at + 11] == DELIVER else None
        if found is None:
            return 0
        properties_end, body_end = found
        self._receiver.delivered(
            buffer[at + 7 : end - 1], buffer[end + 19 : properties_end - 1], buffer[properties_end + 7 : body_end - 1]
        )
        return body_end

    def _complete(self) -> None:
        method, pieces = self._method, self._body
        assert method is not None
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._method, self._body = None, []
        if method[:4] == DELIVER:
            self._receiver.delivered(method, self._properties, body)
        else:
            self._receiver.returned(method, self._properties)


class TappedReader:
    """A stream reader that hands the client only the frames nobody tapped."""

    def __init__(self, inner: asyncio.StreamReader, taps: dict[int, Tap]) -> None:
        self._inner = inner
        self._taps = taps
        self._buffer = b""
        self._at = 0
        self._frame = b""
        self._shown = time.monotonic()

    def at_eof(self) -> bool:
        """Whether nothing more will come."""
        return not self._frame and self._at >= len(self._buffer) and self._inner.at_eof()

    async def read(self, size: int = -1) -> bytes:
        """Whatever is left, untapped: the client asks for it only after a broken frame."""
        return await self._inner.read(size)

    async def readexactly(self, size: int) -> bytes:
        """The next bytes of the next untapped frame."""
        if not self._frame:
            self._frame = await self._next()
        piece, self._frame = self._frame[:size], self._frame[size:]
        return piece

    async def _next(self) -> bytes:
        taps, unpack = self._taps, frames.FRAME.unpack_from
        while True:
            buffer, at = self._buffer, self._at
            have = len(buffer)
            while have - at >= 7:
                if buffer[at : at + 4] == b"AMQP":  # the server's answer to a version it does not speak
                    self._buffer, self._at = b"", 0
                    return buffer[at:]
                kind, channel, size = unpack(buffer, at)
                end = at + size + 8
                if end > have:
                    break
                tap = taps.get(channel)
                whole = 0 if tap is None else tap.take_whole(buffer, at, end, channel)
                if whole:
                    at = whole
                    continue
                if tap is None or not tap.take(kind, buffer[at + 7 : end - 1]):
                    self._at = end
                    self._shown = time.monotonic()
                    return buffer[at:end]
                at = end
            self._at = at
            if taps and time.monotonic() - self._shown > _SIGN_OF_LIFE:
                # The client measures life by the frames it sees, and a busy server sends no heartbeats.
                self._shown = time.monotonic()
                return frames.HEARTBEAT
            data = await self._inner.read(_CHUNK)
            if not data:
                raise asyncio.IncompleteReadError(buffer[at:], 7)
            self._buffer, self._at = buffer[at:] + data, 0


class TappedTransport(TransportFactory):
    """Connects as the client would, with a tap in the reading direction."""

    def __init__(self) -> None:
        self.taps: dict[int, Tap] = {}

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open the connection; a larger buffer lets one read bring many messages."""
        factory = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, writer = await factory.create(url, limit=2 * _CHUNK, **kwargs)
        return TappedReader(reader, self.taps), writer  # type: ignore[return-value]


class FrameQueue:
    """The tap for a connection that somebody else opened: it stands before the queue of the client's own channel."""

    def __init__(self, tap: Tap, inner: asyncio.Queue[Any]) -> None:
        self._tap = tap
        self._inner = inner

    async def put(self, item: tuple[int, Any]) -> None:
        """Use a decoded frame or let the client have it."""
        frame = item[1]
        if isinstance(frame, (Basic.Deliver, Basic.GetOk, Basic.GetEmpty, Basic.Return, Basic.Ack, Basic.Nack)):
            taken = self._tap.take(METHOD, frame.index.to_bytes(4) + frame.marshal())
        elif isinstance(frame, ContentHeader):
            taken = self._tap.take(HEADER, frame.marshal())
        else:
            taken = isinstance(frame, ContentBody) and self._tap.take(BODY, frame.value or b"")
        if not taken:
            await self._inner.put(item)

    async def get(self) -> Any:
        """The next frame for the client."""
        return await self._inner.get()

    def task_done(self) -> None:
        """The client is done with a frame."""
        self._inner.task_done()
