"""A handler that kills its process for one event, on every broker with processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from eventbus import Bus, Event
from tests.brokers import kafka, rabbit, redis
from tests.faults.actor import SERVICES
from tests.faults.crew import Crew, Settings, provision
from tests.faults.journal import read

QUICK_GROUPS: dict[str, object] = {
    "partitions": 1,
    "retry_partitions": 1,
    "dlq_partitions": 1,
    "session_timeout": "1s",
}


def bus_of(kind: str, folder: Path) -> tuple[str, Settings]:
    if kind == "sqlite":
        return f"sqlite:///{folder}/bus.db", {"sqlite": {"lease": "1s"}}
    if kind == "redis":
        return redis.shared_url(), {"redis": {"lease": "1s"}}
    if kind == "kafka":
        return kafka.shared_url(), {"kafka": QUICK_GROUPS}
    return rabbit.shared_url(), {}  # quorum queues: see test_rabbit_faults.py


async def unfinished(bus: Bus, journal: Path, ids: set[str]) -> set[str]:
    """What some service has neither completed nor parked."""
    found: set[str] = set()
    for name in SERVICES:
        done = {record[2] for record in read(journal) if record[:2] == ["done", name]}
        left = ids - done
        if len(left) > await bus.dead_letters(name).count():
            found |= left
        elif left:
            found |= left - {letter.id async for letter in bus.dead_letters(name).all()}
    return found


@pytest.mark.parametrize("kind", ["sqlite", "redis", "rabbit", "kafka"])
async def test_a_poisoned_event_is_parked_alone(kind: str, tmp_path: Path) -> None:
    """The poisoned event is parked as crash-loop, none of its neighbours is, and nothing is lost."""
    url, settings = bus_of(kind, tmp_path)
    journal = tmp_path / "journal"
    await provision(url, settings, journal)
    crew = Crew(url, journal, settings, 1)
    async with Bus(url, source="wms-api", settings=settings) as bus:
        events = [Event("order.created", {"n": n}, id=f"n-{n}") for n in range(40)]
        events.insert(20, Event("order.poison", id="poison"))
        await bus.publish_many(events)
        ids = {event.id for event in events}
        deadline = time.monotonic() + 120
        try:
            crew.start("consumer", "consume")
            while left := await unfinished(bus, journal, ids):
                assert time.monotonic() < deadline, f"not handled and not parked: {left}"
                if not crew.running("consumer"):
                    crew.start("consumer", "consume")
                await asyncio.sleep(0.1)
            assert crew.stop("consumer") == 0
        finally:
            crew.dismiss()
        for name in SERVICES:
            letters = [letter async for letter in bus.dead_letters(name).all("reason=crash-loop")]
            # Twice, if the other service's poison killed the process before the first copy was settled.
            assert {letter.id for letter in letters} == {"poison"}
            calls = [record for record in read(journal) if record[:3] == ["call", name, "poison"]]
            assert len(calls) <= 4  # once among others, then at most three times alone
        for name in SERVICES:  # the brokers are everybody's
            await bus.dead_letters(name).purge()
            await bus.unsubscribe(name)
