"""Publishing: events go to the end of their prefix's log, many rows per statement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from eventbus.embedded.sqlite.rows import EVENT_COLUMNS, Row
from eventbus.embedded.sqlite.writer import Operation, Transaction

_COLUMNS: Final = 2 + EVENT_COLUMNS.count(",") + 1
_ROW: Final = f"({', '.join('?' * _COLUMNS)})"
_SIZES: Final = (256, 64, 16, 4, 1)
"""Rows per statement: a few fixed sizes, so that each statement is prepared once and then found in the cache."""
_INSERTS: Final = {
    size: f"INSERT INTO events (seq, stored_at, {EVENT_COLUMNS}) VALUES {', '.join([_ROW] * size)}" for size in _SIZES
}
_BYTES_PER_STATEMENT: Final = 8 * 1024 * 1024


class Publish(Operation[bool]):
    """Append rows to a log. Answers whether anybody is subscribed; if not, nothing is stored."""

    __slots__ = ("prefix", "rows")

    name = "publish"
    rank = 0

    def __init__(self, prefix: str, rows: list[Row]) -> None:
        self.prefix = prefix
        self.rows = rows

    def run(self, tx: Transaction) -> bool:
        """Append them."""
        return self.run_all(tx, [self])[0]

    @classmethod
    def run_all(cls, tx: Transaction, operations: Sequence[Any]) -> list[bool]:
        """Append those of one prefix together."""
        subscribed: dict[str, bool] = {}
        rows: dict[str, list[Row]] = {}
        for operation in operations:
            rows.setdefault(operation.prefix, []).extend(operation.rows)
        for prefix, of_log in rows.items():
            log = tx.execute(
                "SELECT no, head FROM logs WHERE prefix = ? AND EXISTS (SELECT 1 FROM subscriptions WHERE log = no)",
                (prefix,),
            ).fetchone()
            subscribed[prefix] = log is not None
            if log is not None:
                _append(tx, log[0], log[1], of_log)
        return [subscribed[operation.prefix] for operation in operations]


def _append(tx: Transaction, log: int, head: int, rows: list[Row]) -> None:
    position, left, now = 0, len(rows), tx.now
    for size in _SIZES:
        while left >= size:
            part = rows[position : position + size]
            if size > 1 and sum(len(row[4]) for row in part) > _BYTES_PER_STATEMENT:
                break  # large bodies: SQLite would hold a second copy of them all
            values = [
                value for number, row in enumerate(part, head + position + 1) for value in chain((number, now), row)
            ]
            tx.execute(_INSERTS[size], values)
            position += size
            left -= size
    tx.execute("UPDATE logs SET head = ? WHERE no = ?", (head + position, log))
    tx.wake("log", log)
