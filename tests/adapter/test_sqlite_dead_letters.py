"""Dead letters in the file: parked to the byte, looked at, read under a lease, put back, purged, expired."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from eventbus import headers
from eventbus.adapter import Redrive, Subscription
from eventbus.embedded.sqlite import leases, letters
from eventbus.errors import ConfigError
from eventbus.event import Event
from eventbus.headers import for_redrive
from eventbus.settlement import ACK, RELEASE, Requeue, Retry
from tests.adapter.sqlite_support import (
    LETTERS,
    OTHER,
    SUB,
    freeze,
    locked,
    opened,
    park,
    parking,
    receive,
    sql,
)

MINE = {"x-mine": b"\x00\xff", "n": 3}


def full_event(**changes: object) -> Event:
    return Event("order.created", b"\x00\xff", key="k", tenant="t", headers=MINE, source="/shop").replace(**changes)


async def test_a_letter_has_its_event_and_its_story(tmp_path: Path) -> None:
    """The event is as it was published; the story stands beside it, not in its headers."""
    event = full_event()
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, event)
        (letter,) = (await adapter.parking("wms-stock", "wms").browse(None, 10)).letters
        assert letter.event == event
        assert letter.headers[headers.PARK_REASON] == "permanent"
        assert letter.headers[headers.FINAL_STATUS] == 404
        assert letter.headers[headers.ORIGINAL_QUEUE] == "wms.queue.wms-stock"
        assert "x-mine" not in letter.headers
    assert sql(tmp_path, "SELECT reason, status, code, type, tenant FROM dlq") == [
        ("permanent", 404, "E404", "order.created", "t")
    ]
    assert sql(tmp_path, "SELECT (SELECT count(*) FROM events), (SELECT count(*) FROM inflight)") == [(0, 0)]


async def test_letters_are_browsed_in_pages_and_found_by_id(tmp_path: Path) -> None:
    """Pages go on where the last one ended, oldest first; an id finds its letters of this service only."""
    events = [Event("n", n) for n in range(7)]
    async with opened(tmp_path, SUB, OTHER) as adapter:
        await park(adapter, *events)
        await park(adapter, events[0], subscription=SUB)
        box = adapter.parking("wms-stock", "wms")
        seen, cursor = [], None
        while True:
            page = await box.browse(cursor, 3)
            seen += [letter.event.id for letter in page.letters]
            cursor = page.next
            if cursor is None:
                break
        assert seen == [event.id for event in [*events, events[0]]]
        assert (await box.browse(None, 8)).next is None
        assert len(await box.find(events[0].id)) == 2
        assert await box.find("nobody") == await box.find("\ud800") == []
        assert await box.depth() == 8
        assert await adapter.parking("wms-billing", "wms").depth() == 0
        with pytest.raises(ConfigError, match="cursor"):
            await box.browse("nonsense", 3)


async def test_large_letters_make_short_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page never holds more than memory should; the cursor says where to go on."""
    monkeypatch.setattr(leases, "CLAIM_BYTES", 100_000)
    monkeypatch.setattr("eventbus.embedded.sqlite.parking.CLAIM_BYTES", 100_000)
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, *[Event("n", b"x" * 30_000) for _ in range(10)])
        box = adapter.parking("wms-stock", "wms")
        seen, cursor = [], None
        while True:
            page = await box.browse(cursor, 10)
            assert len(page.letters) <= 4
            seen += [letter.address for letter in page.letters]
            cursor = page.next
            if cursor is None:
                break
        assert len(set(seen)) == len(seen) == 10


async def test_letters_are_skimmed_as_they_are_browsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same letters in the same pages' order, with their count of re-drives; large ones make short pages."""
    monkeypatch.setattr("eventbus.embedded.sqlite.parking.CLAIM_BYTES", 100_000)
    async with opened(tmp_path, SUB) as adapter:
        box = adapter.parking("wms-stock", "wms")
        await park(adapter, *[Event("n", b"x" * 30_000) for _ in range(10)])
        (first, *_) = (await box.browse(None, 1)).letters
        await box.restore([first._replace(headers={**first.headers, headers.REDRIVEN_COUNT: 3})])
        seen, cursor = [], None
        while True:
            page = await box.skim(cursor, 10)
            assert len(page.letters) <= 4
            seen += [(x.address, x.event.id, x.headers.get(headers.REDRIVEN_COUNT)) for x in page.letters]
            cursor = page.next
            if cursor is None:
                break
        whole = (await box.browse(None, 20)).letters
        assert seen == [(x.address, x.event.id, x.headers.get(headers.REDRIVEN_COUNT)) for x in whole]
        assert seen[-1][1:] == (first.event.id, 3)
        with pytest.raises(ConfigError, match="cursor"):
            await box.skim("nonsense", 3)


async def test_redriven_letters_are_received_oldest_first(tmp_path: Path) -> None:
    """Letters that were put back together come in the order in which they were parked."""
    events = [Event("n", n) for n in range(7)]
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, *events)
        box = adapter.parking("wms-stock", "wms")
        found = (await box.skim(None, 10)).letters
        delta = for_redrive({}, "me", time.time())
        assert await box.redrive([Redrive(letter.address, delta) for letter in found]) == ["done"] * 7
        assert await box.tally("reason") == {}
        async with adapter.consume(SUB) as consumer:
            assert [delivery.event.id for delivery in await consumer.receive(10, 5)] == [event.id for event in events]


async def test_letters_put_back_together_keep_each_its_own_changes(tmp_path: Path) -> None:
    """However they are mixed: change, body and order are each letter's own."""
    events = [Event("n", n) for n in range(11)]
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, *events)
        box = adapter.parking("wms-stock", "wms")
        found = (await box.skim(None, 20)).letters
        deltas = [for_redrive({headers.REDRIVEN_COUNT: times}, "me", time.time()) for times in (0, 4)]
        orders = [
            Redrive(letter.address, deltas[place // 3 % 2], b"mended" if place == 5 else None)
            for place, letter in enumerate(found)
        ]
        assert await box.redrive(orders[:9]) == ["done"] * 9
        assert await box.depth() == 2
        assert await box.tally("type") == {"n": 2}
        async with adapter.consume(SUB) as consumer:
            got = await consumer.receive(20, 5)
        assert [delivery.event.id for delivery in got] == [event.id for event in events[:9]]
        assert [delivery.history.redriven for delivery in got] == [1, 1, 1, 5, 5, 5, 1, 1, 1]
        assert [n for n, delivery in enumerate(got) if delivery.event.body == b"mended"] == [5]


async def test_a_redriven_letter_goes_to_its_service_alone(tmp_path: Path) -> None:
    """Same id, key, headers and body, by its own service's queue; another service of the prefix sees nothing."""
    event = full_event()
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, event)
        await adapter.provision([OTHER], "create")
        box = adapter.parking("wms-stock", "wms")
        (letter,) = (await box.browse(None, 10)).letters
        order = Redrive(letter.address, for_redrive(letter.headers, "ana", time.time()))
        assert await box.redrive([order, order, Redrive("999", {}), Redrive("x", {})]) == [
            "done",
            "gone",
            "gone",
            "gone",
        ]
        assert await box.depth() == 0
        async with adapter.consume(SUB) as mine, adapter.consume(OTHER) as other:
            (again,) = await receive(mine)
            assert again.event == event
            assert (again.history.redriven, again.suspect) == (1, False)
            assert await other.receive(1, 0.0) == []
            assert await mine.settle([(again, ACK)]) == ["done"]
    assert sql(tmp_path, "SELECT count(*) FROM events") == [(0,)]


async def test_a_redriven_letter_can_have_another_body_and_a_delay(tmp_path: Path) -> None:
    """An edited body replaces the old one, and a delay is kept."""
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, full_event(), full_event())
        box = adapter.parking("wms-stock", "wms")
        first, second = (await box.browse(None, 10)).letters
        started = time.time()
        await box.redrive([Redrive(second.address, {}, b"mended", 0.3), Redrive(first.address, {})])
        assert (await adapter.stats("wms-stock", "wms")).delayed == 1
        async with adapter.consume(SUB) as consumer:
            got = await receive(consumer, 2)
            assert time.time() - started >= 0.3
            assert [delivery.event.body for delivery in got] == [b"\x00\xff", b"mended"]
            # It may fail and be parked again like any other.
            assert await consumer.settle([(delivery, parking(delivery)) for delivery in got]) == ["done"] * 2
        assert await box.depth() == 2


async def test_a_delayed_letter_is_never_early_not_by_a_part_of_a_millisecond(tmp_path: Path) -> None:
    """The file counts whole milliseconds; the one that has begun is none of the delay."""
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, *(full_event() for _ in range(30)))
        box = adapter.parking("wms-stock", "wms")
        for letter in (await box.browse(None, 30)).letters:
            asked = time.time()
            await box.redrive([Redrive(letter.address, {}, None, 60.0003)])
            [(due,)] = sql(tmp_path, "SELECT due FROM inflight ORDER BY due DESC LIMIT 1")
            assert asked + 60.0003 <= int(str(due)) / 1000 <= time.time() + 60.01


async def test_a_move_that_fails_leaves_the_letter(tmp_path: Path) -> None:
    """While the file is locked re-drive and purge answer `failed`; the letter still stands there."""
    async with opened(tmp_path, SUB, lock_timeout="50ms") as adapter:
        await park(adapter, Event("a"))
        box = adapter.parking("wms-stock", "wms")
        with locked(tmp_path):
            assert await box.redrive([Redrive("1", {})]) == ["failed"]
            assert await box.purge(["1"]) == ["failed"]
        assert await box.depth() == 1
        assert await box.purge(["1", "1", "2"]) == ["done", "gone", "gone"]


async def test_an_address_is_never_given_twice(tmp_path: Path) -> None:
    """A late purge of a letter that is gone does not hit the next one."""
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, Event("a"))
        box = adapter.parking("wms-stock", "wms")
        (first,) = (await box.browse(None, 1)).letters
        await box.purge([first.address])
        await park(adapter, Event("b"))
        assert await box.purge([first.address]) == ["gone"]
        assert await box.depth() == 1


async def test_a_structured_event_keeps_its_envelope(tmp_path: Path) -> None:
    """Handlers see what is inside; the letter is found by that id, and a re-drive sends the envelope again."""
    envelope = {"specversion": "1.0", "id": "inner", "type": "order.created", "source": "/x", "data": {"n": 1}}
    event = Event("outer", json.dumps(envelope).encode(), content_type="application/cloudevents+json")
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, event)
        box = adapter.parking("wms-stock", "wms")
        (letter,) = await box.find("inner")
        assert (letter.event.type, letter.event.data) == ("order.created", {"n": 1})
        await box.redrive([Redrive(letter.address, {})])
    assert sql(tmp_path, "SELECT id, type, body FROM events") == [(event.id, "outer", event.body)]


async def test_a_broken_structured_event_is_delivered_with_its_problem(tmp_path: Path) -> None:
    """What cannot be decoded is still a delivery: the core parks it, its body untouched."""
    event = Event("outer", b"{broken", content_type="application/cloudevents+json; charset=utf-8")
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [event])
        async with adapter.consume(SUB) as consumer:
            (delivery,) = await receive(consumer)
            assert "JSON" in delivery.problem
            assert delivery.event == event
            await consumer.settle([(delivery, parking(delivery))])
        (letter,) = (await adapter.parking("wms-stock", "wms").browse(None, 1)).letters
        assert letter.event == event
        async with adapter.consume(LETTERS) as reader:
            (again,) = await receive(reader)
            assert again.problem == ""


async def test_the_consumer_of_dead_letters_gets_the_whole_story(tmp_path: Path) -> None:
    """Story and foreign headers are together in the event's headers; acknowledged letters leave."""
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, full_event())
        async with adapter.consume(LETTERS) as consumer:
            assert consumer.queue == "wms.dlq.wms-stock"
            (delivery,) = await receive(consumer)
            assert delivery.event.headers["x-mine"] == b"\x00\xff"
            assert delivery.event.headers[headers.PARK_REASON] == "permanent"
            assert delivery.history.last_failed_at > 0
            stats = await adapter.stats("wms-stock", "wms")
            assert (stats.parked, stats.inflight) == (1, 0)
            assert len((await adapter.parking("wms-stock", "wms").browse(None, 9)).letters) == 1
            assert await consumer.settle([(delivery, ACK)]) == ["done"]
        assert await adapter.parking("wms-stock", "wms").depth() == 0


async def test_a_dead_letter_is_never_parked_again(tmp_path: Path) -> None:
    """Anything but Ack leaves the letter, with its story, for later: requeue, release, retry, and park too."""
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, *[Event("n", n) for n in range(4)])
        box = adapter.parking("wms-stock", "wms")
        before = {letter.address: letter.headers for letter in (await box.browse(None, 9)).letters}
        async with adapter.consume(LETTERS) as consumer:
            a, b, c, d = await receive(consumer, 4)
            due = time.time() + 0.3
            later = Requeue(due, 0.3, {headers.REQUEUES: 1})
            retry = Retry(due, 0.3, {headers.RETRIES: 99})
            answers = await consumer.settle([(a, later), (b, RELEASE), (c, retry), (d, parking(d, "again"))])
            assert answers == ["done"] * 4
            assert [(delivery.event.data, delivery.suspect) for delivery in await receive(consumer)] == [(1, False)]
            got = await receive(consumer, 2)
            assert time.time() >= due
            assert {(delivery.event.data, delivery.suspect) for delivery in got} == {(0, False), (2, False)}
            assert {delivery.history.requeues for delivery in got} == {0, 1}
            assert await consumer.receive(1, 0.0) == []
        after = {letter.address: letter.headers for letter in (await box.browse(None, 9)).letters}
        assert after.keys() == before.keys()
        assert sum(after[address] == before[address] for address in before) == 3


async def test_letters_of_a_dead_reader_come_again(tmp_path: Path) -> None:
    """Unsettled letters come back after their lease, as suspect, with the crash note of their last reader."""
    async with opened(tmp_path, SUB, lease=0.2) as adapter:
        await park(adapter, Event("a"))
        async with adapter.consume(LETTERS) as dead, adapter.consume(LETTERS) as other:
            (old,) = await receive(dead)
            assert await dead.note(old, {headers.CRASHES: 1})
            freeze(dead)
            (new,) = await receive(other)
            assert (new.suspect, new.history.crashes) == (True, 1)
            assert await dead.settle([(old, ACK)]) == ["lost"]
            assert await dead.settle([(old, RELEASE)]) == ["lost"]
            assert await other.settle([(new, ACK)]) == ["done"]


async def test_an_operator_may_take_a_letter_from_its_reader(tmp_path: Path) -> None:
    """A letter can be re-driven or purged while it is being read; the reader's settle is then lost."""
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, Event("a"), Event("b"))
        box = adapter.parking("wms-stock", "wms")
        async with adapter.consume(LETTERS) as consumer:
            a, b = await receive(consumer, 2)
            first, second = (await box.browse(None, 9)).letters
            assert await box.redrive([Redrive(first.address, {})]) == ["done"]
            assert await box.purge([second.address]) == ["done"]
            assert await consumer.settle([(a, ACK), (b, RELEASE)]) == ["lost", "lost"]
        assert (await adapter.stats("wms-stock", "wms")).ready == 1


async def test_too_many_letters_expire_oldest_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With dlq_max_entries the oldest letters go; they are counted in the log."""
    elsewhere = Subscription("crm-mail", "crm")
    async with opened(tmp_path, SUB, elsewhere, dlq_max_entries=3) as adapter:
        await park(adapter, Event("x"), subscription=elsewhere)
        with caplog.at_level(logging.WARNING, "eventbus"):
            await park(adapter, *[Event("n", n) for n in range(5)])
        page = await adapter.parking("wms-stock", "wms").browse(None, 10)
        assert [letter.event.data for letter in page.letters] == [2, 3, 4]
        assert await adapter.parking("crm-mail", "crm").depth() == 1
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "dlq_expired"]
    assert record.fields == {"service": "wms-stock", "count": 2}


async def test_old_letters_expire(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dlq_max_age letters go at the next parking, and when the bus is opened, however many there are."""
    monkeypatch.setattr(letters, "EXPIRE_AT_ONCE", 2)
    monkeypatch.setattr("eventbus.embedded.sqlite.adapter.EXPIRE_AT_ONCE", 2)
    async with opened(tmp_path, SUB) as adapter:
        await park(adapter, *[Event("old") for _ in range(5)], Event("new"))
        sql(tmp_path, "UPDATE dlq SET parked_at = parked_at - 3600000 WHERE no <= 5")
        assert (await adapter.stats("wms-stock", "wms")).oldest_parked == pytest.approx(3600, abs=30)
    async with opened(tmp_path, SUB, dlq_max_age="10m") as adapter:
        box = adapter.parking("wms-stock", "wms")
        assert [letter.event.type for letter in (await box.browse(None, 10)).letters] == ["new"]
        assert caplog.text.count("dlq_expired") == 3
        sql(tmp_path, "UPDATE dlq SET parked_at = 0")
        await park(adapter, Event("newer"))
        assert [letter.event.type for letter in (await box.browse(None, 10)).letters] == ["newer"]


async def test_old_letters_expire_while_nothing_is_parked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running consumer applies the age limit from time to time, also when its service parks nothing."""
    monkeypatch.setattr("eventbus.embedded.sqlite.leased.HOUSEKEEPING", 0.0)
    async with opened(tmp_path, SUB, dlq_max_age="1s", lease=0.3) as adapter:
        await park(adapter, Event("a"))
        box = adapter.parking("wms-stock", "wms")
        async with adapter.consume(SUB) as consumer:
            while await box.depth():
                assert await consumer.receive(1, 0.2) == []
