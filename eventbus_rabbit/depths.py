"""Counting: how many messages of a service are ready, in flight, delayed, parked, as far as AMQP can tell.

AMQP counts what is ready in a queue, not what consumers hold. What the consumers of this process hold is known here;
what those of other processes hold is not: Stats.exact is False.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from eventbus.adapter import Stats
from eventbus.errors import UnknownService
from eventbus_rabbit._errors import NotFound
from eventbus_rabbit.consumer import RabbitConsumer
from eventbus_rabbit.link import Link, Wire
from eventbus_rabbit.names import Names

LOOK_AGAIN: Final = 30.0
"""For so long a tier that was not there is not looked for again."""
_ATTEMPTS: Final = 5


class Depths:
    """Counts queues by passive declaration, on the consuming link."""

    def __init__(self, link: Link, consumers: Callable[[str], Sequence[RabbitConsumer]]) -> None:
        self._link = link
        self._consumers = consumers
        self._absent: dict[str, float] = {}
        self._wire: Wire | None = None
        self._lock = asyncio.Lock()

    async def stats(self, names: Names, tiers: Sequence[int]) -> Stats:
        """Depths of one service.

        Messages move while we count, in the order delayed, ready, in flight: counted in that order none is missed
        that only goes forward. If something was delivered or settled meanwhile it may have gone round: again.
        """
        delayed = ready = held = 0
        for attempt in range(_ATTEMPTS):
            before = self._activity(names)
            delayed = await self.delayed(names, tiers)
            found = await self.ready(names.queue)
            if found is None:
                raise UnknownService(f"{names.service} is not subscribed on this broker ({names.queue} is missing)")
            ready = found
            for consumer in self._consumers(names.queue):
                await consumer.barrier()
            held = sum(consumer.held for consumer in self._consumers(names.queue))
            if before == self._activity(names) or attempt == _ATTEMPTS - 1:
                break
        parked = await self.ready(names.dead_letter_queue)
        return Stats(ready, held, delayed, parked or 0, exact=False)

    def _activity(self, names: Names) -> list[tuple[int, int, int]]:
        return [consumer.activity for consumer in self._consumers(names.queue)]

    async def delayed(self, names: Names, tiers: Sequence[int]) -> int:
        """Messages on all roads of a service."""
        known = [names.retry_queue, *(names.tier_queue(ms) for ms in tiers)]
        return sum([await self._count_if_there(queue) or 0 for queue in dict.fromkeys(known)])

    async def ready(self, queue: str) -> int | None:
        """Messages ready in a queue; None if it is not there."""
        async with self._lock:
            if self._wire is None or not self._wire.alive:
                self._wire = await self._link.channel()
            try:
                return (await self._wire.count(queue))[0]
            except NotFound:
                self._wire = None  # the broker closed it
                return None

    async def _count_if_there(self, queue: str) -> int | None:
        if self._absent.get(queue, 0.0) > time.monotonic():
            return None
        found = await self.ready(queue)
        if found is None:
            self._absent[queue] = time.monotonic() + LOOK_AGAIN
        return found

    def made(self, queue: str) -> None:
        """A queue was made here: look at it from now on."""
        self._absent.pop(queue, None)
