"""The watch: tells waiting consumers when to look again.

What this process does is told by the writer after each commit. What other processes do is seen by asking SQLite
for its data version, a look into shared memory, while somebody waits. Due times are known beforehand.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from typing import Final

from eventbus import telemetry
from eventbus.embedded.sqlite import schema

POLL: Final = 0.025
POLL_QUIET: Final = 0.1
QUIET_AFTER: Final = 5.0
"""Nothing new for so long: ask less often. A look costs 0.15 ms of a cold CPU, so 0.6 % of it becomes 0.15 %."""
NEVER: Final = 2**62

_WORK: Final = (
    "SELECT l.head - s.cursor, (SELECT min(due) FROM inflight WHERE subscription = s.id) "
    "FROM subscriptions s JOIN logs l ON l.no = s.log WHERE s.id = ?"
)
_LETTERS: Final = "SELECT 0, (SELECT min(due) FROM dlq WHERE subscription = s.id) FROM subscriptions s WHERE s.id = ?"


class Place:
    """What a consumer waits at: its log and its queue (or its dead letters, which have no log)."""

    __slots__ = ("keys", "query", "subscription")

    def __init__(self, subscription: int, log: int, *, dead_letters: bool) -> None:
        self.subscription = subscription
        self.keys = (("dlq", subscription),) if dead_letters else (("log", log), ("queue", subscription))
        self.query = _LETTERS if dead_letters else _WORK


class _Waiter:
    __slots__ = ("due", "future", "looked", "loop", "place")

    def __init__(self, place: Place, due: int, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        self.place = place
        self.due = due
        self.loop = loop
        self.future = future
        self.looked = False


class Watch:
    """Who waits for what, in this process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Condition()
        self._waiters: set[_Waiter] = set()
        self._marks: dict[tuple[str, int], int] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def mark(self, place: Place) -> tuple[int, ...]:
        """How often something came to this place; to be read before looking, and given to `wait` after."""
        marks = self._marks
        return tuple(marks.get(key, 0) for key in place.keys)

    def committed(self, due: dict[tuple[str, int], int], now: int) -> None:
        """Called by the writer's thread: there is something at these places from these times on."""
        woken = []
        with self._lock:
            for key, when in due.items():
                self._marks[key] = self._marks.get(key, 0) + 1
                for waiter in self._waiters:
                    if key in waiter.place.keys:
                        waiter.due = min(waiter.due, when)
                        if waiter.due <= now:
                            woken.append(waiter)
            self._waiters.difference_update(woken)
        _wake(woken)

    async def wait(
        self, place: Place, mark: tuple[int, ...], due: int | None, until: float, idle: asyncio.Future[None]
    ) -> None:
        """Return when there may be something at the place, at `until` (the loop's time), or when `idle` is set."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(place, NEVER if due is None else due, loop, idle)
        with self._lock:
            if self._closed or mark != self.mark(place):
                return
            self._waiters.add(waiter)
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="eventbus sqlite watch", daemon=True)
                self._thread.start()
            if len(self._waiters) == 1:
                self._lock.notify()
        timer = loop.call_at(until, _resolve, idle)
        try:
            await idle
        finally:
            timer.cancel()
            with self._lock:
                self._waiters.discard(waiter)

    async def aclose(self) -> None:
        """Let everybody go, and end the thread: the last connection to leave must be the writer's, to clean up."""
        with self._lock:
            self._closed = True
            woken = list(self._waiters)
            self._waiters.clear()
            self._lock.notify()
        _wake(woken)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # --- in the thread ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        connection: sqlite3.Connection | None = None
        version, changed = -1, time.monotonic()
        while True:
            pause = POLL if time.monotonic() - changed < QUIET_AFTER else POLL_QUIET
            with self._lock:
                while not self._waiters and not self._closed:
                    self._lock.wait()
                if not self._closed:
                    nearest = min(waiter.due for waiter in self._waiters) / 1000 - time.time()
                    if nearest > 0:
                        self._lock.wait(min(pause, nearest))
                if self._closed:
                    break
                waiters = list(self._waiters)
            try:
                connection = connection or schema.connect(self._path, write=False)
                seen = self._look(connection, version, waiters)
                if seen != version:
                    version, changed = seen, time.monotonic()
            except sqlite3.Error as error:
                # A consumer's own claim will meet the same trouble and say so; here it only costs freshness.
                telemetry.log(logging.DEBUG, "watch_failed", {"path": self._path, "error": str(error)})
                version = -1
                time.sleep(POLL)
        if connection is not None:
            connection.close()

    def _look(self, connection: sqlite3.Connection, known: int, waiters: list[_Waiter]) -> int:
        """Ask for what changed; returns the version that was looked at."""
        version: int = connection.execute("PRAGMA data_version").fetchone()[0]
        now = int(time.time() * 1000)
        woken = []
        for waiter in waiters:
            # A waiter that came after the last change was noticed must be looked at once in any case.
            if version != known or not waiter.looked:
                waiter.looked = True
                found = connection.execute(waiter.place.query, (waiter.place.subscription,)).fetchone()
                if found is None or found[0] > 0:
                    waiter.due = 0
                else:
                    waiter.due = NEVER if found[1] is None else found[1]
            if waiter.due <= now:
                woken.append(waiter)
        with self._lock:
            self._waiters.difference_update(woken)
        _wake(woken)
        return version


def _wake(waiters: list[_Waiter]) -> None:
    for waiter in waiters:
        try:
            waiter.loop.call_soon_threadsafe(_resolve, waiter.future)
        except RuntimeError:
            # Its loop was closed meanwhile: nobody waits there any more.
            telemetry.log(logging.DEBUG, "nobody_waits", {"loop": repr(waiter.loop)})


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
