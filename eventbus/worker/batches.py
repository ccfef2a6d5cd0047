"""Batches: filling one, and finding the event that spoils it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from eventbus.batch import Batch
from eventbus.errors import InvalidOutcome
from eventbus.settlement import Delivery
from eventbus.status import ACKED, Outcome, outcome_of
from eventbus.worker.calling import failure

CallBatch = Callable[[Sequence[Delivery], Batch], Awaitable[object]]


async def outcomes_of_batch(deliveries: Sequence[Delivery], call: CallBatch, *, split: bool) -> list[Outcome]:
    """Call a batch handler and give each event its own outcome.

    An exception says nothing about which event it came from: the batch is halved and each half called again, down
    to one, so that a poisoned event spends its own retries and nobody else's.
    """
    batch = Batch(deliveries)
    try:
        result = await call(deliveries, batch)
        return _spread(result, batch)
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
        if not split or len(deliveries) == 1:
            return [failure(error)] * len(deliveries)
    middle = len(deliveries) // 2
    first = await outcomes_of_batch(deliveries[:middle], call, split=True)
    return first + await outcomes_of_batch(deliveries[middle:], call, split=True)


def _spread(result: object, batch: Batch) -> list[Outcome]:
    if isinstance(result, (list, tuple)):
        if len(result) != len(batch):
            raise InvalidOutcome(f"a batch handler returned {len(result)} outcomes for {len(batch)} events")
        outcomes = [outcome_of(entry) for entry in result]
    else:
        outcomes = [ACKED if result is None else outcome_of(result)] * len(batch)
    return [item.outcome or outcome for item, outcome in zip(batch, outcomes, strict=True)]
