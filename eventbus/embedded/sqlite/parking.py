"""The dead-letter queue of one service, as operators see it."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from eventbus import headers as reserved
from eventbus import telemetry, wire
from eventbus.adapter import BodyMapping, Moved, Page, Parked, Parking, Redrive, standing
from eventbus.embedded.sqlite import rows, subscriptions, tallies
from eventbus.embedded.sqlite.leases import CLAIM_BYTES, take
from eventbus.embedded.sqlite.redriving import Purge, RedriveLetters, Restore
from eventbus.embedded.sqlite.rows import EVENT_COLUMNS
from eventbus.embedded.sqlite.writer import Operation
from eventbus.errors import BrokerError, ConfigError
from eventbus.facets import Facet

if TYPE_CHECKING:
    from eventbus.embedded.sqlite.adapter import SqliteAdapter

AT_ONCE: Final = 500
"""Letters moved in one transaction: others want to write too."""

_MAPPING: Final = BodyMapping()
_SELECT: Final = f"SELECT no, headers, {EVENT_COLUMNS} FROM dlq"
_BODY: Final = 6
# Most were never put back: looking for the name is quicker than reading JSON.
_SKIM: Final = (
    f"SELECT no, event_id, CASE WHEN instr(headers, '{reserved.REDRIVEN_COUNT}') "
    f"THEN headers ->> '{reserved.REDRIVEN_COUNT}' END, length(body) FROM dlq"
)
_PAGE: Final = " WHERE subscription = ? AND no > ? ORDER BY no LIMIT ?"


class SqliteParking(Parking):
    """Looks through the reader, moves through the writer. An address is a letter's number, never given twice."""

    looks_ahead = True

    def __init__(self, adapter: SqliteAdapter, service: str, prefix: str) -> None:
        self._adapter = adapter
        self._service = service
        self._prefix = prefix

    async def browse(self, cursor: str | None, limit: int) -> Page:
        """In the order of parking."""
        after = _place(cursor)

        def look(connection: sqlite3.Connection) -> list[rows.Row]:
            return take(connection.execute(_SELECT + _PAGE, (self._find(connection), after, limit + 1)), body=_BODY)

        found = await self._adapter.reader.query(look)
        letters = [_parked(row) for row in found[:limit]]
        # Large letters make a short page.
        more = len(found) > limit or sum(len(row[_BODY]) for row in found) >= CLAIM_BYTES
        return Page(letters, letters[-1].address if letters and more else None)

    async def skim(self, cursor: str | None, limit: int) -> Page:
        """Without reading a body."""
        after = _place(cursor)

        def look(connection: sqlite3.Connection) -> list[tuple[int, str, object, int]]:
            return connection.execute(_SKIM + _PAGE, (self._find(connection), after, limit + 1)).fetchall()

        found = await self._adapter.reader.query(look)
        letters: list[Parked] = []
        size = 0
        for number, event_id, redriven, length in found[:limit]:
            if size >= CLAIM_BYTES:  # large letters make a short page: it is moved in one transaction
                break
            letters.append(standing(str(number), event_id, reserved.number(redriven)))
            size += length
        return Page(letters, letters[-1].address if len(letters) < len(found) else None)

    async def find_all(self, event_ids: Collection[str]) -> list[Parked]:
        """By index."""
        ids = json.dumps([id for id in event_ids if rows.is_unicode(id)])

        def look(connection: sqlite3.Connection) -> list[rows.Row]:
            return connection.execute(
                f"{_SELECT} WHERE event_id IN (SELECT value FROM json_each(?)) AND subscription = ? ORDER BY no",
                (ids, self._find(connection)),
            ).fetchall()

        return [_parked(row) for row in await self._adapter.reader.query(look)]

    async def depth(self) -> int:
        """From the tally."""

        def look(connection: sqlite3.Connection) -> int:
            found = connection.execute(tallies.TOTAL.format(subscription="?"), (self._find(connection),))
            number: int = found.fetchone()[0]
            return number

        return await self._adapter.reader.query(look)

    async def tally(self, by: Facet) -> dict[str, int]:
        """Kept with every letter that comes and goes."""
        return await self._adapter.reader.query(lambda connection: tallies.read(connection, self._find(connection), by))

    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        """Back to this service's queue."""
        subscription = await self._adapter.reader.query(self._find)
        answers: list[Moved] = []
        for start in range(0, len(letters), AT_ONCE):
            part = letters[start : start + AT_ONCE]
            orders = {number: letter for letter in part if (number := _number(letter.address)) is not None}
            answers += await self._move(RedriveLetters(subscription, orders), [letter.address for letter in part])
        return answers

    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        """Gone for good."""
        subscription = await self._adapter.reader.query(self._find)
        answers: list[Moved] = []
        for start in range(0, len(addresses), AT_ONCE):
            part = addresses[start : start + AT_ONCE]
            numbers = [number for address in part if (number := _number(address)) is not None]
            answers += await self._move(Purge(subscription, numbers), part)
        return answers

    async def restore(self, letters: Sequence[Parked]) -> list[Moved]:
        """In one transaction for each piece."""
        subscription = await self._adapter.reader.query(self._find)
        for start in range(0, len(letters), AT_ONCE):
            await self._adapter.writer.submit(Restore(subscription, letters[start : start + AT_ONCE]))
        return ["done"] * len(letters)

    async def _move(self, operation: Operation[set[int]], addresses: Sequence[str]) -> list[Moved]:
        try:
            done = await self._adapter.writer.submit(operation)
        except BrokerError as error:
            fields = {"service": self._service, "operation": operation.name, "error": str(error)}
            telemetry.log(logging.WARNING, "dlq_move_failed", fields)
            return ["failed"] * len(addresses)
        if len(done) == len(addresses):
            return ["done"] * len(addresses)
        answers: list[Moved] = []
        for address in addresses:
            number = _number(address)
            answers.append("done" if number in done else "gone")
            # The same address a second time in one call finds nothing there any more.
            done.discard(number or 0)
        return answers

    def _find(self, connection: sqlite3.Connection) -> int:
        found = subscriptions.find(connection, self._service, self._prefix)
        if found is None:
            raise subscriptions.unknown(self._service, self._adapter.path)
        return found[0]


def _parked(row: rows.Row) -> Parked:
    number, headers, *columns = row
    event = rows.to_event(*columns)
    return Parked(str(number), wire.unwrap(event, _MAPPING)[0], rows.from_json(headers))


def _place(cursor: str | None) -> int:
    after = 0 if cursor is None else _number(cursor)
    if after is None:
        raise ConfigError(f"{cursor!r} is not a cursor of this queue; pass the `next` of the page before")
    return after


def _number(address: str) -> int | None:
    return int(address) if address.isascii() and address.isdigit() and len(address) < 19 else None
