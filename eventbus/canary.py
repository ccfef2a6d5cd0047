"""The canary of a re-drive: put back a few letters first, see what becomes of them, go on only if it went well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from eventbus import headers
from eventbus.adapter import Parking, Stats
from eventbus.errors import ConfigError

LOOKS: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between two looks, ever longer: on some brokers a look walks along the whole queue."""


@dataclass(frozen=True, slots=True)
class Canary:
    """How many letters go first, how long they are watched, and which share of them may be parked again."""

    letters: int
    watch: float = 30.0
    tolerated: float = 0.1

    def __post_init__(self) -> None:
        if self.letters < 1:
            raise ConfigError(f"canary: {self.letters} letters: must be a whole number from 1")
        if not self.watch > 0:
            raise ConfigError(f"canary: watch {self.watch:g} s: must be longer than zero")
        if not 0 <= self.tolerated < 1:
            raise ConfigError(f"canary: tolerated {self.tolerated:g}: must be a share from 0 to below 1")

    def too_many(self, failed: int, sent: int) -> bool:
        """Whether it is no use to go on."""
        return failed > self.tolerated * sent


async def parked_again(
    parking: Parking,
    sent: Mapping[str, int],
    canary: Canary,
    *,
    stats: Callable[[], Awaitable[Stats]] | None,
    stop: asyncio.Event,
) -> int:
    """How many of the letters `sent` (event id -> times re-driven) came back; returns as soon as that is known.

    It is known when too many came back, when all did, or when the service has nothing left to do.
    """
    loop = asyncio.get_running_loop()
    until, turn = loop.time() + canary.watch, 0
    while True:
        # First the queue, then the letters: what is finished in between is seen in one of the two.
        quiet = stats is not None and _quiet(await stats())
        found = await parking.find_all(sent)
        back = {x.event.id for x in found if headers.number(x.headers.get(headers.REDRIVEN_COUNT)) >= sent[x.event.id]}
        if canary.too_many(len(back), len(sent)) or quiet or len(back) == len(sent):
            return len(back)
        left = until - loop.time()
        if left <= 0 or stop.is_set():
            return len(back)
        try:
            async with asyncio.timeout(min(left, LOOKS[min(turn, len(LOOKS) - 1)])):
                await stop.wait()
        except TimeoutError:
            turn += 1


def _quiet(stats: Stats) -> bool:
    return stats.exact and not (stats.ready or stats.inflight or stats.delayed)
