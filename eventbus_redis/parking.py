"""The dead letters of one service, for operators: every operation goes by index and costs the same at any depth."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from eventbus import headers
from eventbus.adapter import BodyMapping, Moved, Page, Parked, Parking, Redrive
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

    def __init__(self, adapter: RedisAdapter, service: str, prefix: str) -> None:
        self._adapter = adapter
        self._name = (service, prefix)
        self._keys = adapter.options.names.of_service(service, prefix)

    async def browse(self, cursor: str | None, limit: int) -> Page:
        """In the order of parking."""
        await self._check()
        if cursor and not _ADDRESS.fullmatch(cursor):
            raise ConfigError(f"{cursor!r} is not a cursor of this queue; pass the `next` of the page before")
        start = f"({cursor}" if cursor else "-"
        entries = await self._adapter.client.entries(self._keys.dlq, start, limit + 1)
        letters = [_letter(entry) for entry in entries[:limit]]
        return Page(letters, letters[-1].address if len(entries) > limit else None)

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
        entries = {entry[0].decode(): entry for entry in await self._get([x.address for x in known])}
        arguments: list[Argument] = []
        order: list[str] = []
        for letter in known:
            entry = entries.get(letter.address)
            if entry is None:
                continue
            # A letter's story never changes where it stands, so it can be read first and written later.
            _, story, _, _ = fields.decode(*entry, BodyMapping())
            given = letter.body is not None
            body = fields.with_body(entry[1], letter.body) if letter.body is not None else b""
            arguments += (letter.address, fields.to_json(headers.merge(story, letter.headers)))
            arguments += (round(letter.delay * 1000), int(given), body)
            order.append(letter.address)
        gone: list[int] = []
        if order:
            k = self._keys
            keys = (k.queue, k.retry, k.payload, *k.letters)
            gone = await self._adapter.client.run(_scripts.LETTERS_MOVE, keys, arguments)
        moved = set(order) - {order[position - 1] for position in gone}
        return ["done" if letter.address in moved else "gone" for letter in letters]

    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        """Gone for good."""
        await self._check()
        known = [address for address in addresses if _ADDRESS.fullmatch(address)]
        gone = await self._adapter.client.run(_scripts.LETTERS_REMOVE, self._keys.letters, known)
        removed = set(known) - {known[position - 1] for position in gone}
        return ["done" if address in removed else "gone" for address in addresses]

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


def _letter(entry: Entry) -> Parked:
    event, story, _, _ = fields.decode(*entry, BodyMapping())
    return Parked(entry[0].decode(), event, story)
