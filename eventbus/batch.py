"""A batch of events for one handler call, with a verdict for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import overload

from eventbus import status
from eventbus.event import Event
from eventbus.settlement import Delivery
from eventbus.status import Outcome


class BatchItem:
    """One event of a batch. Without a word about it, it shares the fate of the call."""

    __slots__ = ("delivery", "outcome")

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.outcome: Outcome | None = None

    @property
    def event(self) -> Event:
        """The event itself."""
        return self.delivery.event

    def ack(self) -> None:
        """This one is done, whatever happens to the others."""
        self.outcome = status.ACKED

    def retry(self, reason: str = "", *, after: float | timedelta | None = None, code: str | None = None) -> None:
        """This one goes into the retry loop."""
        self.outcome = status.retry(reason, after=after, code=code)

    def requeue(self, after: float | timedelta | None = None, *, reason: str = "") -> None:
        """This one is not due yet."""
        self.outcome = status.requeue(after, reason=reason)

    def park(self, reason: str, *, code: str | None = None) -> None:
        """This one goes to the dead-letter queue."""
        self.outcome = status.park(reason, code=code)

    def set(self, result: object) -> None:
        """Anything a single handler could return: an HTTP status, a ConsumerStatus, an Outcome."""
        self.outcome = status.outcome_of(result)


class Batch(Sequence[BatchItem]):
    """The events of one call, in the order of the payload list: `batch[3].park("e-mail already taken")`."""

    __slots__ = ("_items",)

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._items = [BatchItem(delivery) for delivery in deliveries]

    @overload
    def __getitem__(self, index: int) -> BatchItem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BatchItem]: ...
    def __getitem__(self, index: int | slice) -> BatchItem | Sequence[BatchItem]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[BatchItem]:
        return iter(self._items)
