"""Order under faults: two replicas, one call in five fails, one of them is killed again and again; no key inverted.

10,000 events over 50 keys in `make faults`; a small part of that in every test run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from eventbus import Bus, Event
from tests.brokers import kafka, rabbit, redis
from tests.faults.actor import ledger
from tests.faults.crew import Crew
from tests.faults.journal import Journal, read

LONG = "EVENTBUS_FAULT_SECONDS" in os.environ
EVENTS, KEYS, WITHIN = (10_000 if LONG else 600), 50, 240.0


def inversions(records: Iterable[list[object]]) -> tuple[int, int]:
    """How many first completions came after a later one of their key, and how many were completed in all."""
    done: dict[object, list[int]] = defaultdict(list)
    seen: set[tuple[object, object]] = set()
    for kind, key, number, *_ in records:
        if kind == "done" and (key, number) not in seen:
            seen.add((key, number))
            assert isinstance(number, int)
            done[key].append(number)
    wrong = sum(after < before for row in done.values() for before, after in itertools.pairwise(row))
    return wrong, len(seen)


def test_the_checker_sees_an_inversion() -> None:
    """Out of order is seen; a second completion of something that was done already is none."""
    assert inversions([["done", "k", 1], ["done", "k", 3], ["done", "k", 2]]) == (1, 3)
    assert inversions([["done", "k", 1], ["done", "k", 2], ["done", "k", 1], ["done", "j", 0]]) == (0, 3)


@pytest.mark.parametrize("kind", ["sqlite", "redis", "rabbit-classic", "rabbit-quorum", "kafka"])
async def test_no_key_is_handled_out_of_order(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails and whoever dies: per key the first completions are in the order of publishing, none is lost."""
    monkeypatch.setenv("FAULT_LEDGER", f"t{secrets.token_hex(4)}-ledger")  # the brokers are everybody's
    if kind == "sqlite":
        await run(f"sqlite:///{tmp_path}/bus.db", {"sqlite": {"lease": "1s"}}, tmp_path)
    elif kind == "redis":
        await run(redis.shared_url(), {"redis": {"lease": "1s"}}, tmp_path)
    elif kind == "kafka":
        settings: dict[str, object] = {"partitions": 4, "retry_partitions": 1, "session_timeout": "3s"}
        await run(kafka.shared_url(), {"kafka": settings}, tmp_path, kills=6 if LONG else 1)
    else:
        queue_type = kind.removeprefix("rabbit-")
        await run(rabbit.shared_url(), {"rabbit": {"queue_type": queue_type}}, tmp_path)


async def run(url: str, settings: dict[str, dict[str, object]], folder: Path, kills: int = 6 if LONG else 2) -> None:
    journal = folder / "journal"
    service = ledger(Journal(str(journal)))
    crew = Crew(url, journal, settings, seed=int(os.environ.get("EVENTBUS_FAULT_SEED", "7")))
    deadline = time.monotonic() + WITHIN
    async with Bus(url, prefix=service.prefix, settings=settings) as bus:
        await bus.provision(service)
        for start in range(0, EVENTS, 500):
            numbers = range(start, min(start + 500, EVENTS))
            await bus.publish_many([Event("entry.made", n, key=f"k{n % KEYS}") for n in numbers])
        try:
            for name in ("consumer-1", "consumer-2"):
                crew.start(name, "in-order")
            for number in range(kills):
                share = EVENTS * (number + 1) // (kills + 2)
                while inversions(read(journal))[1] < share:
                    assert time.monotonic() < deadline, f"only {inversions(read(journal))[1]} of {share} were done"
                    await asyncio.sleep(0.05)
                victim = f"consumer-{number % 2 + 1}"
                crew.kill(victim)
                crew.start(victim, "in-order")
            while True:
                done = inversions(read(journal))[1]
                if done + await bus.dead_letters(service).count() >= EVENTS and crew.up():
                    break
                assert time.monotonic() < deadline, f"not done in time: {done}, {await bus.stats(service)}"
                await asyncio.sleep(0.1)
            assert [crew.stop(name) for name in ("consumer-1", "consumer-2")] == [0, 0]
        finally:
            crew.dismiss()
        stats = await bus.stats(service)
        assert (stats.ready, stats.inflight, stats.delayed) == (0, 0, 0)
        parked = await bus.dead_letters(service).count()
        await bus.dead_letters(service).purge()
        await bus.unsubscribe(service)
    wrong, done = inversions(read(journal))
    failed = sum(record[0] == "failed" for record in read(journal))
    print(f"\n{url.partition(':')[0]}: {EVENTS} events, {KEYS} keys, {failed} failures, {crew.kills} kills: ", end="")
    print(f"done {done}, parked {parked}, inversions = {wrong}")
    assert wrong == 0
    assert done + parked >= EVENTS
