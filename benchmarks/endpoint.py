"""A light endpoint in a process of its own: answers 200 to every POST, and counts. `GET /` tells what came."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httptools
import uvloop

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Counted:
    def __init__(self) -> None:
        self.events = 0
        self.requests = 0
        self.first = self.last = 0.0


class Endpoint(asyncio.Protocol):
    def __init__(self, counted: Counted) -> None:
        self.counted = counted
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.batch, self.body = False, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.batch = self.batch or value.startswith(b"application/cloudevents-batch")

    def on_body(self, data: bytes) -> None:
        if self.batch:
            self.body += data

    def on_message_complete(self) -> None:
        counted = self.counted
        if self.parser.get_method() == b"GET":
            said = json.dumps(vars(counted)).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(said) + said)  # type: ignore
            return
        counted.last = time.monotonic()
        counted.first = counted.first or counted.last
        counted.requests += 1
        counted.events += self.body.count(b'"specversion"') if self.batch else 1
        self.transport.write(OK)  # type: ignore[attr-defined]


async def main() -> None:
    counted = Counted()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Endpoint(counted), "127.0.0.1", int(sys.argv[1]), backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
