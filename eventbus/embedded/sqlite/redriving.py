"""Dead letters that an operator moves: put back to their service, purged, or brought back from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from eventbus import headers as reserved
from eventbus.adapter import Parked, Redrive
from eventbus.embedded.sqlite import rows, tallies
from eventbus.embedded.sqlite.rows import EVENT_COLUMNS
from eventbus.embedded.sqlite.writer import Operation, Transaction
from eventbus.settlement import HeaderDelta
from eventbus.wire import with_body

# The place in the list gives the number: nothing of it has to be read as JSON again for every row.
_COPY: Final = (
    f"INSERT INTO events (seq, stored_at, {EVENT_COLUMNS}) SELECT ?1 + j.key, dlq.stored_at, "
    f"{', '.join(f'dlq.{name}' for name in EVENT_COLUMNS.split(', '))} "
    "FROM json_each(?2) j CROSS JOIN dlq ON dlq.no = j.value"
)
# A header delta is a JSON merge patch: null takes one away.
_QUEUE: Final = (
    "INSERT INTO inflight (seq, subscription, due, headers) "
    "SELECT ?1 + j.key, ?2, ?3, json_patch(dlq.headers, ?4) "
    "FROM json_each(?5) j CROSS JOIN dlq ON dlq.no = j.value"
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
        # Upwards: the oldest is received first, and a table that grows at one end is quickest to fill.
        seq = lowest - len(found)
        tx.execute(_COPY, (seq, str(found)))
        # Many letters share one delta and one delay: each kind is queued at once, with a gap where another's letter is.
        kinds: dict[tuple[int, float], tuple[HeaderDelta, list[int | None]]] = {}
        for place, number in enumerate(found):
            _, delta, body, delay = self.orders[number]
            kinds.setdefault((id(delta), delay), (delta, [None] * len(found)))[1][place] = number
            if body is not None:
                self._edit(tx, seq + place, body)
        for (_, delay), (delta, numbers) in kinds.items():
            due = tx.now + (math.ceil(delay * 1000) + 1 if delay else 0)  # the millisecond that began is not over
            tx.execute(_QUEUE, (seq, self.subscription, due, json.dumps(dict(delta)), json.dumps(numbers)))
            tx.wake("queue", self.subscription, due)
        tallies.remove(tx, self.subscription, found)
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
            tallies.remove(tx, self.subscription, found)
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
