"""Leases: what a consumer holds, in the work queue (`inflight`) and in the dead letters (`dlq`) alike.

A claim writes its token into the rows it takes; every later word about them must name it. The consumer itself sees
to it that it only speaks of its latest claim of a row, so a set of rows and a set of tokens is an exact question.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from eventbus.embedded.sqlite.rows import Row
from eventbus.embedded.sqlite.writer import Operation, Transaction

Table: TypeAlias = Literal["inflight", "dlq"]

CLAIM_BYTES: Final = 32 * 1024 * 1024
"""A claim stops after this much: 256 events of 16 MB each would not fit into anybody's memory."""

_KEYS: Final[dict[Table, str]] = {"inflight": "seq", "dlq": "no"}
_OURS: Final = (
    "subscription = ? AND {key} IN (SELECT value FROM json_each(?)) AND token IN (SELECT value FROM json_each(?))"
)
_KINDS: Final[dict[Table, str]] = {"inflight": "queue", "dlq": "dlq"}
_DUE: Final = {
    table: f"UPDATE {table} SET due = ? WHERE {_OURS.format(key=key)} RETURNING {key}" for table, key in _KEYS.items()
}
_NOTE: Final = {
    table: f"UPDATE {table} SET headers = ? WHERE {key} = ? AND subscription = ? AND token = ?"
    for table, key in _KEYS.items()
}
_REMOVE: Final = {
    table: f"DELETE FROM {table} WHERE {_OURS.format(key=key)} RETURNING {key}" for table, key in _KEYS.items()
}


@dataclass(slots=True)
class Claimed:
    """The rows of a claim and the token they are held by; or when to look again."""

    rows: list[Row]
    token: int = 0
    next_due: int | None = None
    unknown: bool = False
    """There is no such subscription any more."""


class Claim(Operation[Claimed]):
    """Take up to `limit` rows under a lease."""

    __slots__ = ("lease", "limit", "subscription")

    name = "claim"
    rank = 2

    def __init__(self, subscription: int, limit: int, lease: float) -> None:
        self.subscription = subscription
        self.limit = limit
        self.lease = round(lease * 1000)

    @property
    def durable(self) -> bool:
        """A lost claim is a redelivery."""
        return False


class Held:
    """Rows of one subscription that a consumer believes to hold: row number -> token."""

    __slots__ = ("numbers", "subscription", "tokens")

    def __init__(self, subscription: int, rows: Collection[tuple[int, int]]) -> None:
        self.subscription = subscription
        self.numbers = str([number for number, _ in rows])
        self.tokens = str(list({token for _, token in rows}))


class Extend(Operation[set[int]]):
    """Set when the leases end: renewal, or letting go. Answers with the rows that were still held."""

    __slots__ = ("held", "lease", "table")

    name = "renew"

    def __init__(self, table: Table, held: Held, lease: float) -> None:
        self.table: Table = table
        self.held = held
        self.lease = round(lease * 1000)

    @property
    def durable(self) -> bool:
        """A lost renewal is at worst a redelivery."""
        return False

    def run(self, tx: Transaction) -> set[int]:
        """Move the end of the leases."""
        due, held = tx.now + self.lease, self.held
        rows = tx.execute(_DUE[self.table], (due, held.subscription, held.numbers, held.tokens)).fetchall()
        if self.lease <= 0:
            tx.wake(_KINDS[self.table], held.subscription, due)
        return {row[0] for row in rows}


class Note(Operation[bool]):
    """Write headers beside a held row. Answers whether it is still held."""

    __slots__ = ("headers", "number", "subscription", "table", "token")

    name = "note"

    def __init__(self, table: Table, subscription: int, number: int, token: int, headers: str | None) -> None:
        self.table: Table = table
        self.subscription = subscription
        self.number = number
        self.token = token
        self.headers = headers

    def run(self, tx: Transaction) -> bool:
        """Write them."""
        values = (self.headers, self.number, self.subscription, self.token)
        return tx.execute(_NOTE[self.table], values).rowcount == 1


def remove(tx: Transaction, table: Table, held: Held) -> set[int]:
    """Take rows out of the table; answers with those that were still held."""
    rows = tx.execute(_REMOVE[table], (held.subscription, held.numbers, held.tokens)).fetchall()
    return {row[0] for row in rows}


def put_back(
    tx: Transaction, subscription: int, rows: Sequence[tuple[int, int, str | None]], *, ordered: bool = False
) -> None:
    """Put rows back that are due later, held by nobody."""
    key = "(SELECT key FROM events WHERE seq = value ->> 0)" if ordered else "NULL"
    tx.execute(
        "INSERT INTO inflight (seq, subscription, due, headers, key) "
        f"SELECT value ->> 0, ?, value ->> 1, value ->> 2, {key} FROM json_each(?)",
        (subscription, json.dumps(rows)),
    )
    tx.wake("queue", subscription, min(row[1] for row in rows))


def take(cursor: sqlite3.Cursor, body: int) -> list[Row]:
    """All rows of a query, or the first of them if their bodies (column `body`) are large."""
    rows: list[Row] = []
    size, step = 0, 4
    while size < CLAIM_BYTES:
        part = cursor.fetchmany(step)
        rows += part
        if len(part) < step:
            return rows
        size += sum(len(row[body]) for row in part)
        step *= 2
    cursor.close()
    return rows
