"""The two consumers: of a service's work queue, and of its dead letters."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from eventbus import headers
from eventbus.adapter import Subscription
from eventbus.embedded.sqlite import letters, names, rows, tallies
from eventbus.embedded.sqlite.leased import LeasedConsumer, Receipt, receipt_of
from eventbus.embedded.sqlite.leases import Claimed, Table
from eventbus.embedded.sqlite.turns import FairClaim, OrderedClaim
from eventbus.embedded.sqlite.work import ClaimWork, Settle
from eventbus.embedded.sqlite.writer import Operation
from eventbus.settlement import Ack, Delivery, Park, Release, Requeue, Retry, Settlement

if TYPE_CHECKING:
    from eventbus.embedded.sqlite.adapter import SqliteAdapter

REFUSED_PARKING: Final = 30.0
"""A dead letter is never parked again; who asks for it waits this long instead."""


class WorkConsumer(LeasedConsumer):
    """A consumer of the work queue."""

    _table: Table = "inflight"

    def __init__(self, adapter: SqliteAdapter, subscription: Subscription) -> None:
        super().__init__(adapter, subscription)
        self.queue = names.queue(subscription.service, subscription.prefix)
        self._me = secrets.randbits(31)
        self._last_tenant = [""]

    def _claim_operation(self, limit: int) -> Operation[Claimed]:
        sub, lease = self._subscription, self._adapter.options.lease
        if sub.ordered:
            return OrderedClaim(self._id, limit, lease, self._me)
        if sub.fairness is not None:
            return FairClaim(self._id, limit, lease, sub.fairness, self._last_tenant)
        return ClaimWork(self._id, limit, lease)

    def _settle_operation(self, items: Sequence[tuple[Receipt, Delivery, Settlement]]) -> Operation[set[int]]:
        held = self._leases(receipt for receipt, _, _ in items)
        settle = Settle(self._id, self._log, held, self._retention, ordered=self._subscription.ordered, safe=False)
        for receipt, delivery, settlement in items:
            if isinstance(settlement, Ack):
                continue
            story = headers.merge(receipt.headers, settlement.headers)
            if isinstance(settlement, Park):
                settle.parked.append(_parcel(receipt.number, delivery, settlement, story))
                settle.safe = True
            elif isinstance(settlement, Release):
                settle.waiting.append((receipt.number, 0, rows.to_json(story)))
            else:
                settle.waiting.append((receipt.number, _millis(settlement.due_at), rows.to_json(story)))
                settle.safe = True
        return settle


class LetterConsumer(LeasedConsumer):
    """A consumer of the dead letters; one stays parked, for all to see, until it is acknowledged."""

    _table: Table = "dlq"

    def __init__(self, adapter: SqliteAdapter, subscription: Subscription) -> None:
        super().__init__(adapter, subscription)
        self.queue = names.dlq(subscription.service, subscription.prefix)

    def _delivery(self, row: rows.Row, token: int) -> Delivery:
        delivery = super()._delivery(row, token)
        story = receipt_of(delivery).headers
        delivery.event = delivery.event.rewritten(headers={**delivery.event.headers, **story})
        delivery.problem = ""  # it was parked for that very reason
        return delivery

    def _claim_operation(self, limit: int) -> Operation[Claimed]:
        return letters.ClaimLetters(self._id, limit, self._adapter.options.lease)

    def _settle_operation(self, items: Sequence[tuple[Receipt, Delivery, Settlement]]) -> Operation[set[int]]:
        held = self._leases(receipt for receipt, _, _ in items)
        acked = self._leases(receipt for receipt, _, settlement in items if isinstance(settlement, Ack))
        settle = letters.SettleLetters(self._id, held, acked)
        for receipt, _, settlement in items:
            if isinstance(settlement, Ack):
                continue
            # A letter's story is how it came here: what happens to its readers is not part of it, but for the
            # marks of waiting and crashing.
            story = receipt.headers
            if isinstance(settlement, (Requeue, Release)):
                story = headers.merge(story, settlement.headers)
            settle.waiting.append((receipt.number, self._due(settlement), rows.to_json(story) or "{}"))
        return settle

    def _due(self, settlement: Retry | Requeue | Park | Release) -> int:
        if isinstance(settlement, (Retry, Requeue)):
            return _millis(settlement.due_at)
        return _millis(self._adapter.now() + REFUSED_PARKING) if isinstance(settlement, Park) else 0


def _parcel(number: int, delivery: Delivery, settlement: Park, story: dict[str, object]) -> letters.Parcel:
    status = story.get(headers.FINAL_STATUS)
    code = story.get(headers.ERROR_CODE)
    return letters.Parcel(
        number,
        delivery.event.id,
        rows.to_json(story) or "{}",
        settlement.reason,
        status if isinstance(status, int) else None,
        code if isinstance(code, str) else None,
        tallies.column(delivery.event, story),
    )


def _millis(moment: float) -> int:
    # Upwards: never early.
    return math.ceil(moment * 1000)
