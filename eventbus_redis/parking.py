"""The dead letters of one service, for operators: every operation goes by index and costs the same at any depth."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from eventbus import headers
from eventbus.adapter import BodyMapping, Moved, Page, Parked, Parking, Redrive, standing
from eventbus.errors import ConfigError
from eventbus.facets import FACETS, Facet
from eventbus_redis import _scripts, fields
from eventbus_redis._client import Argument, Entry

if TYPE_CHECKING:
    from eventbus_redis.adapter import RedisAdapter

RESTORE_AT_ONCE: Final = 200
_ADDRESS: Final = re.compile(r"\d{1,15}-\d{1,20}")


class RedisParking(Parking):
    """An address is the id of an entry in the stream of dead letters."""

    looks_ahead = True

    def __init__(self, adapter: RedisAdapter, service: str, prefix: str) -> None:
        self._adapter = adapter
        self._name = (service, prefix)
        self._keys = adapter.options.names.of_service(service, prefix)
        self._stories: dict[str, fields.Story] = {}
        self._before: dict[str, fields.Story] = {}

    async def browse(self, cursor: str | None, limit: int) -> Page:
        """In the order of parking."""
        await self._check()
        entries = await self._adapter.client.entries(self._keys.dlq, _start(cursor), limit + 1)
        letters = [_letter(entry) for entry in entries[:limit]]
        return Page(letters, letters[-1].address if len(entries) > limit else None)

    async def skim(self, cursor: str | None, limit: int) -> Page:
        """Without the bodies. The stories of two pages are kept: a re-drive need not ask for them again."""
        await self._check()
        found = await self._adapter.client.run(_scripts.LETTERS_SKIM, (self._keys.dlq,), (_start(cursor), limit + 1))
        if found is None:
            return await self.browse(cursor, limit)
        letters: list[Parked] = []
        stories: dict[str, fields.Story] = {}
        for id, event_id, text in zip(found[: 3 * limit : 3], found[1::3], found[2::3], strict=False):
            address, story = id.decode(), fields.from_json(text)
            times = headers.number(story.get(headers.REDRIVEN_COUNT))
            letters.append(standing(address, event_id.decode("utf-8", "replace"), times))
            stories[address] = story
        self._before, self._stories = self._stories, stories
        return Page(letters, letters[-1].address if len(found) > 3 * limit else None)

    async def find(self, event_id: str) -> list[Parked]:
        """By the index of event ids."""
        await self._check()
        found = await self._adapter.client.field(self._keys.ids, event_id)
        return [_letter(entry) for entry in await self._get(found.split())] if found else []

    async def find_all(self, event_ids: Collection[str]) -> list[Parked]:
        """By the index of event ids."""
        return [letter for id in event_ids for letter in await self.find(id)]

    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        """Back to the service's own stream (or its retry road) and out of here, in one step."""
        await self._check()
        known = [letter for letter in letters if _ADDRESS.fullmatch(letter.address)]
        # A letter's story never changes where it stands, so it can be read first and written later.
        stories = {**self._before, **self._stories}
        unknown = [letter.address for letter in known if letter.body is not None or letter.address not in stories]
        entries = {entry[0].decode(): entry for entry in await self._get(unknown)}
        arguments: list[Argument] = []
        order: list[int] = []
        for place, letter in enumerate(letters):
            entry, body = entries.get(letter.address), b""
            if entry is not None:
                _, story, _, _ = fields.decode(*entry, BodyMapping())
                if letter.body is not None:
                    body = fields.with_body(entry[1], letter.body)
            elif letter.body is None and letter.address in stories:
                story = stories[letter.address]
            else:
                continue
            arguments += (letter.address, fields.to_json(headers.merge(story, letter.headers)))
            arguments += (round(letter.delay * 1000), int(letter.body is not None), body)
            order.append(place)
        gone: list[int] = []
        if order:
            k = self._keys
            keys = (k.queue, k.retry, k.payload, *k.letters)
            gone = await self._adapter.client.run(_scripts.LETTERS_MOVE, keys, arguments)
        return _answers(len(letters), order, gone)

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
