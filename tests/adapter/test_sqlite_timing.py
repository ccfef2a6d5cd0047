"""Waiting: never early, hardly late, woken by this process and by others, and quiet meanwhile."""

from __future__ import annotations

import asyncio
import resource
import time
from pathlib import Path

from eventbus.embedded.sqlite.watch import Place, Watch
from eventbus.event import Event
from eventbus.settlement import ACK, Requeue
from tests.adapter.sqlite_support import LETTERS, OTHER, SUB, eventually, opened, park, receive, waits

LATE = 0.25


async def test_a_delayed_message_is_never_early_and_hardly_late(tmp_path: Path) -> None:
    """Delays of 50 ms to a second, shuffled, each come after their due time and within 250 ms of it."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        await adapter.publish("wms", [Event("n", n) for n in range(20)])
        due = {}
        for delivery in await receive(consumer, 20):
            moment = time.time() + 0.05 * (1 + (int(str(delivery.event.data)) * 7) % 20)
            due[delivery.event.id] = moment
            assert await consumer.settle([(delivery, Requeue(moment, 0.0, {}))]) == ["done"]
        while due:
            for delivery in await receive(consumer):
                late = time.time() - due.pop(delivery.event.id)
                assert 0 <= late < LATE
                await consumer.settle([(delivery, ACK)])


async def test_a_long_delay_does_not_hold_back_a_shorter_one(tmp_path: Path) -> None:
    """A consumer that waits for a message due in an hour still gets one due in a moment on time."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as one, adapter.consume(SUB) as two:
        await adapter.publish("wms", [Event("long"), Event("short")])
        long, short = await receive(one, 2)
        await one.settle([(long, Requeue(time.time() + 3600, 3600, {}))])
        waiting = asyncio.ensure_future(two.receive(1, 5.0))
        await waits(two)
        due = time.time() + 0.2
        await one.settle([(short, Requeue(due, 0.2, {}))])
        (again,) = await waiting
        assert again.event.type == "short"
        assert 0 <= time.time() - due < LATE


async def test_a_publish_wakes_a_waiting_consumer_of_this_process(tmp_path: Path) -> None:
    """What is published here is received at once, not at the next look."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        delays = []
        for _ in range(20):
            waiting = asyncio.ensure_future(consumer.receive(1, 5.0))
            await waits(consumer)
            started = time.monotonic()
            await adapter.publish("wms", [Event("a")])
            (delivery,) = await waiting
            delays.append(time.monotonic() - started)
            await consumer.settle([(delivery, ACK)])
        assert sorted(delays)[10] < 0.02


async def test_what_others_do_is_noticed(tmp_path: Path) -> None:
    """Publish, release and due times of another connection (as of another process) wake us too."""
    async with (
        opened(tmp_path, SUB) as here,
        opened(tmp_path) as there,
        here.consume(SUB) as ours,
        there.consume(SUB) as theirs,
    ):
        for _ in range(5):
            waiting = asyncio.ensure_future(ours.receive(1, 5.0))
            await waits(ours)
            started = time.monotonic()
            await there.publish("wms", [Event("a")])
            (delivery,) = await waiting
            assert time.monotonic() - started < LATE
            await ours.settle([(delivery, ACK)])
        await there.publish("wms", [Event("b")])
        (held,) = await receive(theirs)
        waiting = asyncio.ensure_future(ours.receive(1, 5.0))
        await waits(ours)
        due = time.time() + 0.3
        await theirs.settle([(held, Requeue(due, 0.3, {}))])
        await waiting
        assert 0 <= time.time() - due < LATE


async def test_what_came_before_the_waiting_began_is_noticed(tmp_path: Path) -> None:
    """A change that others made, and the watch saw, between a claim and its wait is not slept through."""
    async with opened(tmp_path, SUB, OTHER) as adapter:
        await adapter.publish("wms", [Event("a")])
        watch, loop = Watch(adapter.path), asyncio.get_running_loop()
        busy, empty = Place(1, 1, dead_letters=False), Place(2, 1, dead_letters=True)
        futures = [loop.create_future() for _ in range(2)]
        first = asyncio.ensure_future(watch.wait(empty, watch.mark(empty), None, loop.time() + 30, futures[0]))
        await eventually(lambda: any(waiter.looked for waiter in watch._waiters), "the watch has looked")
        started = time.monotonic()
        await watch.wait(busy, watch.mark(busy), None, loop.time() + 30, futures[1])
        assert time.monotonic() - started < LATE
        await watch.aclose()
        await first


async def test_a_new_dead_letter_wakes_its_consumer(tmp_path: Path) -> None:
    """A waiting consumer of dead letters gets one as soon as it is parked."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(LETTERS) as consumer:
        waiting = asyncio.ensure_future(consumer.receive(1, 5.0))
        await waits(consumer)
        started = time.monotonic()
        await park(adapter, Event("a"))
        assert len(await waiting) == 1
        assert time.monotonic() - started < LATE


async def test_receive_ends_with_its_timeout(tmp_path: Path) -> None:
    """An empty queue gives an empty list after the timeout, and at once for a timeout of zero."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        started = time.monotonic()
        assert await consumer.receive(1, 0.0) == []
        assert time.monotonic() - started < 0.2
        assert await consumer.receive(1, 0.3) == []
        assert 0.3 <= time.monotonic() - started < 0.3 + 2 * LATE


async def test_wake_ends_a_waiting_receive(tmp_path: Path) -> None:
    """wake() makes receive return now; called a moment before, it makes the next one return."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        started = time.monotonic()
        waiting = asyncio.ensure_future(consumer.receive(1, 30.0))
        await waits(consumer)
        consumer.wake()
        assert await waiting == []
        consumer.wake()
        assert await consumer.receive(1, 30.0) == []
        assert time.monotonic() - started < 5
        await adapter.publish("wms", [Event("a")])
        assert len(await consumer.receive(1, 5.0)) == 1


async def test_closing_the_bus_ends_a_waiting_receive(tmp_path: Path) -> None:
    """A receive does not outlive the adapter it waits on."""
    async with opened(tmp_path, SUB) as adapter:
        consumer = await adapter.consume(SUB).__aenter__()
        waiting = asyncio.ensure_future(consumer.receive(1, 30.0))
        await waits(consumer)
        await consumer.aclose()
        assert await asyncio.wait_for(waiting, 5) == []


async def test_waiting_costs_next_to_nothing(tmp_path: Path) -> None:
    """An idle consumer takes a small part of a percent of a core (the bound is loose for slow machines)."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        await consumer.receive(1, 0.1)
        before = resource.getrusage(resource.RUSAGE_SELF)
        await consumer.receive(1, 2.0)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.2
