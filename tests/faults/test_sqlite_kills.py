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
