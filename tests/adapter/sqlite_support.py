"""What the tests of the SQLite adapter share."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from eventbus.adapter import Consumer, Subscription
from eventbus.embedded.sqlite import SqliteAdapter
from eventbus.embedded.sqlite.leased import LeasedConsumer
from eventbus.event import Event
from eventbus.headers import for_parking
from eventbus.settlement import Delivery, Park
from eventbus.status import Outcome

SUB = Subscription("wms-stock", "wms")
OTHER = Subscription("wms-billing", "wms")
LETTERS = Subscription("wms-stock", "wms", dead_letters=True)
DEADLINE = 10.0


@asynccontextmanager
async def opened(folder: Path, *subscriptions: Subscription, **settings: object) -> AsyncIterator[SqliteAdapter]:
    """An open adapter on folder/bus.db with these services subscribed."""
    adapter = SqliteAdapter.from_url(f"sqlite:///{folder}/bus.db", settings)
    await adapter.open()
    try:
        await adapter.provision(subscriptions, "create")
        yield adapter
    finally:
        await adapter.aclose()


async def receive(consumer: Consumer, number: int = 1) -> list[Delivery]:
    """That many deliveries."""
    found: list[Delivery] = []
    deadline = time.monotonic() + DEADLINE
    while len(found) < number:
        assert time.monotonic() < deadline, f"only {len(found)} of {number} deliveries came"
        found += await consumer.receive(number - len(found), 1.0)
    return found


def freeze(consumer: Consumer) -> None:
    """From here on the consumer stands for a process that stands still: nothing is renewed."""
    assert isinstance(consumer, LeasedConsumer)
    consumer._adapter.renewal.remove(consumer)


async def waits(consumer: Consumer) -> None:
    """Until its receive has found nothing and waits."""
    assert isinstance(consumer, LeasedConsumer)
    await eventually(lambda: consumer._idle is not None, "the consumer waits")


def parking(delivery: Delivery, text: str = "no such order") -> Park:
    """A finished verdict: park it."""
    outcome = Outcome(status=404, code="E404", reason=text)
    return Park("permanent", for_parking(delivery, outcome, "permanent", text, time.time()), text)


async def park(adapter: SqliteAdapter, *events: Event, subscription: Subscription = SUB) -> None:
    """Publish events and park them."""
    await adapter.publish(subscription.prefix, events)
    async with adapter.consume(subscription) as consumer:
        got = await receive(consumer, len(events))
        assert await consumer.settle([(delivery, parking(delivery)) for delivery in got]) == ["done"] * len(events)


def sql(folder: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    """Look into the file (or change it) from outside."""
    with closing(sqlite3.connect(folder / "bus.db", timeout=5)) as connection, connection:
        return connection.execute(statement, values).fetchall()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The write lock, held by somebody else."""
    with closing(sqlite3.connect(folder / "bus.db", isolation_level=None, timeout=5)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.01)
