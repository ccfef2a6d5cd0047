"""TestBus: the real policy and the real worker on a virtual clock. Ten retries take no time at all.

async with TestBus(wms) as bus:
    await bus.send("order.created", {"id": 1})
    await bus.advance("50s")
    assert bus.parked[0].reason == "max-retries"
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType

from eventbus.bus import Bus
from eventbus.clock import VirtualClock
from eventbus.deadletter import DeadLetter
from eventbus.durations import seconds
from eventbus.embedded.memory import MemoryAdapter, Store
from eventbus.errors import ConfigError
from eventbus.event import Event
from eventbus.forward.port import Sender
from eventbus.parking import DeadLetters
from eventbus.service import Service
from eventbus.settlement import Delivery, Settlement
from eventbus.status import Outcome


@dataclass(frozen=True, slots=True)
class Handled:
    """One call of a handler, and what came of it."""

    service: str
    event: Event
    attempt: int
    outcome: Outcome
    settlement: Settlement


class TestBus:
    """A bus in memory whose time stands still until `advance`. `raise_errors` lets a handler's own exception out."""

    __test__ = False  # pytest must not collect it

    def __init__(self, *services: Service, raise_errors: bool = False, sender: Sender | None = None) -> None:
        if not services:
            raise ConfigError("TestBus needs at least one Service")
        self.clock = VirtualClock()
        self.handled: list[Handled] = []
        """Every call of a handler so far."""
        self.parked: list[DeadLetter] = []
        """What stands in the dead-letter queues now."""
        self._services = services
        self._raise = raise_errors
        self._errors: list[BaseException] = []
        self._store = Store()
        self._stack = AsyncExitStack()
        self._buses = {
            prefix: Bus(
                "memory://",
                prefix=prefix,
                source="test",
                adapter=MemoryAdapter(self._store, self.clock),
                clock=self.clock,
                sender=sender,
                observe=self._observe,
            )
            for prefix in dict.fromkeys(service.prefix for service in services)
        }

    async def __aenter__(self) -> TestBus:
        for prefix, bus in self._buses.items():
            await self._stack.enter_async_context(bus)
            mine = [service for service in self._services if service.prefix == prefix]
            await self._stack.enter_async_context(bus.serving(*mine))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def send(
        self,
        type: str | Event,
        data: object = None,
        *,
        id: str | None = None,
        key: str | None = None,
        tenant: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, object] | None = None,
        process_after: datetime | timedelta | None = None,
        ttl: timedelta | None = None,
        content_type: str | None = None,
    ) -> Event:
        """Publish an event and let everything happen that can happen without time passing."""
        event = (
            type
            if isinstance(type, Event)
            else Event(
                type,
                data,
                id=id,
                source="test",
                time=self.now,
                key=key,
                tenant=tenant,
                correlation_id=correlation_id,
                headers=headers,
                process_after=process_after,
                ttl=ttl,
                content_type=content_type,
            )
        )
        for bus in self._buses.values():
            await bus.publish(event)
        await self.settle()
        return event

    async def advance(self, duration: float | str | timedelta) -> None:
        """Let time pass, moment by moment, and everything happen that is due meanwhile."""
        target = self.clock.now() + seconds(duration)
        await self.settle()
        while (moment := self._next_moment()) is not None and moment <= target + 1e-6:
            self.clock.move_to(moment)
            await self.settle()
        self.clock.move_to(target)
        await self.settle()

    @property
    def now(self) -> datetime:
        """The virtual time."""
        return datetime.fromtimestamp(self.clock.now()).astimezone()

    def dead_letters(self, service: str | Service) -> DeadLetters:
        """A service's dead-letter queue, to look at, re-drive, purge; call `settle` after a re-drive."""
        name = service.name if isinstance(service, Service) else service
        found = next((entry for entry in self._services if entry.name == name), None)
        if found is None:
            raise ConfigError(f"TestBus has no service {name!r}")
        return self._buses[found.prefix].dead_letters(found)

    async def settle(self) -> None:
        """Wait until nothing more can happen without time passing."""
        turns = 0
        while not self._quiet():
            turns += 1
            # Handlers that really wait for something get real time; everything else is a matter of loop turns.
            await asyncio.sleep(0 if turns % 1000 else 0.001)
        self.parked = [
            letter for service in self._services for letter in [x async for x in self.dead_letters(service).all()]
        ]
        if self._raise and self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error

    def _next_moment(self) -> float | None:
        moments = [bus.next_moment for bus in self._buses.values()]
        now = self.clock.now()
        for service in self._services:
            queue = self._store.queue(service.name, service.prefix)
            moments += [due_at for due_at, _, _ in queue.delayed[:1]]
            if service.dead_letter_route is not None:
                moments += [due_at for number, due_at in queue.parked_waiting.items() if number in queue.parked]
        return min((moment for moment in moments if moment is not None and moment > now), default=None)

    def _quiet(self) -> bool:
        now = self.clock.now()
        held = {name: health.held for bus in self._buses.values() for name, health in bus.health.items()}
        if any(bus.busy for bus in self._buses.values()):
            return False
        for service in self._services:
            queue = self._store.queue(service.name, service.prefix)
            if queue.ready or (queue.delayed and queue.delayed[0][0] <= now):
                return False
            if len(queue.inflight) != held[service.name]:
                return False
            if service.dead_letter_route is not None and queue.readable(now):
                return False
        return True

    def _observe(self, delivery: Delivery, outcome: Outcome, settlement: Settlement) -> None:
        self.handled.append(Handled(delivery.service, delivery.event, delivery.attempt, outcome, settlement))
        if outcome.error is not None and isinstance(outcome.error, Exception):
            self._errors.append(outcome.error)
