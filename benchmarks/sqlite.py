"""sqlite:///file beside a loop written straight on sqlite3 with one transaction per event; and a large backlog."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.measure import DATA, Figure, goal, measured, show
from benchmarks.ours import figures
from eventbus import Bus, Event, Service
from eventbus.adapter import Consumer
from eventbus.settlement import ACK


def _plain_loop(folder: Path, number: int) -> tuple[Figure, Figure]:
    """What one writes in an afternoon: a table, a transaction per publish and per consumed event, two services."""
    db = sqlite3.connect(folder / "plain.db", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("CREATE TABLE queue (id INTEGER PRIMARY KEY, service TEXT, taken INTEGER DEFAULT 0, body BLOB)")
    db.execute("CREATE INDEX by_service ON queue (service, taken, id)")
    body = json.dumps(DATA).encode()
    with measured(number) as publishing:
        for _ in range(number):
            db.execute("BEGIN IMMEDIATE")
            for service in ("a", "b"):
                db.execute("INSERT INTO queue (service, body) VALUES (?, ?)", (service, body))
            db.execute("COMMIT")
    with measured(number) as consuming:
        for _ in range(number):
            db.execute("BEGIN IMMEDIATE")
            query = "SELECT id, body FROM queue WHERE service = 'a' AND taken = 0 ORDER BY id LIMIT 1"
            row, _ = db.execute(query).fetchone()
            db.execute("UPDATE queue SET taken = 1 WHERE id = ?", (row,))
            db.execute("COMMIT")
            db.execute("DELETE FROM queue WHERE id = ?", (row,))
    db.close()
    return publishing, consuming


async def _fill(bus: Bus, service: Service, backlog: int) -> None:
    missing = backlog - (await bus.stats(service)).ready
    while missing > 0:
        await bus.publish_many([Event("order.created", DATA) for _ in range(min(missing, 5000))])
        missing -= 5000


async def _claim(consumer: Consumer, number: int) -> Figure:
    """Claim and acknowledge in batches of 256."""
    taken = 0
    with measured(number) as figure:
        while taken < number:
            deliveries = await consumer.receive(256, 1.0)
            await consumer.settle([(delivery, ACK) for delivery in deliveries])
            taken += len(deliveries)
    figure.events = taken
    return figure


async def _backlogs(folder: Path, rounds: int = 15) -> tuple[Figure, Figure]:
    """Claim rates with 10 thousand and with 1 million waiting, round by round beside each other: the best of each.

    The best, because what slows a round down on a shared machine is somebody else.
    """
    service = Service("bench-backlog")
    async with AsyncExitStack() as stack:
        consumers = []
        for backlog in (10_000, 1_000_000):
            bus = await stack.enter_async_context(Bus(f"sqlite:///{folder}/{backlog}.db", source="bench-api"))
            await bus.provision(service)
            await _fill(bus, service, backlog)
            consumer = await stack.enter_async_context(bus.adapter.consume(service.subscription()))
            consumers.append((bus, consumer, backlog, list[Figure]()))
        for _ in range(rounds):
            for bus, consumer, backlog, figures in consumers:
                figures.append(await _claim(consumer, 2_500))
                await _fill(bus, service, backlog)
    small, large = (max(figures, key=lambda figure: figure.rate) for *_, figures in consumers)
    return small, large


def run() -> bool:
    print("sqlite: WAL, synchronous FULL, publish to 2 services, body of 250 bytes")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain_publish, plain_consume = _plain_loop(folder, 4_000)
        services = Service("bench-a", concurrency=64), Service("bench-b")
        publish, consume, singly = asyncio.run(figures(f"sqlite:///{folder}/bus.db", *services, number=60_000))
        show("plain loop: publish", plain_publish)
        show("publish_many, 500 at a time", publish)
        show("publish, 64 callers at once", singly)
        show("plain loop: consume", plain_consume)
        show("consume, handle, settle", consume)
        small, large = asyncio.run(_backlogs(folder))
        show("claim + settle by 256, 10 thousand waiting", small)
        show("claim + settle by 256, 1 million waiting", large)
    results = [
        goal("publish_many against the plain loop", publish.rate / plain_publish.rate, 8),
        goal("consume+settle against the plain loop", consume.rate / plain_consume.rate, 8),
        goal("claim rate at 1 million against 10 thousand", large.rate / small.rate, 0.8),
    ]
    return all(results)
