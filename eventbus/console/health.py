"""Readiness: whether services make progress. A connection that answers pings while nobody consumes is not ready."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from eventbus.bus import Bus
from eventbus.errors import EventBusError, UnknownService
from eventbus.redaction import redact
from eventbus.service import Service
from eventbus.worker import Health

STALLED_AFTER: Final = 60.0


class Readiness(ABC):
    """Looked at by every probe."""

    @abstractmethod
    async def look(self) -> Mapping[str, str]:
        """Each service, and what is wrong with it; an empty text if nothing is."""


class BrokerReadiness(Readiness):
    """Of a process that consumes nothing: every queue it is there for can be asked for its depths."""

    def __init__(self, bus: Bus, services: Sequence[Service]) -> None:
        self._bus, self._services = bus, services

    async def look(self) -> Mapping[str, str]:
        """Ask the broker for each."""
        found = {}
        for service in self._services:
            try:
                await self._bus.stats(service)
            except UnknownService:
                found[service.name] = ""  # the broker has answered: this one never ran
            except EventBusError as error:
                found[service.name] = redact(str(error))
            else:
                found[service.name] = ""
        return found


@dataclass(slots=True)
class _Sight:
    progress: tuple[int, int]
    since: float


class ConsumerReadiness(Readiness):
    """Of a process that consumes: it receives, it settles, and it does not sit still while something is ready."""

    def __init__(
        self,
        bus: Bus,
        services: Sequence[Service],
        *,
        stalled_after: float = STALLED_AFTER,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus, self._services = bus, services
        self._stalled_after, self._now = stalled_after, now
        self._seen: dict[str, _Sight] = {}

    async def look(self) -> Mapping[str, str]:
        """Each consumer's own word, and what it has done since the last look."""
        health = self._bus.health
        return {service.name: await self._wrong(service, health.get(service.name)) for service in self._services}

    async def _wrong(self, service: Service, health: Health | None) -> str:
        if health is None or not health.receiving:
            return "does not receive"
        if health.failing_settles:
            return f"{health.failing_settles} finished deliveries cannot be settled; the broker does not take them"
        idle = self._idle(service.name, (health.received, health.received - health.held))
        if idle < self._stalled_after or health.running:
            return ""
        if health.stuck:
            return f"{health.stuck} threads hang past their deadline, and nothing was done for {idle:.0f} s"
        if health.held:
            return ""  # it waits for a time to come
        try:
            ready = (await self._bus.stats(service)).ready
        except EventBusError as error:
            return redact(str(error))
        return f"{ready} are ready and none was received for {idle:.0f} s" if ready else ""

    def _idle(self, name: str, progress: tuple[int, int]) -> float:
        """For how long nothing has moved, as far as we have looked."""
        seen, now = self._seen.get(name), self._now()
        if seen is None or seen.progress != progress:
            seen = self._seen[name] = _Sight(progress, now)
        return now - seen.since
