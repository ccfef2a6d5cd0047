"""The store of one process: completed events and rates in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from eventbus.errors import ConfigError
from eventbus.scheduling.rate import Window
from eventbus.store import Ask, Granted, Seen, Store, Words

MOST: Final = 1_000_000
"""Completed events that are remembered; beyond that the oldest are forgotten before their time."""


class MemoryStore(Store):
    """Lives as long as the process; `memory://` as a store is one for each worker."""

    shared = False

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._done: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._claims: dict[tuple[str, str], tuple[str, float]] = {}
        self._windows: dict[str, Window] = {}

    @classmethod
    def from_url(cls, url: str) -> MemoryStore:
        """`memory://`, and nothing else."""
        if url != "memory://":
            raise ConfigError(f"{url}: a store in memory has no name or settings; write memory://")
        return cls()

    async def open(self) -> None:
        """Nothing to connect to."""

    async def aclose(self) -> None:
        """Nothing to disconnect from."""

    async def tell(self, service: str, words: Words, *, window: float, claim: float | None, owner: str) -> list[Seen]:
        """At once."""
        now = self._now()
        for name in words.done:
            self._done[service, name] = now + window
            self._done.move_to_end((service, name))
            self._claims.pop((service, name), None)
        for name in words.let_go:
            if self._claims.get((service, name), ("", 0.0))[0] == owner:
                del self._claims[service, name]
        while self._done and (len(self._done) > MOST or next(iter(self._done.values())) <= now):
            self._done.popitem(last=False)
        return [self._ask((service, name), now, claim, owner) for name in words.asks]

    def _ask(self, key: tuple[str, str], now: float, claim: float | None, owner: str) -> Seen:
        if self._done.get(key, 0.0) > now:
            return "done"
        if claim is None:
            return "new"
        if self._claims.get(key, ("", 0.0))[1] > now:
            return "claimed"
        self._claims[key] = (owner, now + claim)
        return "new"

    async def permits(self, asks: Sequence[Ask]) -> list[Granted]:
        """By the same window that a worker counts in."""
        now, answers = self._now(), []
        for ask in asks:
            window = self._windows.get(ask.name)
            if window is None or (window.limit, window.period) != (ask.limit, ask.period):
                window = self._windows[ask.name] = Window(ask.limit, ask.period)
            number = max(0, min(ask.wanted, window.free(now)))
            if number:
                window.take(now, number)
            answers.append(Granted(number, 0.0 if number else max(0.0, window.opens_at() - now)))
        return answers
