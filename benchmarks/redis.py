"""redis:// beside raw redis-py and FastStream, one run on one server; then what depth costs (redis_depth.py)."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from redis.asyncio import Redis

from benchmarks import redis_depth
from benchmarks.measure import DATA, Figure, goal, measured, on_loop, show
from benchmarks.ours import figures
from eventbus import Service
from eventbus.worker import Worker  # noqa: F401 - loaded before anything is measured, as its peers are
from tests.brokers.redis import RedisServer

NUMBER = 30_000
BODY = json.dumps(DATA).encode()
ROUNDS = 5
"""Of each the best: what else runs on the machine only ever takes something away."""


async def _raw_publish(url: str) -> Figure:
    """XADD with 64 in flight."""
    client = Redis.from_url(url, protocol=2)
    left = iter(range(NUMBER))

    async def caller() -> None:
        for _ in left:
            await client.xadd("raw", {"data": BODY})

    try:
        await client.delete("raw")
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
    await client.delete("faststream")
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


def run() -> bool:
    """All figures; whether all goals were met."""
    print(f"redis: one server with AOF, body of {len(BODY)} bytes, {NUMBER:,} messages, the best of {ROUNDS} rounds")
    logging.getLogger("faststream").setLevel(logging.ERROR)
    best: dict[str, Figure] = {}

    def keep(name: str, figure: Figure) -> None:
        if name not in best or figure.rate > best[name].rate:
            best[name] = figure

    with RedisServer(None, "--maxmemory", "4gb") as server:
        url = server.url
        for _ in range(ROUNDS):
            keep("raw redis-py: XADD, 64 in flight", on_loop(_raw_publish(url)))
            keep("raw redis-py: XREADGROUP 256, XACK each", on_loop(_raw_consume(url, "each")))
            keep("raw redis-py: XREADGROUP 256, XACK per batch", on_loop(_raw_consume(url, "batch")))
            keep("FastStream: consume, handle, ack", on_loop(_faststream(url, 6_000)))
            service = Service("bench-a", concurrency=64, prefetch=1024)
            publishing, consuming, singly = on_loop(figures(url, service, number=NUMBER))
            keep("publish_many, 500 at a time", publishing)
            keep("publish, 64 callers at once", singly)
            keep("consume, handle, settle", consuming)
        for name, figure in best.items():
            show(name, figure)
        raw_publish, each, batch, fast, publish, _, consume = best.values()
        results = [
            goal("consume+settle against raw XACK each", consume.rate / each.rate, 8),
            goal("consume+settle against raw XACK per batch", consume.rate / batch.rate, 0.55),
            goal("consume+settle against FastStream", consume.rate / fast.rate, 15),
            goal("publish_many against raw XADD, 64 in flight", publish.rate / raw_publish.rate, 5),
            redis_depth.run(server),
        ]
    return all(results)


if __name__ == "__main__":
    run()
