"""The shapes of one worker's work, made from its service's settings: lanes by tenant, rates, shared permits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from eventbus.clock import Clock
from eventbus.errors import ConfigError
from eventbus.scheduling.fairness import TenantTurns, Turns
from eventbus.scheduling.lanes import Lane
from eventbus.scheduling.rate import Window
from eventbus.scheduling.shaped import Limiter, ShapedLane, TenantLimits
from eventbus.service import Route, Service
from eventbus.settlement import Delivery
from eventbus.shaping import Fairness, Rate
from eventbus.store import Store
from eventbus.worker.permits import Permits, SharedRate

Stores = Mapping[str | None, Store]
"""Open stores by their URL; None is the broker's own."""


class Shapes:
    """Makes the lanes of a worker. A service without fairness and rates gets plain ones, and pays for nothing."""

    def __init__(
        self, service: Service, clock: Clock, stores: Stores, alarm: Callable[[], None], permitted: Callable[[], None]
    ) -> None:
        self._service = service
        self._clock = clock
        self._stores = stores
        self._alarm = alarm
        self.lanes: list[ShapedLane[Delivery]] = []
        self.permits = Permits(service.name, clock, permitted)
        self._common = self._limits(service.rates, "")

    def lane(self, route: Route, share: int) -> Lane[Delivery] | ShapedLane[Delivery]:
        """The lane of a route."""
        service = self._service
        if not (service.fairness or service.rates or route.rates):
            return Lane(route.concurrency, share)
        flat, by_tenant = self._limits(route.rates, route.pattern)
        flat, by_tenant = [*self._common[0], *flat], [*self._common[1], *by_tenant]
        # Rates by tenant need turns too: a tenant that must wait would otherwise stand before all others.
        fair = service.fairness or (Fairness() if by_tenant else None)
        turns: Turns[Delivery] = Turns(fair or Fairness())
        tenant_of = _tenant if fair else _nobody
        lane = ShapedLane(route.concurrency, share, turns, tenant_of, flat, by_tenant, self._clock.now, self._alarm)
        self.lanes.append(lane)
        return lane

    def _limits(self, rates: Iterable[Rate], route: str) -> tuple[list[Limiter], list[TenantLimits]]:
        flat: list[Limiter] = []
        by_tenant: list[TenantLimits] = []
        for number, rate in enumerate(rates):
            name = f"{self._service.prefix}/{self._service.name}/{route}/{number}"
            make = self._maker(rate, name)
            if rate.by == "tenant":
                by_tenant.append(TenantLimits(rate, make))
            else:
                flat.append(make(rate.limit, ""))
        return flat, by_tenant

    def _maker(self, rate: Rate, name: str) -> Callable[[int, str], Limiter]:
        if rate.scope == "worker":
            return lambda limit, tenant: Window(limit, rate.period)
        store = self._stores[rate.store]
        return lambda limit, tenant: SharedRate(f"{name}/{tenant}", limit, rate.period, store, self.permits)

    @property
    def shared(self) -> bool:
        """Whether any rate is counted in a store."""
        routes = (rate for route in self._service.routes for rate in route.rates)
        return any(rate.scope == "service" for rate in (*self._service.rates, *routes))

    def turns(self) -> list[TenantTurns]:
        """How every tenant is doing, over all routes; who waits most urgently first."""
        found: dict[str, TenantTurns] = {}
        for lane in self.lanes:
            for turn in lane.ready.snapshot():
                other = found.get(turn.tenant)
                found[turn.tenant] = turn if other is None else _together(turn, other)
        return sorted(found.values(), key=lambda turn: (turn.current_priority, turn.tenant))


def stores_needed(service: Service) -> list[tuple[str | None, str]]:
    """The URLs of the stores a service needs (None: the broker's own), each with the setting that asks for it."""
    needed: list[tuple[str | None, str]] = []
    if service.idempotency is not None:
        needed.append((service.idempotency.store, "idempotency"))
    for rate in (*service.rates, *(rate for route in service.routes for rate in route.rates)):
        if rate.scope == "service":
            needed.append((rate.store, "rate"))
    return needed


def check_store(service: str, setting: str, store: Store | None, broker: str, *, one_process: bool) -> None:
    """See that a store can keep what it is asked to; else an error at start says what to write."""
    if store is None:
        raise ConfigError(
            f"{service}.{setting}: {broker} has no place to keep it; name one, such as store = 'redis://host' "
            f"or 'sqlite:///file'"
        )
    if setting == "rate" and not store.shared and not one_process:
        raise ConfigError(
            f"{service}.rate: scope = 'service' is shared by all replicas, and memory:// is not; "
            f"store = 'redis://host' or 'sqlite:///file'"
        )


def _tenant(delivery: Delivery) -> str:
    return delivery.event.tenant or ""


def _nobody(delivery: Delivery) -> str:
    return ""


def _together(one: TenantTurns, two: TenantTurns) -> TenantTurns:
    latest = max((at for at in (one.last_processed_at, two.last_processed_at) if at is not None), default=None)
    return TenantTurns(
        one.tenant,
        latest,
        max(one.rounds_without_processing, two.rounds_without_processing),
        min(one.current_priority, two.current_priority),
        one.total_processed + two.total_processed,
        max(one.consecutive_batch_count, two.consecutive_batch_count),
    )
