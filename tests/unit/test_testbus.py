"""TestBus: what users test their handlers with."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from eventbus import Batch, DeadLetter, Delivery, Event, Outcome, RetryPolicy, Service, park, requeue, retry
from eventbus.testing import TestBus


async def test_the_example_of_the_docs() -> None:
    """Ten retries of the default policy are over after 50 virtual seconds, and no real ones."""
    wms = Service("wms-cincout")

    @wms.on("order.created")
    async def reserve(event: Event) -> int:
        return 500

    started = time.monotonic()
    async with TestBus(wms) as bus:
        await bus.send("order.created", {"id": 1})
        await bus.advance("49s")
        assert bus.parked == []
        await bus.advance("1s")
        assert bus.parked[0].reason == "max-retries"
        assert [call.attempt for call in bus.handled] == list(range(1, 12))
    assert time.monotonic() - started < 5


async def test_a_handlers_own_exception_comes_out_if_asked_for() -> None:
    """raise_errors=True lets the exception out of send; without it the policy deals with it."""
    wms = Service("wms-cincout")

    @wms.on("#")
    async def handle(order: dict) -> None:  # type: ignore[type-arg]
        order["missing"]

    async with TestBus(wms) as bus:
        await bus.send("order.created", {})
        assert isinstance(bus.handled[0].outcome.error, KeyError)
    async with TestBus(wms, raise_errors=True) as bus:
        with pytest.raises(KeyError):
            await bus.send("order.created", {})


async def test_time_moves_everything_that_waits() -> None:
    """Requeues, Retry-After, process_after, batch windows and in-place retries go by the virtual clock."""
    wms = Service("wms-cincout")
    times: dict[str, list[float]] = {}

    def note(event: Event) -> int:
        times.setdefault(event.type, []).append(round(bus.clock.now() - start, 3))
        return len(times[event.type])

    @wms.on("later")
    async def later(event: Event) -> Outcome | None:
        return requeue(after=10) if note(event) == 1 else None

    @wms.on("busy")
    async def busy(event: Event) -> Outcome | None:
        return retry("busy", after=600) if note(event) == 1 else None

    @wms.on("due")
    async def due(event: Event) -> None:
        note(event)

    @wms.on("held", retry=RetryPolicy(max_retries=2, delay=30, mode="in-place"))
    async def held(event: Event) -> int:
        note(event)
        return 500

    @wms.batch("many", size=3, timeout=2.0)
    async def many(events: list[Event], batch: Batch) -> None:
        note(events[0])

    async with TestBus(wms) as bus:
        start = bus.clock.now()
        await bus.send("later")
        await bus.send("busy")
        await bus.send("due", process_after=timedelta(hours=2))
        await bus.send("held")
        await bus.send("many")
        await bus.advance("3h")
    assert times["due"] == [7200.0]
    assert times["held"] == [0.0, 30.0, 60.0]
    assert times["many"] == [2.0]
    assert times["busy"] == [0.0, 600.0]
    assert times["later"][0] == 0.0
    assert 10.0 <= times["later"][1] <= 12.5


async def test_a_full_batch_goes_at_once() -> None:
    """A batch does not wait for its window when it is full."""
    wms, sizes = Service("wms-cincout"), []

    @wms.batch("many", size=2, timeout=60.0)
    async def many(events: list[Event]) -> None:
        sizes.append(len(events))

    async with TestBus(wms) as bus:
        for _ in range(5):
            await bus.send("many")
        assert sizes == [2, 2]
        await bus.advance("60s")
        assert sizes == [2, 2, 1]


async def test_services_of_several_prefixes_and_their_dead_letters() -> None:
    """Every service gets the event; a dead-letter consumer is called; a re-drive works on virtual time too."""
    one, two, kept = Service("wms-one"), Service("crm-two"), []

    @one.on("#", status={404: "park"})
    async def missing(event: Event, delivery: Delivery) -> int:
        return 404 if delivery.history.redriven == 0 else 200

    @two.on("#")
    async def fails(event: Event) -> Outcome:
        return park("never")

    @two.dead_letters(batch=10)
    async def keep(letters: list[DeadLetter]) -> None:
        kept.extend(letters)

    async with TestBus(one, two) as bus:
        await bus.send("order.created")
        assert [letter.service for letter in bus.parked] == ["wms-one"]
        assert [letter.error for letter in kept] == ["failed: never"]
        assert (await bus.dead_letters("wms-one").redrive()).done == 1
        await bus.settle()
        assert bus.parked == []
