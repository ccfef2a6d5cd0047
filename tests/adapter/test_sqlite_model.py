"""Random lives: whatever happens in whatever order, every service gets every event, and the file ends empty."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from eventbus import headers
from eventbus.adapter import Consumer, Redrive, Subscription
from eventbus.embedded.sqlite import SqliteAdapter
from eventbus.event import Event
from eventbus.facets import FACETS, facets
from eventbus.settlement import ACK, RELEASE, Delivery, Requeue, Retry, Settlement
from tests.adapter.sqlite_support import LETTERS, OTHER, SUB, freeze, opened, parking, receive, sql


class Life:
    """Two services with replicas that come, go, stand still and settle at random."""

    def __init__(self, seed: int, adapters: list[SqliteAdapter]) -> None:
        self.random = random.Random(seed)
        self.adapters = adapters
        self.bodies: dict[str, bytes] = {}
        self.finished: dict[str, set[str]] = {SUB.service: set(), OTHER.service: set()}
        self.consumers: list[tuple[Consumer, list[Delivery]]] = []

    async def step(self) -> None:
        chance = self.random.random()
        if chance < 0.25:
            await self.publish()
        elif chance < 0.3 or not self.consumers:
            await self.arrive()
        elif chance < 0.34:
            consumer, held = self.consumers.pop(self.random.randrange(len(self.consumers)))
            self.random.choice((freeze, lambda consumer: None))(consumer)
            await consumer.aclose()
        elif chance < 0.4:
            await self.move_letters()
        elif chance < 0.7:
            consumer, held = self.random.choice(self.consumers)
            held += await consumer.receive(self.random.randint(1, 40), 0.0)
        else:
            await self.settle(*self.random.choice(self.consumers))

    async def publish(self) -> None:
        size = self.random.choice
        events = [
            Event(size("no"), self.random.randbytes(size((0, 10, 5000))), tenant=size((None, "a", "b")))
            for _ in range(10)
        ]
        for result in await self.random.choice(self.adapters).publish("wms", events):
            assert result.status == "stored"
        self.bodies |= {event.id: event.body for event in events}

    async def arrive(self) -> None:
        subscription: Subscription = self.random.choice((SUB, OTHER, LETTERS))
        consumer = await self.random.choice(self.adapters).consume(subscription).__aenter__()
        self.consumers.append((consumer, []))

    async def move_letters(self) -> None:
        service = self.random.choice(list(self.finished))
        box = self.random.choice(self.adapters).parking(service, "wms")
        page = await box.browse(None, 5)
        if self.random.random() < 0.1:
            for letter in page.letters:
                self.finished[service].add(letter.event.id)
            await box.purge([letter.address for letter in page.letters])
        else:
            await box.redrive([Redrive(letter.address, {headers.REDRIVEN_COUNT: 1}) for letter in page.letters])

    async def count(self) -> None:
        """The index of the dead letters says what a full scan says."""
        for service in self.finished:
            box = self.adapters[0].parking(service, "wms")
            letters = (await box.browse(None, 10_000)).letters
            assert await box.depth() == len(letters)
            for facet in FACETS:
                scanned = Counter(facets(letter.event, letter.headers)[facet] for letter in letters)
                assert await box.tally(facet) == scanned

    async def settle(self, consumer: Consumer, held: list[Delivery]) -> None:
        self.random.shuffle(held)
        number = self.random.randint(0, len(held))
        chosen, held[:] = held[:number], held[number:]
        items = [(delivery, self.verdict(delivery)) for delivery in chosen]
        for (delivery, verdict), answer in zip(items, await consumer.settle(items), strict=True):
            assert answer in ("done", "lost")
            assert delivery.event.body == self.bodies[delivery.event.id]
            if answer == "done" and verdict is ACK:
                self.finish(delivery)

    def verdict(self, delivery: Delivery) -> Settlement:
        due = time.time() + self.random.random() / 20
        later = (Retry(due, 0.1, {headers.RETRIES: 1}), Requeue(due, 0.1, {headers.REQUEUES: 1}), RELEASE)
        return self.random.choice(
            (ACK, ACK, parking(delivery, self.random.choice(("no order 7", "no order 8", "gone"))), *later)
        )

    def finish(self, delivery: Delivery) -> None:
        # An acknowledged event is never seen again by its service: only one settlement can end it.
        assert delivery.event.id not in self.finished[delivery.service]
        self.finished[delivery.service].add(delivery.event.id)

    async def end(self) -> None:
        """Let all die, re-drive everything, and handle what is left."""
        for consumer, _ in self.consumers:
            await consumer.aclose()
        adapter = self.adapters[0]
        for subscription in (SUB, OTHER):
            box = adapter.parking(subscription.service, "wms")
            while (page := await box.browse(None, 500)).letters:
                await box.redrive([Redrive(letter.address, {}) for letter in page.letters])
            left = self.bodies.keys() - self.finished[subscription.service]
            async with adapter.consume(subscription) as consumer:
                for delivery in await receive(consumer, len(left)):
                    assert await consumer.settle([(delivery, ACK)]) == ["done"]
                    self.finish(delivery)
                assert await consumer.receive(1, 0.0) == []
            assert self.finished[subscription.service] == self.bodies.keys()


@pytest.mark.parametrize("seed", range(8))
async def test_every_service_gets_every_event(tmp_path: Path, seed: int) -> None:
    """300 random steps of two adapters on one file lose nothing, end nothing twice, and leave nothing behind.

    After each of them the index of the dead letters equals a full scan.
    """
    async with opened(tmp_path, SUB, OTHER, lease=0.2) as one, opened(tmp_path, lease=0.2) as two:
        life = Life(seed, [one, two])
        for _ in range(300):
            await life.step()
            await life.count()
        await life.end()
        await life.count()
    assert sql(tmp_path, "SELECT count(*) FROM events") == [(0,)]
    for table in ("inflight", "dlq", "tally"):
        assert sql(tmp_path, f"SELECT count(*) FROM {table}") == [(0,)]
