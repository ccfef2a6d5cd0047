"""The dead letters of one service, for operators: every operation goes by index and costs the same at any depth."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from eventbus import headers
from eventbus.adapter import BodyMapping, Moved, Page, Parked, Parking, Redrive, standing
from eventbus.errors import BrokerError, ConfigError
from eventbus.facets import FACETS, Facet
from eventbus_redis import _scripts, fields
from eventbus_redis._client import Argument, Entry

if TYPE_CHECKING:
    from eventbus_redis.adapter import RedisAdapter

RESTORE_AT_ONCE: Final = 200
MOVE_AT_ONCE: Final = 100
MOVING: Final = 2
"""Calls that move letters, at the same time. Larger or more of them would let the next page wait at the server, with
nothing to do here until it comes, and nothing to do there once it has."""
FACETS_KEPT: Final = 2000
FEW: Final = 25
PAGE_BYTES: Final = 8 * 1024 * 1024
_ADDRESS: Final = re.compile(r"\d{1,15}-\d{1,20}")
_REDRIVEN: Final = re.compile(rb'"%b":(\d{1,16})[,}]' % headers.REDRIVEN_COUNT.encode())
"""A quote inside of a text is escaped: this is found in a story only where it is a key."""


class RedisParking(Parking):
    """An address is the id of an entry in the stream of dead letters."""

    looks_ahead = True

    def __init__(self, adapter: RedisAdapter, service: str, prefix: str) -> None:
        self._adapter = adapter
        self._name = (service, prefix)
        self._keys = adapter.options.names.of_service(service, prefix)
        self._moving = asyncio.Semaphore(MOVING)
        self._facets: dict[str, bytes] = {}
        """Of letters that were skimmed, and not moved yet. A letter never changes."""

    async def browse(self, cursor: str | None, limit: int) -> Page:
        """In the order of parking."""
        return await self._page(cursor, limit, _letter)

    async def skim(self, cursor: str | None, limit: int) -> Page:
        """With no more of each letter read than moving it takes."""
        # By a plain XRANGE: a script that picks out what is wanted here takes the server longer than sending all of it.
        if len(self._facets) > FACETS_KEPT:  # of letters that nobody moved
            self._facets.clear()
        return await self._page(cursor, limit, self._glimpsed)

    async def _page(self, cursor: str | None, limit: int, read: Callable[[Entry], Parked]) -> Page:
        """Large letters make a short page: the first few tell how many more there can be."""
        await self._check()
        start, number = _start(cursor), min(FEW, limit + 1)
        letters: list[Parked] = []
        size = 0
        while number > 0:
            entries = await self._adapter.client.entries(self._keys.dlq, start, number)
            size += sum([sum(map(len, entry)) for _, entry in entries])
            letters += map(read, entries)
            if len(entries) < number:
                break
            start = f"({letters[-1].address}"
            number = min(limit + 1 - len(letters), (PAGE_BYTES - size) * len(letters) // max(1, size))
        more = len(letters) > limit or number <= 0
        return Page(letters[:limit], letters[:limit][-1].address if more else None)

    async def find(self, event_id: str) -> list[Parked]:
        """By the index of event ids."""
        await self._check()
        found = await self._adapter.client.field(self._keys.ids, event_id)
        return [_letter(entry) for entry in await self._get(found.split())] if found else []

    async def find_all(self, event_ids: Collection[str]) -> list[Parked]:
        """By the index of event ids."""
        return [letter for id in event_ids for letter in await self.find(id)]

    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        """Back to the service's own stream (or its retry road) and out of here, in one step for each piece."""
        await self._check()
        pieces = [letters[start : start + MOVE_AT_ONCE] for start in range(0, len(letters), MOVE_AT_ONCE)]
        answers = await asyncio.gather(*map(self._move, pieces), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        # Each piece has had its turn by now. What became of some of them is worth more than why others did not go:
        # whoever tries those again hears it.
        if errors and (len(errors) == len(pieces) or not all(isinstance(error, BrokerError) for error in errors)):
            raise errors[0]
        found: list[Moved] = []
        for piece, answer in zip(pieces, answers, strict=True):
            found += ["failed"] * len(piece) if isinstance(answer, BaseException) else answer
        return found

    async def _move(self, letters: Sequence[Redrive]) -> list[Moved]:
        async with self._moving:
            return await self._move_now(letters)

    async def _move_now(self, letters: Sequence[Redrive]) -> list[Moved]:
        edited = [x.address for x in letters if x.body is not None and _ADDRESS.fullmatch(x.address)]
        entries = {entry[0].decode(): entry[1] for entry in await self._get(edited)}
        changes: dict[int, tuple[int, bytes]] = {}  # many letters share one delta: it is written down once
        arguments: list[Argument] = []
        order: list[int] = []
        for place, (address, delta, body, delay) in enumerate(letters):
            if not _ADDRESS.fullmatch(address) or (body is not None and address not in entries):
                continue
            if id(delta) not in changes:
                changes[id(delta)] = len(changes) + 1, fields.to_json(delta)
            arguments += (address, changes[id(delta)][0], round(delay * 1000))
            arguments += (0, b"") if body is None else (1, fields.with_body(entries[address], body))
            order.append(place)
        gone: list[int] = []
        if order:
            k = self._keys
            keys = (k.queue, k.retry, k.payload, *k.letters)
            sums = self._sums([letters[place].address for place in order])
            head: list[Argument] = [len(changes), *(text for _, text in changes.values()), len(sums), *sums]
            gone = await self._adapter.client.run(_scripts.LETTERS_MOVE, keys, head + arguments)
        return _answers(len(letters), order, gone)

    def _sums(self, addresses: Sequence[str]) -> list[Argument]:
        """What these letters are counted by, together: facet, value, number, and so on. Nothing if one was not skimmed.

        It could be read there; but the server has less time than we have.
        """
        texts = [self._facets.pop(address, b"") for address in addresses]
        try:
            counts = Counter(chain.from_iterable(map(enumerate, json.loads(b"[%b]" % b",".join(texts)))))
            return [part for (facet, value), number in counts.items() for part in (facet + 1, value.encode(), number)]
        except (ValueError, TypeError, AttributeError):  # not skimmed, or not what we write
            return []

    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        """Gone for good."""
        await self._check()
        order = [place for place, address in enumerate(addresses) if _ADDRESS.fullmatch(address)]
        known = [addresses[place] for place in order]
        gone = await self._adapter.client.run(_scripts.LETTERS_REMOVE, self._keys.letters, known)
        return _answers(len(addresses), order, gone)

    async def restore(self, letters: Sequence[Parked]) -> list[Moved]:
        """Added as they were, each with the index of its event id."""
        await self._check()
        for start in range(0, len(letters), RESTORE_AT_ONCE):
            arguments: list[Argument] = []
            for letter in letters[start : start + RESTORE_AT_ONCE]:
                taken = headers.moment(letter.headers.get(headers.ENQUEUED_AT))
                entry = [*fields.encode(letter.event), fields.STORY, fields.to_json(letter.headers)]
                entry += (fields.ORIGIN, f"{round(taken * 1000)}-0".encode(), fields.EVENT_ID, letter.event.id.encode())
                facets = fields.facets_of(b"0-0", entry, letter.headers)
                entry += (fields.FACETS, facets)
                arguments += (letter.event.id, facets, len(entry), *entry)
            keys = (self._keys.dlq, self._keys.ids, *self._keys.tallies)
            await self._adapter.client.run(_scripts.LETTERS_RESTORE, keys, arguments)
        return ["done"] * len(letters)

    async def depth(self) -> int:
        """How many stand here."""
        await self._check()
        return await self._adapter.client.length(self._keys.dlq)

    async def tally(self, by: Facet) -> dict[str, int] | None:
        """From the counters that every script keeps with the letters it moves; None if they do not add up."""
        await self._check()
        tallies = dict(zip(FACETS, self._keys.tallies, strict=True))
        keys = (self._keys.dlq, tallies["reason"], tallies[by])
        found = await self._adapter.client.run(_scripts.LETTERS_TALLY, keys)
        if found is None:
            return None
        return {value.decode(): int(count) for value, count in zip(found[::2], found[1::2], strict=True)}

    async def _get(self, addresses: Sequence[str | bytes]) -> list[Entry]:
        if not addresses:
            return []
        found = await self._adapter.client.run(_scripts.LETTERS_GET, (self._keys.dlq,), addresses)
        return [(id, entry) for id, entry in found]

    def _glimpsed(self, entry: Entry) -> Parked:
        id, found = entry
        try:
            # From the end: that is where a letter has what was added when it was parked.
            at = found.index(fields.EVENT_ID, max(0, len(found) - 4))
            story = found[found.index(fields.STORY, max(0, len(found) - 8)) + 1]
        except ValueError:  # somebody added it by hand: it has to be read as a whole
            return _letter(entry)
        address = id.decode()
        if found[-2] == fields.FACETS:
            self._facets[address] = found[-1]
        times = _REDRIVEN.search(story)
        return standing(address, found[at + 1].decode("utf-8", "replace"), int(times[1]) if times else 0)

    async def _check(self) -> None:
        await self._adapter.check_subscribed(*self._name)


def _answers(asked: int, order: Sequence[int], gone: Sequence[int]) -> list[Moved]:
    """An answer to each that was asked for; a script got those at the places in `order`, and says which it missed."""
    answers: list[Moved] = ["gone"] * asked
    missed = set(gone)
    for position, place in enumerate(order, 1):
        if position not in missed:
            answers[place] = "done"
    return answers


def _start(cursor: str | None) -> str:
    if cursor and not _ADDRESS.fullmatch(cursor):
        raise ConfigError(f"{cursor!r} is not a cursor of this queue; pass the `next` of the page before")
    return f"({cursor}" if cursor else "-"


def _letter(entry: Entry) -> Parked:
    event, story, _, _ = fields.decode(*entry, BodyMapping())
    return Parked(entry[0].decode(), event, story)
