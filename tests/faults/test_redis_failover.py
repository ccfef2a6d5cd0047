"""Failover by Sentinel: consumers and publishers find the new master; what asynchronous replication lost is told."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from eventbus import Bus, Event
from tests.brokers import redis
from tests.brokers.redis import RedisServer
from tests.faults.actor import MAX_RETRIES, SERVICES
from tests.faults.crew import Crew, parked_ids, provision, wait_until_done
from tests.faults.journal import check, read

SETTINGS: dict[str, dict[str, object]] = {"redis": {"lease": "1s", "timeout": "2s"}}


class Sentinels:
    """Three of them, watching one master."""

    def __init__(self, stack: ExitStack, folder: Path, master: RedisServer) -> None:
        self.ports = [redis.claim_port() for _ in range(3)]
        for port in self.ports:
            home = folder / f"sentinel-{port}"
            home.mkdir()
            config = home / "sentinel.conf"
            config.write_text(
                f"sentinel monitor mymaster 127.0.0.1 {master.port} 2\n"
                "sentinel down-after-milliseconds mymaster 1000\n"
                "sentinel failover-timeout mymaster 5000\n"
            )
            server = RedisServer(home, "--sentinel", port=port, config=config)
            stack.callback(server.stop)
            server.start()

    @property
    def url(self) -> str:
        return f"redis://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/0?sentinel=mymaster"

    async def complete(self) -> bool:
        """Whether they know the replica and each other."""
        client = Redis(host="127.0.0.1", port=self.ports[0], protocol=2)
        try:
            state = (await client.sentinel_masters())["mymaster"]
            return int(state["num-slaves"]) >= 1 and int(state["num-other-sentinels"]) >= 2
        finally:
            await client.aclose()


async def test_a_failover_by_sentinel_goes_on_and_its_loss_is_told(tmp_path: Path) -> None:
    """The master is killed under load: both sides go on at the new one; every event is accounted for, or counted."""
    redis.require()
    if shutil.which("redis-sentinel") is None:
        pytest.skip("no redis-sentinel here: apt-get install redis-sentinel")
    with ExitStack() as stack:
        master = stack.enter_context(redis.server("--repl-diskless-sync-delay", "0"))
        replica = stack.enter_context(redis.server("--replicaof", f"127.0.0.1 {master.port}"))
        guards = Sentinels(stack, tmp_path, master)
        await _until(guards.complete, "Sentinel knows the replica and the other Sentinels")
        await _until(lambda: _synced(replica), "the replica has what the master has")
        url, journal = guards.url, tmp_path / "journal"
        await provision(url, SETTINGS, journal)
        crew = Crew(url, journal, SETTINGS, 1)
        accepted: list[str] = []
        tried: list[str] = []
        failed_over = 0.0
        try:
            for name in ("consumer-1", "consumer-2"):
                crew.start(name, "consume")
            await _until(lambda: _up(crew), "both consumers receive")
            async with Bus(url, source="wms-api", settings=SETTINGS) as bus:
                for turn in range(100):
                    events = [Event("order.created", id=f"e-{turn}-{n}") for n in range(50)]
                    tried += [event.id for event in events]
                    if turn == 35:
                        await _until(lambda: _caught_up(master, replica), "the replica has all of the first turns")
                    if turn == 40:
                        killed = time.monotonic()
                        master.kill()
                    deadline = time.monotonic() + 60
                    while True:
                        try:
                            await bus.publish_many(events)
                            break
                        except Exception:  # noqa: BLE001 - there is no master just now
                            assert time.monotonic() < deadline, "no new master was found"
                            await asyncio.sleep(0.1)
                    if turn == 40:
                        failed_over = time.monotonic() - killed
                    accepted += [event.id for event in events]
                    await asyncio.sleep(0.03)
            await wait_until_done(url, SETTINGS, within=60)
            assert [crew.stop(name) for name in ("consumer-1", "consumer-2")] == [0, 0]
        finally:
            crew.dismiss()
        parked, _ = await parked_ids(url, SETTINGS)
        records = [*read(journal), ["sending", tried], ["accepted", accepted]]
        found = check(records, parked, dict.fromkeys(SERVICES, MAX_RETRIES + 1))
        print(f"\nfailover in {failed_over:.1f} s: {found}")
        assert found.accepted == 5000
        assert (found.early, found.strangers, found.over_limit) == ([], [], [])
        # Redis replicates without waiting: only the batches right before the kill can be missing.
        lost = {row.split()[1] for row in found.lost}
        assert lost <= {f"e-{turn}-{n}" for turn in range(35, 41) for n in range(50)}


async def _up(crew: Crew) -> bool:
    return crew.up()


async def _synced(replica: RedisServer) -> bool:
    client = Redis.from_url(replica.url)
    try:
        return bool((await client.info("replication"))["master_link_status"] == "up")
    finally:
        await client.aclose()


async def _caught_up(master: RedisServer, replica: RedisServer) -> bool:
    """Whether the replica has all that the master had when it was asked."""
    offsets = []
    for server in (master, replica):
        client = Redis.from_url(server.url)
        try:
            offsets.append(int((await client.info("replication"))["master_repl_offset"]))
        finally:
            await client.aclose()
    return offsets[1] >= offsets[0]


async def _until(condition: Callable[[], Awaitable[bool]], what: str, within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not await condition():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        await asyncio.sleep(0.1)
