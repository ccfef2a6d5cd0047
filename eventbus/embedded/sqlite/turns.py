"""Claims that do not simply take what is first in the log: by turns of tenants, or in the order of keys.

Both let events step out of the log behind the cursor, into `inflight`, where they wait with the due time WAITING and
can be found by their tenant or key. Whoever claims without fairness or order later finds them due, like any other.
"""

from __future__ import annotations

import json
import random
import time
from typing import Final

from eventbus.embedded.sqlite.leases import Claimed, take
from eventbus.embedded.sqlite.rows import Row
from eventbus.embedded.sqlite.work import HOLD, OF_EVENT, ClaimWork
from eventbus.embedded.sqlite.writer import Transaction
from eventbus.shaping import Fairness

WAITING: Final = 1
"""The due time of what waits for its turn: long ago, and before everything that comes back."""
STEP: Final = 2_000
BUDGET: Final = 0.1
"""Seconds that one claim spends at most on letting events step out of the log."""
MOST_OUT_OF_ORDER: Final = 5_000
"""Events that may wait for keys which other consumers hold, before a claim looks no further."""

_ROWS: Final = (
    f"SELECT e.seq, e.stored_at, i.headers, i.token, {OF_EVENT} FROM inflight i JOIN events e ON e.seq = i.seq "
    "WHERE i.subscription = ? AND i.seq IN (SELECT value FROM json_each(?)) ORDER BY i.seq"
)
_TENANTS: Final = """
WITH RECURSIVE t(tenant) AS (
    SELECT min(tenant) FROM inflight WHERE subscription = :subscription AND tenant > :after
    UNION ALL
    SELECT (SELECT min(tenant) FROM inflight WHERE subscription = :subscription AND tenant > t.tenant)
    FROM t WHERE t.tenant IS NOT NULL
) SELECT tenant FROM t WHERE tenant IS NOT NULL LIMIT :number
"""
"""From one tenant to the next by index, whatever waits: a walk over as many rows as there are tenants."""
_TURN: Final = """
SELECT j.value, i.seq FROM json_each(:tenants) j CROSS JOIN inflight i
WHERE i.subscription = :subscription AND i.tenant = j.value AND i.seq IN (
    SELECT seq FROM inflight WHERE subscription = :subscription AND tenant = j.value
    ORDER BY seq LIMIT :number OFFSET :done
)
"""
_IN_ORDER: Final = """
SELECT i.seq FROM inflight i WHERE i.subscription = :subscription AND i.due <= :now AND (
    i.key IS NULL OR NOT EXISTS (
        SELECT 1 FROM inflight o WHERE o.subscription = :subscription AND o.key = i.key AND o.seq < i.seq
        AND o.token IS NOT NULL AND o.due > :now AND o.token >> 31 <> :me
    )
) ORDER BY i.seq LIMIT :limit
"""
"""What is due and has no earlier event of its key in another consumer's hands. In the order of the log: so whatever
of a key is claimed at once or after each other by one consumer is in order too."""


def step_out(tx: Transaction, subscription: int, cursor: int, head: int, most: int, column: str) -> int:
    """Let events out of the log, to be found by `column`; answers with the new cursor."""
    value = "coalesce(tenant, '')" if column == "tenant" else "key"
    started = time.monotonic()
    while cursor < head and most > 0 and time.monotonic() - started < BUDGET:
        step = min(STEP, most)
        last = tx.execute(
            "SELECT max(seq) FROM (SELECT seq FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?)",
            (cursor, head, step),
        ).fetchone()[0]
        if last is not None:
            tx.execute(
                f"INSERT INTO inflight (seq, subscription, due, {column}) "
                f"SELECT seq, ?, {WAITING}, {value} FROM events WHERE seq > ? AND seq <= ?",
                (subscription, cursor, last),
            )
        cursor = head if last is None else last
        most -= step
        tx.execute("UPDATE subscriptions SET cursor = ? WHERE id = ?", (cursor, subscription))
    return cursor


class FairClaim(ClaimWork):
    """Take from every tenant that has something waiting, each its share; who is next is gone on with next time."""

    __slots__ = ("after", "fairness")

    def __init__(self, subscription: int, limit: int, lease: float, fairness: Fairness, after: list[str]) -> None:
        super().__init__(subscription, limit, lease)
        self.fairness = fairness
        self.after = after
        """One element: the tenant that was last in the row. It is the consumer's, and goes from claim to claim."""

    def run(self, tx: Transaction) -> Claimed:
        """What comes back is half of it at most, the rest goes by turns."""
        place = self._place(tx)
        if place is None:
            return Claimed([], unknown=True)
        cursor, head = place
        token, lease = random.getrandbits(62), tx.now + self.lease
        waits = self._waits(tx)
        if not waits and head - cursor <= self.limit:
            return super().run(tx)  # all that is there fits: nobody has to wait for anybody
        rows = self._due(tx, token, lease, after=WAITING, limit=max(1, self.limit // 2))
        step_out(tx, self.subscription, cursor, head, 1_000_000, "tenant")
        chosen = self._choose(tx, self.limit - len(rows))
        if chosen:
            numbers = str(chosen)
            new = take(tx.execute(_ROWS, (self.subscription, numbers)), body=8)
            if len(new) < len(chosen):
                numbers = str([row[0] for row in new])
            tx.execute(HOLD, (lease, token, self.subscription, numbers))
            rows += new
        return Claimed(rows, token) if rows else self._nothing(tx)

    def _waits(self, tx: Transaction) -> bool:
        found = tx.execute(
            "SELECT EXISTS (SELECT 1 FROM inflight WHERE subscription = ? AND tenant >= '')", (self.subscription,)
        ).fetchone()
        return bool(found[0])

    def _choose(self, tx: Transaction, room: int) -> list[int]:
        tenants = self._row(tx, max(1, room // self.fairness.in_a_row))
        if not tenants:
            return []
        turns = {tenant: self.fairness.turn(tenant) for tenant in tenants}
        chosen: list[int] = []
        taken = dict.fromkeys(tenants, 0)
        for _ in range(2):  # each its share; then what the small ones left over goes to those who have more
            left = room - len(chosen)
            everything = sum(turns[tenant] for tenant in tenants)
            shares: dict[tuple[int, int], list[str]] = {}
            for tenant in tenants:
                share = max(1, left * turns[tenant] // everything)
                shares.setdefault((share, taken[tenant]), []).append(tenant)
            full: list[str] = []
            for (share, done), group in shares.items():
                found = tx.execute(
                    _TURN,
                    {
                        "tenants": json.dumps(group),
                        "subscription": self.subscription,
                        "number": share,
                        "done": done,
                    },
                ).fetchall()
                counts = dict.fromkeys(group, 0)
                for tenant, seq in found:
                    counts[tenant] += 1
                    chosen.append(seq)
                for tenant, count in counts.items():
                    taken[tenant] += count
                full += [tenant for tenant, count in counts.items() if count == share]
            tenants = full
            if not full or len(chosen) >= room:
                break
        return chosen[:room]

    def _row(self, tx: Transaction, number: int) -> list[str]:
        """The tenants whose turn it is: on from the last one, and round."""
        last = self.after[0]
        values: dict[str, object] = {"subscription": self.subscription, "after": last, "number": number}
        found: list[str] = [row[0] for row in tx.execute(_TENANTS, values)]
        if len(found) < number:
            first = tx.execute(
                "SELECT EXISTS (SELECT 1 FROM inflight WHERE subscription = ? AND tenant = '')", (self.subscription,)
            ).fetchone()[0]
            again = [""] if first else []
            again += [row[0] for row in tx.execute(_TENANTS, values | {"after": ""})]
            found += [tenant for tenant in again if tenant <= last or tenant not in found][: number - len(found)]
        if found:
            self.after[0] = found[-1]
        return found


class OrderedClaim(ClaimWork):
    """Take in the order of the log, and nothing whose key has an earlier event in another consumer's hands."""

    __slots__ = ("me",)

    def __init__(self, subscription: int, limit: int, lease: float, me: int) -> None:
        super().__init__(subscription, limit, lease)
        self.me = me
        """31 bits that say whose a token is."""

    def run(self, tx: Transaction) -> Claimed:
        """One search in the order of the log, over what has stepped out of it."""
        place = self._place(tx)
        if place is None:
            return Claimed([], unknown=True)
        cursor, head = place
        if cursor < head:
            waiting = tx.execute(
                "SELECT count(*) FROM (SELECT 1 FROM inflight WHERE subscription = ? AND due = ? LIMIT ?)",
                (self.subscription, WAITING, MOST_OUT_OF_ORDER),
            ).fetchone()[0]
            step_out(tx, self.subscription, cursor, head, min(self.limit, MOST_OUT_OF_ORDER - waiting), "key")
        values = {"subscription": self.subscription, "now": tx.now, "me": self.me, "limit": self.limit}
        numbers = [row[0] for row in tx.execute(_IN_ORDER, values)]
        rows: list[Row] = []
        if numbers:
            rows = take(tx.execute(_ROWS, (self.subscription, str(numbers))), body=8)
            token = (self.me << 31) | random.getrandbits(31)
            held = str([row[0] for row in rows])
            tx.execute(HOLD, (tx.now + self.lease, token, self.subscription, held))
            return Claimed(rows, token)
        return self._nothing(tx)
