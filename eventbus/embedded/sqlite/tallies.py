"""How many letters there are of each kind: a table that triggers keep with every letter that comes and goes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Final

from eventbus import wire
from eventbus.adapter import BodyMapping
from eventbus.embedded.sqlite import rows
from eventbus.event import Event
from eventbus.facets import Facet, facets

TOTAL: Final = "SELECT coalesce(sum(letters), 0) FROM tally WHERE subscription = {subscription} AND facet = 'reason'"
"""Every letter has one reason: the sum over the few there are is the number of letters, without walking along them."""

AT_ONCE: Final = 500
_MAPPING: Final = BodyMapping()


def column(event: Event, story: Mapping[str, object]) -> str:
    """What stands in a letter's `facets`."""
    return json.dumps(facets(event, story), ensure_ascii=False, separators=(",", ":"))


def read(connection: sqlite3.Connection, subscription: int, by: Facet) -> dict[str, int]:
    """The letters of each value."""
    found = connection.execute(
        "SELECT value, letters FROM tally WHERE subscription = ? AND facet = ?", (subscription, by)
    )
    return dict(found.fetchall())


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
