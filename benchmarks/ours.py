"""What is measured of every bus in the same way: publish many, consume until all is settled, publish one by one."""

from __future__ import annotations

import asyncio

from benchmarks.measure import DATA, Figure, measured
from eventbus import Bus, Event, Service
from eventbus.worker import Worker as Worker  # a bus that consumes imports it then; its peers are imported as a whole


def counted(service: Service, number: int) -> asyncio.Event:
    """Give the service a handler that does nothing; set when it was called so many times."""
    left, done = number, asyncio.Event()

    @service.on("#")
    async def handle(event: Event) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    return done


async def figures(url: str, service: Service, *others: Service, number: int) -> tuple[Figure, Figure, Figure]:
    """Publishing 500 at a time, consuming by the first service, publishing by 64 callers at once."""
    done = counted(service, number)
    async with Bus(url, source="bench-api") as bus:
        await bus.provision(service, *others)
        events = [Event("order.created", DATA) for _ in range(number)]
        with measured(number) as publishing:
            for start in range(0, number, 500):
                await bus.publish_many(events[start : start + 500])
        del events  # a consumer does not carry its publisher's events through every garbage collection
        consuming = await consumed(bus, service, number, done)
        stats = await bus.stats(service)
        assert stats.ready == stats.inflight == 0
        few = [Event("order.created", DATA) for _ in range(6400)]
        with measured(len(few)) as singly:
            for start in range(0, len(few), 64):
                await asyncio.gather(*(bus.publish(event) for event in few[start : start + 64]))
        async with bus.serving(service), asyncio.timeout(60):  # the next round begins with an empty queue
            while (await bus.stats(service)).ready:
                await asyncio.sleep(0.05)
    return publishing, consuming, singly


async def consumed(bus: Bus, service: Service, number: int, done: asyncio.Event) -> Figure:
    """From the start of a consumer until the last event is settled; how it stops is not measured, as with its peers."""
    stack = bus.serving(service)
    with measured(number) as figure:
        await stack.__aenter__()
        async with asyncio.timeout(120):
            await done.wait()
            while any(health.held for health in bus.health.values()):
                await asyncio.sleep(0)
    await stack.__aexit__(None, None, None)
    return figure
