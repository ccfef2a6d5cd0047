"""The intake: whoever publishes while a publish is on its way travels with the next one.

No timer collects them: an idle bus publishes at once, a busy one hundreds at a time (as settling does).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from eventbus import telemetry
from eventbus.adapter import PublishResult
from eventbus.bus import Bus
from eventbus.errors import PublishError
from eventbus.event import Event

MOST_EVENTS: Final = 1000
MOST_BYTES: Final = 4 * 1024 * 1024
"""What one publish carries at most, unless a single request has more."""
PATIENCE: Final = 10.0
"""Seconds that a request waits for its turn; then it was never sent, and its publisher is told so."""

Done: TypeAlias = Callable[[Sequence[PublishResult]], None]

_NOT_SENT: Final = PublishResult("refused", "the broker does not keep up; it was not sent", later=True)


class _Parcel:
    """The events of one request."""

    __slots__ = ("done", "events", "since", "size")

    def __init__(self, events: Sequence[Event], size: int, since: float, done: Done) -> None:
        self.events = events
        self.size = size
        self.since = since
        self.done = done


class Intake:
    """Publishes what requests bring, one publish at a time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: deque[_Parcel] = deque()
        self._sending: asyncio.Task[None] | None = None

    def add(self, events: Sequence[Event], size: int, done: Done) -> None:
        """Publish these, soon; `done` is told what became of each."""
        loop = asyncio.get_running_loop()
        self._waiting.append(_Parcel(events, size, loop.time(), done))
        if self._sending is None:
            self._sending = loop.create_task(self._send(), name="eventbus intake")

    def expire(self, now: float) -> None:
        """Answer those who have waited too long for their turn."""
        while self._waiting and now - self._waiting[0].since > PATIENCE:
            parcel = self._waiting.popleft()
            parcel.done([_NOT_SENT] * len(parcel.events))

    async def aclose(self) -> None:
        """Wait until everything that was taken is answered."""
        while self._sending is not None:
            await asyncio.wait([self._sending])

    async def _send(self) -> None:
        try:
            while self._waiting:
                parcels = [self._waiting.popleft()]
                number, size = len(parcels[0].events), parcels[0].size
                while self._waiting and number < MOST_EVENTS and size < MOST_BYTES:
                    parcel = self._waiting.popleft()
                    parcels.append(parcel)
                    number, size = number + len(parcel.events), size + parcel.size
                events = [event for parcel in parcels for event in parcel.events]
                results = await self._publish(events)
                place = 0
                for parcel in parcels:
                    end = place + len(parcel.events)
                    parcel.done(results[place:end])
                    place = end
        finally:
            self._sending = None

    async def _publish(self, events: Sequence[Event]) -> list[PublishResult]:
        try:
            return await self._bus.publish_many(events)
        except PublishError as error:
            return error.results
        except Exception as error:  # noqa: BLE001 - an adapter's bug must not leave publishers without an answer
            telemetry.log(logging.ERROR, "publish_failed", {"error": repr(error)}, exc_info=error)
            return [PublishResult("unknown", f"publishing failed: {type(error).__name__}")] * len(events)
