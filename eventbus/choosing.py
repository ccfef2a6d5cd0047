"""Choosing letters: a walk along a dead-letter queue that remembers its place and holds one page at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from eventbus import headers
from eventbus.adapter import Parked, Parking
from eventbus.filters import Filter, Glance

PAGE: Final = 500


class Choice:
    """The letters that fit a filter, oldest first: from a queue, or out of those given.

    A bounded one ends: what is parked while it walks stands behind what it began with, and is not reached.
    """

    def __init__(
        self,
        parking: Parking,
        wanted: Filter,
        now: float,
        *,
        after: str | None = None,
        bounded: bool = False,
        sent: Mapping[str, int] | None = None,
        given: Sequence[Parked] | None = None,
        unread: bool = False,
        first: int = PAGE,
        on_scan: Callable[[int], None] = lambda read: None,
    ) -> None:
        self._parking = parking
        self._wanted = wanted
        # Who neither chooses by what is in a letter nor shows it need not read it.
        self._look = parking.skim if unread and wanted.empty else parking.browse
        self._now = now
        self._place = after
        self._left: int | None = None
        self._bounded = bounded
        self._sent = {} if sent is None else sent
        self._size = min(PAGE, first) if wanted.empty else PAGE
        self._page: deque[Parked] = deque(given or ())
        self._given = self._ended = given is not None
        self._read = 0
        self._on_scan = on_scan
        self.cursor = after
        """The address of the last letter that was looked at."""

    async def begin(self) -> None:
        """Go on from the cursor, in a new look at the queue: letters in hand may have to be fetched again."""
        if not self._given:
            self._page.clear()
            self._place, self._ended = self.cursor, False
            self._left = await self._parking.depth() if self._bounded else None

    async def take(self, number: int) -> list[Parked]:
        """The next letters that fit, up to so many; fewer only at the end."""
        found: list[Parked] = []
        while len(found) < number and await self._fill():
            letter = self._page.popleft()
            self.cursor = letter.address
            if self._fits(letter):
                found.append(letter)
        return found

    def more(self) -> bool:
        """Whether there is anything left to look at (not: anything that fits)."""
        return bool(self._page) or (not self._ended and self._left != 0)

    async def _fill(self) -> bool:
        """See that there is a letter to look at; False at the end."""
        while not self._page:
            if self._ended or self._left == 0:
                return False
            size = self._size if self._left is None else min(self._size, self._left)
            page = await self._look(self._place, size)
            self._page.extend(page.letters)
            self._place, self._ended = page.next, page.next is None
            self._read += len(page.letters)
            if self._left is not None:
                self._left = max(0, self._left - len(page.letters))
            self._on_scan(self._read)
        return True

    def _fits(self, letter: Parked) -> bool:
        sent = self._sent.get(letter.event.id)
        if sent is not None and headers.number(letter.headers.get(headers.REDRIVEN_COUNT)) >= sent:
            return False  # this very run has put it back, and it was parked again
        return self._wanted.empty or self._wanted.matches(Glance(letter), self._now)
