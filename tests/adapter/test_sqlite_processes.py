"""Several processes on one file, and processes that die at the worst moment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from eventbus.event import Event
from eventbus.settlement import ACK
from tests.adapter.sqlite_support import OTHER, SUB, opened, receive, sql

HEAD = """
import asyncio, json, sys
from pathlib import Path
from eventbus.event import Event
from eventbus.settlement import ACK, Requeue
from tests.adapter.sqlite_support import OTHER, SUB, opened, parking, receive
folder, argument = Path(sys.argv[1]), sys.argv[2]
"""


def start(script: str, folder: Path, argument: object = "", **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(script) + "\nasyncio.run(main())", str(folder), str(argument)],
        cwd=Path(__file__).parents[2],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    return out


PUBLISH = """
async def main():
    async with opened(folder, SUB, OTHER) as adapter:
        for n in range(0, 1000, 20):
            events = [Event("n", f"{argument}/{n + k}") for k in range(20)]
            assert all(r.status == "stored" for r in await adapter.publish("wms", events))
"""

CONSUME = """
async def main():
    sub = SUB if argument == "stock" else OTHER
    async with opened(folder, SUB, OTHER) as adapter, adapter.consume(sub) as consumer:
        while (got := await consumer.receive(64, 3.0)):
            print(*(delivery.event.data for delivery in got), flush=True)
            assert set(await consumer.settle([(delivery, ACK) for delivery in got])) == {"done"}
"""


def test_processes_share_one_file(tmp_path: Path) -> None:
    """Three publishers and two consumers of each service, all started at once on a new file: each event once."""
    sub = start("async def main():\n    async with opened(folder, SUB, OTHER): pass", tmp_path)
    finish(sub)
    publishers = [start(PUBLISH, tmp_path, name) for name in "abc"]
    consumers = {name: [start(CONSUME, tmp_path, name) for _ in range(2)] for name in ("stock", "billing")}
    for process in publishers:
        finish(process)
    expected = sorted(f"{name}/{n}" for name in "abc" for n in range(1000))
    for processes in consumers.values():
        outputs = [finish(process).split() for process in processes]
        assert sorted(outputs[0] + outputs[1]) == expected
    assert sql(tmp_path, "SELECT (SELECT count(*) FROM events), (SELECT count(*) FROM inflight)") == [(0, 0)]


def test_a_new_file_can_be_made_by_many_at_once(tmp_path: Path) -> None:
    """Processes that race to make the file and the subscription all find one file and one subscription."""
    script = """
    async def main():
        async with opened(folder, SUB, OTHER) as adapter:
            await adapter.publish("wms", [Event("a")])
    """
    for process in [start(script, tmp_path) for _ in range(6)]:
        finish(process)
    assert sql(tmp_path, "SELECT count(*) FROM subscriptions") == [(2,)]
    assert sql(tmp_path, "SELECT count(*) FROM logs") == [(1,)]
    assert sql(tmp_path, "SELECT count(DISTINCT seq) FROM events") == [(6,)]


async def test_what_another_process_publishes_arrives_soon(tmp_path: Path) -> None:
    """A consumer that waits here gets what a process over there published."""
    async with opened(tmp_path, SUB, OTHER) as adapter, adapter.consume(SUB) as consumer:
        process = start(PUBLISH, tmp_path, "x")
        got = await receive(consumer, 1000)
        assert len({delivery.event.id for delivery in got}) == 1000
        await asyncio.to_thread(finish, process)


async def test_a_killed_consumer_loses_nothing(tmp_path: Path) -> None:
    """What a process held when it was killed comes to another one after the lease, as suspect."""
    script = """
    async def main():
        async with opened(folder, SUB, lease="500ms") as adapter, adapter.consume(SUB) as consumer:
            print(len(await receive(consumer, 10)), flush=True)
            await asyncio.sleep(60)
    """
    async with opened(tmp_path, SUB, lease="500ms") as adapter:
        events = [Event("n", n) for n in range(15)]
        await adapter.publish("wms", events)
        process = start(script, tmp_path)
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "10\n"
        async with adapter.consume(SUB) as consumer:
            fresh = await receive(consumer, 5)
            # While it lives, it keeps what it holds.
            assert await consumer.receive(1, 1.0) == []
            process.kill()
            process.communicate()
            again = await receive(consumer, 10)
            assert {d.suspect for d in fresh} == {False}
            assert {d.suspect for d in again} == {True}
            assert sorted(d.event.id for d in fresh + again) == sorted(event.id for event in events)
            assert set(await consumer.settle([(d, ACK) for d in fresh + again])) == {"done"}


SETTLE = """
async def main():
    async with opened(folder, SUB, lease="300ms") as adapter, adapter.consume(SUB) as consumer:
        got = await receive(consumer, 4)
        print(json.dumps("received"), flush=True)
        a, b, c, d = got
        await consumer.settle([(a, ACK), (b, parking(b)), (c, Requeue(0, 0, {"x-requeues": 1})), (d, ACK)])
        print(json.dumps("settled"), flush=True)
"""


@pytest.mark.parametrize(
    ("point", "stored"), [("sqlite.publish.before-commit", False), ("sqlite.publish.after-commit", True)]
)
async def test_a_process_that_dies_while_it_publishes(tmp_path: Path, point: str, stored: bool) -> None:
    """Before the commit nothing is there, after it everything is; in no case half of it."""
    script = """
    async def main():
        async with opened(folder, SUB) as adapter:
            await adapter.publish("wms", [Event("n", n) for n in range(100)])
            print("published", flush=True)
    """
    async with opened(tmp_path, SUB) as adapter:
        process = start(script, tmp_path, EVENTBUS_FAILPOINT=point)
        assert await asyncio.to_thread(finish, process, -signal.SIGKILL) == ""
        assert (await adapter.stats("wms-stock", "wms")).ready == (100 if stored else 0)
        await adapter.publish("wms", [Event("next")])
        assert (await adapter.stats("wms-stock", "wms")).ready == (101 if stored else 1)


async def test_a_process_that_dies_before_its_settlements_are_committed(tmp_path: Path) -> None:
    """None of them happened: all come again, as suspects, and nothing is parked."""
    async with opened(tmp_path, SUB, lease="300ms") as adapter:
        await adapter.publish("wms", [Event("n", n) for n in range(4)])
        process = start(SETTLE, tmp_path, EVENTBUS_FAILPOINT="sqlite.settle.before-commit")
        assert json.loads(await asyncio.to_thread(finish, process, -signal.SIGKILL)) == "received"
        async with adapter.consume(SUB) as consumer:
            got = await receive(consumer, 4)
            assert [(d.event.data, d.suspect) for d in got] == [(n, True) for n in range(4)]
        assert (await adapter.stats("wms-stock", "wms")).parked == 0


async def test_a_process_that_dies_after_its_settlements_are_committed(tmp_path: Path) -> None:
    """All of them happened, though it never heard so: no second delivery, no second letter."""
    async with opened(tmp_path, SUB, lease="300ms") as adapter:
        await adapter.publish("wms", [Event("n", n) for n in range(4)])
        process = start(SETTLE, tmp_path, EVENTBUS_FAILPOINT="sqlite.settle.after-commit")
        assert json.loads(await asyncio.to_thread(finish, process, -signal.SIGKILL)) == "received"
        async with adapter.consume(SUB) as consumer:
            (requeued,) = await receive(consumer)
            assert (requeued.event.data, requeued.suspect, requeued.history.requeues) == (2, False, 1)
            await consumer.settle([(requeued, ACK)])
            assert await consumer.receive(1, 0.5) == []
        stats = await adapter.stats("wms-stock", "wms")
        assert (stats.ready, stats.inflight, stats.parked) == (0, 0, 1)


async def test_a_process_that_dies_with_a_fresh_claim(tmp_path: Path) -> None:
    """Claimed and never seen by anybody: it comes again after the lease."""
    async with opened(tmp_path, SUB, lease="300ms") as adapter:
        await adapter.publish("wms", [Event("n", n) for n in range(4)])
        process = start(SETTLE, tmp_path, EVENTBUS_FAILPOINT="sqlite.claim.after-commit")
        assert await asyncio.to_thread(finish, process, -signal.SIGKILL) == ""
        async with adapter.consume(SUB) as consumer:
            assert {d.suspect for d in await receive(consumer, 4)} == {True}
