"""Dead-letter operations, the same on every broker: count, browse, get, stats, re-drive, purge, export.

Adapters only know how to browse, move and remove by address; filters, limits, rates and reports are here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from eventbus import headers, telemetry
from eventbus.adapter import Moved, Parking, Redrive
from eventbus.deadletter import DeadLetter
from eventbus.errors import ConfigError
from eventbus.facets import Facet, by_age
from eventbus.filters import Filter

PAGE: Final = 500
StatKey: TypeAlias = Literal["reason", "status", "code", "type", "tenant", "fingerprint", "age"]


@dataclass(slots=True)
class Report:
    """What a re-drive or a purge did."""

    matched: int = 0
    done: int = 0
    gone: int = 0
    failed: int = 0
    dry_run: bool = False
    ids: list[str] = field(default_factory=list)
    """Event ids of what was done (or would have been), at most the first thousand."""


@dataclass(frozen=True, slots=True)
class LetterPage:
    """Letters, and the cursor of the next page; None at the end."""

    letters: list[DeadLetter]
    next: str | None


class DeadLetters:
    """One service's dead-letter queue: `bus.dead_letters("wms-cincout")`."""

    def __init__(self, parking: Parking, service: str, *, now: Callable[[], float] = time.time) -> None:
        self._parking = parking
        self._now = now
        self.service = service

    async def count(self, where: str | Filter | None = None) -> int:
        """How many are parked; with a filter, how many of them match."""
        if where is None:
            return await self._parking.depth()
        return sum([1 async for _ in self.all(where)])

    async def browse(self, where: str | Filter | None = None, after: str | None = None, limit: int = 20) -> LetterPage:
        """A page of letters, oldest first; nothing is consumed. `after` is the `next` of the page before."""
        wanted = Filter.of(where)
        letters: list[DeadLetter] = []
        cursor, now = after, self._now()
        while True:
            # With a filter a page of ours may take several of the broker's; the cursor stays at the last one read.
            size = limit - len(letters) if wanted.empty else min(PAGE, max(limit, 50))
            page = await self._parking.browse(cursor, size)
            for position, parked in enumerate(page.letters):
                letter = DeadLetter.read(parked, self.service)
                if wanted.matches(letter, now):
                    letters.append(letter)
                    if len(letters) == limit:
                        more = position + 1 < len(page.letters) or page.next is not None
                        return LetterPage(letters, parked.address if more else None)
            if page.next is None:
                return LetterPage(letters, None)
            cursor = page.next

    async def all(self, where: str | Filter | None = None) -> AsyncIterator[DeadLetter]:
        """Every letter, page by page."""
        wanted, cursor, now = Filter.of(where), None, self._now()
        while True:
            page = await self._parking.browse(cursor, PAGE)
            for parked in page.letters:
                letter = DeadLetter.read(parked, self.service)
                if wanted.matches(letter, now):
                    yield letter
            cursor = page.next
            if cursor is None:
                return

    async def get(self, id: str) -> list[DeadLetter]:
        """The letters of one event id: more than one if a duplicate was parked too."""
        return [DeadLetter.read(parked, self.service) for parked in await self._parking.find(id)]

    async def stats(self, by: StatKey = "reason", where: str | Filter | None = None) -> dict[str, int]:
        """How many letters there are of each reason (status, code ...), most first; by age, youngest first."""
        if by not in ("reason", "status", "code", "type", "tenant", "fingerprint", "age"):
            raise ConfigError(f"stats by {by!r}: use reason, status, code, type, tenant, fingerprint or age")
        facet: Facet = "hour" if by == "age" else by
        counts = await self._parking.tally(facet) if Filter.of(where).empty else None
        if counts is None:
            counts = Counter([letter.facets[facet] async for letter in self.all(where)])
        if by == "age":
            return by_age(counts, self._now())
        return dict(Counter(counts).most_common())

    async def redrive(
        self,
        ids: Sequence[str] | None = None,
        *,
        where: str | Filter | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        rate: float | None = None,
        reset_attempts: bool = False,
        via: Literal["queue", "retry"] = "queue",
        delay: float = 5.0,
        by: str = "python",
    ) -> Report:
        """Put letters back to this one service: by event id, by filter, or the oldest `limit`.

        Published and confirmed before it is removed: a crash in between doubles a message, never loses it. The
        count of retries goes on unless `reset_attempts`; even so a re-driven message always gets a call.
        """
        report = Report(dry_run=dry_run)
        async for letters in self._chosen(ids, where, limit, report):
            if dry_run:
                continue
            now = self._now()
            orders = [
                Redrive(
                    letter.address,
                    headers.for_redrive(_story(letter), by, now, reset_attempts=reset_attempts),
                    delay=delay if via == "retry" else 0.0,
                )
                for letter in letters
            ]
            _tally(report, letters, await self._parking.redrive(orders))
            if rate:
                await asyncio.sleep(len(letters) / rate)
        if report.done:
            telemetry.redriven.add(report.done, {"service": self.service})
            telemetry.log(
                logging.WARNING, "redriven", {"service": self.service, "messages": report.done, "by": by, "via": via}
            )
        return report

    async def purge(
        self,
        ids: Sequence[str] | None = None,
        *,
        where: str | Filter | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        by: str = "python",
    ) -> Report:
        """Remove letters for good: by event id, by filter, or the oldest `limit`."""
        report = Report(dry_run=dry_run)
        async for letters in self._chosen(ids, where, limit, report):
            if not dry_run:
                _tally(report, letters, await self._parking.purge([letter.address for letter in letters]))
        if report.done:
            telemetry.purged.add(report.done, {"service": self.service, "reason": "operator"})
            telemetry.log(logging.WARNING, "purged", {"service": self.service, "messages": report.done, "by": by})
        return report

    async def export(self, where: str | Filter | None = None) -> AsyncIterator[dict[str, object]]:
        """Every letter as a JSON-ready object; the body as base64, to the byte."""
        async for letter in self.all(where):
            yield letter.row()

    async def _chosen(
        self, ids: Sequence[str] | None, where: str | Filter | None, limit: int | None, report: Report
    ) -> AsyncIterator[list[DeadLetter]]:
        """The letters to work on, in pieces. What is parked again meanwhile stays out: a run ends."""
        if ids is not None:
            found = [letter for id in ids for letter in await self.get(id)]
            async for piece in _pieces(_each(found), limit, report):
                yield piece
            return
        async for piece in _pieces(self._standing(where), limit, report):
            yield piece

    async def _standing(self, where: str | Filter | None) -> AsyncIterator[DeadLetter]:
        """The letters that stand here now: what is parked later comes behind them, and is not reached."""
        wanted, now, left = Filter.of(where), self._now(), await self._parking.depth()
        cursor = None
        while left > 0:
            page = await self._parking.browse(cursor, min(PAGE, left))
            for parked in page.letters:
                letter = DeadLetter.read(parked, self.service)
                if wanted.matches(letter, now):
                    yield letter
            left -= len(page.letters)
            cursor = page.next
            if cursor is None:
                return


async def _each(letters: list[DeadLetter]) -> AsyncIterator[DeadLetter]:
    for letter in letters:
        yield letter


async def _pieces(
    letters: AsyncIterator[DeadLetter], limit: int | None, report: Report
) -> AsyncIterator[list[DeadLetter]]:
    piece: list[DeadLetter] = []
    async for letter in letters:
        if limit is not None and report.matched >= limit:
            break
        report.matched += 1
        if report.dry_run and len(report.ids) < 1000:
            report.ids.append(letter.id)
        piece.append(letter)
        if len(piece) == 100:
            yield piece
            piece = []
    if piece:
        yield piece


def _tally(report: Report, letters: Sequence[DeadLetter], answers: Sequence[Moved]) -> None:
    for letter, answer in zip(letters, answers, strict=True):
        setattr(report, answer, getattr(report, answer) + 1)
        if answer == "done" and len(report.ids) < 1000:
            report.ids.append(letter.id)


def _story(letter: DeadLetter) -> dict[str, object]:
    return {headers.REDRIVEN_COUNT: letter.redriven}
