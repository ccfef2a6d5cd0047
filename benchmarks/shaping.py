"""What shaping costs and does: CPU beside the plain path, fairness on each broker, round trips, a poisoned batch."""

from __future__ import annotations

import asyncio
import math
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import DATA, goal, json_cost, measured, show
from benchmarks.ours import counted
from eventbus import Batch, Bus, Event, Fairness, Idempotency, Rate, RetryPolicy, Service
from eventbus.worker import Worker
from tests.brokers import kafka, rabbit
from tests.brokers.redis import RedisServer

NUMBER = 40_000
LARGE, SMALL, TENANTS = 100_000, 100, 9
EVERYTHING: dict[str, Any] = {"fairness": True, "rate": Rate(1_000_000, "60s"), "ordering": "key"}


async def _cost(**options: object) -> float:
    """CPU per event from receive to settle, on the memory bus."""
    service = Service("bench-shaped", concurrency=64, prefetch=512, **options)  # type: ignore[arg-type]
    done = counted(service, NUMBER)
    async with Bus("memory://", source="bench-api") as bus:
        await bus.provision(service)
        await bus.publish_many(
            [Event("order.created", DATA, tenant=f"t{n % 10}", key=f"k{n % 997}") for n in range(NUMBER)]
        )
        with measured(NUMBER) as figure:
            async with bus.serving(service):
                await done.wait()
    return show(", ".join(options) or "plain", figure).cpu_us


async def _fairness(name: str, url: str, settings: dict[str, dict[str, object]] | None = None) -> float:
    """How many events were handled, per event of the small tenants, when the last of those was done."""
    service = Service("bench-fair", concurrency=8, fairness=Fairness())
    handled, small, done = 0, TENANTS * SMALL, asyncio.Event()

    @service.on("#")
    async def handle(event: Event) -> None:
        nonlocal handled, small
        handled += 1
        if event.tenant != "large":
            small -= 1
            if not small:
                done.set()

    async with Bus(url, source="bench-api", settings=settings) as bus:
        await bus.provision(service)
        for start in range(0, LARGE, 1000):
            await bus.publish_many([Event("mail.due", n, tenant="large") for n in range(start, start + 1000)])
        for tenant in range(TENANTS):
            await bus.publish_many([Event("mail.due", n, tenant=f"small-{tenant}") for n in range(SMALL)])
        async with bus.serving(service):
            await done.wait()
            at = handled
    print(f"  {name}: the {TENANTS} small tenants were done after {at:,} of {LARGE + TENANTS * SMALL:,} events")
    return at / (TENANTS * SMALL)


async def _round_trips(url: str) -> float:
    """Round trips to the store for a batch of 64 events."""
    service = Service("bench-once", concurrency=64, idempotency=Idempotency())
    done = counted(service, NUMBER)
    async with Bus(url, source="bench-api") as bus:
        await bus.provision(service)
        for start in range(0, NUMBER, 1000):
            await bus.publish_many([Event("mail.due", n) for n in range(start, start + 1000)])
        with measured(NUMBER) as figure:
            async with bus.serving(service):
                await done.wait()
                worker = next(worker for worker in bus._workers if isinstance(worker, Worker))
                assert worker._completed is not None
                trips = worker._completed.round_trips
    show("redis with idempotency", figure)
    return trips / (NUMBER / 64)


async def _poisoned(position: int, size: int = 1000) -> tuple[int, int]:
    """Calls for a batch with one poisoned event beyond those without, and how many were acknowledged in one run."""
    service = Service("bench-batch", retry=RetryPolicy(max_retries=0))
    calls, stored, done = 0, 0, asyncio.Event()

    @service.batch("#", size=size, timeout=1.0, concurrency=1)
    async def insert(rows: list[int], batch: Batch) -> None:
        nonlocal calls, stored
        calls += 1
        assert all(entry.delivery.attempt == 1 for entry in batch), "somebody's budget was spent"
        if position in rows:
            raise ValueError("poisoned")
        stored += len(rows)
        if stored == size - 1:
            done.set()

    async with Bus("memory://", source="bench-api") as bus:
        await bus.provision(service)
        await bus.publish_many([Event("user.created", n) for n in range(size)])
        async with bus.serving(service):
            await done.wait()
    return calls - 1, stored


def run() -> bool:
    print("shaping: memory:// with a no-op handler, 10 tenants, 997 keys")
    scale = 3.0 / json_cost()
    plain = min(asyncio.run(_cost()) for _ in range(3))
    shaped = min(asyncio.run(_cost(**EVERYTHING)) for _ in range(3))
    met = [
        goal("fairness, rate and key lanes together, us of CPU per event", (shaped - plain) * scale, 10, at_most=True)
    ]
    found = [asyncio.run(_poisoned(position)) for position in (0, 1, 124, 250, 499, 500, 617, 998, 999)]
    print(f"  a batch of 1,000 with one poisoned event: {min(stored for _, stored in found)} acknowledged in one run")
    calls = max(calls for calls, _ in found)
    met.append(goal("calls more than without it", calls, 2 * math.log2(1000), at_most=True))
    print(f"fairness: one tenant with {LARGE:,} waiting, {TENANTS} with {SMALL} each")
    with tempfile.TemporaryDirectory() as folder:
        share = asyncio.run(_fairness("sqlite", f"sqlite:///{folder}/bus.db"))
        met.append(goal("sqlite: events handled per event of the small ones", share, 4, at_most=True))
        server = RedisServer(Path(folder) / "redis").start()
        try:
            share = asyncio.run(_fairness("redis", server.url))
            met.append(goal("redis: events handled per event of the small ones", share, 4, at_most=True))
            trips = asyncio.run(_round_trips(server.url))
            met.append(goal("redis: idempotency, round trips for a batch of 64", trips, 1, at_most=True))
        finally:
            server.stop()
        if rabbit.installed():
            with rabbit.node("bench-shaping", rabbit.PORT + 6, Path(folder) / "rabbit") as broker:
                share = asyncio.run(_fairness("rabbitmq", broker.url))
                print(f"       rabbitmq: {share:.1f} events per event of the small ones (over the fetched window only)")
        if kafka.installed():
            with kafka.node(kafka.PORT + 6, Path(folder) / "kafka") as node:
                share = asyncio.run(_fairness("kafka", node.url))
                print(f"       kafka: {share:.1f} events per event of the small ones (over the fetched window only)")
    return all(met)
