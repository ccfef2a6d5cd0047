"""The writer: one transaction for all that is queued, and nobody suffers for another's failure."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from eventbus import failpoints
from eventbus.embedded.sqlite import SqliteAdapter
from eventbus.embedded.sqlite.writer import Operation, Transaction
from eventbus.errors import BrokerError, ConfigError
from eventbus.event import Event
from eventbus.settlement import ACK
from tests.adapter.sqlite_support import SUB, locked, opened, receive, sql


class Run(Operation[object]):
    """Whatever a test wants to do in a transaction."""

    def __init__(self, *statements: str, durable: bool = True) -> None:
        self.statements = statements
        self.wanted = durable

    @property
    def durable(self) -> bool:
        return self.wanted

    def run(self, tx: Transaction) -> object:
        return [tx.execute(statement).fetchall() for statement in self.statements][-1]


class Trace(Operation[None]):
    """Writes down every statement from here on."""

    def __init__(self) -> None:
        self.statements: list[str] = []

    def run(self, tx: Transaction) -> None:
        tx.connection.set_trace_callback(self.statements.append)


class Hold(Operation[None]):
    """Keeps the writer busy until it is let go, so that others queue up behind it."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.done = threading.Event()

    def run(self, tx: Transaction) -> None:
        self.started.set()
        assert self.done.wait(10)


async def queued_behind(adapter: SqliteAdapter, *operations: Operation[object]) -> list[object]:
    """The answers of operations that were all queued while the writer was busy."""
    hold = Hold()
    first = asyncio.ensure_future(adapter.writer.submit(hold))
    await asyncio.to_thread(hold.started.wait, 10)
    tasks = [asyncio.ensure_future(adapter.writer.submit(operation)) for operation in operations]
    while adapter.writer._queue.qsize() < len(operations):
        await asyncio.sleep(0)
    hold.done.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_is_queued_is_one_transaction(tmp_path: Path) -> None:
    """Operations that wait together are committed together: one fsync for all."""
    async with opened(tmp_path, SUB) as adapter:
        trace = Trace()
        await adapter.writer.submit(trace)
        answers = await queued_behind(adapter, *[Run(f"SELECT {n}") for n in range(20)])
        assert answers == [[(n,)] for n in range(20)]
        assert trace.statements.count("COMMIT") == 3  # of the trace itself, of Hold, and of all the others


async def test_one_failure_does_not_spoil_the_others(tmp_path: Path) -> None:
    """In a group with one bad operation the others are done, once, and only the bad one fails."""
    insert = "INSERT INTO logs (prefix, head) VALUES ('{}', 0)"
    async with opened(tmp_path) as adapter:
        answers = await queued_behind(
            adapter,
            Run(insert.format("a")),
            Run(insert.format("half"), "INSERT INTO nowhere VALUES (1)"),
            Run(insert.format("b")),
        )
        assert answers[0] == answers[2] == []
        assert isinstance(answers[1], BrokerError)
        assert "nowhere" in str(answers[1])
    assert sql(tmp_path, "SELECT prefix FROM logs ORDER BY prefix") == [("a",), ("b",)]


async def test_publishes_at_once_keep_apart_what_is_bad(tmp_path: Path) -> None:
    """Many callers publish at once under several prefixes; everyone gets their own answer."""
    async with opened(tmp_path, SUB) as adapter:
        calls = [adapter.publish("wms" if n % 3 else "nobody", [Event("n", n)] * (n % 4)) for n in range(100)]
        results = await asyncio.gather(*calls)
        assert [len(result) for result in results] == [n % 4 for n in range(100)]
        for number, result in enumerate(results):
            assert all(one.subscribed is bool(number % 3) for one in result)
        assert (await adapter.stats("wms-stock", "wms")).ready == sum(n % 4 for n in range(100) if n % 3)


async def test_the_disk_is_waited_for_only_where_a_message_could_be_lost(tmp_path: Path) -> None:
    """Publishing runs with synchronous FULL; claims and acks with NORMAL."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        trace = Trace()
        await adapter.writer.submit(trace)
        await adapter.writer.submit(Run("SELECT 1", durable=False))
        del trace.statements[:]
        await adapter.publish("wms", [Event("a")])
        assert trace.statements[0] == "PRAGMA synchronous = FULL"
        del trace.statements[:]
        (delivery,) = await receive(consumer)
        await consumer.settle([(delivery, ACK)])
        assert [line for line in trace.statements if "PRAGMA" in line] == ["PRAGMA synchronous = NORMAL"]


async def test_a_closed_bus_says_so(tmp_path: Path) -> None:
    """Using the bus before open or after close is an error with the fix; closing twice is not."""
    adapter = SqliteAdapter.from_url(f"sqlite:///{tmp_path}/bus.db", {})
    with pytest.raises(BrokerError, match="not open"):
        await adapter.publish("wms", [Event("a")])
    await adapter.aclose()
    await adapter.open()
    await adapter.open()
    await adapter.aclose()
    await adapter.aclose()
    with pytest.raises(BrokerError, match="not open"):
        await adapter.stats("wms-stock", "wms")
    await adapter.open()
    assert await adapter.provision([SUB], "create") == []
    await adapter.aclose()


async def test_closing_finishes_what_is_queued(tmp_path: Path) -> None:
    """Operations asked for before the bus was closed are carried out, and their callers answered."""
    async with opened(tmp_path, SUB) as adapter:
        calls = [asyncio.ensure_future(adapter.publish("wms", [Event("n", n)])) for n in range(50)]
        await asyncio.sleep(0)
        await adapter.aclose()
        assert {result.status for call in calls for result in await call} == {"stored"}
    assert sql(tmp_path, "SELECT count(*) FROM events") == [(50,)]


async def test_a_closed_bus_is_one_file(tmp_path: Path) -> None:
    """After the last process has left, everything is in the one file: it can be copied."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        await adapter.publish("wms", [Event("a")])
        await receive(consumer)
        await consumer.receive(1, 0.05)
        await adapter.parking("wms-stock", "wms").depth()
    assert os.listdir(tmp_path) == ["bus.db"]


async def test_a_cancelled_caller_does_not_disturb_the_others(tmp_path: Path) -> None:
    """An operation whose caller went away is still done; the writer goes on."""
    async with opened(tmp_path, SUB, lock_timeout=5) as adapter:
        with locked(tmp_path):
            task = asyncio.ensure_future(adapter.publish("wms", [Event("a")]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await adapter.publish("wms", [Event("b")])
        assert (await adapter.stats("wms-stock", "wms")).ready == 2


async def test_a_loop_that_is_gone_is_no_trouble(tmp_path: Path) -> None:
    """Answers for an event loop that was closed meanwhile are dropped; the writer serves the others."""
    async with opened(tmp_path, SUB, lock_timeout=5) as adapter:

        def elsewhere() -> None:
            loop = asyncio.new_event_loop()
            task = loop.create_task(adapter.publish("wms", [Event("a")]))
            loop.run_until_complete(asyncio.sleep(0))
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            loop.close()

        with locked(tmp_path):
            await asyncio.to_thread(elsewhere)
        assert (await adapter.publish("wms", [Event("b")]))[0].status == "stored"


def test_failpoints_are_off_unless_asked_for() -> None:
    """Without the variable nothing is active; its text is names and probabilities."""
    assert not failpoints.ACTIVE
    failpoints.failpoint("sqlite.publish.before-commit")
    assert failpoints.parse("a:0.5, b") == {"a": 0.5, "b": 1.0}
    with pytest.raises(ConfigError, match="name:probability"):
        failpoints.parse("a:often")
