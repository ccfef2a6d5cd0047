"""The consumer of a service that keeps the order of keys: one replica is elected and reads, the others stand by."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from eventbus import telemetry
from eventbus.adapter import Settled, Subscription
from eventbus.errors import BrokerError
from eventbus.settlement import Delivery, Settlement
from eventbus_redis import _scripts
from eventbus_redis._client import Entry
from eventbus_redis.leased import fresh_name
from eventbus_redis.work import BLOCK, MAIN, QUEUE, READ_AT_ONCE, WorkConsumer

if TYPE_CHECKING:
    from eventbus_redis.adapter import RedisAdapter

_NOT_ELECTED: Final = 0
_AS_BEFORE: Final = 2
STANDING_BY: Final = 0.25
"""How often a replica asks whether the reader is gone."""


class OrderedConsumer(WorkConsumer):
    """Reads in the order of the streams, and first of all what the reader before it has left.

    The election is a lease like that of messages, renewed with them. A reader that lost it has lost its messages
    too: their settlements are refused, because somebody else owns them by then.
    """

    _released = "k"

    def __init__(self, adapter: RedisAdapter, subscription: Subscription) -> None:
        super().__init__(adapter, subscription)
        self._elected_at: float | None = None
        self._inherit: list[bytes] = []
        self._last = "0-0"
        self._asking: asyncio.Task[dict[str, list[Entry]]] | None = None
        self._one_word = asyncio.Lock()

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
        answer = await self._client.run(_scripts.ELECT, (self._keys.reader,), (self._name, round(lease * 1000)))
        if answer != _AS_BEFORE and self._elected_at is not None:
            self._lose()
        if answer == _NOT_ELECTED:
            return False
        if self._elected_at is None:
            self._inherit = [MAIN, QUEUE]
        self._elected_at = asked
        return True

    def _lose(self) -> None:
        """Somebody else was elected meanwhile: nothing that we hold is ours any more.

        From here on under another name: what the old one still has pending is inherited like anybody's.
        """
        telemetry.log(logging.WARNING, "reader_lost", self._fields())
        self._elected_at = None
        self._name = fresh_name()
        self._buffer.clear()
        self._drop(list(self._held.values()))

    async def _take_new(self, limit: int, until: float) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        if self._asking is None:
            self._asking = loop.create_task(self._read_in_order(min(limit, READ_AT_ONCE)))
        found = self._admit(await self._answer(), limit)
        if not found and self._elected_at is not None:
            wait = min(until, loop.time() + BLOCK, self._next_move) - loop.time()
            await self._client.wait_for(self._keys.main, self._last, max(1, math.ceil(wait * 1000)))
        return found

    async def _answer(self) -> dict[str, list[Entry]]:
        """What was read. Whoever cancels us does not cancel the call: its entries are for the next receive."""
        asking = self._asking
        assert asking is not None
        try:
            return await asyncio.shield(asking)
        except BrokerError:
            self._forgotten = True  # the server may have sent entries that never arrived here
            raise
        finally:
            if asking.done():
                self._asking = None

    async def _read_in_order(self, limit: int) -> dict[str, list[Entry]]:
        keys = (self._keys.main, self._keys.queue, self._keys.reader)
        ours, queue, main, last = await self._client.run(
            _scripts.READ_IN_ORDER, keys, (self._subscription.service, self._name, limit)
        )
        if not ours and self._elected_at is not None:
            self._lose()
        self._last = last.decode()
        return {self._keys.queue: queue, self._keys.main: main}

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

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """The same; but one that is lost means that the order is somebody else's now."""
        async with self._one_word:
            answers = await super().settle(items)
            if "lost" in answers and self._elected_at is not None:
                self._lose()
            return answers

    async def _renew(self) -> None:
        # Not beside a settlement: what that has just finished would look lost.
        async with self._one_word:
            if self._elected_at is not None and await self._elect(self._adapter.options.lease):
                await super()._renew()

    async def _let_go(self) -> None:
        if self._asking is not None:
            with contextlib.suppress(BrokerError):  # what it would have brought is let go with the rest
                self._admit(await self._answer(), 0)
        await super()._let_go()  # by its own name; what an earlier one had is inherited when its lease is over
        await self._client.run(_scripts.ELECT, (self._keys.reader,), (self._name, 0))
