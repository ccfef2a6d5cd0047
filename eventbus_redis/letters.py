"""The consumer of a service's dead letters; one stays parked, for all to see, until it is acknowledged."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from eventbus import headers
from eventbus.adapter import Settled, Subscription
from eventbus.settlement import Ack, Delivery, HeaderDelta, Park, Release, Settlement
from eventbus_redis import _scripts, fields
from eventbus_redis._client import Argument
from eventbus_redis.leased import LeasedConsumer, Receipt, receipt_of

if TYPE_CHECKING:
    from eventbus_redis.adapter import RedisAdapter

LOOK_INTERVAL: Final = 0.2
REFUSED_PARKING: Final = 30.0
"""A dead letter is never parked again; who asks for it waits this long instead."""


class LetterConsumer(LeasedConsumer):
    """Reads under a lease: a letter nobody acknowledges can be read again when it is over."""

    def __init__(self, adapter: RedisAdapter, subscription: Subscription) -> None:
        super().__init__(adapter, subscription)
        self.queue = self._keys.dlq

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """Letters that nobody reads now and that do not wait for another try."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while not self._woken and not self._closed:
            self._signal.clear()
            keys = (self._keys.dlq, self._keys.waiting, self._keys.owners)
            lease = round(self._adapter.options.lease * 1000)
            entries = await self._client.run(_scripts.LETTERS_CLAIM, keys, (self._name, limit, lease))
            if entries:
                return [self._delivery(id, entry) for id, entry in entries]
            pause = min(LOOK_INTERVAL, until - loop.time())
            if pause <= 0:
                break
            try:
                async with asyncio.timeout(pause):
                    await self._signal.wait()
            except TimeoutError:
                continue
        self._woken = False
        return []

    def _delivery(self, id: bytes, entry: list[bytes]) -> Delivery:
        event, story, _, taken = fields.decode(id, entry, self._subscription.mapping)
        event = event.rewritten(headers={**event.headers, **story})
        receipt = Receipt(id, id, entry, story, False)
        history = headers.read_history(story)
        delivery = Delivery(event, self._subscription.service, self.queue, receipt, history, enqueued_at=taken)
        self._held[receipt.key] = delivery
        return delivery

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """Ack removes; anything else leaves the letter where it is, for later."""
        now = time.time()
        orders: list[tuple[Delivery, str, int]] = []
        for delivery, settlement in items:
            if isinstance(settlement, Ack):
                orders.append((delivery, "a", 0))
            elif isinstance(settlement, Release):
                orders.append((delivery, "w", 0))
            else:
                wait = REFUSED_PARKING if isinstance(settlement, Park) else settlement.due_at - now
                orders.append((delivery, "w", max(0, math.ceil(wait * 1000))))
        mine = [order for order in orders if self._held.get(receipt_of(order[0]).key) is order[0]]
        lost = await self._tell(mine)
        answers: list[Settled] = []
        for delivery, _, _ in orders:
            key = receipt_of(delivery).key
            if self._held.get(key) is not delivery:
                answers.append("lost")
                continue
            del self._held[key]
            answers.append("lost" if delivery in lost else "done")
        return answers

    async def note(self, delivery: Delivery, headers_: HeaderDelta) -> bool:
        """A letter keeps its story as it was parked; what its readers go through is not part of it."""
        return self._held.get(receipt_of(delivery).key) is delivery

    async def _renew(self) -> None:
        wait = round(self._adapter.options.lease * 1000)
        self._drop(list(await self._tell([(delivery, "n", wait) for delivery in self._held.values()])))

    async def _clean(self) -> None:
        return

    async def _let_go(self) -> None:
        await self._tell([(delivery, "g", 0) for delivery in self._held.values()])

    async def _tell(self, orders: Sequence[tuple[Delivery, str, int]]) -> set[Delivery]:
        """Carry out orders on letters; those that are no longer ours come back."""
        if not orders:
            return set()
        arguments: list[Argument] = [self._name]
        for delivery, op, wait in orders:
            arguments += (op, receipt_of(delivery).id, wait)
        lost = await self._client.run(_scripts.LETTERS_SETTLE, self._keys.letters, arguments)
        return {orders[position - 1][0] for position in lost}
