"""Rates shared by all replicas: permits are fetched from a store for what is ready now, many at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from eventbus import telemetry
from eventbus.clock import Clock
from eventbus.errors import EventBusError
from eventbus.store import Ask, Granted, Store

MOST: Final = 256
"""Permits asked for at once."""
FRESH_FOR: Final = 0.1
"""The share of the period (at most one second) within which a permit is used, or lost."""
PATIENCE: Final = 5.0
PAUSE: Final = 1.0


class SharedRate:
    """One shared rate as a lane sees it: a few permits in hand, and a wish for more.

    A permit is used within a moment of being given, and the store counts that moment on top of the period: so there
    are never more than the limit in any period, whoever used them when.
    """

    __slots__ = ("_fresh", "_left", "_office", "_until", "ask_at", "limit", "name", "period", "store", "wanted")

    def __init__(self, name: str, limit: int, period: float, store: Store, office: Permits) -> None:
        self.name = name
        self.limit = limit
        self.period = period
        self.store = store
        self.wanted = 0
        self.ask_at = 0.0
        self._office = office
        self._fresh = min(period * FRESH_FOR, 1.0)
        self._left = 0
        self._until = 0.0

    def free(self, now: float, wanted: int = 1) -> int:
        """The permits in hand; without any, more are asked for."""
        if self._left and now <= self._until:
            return self._left
        self._left = 0
        if not self.wanted:
            self.wanted = min(wanted, MOST, self.limit)
            self._office.want(self)
        return 0

    def take(self, now: float, number: int = 1) -> None:
        """Use them up."""
        self._left -= number

    def opens_at(self) -> float | None:
        """The store will tell."""
        return None

    def idle(self, now: float) -> bool:
        """Whether nobody waits for it."""
        return not self.wanted

    def ask(self) -> Ask:
        """What to say to the store."""
        return Ask(self.name, self.limit, self.period + self._fresh, self.wanted)

    def given(self, granted: Granted, asked: float) -> None:
        """The store's answer to a question of that time."""
        if granted.number:
            self._left, self._until, self.wanted = granted.number, asked + self._fresh, 0
        else:
            self.ask_at = asked + granted.opens_in


class Permits:
    """Asks the stores for everybody's wishes, one call for all that came up meanwhile."""

    def __init__(self, service: str, clock: Clock, came: Callable[[], None]) -> None:
        self._service = service
        self._clock = clock
        self._came = came
        self._wishes: list[SharedRate] = []
        self._wanted = asyncio.Event()

    def want(self, rate: SharedRate) -> None:
        """Somebody waits for permits of this rate."""
        rate.ask_at = self._clock.now()
        self._wishes.append(rate)
        self._wanted.set()

    @property
    def next_ask(self) -> float | None:
        """When the store will be asked again, if everybody waits for time to pass."""
        return min((rate.ask_at for rate in self._wishes), default=None)

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            await self._clock.wait(self._wanted, self.next_ask)
            self._wanted.clear()
            now = self._clock.now()
            by_store: dict[int, list[SharedRate]] = {}
            for rate in self._wishes:
                if rate.ask_at <= now:
                    by_store.setdefault(id(rate.store), []).append(rate)
            for rates in by_store.values():
                await self._ask(rates, now)
            if any(not rate.wanted for rates in by_store.values() for rate in rates):
                self._wishes = [rate for rate in self._wishes if rate.wanted]
                self._came()

    async def _ask(self, rates: list[SharedRate], now: float) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                answers = await rates[0].store.permits([rate.ask() for rate in rates])
        except (EventBusError, TimeoutError) as error:
            # A rate is a promise to somebody else: without the store nothing starts, and nothing is lost.
            fields = {"service": self._service, "rates": len(rates), "error": str(error) or "no answer in time"}
            telemetry.log(logging.WARNING, "rate_store_failed", fields)
            for rate in rates:
                rate.ask_at = now + PAUSE
            return
        for rate, granted in zip(rates, answers, strict=True):
            rate.given(granted, now)
