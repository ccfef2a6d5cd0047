"""Choosing letters: a walk along a dead-letter queue that remembers its place and holds one page at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from eventbus import headers
from eventbus.adapter import Page, Parked, Parking
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
        self._unread = unread and wanted.empty
        self._now = now
        self._place = after
        self._left: int | None = None
        self._bounded = bounded
        self._sent = {} if sent is None else sent
        self._size = min(PAGE, first) if wanted.empty else PAGE
        self._ahead: asyncio.Task[Page] | None = None
        self._page: deque[Parked] = deque(given or ())
        self._given = self._ended = given is not None
        self._read = 0
        self._on_scan = on_scan
        self.cursor = after
        """The address of the last letter that was looked at."""

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[None]:
        """Go on from the cursor, in a new look at the queue: letters in hand may have to be fetched again."""
        if not self._given:
            self._page.clear()
            self._place, self._ended = self.cursor, False
            self._left = await self._parking.depth() if self._bounded else None
        try:
            yield
        finally:
            await self._let_go()

    async def take(self, number: int) -> list[Parked]:
        """The next letters that fit, up to so many; fewer only at the end."""
        found: list[Parked] = []
        while len(found) < number and await self._fill():
            page = self._page
            some = [page.popleft() for _ in range(min(number - len(found), len(page)))]
            self.cursor = some[-1].address
            found += filter(self._fits, some) if self._sent or not self._wanted.empty else some
        return found

    def more(self) -> bool:
        """Whether there is anything left to look at (not: anything that fits)."""
        return bool(self._page) or (not self._ended and self._left != 0)

    def look_ahead(self) -> bool:
        """Fetch the next page while the letters of this one are moved; False where that cannot be done."""
        if not (self._unread and self._parking.looks_ahead):
            return False
        if self._ahead is None and not self._page and self.more():
            self._ahead = asyncio.ensure_future(self._next_page())
        return True

    async def _let_go(self) -> None:
        """See a page that is on its way arrive; it concerns nobody any more, nor does what went wrong with it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            await asyncio.gather(ahead, return_exceptions=True)

    async def _next_page(self) -> Page:
        size = self._size if self._left is None else min(self._size, self._left)
        return await (self._parking.skim if self._unread else self._parking.browse)(self._place, size)

    async def _fill(self) -> bool:
        """See that there is a letter to look at; False at the end."""
        while not self._page:
            if self._ended or self._left == 0:
                return False
            ahead, self._ahead = self._ahead, None
            page = await (self._next_page() if ahead is None else ahead)
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
