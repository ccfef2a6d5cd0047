"""Readiness sees progress: a consumer that is connected and takes nothing is not ready."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eventbus import Bus, Event, Service
from eventbus.adapter import Stats
from eventbus.console.health import BrokerReadiness, ConsumerReadiness
from eventbus.errors import BrokerUnavailable
from eventbus.testing.contract.harness import eventually
from eventbus.worker import Health

FINE = Health(receiving=True, failing_settles=0, held=0, running=0, waiting=0, stuck=0, received=7)


class FakeBus:
    """A bus whose words are set by the test; the real one is below."""

    def __init__(self) -> None:
        self.health: dict[str, Health] = {"wms-a": FINE}
        self.ready: int | Exception = 0

    async def stats(self, service: Service) -> Stats:
        if isinstance(self.ready, Exception):
            raise self.ready
        return Stats(self.ready, 0, 0, 0)


async def after(seconds: float, bus: FakeBus, then: Health | None = None, ready: Any = 0) -> str:
    """What it says so long after a first look."""
    now = [0.0]
    readiness = ConsumerReadiness(bus, [Service("wms-a")], now=lambda: now[0])  # type: ignore[arg-type]
    await readiness.look()
    now[0], bus.ready = seconds, ready
    if then is not None:
        bus.health = {"wms-a": then}
    return (await readiness.look())["wms-a"]


@pytest.mark.parametrize(
    ("seconds", "then", "ready", "words"),
    [
        (10, FINE, 0, ""),
        (600, FINE, 0, ""),
        (10, FINE, 5, ""),
        (600, FINE, 5, "5 are ready and none was received for 600 s"),
        (600, replace(FINE, received=8), 5, ""),
        (600, replace(FINE, held=3, running=3), 5, ""),
        (600, replace(FINE, held=3, waiting=3), 5, ""),
        (600, replace(FINE, held=1, stuck=1), 5, ""),
        (0, replace(FINE, receiving=False), 0, "does not receive"),
        (0, replace(FINE, failing_settles=2), 0, "2 finished deliveries cannot be settled"),
        (600, FINE, BrokerUnavailable("amqp://u:hunter2@h does not answer"), "amqp://u:***@h does not answer"),
    ],
)
async def test_what_it_says(seconds: float, then: Health, ready: Any, words: str) -> None:
    """A table: what was seen, what is seen now, and what is wrong with it."""
    said = await after(seconds, FakeBus(), then, ready)
    assert said.startswith(words) if words else said == "", said


async def test_threads_that_hang_and_nothing_done_is_not_ready() -> None:
    """Every slot is held by a thread past its deadline."""
    bus = FakeBus()
    stuck = replace(FINE, held=1, stuck=1)
    bus.health = {"wms-a": stuck}
    assert "hang past their deadline" in await after(600, bus, stuck, 5)


async def test_a_service_that_does_not_run_is_not_ready() -> None:
    """Before its worker is made, and after it has ended."""
    bus = FakeBus()
    bus.health = {}
    assert await after(0, bus) == "does not receive"


async def test_a_real_worker_is_ready_while_it_works() -> None:
    """What it has received is counted."""
    service, seen = Service("wms-a"), []

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.id)

    async with Bus("memory://", source="wms-api") as bus:
        readiness = ConsumerReadiness(bus, [service])
        assert (await readiness.look())["wms-a"] == "does not receive"
        async with bus.serving(service):
            await bus.publish("a")
            await eventually(lambda: seen, "it was handled")
            assert await readiness.look() == {"wms-a": ""}
            assert bus.health["wms-a"].received == 1


async def test_without_consumers_the_broker_is_asked_for_every_queue() -> None:
    """One that never ran is no reason to be unready; a broker that does not answer is."""
    services = [Service("wms-a"), Service("wms-b")]
    async with Bus("memory://", source="wms-api") as bus:
        await bus.provision(services[0])
        assert await BrokerReadiness(bus, services).look() == {"wms-a": "", "wms-b": ""}
    gone = FakeBus()
    gone.ready = BrokerUnavailable("amqp://u:hunter2@h does not answer")
    found = await BrokerReadiness(gone, services).look()  # type: ignore[arg-type]
    assert found["wms-a"] == "amqp://u:***@h does not answer"
