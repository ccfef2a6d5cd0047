"""The dead letters of one service, for operators. Addresses are `partition:offset`; pages go by the time of parking."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Final

from eventbus import headers
from eventbus.adapter import BodyMapping, Moved, Page, Parked, Parking, Redrive, standing
from eventbus.errors import ConfigError, UnknownService
from eventbus.failpoints import failpoint
from eventbus.settlement import HeaderDelta
from eventbus_kafka import records
from eventbus_kafka._client import TP, Client
from eventbus_kafka.holes import Holes
from eventbus_kafka.names import Names
from eventbus_kafka.records import Outgoing, Record
from eventbus_kafka.state import Letters

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


class KafkaParking(Parking):
    """An append-only topic, and beside it what was re-driven or purged."""

    def __init__(self, adapter: KafkaAdapter, names: Names) -> None:
        self._adapter = adapter
        self._client = adapter.client
        self._names = names
        self._letters: Letters = adapter.letters(names)
        self._lookers = 0
        self._walks: dict[str, Walk] = {}  # by the cursor they go on from
        self._seen: dict[str, Record] = {}  # by address

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
        return await self._page(cursor, limit, self._letter)

    async def skim(self, cursor: str | None, limit: int) -> Page:
        """With no more of each letter read than moving it takes."""
        return await self._page(cursor, limit, self._glimpsed)

    @property
    def looks_ahead(self) -> bool:
        """Where a walk keeps its place, nobody's place is disturbed by what is moved meanwhile."""
        return self._lookers > 0

    async def _page(self, cursor: str | None, limit: int, read: Callable[[Record], Parked]) -> Page:
        await self._partitions()
        await self._letters.refresh()
        walk = self._walks.pop(cursor, None) if cursor else None
        if walk is None:
            walk = await self._walk_from(cursor)
        page, more = await walk.take(max(1, limit))
        letters = [read(record) for record in page]
        if self._lookers:
            if len(self._seen) > MOST_SEEN:
                self._seen.clear()
            self._seen.update((letter.address, record) for letter, record in zip(letters, page, strict=True))
            if more:
                self._walks[letters[-1].address] = walk
        return Page(letters, letters[-1].address if more else None)

    async def _walk_from(self, cursor: str | None) -> Walk:
        begins, ends = await self._bounds()
        after = (-1, -1, -1)
        if cursor:
            after = await self._place(cursor, begins, ends)
            since = await self._client.since(list(begins), after[0])
            begins = {tp: max(begins[tp], since.get(tp, ends[tp])) for tp in begins}
        return Walk(self._client, begins, ends, lambda record: _order(record) > after and self._stands(record))

    async def depth(self) -> int:
        """How many stand here, by offsets less the gaps that are known; nothing is read for it."""
        return self._left(*await self._bounds())

    async def count(self) -> tuple[int, bool]:
        """How many stand here: what was not read before is, up to some megabytes; beyond that it is an estimate."""
        begins, ends = await self._bounds()
        exact = await self._look_for_holes(begins, ends)
        await self._letters.refresh()
        return self._left(begins, ends), exact

    def _left(self, begins: Mapping[TP, int], ends: Mapping[TP, int]) -> int:
        holes = self._letters.holes
        offsets = sum(ends[tp] - begins[tp] - (holes[tp].missing(begins[tp]) if tp in holes else 0) for tp in begins)
        return max(0, offsets - sum(1 for _ in self._gone_within(begins, ends)))

    async def _look_for_holes(self, begins: Mapping[TP, int], ends: Mapping[TP, int]) -> bool:
        """Read what is new since the last look, only to see which offsets have a record; whether that was all."""
        holes = self._letters.holes
        starts = {tp: holes.setdefault(tp, Holes()).begin(begins[tp], ends[tp]) for tp in begins}
        seen: dict[TP, list[int]] = {tp: [] for tp in starts}
        cost = 0

        def enough(record: Record) -> bool:
            nonlocal cost
            cost += len(record.value or b"") + COST_OF_RECORD
            seen[record.topic, record.partition].append(record.offset)
            return cost > MOST_COUNTED

        for tp, stopped in (await self._client.read(starts, ends, limit=1, keep=enough)).items():
            holes[tp].add(seen[tp], seen[tp][-1] + 1 if stopped else ends[tp])
        return all(holes[tp].end == ends[tp] for tp in ends)

    async def _bounds(self) -> tuple[dict[TP, int], dict[TP, int]]:
        partitions = await self._partitions()
        return await self._client.begins(partitions), await self._client.ends(partitions)

    async def _partitions(self) -> list[TP]:
        number = await self._client.partitions(self._names.dlq)
        if not number or not await self._client.partitions(self._names.state):
            raise UnknownService(
                f"{self._names.service} has no dead letters at {self._client.where}: {self._names.dlq} is missing"
            )
        return [(self._names.dlq, partition) for partition in range(number)]

    async def _place(self, cursor: str, begins: dict[TP, int], ends: dict[TP, int]) -> tuple[int, int, int]:
        """The place of a letter in the order of all."""
        at = self._parse(cursor)
        if at is None or at[0] not in begins:
            raise ConfigError(f"{cursor!r} is not a cursor of this queue; pass the `next` of the page before")
        tp, offset = at
        if not begins[tp] <= offset < ends[tp]:
            return (-1, -1, -1)  # retention took it and all before it
        found = await self._client.read({tp: offset}, {tp: offset + 1})
        return _order(found[tp][0]) if found[tp] else (-1, -1, -1)

    def _stands(self, record: Record) -> bool:
        return not self._letters.is_gone(_address(record))

    def _letter(self, record: Record) -> Parked:
        event, story, _ = records.incoming(record, BodyMapping(), told=True)
        return Parked(_address(record), event, story)

    def _glimpsed(self, record: Record) -> Parked:
        told = dict(record.headers)
        id, kind = told.get("ce_id"), told.get(records.CONTENT_TYPE)
        if not id or (kind and b"cloudevents" in kind.lower()):
            return self._letter(record)
        times = headers.number(told.get(headers.REDRIVEN_COUNT))
        return standing(_address(record), id.decode("utf-8", "replace"), times)

    # --- move ------------------------------------------------------------------------------------------------

    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        """Onto the service's own topic, confirmed, and only then gone from here."""
        orders = {letter.address: letter for letter in letters}
        fates: dict[str, Moved] = {}
        async for found in self._ours(list(orders)):
            fates |= await self._redrive(found, orders)
        return [fates.get(letter.address, "gone") for letter in letters]

    async def _redrive(self, found: Mapping[str, Record], orders: Mapping[str, Redrive]) -> dict[str, Moved]:
        delays = {orders[address].delay for address in found}
        roads = {delay: await self._adapter.road(self._names, delay) for delay in delays}
        copies: list[Outgoing] = []
        changes: dict[int, _Changes] = {}  # many letters share one delta
        for address, record in found.items():
            order = orders[address]
            if id(order.headers) not in changes:
                changes[id(order.headers)] = _Changes(order.headers)
            copy = changes[id(order.headers)].copy(record, roads[order.delay])
            if order.body is not None:
                copy = copy._replace(value=records.with_body(copy, order.body))
            copies.append(copy)
        errors = await self._client.send(copies)
        failpoint("kafka.redrive.between-copy-and-state")
        fates: dict[str, Moved] = {}
        for address, error in zip(found, errors, strict=True):
            fates[address] = "done" if error is None else "failed"
        await self._letters.say([address for address, fate in fates.items() if fate == "done"], "redriven")
        await self._letters.unsay([address for address, fate in fates.items() if fate == "failed"])
        return fates

    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        """Out of sight at once; `erase` takes them out of the log too."""
        done: set[str] = set()
        async for found in self._ours(addresses, content=False):
            await self._letters.say(found, "purged")
            done.update(found)
        return ["done" if address in done else "gone" for address in addresses]

    async def _ours(self, addresses: Sequence[str], *, content: bool = True) -> AsyncIterator[dict[str, Record]]:
        """Those that are ours to move; at last those that another had begun to move, and did not."""
        while found := await self._standing(addresses, content=content):
            mine = await self._letters.claim(list(found))
            if mine:
                yield {address: record for address, record in found.items() if address in mine}
            addresses = [address for address in found if address not in mine]
            await self._letters.settled(addresses)

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
        cuts: dict[TP, int] = {}
        for tp, offset in self._gone_within(begins, ends):
            cuts[tp] = max(cuts.get(tp, 0), offset + 1)
        starts, erased = {tp: begins[tp] for tp in cuts}, 0
        while starts:
            kept = await self._client.read(starts, cuts, limit=_NEAR, keep=self._stands)
            upto = {tp: some[-1].offset + 1 if len(some) >= _NEAR else cuts[tp] for tp, some in kept.items()}
            gone = list(self._gone_within(starts, upto))
            others = await self._rewrite([record for some in kept.values() for record in some])
            for record in others:  # cut before these for now
                tp = (record.topic, record.partition)
                upto[tp] = min(upto[tp], record.offset)
            erased += sum(offset < upto[tp] for tp, offset in gone)
            await self._client.truncate(upto)
            await self._forget(upto)
            starts = {tp: at for tp, at in upto.items() if at < cuts[tp]}
            await self._letters.settled([_address(record) for record in others])
        return erased

    async def _rewrite(self, letters: Sequence[Record]) -> list[Record]:
        """Write letters again at the end of the log, and say that they are gone here. Returns what others move."""
        mine = await self._letters.claim([_address(record) for record in letters]) if letters else set()
        moving = [record for record in letters if _address(record) in mine]
        copies = [
            Outgoing(self._names.dlq, record.key, record.value, record.headers, record.partition) for record in moving
        ]
        for error in await self._client.send(copies):
            if error is not None:
                raise error
        failpoint("kafka.erase.between-copy-and-state")
        await self._letters.say(mine, "erased")
        failpoint("kafka.erase.before-cut")
        return [record for record in letters if _address(record) not in mine]

    def _gone_within(self, begins: Mapping[TP, int], ends: Mapping[TP, int]) -> Iterator[tuple[TP, int]]:
        """Where letters stood that are gone, as far as the log still has them."""
        for address in self._letters.gone():
            tp, offset = self._parse(address) or (("", -1), -1)
            if tp in begins and begins[tp] <= offset < ends[tp]:
                yield tp, offset

    async def _forget(self, begins: dict[TP, int]) -> None:
        """Nothing needs to be said of letters that the log does not have any more."""
        await self._letters.refresh()
        over = []
        for address in self._letters.gone():
            tp, offset = self._parse(address) or (("", -1), -1)
            if tp in begins and offset < begins[tp]:
                over.append(address)
        await self._letters.unsay(over)

    async def _standing(self, addresses: Sequence[str], *, content: bool = True) -> dict[str, Record]:
        """The records at addresses that still stand."""
        await self._partitions()
        await self._letters.refresh()
        seen = {address: self._seen.pop(address, None) for address in addresses}
        found = {at: record for at, record in seen.items() if record is not None and not self._letters.is_gone(at)}
        addresses = [address for address, record in seen.items() if record is None]
        if not addresses:
            return found
        begins, ends = await self._bounds()
        wanted: dict[TP, list[int]] = {}
        for address in addresses:
            at = self._parse(address)
            if at is None or at[0] not in begins or self._letters.is_gone(address):
                continue
            if begins[at[0]] <= at[1] < ends[at[0]]:
                wanted.setdefault(at[0], []).append(at[1])
        if not content:
            return found | {f"{tp[1]}:{offset}": None for tp, some in wanted.items() for offset in some}  # type: ignore[return-value]
        for tp, offsets in wanted.items():
            asked = set(offsets)
            for start, end in _stretches(sorted(asked)):
                some = await self._client.read({tp: start}, {tp: end}, keep=lambda r, asked=asked: r.offset in asked)  # type: ignore[misc]
                found |= {_address(record): record for record in some[tp]}
        return found

    def _parse(self, address: str) -> tuple[TP, int] | None:
        match = _ADDRESS.fullmatch(address)
        return ((self._names.dlq, int(match[1])), int(match[2])) if match else None


class _Changes:
    """What a re-drive changes in the headers of letters, made ready once for all of them."""

    def __init__(self, delta: HeaderDelta) -> None:
        self._without = {*delta, records.EMBEDDED}
        self._added: list[tuple[str, bytes | None]] = []
        for name, value in delta.items():
            if value is not None:
                self._added.append((name, str(value).encode("utf-8", "replace")))

    def copy(self, record: Record, topic: str) -> Outgoing:
        """The letter as it goes back to its service; all else to the byte."""
        without, names = self._without, dict(record.headers)
        found = [pair for pair in record.headers if pair[0] not in without]
        if "ce_id" not in names and records.ORIGIN not in names:
            found.append((records.ORIGIN, records.address(record).encode()))
        mark, value = names.get(records.EMBEDDED), record.value
        if mark and value:
            value = records.without_metadata(value, mark)
        return Outgoing(topic, record.key, value, found + self._added)


class Walk:
    """A way along all partitions together, in the order of parking; what was fetched ahead is for the next page."""

    def __init__(
        self, client: Client, starts: Mapping[TP, int], ends: Mapping[TP, int], keep: Callable[[Record], bool]
    ) -> None:
        self._client = client
        self._next = dict(starts)
        self._ends = ends
        self._keep = keep
        self._ahead: dict[TP, list[Record]] = {tp: [] for tp in starts}

    async def take(self, limit: int) -> tuple[list[Record], bool]:
        """The next records to keep, and whether there are more after them."""
        while True:
            await self._fetch(limit)
            page = list(islice(merge(*self._ahead.values(), key=_order), limit + 1))
            if all(map(self._keep, page)):
                break
            for tp, some in self._ahead.items():  # some were taken since they were fetched
                self._ahead[tp] = [record for record in some if self._keep(record)]
        more = len(page) > limit
        del page[limit:]
        for tp, number in Counter((record.topic, record.partition) for record in page).items():
            del self._ahead[tp][:number]
        return page, more

    async def _fetch(self, limit: int) -> None:
        while short := {tp: at for tp, at in self._next.items() if at < self._ends[tp] and self._lacks(tp, limit)}:
            found = await self._client.read(short, self._ends, limit=limit + 1)
            for tp, some in found.items():
                self._next[tp] = some[-1].offset + 1 if len(some) > limit else self._ends[tp]
                self._ahead[tp] += filter(self._keep, some)

    def _lacks(self, tp: TP, limit: int) -> bool:
        return len(self._ahead[tp]) <= limit


def _address(record: Record) -> str:
    return f"{record.partition}:{record.offset}"


def _order(record: Record) -> tuple[int, int, int]:
    return record.timestamp, record.partition, record.offset


def _stretches(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Offsets as a few stretches to read, rather than one by one."""
    found: list[tuple[int, int]] = []
    for offset in offsets:
        if found and offset - found[-1][1] < _NEAR:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return found
