"""Offsets of a partition that no letter has: markers of transactions, aborted ones, compacted ones. Pure.

Kafka tells where a partition begins and ends, not how many records are in between. Whoever has read a stretch knows.
"""

from __future__ import annotations

from collections.abc import Iterable


class Holes:
    """What is known of one partition: the stretch that was read, and what is missing in it."""

    def __init__(self) -> None:
        self.start = self.end = 0
        self._missing: list[tuple[int, int]] = []

    def begin(self, begin: int, end: int) -> int:
        """The partition goes from here to there now; returns where to read on."""
        if begin > self.end or end < self.end:  # nothing that we know is left, or it is another topic by now
            self.start = self.end = begin
            self._missing.clear()
        self.start = max(self.start, begin)
        self._missing = [(first, after) for first, after in self._missing if after > begin]
        return self.end

    def add(self, offsets: Iterable[int], end: int = 0) -> None:
        """These offsets, in order, are all that have a record, from where we knew it up to `end`."""
        for offset in offsets:
            if offset > self.end:
                self._missing.append((self.end, offset))
            self.end = max(self.end, offset + 1)
        if end > self.end:
            self._missing.append((self.end, end))
            self.end = end

    def missing(self, begin: int) -> int:
        """How many offsets from `begin` on are known to have no record."""
        return sum(after - max(first, begin) for first, after in self._missing if after > begin)
