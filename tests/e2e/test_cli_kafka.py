"""`eventbus dlq` where the dead letters are a log: counting what may have gaps, and erasing what was purged."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaProducer

from eventbus import Bus
from tests.adapter.test_kafka_letters import _park
from tests.adapter.test_kafka_log import Place, place

from .conftest import Cli

__all__ = ["place"]


async def _in_the_log(bus: Bus, place: Place) -> list[str]:
    """The ids of all records that the topic of dead letters still has."""
    client = bus.adapter.client  # type: ignore[attr-defined]
    tp = (f"{place.prefix}.dlq.{place.prefix}-stock", 0)
    found = await client.read(await client.begins([tp]), await client.ends([tp]))
    return [dict(record.headers)["ce_id"].decode() for record in found[tp]]


async def test_what_is_purged_with_erase_is_out_of_the_log(place: Place, cli: Cli) -> None:
    """Without it only out of sight; then all that was purged or re-driven before goes too, and the others stay."""
    service = place.service()
    purge = ("dlq", "purge", service.name, "--url", place.url, "--yes")
    async with place.bus() as bus:
        await _park(bus, service, 6)
        letters = bus.dead_letters(service)
        done = await asyncio.to_thread(cli, *purge, "--id", "e1")
        assert (done.returncode, done.stdout) == (0, "1 purged\n")
        assert len(await _in_the_log(bus, place)) == 6
        await letters.redrive(["e4"])
        dry = await asyncio.to_thread(cli, *purge, "--id", "e2", "--erase", "--dry-run")
        assert dry.stdout == "1 would be purged (dry run: nothing was done)\n"
        assert len(await _in_the_log(bus, place)) == 6
        done = await asyncio.to_thread(cli, *purge, "--id", "e2", "--erase")
        assert (done.returncode, done.stdout) == (0, "1 purged, 3 erased from the log\n")
        assert sorted(await _in_the_log(bus, place)) == ["e0", "e3", "e5"]
        assert sorted([letter.id async for letter in letters.all()]) == ["e0", "e3", "e5"]
        done = await asyncio.to_thread(cli, *purge, "--erase", "--json")
        assert (json.loads(done.stdout)["done"], json.loads(done.stdout)["erased"]) == (3, 3)
        assert await _in_the_log(bus, place) == []
        assert await letters.count() == 0


@pytest.mark.parametrize("point", ["between-copy-and-state", "before-cut"])
async def test_who_dies_while_he_erases_loses_no_letter(place: Place, cli: Cli, point: str) -> None:
    """A letter that was being written again stands twice at worst, and whoever erases next gets to the end."""
    service = place.service()
    purge = ("dlq", "purge", service.name, "--url", place.url, "--yes", "--erase")
    async with place.bus() as bus:
        await _park(bus, service, 5)
        letters = bus.dead_letters(service)
        died = await asyncio.to_thread(cli, *purge, "--id", "e3", env={"EVENTBUS_FAILPOINT": f"kafka.erase.{point}"})
        assert died.returncode == -signal.SIGKILL
        left = Counter([letter.id async for letter in letters.all()])
        twice = 2 if point == "between-copy-and-state" else 1
        assert left == {"e0": twice, "e1": twice, "e2": twice, "e4": 1}
        done = await asyncio.to_thread(cli, *purge, "--where", "type=nothing.like.this", timeout=60)
        assert done.returncode == 0
        assert {letter.id async for letter in letters.all()} == set(left)
        assert "e3" not in await _in_the_log(bus, place)


async def test_who_dies_between_the_copies_and_the_word_of_it_loses_no_letter(place: Place, cli: Cli) -> None:
    """The copies are there and the letters still stand: they come twice at worst, once the dead one's claim is over."""
    service = place.service()
    redrive = ("dlq", "redrive", service.name, "--url", place.url)
    async with place.bus() as bus:
        await _park(bus, service, 5)
        died = await asyncio.to_thread(
            cli, *redrive, env={"EVENTBUS_FAILPOINT": "kafka.redrive.between-copy-and-state"}
        )
        assert died.returncode == -signal.SIGKILL
        assert sorted([letter.id async for letter in bus.dead_letters(service).all()]) == ["e0", "e1", "e2", "e3", "e4"]
        assert (await bus.stats(service)).ready == 5


async def test_a_count_of_more_than_is_read_at_a_time_says_that_it_is_an_estimate(place: Place, cli: Cli) -> None:
    """A few large letters: eight megabytes of them are read to see whether every offset has one."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
    producer = AIOKafkaProducer(bootstrap_servers=place.address, acks="all")
    await producer.start()
    try:
        for _ in range(12):
            await producer.send_and_wait(f"{place.prefix}.dlq.{service.name}", bytes(900_000))
    finally:
        await producer.stop()
    count = ("dlq", "count", service.name, "--url", place.url)
    assert (await asyncio.to_thread(cli, *count)).stdout == "about 12\n"
    assert (await asyncio.to_thread(cli, *count, "--json")).stdout == '{"count": 12, "exact": false}\n'
    few = await asyncio.to_thread(cli, *count, "--json", "--where", "type=message")
    assert few.stdout == '{"count": 12}\n'


def test_where_a_purge_is_for_good_there_is_nothing_to_erase(cli: Cli, letters: dict[str, str]) -> None:
    """Wrong usage, said before anything is purged."""
    purge = ("dlq", "purge", "wms-cincout", "--yes", "--erase")
    done = cli(*purge, "--url", "sqlite:///bus.db")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a purge of wms-cincout is for good on this broker" in done.stderr
    assert cli("dlq", "count", "wms-cincout", "--url", "sqlite:///bus.db").stdout == "3\n"


async def test_a_second_ctrl_c_ends_it_at_once(
    place: Place, cli: Cli, until: Callable[[Callable[[], object], str], None]
) -> None:
    """Not after the deadlines of calls whose answers nobody reads any more; what ran is handled again."""
    service = place.service()
    called = cli.folder / "called"
    cli.write(
        "app.py",
        f"""
import asyncio, pathlib
from eventbus import Service
slow = Service({service.name!r}, prefix={place.prefix!r})
@slow.on("#", timeout=120.0)
async def handle(data: bytes) -> None:
    pathlib.Path({str(called)!r}).touch()
    await asyncio.sleep(100)
""",
    )
    running = cli.start("run", "app:slow", "--url", place.url, "--log", "json")
    await asyncio.to_thread(running.wait_for, "started")
    async with place.bus() as bus:
        await bus.publish("a")
        await asyncio.to_thread(until, called.exists, "it was called")
        running.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(running.wait_for, "stopping")
        running.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(running.process.wait, 8) == 1
        assert (await bus.stats(service)).ready == 1
