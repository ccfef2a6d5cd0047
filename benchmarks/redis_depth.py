"""What depth costs on redis://: a backlog of a million, 100,000 delayed retries, 100,000 dead letters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis

from benchmarks.measure import Figure, goal, measured, on_loop, show
from eventbus import Bus, Event, Service
from eventbus.adapter import Consumer, Redrive
from eventbus.settlement import ACK, Park, Requeue
from tests.brokers.redis import RedisServer

BACKLOGS = (10_000, 1_000_000)
PER_ROUND = 5_120
ROUNDS = 5
LETTERS = (1_000, 100_000)


async def _backlogs(url: str) -> dict[tuple[str, int], Figure]:
    """Receive and acknowledge by 256 while few, then many are waiting: ours, and raw redis-py on the same stream."""
    service = Service("bench-backlog", prefetch=1024)
    best: dict[tuple[str, int], Figure] = {}
    client = Redis.from_url(url, protocol=2)
    async with Bus(url, source="bench-api") as bus:
        await bus.provision(service)
        await client.xgroup_create("{bench}:main", "raw", "$", mkstream=True)
        for backlog in BACKLOGS:
            for _ in range(ROUNDS):
                missing = backlog - (await bus.stats(service)).ready
                while missing > 0:
                    await bus.publish_many([Event("order.created", {"n": 1}) for _ in range(min(missing, 5000))])
                    missing -= 5000
                async with bus.adapter.consume(service.subscription()) as consumer:
                    ours = await _ours(consumer)
                    for name, figure in (("ours", ours), ("raw", await _raw(client))):
                        if (name, backlog) not in best or figure.rate > best[name, backlog].rate:
                            best[name, backlog] = figure
    await client.xgroup_destroy("{bench}:main", "raw")
    await client.aclose()
    return best


async def _ours(consumer: Consumer) -> Figure:
    with measured(0) as figure:
        while figure.events < PER_ROUND:
            deliveries = await consumer.receive(256, 1.0)
            await consumer.settle([(delivery, ACK) for delivery in deliveries])
            figure.events += len(deliveries)
    return figure


async def _raw(client: Any) -> Figure:
    with measured(0) as figure:
        while figure.events < PER_ROUND:
            ((_, entries),) = await client.xreadgroup("raw", "me", {"{bench}:main": ">"}, count=256, block=1000)
            await client.xack("{bench}:main", "raw", *(id for id, _ in entries))
            figure.events += len(entries)
    return figure


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


async def _letters(url: str) -> dict[str, list[float]]:
    """Milliseconds of each operation on dead letters, the best of many, at each depth."""
    service = Service("bench-letters")
    found: dict[str, list[float]] = {}
    async with Bus(f"{url}?dlq_max_entries=none", source="bench-api") as bus:
        await bus.provision(service)
        parking = bus.adapter.parking("bench-letters", "bench")
        depth = 0
        for letters in LETTERS:
            async with bus.adapter.consume(service.subscription()) as consumer:
                while depth < letters:
                    await bus.publish_many([Event("order.created", {"n": n}, tenant=f"t{n % 50}") for n in range(500)])
                    taken = 0
                    while taken < 500:
                        deliveries = await consumer.receive(500, 1.0)
                        story = {"x-park-reason": "max-retries", "x-final-error": "smtp: 550", "x-error-code": "550"}
                        await consumer.settle([(delivery, Park("max-retries", story)) for delivery in deliveries])
                        taken += len(deliveries)
                    depth += 500
            page = await parking.browse(None, 100)
            some = page.letters[50]

            async def one_back(take: Callable[[str], Awaitable[object]]) -> None:
                # The oldest; the depth stays what it is by all but a handful.
                await take((await parking.browse(None, 1)).letters[0].address)

            operations: dict[str, Callable[[], Awaitable[object]]] = {
                "count": parking.depth,
                "first page of 100": lambda: parking.browse(None, 100),
                "the page after a cursor": lambda cursor=some.address: parking.browse(cursor, 100),  # type: ignore[misc]
                "show by event id": lambda id=some.event.id: parking.find(id),  # type: ignore[misc]
                "stats by reason": lambda: parking.tally("reason"),
                "stats by tenant": lambda: parking.tally("tenant"),
                "re-drive one": lambda: one_back(lambda address: parking.redrive([Redrive(address, {})])),
                "purge one": lambda: one_back(lambda address: parking.purge([address])),
                "apply retention": lambda: bus.adapter.expire("bench-letters", "bench"),  # type: ignore[attr-defined]
            }
            for name, operation in operations.items():
                times = []
                for _ in range(20):
                    started = time.perf_counter()
                    await operation()
                    times.append((time.perf_counter() - started) * 1000)
                found.setdefault(name, []).append(min(times))
    return found


def _cpu(server: RedisServer) -> float:
    """Seconds of CPU that the server has used."""
    assert server.process is not None
    with open(f"/proc/{server.process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def run(server: RedisServer) -> bool:
    """All figures; whether all goals were met."""
    mover, its = on_loop(_delayed(server.url, server))
    print(f"  100,000 delayed, none due: {mover:.1%} of a core here, {its:.1%} in the server")
    letters = on_loop(_letters(server.url))
    for name, (few, many) in letters.items():
        print(f"  {name:<30} {few:>8.2f} ms at {LETTERS[0]:,} dead letters, {many:>8.2f} ms at {LETTERS[1]:,}")
    backlogs = on_loop(_backlogs(server.url))
    for (name, backlog), figure in sorted(backlogs.items(), key=lambda each: (each[0][1], each[0][0])):
        show(f"{name}: receive + settle by 256, {backlog:,} waiting", figure)
    few, many = BACKLOGS
    ours = backlogs["ours", many].rate / backlogs["ours", few].rate
    raw = backlogs["raw", many].rate / backlogs["raw", few].rate
    print(f"  raw redis-py at 1 million waiting against 10 thousand: {raw:.2f}; ours over that: {ours / raw:.2f}")
    worst = max(letters, key=lambda name: letters[name][1] / letters[name][0])
    return all(
        [
            goal("rate at 1 million waiting against 10 thousand", ours, 0.8),
            goal("share of a core for 100,000 delayed, none due", max(mover, its), 0.05, at_most=True),
            goal(f"dead letters: 100,000 against 1,000, worst ({worst})",
                 letters[worst][1] / letters[worst][0], 3, at_most=True),
        ]
    )  # fmt: skip
