"""The dead letters of a service, in the file: parked, read under a lease, expired."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from eventbus import telemetry
from eventbus.embedded.sqlite import tallies
from eventbus.embedded.sqlite.leases import Claim, Claimed, Held, remove, take
from eventbus.embedded.sqlite.rows import EVENT_COLUMNS
from eventbus.embedded.sqlite.writer import Operation, Transaction

EXPIRE_AT_ONCE: Final = 500
"""Letters that one transaction removes for their age or number; the rest goes with the next ones."""

_OF_EVENT: Final = ", ".join(f"events.{name}" for name in EVENT_COLUMNS.split(", "))

# The plus keeps SQLite from walking the subscription's index instead of looking up the numbers.
WAITING: Final = (
    "UPDATE dlq SET due = j.value ->> 1, token = NULL, headers = j.value ->> 2 FROM json_each(?) j "
    "WHERE dlq.no = j.value ->> 0 AND +dlq.subscription = ? "
    "AND dlq.token IN (SELECT value FROM json_each(?)) RETURNING dlq.no"
)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long, and how many, letters of a service are kept."""

    service: str
    max_age: float | None = None
    max_entries: int | None = None


@dataclass(slots=True)
class Parcel:
    """What is written beside the event when it is parked."""

    number: int
    event_id: str
    """As the consumer saw it: a structured event has its own id inside its envelope."""
    headers: str
    reason: str
    status: int | None
    code: str | None
    facets: str


def park(tx: Transaction, subscription: int, parcels: Sequence[Parcel]) -> None:
    """Copy events, byte by byte, into the dead letters."""
    values = [(p.number, p.event_id, p.reason, p.status, p.code, p.headers, p.facets) for p in parcels]
    tx.execute(
        f"INSERT INTO dlq (subscription, parked_at, due, event_id, reason, status, code, headers, facets, stored_at, "
        f"{EVENT_COLUMNS}) SELECT ?1, ?2, ?2, "
        f"j.value ->> 1, j.value ->> 2, j.value ->> 3, j.value ->> 4, j.value ->> 5, j.value ->> 6, "
        f"events.stored_at, {_OF_EVENT} "
        f"FROM json_each(?3) j CROSS JOIN events ON events.seq = j.value ->> 0",
        (subscription, tx.now, json.dumps(values)),
    )
    tx.wake("dlq", subscription, tx.now)


def expire(tx: Transaction, subscription: int, retention: Retention) -> int:
    """Remove letters that are too old or too many, oldest first; counted and logged."""
    gone: set[int] = set()
    if retention.max_age is not None:
        limit = tx.now - round(retention.max_age * 1000)
        oldest = tx.execute(
            "SELECT no, parked_at FROM dlq WHERE subscription = ? ORDER BY no LIMIT ?", (subscription, EXPIRE_AT_ONCE)
        )
        for number, parked_at in oldest.fetchall():
            if parked_at > limit:
                break
            gone.add(number)
    if retention.max_entries is not None:
        newest_too_many = tx.execute(
            "SELECT no FROM dlq WHERE subscription = ? ORDER BY no DESC LIMIT 1 OFFSET ?",
            (subscription, retention.max_entries),
        ).fetchone()
        if newest_too_many is not None:
            found = tx.execute(
                "SELECT no FROM dlq WHERE subscription = ? AND no <= ? ORDER BY no LIMIT ?",
                (subscription, newest_too_many[0], EXPIRE_AT_ONCE),
            )
            gone.update(row[0] for row in found.fetchall())
    if gone:
        tallies.remove(tx, subscription, gone)
        fields = {"service": retention.service, "count": len(gone)}
        tx.after.append(partial(telemetry.log, logging.WARNING, "dlq_expired", fields))
        labels = {"service": retention.service, "reason": "retention"}
        tx.after.append(partial(telemetry.purged.add, len(gone), labels))
    return len(gone)


class Expire(Operation[int]):
    """Apply the retention now, for services that park nothing. Answers with how many letters went."""

    __slots__ = ("retention", "subscription")

    name = "expire"

    def __init__(self, subscription: int, retention: Retention) -> None:
        self.subscription = subscription
        self.retention = retention

    def run(self, tx: Transaction) -> int:
        """Remove what is over."""
        return expire(tx, self.subscription, self.retention)


class ClaimLetters(Claim):
    """Take up to `limit` letters under a lease; they go on standing in the queue."""

    __slots__ = ()

    def run(self, tx: Transaction) -> Claimed:
        """The letters that are due, longest waiting first."""
        found = tx.execute(
            f"SELECT no, stored_at, headers, token, {EVENT_COLUMNS} FROM dlq "
            "WHERE subscription = ? AND due <= ? ORDER BY due, no LIMIT ?",
            (self.subscription, tx.now, self.limit),
        )
        rows = take(found, body=8)
        if rows:
            token = random.getrandbits(62)
            tx.execute(
                "UPDATE dlq SET due = ?, token = ? WHERE no IN (SELECT value FROM json_each(?))",
                (tx.now + self.lease, token, str([row[0] for row in rows])),
            )
            return Claimed(rows, token)
        known = tx.execute("SELECT 1 FROM subscriptions WHERE id = ?", (self.subscription,)).fetchone()
        soonest = tx.execute("SELECT min(due) FROM dlq WHERE subscription = ?", (self.subscription,)).fetchone()
        return Claimed([], next_due=soonest[0], unknown=known is None)


@dataclass(slots=True)
class SettleLetters(Operation[set[int]]):
    """Remove letters that were dealt with, and put the others down for later. Answers with those still held."""

    subscription: int
    held: Held
    done: Held
    waiting: list[tuple[int, int, str]] = field(default_factory=list)
    """Number, due (0: now), headers."""

    name = "settle"

    def run(self, tx: Transaction) -> set[int]:
        """Acks remove; everything else lets go of the lease."""
        ours = remove(tx, "dlq", self.done)
        if self.waiting:
            waiting = [(number, max(due, tx.now), headers) for number, due, headers in self.waiting]
            found = tx.execute(
                WAITING,
                (json.dumps(waiting), self.subscription, self.held.tokens),
            )
            ours.update(row[0] for row in found.fetchall())
            tx.wake("dlq", self.subscription, min(row[1] for row in waiting))
        return ours
