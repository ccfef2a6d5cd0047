"""Batches: a verdict for each event, and finding the one that spoils the call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from eventbus.batch import Batch
from eventbus.errors import InvalidOutcome
from eventbus.settlement import Delivery
from eventbus.status import ACKED, Outcome, outcome_of
from eventbus.worker.calling import failure

CallBatch = Callable[[Sequence[Delivery], Batch], Awaitable[object]]
Conclude = Callable[[Delivery, Outcome], object]


async def call_batch(deliveries: Sequence[Delivery], call: CallBatch, conclude: Conclude, *, split: bool) -> bool:
    """Call a batch handler and conclude each event by its own outcome, as soon as that is known.

    An exception says nothing about which event it came from: the events without a word of their own are halved and
    each half called again, down to one, so that a poisoned event spends its own retries and nobody else's. Answers
    whether the call went well.
    """
    batch = Batch(deliveries)
    try:
        outcomes = _spread(await call(deliveries, batch), batch)
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
        rest = [item.delivery for item in batch if item.outcome is None]
        for item in batch:
            if item.outcome is not None:
                conclude(item.delivery, item.outcome)
        if not split or len(rest) == 1:
            for delivery in rest:
                conclude(delivery, failure(error))
            return False
    else:
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            conclude(delivery, outcome)
        return True
    if rest:
        await _halve(rest, call, conclude)
    return False


async def _halve(deliveries: Sequence[Delivery], call: CallBatch, conclude: Conclude) -> None:
    """Call both halves of a batch that failed.

    If the first goes well the second must be the spoiled one: it is halved at once, which spares a call.
    """
    middle = len(deliveries) // 2
    first, second = deliveries[:middle], deliveries[middle:]
    well = await call_batch(first, call, conclude, split=True) if first else False
    if well and len(second) > 1:
        await _halve(second, call, conclude)
    else:
        await call_batch(second, call, conclude, split=True)


def _spread(result: object, batch: Batch) -> list[Outcome]:
    if isinstance(result, (list, tuple)):
        if len(result) != len(batch):
            raise InvalidOutcome(f"a batch handler returned {len(result)} outcomes for {len(batch)} events")
        outcomes = [outcome_of(entry) for entry in result]
    else:
        outcomes = [ACKED if result is None else outcome_of(result)] * len(batch)
    return [item.outcome or outcome for item, outcome in zip(batch, outcomes, strict=True)]
