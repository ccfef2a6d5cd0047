"""Publishing over HTTP while the broker is killed under load: every 202 is stored, and the rest is told with 503."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import aiohttp
import pytest

from eventbus import Bus, Event, Service
from tests.brokers import rabbit, redis

CLIENTS = 16
KILLS = 3 if "EVENTBUS_FAULT_SECONDS" in os.environ else 1
BETWEEN = int(os.environ.get("EVENTBUS_FAULT_MESSAGES", "600"))
"""Events that are accepted before each kill, and after the last."""
WITHIN = 90.0


class Broker(Protocol):
    url: str

    def kill(self) -> None: ...

    def start(self) -> object: ...


@pytest.fixture(params=["rabbit", "redis"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """A broker made to be killed."""
    with redis.server() if request.param == "redis" else rabbit.node("ingest", 5678, tmp_path / "rabbit") as found:
        yield found


@asynccontextmanager
async def listening(url: str, folder: Path) -> AsyncIterator[str]:
    """`eventbus run --listen` as a process; gives its address."""
    (folder / "bus.toml").write_text(f'url = "{url}"\nsource = "wms-api"\n[redis]\ntimeout = "2s"\n')
    process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
        [sys.executable, "-m", "eventbus", "run", "--listen", "127.0.0.1:0", "--log", "json"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        while '"started"' not in (line := await asyncio.to_thread(process.stderr.readline)):
            assert line, "it did not start"
        draining = asyncio.ensure_future(asyncio.to_thread(lines.extend, process.stderr))
        yield json.loads(line)["listen"]
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0, lines[-5:]
        await draining
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stderr.close()


class Publishers:
    """Clients that post one event after the other, and write down what was answered."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/events"
        self.accepted: list[str] = []
        self.answers: Counter[int] = Counter()
        self.stop = False

    async def run(self, name: int) -> None:
        number = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            while not self.stop:
                number += 1
                id = f"{name}-{number}"
                head = {"ce-type": "order.created", "ce-id": id, "content-type": "application/json"}
                async with session.post(self._url, data=b'{"n": 1}', headers=head) as response:
                    await response.read()
                self.answers[response.status] += 1
                if response.status == 202:
                    self.accepted.append(id)
                else:
                    assert response.headers["retry-after"]
                    await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(WITHIN):
        while not condition():
            await asyncio.sleep(0.02)
    assert condition(), what


async def received(url: str, service: Service, wanted: set[str]) -> Counter[str]:
    """What the service gets, until it has all that is wanted."""
    found: Counter[str] = Counter()
    complete = asyncio.Event()

    @service.on("#")
    async def keep(event: Event) -> None:
        found[event.id] += 1
        if event.id in wanted and wanted <= found.keys():
            complete.set()

    async with Bus(url, source="wms-api") as bus, bus.serving(service):
        try:
            async with asyncio.timeout(WITHIN):
                await complete.wait()
        except TimeoutError:
            pass  # the caller tells what is missing
    return found


async def test_every_202_is_stored_and_the_rest_is_503(broker: Broker, tmp_path: Path) -> None:
    """SIGKILL of the broker, again and again, with 16 clients publishing: no accepted event is missing afterwards."""
    service = Service("wms-stock", concurrency=16)
    async with Bus(broker.url, source="wms-api") as bus:
        await bus.provision(service)
    async with listening(broker.url, tmp_path) as address:
        publishers = Publishers(address)
        running = [asyncio.create_task(publishers.run(name)) for name in range(CLIENTS)]
        try:
            for kill in range(KILLS + 1):
                goal = len(publishers.accepted) + BETWEEN
                await until(lambda goal=goal: len(publishers.accepted) >= goal, f"{goal} accepted")
                if kill < KILLS:
                    failures = publishers.answers[503]
                    await asyncio.to_thread(broker.kill)
                    await until(lambda failures=failures: publishers.answers[503] > failures, "503 while it is down")
                    await asyncio.to_thread(broker.start)
        finally:
            publishers.stop = True
            await asyncio.gather(*running)
    accepted = set(publishers.accepted)
    found = await received(broker.url, service, accepted)
    twice = sum(number - 1 for number in found.values())
    print(f"\naccepted {len(accepted)}, answers {dict(publishers.answers)}, received {len(found)}, twice {twice}")
    assert accepted - found.keys() == set()
    assert set(publishers.answers) == {202, 503}
