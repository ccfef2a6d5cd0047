"""SIGKILL on SQLite: publishers and consumers die at random, and at the worst moments; nothing is lost."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.faults.actor import MAX_RETRIES, SERVICES
from tests.faults.crew import Crew, parked_ids, provision, wait_until_done
from tests.faults.journal import check, read

SETTINGS: dict[str, dict[str, object]] = {"sqlite": {"lease": "1s"}}
WORST_MOMENTS = (
    "sqlite.publish.before-commit:0.01",
    "sqlite.publish.after-commit:0.01",
    "sqlite.settle.before-commit:0.005",
    "sqlite.settle.after-commit:0.005",
    "sqlite.claim.after-commit:0.005",
)


async def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    """Every accepted event is handled or parked at both services, never early, never over the limit of attempts."""
    seconds = float(os.environ.get("EVENTBUS_FAULT_SECONDS", "30"))
    url, journal = f"sqlite:///{tmp_path}/bus.db", tmp_path / "journal"
    await provision(url, SETTINGS, journal)
    seed = int(os.environ.get("EVENTBUS_FAULT_SEED", str(time.time_ns() % 1_000_000)))
    crew = Crew(url, journal, SETTINGS, seed)
    roles = {"publisher-1": "publish", "publisher-2": "publish", "consumer-1": "consume", "consumer-2": "consume"}
    started = 0

    def start(name: str) -> None:
        nonlocal started
        started += 1
        # Every other one also carries a failpoint: it kills itself between copy and settle.
        env = {"EVENTBUS_FAILPOINT": WORST_MOMENTS[started // 2 % len(WORST_MOMENTS)]} if started % 2 else {}
        crew.start(name, roles[name], **env)

    try:
        for name in roles:
            start(name)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pause = time.monotonic() + crew.random.uniform(0.4, 1.6)
            while time.monotonic() < pause:
                for name in roles:
                    if not crew.running(name):  # its failpoint struck
                        crew.kill(name)
                        start(name)
                time.sleep(0.02)  # noqa: ASYNC251 - nothing else runs in this loop
            victim = crew.random.choice(list(roles))
            crew.kill(victim)
            start(victim)
        for name in ("publisher-1", "publisher-2"):
            crew.kill(name)
        for name in ("consumer-1", "consumer-2"):  # the last ones carry no failpoints
            crew.kill(name)
            crew.start(name, "consume")
        await wait_until_done(url, SETTINGS, within=90)
        assert [crew.stop(name) for name in ("consumer-1", "consumer-2")] == [0, 0]
    finally:
        crew.dismiss()
    parked, reasons = await parked_ids(url, SETTINGS)
    found = check(read(journal), parked, dict.fromkeys(SERVICES, MAX_RETRIES + 1))
    print(f"\nseed {seed}, {crew.kills} kills in {seconds:g} s: {found}; parked for {dict(reasons)}")
    assert found.accepted > 500
    assert found.parked > 0
    assert (found.lost, found.early, found.strangers, found.over_limit) == ([], [], [], [])


async def test_a_poisoned_event_is_parked_alone(tmp_path: Path) -> None:
    """A handler that kills its process for one event: that one is parked as crash-loop, none of its neighbours."""
    from eventbus import Bus, Event

    url, journal = f"sqlite:///{tmp_path}/bus.db", tmp_path / "journal"
    await provision(url, SETTINGS, journal)
    crew = Crew(url, journal, SETTINGS, 1)
    async with Bus(url, source="wms-api", settings=SETTINGS) as bus:
        events = [Event("order.created", {"n": n}, id=f"n-{n}") for n in range(100)]
        events.insert(50, Event("order.poison", id="poison"))
        await bus.publish_many(events)
        deadline = time.monotonic() + 90
        try:
            crew.start("consumer", "consume")
            while any([await bus.dead_letters(name).count("reason=crash-loop") == 0 for name in SERVICES]):
                assert time.monotonic() < deadline, "the poisoned event was not parked"
                if not crew.running("consumer"):
                    crew.start("consumer", "consume")
                time.sleep(0.05)  # noqa: ASYNC251 - nothing else runs in this loop
            await wait_until_done(url, SETTINGS, within=60)
            assert crew.stop("consumer") == 0
        finally:
            crew.dismiss()
        for name in SERVICES:
            letters = [letter async for letter in bus.dead_letters(name).all("reason=crash-loop")]
            assert [letter.id for letter in letters] == ["poison"]
            calls = [record for record in read(journal) if record[:3] == ["call", name, "poison"]]
            assert len(calls) <= 4  # once among others, then at most three times alone
    parked, _ = await parked_ids(url, SETTINGS)
    records = [*read(journal), ["accepted", [event.id for event in events]]]
    found = check(records, parked, dict.fromkeys(SERVICES, MAX_RETRIES + 1))
    assert found.lost == []
