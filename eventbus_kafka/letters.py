"""The consumer of a service's dead letters, in a group of its own. What it has read is gone; the rest stays."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from eventbus import headers
from eventbus.adapter import Settled, Subscription
from eventbus.errors import BrokerError, UnknownService
from eventbus.settlement import FRESH, Ack, Delivery, Requeue, Retry, Settlement
from eventbus_kafka import records
from eventbus_kafka.lanes import Lane, receipt_of
from eventbus_kafka.log import LogConsumer
from eventbus_kafka.names import Names
from eventbus_kafka.records import Record

if TYPE_CHECKING:
    from eventbus_kafka.adapter import KafkaAdapter


class LetterConsumer(LogConsumer):
    """Reads the dead letters that still stand, in their order; one that is to wait waits here."""

    def __init__(self, adapter: KafkaAdapter, subscription: Subscription, names: Names) -> None:
        super().__init__(adapter, subscription, names, names.readers)
        self.queue = names.dlq
        self._letters = adapter.letters(names)
        self._later: list[tuple[float, int, Lane, Record]] = []
        self._turns = itertools.count()

    async def _wanted_topics(self) -> list[str]:
        if not await self._client.partitions(self._names.dlq):
            raise UnknownService(f"{self._names.service} has no {self._names.dlq} at {self._client.where}")
        return [self._names.dlq]

    async def _take(self, limit: int) -> list[Delivery]:
        self._bring_back()
        if not any(lane.in_hand for lane in self._order):
            return []
        await self._letters.refresh()
        standing = []
        for delivery in await super()._take(limit):
            lane, record = receipt_of(delivery)
            if self._letters.is_gone(lane.tp[1], record.offset):
                self._finish(delivery)
            else:
                standing.append(delivery)
        return standing

    async def _tell_losses(self) -> None:
        """What the log has lost was put back or purged, and erased then; or it was parked for longer than is wanted."""
        self._skipped.clear()

    def _bring_back(self) -> None:
        now = time.time()
        while self._later and self._later[0][0] <= now:
            _, _, lane, record = heapq.heappop(self._later)
            if not lane.fenced:
                lane.put_back([record])

    def _next_due(self) -> float:
        wait = self._later[0][0] - time.time() if self._later else 3600.0
        return max(0.001, min(wait, super()._next_due()))

    def _deliver(self, lane: Lane, record: Record) -> Delivery:
        event, _, problem = records.incoming(record, lane.tp, self._subscription.mapping, told=True, letter=True)
        # What its readers go through is no part of the letter's own story.
        note = lane.notes.get(record.offset)
        history = headers.read_history(note) if note else FRESH
        delivery = Delivery(
            event,
            self._subscription.service,
            self.queue,
            (lane, record),
            history,
            lane.is_suspect(record.offset),
            False,
            problem,
            records.written_at(record),
        )
        lane.held[record.offset] = delivery
        return delivery

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """Read ones are said to be gone before they are committed; the others stay."""
        mine = [item for item in items if self._mine(item[0])]
        read = [delivery for delivery, settlement in mine if isinstance(settlement, Ack)]
        failed = False
        if read:
            try:
                await self._letters.say(_places(read), "read")
            except BrokerError as error:
                failed = True
                self._adapter.report(read[0], error, others=len(read) - 1)
        answers: list[Settled] = []
        for delivery, settlement in items:
            if not self._mine(delivery):
                answers.append("lost")
            elif isinstance(settlement, Ack):
                if not failed:
                    self._finish(delivery)
                answers.append("failed" if failed else "done")
            else:
                self._keep(delivery, settlement)
                answers.append("done")
        self._settled.set()
        self._arrived.set()
        return answers

    def _keep(self, delivery: Delivery, settlement: Settlement) -> None:
        lane, record = receipt_of(delivery)
        del lane.held[record.offset]
        lane.dirty = True
        if isinstance(settlement, (Requeue, Retry)):
            heapq.heappush(self._later, (settlement.due_at, next(self._turns), lane, record))
        else:
            lane.put_back([record])


def _places(deliveries: Iterable[Delivery]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for delivery in deliveries:
        lane, record = receipt_of(delivery)
        found[lane.tp[1]].append(record.offset)
    return found
