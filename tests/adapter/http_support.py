"""A server of raw sockets that can answer anything, and every sender there is to try on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from eventbus.forward import Answer, Sender, SendFailed
from eventbus.forward.aiohttp_sender import AiohttpSender
from eventbus.forward.httpx_sender import HttpxSender
from eventbus.forward.lean_sender import LeanSender

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
KINDS = ("lean", "aiohttp", "httpx")


class Server:
    """Reads one request after the other and lets a test write the answer, byte by byte."""

    def __init__(self) -> None:
        self.play: Play = says(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        self.requests: list[tuple[str, list[tuple[str, str]], bytes]] = []
        self.connections = 0
        self.open_connections = 0
        self.url = ""
        self._idle = asyncio.Event()
        self._idle.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, tls: ssl.SSLContext | None = None) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/events?a=b"
        return server

    async def idle(self) -> None:
        """Wait until nobody is connected."""
        async with asyncio.timeout(5):
            await self._idle.wait()

    async def hang_up(self) -> None:
        """Close every connection, as a server does with those that are idle."""
        for writer in list(self._writers):
            writer.close()
        await self.idle()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        self._idle.clear()
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
                while not writer.is_closing():
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                    headers = [(line.partition(": ")[0].lower(), line.partition(": ")[2]) for line in head[1:-2]]
                    body = await reader.readexactly(int(dict(headers).get("content-length", "0")))
                    self.requests.append((head[0], headers, body))
                    await self.play(reader, writer)
                    await writer.drain()
        finally:
            writer.close()
            self._writers.discard(writer)
            self.open_connections -= 1
            if not self.open_connections:
                self._idle.set()


def says(data: bytes, *, then_close: bool = False) -> Play:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if then_close:
            writer.close()

    return play


def resets(after: bytes = b"") -> Play:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(after)
        await writer.drain()
        # With a linger of zero the kernel sends RST instead of FIN.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    return play


def goes_silent(after: bytes = b"") -> Play:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(after)
        await writer.drain()
        await reader.read()  # until the client has had enough

    return play


def repeats(start: bytes, part: bytes, pause: float) -> Play:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)

    return play


@contextlib.asynccontextmanager
async def a_sender(kind: str, *, max_connections: int = 100, connect_timeout: float = 5.0) -> AsyncIterator[Sender]:
    if kind == "httpx":
        # trust_env is the user's own choice on a client of their own.
        limits = httpx.Limits(max_connections=max_connections)
        async with httpx.AsyncClient(trust_env=False, limits=limits) as client:
            yield HttpxSender(client, max_in_flight=max_connections, connect_timeout=connect_timeout)
        return
    make = LeanSender if kind == "lean" else AiohttpSender
    made = make(max_connections=max_connections, connect_timeout=connect_timeout)
    yield made
    await made.aclose()


async def post(sender: Sender, url: str, *, timeout: float = 5.0) -> Answer:
    return await sender.post(url, [("content-type", "text/plain"), ("x-a", "1")], b"body", timeout=timeout)


async def failure(sender: Sender, url: str, *, timeout: float = 5.0) -> SendFailed:
    with pytest.raises(SendFailed) as caught:
        await post(sender, url, timeout=timeout)
    assert caught.value.text
    assert caught.value.__suppress_context__
    return caught.value


def answer(status: int, body: bytes = b"", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%s\r\n%s" % (status, len(body), headers, body)


def open_sockets() -> int:
    """How many sockets this process has, of whatever kind."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return found
