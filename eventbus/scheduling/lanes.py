"""A lane per route: what is ready, what is running, and when a slow route must give up its surplus."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

PATIENCE: Final = 1.0
"""A lane whose oldest ready item has waited longer than this is blocked: it no longer keeps up."""

DIVERT_BASE: Final = 5.0
DIVERT_CAP: Final = 300.0


class Lane(Generic[Item]):
    """First in, first out, at most `limit` running. `share` is how much of the prefetch it may keep when blocked."""

    __slots__ = ("in_hand", "limit", "ready", "running", "share")

    def __init__(self, limit: int, share: int) -> None:
        self.limit = limit
        self.share = share
        self.ready: deque[tuple[float, Item]] = deque()
        self.running = 0
        """Calls under way."""
        self.in_hand = 0
        """Items in those calls: more than one each where they are batches."""

    def push(self, item: Item, now: float) -> None:
        """An item is ready to be handled."""
        self.ready.append((now, item))

    def take(self) -> Item | None:
        """The next item to handle; None when nothing is ready or the lane is full."""
        if not self.ready or self.running >= self.limit:
            return None
        self.running += 1
        self.in_hand += 1
        return self.ready.popleft()[1]

    def following(self) -> Item | None:
        """The next item for one that has just ended, in its place."""
        return self.ready.popleft()[1] if self.ready else None

    def batches(self, size: int, window: float, now: float) -> int:
        """How many batches could start now: full ones, and one that has waited long enough."""
        full, rest = divmod(len(self.ready), size)
        if rest and now >= self.ready[0][0] + window:
            full += 1
        return full

    def take_batch(self, size: int, window: float, now: float) -> list[Item] | None:
        """The next batch: `size` items, or fewer if the first of them has waited for the whole window."""
        if self.running >= self.limit or not self.batches(size, window, now):
            return None
        items = [self.ready.popleft()[1] for _ in range(min(size, len(self.ready)))]
        self.running += 1
        self.in_hand += len(items)
        return items

    @property
    def oldest(self) -> float | None:
        """Since when the next item has been ready."""
        return self.ready[0][0] if self.ready else None

    def held_back(self, now: float) -> int:
        """How many ready items wait for time alone: none, here."""
        return 0

    def blocked(self, now: float) -> bool:
        """Whether it no longer keeps up with what arrives."""
        return bool(self.ready) and now - self.ready[0][0] > PATIENCE

    def surplus(self, now: float) -> list[Item]:
        """Take out what a blocked lane holds beyond its share, newest first, so that other routes get room.

        A lane that is merely busy keeps everything: waiting for it is cheaper than sending messages round.
        """
        over = len(self.ready) + self.in_hand - self.share
        if over <= 0 or not self.blocked(now):
            return []
        return [self.ready.pop()[1] for _ in range(min(over, len(self.ready)))]

    def drop(self, gone: Container[Item]) -> list[Item]:
        """Take out the ready items that are gone."""
        dropped = [item for _, item in self.ready if item in gone]
        self.ready = deque(entry for entry in self.ready if entry[1] not in gone)
        return dropped

    def clear(self) -> list[Item]:
        """Take out everything that has not started."""
        items = [item for _, item in self.ready]
        self.ready.clear()
        return items


def divert_delay(requeues: int) -> float:
    """How long surplus stays away: longer each time it finds no room."""
    return min(DIVERT_CAP, DIVERT_BASE * 2.0 ** min(requeues, 16))
