"""The log: what goes in comes out as it was, and nothing stays that nobody needs."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from eventbus.adapter import Subscription
from eventbus.embedded.sqlite import leases, letters, subscriptions, turns, work, writer
from eventbus.event import Event
from eventbus.headers import for_retry
from eventbus.settlement import ACK, Retry
from eventbus.status import Outcome
from tests.adapter.sqlite_support import OTHER, SUB, eventually, opened, park, receive, sql


async def test_an_event_nobody_is_subscribed_to_is_not_kept(tmp_path: Path) -> None:
    """Publishing under a prefix without services stores nothing and says so."""
    async with opened(tmp_path, SUB) as adapter:
        results = await adapter.publish("other", [Event("a"), Event("b")])
        assert [(result.status, result.subscribed) for result in results] == [("stored", False)] * 2
    assert sql(tmp_path, "SELECT count(*) FROM events") == [(0,)]


async def test_an_event_comes_out_as_it_went_in(tmp_path: Path) -> None:
    """Every attribute survives: offsets of times, bytes and nested values in headers, NUL and emoji."""
    headers = {
        "text": "gr\u00fc\u00dfe \u2603",
        "bytes": b"\x00\xff",
        "int": 2**70,
        "float": 0.1,
        "none": None,
        "bool": True,
        "list": ["a", b"b", None],
        "table": {"bytes": b"x", "deep": [{"table": 1}]},
        "time": datetime(2026, 1, 2, tzinfo=timezone.utc),
    }
    event = Event.from_wire(
        "id\0\U0001f600",
        "order.created",
        "/shop",
        datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        b"\x00\x01\xff",
        "application/x-own",
        key="k",
        tenant="t",
        correlation_id="c",
        process_after=datetime(2027, 1, 1, tzinfo=timezone.utc),
        expires_at=datetime(2028, 1, 1, tzinfo=timezone.utc),
        headers=headers,
        extensions={"traceparent": "00-1-2-01"},
    )
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [event, Event("plain")])
        async with adapter.consume(SUB) as consumer:
            got, plain = await receive(consumer, 2)
            assert got.event == event
            assert got.event.time.utcoffset() == timedelta(hours=5, minutes=30)
            assert (plain.event.headers, plain.event.extensions, plain.event.body) == ({}, {}, b"")
            assert got.enqueued_at == pytest.approx(time.time(), abs=30)


async def test_one_bad_event_does_not_keep_the_others_out(tmp_path: Path) -> None:
    """What no row can hold is refused by itself, with the reason."""
    huge = Event("huge", b"x" * 200_000)
    broken = Event.from_wire("\ud800", "a", "", datetime.now(timezone.utc), b"")
    strange = Event.from_wire("1", "a", "", datetime.now(timezone.utc), b"", headers={"h": object()})
    async with opened(tmp_path, SUB, max_event_bytes=200_000) as adapter:
        results = await adapter.publish("wms", [Event("a"), huge, broken, strange, Event("b")])
        assert [result.status for result in results] == ["stored", "refused", "refused", "refused", "stored"]
        assert "max_event_bytes" in results[1].error
        assert "Unicode" in results[2].error
        assert "object" in results[3].error
        assert adapter.capabilities.max_event_bytes == 200_000
        async with adapter.consume(SUB) as consumer:
            assert [delivery.event.type for delivery in await receive(consumer, 2)] == ["a", "b"]


async def test_many_events_keep_their_order(tmp_path: Path) -> None:
    """A batch that takes several statements arrives in the order it was published."""
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("n", n) for n in range(789)])
        async with adapter.consume(SUB) as consumer:
            got = await receive(consumer, 789)
    assert [delivery.event.data for delivery in got] == list(range(789))


async def test_logs_do_not_mix(tmp_path: Path) -> None:
    """Each prefix has its own log: its services see its events, and depths are exact."""
    elsewhere = Subscription("crm-mail", "crm")
    async with opened(tmp_path, SUB, elsewhere, OTHER) as adapter:
        await adapter.publish("wms", [Event("w", n) for n in range(3)])
        await adapter.publish("crm", [Event("c", n) for n in range(5)])
        async with adapter.consume(elsewhere) as consumer:
            got = await receive(consumer, 2)
            assert {delivery.event.type for delivery in got} == {"c"}
            stats = await adapter.stats("crm-mail", "crm")
            assert (stats.ready, stats.inflight) == (3, 2)
        assert (await adapter.stats("wms-stock", "wms")).ready == 3
        assert (await adapter.stats("wms-billing", "wms")).ready == 3


async def test_a_finished_log_is_empty(tmp_path: Path) -> None:
    """An event leaves the file with the last settlement that concerns it, in whatever order they come."""
    async with opened(tmp_path, SUB, OTHER) as adapter:
        await adapter.publish("wms", [Event("n", n) for n in range(300)])
        async with adapter.consume(SUB) as one, adapter.consume(OTHER) as two:
            first = await receive(one, 300)
            await one.settle([(delivery, ACK) for delivery in first[::2]])
            assert sql(tmp_path, "SELECT count(*) FROM events") == [(300,)]
            second = await receive(two, 200)
            await two.settle([(delivery, ACK) for delivery in second])
            assert sql(tmp_path, "SELECT count(*) FROM events") == [(200,)]
            await one.settle([(delivery, ACK) for delivery in first[1::2]])
            assert sql(tmp_path, "SELECT count(*) FROM events") == [(100,)]
            await two.settle([(delivery, ACK) for delivery in await receive(two, 100)])
    assert sql(tmp_path, "SELECT (SELECT count(*) FROM events), (SELECT count(*) FROM inflight)") == [(0, 0)]


async def test_a_long_delay_holds_back_nothing_but_itself(tmp_path: Path) -> None:
    """While one event waits for a day, everything around it is removed as it is finished."""
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("n", n) for n in range(500)])
        async with adapter.consume(SUB) as consumer:
            got = await receive(consumer, 500)
            due, now = time.time() + 86400, time.time()
            retry = Retry(due, 86400, for_retry(got[10], Outcome(status=500), now, due))
            await consumer.settle([(got[10], retry), *((delivery, ACK) for delivery in got if delivery is not got[10])])
        stats = await adapter.stats("wms-stock", "wms")
        assert (stats.ready, stats.delayed) == (0, 1)
    assert sql(tmp_path, "SELECT count(*) FROM events") == [(1,)]


async def test_the_file_is_used_again(tmp_path: Path) -> None:
    """Round after round of the same load takes no more room than the first two."""
    pages = []
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        for _ in range(8):
            await adapter.publish("wms", [Event("n", "x" * 500) for _ in range(500)])
            got = await receive(consumer, 500)
            await consumer.settle([(delivery, ACK) for delivery in got])
            pages.append(sql(tmp_path, "PRAGMA page_count")[0][0])
    assert pages[-1] == pages[1]


async def test_the_file_shrinks_after_a_burst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free pages are given back to the system once nobody has anything to do."""
    monkeypatch.setattr(writer, "IDLE", 0.02)
    monkeypatch.setattr(writer, "VACUUM_FROM", 64)
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("n", "x" * 4000) for _ in range(500)])
        burst = sql(tmp_path, "PRAGMA page_count")[0][0]
        assert burst > 500  # type: ignore[operator]
        async with adapter.consume(SUB) as consumer:
            await consumer.settle([(delivery, ACK) for delivery in await receive(consumer, 500)])
        await eventually(lambda: sql(tmp_path, "PRAGMA page_count")[0][0] < 150, "it shrank")  # type: ignore[operator]


async def test_large_events_come_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim stops when its bodies get too large for memory; the rest stays ready."""
    monkeypatch.setattr(leases, "CLAIM_BYTES", 100_000)
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("n", b"x" * 30_000) for _ in range(20)])
        async with adapter.consume(SUB) as consumer:
            part = await consumer.receive(20, 1.0)
            assert len(part) == 4
            assert (await adapter.stats("wms-stock", "wms")).ready == 16
            assert len({delivery.event.id for delivery in part + await receive(consumer, 16)}) == 20


async def test_events_deleted_by_hand_do_not_stop_the_rest(tmp_path: Path) -> None:
    """Where somebody has deleted events from the file, the consumer goes on behind them."""
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("lost") for _ in range(3)])
        sql(tmp_path, "DELETE FROM events")
        async with adapter.consume(SUB) as consumer:
            assert await consumer.receive(10, 0.0) == []
            await adapter.publish("wms", [Event("kept")])
            assert [delivery.event.type for delivery in await receive(consumer)] == ["kept"]


def _numbered(question: str) -> str:
    """The question with a number in place of each name."""
    names = list(dict.fromkeys(re.findall(r":[a-z]+", question)))
    return re.sub(r":[a-z]+", lambda match: f"?{names.index(match[0]) + 1}", question)


async def test_no_question_reads_a_whole_table(tmp_path: Path) -> None:
    """Claims, settlements and counts find their rows by index, however many wait."""
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, Event("a"))
    questions = [
        (work._DUE, 4),
        (work.HOLD, 4),
        (turns._ROWS, 2),
        (_numbered(turns._TENANTS), 3),
        (_numbered(turns._TURN), 4),
        (_numbered(turns._IN_ORDER), 4),
        (work._NEW, 3),
        (f"DELETE FROM events WHERE seq BETWEEN ? AND ? AND {work._FINISHED}", 2),
        (f"DELETE FROM events WHERE seq IN (SELECT value FROM json_each(?)) AND {work._FINISHED}", 1),
        (leases._DUE["inflight"], 4),
        (leases._REMOVE["inflight"], 3),
        (leases._DUE["dlq"], 4),
        (leases._REMOVE["dlq"], 3),
        (subscriptions._COUNTS.replace(":now", "1").replace(":prefix", "'a'").replace(":service", "'b'"), 0),
        ("SELECT min(due) FROM inflight WHERE subscription = ? AND due > ?", 2),
        (letters.WAITING, 3),
    ]
    for question, values in questions:
        steps = [str(row[3]) for row in sql(tmp_path, f"EXPLAIN QUERY PLAN {question}", *["1"] * values)]
        tables = ("events", "inflight", "i", "e", "dlq", "subscriptions", "logs", "l")
        scans = [step for step in steps if step.startswith("SCAN") and step.split()[1] in tables]
        assert not scans, f"{question}: {steps}"
        # Settling must look up its rows one by one, and not walk along all that the service has in flight.
        if "json_each" in question:
            assert not [step for step in steps if "(subscription=?)" in step], f"{question}: {steps}"
