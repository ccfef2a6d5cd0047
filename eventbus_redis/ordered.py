"""The consumer of a service that keeps the order of keys: one replica is elected and reads, the others stand by."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from eventbus import telemetry
from eventbus.adapter import Subscription
from eventbus.settlement import Delivery
from eventbus_redis import _scripts
from eventbus_redis.work import MAIN, QUEUE, WorkConsumer

if TYPE_CHECKING:
    from eventbus_redis.adapter import RedisAdapter

STANDING_BY: Final = 0.25
"""How often a replica asks whether the reader is gone."""


class OrderedConsumer(WorkConsumer):
    """Reads in the order of the streams, and first of all what the reader before it has left.

    The election is a lease like that of messages, renewed with them. A reader that lost it has lost its messages
    too: their settlements are refused, because somebody else owns them by then.
    """

    _released = "k"
    _ahead = False  # what a reader has read must be known the moment it is not the reader any more

    def __init__(self, adapter: RedisAdapter, subscription: Subscription) -> None:
        super().__init__(adapter, subscription)
        self._elected_at: float | None = None
        self._inherit: list[bytes] = []

    async def _take(self, limit: int, until: float) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        if self._woken or self._closed:
            return []
        if not await self._is_reader():
            self._signal.clear()
            try:
                async with asyncio.timeout(max(0.0, min(until - loop.time(), STANDING_BY))):
                    await self._signal.wait()
            except TimeoutError:
                pass  # ask again
            return []
        if self._inherit:
            found, left = await self._take_over(limit)
            if found or left:
                if not found:
                    await asyncio.sleep(0.05)
                return found
        if not self._buffer and self._forgotten:
            await self._find_forgotten()
        if self._buffer:
            return self._left_over(limit)
        self._next_claim = loop.time() + 1.0
        if loop.time() >= self._next_move:
            await self._move()
        return await self._take_new(limit, until)

    async def _is_reader(self) -> bool:
        """Whether we are, for certain: by the time that somebody else could be, we ask again."""
        lease, now = self._adapter.options.lease, asyncio.get_running_loop().time()
        if self._elected_at is not None and now - self._elected_at < lease * 0.8:
            return True
        return await self._elect(lease)

    async def _elect(self, lease: float) -> bool:
        asked = asyncio.get_running_loop().time()
        won = await self._client.run(_scripts.ELECT, (self._keys.reader,), (self._name, round(lease * 1000)))
        if not won:
            if self._elected_at is not None:
                telemetry.log(logging.WARNING, "reader_lost", self._fields())
                self._elected_at = None
                self._buffer.clear()
                self._drop(list(self._held.values()))
            return False
        if self._elected_at is None:
            self._inherit = [MAIN, QUEUE]
        self._elected_at = asked
        return True

    async def _take_over(self, limit: int) -> tuple[list[Delivery], bool]:
        """What others have left of the shared stream, then of the service's own; and whether there is more."""
        source = self._inherit[0]
        stream = self._keys.main if source == MAIN else self._keys.queue
        keys = (stream, self._keys.notes, self._keys.reader)
        lease = round(self._adapter.options.lease * 1000)
        arguments = (self._subscription.service, self._name, lease, limit, source)
        entries, notes, released, left = await self._client.run(_scripts.TAKE_OVER, keys, arguments)
        if not left:
            self._inherit.remove(source)
        return [
            self._inherited(source, entry, note, suspect=word != b"1")
            for entry, note, word in zip(entries, notes, released, strict=True)
        ], bool(left or self._inherit)

    async def _renew(self) -> None:
        if self._elected_at is not None and await self._elect(self._adapter.options.lease):
            await super()._renew()

    async def _let_go(self) -> None:
        await super()._let_go()
        await self._client.run(_scripts.ELECT, (self._keys.reader,), (self._name, 0))
