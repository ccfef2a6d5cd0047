"""The desk: the queues an admin API knows, and one request to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

from eventbus import naming
from eventbus.bus import Bus
from eventbus.console.problems import Problem
from eventbus.console.tokens import Caller
from eventbus.errors import ConfigError
from eventbus.parking import DeadLetters
from eventbus.service import Service

if TYPE_CHECKING:
    from eventbus.console.health import Readiness
    from eventbus.console.metrics import Metrics

PATIENCE: Final = 20.0
"""A request that moves letters answers after so many seconds at the latest, and says where to go on: proxies on the
way give up on a silent connection, and nobody would know how far it came."""


@dataclass(frozen=True, slots=True)
class KnownQueue:
    """A dead-letter queue by its name on the broker, and the service whose it is."""

    name: str
    service: Service


class Desk:
    """A bus and the services whose dead letters can be looked after."""

    def __init__(
        self,
        bus: Bus,
        services: Sequence[Service] = (),
        *,
        readiness: Readiness | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.bus = bus
        self.queues: Mapping[str, KnownQueue] = {service.name: self._known(service) for service in services}
        self.readiness = readiness
        self.metrics = metrics

    def find(self, name: str) -> KnownQueue:
        """A queue by its own name or its service's. Without a list of services, the broker is asked for it."""
        for known in self.queues.values():
            if name in (known.name, known.service.name):
                return known
        if not self.queues:
            try:
                return self._known(Service(naming.check_service(name)))
            except ConfigError:
                pass  # no service has such a name
        raise Problem(
            404,
            "unknown-queue",
            f"there is no dead-letter queue {name!r} here",
            "GET /admin/dlq/queues lists those of the services in the configuration",
        )

    def _known(self, service: Service) -> KnownQueue:
        return KnownQueue(self.bus.adapter.consume(service.subscription(dead_letters=True)).queue, service)


@dataclass(slots=True)
class Call:
    """One request, after it was checked."""

    desk: Desk
    request: Request
    caller: Caller
    audit: dict[str, object] = field(default_factory=dict)
    """What the endpoint has to say for the audit log."""

    @property
    def queue(self) -> KnownQueue:
        """The queue in the path."""
        return self.desk.find(self.request.path_params["queue"])

    def letters(self, queue: KnownQueue | None = None) -> DeadLetters:
        """What the caller may see of a queue: the tenants are part of every query."""
        return self.desk.bus.dead_letters((queue or self.queue).service, tenants=self.caller.tenants)

    @asynccontextmanager
    async def stopping(self, patience: float) -> AsyncIterator[asyncio.Event]:
        """An event for when it is time to answer: patience is over, or the client has gone."""
        stop = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(patience, stop.set)

        async def watch() -> None:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass
            stop.set()

        gone = asyncio.ensure_future(watch())
        try:
            yield stop
        finally:
            timer.cancel()
            gone.cancel()
