"""Time as the bus sees it: the system's, or a virtual one that tests move by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Literal, Protocol


class Clock(Protocol):
    """Due times, delays and batch windows go by this clock; handler timeouts by the event loop's own."""

    def now(self) -> float:
        """Seconds since the epoch."""

    async def wait(self, event: asyncio.Event, until: float | None) -> None:
        """Return when the event is set or the time has come, whichever is first."""


class SystemClock:
    """The real one."""

    now = staticmethod(time.time)

    async def wait(self, event: asyncio.Event, until: float | None) -> None:
        """Wait for the event, at most until that time."""
        if event.is_set():
            return
        if until is None:
            await event.wait()
            return
        delay = until - time.time()
        if delay <= 0:
            return
        try:
            async with asyncio.timeout(delay):
                await event.wait()
        except TimeoutError:
            return


class VirtualClock:
    """Stands still until `move_to` is called; then everything that waited for a passed moment wakes up."""

    def __init__(self, start: float | None = None) -> None:
        self._now = float(int(time.time())) if start is None else start  # whole, so that sums of delays stay exact
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """The virtual time, in seconds since the epoch."""
        return self._now

    async def wait(self, event: asyncio.Event, until: float | None) -> None:
        """Wait for the event, at most until that virtual time."""
        if event.is_set() or (until is not None and until <= self._now):
            return
        if until is None:
            await event.wait()
            return
        alarm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (until, next(self._order), alarm))
        signal = asyncio.ensure_future(event.wait())
        waits: set[asyncio.Future[None] | asyncio.Future[Literal[True]]] = {alarm, signal}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signal.cancel()
            alarm.cancel()

    def move_to(self, moment: float) -> None:
        """Let it be that moment; time never goes back."""
        self._now = max(self._now, moment)
        while self._waiting and self._waiting[0][0] <= self._now:
            alarm = heapq.heappop(self._waiting)[2]
            if not alarm.done():
                alarm.set_result(None)
