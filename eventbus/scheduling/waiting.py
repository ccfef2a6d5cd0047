"""The waiting room: deliveries that are not due yet, held in memory outside the concurrency limit."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container
from typing import Generic, TypeVar

Item = TypeVar("Item")


class WaitingRoom(Generic[Item]):
    """A heap by due time with a fixed number of places."""

    __slots__ = ("_heap", "_order", "places")

    def __init__(self, places: int) -> None:
        self.places = places
        self._heap: list[tuple[float, int, Item]] = []
        self._order = itertools.count()

    def admit(self, item: Item, due_at: float, *, always: bool = False) -> bool:
        """Take a seat until `due_at`; False when the room is full, unless the item has nowhere else to go."""
        if len(self._heap) >= self.places and not always:
            return False
        heapq.heappush(self._heap, (due_at, next(self._order), item))
        return True

    def due(self, now: float) -> list[Item]:
        """Everybody whose time has come."""
        items = []
        while self._heap and self._heap[0][0] <= now:
            items.append(heapq.heappop(self._heap)[2])
        return items

    @property
    def next_due(self) -> float | None:
        """When the next one is due."""
        return self._heap[0][0] if self._heap else None

    def drop(self, gone: Container[Item]) -> list[Item]:
        """Take out those who are gone."""
        dropped = [item for _, _, item in self._heap if item in gone]
        self._heap = [entry for entry in self._heap if entry[2] not in gone]
        heapq.heapify(self._heap)
        return dropped

    def clear(self) -> list[tuple[float, Item]]:
        """Everybody out, each with the time they were waiting for."""
        items = [(due_at, item) for due_at, _, item in self._heap]
        self._heap.clear()
        return items

    def __len__(self) -> int:
        return len(self._heap)
