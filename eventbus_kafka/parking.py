"""The dead letters of one service, for operators. Addresses are `partition:offset`; pages go by the time of parking."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from eventbus.adapter import BodyMapping, Moved, Page, Parked, Parking, Redrive
from eventbus.errors import ConfigError, UnknownService
from eventbus.failpoints import failpoint
from eventbus_kafka import records
from eventbus_kafka._client import TP
from eventbus_kafka.names import Names
from eventbus_kafka.records import Outgoing, Record
from eventbus_kafka.state import Letters

if TYPE_CHECKING:
    from eventbus_kafka.adapter import KafkaAdapter

_ADDRESS: Final = re.compile(r"(\d{1,9}):(\d{1,18})")
_NEAR: Final = 500
"""Letters closer together than this are read in one go."""


class KafkaParking(Parking):
    """An append-only topic, and beside it what was re-driven or purged."""

    def __init__(self, adapter: KafkaAdapter, names: Names) -> None:
        self._adapter = adapter
        self._client = adapter.client
        self._names = names
        self._letters: Letters = adapter.letters(names)

    # --- look ------------------------------------------------------------------------------------------------

    async def browse(self, cursor: str | None, limit: int) -> Page:
        """The letters that still stand, of all partitions together, oldest first."""
        begins, ends = await self._bounds()
        await self._letters.refresh()
        starts = dict(begins)
        after = (-1, -1, -1)
        if cursor:
            after = await self._place(cursor, begins, ends)
            since = await self._client.since(list(begins), after[0])
            starts = {tp: max(begins[tp], since.get(tp, ends[tp])) for tp in begins}
        found = await self._client.read(
            starts, ends, limit=limit + 1, keep=lambda record: _order(record) > after and self._stands(record)
        )
        letters = sorted((record for some in found.values() for record in some), key=_order)
        page = [self._letter(record) for record in letters[:limit]]
        return Page(page, page[-1].address if len(letters) > limit else None)

    async def depth(self) -> int:
        """How many stand here."""
        return (await self.count())[0]

    async def count(self) -> tuple[int, bool]:
        """How many stand here, and whether that is exact: a topic with gaps is counted by its offsets."""
        begins, ends = await self._bounds()
        await self._letters.refresh()
        total = sum(ends[tp] - begins[tp] for tp in begins)
        gone = 0
        for address in self._letters.gone():
            tp, offset = self._parse(address) or (("", -1), -1)
            if tp in begins and begins[tp] <= offset < ends[tp]:
                gone += 1
        return max(0, total - gone), True

    async def _bounds(self) -> tuple[dict[TP, int], dict[TP, int]]:
        number = await self._client.partitions(self._names.dlq)
        if not number or not await self._client.partitions(self._names.state):
            raise UnknownService(
                f"{self._names.service} has no dead letters at {self._client.where}: {self._names.dlq} is missing"
            )
        partitions = [(self._names.dlq, partition) for partition in range(number)]
        return await self._client.begins(partitions), await self._client.ends(partitions)

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

    # --- move ------------------------------------------------------------------------------------------------

    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        """Onto the service's own topic, confirmed, and only then gone from here."""
        found = await self._standing([letter.address for letter in letters])
        mine = await self._letters.claim(list(found)) if found else set()
        orders: dict[str, Redrive] = {letter.address: letter for letter in letters if letter.address in mine}
        copies: list[Outgoing] = []
        for address, order in orders.items():
            topic = await self._adapter.road(self._names, order.delay)
            copy = records.copy(found[address], topic, dict(order.headers), told=True)
            if order.body is not None:
                copy = copy._replace(value=records.with_body(copy, order.body))
            copies.append(copy)
        errors = await self._client.send(copies)
        failpoint("kafka.redrive.between-copy-and-state")
        fates: dict[str, Moved] = {}
        for address, error in zip(orders, errors, strict=True):
            fates[address] = "done" if error is None else "failed"
        await self._letters.say([address for address, fate in fates.items() if fate == "done"], "redriven")
        await self._letters.unsay([address for address, fate in fates.items() if fate == "failed"])
        return [fates.get(letter.address, "gone") for letter in letters]

    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        """Out of sight at once; `erase` takes them out of the log too."""
        found = await self._standing(addresses, content=False)
        mine = await self._letters.claim(list(found)) if found else set()
        await self._letters.say(mine, "purged")
        return ["done" if address in mine else "gone" for address in addresses]

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

    async def erase(self) -> int:
        """Take purged and re-driven letters out of the log for good; how many records that were.

        A log can only be cut off at its head. What still stands before the last letter that is gone is written again
        at the end first, and confirmed: a crash in between doubles a letter, never loses one.
        """
        begins, ends = await self._bounds()
        await self._letters.refresh()
        cuts: dict[TP, int] = {}
        for address in self._letters.gone():
            tp, offset = self._parse(address) or (("", -1), -1)
            if tp in begins and begins[tp] <= offset < ends[tp]:
                cuts[tp] = max(cuts.get(tp, 0), offset + 1)
        starts = {tp: begins[tp] for tp in cuts}
        kept = await self._client.read(starts, cuts, keep=self._stands)
        moving = [record for some in kept.values() for record in some]
        mine = await self._letters.claim([_address(record) for record in moving]) if moving else set()
        copies = [
            Outgoing(self._names.dlq, record.key, record.value, record.headers, record.partition)
            for record in moving
            if _address(record) in mine
        ]
        for error in await self._client.send(copies):
            if error is not None:
                raise error
        await self._letters.say(mine, "erased")
        if len(mine) < len(moving):  # somebody else is at work on some of them: cut before those
            for record in moving:
                tp = (record.topic, record.partition)
                if _address(record) not in mine:
                    cuts[tp] = min(cuts[tp], record.offset)
        await self._client.truncate(cuts)
        await self._forget(cuts)
        return sum(cut - begins[tp] for tp, cut in cuts.items()) - len(mine)

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
        begins, ends = await self._bounds()
        await self._letters.refresh()
        wanted: dict[TP, list[int]] = {}
        for address in addresses:
            at = self._parse(address)
            if at is None or at[0] not in begins or self._letters.is_gone(address):
                continue
            if begins[at[0]] <= at[1] < ends[at[0]]:
                wanted.setdefault(at[0], []).append(at[1])
        if not content:
            return {f"{tp[1]}:{offset}": None for tp, some in wanted.items() for offset in some}  # type: ignore[misc]
        found: dict[str, Record] = {}
        for tp, offsets in wanted.items():
            asked = set(offsets)
            for start, end in _stretches(sorted(asked)):
                some = await self._client.read({tp: start}, {tp: end}, keep=lambda r, asked=asked: r.offset in asked)  # type: ignore[misc]
                found |= {_address(record): record for record in some[tp]}
        return found

    def _parse(self, address: str) -> tuple[TP, int] | None:
        match = _ADDRESS.fullmatch(address)
        return ((self._names.dlq, int(match[1])), int(match[2])) if match else None


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
