"""A lane whose items take turns by tenant and start no faster than their rates allow. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Sequence
from typing import Final, Generic, Protocol, TypeVar

from eventbus.scheduling.fairness import Turns
from eventbus.scheduling.lanes import PATIENCE
from eventbus.shaping import Rate

Item = TypeVar("Item")

KEPT_TENANTS: Final = 10_000
"""From so many on, those whose periods are over are forgotten: tenants come and go."""


class Limiter(Protocol):
    """One rate: a window in memory, or permits from a store."""

    def free(self, now: float, wanted: int = 1) -> int:
        """How many may pass now; `wanted` is how many would like to."""

    def take(self, now: float, number: int = 1) -> None:
        """So many pass now."""

    def opens_at(self) -> float | None:
        """When the next may pass, if none may now; None where somebody else will tell."""

    def idle(self, now: float) -> bool:
        """Whether it can be forgotten, and made anew when it is needed again."""


class TenantLimits:
    """A limiter for each tenant of one rate, made when it is first needed."""

    __slots__ = ("_limiters", "_make", "_sweep_at", "rate")

    def __init__(self, rate: Rate, make: Callable[[int, str], Limiter]) -> None:
        self.rate = rate
        self._make = make
        self._limiters: dict[str, Limiter] = {}
        self._sweep_at = KEPT_TENANTS

    def of(self, tenant: str, now: float) -> Limiter:
        """The tenant's own."""
        limiter = self._limiters.get(tenant)
        if limiter is None:
            if len(self._limiters) >= self._sweep_at:
                self._limiters = {name: kept for name, kept in self._limiters.items() if not kept.idle(now)}
                self._sweep_at = max(KEPT_TENANTS, 2 * len(self._limiters))
            limiter = self._limiters[tenant] = self._make(self.rate.limit_of(tenant), tenant)
        return limiter


class ShapedLane(Generic[Item]):
    """The same as Lane from outside. What may not start yet waits here: it costs no attempt and holds no slot."""

    __slots__ = (
        "_by_tenant", "_flat", "_now", "_paused", "_shut", "_tenant_of",
        "in_hand", "limit", "ready", "running", "share", "shut_until",
    )  # fmt: skip

    def __init__(
        self,
        limit: int,
        share: int,
        turns: Turns[Item],
        tenant_of: Callable[[Item], str],
        flat: Sequence[Limiter],
        by_tenant: Sequence[TenantLimits],
        now: Callable[[], float],
        shut: Callable[[], None] = lambda: None,
    ) -> None:
        self.limit = limit
        self.share = share
        self.ready = turns
        self.running = 0
        self.in_hand = 0
        self.shut_until: float | None = None
        """Until when a rate for all lets nothing through; None while it does."""
        self._tenant_of = tenant_of
        self._flat = flat
        self._by_tenant = by_tenant
        self._paused: list[tuple[float, str]] = []
        self._now = now
        self._shut = shut
        """Called when something must wait for a time to come."""

    def push(self, item: Item, now: float) -> None:
        """An item is ready to be handled."""
        self.ready.push(self._tenant_of(item), item, now)

    def take(self) -> Item | None:
        """The next item to handle; None when nothing is ready, the lane is full, or a rate says not yet."""
        if self.running >= self.limit:
            return None
        item = self.following()
        if item is not None:
            self.running += 1
            self.in_hand += 1
        return item

    def following(self) -> Item | None:
        """The next item for one that has just ended, in its place."""
        if not len(self.ready):
            return None
        now = self._now()
        return self._next(now) if self._open(now) else None

    def _open(self, now: float) -> bool:
        """Whether the rates for all let something through."""
        self._resume(now)
        for limiter in self._flat:
            if limiter.free(now, len(self.ready)) <= 0:
                opens = limiter.opens_at()
                self.shut_until = float("inf") if opens is None else max(opens, now + 0.001)
                self._shut()
                return False
        self.shut_until = None
        return True

    def _resume(self, now: float) -> None:
        """Bring back the tenants whose time has come."""
        resumed = False
        while self._paused and self._paused[0][0] <= now:
            self.ready.resume(heapq.heappop(self._paused)[1])
            resumed = True
        if resumed and self._paused:
            self._shut()  # whoever watches the clock looked at the moment that is over, not at the next one

    def _next(self, now: float) -> Item | None:
        turns = self.ready
        while (tenant := turns.first()) is not None:
            limiters = [limits.of(tenant, now) for limits in self._by_tenant]
            shut = [limiter for limiter in limiters if limiter.free(now, turns.count(tenant)) <= 0]
            if shut:
                opens = [limiter.opens_at() for limiter in shut]
                until = max(float("inf") if moment is None else moment for moment in opens)
                turns.pause(tenant)
                heapq.heappush(self._paused, (max(until, now + 0.001), tenant))
                self._shut()
                continue
            for limiter in limiters:
                limiter.take(now)
            for limiter in self._flat:
                limiter.take(now)
            return turns.pop(now)
        return None

    def batches(self, size: int, window: float, now: float) -> int:
        """How many batches could start now: full ones, and one that has waited long enough."""
        self._resume(now)
        full, rest = divmod(len(self.ready) - self.ready.paused, size)
        if rest and now >= (self.oldest or now) + window:
            full += 1
        return full if self.shut_until is None or self.shut_until <= now else 0

    def take_batch(self, size: int, window: float, now: float) -> list[Item] | None:
        """The next batch, as large as the rates allow."""
        if self.running >= self.limit or not len(self.ready) or not self._open(now):
            return None
        if not self.batches(size, window, now):
            return None
        items: list[Item] = []
        while len(items) < size and len(self.ready) and self._open(now):
            item = self._next(now)
            if item is None:
                break
            items.append(item)
        if not items:
            return None
        self.running += 1
        self.in_hand += len(items)
        return items

    @property
    def oldest(self) -> float | None:
        """Since when the next item has been ready."""
        return self.ready.oldest

    @property
    def opens_at(self) -> float | None:
        """When time alone lets something start that a rate holds back."""
        moments = [self._paused[0][0]] if self._paused else []
        if self.shut_until is not None:
            moments.append(self.shut_until)
        soonest = min(moments, default=float("inf"))
        return soonest if len(self.ready) and soonest < float("inf") else None

    def held_back(self, now: float) -> int:
        """How many items wait for time alone."""
        if self.shut_until is not None and self.shut_until > now:
            return len(self.ready)
        return self.ready.paused if not self._paused or self._paused[0][0] > now else 0

    def reopen(self) -> None:
        """Permits have come: look again at everything that was shut."""
        self.shut_until = None
        for _, tenant in self._paused:
            self.ready.resume(tenant)
        self._paused.clear()

    def blocked(self, now: float) -> bool:
        """Whether it no longer keeps up with what arrives."""
        oldest = self.oldest
        return oldest is not None and now - oldest > PATIENCE

    def surplus(self, now: float) -> list[Item]:
        """Take out what the lane holds beyond its share, as Lane does, and what tenants over their rate hold.

        Those may keep half of it: more would keep the events of the others from being fetched at all.
        """
        over = self.ready.paused - self.share // 2
        taken = self.ready.newest(over, paused=True) if over > 0 else []
        over = len(self.ready) + self.in_hand - self.share
        return taken + (self.ready.newest(min(over, len(self.ready))) if over > 0 and self.blocked(now) else [])

    def drop(self, gone: Container[Item]) -> list[Item]:
        """Take out the ready items that are gone."""
        return self.ready.drop(gone)

    def clear(self) -> list[Item]:
        """Take out everything that has not started."""
        self._paused.clear()
        return self.ready.clear()
