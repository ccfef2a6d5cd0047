"""Dead-letter operations, the same on every broker: look, count, re-drive, edit, purge, export, import.

Adapters only know how to browse, move and remove by address; filters, limits, rates, canaries and reports are here.
Whatever the number of letters, no more than three pages of them are in memory: two that are moved, one that comes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Final, Literal, TypeAlias, get_args

from eventbus import headers, letterlines, telemetry
from eventbus.adapter import Moved, Parked, Parking, Redrive, Stats
from eventbus.canary import Canary, parked_again
from eventbus.choosing import Choice
from eventbus.deadletter import DeadLetter
from eventbus.errors import ConfigError, UnknownLetter
from eventbus.facets import Facet, by_age, facet
from eventbus.failpoints import failpoint
from eventbus.filters import Filter
from eventbus.settlement import HeaderDelta

PAGE: Final = 500
IMPORT_AT_ONCE: Final = 2000
MAX_IDS: Final = 1000
OUT_OF_TIME: Final = "out of time"
"""Why a piece of work ended that had more to do than fits one request to the admin API: go on at its `next`."""

StatKey: TypeAlias = Literal["reason", "status", "code", "type", "tenant", "fingerprint", "age"]
STAT_KEYS: Final[tuple[StatKey, ...]] = get_args(StatKey)
Mark: TypeAlias = tuple[str, float, str]
Where: TypeAlias = "str | Filter | None"


@dataclass(slots=True)
class Report:
    """What a re-drive, a purge or an import did."""

    matched: int = 0
    done: int = 0
    gone: int = 0
    """No longer there when their turn came: another operator was faster. In an import: there already."""
    failed: int = 0
    """Still there, because the broker did not take them."""
    dry_run: bool = False
    ids: list[str] = field(default_factory=list)
    """Event ids of what was done (or would have been), at most the first thousand."""
    next: str | None = None
    """Where to go on, if it ended at its limit: the `after` of the next call."""
    stopped: str = ""
    """Why it ended early: the canary, or somebody's word."""
    erased: int = 0
    """How many letters that were gone before or now were taken out of the broker's log too."""

    def add(self, more: Report) -> None:
        """Count what a later piece of the same work did; where that ended is for the caller to judge."""
        self.matched += more.matched
        self.done += more.done
        self.gone += more.gone
        self.failed += more.failed
        self.ids += more.ids[: MAX_IDS - len(self.ids)]


@dataclass(frozen=True, slots=True)
class LetterPage:
    """Letters, and the cursor of the next page; None at the end."""

    letters: list[DeadLetter]
    next: str | None


Progress: TypeAlias = Callable[[Report], None]
Move: TypeAlias = Callable[[Sequence[Parked]], Coroutine[None, None, list[Moved]]]


class DeadLetters:
    """One service's dead-letter queue: `bus.dead_letters("wms-cincout")`.

    With `tenants`, letters of other tenants do not exist for it: not in counts, lists, stats, re-drives or purges.
    """

    def __init__(
        self,
        parking: Parking,
        service: str,
        *,
        now: Callable[[], float] = time.time,
        stats: Callable[[], Awaitable[Stats]] | None = None,
        tenants: Collection[str] | None = None,
    ) -> None:
        self._parking = parking
        self._now = now
        self._stats = stats
        self._tenants = tenants
        self.service = service
        self.on_scan: Callable[[int], None] = lambda read: None
        """Called with the number of letters read so far by whatever walks along the whole queue."""

    # --- looking ---------------------------------------------------------------------------------------------

    async def count(self, where: Where = None) -> int:
        """How many are parked; with a filter, how many of them match."""
        return (await self.depth(where))[0]

    async def depth(self, where: Where = None) -> tuple[int, bool]:
        """The count, and whether it is exact: of a long log with gaps that nobody has read it is an estimate."""
        wanted = self._filter(where)
        if wanted.empty:
            return await self._parking.count()
        return sum([len(some) async for some in self._walk(wanted)]), True

    async def browse(self, where: Where = None, after: str | None = None, limit: int = 20) -> LetterPage:
        """A page of letters, oldest first; nothing is consumed. `after` is the `next` of the page before."""
        choice = Choice(self._parking, self._filter(where), self._now(), after=after, first=limit)
        found = await choice.take(limit)
        more = len(found) == limit and choice.more()
        return LetterPage([self._letter(parked) for parked in found], found[-1].address if more else None)

    async def all(self, where: Where = None) -> AsyncIterator[DeadLetter]:
        """Every letter, page by page."""
        async for some in self._walk(self._filter(where)):
            for parked in some:
                yield self._letter(parked)

    async def _walk(self, wanted: Filter) -> AsyncIterator[list[Parked]]:
        choice = Choice(self._parking, wanted, self._now(), on_scan=self.on_scan)
        async with self._parking.looking():
            while found := await choice.take(PAGE):
                yield found

    async def get(self, id: str) -> list[DeadLetter]:
        """The letters of one event id: more than one if a duplicate was parked too."""
        return [self._letter(parked) for parked in await self._parking.find(id) if self._mine(parked)]

    async def stats(self, by: StatKey = "reason", where: Where = None) -> dict[str, int]:
        """How many letters there are of each reason (status, code ...), most first; by age, youngest first."""
        if by not in STAT_KEYS:
            raise ConfigError(f"stats by {by!r}: use {', '.join(STAT_KEYS[:-1])} or {STAT_KEYS[-1]}")
        name: Facet = "hour" if by == "age" else by
        wanted = self._filter(where)
        counts = await self._parking.tally(name) if wanted.empty else None
        if counts is None:
            scanned: Counter[str] = Counter()
            async for some in self._walk(wanted):
                scanned.update(facet(name, parked.event, parked.headers) for parked in some)
            counts = scanned
        return by_age(counts, self._now()) if by == "age" else dict(Counter(counts).most_common())

    async def export(self, where: Where = None) -> AsyncIterator[dict[str, object]]:
        """Every letter as a JSON-ready object, to the byte; `import_` reads it again."""
        async for letter in self.all(where):
            yield letter.row()

    # --- moving ----------------------------------------------------------------------------------------------

    async def redrive(
        self,
        ids: Sequence[str] | None = None,
        *,
        where: Where = None,
        after: str | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        rate: float | None = None,
        canary: int | Canary | None = None,
        reset_attempts: bool = False,
        via: Literal["queue", "retry"] = "queue",
        delay: float = 5.0,
        by: str = "python",
        stop: asyncio.Event | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Put letters back to this one service: by event id, by filter, or the oldest `limit`.

        Published and confirmed before it is removed: a crash in between doubles a message, never loses it. The
        count of retries goes on unless `reset_attempts`; even so a re-driven message always gets a call. With
        `via="retry"` they go by the retry road, and come back after `delay`.
        """
        if rate is not None and not rate > 0:
            raise ConfigError(f"rate {rate:g}: must be above 0")
        if via not in ("queue", "retry"):
            raise ConfigError(f"via {via!r}: use 'queue' or 'retry'")
        wait = delay if via == "retry" else 0.0
        sent: dict[str, int] = {}  # event id -> times re-driven

        async def move(letters: Sequence[Parked]) -> list[Moved]:
            now, deltas = self._now(), dict[int, HeaderDelta]()
            orders = []
            for address, event, story in letters:  # letters that were put back equally often get the same delta
                times = headers.number(story[headers.REDRIVEN_COUNT]) if headers.REDRIVEN_COUNT in story else 0
                if times not in deltas:
                    deltas[times] = headers.for_redrive(story, by, now, reset_attempts=reset_attempts)
                orders.append(Redrive(address, deltas[times], None, wait))
                sent[event.id] = times + 1
            answers = await self._parking.redrive(orders)
            if answers.count("done") < len(letters):
                done = {letter.event.id for letter, answer in zip(letters, answers, strict=True) if answer == "done"}
                for letter in letters:
                    if letter.event.id not in done:
                        sent.pop(letter.event.id, None)
            return answers

        report, halt = Report(dry_run=dry_run), stop or asyncio.Event()
        choice = await self._choose(ids, None, where, after, sent)
        try:
            if canary is not None and not dry_run:
                first = canary if isinstance(canary, Canary) else Canary(canary)
                await self._carry_out(report, choice, move, _least(first.letters, limit), rate, halt, progress)
                if not await self._went_well(report, first, sent, halt):
                    return report
            await self._carry_out(report, choice, move, limit, rate, halt, progress)
        finally:
            if report.done:
                telemetry.redriven.add(report.done, {"service": self.service})
                fields = {"service": self.service, "messages": report.done, "by": by, "via": via}
                telemetry.log(logging.WARNING, "redriven", fields)
        return report

    async def edit(
        self, id: str, body: bytes, *, address: str | None = None, reset_attempts: bool = False, by: str = "python"
    ) -> Report:
        """Put one letter back with another body. Who did it, when, and both bodies' digests travel with the message."""
        found = [letter for letter in await self.get(id) if address in (None, letter.address)]
        if not found:
            raise UnknownLetter(f"{self.service} has no dead letter with the id {id!r}")
        if len(found) > 1:
            places = ", ".join(letter.address for letter in found)
            raise ConfigError(f"{self.service} has {len(found)} dead letters with the id {id!r}; name one of {places}")
        letter, now = found[0], self._now()
        trace = f"{headers.iso(now)} by {headers.cut(by, 100)}: {_digest(letter.body)} -> {_digest(body)}"
        delta = headers.for_redrive(letter.story, by, now, reset_attempts=reset_attempts, edited=trace)
        report = Report(matched=1)
        answers = await self._parking.redrive([Redrive(letter.address, delta, body)])
        _count(report, [Parked(letter.address, letter.event, letter.story)], answers)
        if report.done:
            telemetry.redriven.add(1, {"service": self.service})
            fields = {"service": self.service, "event_id": id, "by": by, "edited": trace}
            telemetry.log(logging.WARNING, "dlq_edited", fields)
        return report

    async def purge(
        self,
        ids: Sequence[str] | None = None,
        *,
        addresses: Sequence[str] | None = None,
        where: Where = None,
        after: str | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        export: IO[str] | None = None,
        erase: bool = False,
        by: str = "python",
        stop: asyncio.Event | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Remove letters for good: by event id, by filter, or the oldest `limit`.

        With `export`, each letter is written to that file, and the file to the disk, before it is removed. Where a
        purge only hides a letter, because the broker keeps a log, `erase` takes all that are gone out of that too.
        """
        if erase:
            await self.erase(dry_run=True)

        async def move(letters: Sequence[Parked]) -> list[Moved]:
            if export is not None:
                write_out(export, map(self._letter, letters))
            return await self._parking.purge([letter.address for letter in letters])

        report, halt = Report(dry_run=dry_run), stop or asyncio.Event()
        choice = await self._choose(ids, addresses, where, after, unread=export is None)
        try:
            await self._carry_out(report, choice, move, limit, None, halt, progress)
        finally:
            if report.done:
                telemetry.purged.add(report.done, {"service": self.service, "reason": "operator"})
                telemetry.log(logging.WARNING, "purged", {"service": self.service, "messages": report.done, "by": by})
        if erase and not dry_run and not report.stopped:
            report.erased = (await self.erase(by=by)).erased
        return report

    async def erase(self, *, dry_run: bool = False, by: str = "python") -> Report:
        """Take what was purged and re-driven out of the broker's log too. A dry run only says whether that can be."""
        if not self._parking.erases:
            raise ConfigError(f"erase: a purge of {self.service} is for good on this broker; leave it out")
        if self._tenants is not None:
            raise ConfigError("erase: concerns letters of all tenants; leave it to one who sees all of them")
        report = Report(dry_run=dry_run)
        if not dry_run:
            report.erased = await self._parking.erase()
            telemetry.log(logging.WARNING, "erased", {"service": self.service, "messages": report.erased, "by": by})
        return report

    async def import_(
        self,
        lines: Iterable[str],
        *,
        dry_run: bool = False,
        by: str = "python",
        stop: asyncio.Event | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Park exported letters again, as they were. Those that stand there already are left alone.

        So an import that was interrupted, or whose fate is unknown, is simply done again.
        """
        report, halt, numbered = Report(dry_run=dry_run), stop or asyncio.Event(), enumerate(lines, 1)
        # Without an index each question about ids would walk along the whole queue: walk once.
        known = None if await self._parking.tally("reason") is not None else await self._marks()
        try:
            while piece := list(islice(numbered, IMPORT_AT_ONCE)):
                letters = [letterlines.load(line, number) for number, line in piece if line.strip()]
                await self._import(letters, report, known)
                if progress is not None:
                    progress(report)
                if halt.is_set():
                    report.stopped = "stopped"
                    break
        finally:
            if report.done and not dry_run:
                telemetry.log(
                    logging.WARNING, "dlq_imported", {"service": self.service, "messages": report.done, "by": by}
                )
        return report

    async def _marks(self) -> set[Mark]:
        return {_mark(parked) async for some in self._walk(self._filter(None)) for parked in some}

    async def _import(self, letters: Sequence[Parked], report: Report, known: set[Mark] | None) -> None:
        report.matched += len(letters)
        there = known
        if there is None:
            found = await self._parking.find_all([letter.event.id for letter in letters])
            there = {_mark(letter) for letter in found if self._mine(letter)}
        new: list[Parked] = []
        for letter in letters:
            if not self._mine(letter):
                raise ConfigError(f"{letter.event.id} belongs to a tenant that is not yours")
            if _mark(letter) in there:
                report.gone += 1
            else:
                there.add(_mark(letter))
                new.append(letter)
        if report.dry_run:
            _note(report, new)
        elif new:
            _count(report, new, await self._parking.restore(new))

    # --- the parts -------------------------------------------------------------------------------------------

    async def _choose(
        self,
        ids: Sequence[str] | None,
        addresses: Sequence[str] | None,
        where: Where,
        after: str | None,
        sent: Mapping[str, int] | None = None,
        unread: bool = True,
    ) -> Choice:
        wanted, now = self._filter(where), self._now()
        if ids is not None:
            found = await self._parking.find_all(ids)
            return Choice(self._parking, wanted, now, given=[x for x in found if self._mine(x)])
        if addresses is not None:
            return Choice(self._parking, wanted.at(addresses), now, after=after)
        return Choice(
            self._parking, wanted, now, after=after, bounded=True, sent=sent, unread=unread, on_scan=self.on_scan
        )

    async def _carry_out(
        self,
        report: Report,
        choice: Choice,
        move: Move,
        limit: int | None,
        rate: float | None,
        stop: asyncio.Event,
        progress: Progress | None,
    ) -> None:
        """Piece by piece, until the limit, the end, a failure or somebody's word."""
        if limit is not None and report.matched >= limit:
            return
        size = PAGE if rate is None else max(1, min(PAGE, int(rate / 4)))
        done = False
        while not done:
            # At a rate a run may take hours: nobody's place in the queue is kept that long.
            async with self._parking.looking(), choice.begin(), _Hands(report, move, progress) as hands:
                while not done:
                    most = size if limit is None else min(size, limit - report.matched)
                    piece = [] if stop.is_set() else await choice.take(most)
                    report.matched += len(piece)
                    done = not piece or report.matched == limit
                    ahead = not done and rate is None and choice.look_ahead()
                    await hands.move(piece, others=1 if ahead else 0)
                    done = done or bool(report.failed)
                    report.next = choice.cursor if piece and choice.more() else None
                    if rate is not None:
                        break
            if rate is not None and not done:
                await _pause(stop, size / rate)
        if stop.is_set() and choice.more():
            report.stopped, report.next = "stopped", choice.cursor
        if report.failed:
            report.stopped = f"{report.failed} could not be moved"

    async def _went_well(self, report: Report, canary: Canary, sent: dict[str, int], stop: asyncio.Event) -> bool:
        if not sent or report.stopped:
            return not report.stopped
        back = await parked_again(self._parking, sent, canary, stats=self._stats, stop=stop)
        if canary.too_many(back, len(sent)):
            report.stopped = f"canary: {back} of {len(sent)} were parked again"
        return not report.stopped

    def _filter(self, where: Where) -> Filter:
        wanted = Filter.of(where)
        return wanted if self._tenants is None else wanted.of_tenants(self._tenants)

    def _mine(self, parked: Parked) -> bool:
        return self._tenants is None or parked.event.tenant in self._tenants

    def _letter(self, parked: Parked) -> DeadLetter:
        return DeadLetter.read(parked, self.service)


class _Hands:
    """Who moves pieces and counts what became of them: one while the next is fetched and begun, where that can be."""

    def __init__(self, report: Report, move: Move, progress: Progress | None) -> None:
        self._report = report
        self._move = move
        self._progress = progress
        self._moving: deque[tuple[list[Parked], asyncio.Task[list[Moved]]]] = deque()

    async def __aenter__(self) -> _Hands:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Whatever went wrong: what was begun is finished, and counted."""
        await asyncio.gather(*(moving for _, moving in self._moving), return_exceptions=True)
        for letters, moving in self._moving:
            if not moving.cancelled() and moving.exception() is None:
                _count(self._report, letters, moving.result())

    async def move(self, letters: list[Parked], *, others: int) -> None:
        """Begin to move letters; returns when all are moved but so many pieces."""
        if self._report.dry_run:
            _note(self._report, letters)
        elif letters:
            self._moving.append((letters, asyncio.ensure_future(self._move(letters))))
        while len(self._moving) > others:
            first, moving = self._moving.popleft()
            answers = await moving
            if self._moving:
                failpoint("redrive.next-begun")
            _count(self._report, first, answers)
        if self._progress is not None:
            self._progress(self._report)


def _count(report: Report, letters: Sequence[Parked], answers: Sequence[Moved]) -> None:
    report.done += answers.count("done")
    report.gone += answers.count("gone")
    report.failed += answers.count("failed")
    done = (letter.event.id for letter, answer in zip(letters, answers, strict=True) if answer == "done")
    report.ids += islice(done, MAX_IDS - len(report.ids))


def _note(report: Report, letters: Sequence[Parked]) -> None:
    report.ids += [letter.event.id for letter in letters[: MAX_IDS - len(report.ids)]]


def _mark(letter: Parked) -> Mark:
    """What tells two letters of one event apart: when and where from it was parked."""
    story = letter.headers
    queue = headers.text(story.get(headers.ORIGINAL_QUEUE)) or ""
    return letter.event.id, headers.moment(story.get(headers.PARKED_AT)), queue


def _digest(body: bytes) -> str:
    return f"{len(body)} bytes sha256:{hashlib.sha256(body).hexdigest()[:16]}"


def _least(one: int, other: int | None) -> int:
    return one if other is None else min(one, other)


def write_out(file: IO[str], letters: Iterable[DeadLetter]) -> None:
    """Letters as lines of an export; when it returns they stand on the disk."""
    file.writelines(letterlines.dump(letter) + "\n" for letter in letters)
    file.flush()
    try:
        number = file.fileno()
    except OSError:  # a file in memory
        return
    try:
        os.fsync(number)
    except OSError:  # a pipe or a terminal has no disk
        return


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
