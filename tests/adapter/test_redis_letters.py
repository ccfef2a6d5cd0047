"""The dead letters on Redis: retention, index, leases of their readers, flat in time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from eventbus import Event, Service, headers
from eventbus.adapter import Redrive, Subscription
from eventbus.errors import BrokerUnavailable, ConfigError, UnknownService
from eventbus.parking import DeadLetters
from eventbus.policy import DEFAULT_POLICY, decide
from eventbus.settlement import ACK, RELEASE, Park, Requeue
from eventbus.status import park
from eventbus.testing.contract.harness import eventually
from eventbus_redis import RedisAdapter
from eventbus_redis._client import Argument
from eventbus_redis._scripts import LETTERS_MOVE, Script
from eventbus_redis.parking import MOVE_AT_ONCE
from tests.adapter.test_redis_streams import make, take
from tests.brokers import redis


@pytest.fixture
async def client() -> AsyncIterator[Redis]:
    client = Redis.from_url(redis.shared_url())
    yield client
    await client.aclose()


@pytest.fixture
def sub() -> Subscription:
    return Service(f"t{secrets.token_hex(4)}-stock").subscription()


async def opened(**settings: object) -> RedisAdapter:
    adapter = make(**settings)
    await adapter.open()
    return adapter


async def park_all(adapter: RedisAdapter, sub: Subscription, events: list[Event]) -> None:
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, events)
    async with adapter.consume(sub) as consumer:
        left = len(events)
        while left:
            held = await take(consumer, min(left, 1000))
            answers = await consumer.settle([(d, decide(park("no"), d, DEFAULT_POLICY)) for d in held])
            assert set(answers) == {"done"}
            left -= len(held)


async def test_too_many_letters_are_expired_oldest_first(sub: Subscription, caplog: pytest.LogCaptureFixture) -> None:
    """Beyond dlq_max_entries the oldest go; how many is counted and said."""
    adapter = await opened(dlq_max_entries=50)
    try:
        with caplog.at_level(logging.WARNING, "eventbus"):
            await park_all(adapter, sub, [Event("a", id=f"e{n}") for n in range(120)])
            await adapter.expire(sub.service, sub.prefix)
        letters = await adapter.parking(sub.service, sub.prefix).browse(None, 100)
        assert [letter.event.id for letter in letters.letters] == [f"e{n}" for n in range(70, 120)]
        assert await adapter.parking(sub.service, sub.prefix).find("e0") == []
        expired = [r.fields for r in caplog.records if r.event == "dlq_expired"]  # type: ignore[attr-defined]
        assert sum(fields["too_many"] for fields in expired) == 70
    finally:
        await adapter.aclose()


async def test_a_piece_that_fails_does_not_hide_those_that_were_moved(
    sub: Subscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was moved is said to be; the rest still stands, and goes with the next try. If all fail, one hears why."""
    adapter = await opened()
    try:
        await park_all(adapter, sub, [Event("a", id=f"e{n:03}") for n in range(MOVE_AT_ONCE * 2 + 50)])
        parking = adapter.parking(sub.service, sub.prefix)
        orders = [Redrive(letter.address, {}) for letter in (await parking.skim(None, 1000)).letters]
        middle = orders[MOVE_AT_ONCE].address
        run = adapter.client.run

        async def broken(script: Script, keys: Sequence[str], arguments: Sequence[Argument] = ()) -> Any:
            if script is LETTERS_MOVE and middle in arguments:
                raise BrokerUnavailable("no answer")
            return await run(script, keys, arguments)

        monkeypatch.setattr(adapter.client, "run", broken)
        answers = await parking.redrive(orders)
        assert answers == ["done"] * MOVE_AT_ONCE + ["failed"] * MOVE_AT_ONCE + ["done"] * 50
        with pytest.raises(BrokerUnavailable, match="no answer"):
            await parking.redrive(orders[MOVE_AT_ONCE : 2 * MOVE_AT_ONCE])
        monkeypatch.undo()
        assert Counter(await parking.redrive(orders)) == {"done": MOVE_AT_ONCE, "gone": MOVE_AT_ONCE + 50}
        assert await parking.tally("type") == {}
    finally:
        await adapter.aclose()


async def test_letters_are_skimmed_and_put_back_unread(sub: Subscription, client: Redis) -> None:
    """A page without bodies has the same letters; each is moved whole, and once, even if it is named twice."""
    adapter = await opened()
    try:
        await park_all(adapter, sub, [Event("a", {"n": n}, id=f"e{n}") for n in range(5)])
        box = adapter.parking(sub.service, sub.prefix)
        page = await box.skim(None, 3)
        rest = await box.skim(page.next, 3)
        found = [*page.letters, *rest.letters]
        whole = (await box.browse(None, 10)).letters
        assert rest.next is None
        assert [(x.address, x.event.id) for x in found] == [(x.address, x.event.id) for x in whole]
        with pytest.raises(ConfigError, match="cursor"):
            await box.skim("nonsense", 3)
        delta = headers.for_redrive({}, "me", time.time())
        orders = [Redrive(letter.address, delta) for letter in (*found, found[0])]
        assert await box.redrive(orders) == ["done"] * 5 + ["gone"]
        async with adapter.consume(sub) as consumer:
            back = await take(consumer, 5)
            assert [delivery.event.data for delivery in back] == [{"n": n} for n in range(5)]
        assert await box.depth() == 0
        # Somebody's own entry has no event id beside it: it is read as a whole.
        await client.xadd(adapter.options.names.of_service(sub.service, sub.prefix).dlq, {"data": "by hand"})
        (letter,) = (await box.skim(None, 3)).letters
        assert letter.event.body == b"by hand"
    finally:
        await adapter.aclose()


async def test_large_letters_make_short_pages(sub: Subscription) -> None:
    """No more of them in memory than a few megabytes; every letter is on one page, and all can be put back."""
    adapter = await opened()
    try:
        await park_all(adapter, sub, [Event("a", b"x" * 400_000, id=f"e{n}") for n in range(60)])
        box = adapter.parking(sub.service, sub.prefix)
        for look in (box.browse, box.skim):
            pages, cursor = list[list[str]](), None
            while not pages or cursor is not None:
                page = await look(cursor, 50)
                pages.append([letter.event.id for letter in page.letters])
                cursor = page.next
            assert [id for page_ids in pages for id in page_ids] == [f"e{n}" for n in range(60)]
            assert all(len(page_ids) <= 25 for page_ids in pages)
        report = await DeadLetters(box, sub.service).redrive()
        assert (report.done, await box.depth()) == (60, 0)
    finally:
        await adapter.aclose()


async def test_a_letter_that_was_put_back_carries_its_story_and_what_was_changed_in_it(sub: Subscription) -> None:
    """The changes travel beside the story; the next letter made of it has one story again, which counts on."""
    adapter = await opened()
    try:
        await park_all(adapter, sub, [Event("a", id="e1")])
        box = adapter.parking(sub.service, sub.prefix)
        (before,) = (await box.browse(None, 1)).letters
        for times in (1, 2):
            assert (await DeadLetters(box, sub.service).redrive(by="ana")).done == 1
            async with adapter.consume(sub) as consumer:
                (delivery,) = await take(consumer, 1)
                assert await consumer.settle([(delivery, decide(park("no"), delivery, DEFAULT_POLICY))]) == ["done"]
            (letter,) = (await box.browse(None, 1)).letters
            assert letter.headers[headers.REDRIVEN_COUNT] == times
            assert letter.headers[headers.REDRIVEN_BY] == "ana"
            assert letter.headers.keys() >= before.headers.keys()
            (skimmed,) = (await box.skim(None, 1)).letters
            assert skimmed.headers[headers.REDRIVEN_COUNT] == times
    finally:
        await adapter.aclose()


async def test_old_letters_are_expired(sub: Subscription, caplog: pytest.LogCaptureFixture) -> None:
    """Beyond dlq_max_age they go, in pieces, with everything beside them; younger ones stay."""
    adapter = await opened(dlq_max_age=None, dlq_max_entries=None)
    try:
        await park_all(adapter, sub, [Event("a") for _ in range(700)])
        assert await adapter.expire(sub.service, sub.prefix) == 0
        vars(adapter)["options"] = replace(adapter.options, dlq_max_age=0.001)
        await asyncio.sleep(0.01)
        assert await adapter.expire(sub.service, sub.prefix) == 700
        assert await adapter.parking(sub.service, sub.prefix).depth() == 0
        vars(adapter)["options"] = replace(adapter.options, dlq_max_age=3600.0)
        await park_all(adapter, sub, [Event("b")])
        assert await adapter.expire(sub.service, sub.prefix) == 0
        assert await adapter.parking(sub.service, sub.prefix).depth() == 1
    finally:
        await adapter.aclose()


async def test_nothing_is_left_of_a_letter_that_is_gone(sub: Subscription, client: Redis) -> None:
    """Re-driven, purged or acknowledged: index, owners and waiting times go with it."""
    adapter = await opened()
    try:
        await park_all(adapter, sub, [Event("a", id=f"e{n % 3}") for n in range(9)])
        parking = adapter.parking(sub.service, sub.prefix)
        assert len(await parking.find("e1")) == 3, "duplicates are all found"
        addresses = [letter.address for letter in (await parking.browse(None, 10)).letters]
        assert await parking.purge([*addresses[:3], "0-1", "nonsense"]) == ["done"] * 3 + ["gone", "gone"]
        orders = [Redrive(address, {}) for address in addresses[2:6]]
        assert await parking.redrive(orders) == ["gone", "done", "done", "done"]
        async with adapter.consume(replace(sub, dead_letters=True)) as reader:
            held = await take(reader, 3)
            assert await reader.settle([(delivery, ACK) for delivery in held]) == ["done"] * 3
        assert await parking.depth() == 0
        key = f"{{{sub.prefix}}}:dlq:{sub.service}"
        assert await client.hlen(f"{key}:ids") == 0
        assert await client.zcard(f"{key}:waiting") == 0
        assert await client.hkeys(f"{key}:owners") in ([], [b"@last"])
    finally:
        await adapter.aclose()


async def test_a_redrive_may_wait_and_may_bring_another_body(sub: Subscription) -> None:
    """By the retry road, with a mended body; the rest is as it was."""
    adapter = await opened()
    try:
        sent = Event("a", b"broken", key="k", headers={"x-mine": "yes"})
        await park_all(adapter, sub, [sent])
        parking = adapter.parking(sub.service, sub.prefix)
        (letter,) = (await parking.browse(None, 1)).letters
        delta = headers.for_redrive(letter.headers, "ana", time.time())
        assert await parking.redrive([Redrive(letter.address, delta, b"mended", 0.3)]) == ["done"]
        assert (await adapter.stats(sub.service, sub.prefix)).delayed == 1
        async with adapter.consume(sub) as consumer:
            delivery = (await take(consumer))[0]
            assert delivery.event == sent.replace(body=b"mended")
            assert (delivery.history.redriven, delivery.suspect) == (1, False)
            await consumer.settle([(delivery, ACK)])
    finally:
        await adapter.aclose()


async def test_readers_hold_letters_by_a_lease(sub: Subscription) -> None:
    """One reader at a time; a wait is kept; a reader that vanished is replaced when its lease is over."""
    adapter = await opened()
    dead = replace(sub, dead_letters=True)
    try:
        await park_all(adapter, sub, [Event("a", n) for n in range(4)])
        first = await adapter.consume(dead).__aenter__()
        held = await take(first, 4)
        async with adapter.consume(dead) as second:
            assert await second.receive(10, 0.3) == []
            later = Requeue(time.time() + 0.5, 0.5, {})
            verdict = decide(park("again"), held[2], DEFAULT_POLICY)
            assert isinstance(verdict, Park)
            answers = await first.settle([(held[0], later), (held[1], RELEASE), (held[2], verdict)])
            assert answers == ["done"] * 3
            assert await first.settle([(held[0], ACK)]) == ["lost"]
            found = await take(second, 2)
            assert {delivery.event.data for delivery in found} == {0, 1}
            first._ending.set()  # type: ignore[attr-defined]  # it stands still
            orphan = (await take(second))[0]
            assert orphan.event.data == 3
            assert await first.settle([(held[3], ACK)]) == ["lost"]
            assert await second.settle([(delivery, ACK) for delivery in [*found, orphan]]) == ["done"] * 3
        await first.aclose()
        assert await adapter.parking(sub.service, sub.prefix).depth() == 1, "never parked again, never lost"
    finally:
        await adapter.aclose()


async def test_operations_are_flat_in_time(sub: Subscription, client: Redis) -> None:
    """At 100,000 letters a page, a search, a purge and a re-drive cost about what they cost at 1,000."""
    adapter = await opened(dlq_max_entries=None)
    key = f"{{{sub.prefix}}}:dlq:{sub.service}"
    try:
        await park_all(adapter, sub, [Event("a", id=f"e{n}") for n in range(1000)])
        parking = adapter.parking(sub.service, sub.prefix)

        async def cost() -> float:
            best = 1e9
            for turn in range(15):
                started = time.perf_counter()
                page = await parking.browse(None, 20)
                await parking.find(page.letters[5].event.id)
                await parking.depth()
                await adapter.stats(sub.service, sub.prefix)
                if turn % 2:
                    await parking.purge([page.letters[0].address])
                else:
                    await parking.redrive([Redrive(page.letters[0].address, {})])
                best = min(best, time.perf_counter() - started)
            return best

        small = await cost()
        # Filled on the server: parking a hundred thousand one by one is not what is measured here.
        fill = (
            "for i=1,tonumber(ARGV[1]) do local id='f'..i..'-'..ARGV[2] local l=redis.call('XADD',KEYS[1],'*','id',id,"
            "'type','a','source','s','time','2026-01-01T00:00:00Z','data','x','x-event-id',id) "
            "redis.call('HSET',KEYS[2],id,l) end"
        )
        for piece in range(10):
            await client.eval(fill, 2, key, f"{key}:ids", 10_000, piece)
        assert await parking.depth() > 100_000
        large = await cost()
        assert large < small * 5 + 0.005
        cursor, seen = None, 0
        for _ in range(5):
            page = await parking.browse(cursor, 500)
            cursor, seen = page.next, seen + len(page.letters)
        assert seen == 2500
    finally:
        await client.delete(key, f"{key}:ids")
        await adapter.aclose()


async def test_a_parked_letter_shows_up_for_its_reader(sub: Subscription) -> None:
    """A reader that waits gets what is parked meanwhile, and a wake ends its waiting."""
    adapter = await opened()
    try:
        await adapter.provision([sub], "create")
        async with adapter.consume(replace(sub, dead_letters=True)) as reader:
            waiting = asyncio.create_task(reader.receive(10, 20.0))
            await park_all(adapter, sub, [Event("a")])
            assert len(await waiting) == 1
            waiting = asyncio.create_task(reader.receive(10, 20.0))
            await asyncio.sleep(0.05)
            reader.wake()
            assert await waiting == []
    finally:
        await adapter.aclose()


async def test_bad_questions_are_answered_plainly(sub: Subscription) -> None:
    """A cursor of another world, a service that does not exist."""
    adapter = await opened()
    try:
        with pytest.raises(UnknownService):
            await adapter.parking(sub.service, sub.prefix).depth()
        await adapter.provision([sub], "create")
        with pytest.raises(ConfigError, match="cursor"):
            await adapter.parking(sub.service, sub.prefix).browse("12; FLUSHALL", 10)
        assert await adapter.parking(sub.service, sub.prefix).find("nobody") == []
        await eventually(lambda: adapter.stats(sub.service, sub.prefix), "stats work")
    finally:
        await adapter.aclose()
