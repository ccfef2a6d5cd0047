"""The consumer of a service with fairness: new events stand in a list for each tenant, and come by turns."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from eventbus.adapter import Subscription
from eventbus.settlement import Delivery
from eventbus_redis import _scripts
from eventbus_redis._client import Argument
from eventbus_redis.work import BLOCK, READ_AT_ONCE, WorkConsumer

if TYPE_CHECKING:
    from eventbus_redis.adapter import RedisAdapter

STEP: Final = 500
"""Events that one call takes from the shared stream: the server does nothing else meanwhile."""
BUDGET: Final = 0.1
"""Seconds that one receive spends on taking over a backlog."""


class FairConsumer(WorkConsumer):
    """Reads the service's own stream only; a script fills it from the shared one, tenant by tenant."""

    def __init__(self, adapter: RedisAdapter, subscription: Subscription) -> None:
        super().__init__(adapter, subscription)
        fairness = subscription.fairness
        assert fairness is not None
        self._streams = {self._keys.queue: ">"}
        self._turn: list[Argument] = [fairness.in_a_row]
        for tenant in fairness.weights:
            self._turn += (tenant, fairness.turn(tenant))

    async def _take_new(self, limit: int, until: float) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        limit = min(limit, READ_AT_ONCE)
        enough = loop.time() + BUDGET
        keys = (self._keys.main, self._keys.queue, self._keys.turns)
        step, last = STEP, b""
        while True:
            arguments = (self._subscription.service, step, limit, *self._turn)
            taken, _, last = await self._client.run(_scripts.TURNS, keys, arguments)
            if taken < STEP:
                break
            step = STEP if loop.time() < enough else 0
        if self._reading is None:
            self._read(limit, None)
        found = self._admit(await self._entries(), limit)
        if not found:
            wait = min(until, loop.time() + BLOCK, self._next_move, self._next_claim) - loop.time()
            await self._client.wait_for(self._keys.main, last.decode(), max(1, math.ceil(wait * 1000)))
        return found
