"""redis:// beside raw redis-py and FastStream, one run on one server; a large backlog; many delayed retries."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine
from typing import Any

from redis.asyncio import Redis

from benchmarks.measure import DATA, Figure, goal, measured, show
from eventbus import Bus, Event, Service
from eventbus.settlement import ACK, Requeue
from tests.brokers.redis import RedisServer

NUMBER = 30_000
BODY = json.dumps(DATA).encode()


async def _raw_publish(url: str) -> Figure:
    """XADD with 64 in flight."""
    client = Redis.from_url(url, protocol=2)
    left = iter(range(NUMBER))

    async def caller() -> None:
        for _ in left:
            await client.xadd("raw", {"data": BODY})

    try:
        await client.xgroup_create("raw", "each", "0", mkstream=True)
        await client.xgroup_create("raw", "batch", "0", mkstream=True)
        with measured(NUMBER) as figure:
            await asyncio.gather(*(caller() for _ in range(64)))
    finally:
        await client.aclose()
    return figure


async def _raw_consume(url: str, group: str) -> Figure:
    """XREADGROUP 256, then XACK of each, or of the batch."""
    client = Redis.from_url(url, protocol=2)
    left = NUMBER
    try:
        with measured(NUMBER) as figure:
            while left:
                ((_, entries),) = await client.xreadgroup(group, "me", {"raw": ">"}, count=256, block=1000)
                if group == "batch":
                    await client.xack("raw", group, *(id for id, _ in entries))
                else:
                    for id, _ in entries:
                        await client.xack("raw", group, id)
                left -= len(entries)
    finally:
        await client.aclose()
    return figure


async def _faststream(url: str, number: int) -> Figure:
    """A subscriber of a stream with a group, as its documentation shows it."""
    from faststream.redis import RedisBroker, StreamSub

    broker = RedisBroker(url, logger=None)
    left, done = number, asyncio.Event()

    @broker.subscriber(stream=StreamSub("faststream", group="bench", consumer="me", max_records=256))
    async def handle(body: dict[str, Any]) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    client = Redis.from_url(url)
    await client.xgroup_create("faststream", "bench", "0", mkstream=True)
    await broker.connect()
    try:
        for _ in range(0, number, 50):
            await asyncio.gather(*(broker.publish(DATA, stream="faststream") for _ in range(50)))
        with measured(number) as figure:
            await broker.start()
            async with asyncio.timeout(120):
                await done.wait()
    finally:
        await broker.stop()
        await client.aclose()
    return figure


async def _bus(url: str) -> tuple[Figure, Figure, Figure]:
    service = Service("bench-a", concurrency=64, prefetch=1024)
    left, done = NUMBER, asyncio.Event()

    @service.on("order.created")
    async def handle(event: Event) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    async with Bus(url, source="bench-api") as bus:
        await bus.provision(service)
        events = [Event("order.created", DATA) for _ in range(NUMBER)]
        with measured(NUMBER) as publishing:
            for start in range(0, NUMBER, 500):
                await bus.publish_many(events[start : start + 500])
        del events  # a consumer does not carry its publisher's events through every garbage collection
        with measured(NUMBER) as consuming:
            async with bus.serving(service):
                async with asyncio.timeout(120):
                    await done.wait()
        few = [Event("order.created", DATA) for _ in range(6400)]
        with measured(len(few)) as singly:
            for start in range(0, len(few), 64):
                await asyncio.gather(*(bus.publish(event) for event in few[start : start + 64]))
    return publishing, consuming, singly


async def _backlogs(url: str) -> tuple[Figure, Figure]:
    """Claim and acknowledge in batches of 256 while 10 thousand, then a million are waiting."""
    service = Service("bench-backlog")
    figures = []
    async with Bus(url, source="bench-api") as bus:
        await bus.provision(service)
        for backlog in (10_000, 1_000_000):
            missing = backlog - (await bus.stats(service)).ready
            while missing > 0:
                await bus.publish_many([Event("order.created", {"n": 1}) for _ in range(min(missing, 5000))])
                missing -= 5000
            best: Figure | None = None
            async with bus.adapter.consume(service.subscription()) as consumer:
                for _ in range(3):
                    with measured(0) as figure:
                        while figure.events < 2_500:
                            deliveries = await consumer.receive(256, 1.0)
                            await consumer.settle([(delivery, ACK) for delivery in deliveries])
                            figure.events += len(deliveries)
                    best = figure if best is None or figure.rate > best.rate else best
            assert best is not None
            figures.append(best)
    return figures[0], figures[1]


async def _delayed(url: str, server: RedisServer) -> tuple[float, float]:
    """CPU of an idle consumer, and of the server, while 100,000 retries wait: shares of a core."""
    service = Service("bench-delayed")
    async with Bus(url, source="bench-api") as bus:
        await bus.provision(service)
        async with bus.adapter.consume(service.subscription()) as consumer:
            for _ in range(100):
                await bus.publish_many([Event("order.created", {"n": n}) for n in range(1000)])
                taken = 0
                while taken < 1000:
                    deliveries = await consumer.receive(1000, 1.0)
                    later = Requeue(time.time() + 3600, 3600, {})
                    await consumer.settle([(delivery, later) for delivery in deliveries])
                    taken += len(deliveries)
            assert (await bus.stats(service)).delayed == 100_000
            await asyncio.sleep(1.0)  # the last trimming
            wall, mine, its = time.perf_counter(), time.process_time(), _cpu(server)
            while time.perf_counter() - wall < 5.0:
                assert not await consumer.receive(256, 1.0)
            wall = time.perf_counter() - wall
            return (time.process_time() - mine) / wall, (_cpu(server) - its) / wall


def _cpu(server: RedisServer) -> float:
    """Seconds of CPU that the server has used."""
    assert server.process is not None
    with open(f"/proc/{server.process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def run() -> bool:
    """All figures; whether all goals were met."""
    print(f"redis: one server with AOF, body of {len(BODY)} bytes, {NUMBER:,} messages")
    logging.getLogger("faststream").setLevel(logging.ERROR)
    with RedisServer(None, "--maxmemory", "4gb") as server:
        url = server.url
        raw_publish = show("raw redis-py: XADD, 64 in flight", _run(_raw_publish(url)))
        raw_each = show("raw redis-py: XREADGROUP 256, XACK each", _run(_raw_consume(url, "each")))
        raw_batch = show("raw redis-py: XREADGROUP 256, XACK per batch", _run(_raw_consume(url, "batch")))
        fast = show("FastStream: consume, handle, ack", _run(_faststream(url, 6_000)))
        publish, consume, singly = _run(_bus(url))
        show("publish_many, 500 at a time", publish)
        show("publish, 64 callers at once", singly)
        show("consume, handle, settle", consume)
        raw_again = show("raw redis-py: XREADGROUP 256, XACK per batch, again", _run(_again(url)))
        mover, its = _run(_delayed(url, server))
        print(f"  100,000 delayed, none due: {mover:.1%} of a core here, {its:.1%} in the server")
        small, large = _run(_backlogs(url))
        show("receive + settle by 256, 10 thousand waiting", small)
        show("receive + settle by 256, 1 million waiting", large)
    per_batch = (raw_batch.rate + raw_again.rate) / 2
    results = [
        goal("consume+settle against raw XACK each", consume.rate / raw_each.rate, 8),
        goal("consume+settle against raw XACK per batch", consume.rate / per_batch, 0.55),
        goal("consume+settle against FastStream", consume.rate / fast.rate, 15),
        goal("publish_many against raw XADD, 64 in flight", publish.rate / raw_publish.rate, 5),
        goal("rate at 1 million waiting against 10 thousand", large.rate / small.rate, 0.8),
        goal("share of a core for 100,000 delayed, none due", max(mover, its), 0.05, at_most=True),
    ]
    return all(results)


async def _again(url: str) -> Figure:
    client = Redis.from_url(url)
    try:
        await client.xgroup_setid("raw", "batch", "0")
    finally:
        await client.aclose()
    return await _raw_consume(url, "batch")


if __name__ == "__main__":
    run()
