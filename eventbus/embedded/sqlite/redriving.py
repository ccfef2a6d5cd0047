"""Dead letters that leave: put back to their service, or purged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eventbus.adapter import Redrive
from eventbus.embedded.sqlite import rows
from eventbus.embedded.sqlite.leases import put_back
from eventbus.embedded.sqlite.rows import EVENT_COLUMNS
from eventbus.embedded.sqlite.writer import Operation, Transaction
from eventbus.headers import merge


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
        found: list[tuple[int, str]] = tx.execute(
            "SELECT no, headers FROM dlq WHERE no IN (SELECT value FROM json_each(?)) AND +subscription = ?",
            (str(list(self.orders)), self.subscription),
        ).fetchall()
        if not found:
            return set()
        lowest: int = tx.execute("SELECT min(0, coalesce(min(seq), 0)) FROM events").fetchone()[0]
        numbers = [number for number, _ in found]
        tx.execute(
            f"INSERT INTO events (seq, stored_at, {EVENT_COLUMNS}) SELECT ? - j.key, dlq.stored_at, "
            f"{', '.join(f'dlq.{name}' for name in EVENT_COLUMNS.split(', '))} "
            f"FROM json_each(?) j CROSS JOIN dlq ON dlq.no = j.value",
            (lowest - 1, str(numbers)),
        )
        waiting = []
        for position, (number, headers) in enumerate(found):
            order, seq = self.orders[number], lowest - 1 - position
            if order.body is not None:
                tx.execute("UPDATE events SET body = ? WHERE seq = ?", (order.body, seq))
            story = merge(rows.from_json(headers), order.headers)
            waiting.append((seq, tx.now + round(order.delay * 1000), rows.to_json(story)))
        put_back(tx, self.subscription, waiting)
        _remove(tx, self.subscription, numbers)
        return set(numbers)


class Purge(Operation[set[int]]):
    """Remove letters for good. Answers with those that stood there."""

    __slots__ = ("numbers", "subscription")

    name = "purge"

    def __init__(self, subscription: int, numbers: Sequence[int]) -> None:
        self.subscription = subscription
        self.numbers = numbers

    def run(self, tx: Transaction) -> set[int]:
        """Remove them."""
        return _remove(tx, self.subscription, self.numbers)


def _remove(tx: Transaction, subscription: int, numbers: Sequence[int]) -> set[int]:
    found = tx.execute(
        "DELETE FROM dlq WHERE no IN (SELECT value FROM json_each(?)) AND +subscription = ? RETURNING no",
        (str(list(numbers)), subscription),
    )
    return {row[0] for row in found.fetchall()}
