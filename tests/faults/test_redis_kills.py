"""Faults on Redis: consumers killed and frozen, the server killed, cut off, wiped, filled; nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from eventbus import Bus, Event, PublishError
from tests.brokers import redis
from tests.brokers.redis import RedisServer
from tests.faults.actor import MAX_RETRIES, SERVICES
from tests.faults.crew import Crew, parked_ids, provision, wait_until_done
from tests.faults.journal import Findings, check, read

SETTINGS: dict[str, dict[str, object]] = {"redis": {"lease": "1s", "timeout": "2s"}}
FEW = int(os.environ.get("EVENTBUS_FAULT_MESSAGES") or ("5000" if "EVENTBUS_FAULT_SECONDS" in os.environ else "1000"))
"""How many events: a thousand in every test run, five times as many by `make faults`."""
WORST_MOMENTS = (
    "redis.settle.before:0.01",
    "redis.settle.after:0.01",
    "redis.publish.before:0.01",
    "redis.publish.after:0.01",
)


class Scene:
    """A server of its own, two consumers, and one publisher in this process that writes down what was accepted."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server, self.url, self.path = server, server.url, folder / "journal"
        self.crew = Crew(self.url, self.path, SETTINGS, int(os.environ.get("EVENTBUS_FAULT_SEED", "1")))
        self.accepted: list[str] = []
        self.tried: list[str] = []

    def done(self) -> int:
        return sum(1 for record in read(self.path) if record[0] == "done")

    async def publish(self, number: int, pause: float = 0.0) -> None:
        """Publish events, over and over until each is accepted; an unknown fate may double one."""
        async with Bus(self.url, source="wms-api", settings=SETTINGS) as bus:
            for _ in range(0, number, 50):
                events = [Event("order.created", {"n": n}, id=f"e-{len(self.tried) + n}") for n in range(50)]
                self.tried += [event.id for event in events]
                deadline = time.monotonic() + 60
                while True:
                    try:
                        await bus.publish_many(events)
                        break
                    except Exception:  # noqa: BLE001 - the server is down, full or frozen: that is the test
                        assert time.monotonic() < deadline, "publishing never worked again"
                        await asyncio.sleep(0.05)
                self.accepted += [event.id for event in events]
                await asyncio.sleep(pause)

    async def consuming(self) -> None:
        """Wait until both consumers read: a server that is not there at their start is another story."""
        admin = Redis.from_url(self.url)
        try:
            deadline = time.monotonic() + 30
            while sum(row["cmd"] == "xreadgroup" for row in await admin.client_list()) < 2 * len(SERVICES):
                assert time.monotonic() < deadline, "the consumers did not start"
                await asyncio.sleep(0.02)
        finally:
            await admin.aclose()

    async def until(self, condition: Callable[[], bool], what: str, within: float = 60.0) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
            await asyncio.sleep(0.05)

    async def finish(self) -> Findings:
        """Wait until all is settled, stop the consumers, and let the checker judge."""
        await wait_until_done(self.url, SETTINGS, within=120)
        assert [self.crew.stop(name) for name in ("consumer-1", "consumer-2")] == [0, 0]
        parked, reasons = await parked_ids(self.url, SETTINGS)
        records = [*read(self.path), ["sending", self.tried], ["accepted", self.accepted]]
        found = check(records, parked, dict.fromkeys(SERVICES, MAX_RETRIES + 1))
        print(f"\n{found}; parked for {dict(reasons)}")
        return found


@asynccontextmanager
async def scene(folder: Path, *arguments: str) -> AsyncIterator[Scene]:
    with redis.server(*arguments) as server:
        here = Scene(server, folder)
        await provision(here.url, SETTINGS, here.path)
        try:
            for name in ("consumer-1", "consumer-2"):
                here.crew.start(name, "consume")
            await here.consuming()
            yield here
        finally:
            here.crew.dismiss()


def clean(found: Findings) -> None:
    """Nothing lost, nothing early, nothing at a stranger's, nothing over the limit of attempts."""
    assert (found.lost, found.early, found.strangers, found.over_limit) == ([], [], [], [])


async def test_killed_consumers_lose_nothing(tmp_path: Path) -> None:
    """Consumers die at random and around their settlements; every event is handled or parked at both services."""
    async with scene(tmp_path) as here:
        publishing = asyncio.create_task(here.publish(FEW, pause=0.1))
        turns = 0
        while not publishing.done() or turns < 8:
            await asyncio.sleep(here.crew.random.uniform(0.3, 0.9))
            victim = here.crew.random.choice(["consumer-1", "consumer-2"])
            here.crew.kill(victim)
            turns += 1
            env = {"EVENTBUS_FAILPOINT": WORST_MOMENTS[turns // 2 % 2]} if turns % 2 else {}
            here.crew.start(victim, "consume", **env)
        await publishing
        for name in ("consumer-1", "consumer-2"):  # the last ones carry no failpoints
            here.crew.kill(name)
            here.crew.start(name, "consume")
        found = await here.finish()
    clean(found)
    assert found.accepted == FEW
    assert here.crew.kills > 6


async def test_a_frozen_consumer_settles_nothing_twice(tmp_path: Path) -> None:
    """SIGSTOP past the lease: others take over, and the zombie's late settlements are refused, not carried out."""
    async with scene(tmp_path) as here:
        publishing = asyncio.create_task(here.publish(FEW, pause=0.1))
        for _ in range(3):
            before = here.done()
            await here.until(lambda at=before: here.done() > at + 50 or publishing.done(), "work")  # type: ignore[misc]
            zombie = here.crew._members["consumer-1"]
            zombie.send_signal(signal.SIGSTOP)
            try:
                frozen = time.monotonic()
                await here.until(lambda since=frozen: time.monotonic() > since + 2.5, "two leases")  # type: ignore[misc]
            finally:
                zombie.send_signal(signal.SIGCONT)
        await publishing
        found = await here.finish()
        parked, _ = await parked_ids(here.url, SETTINGS)
    clean(found)
    for name in SERVICES:  # a zombie that settled would have parked its letters a second time
        assert [id for id, number in parked[name].items() if number > 1] == []


async def test_a_killed_server_loses_nothing(tmp_path: Path) -> None:
    """SIGKILL of a server with AOF, three times under load: what was accepted is there after the restart."""
    async with scene(tmp_path) as here:
        publishing = asyncio.create_task(here.publish(FEW, pause=0.1))
        for _ in range(3):
            goal = len(here.accepted) + 300
            await here.until(lambda at=goal: len(here.accepted) >= at or publishing.done(), "publishing")  # type: ignore[misc]
            here.server.kill()
            here.server.start()
        await publishing
        found = await here.finish()
    clean(found)
    assert found.accepted == FEW


async def test_a_cut_connection_loses_nothing(tmp_path: Path) -> None:
    """CLIENT KILL of every connection, again and again, and a server that freezes past the deadline of calls."""
    async with scene(tmp_path) as here:
        publishing = asyncio.create_task(here.publish(FEW, pause=0.1))
        await here.until(lambda: bool(here.accepted), "the publisher is connected")
        admin = Redis.from_url(here.url)
        try:
            while not publishing.done():
                await admin.execute_command("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
                await asyncio.sleep(0.3)
            here.server.pause()
            await asyncio.sleep(3)  # longer than the deadline of a call, on purpose
            here.server.resume()
        finally:
            await admin.aclose()
        await publishing
        found = await here.finish()
    clean(found)
    assert found.accepted == FEW


async def test_a_wiped_group_is_made_again_from_where_it_was(tmp_path: Path) -> None:
    """XGROUP DESTROY under load: the group goes on from the stored id; nothing that was accepted is skipped."""
    async with scene(tmp_path) as here:
        publishing = asyncio.create_task(here.publish(FEW, pause=0.1))
        admin = Redis.from_url(here.url)
        try:
            for service in SERVICES * 2:
                goal = len(here.accepted) + 200
                await here.until(lambda at=goal: len(here.accepted) >= at or publishing.done(), "publishing")  # type: ignore[misc]
                await admin.xgroup_destroy("{wms}:main", service)
        finally:
            await admin.aclose()
        await publishing
        found = await here.finish()
    clean(found)


async def test_after_a_flush_everything_accepted_is_delivered(tmp_path: Path) -> None:
    """FLUSHALL takes what was there, groups and all; what is accepted from then on reaches the running services."""
    async with scene(tmp_path) as here:
        await here.publish(500)
        await here.until(lambda: here.done() > 100, "consumers work")
        admin = Redis.from_url(here.url)
        async with Bus(here.url, source="wms-api", settings=SETTINGS) as bus:
            await bus.publish("order.created", id="warm")  # a publisher that has seen subscribers
            try:
                await admin.flushall()
            finally:
                await admin.aclose()
            after = [f"after-{n}" for n in range(FEW)]
            for start in range(0, len(after), 100):
                await bus.publish_many([Event("order.created", id=id) for id in after[start : start + 100]])
        here.accepted, here.tried = after, [*here.tried, "warm", *after]

        def back() -> bool:
            return {row[1] for row in read(here.path) if row[0] == "done" and row[2] in after} == set(SERVICES)

        await here.until(back, "the services are subscribed again")
        found = await here.finish()
    clean(found)
    assert found.accepted == FEW


async def test_a_full_memory_refuses_and_loses_nothing(tmp_path: Path) -> None:
    """Memory full: publishing raises, acknowledging goes on, what cannot be copied is kept; then all is done."""
    async with scene(tmp_path) as here:
        admin = Redis.from_url(here.url)
        publishing = asyncio.create_task(here.publish(FEW, pause=0.1))
        refused = 0
        try:
            for _ in range(3):
                goal = here.done() + 100
                await here.until(lambda at=goal: here.done() >= at or publishing.done(), "work")  # type: ignore[misc]
                await admin.config_set("maxmemory", "1mb")
                async with Bus(here.url, source="wms-api", settings=SETTINGS) as bus:
                    with pytest.raises(PublishError, match="memory is full"):
                        await bus.publish("order.created")
                    refused += 1
                await asyncio.sleep(0.5)
                await admin.config_set("maxmemory", "512mb")
        finally:
            await admin.config_set("maxmemory", "512mb")
            await admin.aclose()
        await publishing
        found = await here.finish()
    found.strangers = [row for row in found.strangers if " e-" in row]
    clean(found)
    assert refused == 3
