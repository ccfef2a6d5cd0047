"""How a service stands, as `eventbus stats` and the admin API tell it: depths, consumer, endpoints, breakers."""

from __future__ import annotations

from dataclasses import dataclass

from eventbus.bus import Bus
from eventbus.errors import UnknownService
from eventbus.forward.endpoint import EndpointState
from eventbus.service import Service
from eventbus.worker import Health


@dataclass(frozen=True, slots=True)
class Standing:
    """One service. Depths are the broker's word; consumer and endpoints are those of the process that is asked."""

    service: str
    subscribed: bool = True
    """Whether the broker knows it: one that never ran has no queue yet."""
    ready: int = 0
    inflight: int = 0
    delayed: int = 0
    parked: int = 0
    oldest_parked: float | None = None
    """Age of the oldest dead letter in seconds."""
    exact: bool = True
    """Whether the broker counts, or estimates."""
    consumer: Health | None = None
    """None where this process does not run the service."""
    endpoints: tuple[EndpointState, ...] = ()


async def standing(bus: Bus, service: Service) -> Standing:
    """Ask the broker, and the workers of this process."""
    try:
        found = await bus.stats(service)
    except UnknownService:
        return Standing(service.name, subscribed=False)
    return Standing(
        service.name,
        ready=found.ready,
        inflight=found.inflight,
        delayed=found.delayed,
        parked=found.parked,
        oldest_parked=found.oldest_parked,
        exact=found.exact,
        consumer=bus.health.get(service.name),
        endpoints=found.endpoints,
    )
