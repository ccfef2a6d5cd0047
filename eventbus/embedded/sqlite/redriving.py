"""Dead letters that an operator moves: put back to their service, purged, or brought back from a file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from eventbus import headers as reserved
from eventbus.adapter import Parked, Redrive
from eventbus.embedded.sqlite import rows, tallies
from eventbus.embedded.sqlite.rows import EVENT_COLUMNS
from eventbus.embedded.sqlite.writer import Operation, Transaction
from eventbus.settlement import HeaderDelta
from eventbus.wire import with_body

_COPY: Final = (
    f"INSERT INTO events (seq, stored_at, {EVENT_COLUMNS}) SELECT j.value ->> 1, dlq.stored_at, "
    f"{', '.join(f'dlq.{name}' for name in EVENT_COLUMNS.split(', '))} "
    "FROM json_each(?) j CROSS JOIN dlq ON dlq.no = j.value ->> 0"
)
_QUEUE: Final = (
    "INSERT INTO inflight (seq, subscription, due, headers) "
    "SELECT j.value ->> 1, ?1, j.value ->> 2, json_patch(dlq.headers, ?2 -> (j.value ->> 3)) "
    "FROM json_each(?3) j CROSS JOIN dlq ON dlq.no = j.value ->> 0"
)


class RedriveLetters(Operation[set[int]]):
    """Move letters back to the work queue of their service alone. Answers with those that stood there.

    The event gets a negative number: no cursor will ever come to it, so that no other service receives it.
    """

    __slots__ = ("orders", "subscription")

    name = "redrive"

    def __init__(self, subscription: int, orders: Mapping[int, Redrive]) -> None:
        self.subscription = subscription
        self.orders = orders

    def run(self, tx: Transaction) -> set[int]:
        """Copy, queue and remove in one transaction: nothing is doubled, nothing is lost."""
        found = _standing(tx, self.subscription, self.orders)
        if not found:
            return set()
        lowest: int = tx.execute("SELECT min(0, coalesce(min(seq), 0)) FROM events").fetchone()[0]
        moves, patches = [], dict[int, tuple[int, HeaderDelta]]()
        for position, number in enumerate(found):
            # Upwards: the oldest is received first, and a table that grows at one end is quickest to fill.
            order, seq = self.orders[number], lowest - len(found) + position
            # Many letters share one delta: it is written down once.
            patch, _ = patches.setdefault(id(order.headers), (len(patches), order.headers))
            moves.append((number, seq, tx.now + round(order.delay * 1000), patch))
        values = json.dumps(moves)
        tx.execute(_COPY, (values,))
        # A header delta is a JSON merge patch: null takes one away.
        deltas = json.dumps([dict(delta) for _, delta in patches.values()])
        tx.execute(_QUEUE, (self.subscription, deltas, values))
        for number, seq, _, _ in moves:
            body = self.orders[number].body
            if body is not None:
                self._edit(tx, seq, body)
        tx.wake("queue", self.subscription, min(move[2] for move in moves))
        tallies.remove(tx, found)
        return set(found)

    @staticmethod
    def _edit(tx: Transaction, seq: int, body: bytes) -> None:
        stored, kind = tx.execute("SELECT body, content_type FROM events WHERE seq = ?", (seq,)).fetchone()
        tx.execute("UPDATE events SET body = ? WHERE seq = ?", (with_body(stored, kind, body), seq))


class Purge(Operation[set[int]]):
    """Remove letters for good. Answers with those that stood there."""

    __slots__ = ("numbers", "subscription")

    name = "purge"

    def __init__(self, subscription: int, numbers: Sequence[int]) -> None:
        self.subscription = subscription
        self.numbers = numbers

    def run(self, tx: Transaction) -> set[int]:
        """Remove them."""
        found = _standing(tx, self.subscription, self.numbers)
        if found:
            tallies.remove(tx, found)
        return set(found)


class Restore(Operation[None]):
    """Park letters that come from a file."""

    __slots__ = ("letters", "subscription")

    name = "restore"

    def __init__(self, subscription: int, letters: Sequence[Parked]) -> None:
        self.subscription = subscription
        self.letters = letters

    def run(self, tx: Transaction) -> None:
        """Their age begins anew for the retention: nobody brings letters back to see them expire."""
        for letter in self.letters:
            event, story = letter.event, letter.headers
            tx.execute(
                f"INSERT INTO dlq (subscription, parked_at, due, event_id, reason, status, code, headers, facets, "
                f"stored_at, {EVENT_COLUMNS}) VALUES ({', '.join('?' * 22)})",
                (
                    self.subscription,
                    tx.now,
                    tx.now,
                    event.id,
                    reserved.text(story.get(reserved.PARK_REASON)),
                    reserved.number(story.get(reserved.FINAL_STATUS)) or None,
                    reserved.text(story.get(reserved.ERROR_CODE)),
                    rows.to_json(story) or "{}",
                    tallies.column(event, story),
                    round(reserved.moment(story.get(reserved.ENQUEUED_AT)) * 1000) or tx.now,
                    *rows.to_row(event),
                ),
            )
        tx.wake("dlq", self.subscription, tx.now)


def _standing(tx: Transaction, subscription: int, numbers: Collection[int]) -> list[int]:
    """Those of these letters that stand here."""
    found = tx.execute(
        "SELECT no FROM dlq WHERE no IN (SELECT value FROM json_each(?)) AND +subscription = ?",
        (str(list(numbers)), subscription),
    )
    return [row[0] for row in found.fetchall()]
