"""The work queue of a service: claiming from the log and from what is due, and settling.

An event leaves the file with the last settlement that concerns it: nobody's cursor is before it then, and nobody
holds it. So a finished log is an empty one, and a retry that waits for days holds back nothing but itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from eventbus.embedded.sqlite import letters
from eventbus.embedded.sqlite.leases import Claim, Claimed, Held, put_back, remove, take
from eventbus.embedded.sqlite.rows import EVENT_COLUMNS, Row
from eventbus.embedded.sqlite.writer import Operation, Transaction

OF_EVENT: Final = ", ".join(f"e.{name}" for name in EVENT_COLUMNS.split(", "))
# Both answer with: seq, stored_at, headers, former token, then the event.
_DUE: Final = (
    f"SELECT e.seq, e.stored_at, i.headers, i.token, {OF_EVENT} FROM inflight i JOIN events e ON e.seq = i.seq "
    "WHERE i.subscription = ? AND i.due > ? AND i.due <= ? ORDER BY i.due LIMIT ?"
)
_NEW: Final = (
    f"SELECT seq, stored_at, NULL, NULL, {EVENT_COLUMNS} FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
)
HOLD: Final = (
    "UPDATE inflight SET due = ?, token = ?, tenant = NULL "
    "WHERE subscription = ? AND seq IN (SELECT value FROM json_each(?))"
)
_FINISHED: Final = "NOT EXISTS (SELECT 1 FROM inflight i WHERE i.seq = events.seq)"


class ClaimWork(Claim):
    """Take up to `limit` messages under a lease: those due again first, then new ones from the log."""

    __slots__ = ()

    def run(self, tx: Transaction) -> Claimed:
        """Two searches by index, whatever waits: no OR, no scan."""
        place = self._place(tx)
        if place is None:
            return Claimed([], unknown=True)
        cursor, head = place
        token, lease = random.getrandbits(62), tx.now + self.lease
        rows = self._due(tx, token, lease, after=-1, limit=self.limit)
        if len(rows) < self.limit and cursor < head:
            new = take(tx.execute(_NEW, (cursor, head, self.limit - len(rows))), body=8)
            # Without rows, somebody has deleted events by hand: go on behind them.
            last = new[-1][0] if new else head
            tx.execute(
                "INSERT INTO inflight (seq, subscription, due, token) "
                "SELECT seq, ?, ?, ? FROM events WHERE seq > ? AND seq <= ?",
                (self.subscription, lease, token, cursor, last),
            )
            tx.execute("UPDATE subscriptions SET cursor = ? WHERE id = ?", (last, self.subscription))
            rows += new
        return Claimed(rows, token) if rows else self._nothing(tx)

    def _place(self, tx: Transaction) -> tuple[int, int] | None:
        """The service's cursor and the head of its log; None without a subscription."""
        place: tuple[int, int] | None = tx.execute(
            "SELECT s.cursor, l.head FROM subscriptions s JOIN logs l ON l.no = s.log WHERE s.id = ?",
            (self.subscription,),
        ).fetchone()
        return place

    def _due(self, tx: Transaction, token: int, lease: int, *, after: int, limit: int) -> list[Row]:
        """Take what is due again."""
        rows = take(tx.execute(_DUE, (self.subscription, after, tx.now, limit)), body=8)
        if rows:
            tx.execute(HOLD, (lease, token, self.subscription, str([row[0] for row in rows])))
        return rows

    def _nothing(self, tx: Transaction) -> Claimed:
        """When to look again."""
        soonest = tx.execute(
            "SELECT min(due) FROM inflight WHERE subscription = ? AND due > ?", (self.subscription, tx.now)
        ).fetchone()
        return Claimed([], next_due=soonest[0])


@dataclass(slots=True)
class Settle(Operation[set[int]]):
    """Carry out settlements. Answers with the messages that were still held; the others are somebody else's now."""

    subscription: int
    log: int
    held: Held
    retention: letters.Retention
    waiting: list[tuple[int, int, str | None]] = field(default_factory=list)
    """Retry, requeue, release: number, due (0: now), headers."""
    parked: list[letters.Parcel] = field(default_factory=list)
    ordered: bool = False
    """Whether what is put back keeps its key."""
    safe: bool = True
    """Whether the disk is waited for."""

    name = "settle"

    @property
    def durable(self) -> bool:
        """Acks and releases that a power failure takes back are redeliveries; copies must not be lost."""
        return self.safe

    def run(self, tx: Transaction) -> set[int]:
        """Everything in one transaction: there is no moment between copy and removal."""
        ours = remove(tx, "inflight", self.held)
        gone = set(ours)
        waiting = [(seq, max(due, tx.now), headers) for seq, due, headers in self.waiting if seq in ours]
        if waiting:
            put_back(tx, self.subscription, waiting, ordered=self.ordered)
            gone.difference_update(row[0] for row in waiting)
        parked = [parcel for parcel in self.parked if parcel.number in ours]
        if parked:
            letters.park(tx, self.subscription, parked)
            letters.expire(tx, self.subscription, self.retention)
        if gone:
            _forget(tx, self.log, sorted(gone))
        if self.ordered and ours:
            tx.wake("queue", self.subscription)  # others may wait for one of these keys
        return ours


def _forget(tx: Transaction, log: int, numbers: list[int]) -> None:
    """Delete the events that nobody needs any more, of these that were just settled."""
    low: int | None = tx.execute("SELECT min(cursor) FROM subscriptions WHERE log = ?", (log,)).fetchone()[0]
    numbers = [number for number in numbers if number < 0 or low is None or number <= low]
    if not numbers:
        return
    first, last = numbers[0], numbers[-1]
    if last - first < 2 * len(numbers):
        # Nearly all of a range, and any other finished event in it is gone already: cheaper than one by one.
        tx.execute(f"DELETE FROM events WHERE seq BETWEEN ? AND ? AND {_FINISHED}", (first, last))
    else:
        tx.execute(f"DELETE FROM events WHERE seq IN (SELECT value FROM json_each(?)) AND {_FINISHED}", (str(numbers),))
