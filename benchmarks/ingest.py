"""Publishing over HTTP: `eventbus run --listen` beside starlette on uvicorn that awaits `bus.publish` for each request.

64 connections of a client in this process, one request after the other on each; the server is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httptools
import uvloop

from benchmarks.forward import BODY, Run, broker_url, cpu_of, environment, family, rss_of
from benchmarks.forward import PORT as FORWARD_PORT
from benchmarks.measure import goal, show
from eventbus import Bus, Service

NUMBER = int(os.environ.get("EVENTBUS_BENCH_EVENTS", "30000"))
CONNECTIONS = 64
PORT = FORWARD_PORT + 1
HEAD = b"POST /events HTTP/1.1\r\nhost: a\r\nce-type: order.created\r\nce-source: /bench\r\n"
REQUEST = HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY

PLAIN = """
import sys
import uvicorn
from contextlib import asynccontextmanager
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from eventbus import Bus, Event

bus = Bus(sys.argv[1], source="bench-api")

@asynccontextmanager
async def lifespan(app):
    async with bus:
        yield

async def events(request):
    body = await request.body()
    head = request.headers
    event = Event(head["ce-type"], body, source=head["ce-source"], content_type=head["content-type"])
    await bus.publish(event)
    return JSONResponse({"id": event.id}, 202)

app = Starlette(routes=[Route("/events", events, methods=["POST"])], lifespan=lifespan)
uvicorn.run(app, port=int(sys.argv[2]), http="httptools", loop="uvloop", access_log=False, log_level="warning")
"""


class _Client(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, left: Iterator[int], done: asyncio.Event) -> None:
        self._left, self._done = left, done
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() != 202:
            raise SystemExit(f"answered with {self._parser.get_status_code()}")
        self._next()

    def _next(self) -> None:
        if next(self._left, None) is None:
            self._done.set()
            self._transport.close()
        else:
            self._transport.write(REQUEST)  # type: ignore[attr-defined]


async def _load(number: int) -> float:
    loop = asyncio.get_running_loop()
    left = iter(range(number))
    began = loop.time()
    ends = [asyncio.Event() for _ in range(CONNECTIONS)]
    for end in ends:
        await loop.create_connection(lambda end=end: _Client(left, end), "127.0.0.1", PORT)
    for end in ends:
        await end.wait()
    return loop.time() - began


@contextlib.contextmanager
def _server(command: list[str], folder: Path) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment())
    try:
        uvloop.run(_answers())
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def _answers() -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                await asyncio.open_connection("127.0.0.1", PORT)
                return
            await asyncio.sleep(0.02)


def _measure(command: list[str], folder: Path) -> Run:
    with _server(command, folder) as pid:
        uvloop.run(_load(1000))
        before = cpu_of(family(pid))
        wall = uvloop.run(_load(NUMBER))
        return Run(NUMBER, wall, cpu_of(family(pid)) - before, rss_of(family(pid)))


async def _provision(url: str) -> None:
    async with Bus(url, source="bench-api") as bus:
        await bus.provision(Service("bench-ingest"))


def _bench(broker: str) -> bool:
    with tempfile.TemporaryDirectory() as name, broker_url(broker, Path(name)) as url:
        folder = Path(name)
        asyncio.run(_provision(url))
        (folder / "plain.py").write_text(PLAIN)
        (folder / "bus.toml").write_text(f'url = "{url}"\nsource = "bench-api"\n')
        listen = ["-m", "eventbus", "run", "bus.toml", "--listen", f"127.0.0.1:{PORT}", "--log-level", "warning"]
        plain, ours = [], []
        for _ in range(2):
            plain.append(_measure(["plain.py", url, str(PORT)], folder))
            ours.append(_measure(listen, folder))
        best = [max(runs, key=lambda run: run.rate) for runs in (plain, ours)]
    show(f"{broker}: starlette on uvicorn, bus.publish each", best[0])
    show(f"{broker}: eventbus run --listen", best[1])
    print(f"  rate against starlette on uvicorn: {best[1].rate / best[0].rate:.2f} (where the disk decides, about 1)")
    return goal("CPU per event against starlette on uvicorn", best[1].cpu_us / best[0].cpu_us, 0.6, at_most=True)


def run(*brokers: str) -> bool:
    print(f"ingest: {NUMBER:,} POSTs of {len(BODY)} bytes, {CONNECTIONS} connections, best of 2, with uvloop")
    results = [_bench(broker) for broker in brokers or ("sqlite", "redis", "rabbit")]
    return all(results)


if __name__ == "__main__":
    sys.exit(0 if run(*sys.argv[1:]) else 1)
