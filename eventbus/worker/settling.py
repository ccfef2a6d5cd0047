"""Settling: verdicts are carried out many at a time; what fails is kept and tried again.

No timer collects them: while one settle call is on its way, everything that finishes meanwhile becomes the next.
An idle bus settles at once, a busy one in large batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from eventbus import telemetry
from eventbus.adapter import Consumer, Settled
from eventbus.errors import EventBusError
from eventbus.settlement import Delivery, Park, Retry, Settlement

MAX_BATCH: Final = 1024
BACKOFF: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SAY_AGAIN: Final = 12
"""Of failures to receive, one after the other, the first is logged and every twelfth: with BACKOFF one a minute."""

Item = tuple[Delivery, Settlement]


class Settler:
    """Owns every delivery between its verdict and the broker's word that it is settled."""

    def __init__(
        self,
        consumer: Consumer,
        settled: Callable[[Sequence[Item], Sequence[Settled]], None],
        before: Callable[[Sequence[Item]], Awaitable[None]] | None = None,
    ) -> None:
        self._consumer = consumer
        self._settled = settled
        self._before = before
        self._pending: list[Item] = []
        self._wake = asyncio.Event()
        self.empty = asyncio.Event()
        """Set while nothing is left to settle."""
        self.empty.set()
        self._tries: dict[Delivery, int] = {}
        self._open = 0  # taken out of what is pending, and not settled yet

    @property
    def failing(self) -> int:
        """How many settlements the broker has refused so far; readiness turns red while there are any."""
        return len(self._tries)

    def add(self, delivery: Delivery, settlement: Settlement) -> None:
        """Settle this, soon."""
        self._pending.append((delivery, settlement))
        if len(self._pending) == 1:
            self.empty.clear()
            self._wake.set()

    async def run(self) -> None:
        """Settle for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                items, self._pending = self._pending[:MAX_BATCH], self._pending[MAX_BATCH:]
                self._open += len(items)
                await self._settle(items)

    async def _settle(self, items: list[Item]) -> None:
        try:
            if self._before is not None:
                await self._before(items)
            answers = await self._consumer.settle(items)
        except EventBusError as error:
            self._report(items, error)
            answers = ["failed"] * len(items)
        except Exception as error:  # noqa: BLE001 - an adapter's bug must not take the settler down with it
            telemetry.log(logging.ERROR, "settle_failed", {"error": repr(error)}, exc_info=error)
            answers = ["failed"] * len(items)
        if "failed" in answers:
            self._keep([item for item, answer in zip(items, answers, strict=True) if answer == "failed"])
            items = [item for item, answer in zip(items, answers, strict=True) if answer != "failed"]
            answers = [answer for answer in answers if answer != "failed"]
        if self._tries:
            for delivery, _ in items:
                self._tries.pop(delivery, None)
        if items:
            self._open -= len(items)
            self._settled(items, answers)
            if not self._open and not self._pending:
                self.empty.set()

    def _keep(self, items: list[Item]) -> None:
        """Hold them and try again: a message is never given up because the broker is not well."""
        loop = asyncio.get_running_loop()
        for item in items:
            tries = self._tries.get(item[0], 0)
            self._tries[item[0]] = tries + 1
            loop.call_later(BACKOFF[min(tries, len(BACKOFF) - 1)], self._again, item)
            if isinstance(item[1], Park):
                telemetry.park_errors.add(1, {"service": item[0].service, "error_type": "settle"})
        first, settlement = items[0]
        name = "dlq_publish_failed" if isinstance(settlement, (Park, Retry)) else "settle_failed"
        fields = telemetry.about(first) | {"messages": len(items), "tries": self._tries[first]}
        telemetry.log(logging.WARNING, name, fields)

    def _again(self, item: Item) -> None:
        self._open -= 1
        self.add(*item)

    def _report(self, items: list[Item], error: EventBusError) -> None:
        fields = {"service": items[0][0].service, "queue": items[0][0].queue, "error": str(error)}
        telemetry.log(logging.WARNING, "connection_lost", fields | {"messages": len(items)})
