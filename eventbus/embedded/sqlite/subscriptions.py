"""Subscriptions: made, found, counted, undone."""

from __future__ import annotations

import sqlite3
from typing import Final

from eventbus.adapter import Stats
from eventbus.embedded.sqlite import tallies
from eventbus.embedded.sqlite.schema import LOG_BITS
from eventbus.embedded.sqlite.writer import Operation, Transaction
from eventbus.errors import BrokerError, UnknownService

_COUNTS: Final = f"""
WITH s AS (SELECT id, log, cursor FROM subscriptions WHERE prefix = :prefix AND service = :service)
SELECT l.head - s.cursor,
    (SELECT count(*) FROM inflight WHERE subscription = s.id AND due <= :now),
    waiting.leased,
    waiting.total - waiting.leased,
    ({tallies.TOTAL.format(subscription="s.id")}),
    (SELECT parked_at FROM dlq WHERE subscription = s.id ORDER BY no LIMIT 1)
FROM s CROSS JOIN logs l ON l.no = s.log CROSS JOIN (
    SELECT count(*) AS total, count(token) AS leased FROM inflight
    WHERE subscription = (SELECT id FROM s) AND due > :now
) waiting
"""
"""What is not due yet is counted in one walk along the index: there may be very many."""


def unknown(service: str, path: str) -> UnknownService:
    """The error for a service without a subscription."""
    return UnknownService(
        f"{service} has no subscription in {path}; start it once (`eventbus run`), or call bus.provision(service)"
    )


def find(connection: sqlite3.Connection, service: str, prefix: str) -> tuple[int, int] | None:
    """The numbers of a service's subscription and of its log."""
    found: tuple[int, int] | None = connection.execute(
        "SELECT id, log FROM subscriptions WHERE prefix = ? AND service = ?", (prefix, service)
    ).fetchone()
    return found


def count(connection: sqlite3.Connection, service: str, prefix: str, now: int) -> Stats | None:
    """Depths by arithmetic and by index; a lease that has run out counts as ready, as it can be received."""
    found = connection.execute(_COUNTS, {"service": service, "prefix": prefix, "now": now}).fetchone()
    if found is None:
        return None
    new, due, leased, delayed, parked, oldest = found
    age = None if oldest is None else max(0.0, (now - oldest) / 1000)
    return Stats(new + due, leased, delayed, parked, age)


class Subscribe(Operation[None]):
    """Make a subscription that begins at the log's end, unless it is there."""

    __slots__ = ("prefix", "service")

    def __init__(self, service: str, prefix: str) -> None:
        self.service = service
        self.prefix = prefix

    def run(self, tx: Transaction) -> None:
        """Make the log too, if this is its first service."""
        log = tx.execute("SELECT no, head FROM logs WHERE prefix = ?", (self.prefix,)).fetchone()
        if log is None:
            number = tx.execute("SELECT coalesce(max(no), 0) + 1 FROM logs").fetchone()[0]
            log = (number, number << LOG_BITS)
            tx.execute("INSERT INTO logs (no, prefix, head) VALUES (?, ?, ?)", (number, self.prefix, log[1]))
        tx.execute(
            "INSERT INTO subscriptions (prefix, service, log, cursor, created_at) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            (self.prefix, self.service, *log, tx.now),
        )


class Unsubscribe(Operation[None]):
    """Undo a subscription that has nothing left."""

    __slots__ = ("path", "prefix", "service")

    def __init__(self, service: str, prefix: str, path: str) -> None:
        self.service = service
        self.prefix = prefix
        self.path = path

    def run(self, tx: Transaction) -> None:
        """Refuse while there are messages: they would be gone without a trace."""
        stats = count(tx.connection, self.service, self.prefix, tx.now)
        if stats is None:
            raise unknown(self.service, self.path)
        left = stats.ready + stats.inflight + stats.delayed
        if left or stats.parked:
            raise BrokerError(
                f"{self.service} still has {left} messages and {stats.parked} dead letters; consume them, re-drive or "
                f"purge the dead letters, then unsubscribe"
            )
        tx.execute("DELETE FROM subscriptions WHERE prefix = ? AND service = ?", (self.prefix, self.service))
