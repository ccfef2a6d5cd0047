"""The dead letters of one service, for operators. Addresses are `partition:offset`; pages go by the time of parking."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from eventbus import headers
from eventbus.adapter import BodyMapping, Moved, Page, Parked, Parking, Redrive, standing
from eventbus.errors import ConfigError, UnknownService
from eventbus.event import JSON
from eventbus.failpoints import failpoint
from eventbus.settlement import HeaderDelta
from eventbus_kafka import records
from eventbus_kafka._client import TP, Client, Rest
from eventbus_kafka.holes import Holes
from eventbus_kafka.names import Names
from eventbus_kafka.records import Outgoing, Record
from eventbus_kafka.state import Claim, Letters, stretches

if TYPE_CHECKING:
    from eventbus_kafka.adapter import KafkaAdapter

_ADDRESS: Final = re.compile(r"(\d{1,9}):(\d{1,18})")
_NEAR: Final = 500
"""Letters closer together than this are read in one go."""
MOST_COUNTED: Final = 8 * 1024 * 1024
"""Bytes of letters that are read to count them, at a time; the next count goes on behind them."""
COST_OF_RECORD: Final = 1024
MOST_SEEN: Final = 2000
"""Records kept of letters that were looked at, in case they are moved."""
_TAKEN_AWAY: Final = frozenset(headers.OF_DEAD_LETTERS)
"""What a re-drive takes away: not kept of a letter that is only glimpsed at."""
_JSON: Final = JSON.encode()


class KafkaParking(Parking):
    """An append-only topic, and beside it what was re-driven or purged."""

    def __init__(self, adapter: KafkaAdapter, names: Names) -> None:
        self._adapter = adapter
        self._client = adapter.client
        self._names = names
        self._letters: Letters = adapter.letters(names)
        self._lookers = 0
        self._walks: dict[tuple[str, Look], Walk] = {}  # by the cursor they go on from
        self._seen: dict[str, Letter] = {}  # by address

    # --- look ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Keep the place in the log, and the records of what was seen and may be moved, until the operation is over."""
        self._lookers += 1
        try:
            yield
        finally:
            self._lookers -= 1
            if not self._lookers:
                self._walks.clear()
                self._seen.clear()

    async def browse(self, cursor: str | None, limit: int) -> Page:
        """The letters that still stand, of all partitions together, oldest first."""
        return await self._page(cursor, limit, _read)

    async def skim(self, cursor: str | None, limit: int) -> Page:
        """With no more of each letter read than moving it takes."""
        return await self._page(cursor, limit, _glimpsed)

    @property
    def looks_ahead(self) -> bool:
        """Where a walk keeps its place, nobody's place is disturbed by what is moved meanwhile."""
        return self._lookers > 0

    async def _page(self, cursor: str | None, limit: int, look: Look) -> Page:
        walk = self._walks.pop((cursor, look), None) if cursor else None
        if walk is None or look is not _glimpsed:  # who moves letters learns from his claims what others said
            await self._partitions()
            await self._letters.refresh()
        walk = walk or await self._walk_from(cursor, look)
        page, more = await walk.take(max(1, limit))
        letters = [parked for _, _, _, parked, _ in page]
        if self._lookers:
            if len(self._seen) > MOST_SEEN:
                self._seen.clear()
            self._seen.update([(parked.address, seen) for _, _, _, parked, seen in page])
            if more:
                self._walks[letters[-1].address, look] = walk
        return Page(letters, letters[-1].address if more else None)

    async def _walk_from(self, cursor: str | None, look: Look) -> Walk:
        begins, ends = await self._bounds()
        start = (-1, -1, -1)
        if cursor:
            start = await self._behind(cursor, begins, ends)
            since = await self._client.since(list(begins), start[0])
            begins = {tp: max(begins[tp], since.get(tp, ends[tp])) for tp in begins}
            if start[1] >= 0:
                begins[self._names.dlq, start[1]] = start[2]
        return Walk(self._client, begins, ends, start, self._letters.gone, look)

    async def depth(self) -> int:
        """How many stand here, by offsets less the gaps that are known; no letter is read for it."""
        begins, ends = await self._bounds()
        await self._letters.refresh()
        return self._left(begins, ends)

    async def count(self) -> tuple[int, bool]:
        """How many stand here: what was not read before is, up to some megabytes; beyond that it is an estimate."""
        begins, ends = await self._bounds()
        exact = await self._look_for_holes(begins, ends)
        await self._letters.refresh()
        return self._left(begins, ends), exact

    def _left(self, begins: Mapping[TP, int], ends: Mapping[TP, int]) -> int:
        holes = self._letters.holes
        offsets = sum(ends[tp] - begins[tp] - (holes[tp].missing(begins[tp]) if tp in holes else 0) for tp in begins)
        return max(0, offsets - sum(len(self._gone_within(tp, begins[tp], ends[tp])) for tp in begins))

    async def _look_for_holes(self, begins: Mapping[TP, int], ends: Mapping[TP, int]) -> bool:
        """Read what is new since the last look, only to see which offsets have a record; whether that was all."""
        holes = self._letters.holes
        starts = {tp: holes.setdefault(tp, Holes()).begin(begins[tp], ends[tp]) for tp in begins}
        cost = 0

        def take(tp: TP, some: Sequence[Record]) -> bool:
            nonlocal cost
            cost += sum(len(record.value or b"") + COST_OF_RECORD for record in some)
            holes[tp].add([record.offset for record in some])
            return cost > MOST_COUNTED

        for tp, at in (await self._client.scan(starts, ends, take)).items():
            holes[tp].add([], at)
        return all(holes[tp].end == ends[tp] for tp in ends)

    async def _bounds(self) -> tuple[dict[TP, int], dict[TP, int]]:
        partitions = await self._partitions()
        begins, ends = await self._client.begins(partitions), await self._client.ends(partitions)
        self._letters.begin(begins)
        return begins, ends

    async def _partitions(self) -> list[TP]:
        number = await self._client.partitions(self._names.dlq)
        if not number or not await self._client.partitions(self._names.state):
            raise UnknownService(
                f"{self._names.service} has no dead letters at {self._client.where}: {self._names.dlq} is missing"
            )
        return [(self._names.dlq, partition) for partition in range(number)]

    async def _behind(self, cursor: str, begins: dict[TP, int], ends: dict[TP, int]) -> tuple[int, int, int]:
        """The place behind a letter in the order of all."""
        partition, offset = _parse(cursor)
        tp = (self._names.dlq, partition)
        if tp not in begins:
            raise ConfigError(f"{cursor!r} is not a cursor of this queue; pass the `next` of the page before")
        if not begins[tp] <= offset < ends[tp]:
            return (-1, -1, -1)  # retention took it and all before it
        found = await self._client.read({tp: offset}, {tp: offset + 1})
        if not found[tp]:
            return (-1, -1, -1)
        return (await self._latest(tp, offset, found[tp][0].timestamp or 0), partition, offset + 1)

    async def _latest(self, tp: TP, offset: int, at: int) -> int:
        """The latest time of all letters up to an offset, which has `at`: nearly always that, but clocks go back."""

        async def comes_before(time: int) -> bool:
            return (await self._client.since([tp], time)).get(tp, offset + 1) <= offset

        step = 1
        while await comes_before(at + step):
            at += step
            step *= 2
        while step > 1:
            step //= 2
            if await comes_before(at + step):
                at += step
        return at

    # --- move ------------------------------------------------------------------------------------------------

    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        """Onto the service's own topic, confirmed, and only then gone from here."""
        orders = {letter.address: letter for letter in letters}
        deltas = {id(letter.headers): letter.headers for letter in letters}  # many share one
        if not all(delta.keys() >= _TAKEN_AWAY for delta in deltas.values()):
            self._seen.clear()  # of what was only glimpsed at something is missing that is to stay
        fates: dict[str, Moved] = {}
        async for claim, found in self._ours(orders):
            fates |= await self._redrive(claim, found, orders)
        return [fates.get(letter.address, "gone") for letter in letters]

    async def _redrive(
        self, claim: Claim, found: Mapping[str, Letter], orders: Mapping[str, Redrive]
    ) -> Mapping[str, Moved]:
        copies: list[Outgoing] = []
        changes: dict[tuple[int, float], _Changes] = {}  # many letters share one delta
        for address, letter in found.items():
            _, delta, body, delay = orders[address]
            change = changes.get((id(delta), delay))
            if change is None:
                road = await self._adapter.road(self._names, delay)
                change = changes[id(delta), delay] = _Changes(delta, self._names.dlq, road)
            copies.append(change.copy(letter, body))
        errors = await self._client.send(copies)
        failpoint("kafka.redrive.between-copy-and-state")
        failed = [address for address, error in zip(found, errors, strict=True) if error is not None]
        for partition, offset, *_ in map(found.__getitem__, failed):
            claim.letters[partition].discard(offset)
        await self._letters.say(claim.letters, "redriven", claim.key)
        return dict.fromkeys(found, "done") | dict.fromkeys(failed, "failed")  # type: ignore[return-value]

    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        """Out of sight at once; `erase` takes them out of the log too."""
        done: set[str] = set()
        async for claim, found in self._ours(addresses, content=False):
            await self._letters.say(claim.letters, "purged", claim.key)
            done.update(found)
        return ["done" if address in done else "gone" for address in addresses]

    async def _ours(
        self, addresses: Iterable[str], *, content: bool = True
    ) -> AsyncIterator[tuple[Claim, dict[str, Letter]]]:
        """Those that are ours to move, and our claim; at last those that another had begun to move, and did not."""
        while found := await self._standing(addresses, content=content):
            claim = await self._letters.claim(_places(found.values()))
            ours = {address: letter for address, letter in found.items() if letter[1] in claim.letters[letter[0]]}
            if ours:
                yield claim, ours
            addresses = [address for address in found if address not in ours]
            if addresses:
                await self._letters.settled(_places(found[address] for address in addresses))

    async def restore(self, letters: Sequence[Parked]) -> list[Moved]:
        """Written to the topic of dead letters, and confirmed."""
        await self._bounds()
        ready = [
            records.outgoing(
                letter.event.rewritten(headers={**letter.event.headers, **letter.headers}), self._names.dlq
            )
            for letter in letters
        ]
        return ["done" if error is None else "failed" for error in await self._client.send(ready)]

    @property
    def erases(self) -> bool:
        """A log forgets nothing by itself."""
        return True

    async def erase(self) -> int:
        """Take purged and re-driven letters out of the log for good; how many those were.

        A log can only be cut off at its head. What still stands before the last letter that is gone is written again
        at the end first, and confirmed: a crash in between doubles a letter, never loses one.
        """
        begins, ends = await self._bounds()
        await self._letters.refresh()
        gone = {tp: self._gone_within(tp, begins[tp], ends[tp]) for tp in begins}
        cuts = {tp: max(offsets) + 1 for tp, offsets in gone.items() if offsets}
        starts, erased = {tp: begins[tp] for tp in cuts}, 0
        while starts:
            kept: list[Letter] = []

            def take(tp: TP, some: Sequence[Record], kept: list[Letter] = kept) -> bool:
                kept += [_kept(tp[1], record) for record in some if not self._letters.is_gone(tp[1], record.offset)]
                return len(kept) >= _NEAR

            upto = await self._client.scan(starts, cuts, take)
            gone = {tp: self._gone_within(tp, starts[tp], upto[tp]) for tp in starts}
            others = await self._rewrite(kept)
            for partition, offset, *_ in others:  # cut before these for now
                tp = (self._names.dlq, partition)
                upto[tp] = min(upto[tp], offset)
            erased += sum(offset < upto[tp] for tp, offsets in gone.items() for offset in offsets)
            await self._client.truncate(upto)
            self._letters.begin(begins := begins | upto)
            await self._letters.forget()
            starts = {tp: at for tp, at in upto.items() if at < cuts[tp]}
            await self._letters.settled(_places(others))
        return erased

    async def _rewrite(self, letters: Sequence[Letter]) -> list[Letter]:
        """Write letters again at the end of the log, and say that they are gone here. Returns what others move."""
        if not letters:
            return []
        claim, mine = await self._letters.claim(_places(letters))
        copies = [
            Outgoing(self._names.dlq, key, value, headers, partition)
            for partition, offset, key, value, headers, _ in letters
            if offset in mine[partition]
        ]
        for error in await self._client.send(copies):
            if error is not None:
                raise error
        failpoint("kafka.erase.between-copy-and-state")
        await self._letters.say(mine, "erased", claim)
        failpoint("kafka.erase.before-cut")
        return [letter for letter in letters if letter[1] not in mine[letter[0]]]

    def _gone_within(self, tp: TP, begin: int, end: int) -> list[int]:
        """The offsets of letters that are gone, as far as the log still has them."""
        return [offset for offset in self._letters.gone[tp[1]] if begin <= offset < end]

    async def _standing(self, addresses: Iterable[str], *, content: bool = True) -> dict[str, Letter]:
        """The letters at addresses that still stand, as far as we know; without `content` no more than their places."""
        seen = {address: self._seen.pop(address, None) for address in addresses}
        gone = self._letters.is_gone
        found = {at: letter for at, letter in seen.items() if letter is not None and not gone(letter[0], letter[1])}
        unseen = [address for address, letter in seen.items() if letter is None]
        if not unseen:
            return found
        begins, ends = await self._bounds()
        await self._letters.refresh()
        wanted: dict[TP, list[int]] = {}
        for address in unseen:
            partition, offset = _parse(address)
            tp = (self._names.dlq, partition)
            if tp in begins and begins[tp] <= offset < ends[tp] and not self._letters.is_gone(partition, offset):
                wanted.setdefault(tp, []).append(offset)
                if not content:
                    found[address] = (partition, offset, None, None, (), False)
        if not content:
            return found
        for tp, offsets in wanted.items():
            asked = set(offsets)
            for start, end in stretches(asked, _NEAR):
                some = await self._client.read({tp: start}, {tp: end}, keep=lambda r, asked=asked: r.offset in asked)  # type: ignore[misc]
                found |= {_address(tp[1], record): _kept(tp[1], record) for record in some[tp]}
        return found


Letter: TypeAlias = tuple[int, int, bytes | None, bytes | None, records.Headers, bool]
"""What is kept of a record in case it is moved: partition, offset, key, value, headers, and whether it has an id and
nothing embedded. Plain tuples of plain values are none of the garbage collector's business: there may be thousands."""
Look: TypeAlias = Callable[[TP, Record], tuple[Parked, Letter]]
"""What is seen of a record, and what is kept of it."""


def _read(tp: TP, record: Record) -> tuple[Parked, Letter]:
    event, story, _ = records.incoming(record, tp, BodyMapping(), told=True)
    return Parked(_address(tp[1], record), event, story), _kept(tp[1], record)


def _glimpsed(tp: TP, record: Record) -> tuple[Parked, Letter]:
    told = dict(record.headers)
    id, kind = told.get("ce_id"), told.get(records.CONTENT_TYPE)
    if not id or records.EMBEDDED in told or (kind and kind != _JSON and b"cloudevents" in kind.lower()):
        return _read(tp, record)
    times = headers.number(told[headers.REDRIVEN_COUNT]) if headers.REDRIVEN_COUNT in told else 0
    rest = tuple([pair for pair in record.headers if pair[0] not in _TAKEN_AWAY])
    letter = (tp[1], record.offset, record.key, record.value, rest, True)
    return standing(_address(tp[1], record), id.decode("utf-8", "replace"), times), letter


def _kept(partition: int, record: Record) -> Letter:
    return partition, record.offset, record.key, record.value, tuple(record.headers), False


class _Changes:
    """What a re-drive changes in letters, made ready once for all of them."""

    def __init__(self, delta: HeaderDelta, dlq: str, road: str) -> None:
        self._dlq = dlq
        self._road = road
        self._without = {*delta, records.EMBEDDED}
        self._added: list[tuple[str, bytes | None]] = []
        for name, value in delta.items():
            if value is not None:
                self._added.append((name, str(value).encode("utf-8", "replace")))

    def copy(self, letter: Letter, body: bytes | None) -> Outgoing:
        """The letter as it goes back to its service, with another body, if one is given; all else to the byte."""
        partition, offset, key, value, had, plain = letter
        without = self._without
        found = [pair for pair in had if pair[0] not in without]
        if not plain:
            names = dict(had)
            if "ce_id" not in names and records.ORIGIN not in names:
                found.append((records.ORIGIN, f"{self._dlq}/{partition}/{offset}".encode()))
            mark = names.get(records.EMBEDDED)
            if mark and value:
                value = records.without_metadata(value, mark)
        copy = Outgoing(self._road, key, value, found + self._added)
        return copy if body is None else copy._replace(value=records.with_body(copy, body))


Seen: TypeAlias = tuple[int, int, int, Parked, Letter]
"""The time, partition and offset of a letter, which are its place in the order of all; then what was seen of it. The
time is the latest of its partition so far: with that of a clock that went back, pages would leave letters out."""


class Walk:
    """A way along all partitions together, in the order of parking; what was fetched ahead is for the next page."""

    def __init__(
        self,
        client: Client,
        starts: Mapping[TP, int],
        ends: Mapping[TP, int],
        start: tuple[int, int, int],
        gone: Mapping[int, set[int]],
        look: Look,
    ) -> None:
        self._client = client
        self._next = dict(starts)
        self._ends = ends
        self._start = start
        self._latest = {tp: start[0] if tp[1] == start[1] else -1 for tp in starts}
        self._gone = gone
        self._look = look
        self._ahead: dict[TP, list[Seen]] = {tp: [] for tp in starts}
        self._rest: Rest = {}

    async def take(self, limit: int) -> tuple[list[Seen], bool]:
        """The next letters that stand, and whether there are more after them."""
        while True:
            page = await self._merged(limit + 1)
            if all(offset not in self._gone[partition] for _, partition, offset, _, _ in page):
                break
            for tp, some in self._ahead.items():  # some were taken since they were fetched
                self._ahead[tp] = [seen for seen in some if seen[2] not in self._gone[tp[1]]]
        more = len(page) > limit
        del page[limit:]
        taken = Counter([partition for _, partition, _, _, _ in page])
        for tp, some in self._ahead.items():
            del some[: taken[tp[1]]]
        return page, more

    async def _merged(self, number: int) -> list[Seen]:
        """The first letters of all partitions: of each so much is fetched that none unknown comes before the last."""
        least = number // len(self._ahead) + 1
        while True:
            going = [tp for tp, at in self._next.items() if at < self._ends[tp]]
            short = [tp for tp in going if len(self._ahead[tp]) < least]
            if not short:
                page = list(islice(merge(*self._ahead.values()), number))
                short = [tp for tp in going if len(page) < number or self._ahead[tp][-1] < page[-1]]
            if not short:
                return page
            await self._fetch({tp: self._next[tp] for tp in short}, least)

    async def _fetch(self, starts: Mapping[TP, int], number: int) -> None:
        """So many more of these."""
        left = dict.fromkeys(starts, number)

        def take(tp: TP, some: Sequence[Record]) -> bool:
            gone, ahead, before = self._gone[tp[1]], self._ahead[tp], len(self._ahead[tp])
            latest = self._latest[tp]
            for record in some:
                latest = max(latest, record.timestamp or 0)
                if record.offset not in gone:
                    seen = (latest, tp[1], record.offset, *self._look(tp, record))
                    if seen >= self._start:
                        ahead.append(seen)
            self._latest[tp] = latest
            left[tp] -= len(ahead) - before
            return left[tp] <= 0

        self._next |= await self._client.scan(starts, self._ends, take, self._rest)


def _address(partition: int, record: Record) -> str:
    return f"{partition}:{record.offset}"


def _places(letters: Iterable[Letter]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for partition, offset, *_ in letters:
        found[partition].append(offset)
    return found


def _parse(address: str) -> tuple[int, int]:
    match = _ADDRESS.fullmatch(address)
    return (int(match[1]), int(match[2])) if match else (-1, -1)
