"""How many letters there are of each kind: a table that is kept with every letter that comes and goes."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Final

from eventbus import wire
from eventbus.adapter import BodyMapping
from eventbus.embedded.sqlite import rows
from eventbus.event import Event
from eventbus.facets import Facet, facets

if TYPE_CHECKING:
    from eventbus.embedded.sqlite.writer import Transaction

TOTAL: Final = "SELECT coalesce(sum(letters), 0) FROM tally WHERE subscription = {subscription} AND facet = 'reason'"
"""Every letter has one reason: the sum over the few there are is the number of letters, without walking along them."""

AT_ONCE: Final = 500
_MAPPING: Final = BodyMapping()
_CHOSEN: Final = "FROM dlq WHERE no IN (SELECT value FROM json_each(?))"


def column(event: Event, story: Mapping[str, object]) -> str:
    """What stands in a letter's `facets`."""
    return json.dumps(facets(event, story), ensure_ascii=False, separators=(",", ":"))


def read(connection: sqlite3.Connection, subscription: int, by: Facet) -> dict[str, int]:
    """The letters of each value."""
    found = connection.execute(
        "SELECT value, letters FROM tally WHERE subscription = ? AND facet = ?", (subscription, by)
    )
    return dict(found.fetchall())


def remove(tx: Transaction, subscription: int, numbers: Collection[int]) -> None:
    """Remove letters, and count all of them out together: a trigger for each would take longer than all the rest."""
    chosen = (str(list(numbers)),)
    found = tx.execute(f"SELECT facets {_CHOSEN}", chosen).fetchall()
    letters = json.loads(f"[{','.join([facets for (facets,) in found])}]")
    counts = Counter(chain.from_iterable(map(dict.items, letters)))
    tx.execute("INSERT INTO counted_out VALUES (1)")
    tx.execute(f"DELETE {_CHOSEN}", chosen)
    tx.execute("DELETE FROM counted_out")
    tx.execute(
        "INSERT INTO tally SELECT ?, value ->> 0, value ->> 1, -(value ->> 2) FROM json_each(?) WHERE true "
        "ON CONFLICT DO UPDATE SET letters = letters + excluded.letters",
        (subscription, json.dumps([(facet, value, count) for (facet, value), count in counts.items()])),
    )
    tx.execute("DELETE FROM tally WHERE letters = 0")


def fill(connection: sqlite3.Connection) -> None:
    """Write the facets of letters that were parked before there were any."""
    last = 0
    while True:
        found = connection.execute(
            f"SELECT no, headers, {rows.EVENT_COLUMNS} FROM dlq WHERE no > ? ORDER BY no LIMIT ?", (last, AT_ONCE)
        ).fetchall()
        if not found:
            return
        for number, headers, *columns in found:
            event, _ = wire.unwrap(rows.to_event(*columns), _MAPPING)
            connection.execute(
                "UPDATE dlq SET facets = ? WHERE no = ?", (column(event, rows.from_json(headers)), number)
            )
        last = found[-1][0]
