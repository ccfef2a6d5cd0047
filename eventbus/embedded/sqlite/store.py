"""Completed events and rates in an SQLite file: the bus's own, or another one that services share."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from eventbus.embedded.sqlite import failures, location, options, schema
from eventbus.errors import BrokerError
from eventbus.scheduling.rate import GRAINS
from eventbus.store import Ask, Granted, Seen, Store, Words

T = TypeVar("T")

SWEEP: Final = 60.0
"""How often what is past its window is deleted."""
SWEPT_AT_ONCE: Final = 10_000


class SqliteStore(Store):
    """One thread with one connection; every call is one transaction."""

    def __init__(self, path: str, lock_timeout: float = 5.0) -> None:
        self._path = path
        self._lock_timeout = lock_timeout
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection
        self._swept = 0.0

    @classmethod
    def from_url(cls, url: str) -> SqliteStore:
        """`sqlite:///file`, as for a bus."""
        settings = options.read(url, {})
        return cls(settings.path, settings.lock_timeout)

    async def open(self) -> None:
        """Open the file, made where needed."""
        if self._thread is not None:
            return
        self._thread = ThreadPoolExecutor(1, "eventbus sqlite store")
        try:
            await self._run(self._prepare)
        except BaseException:
            await self.aclose()
            raise

    def _prepare(self) -> None:
        location.check(self._path)
        try:
            self._connection = schema.prepare(self._path, self._lock_timeout)
            # A completion that a power failure takes back is at worst a duplicate.
            self._connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error as error:
            raise failures.opening(error, self._path) from error

    async def aclose(self) -> None:
        """Close the file."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.submit(self._close)
            await asyncio.get_running_loop().run_in_executor(None, thread.shutdown)

    def _close(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()

    async def tell(self, service: str, words: Words, *, window: float, claim: float | None, owner: str) -> list[Seen]:
        """Three statements at most, whatever their number."""
        return await self._run(
            lambda: self._transact(lambda c, now: _tell(c, now, service, words, window, claim, owner))
        )

    async def permits(self, asks: Sequence[Ask]) -> list[Granted]:
        """All of them in one transaction."""
        return await self._run(lambda: self._transact(lambda c, now: [_permit(c, now, ask) for ask in asks]))

    async def _run(self, action: Callable[[], T]) -> T:
        if self._thread is None:
            raise BrokerError(f"the store {self._path} is not open")
        return await asyncio.get_running_loop().run_in_executor(self._thread, action)

    def _transact(self, action: Callable[[sqlite3.Connection, int], T]) -> T:
        connection, committing = self._connection, False
        try:
            schema.begin(connection, self._path, self._lock_timeout)
            now = int(time.time() * 1000)
            result = action(connection, now)
            if time.monotonic() - self._swept > SWEEP:
                self._swept = time.monotonic()
                _sweep(connection, now)
            committing = True
            connection.execute("COMMIT")
            return result
        except BaseException as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise failures.translate(error, self._path, committing=committing) from error
            raise


def _tell(
    connection: sqlite3.Connection, now: int, service: str, words: Words, window: float, claim: float | None, owner: str
) -> list[Seen]:
    if words.done:
        until = now + round(window * 1000)
        connection.executemany(
            "INSERT OR REPLACE INTO completed (service, name, owner, until) VALUES (?, ?, NULL, ?)",
            [(service, name, until) for name in words.done],
        )
    if words.let_go:
        connection.executemany(
            "DELETE FROM completed WHERE service = ? AND name = ? AND owner = ?",
            [(service, name, owner) for name in words.let_go],
        )
    if not words.asks:
        return []
    found: dict[str, str | None] = dict(
        connection.execute(
            "SELECT name, owner FROM completed "
            "WHERE service = ? AND until > ? AND name IN (SELECT value FROM json_each(?))",
            (service, now, json.dumps(words.asks)),
        ).fetchall()
    )
    answers: list[Seen] = []
    claimed: list[str] = []
    for name in words.asks:
        if name not in found:
            answers.append("new")
            if claim is not None:
                found[name] = owner
                claimed.append(name)
        else:
            answers.append("done" if found[name] is None else "claimed")
    if claimed:
        assert claim is not None
        connection.executemany(
            "INSERT OR REPLACE INTO completed (service, name, owner, until) VALUES (?, ?, ?, ?)",
            [(service, name, owner, now + round(claim * 1000)) for name in claimed],
        )
    return answers


def _permit(connection: sqlite3.Connection, now: int, ask: Ask) -> Granted:
    """A period in 64 slots; the slot that begins before the period still counts whole, so never one too many."""
    grain = max(1.0, ask.period * 1000 / GRAINS)
    slot = int(now // grain)
    connection.execute("DELETE FROM rates WHERE name = ? AND slot < ?", (ask.name, slot - GRAINS))
    used, oldest = connection.execute(
        "SELECT coalesce(sum(used), 0), min(slot) FROM rates WHERE name = ?", (ask.name,)
    ).fetchone()
    number = max(0, min(ask.wanted, ask.limit - used))
    if number:
        connection.execute(
            "INSERT INTO rates (name, slot, used) VALUES (?, ?, ?) "
            "ON CONFLICT (name, slot) DO UPDATE SET used = used + excluded.used",
            (ask.name, slot, number),
        )
        return Granted(number)
    return Granted(0, max(0.001, ((oldest + GRAINS + 1) * grain - now) / 1000))


def _sweep(connection: sqlite3.Connection, now: int) -> None:
    connection.execute(
        "DELETE FROM completed WHERE (service, name) IN "
        "(SELECT service, name FROM completed WHERE until <= ? ORDER BY until LIMIT ?)",
        (now, SWEPT_AT_ONCE),
    )
