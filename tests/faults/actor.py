"""A process of a fault run: `python -m tests.faults.actor publish|consume|in-order URL JOURNAL NAME`. To be killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import zlib

from eventbus import Bus, Delivery, Event, PublishError, RetryPolicy, Service, requeue
from tests.faults.journal import Journal

DELAY = 0.2
MAX_RETRIES = 3
POISONED = 66
"""The exit code of a process that met a poisoned event."""
SERVICES = ("wms-stock", "wms-billing")


def services(journal: Journal) -> list[Service]:
    return [_service(name, journal) for name in SERVICES]


def _service(name: str, journal: Journal) -> Service:
    service = Service(
        name,
        concurrency=16,
        retry=RetryPolicy(max_retries=MAX_RETRIES, delay=DELAY),
        prefetch=64,
        max_crashes=int(os.environ.get("FAULT_MAX_CRASHES", "3")),
    )

    @service.on("order.#")
    async def handle(event: Event, delivery: Delivery) -> object:
        journal.write("call", delivery.service, event.id, delivery.attempt, time.time())
        if event.type == "order.poison":
            os._exit(POISONED)
        await asyncio.sleep(float(os.environ.get("FAULT_SLOW", "0")) if event.type == "order.slow" else 0.001)
        fate = zlib.crc32(f"{name}{event.id}".encode()) % 20
        if fate == 0 or (fate in (1, 2, 3) and delivery.attempt <= fate % 3 + 1):
            # fate 0 fails for ever and is parked; 1, 2 and 3 recover after one, two or three failures
            journal.write("failed", delivery.service, event.id, delivery.attempt, time.time(), DELAY)
            return 500 if fate else 503
        if fate == 4 and delivery.history.requeues == 0:
            return requeue(after=0.1)
        journal.write("done", delivery.service, event.id)
        return None

    return service


def ledger(journal: Journal) -> Service:
    """A service that keeps the order of keys, and fails one call in five."""
    name = os.environ.get("FAULT_LEDGER", "wms-ledger")
    retry = RetryPolicy(max_retries=6, delay=0.02)
    service = Service(name, concurrency=32, prefetch=128, ordering="key", retry=retry)
    chance = random.Random()

    @service.on("#")
    async def handle(event: Event, delivery: Delivery) -> int:
        await asyncio.sleep(0.0005)
        if chance.random() < 0.2:
            journal.write("failed", event.key, event.data, delivery.attempt, os.getpid(), time.time())
            return 500
        journal.write("done", event.key, event.data, delivery.attempt, os.getpid(), time.time())
        return 200

    return service


async def keep_order(url: str, journal: Journal) -> int:
    async with Bus(url, settings=_settings()) as bus:
        # Written at the first wait inside run: from there on a signal is a request to stop.
        asyncio.get_running_loop().call_soon(journal.write, "up", os.getpid(), 0)
        return await bus.run(ledger(journal))


def _settings() -> dict[str, dict[str, object]]:
    return json.loads(os.environ.get("FAULT_SETTINGS", "{}"))


async def consume(url: str, journal: Journal) -> int:
    async with Bus(url, settings=_settings()) as bus:
        announcing = asyncio.ensure_future(_announce(bus, journal))
        try:
            return await bus.run(*services(journal))
        finally:
            announcing.cancel()


async def _announce(bus: Bus, journal: Journal) -> None:
    """Say so when every service receives: a broker that goes before that is an error at start, as it should be."""
    while len(bus.health) < len(SERVICES) or not all(health.receiving for health in bus.health.values()):
        await asyncio.sleep(0.01)
    journal.write("up", os.getpid(), 0)


async def publish(url: str, journal: Journal, name: str) -> int:
    async with Bus(url, source="wms-api", settings=_settings()) as bus:
        number = accepted = 0
        enough = float(os.environ.get("FAULT_EVENTS", "inf"))
        while True:
            if accepted >= enough:
                await asyncio.sleep(3600)
            events = [Event("order.created", {"n": number + k}, id=f"{name}-{number + k}") for k in range(10)]
            number += len(events)
            ids = [event.id for event in events]
            journal.write("sending", ids)
            try:
                await bus.publish_many(events)
            except PublishError as error:
                stored = [id for id, result in zip(ids, error.results, strict=True) if result.status == "stored"]
                journal.write("accepted", stored)
                accepted += len(stored)
            else:
                journal.write("accepted", ids)
                accepted += len(ids)
            await asyncio.sleep(float(os.environ.get("FAULT_PAUSE", "0.02")))


def main() -> int:
    role, url, path, name = sys.argv[1:5]
    journal = Journal(path)
    if role == "consume":
        return 1 if asyncio.run(consume(url, journal)) else 0
    if role == "in-order":
        return 1 if asyncio.run(keep_order(url, journal)) else 0
    return asyncio.run(publish(url, journal, name))


if __name__ == "__main__":
    sys.exit(main())
