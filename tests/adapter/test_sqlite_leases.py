"""Leases and fencing: a delivery belongs to one consumer at a time, and only the owner's word counts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eventbus import Bus, Service, headers
from eventbus.adapter import Subscription
from eventbus.errors import BrokerError, UnknownService
from eventbus.event import Event
from eventbus.settlement import ACK, RELEASE, Delivery, Release, Requeue, Retry
from tests.adapter.sqlite_support import SUB, eventually, freeze, locked, opened, parking, receive, sql


async def test_what_a_dead_consumer_held_comes_again_as_suspect(tmp_path: Path) -> None:
    """When a lease runs out, another consumer gets the delivery, marked suspect, attempts unchanged."""
    async with opened(tmp_path, SUB, lease=0.3) as adapter:
        await adapter.publish("wms", [Event("a")])
        async with adapter.consume(SUB) as dead, adapter.consume(SUB) as other:
            (old,) = await receive(dead)
            freeze(dead)
            started = time.time()
            (new,) = await receive(other)
            assert time.time() - started > 0.2
            assert (new.event, new.suspect, new.attempt) == (old.event, True, 1)


async def test_a_late_word_of_a_former_owner_changes_nothing(tmp_path: Path) -> None:
    """Ack, retry and park of a delivery that another consumer holds now are answered `lost`."""
    async with opened(tmp_path, SUB, lease=0.2) as adapter:
        await adapter.publish("wms", [Event("a"), Event("b"), Event("c")])
        async with adapter.consume(SUB) as slow, adapter.consume(SUB) as other:
            a, b, c = await receive(slow, 3)
            freeze(slow)
            new = await receive(other, 3)
            later = Retry(time.time() + 60, 60, {headers.RETRIES: 1})
            assert await slow.settle([(a, ACK), (b, later), (c, parking(c))]) == ["lost"] * 3
            stats = await adapter.stats("wms-stock", "wms")
            assert (stats.inflight, stats.delayed, stats.parked) == (3, 0, 0)
            assert await other.settle([(delivery, ACK) for delivery in new]) == ["done"] * 3


async def test_some_of_a_settle_may_be_lost(tmp_path: Path) -> None:
    """One answer per item: what is still held is carried out, the rest is lost."""
    async with opened(tmp_path, SUB, lease=0.2) as adapter:
        await adapter.publish("wms", [Event("n", n) for n in range(6)])
        async with adapter.consume(SUB) as slow, adapter.consume(SUB) as other:
            old = await receive(slow, 6)
            freeze(slow)
            taken = await receive(other, 2)
            mine = [delivery for delivery in old if delivery.event.id not in {new.event.id for new in taken}]
            answers = await slow.settle([(delivery, ACK) for delivery in old])
            assert answers.count("lost") == 2
            assert all(answers[old.index(delivery)] == "done" for delivery in mine)
            assert await other.settle([(delivery, ACK) for delivery in taken]) == ["done"] * 2


async def test_a_delivery_named_twice_is_settled_once(tmp_path: Path) -> None:
    """In one settle call the first word about a delivery counts; the second is lost."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        await adapter.publish("wms", [Event("a")])
        (delivery,) = await receive(consumer)
        later = Requeue(time.time() + 60, 60, {})
        assert await consumer.settle([(delivery, later), (delivery, later), (delivery, ACK)]) == [
            "done",
            "lost",
            "lost",
        ]
        assert (await adapter.stats("wms-stock", "wms")).delayed == 1


async def test_a_held_delivery_is_renewed(tmp_path: Path) -> None:
    """A consumer that is alive keeps what it holds for many leases; nobody else gets it."""
    async with opened(tmp_path, SUB, lease=0.3) as adapter:
        await adapter.publish("wms", [Event("a")])
        async with adapter.consume(SUB) as one, adapter.consume(SUB) as two:
            (delivery,) = await receive(one)
            assert await two.receive(1, 1.2) == []
            assert await one.settle([(delivery, ACK)]) == ["done"]


async def test_the_worker_is_told_what_was_taken_away(tmp_path: Path) -> None:
    """The next renewal notices that another consumer took over, and says so once."""
    async with opened(tmp_path, SUB, lease=0.3) as adapter:
        await adapter.publish("wms", [Event("a"), Event("b")])
        async with adapter.consume(SUB) as one, adapter.consume(SUB) as two:
            told: list[Delivery] = []
            one.lost = told.extend  # type: ignore[method-assign, assignment]
            a, b = await receive(one, 2)
            # As if the lease had run out while this process stood still.
            sql(tmp_path, "UPDATE inflight SET due = 0 WHERE seq = (SELECT min(seq) FROM inflight)")
            (stolen,) = await receive(two)
            await eventually(lambda: told, "it was told")
            assert told == [a]
            assert await one.settle([(a, ACK), (b, ACK)]) == ["lost", "done"]
            assert await two.settle([(stolen, ACK)]) == ["done"]


async def test_a_consumer_that_claims_its_own_again_forgets_the_first(tmp_path: Path) -> None:
    """After standing still a consumer may get its own delivery anew; only the newer one can be settled."""
    async with opened(tmp_path, SUB, lease=0.2) as adapter:
        await adapter.publish("wms", [Event("a")])
        async with adapter.consume(SUB) as consumer:
            told: list[Delivery] = []
            consumer.lost = told.extend  # type: ignore[method-assign, assignment]
            (first,) = await receive(consumer)
            freeze(consumer)
            (second,) = await receive(consumer)
            assert (told, second.suspect) == ([first], True)
            assert await consumer.settle([(first, ACK), (second, ACK)]) == ["lost", "done"]


async def test_a_note_outlives_its_writer(tmp_path: Path) -> None:
    """A crash note is in the file before the call; whoever gets the delivery next reads it."""
    async with opened(tmp_path, SUB, lease=0.2) as adapter:
        await adapter.publish("wms", [Event("a")])
        async with adapter.consume(SUB) as doomed, adapter.consume(SUB) as other:
            (delivery,) = await receive(doomed)
            assert await doomed.note(delivery, {headers.CRASHES: 2, headers.RETRIES: 1})
            freeze(doomed)
            (again,) = await receive(other)
            assert (again.history.crashes, again.attempt, again.suspect) == (2, 2, True)
            assert not await doomed.note(delivery, {headers.CRASHES: 3})
            assert not await doomed.note(delivery, {headers.CRASHES: 3})
            assert await other.settle([(again, Release({headers.CRASHES: None}))]) == ["done"]
            (clean,) = await receive(other)
            assert (clean.history.crashes, clean.attempt, clean.suspect) == (0, 2, False)


async def test_a_note_and_a_retry_add_up(tmp_path: Path) -> None:
    """Headers of a note and of a later settlement are merged; None takes one away."""
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("a")])
        async with adapter.consume(SUB) as consumer:
            (delivery,) = await receive(consumer)
            await consumer.note(delivery, {headers.CRASHES: 1, headers.REQUEUES: 4})
            await consumer.settle([(delivery, Requeue(time.time(), 0, {headers.CRASHES: None, headers.RETRIES: 7}))])
            (again,) = await receive(consumer)
            history = again.history
            assert (history.crashes, history.requeues, history.retries, again.suspect) == (0, 4, 7, False)


async def test_closing_lets_go_at_once(tmp_path: Path) -> None:
    """What a closed consumer held can be received at once, as suspect; its late settle still counts until then."""
    async with opened(tmp_path, SUB, lease=60) as adapter:
        await adapter.publish("wms", [Event("a"), Event("b")])
        first = await adapter.consume(SUB).__aenter__()
        a, b = await receive(first, 2)
        await first.aclose()
        await first.aclose()
        assert await first.settle([(a, ACK)]) == ["done"]
        async with adapter.consume(SUB) as second:
            (again,) = await receive(second)
            assert (again.event, again.suspect) == (b.event, True)
            assert await first.settle([(b, ACK)]) == ["lost"]
        assert await first.receive(1, 0.1) == []


async def test_a_released_delivery_is_not_suspect(tmp_path: Path) -> None:
    """Release hands back at once and at no cost."""
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("a")])
        async with adapter.consume(SUB) as one, adapter.consume(SUB) as two:
            (delivery,) = await receive(one)
            waiting = asyncio.ensure_future(two.receive(1, 5.0))
            assert await one.settle([(delivery, RELEASE)]) == ["done"]
            (again,) = await waiting
            assert (again.suspect, again.attempt) == (False, 1)


async def test_a_cancelled_receive_keeps_nothing(tmp_path: Path) -> None:
    """Deliveries claimed for a receive that was cancelled are handed back, not left to their lease."""
    async with opened(tmp_path, SUB, lease=60) as adapter, adapter.consume(SUB) as consumer:
        await adapter.publish("wms", [Event("a")])
        task = asyncio.ensure_future(consumer.receive(1, 5.0))
        # Let it get as far as having asked the writer, whose answer can only arrive in a later turn of the loop.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (delivery,) = await receive(consumer)
        assert not delivery.suspect


async def test_a_settle_that_fails_can_be_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the file is locked a settle answers `failed` and nothing has happened; later it succeeds."""
    async with opened(tmp_path, SUB, lock_timeout="50ms") as adapter:
        await adapter.publish("wms", [Event("a"), Event("b")])
        async with adapter.consume(SUB) as consumer:
            a, b = await receive(consumer, 2)
            with locked(tmp_path):
                assert await consumer.settle([(a, ACK), (b, parking(b))]) == ["failed", "failed"]
                with pytest.raises(BrokerError, match="locked"):
                    await consumer.note(a, {headers.CRASHES: 1})
            assert "locked by another process" in caplog.text
            assert await consumer.settle([(a, ACK), (b, parking(b))]) == ["done", "done"]


async def test_a_service_without_a_subscription_is_told_what_to_do(tmp_path: Path) -> None:
    """Consuming, counting and browsing for an unknown service say so, and how to mend it."""
    ghost = Subscription("wms-ghost", "wms")
    async with opened(tmp_path, SUB) as adapter:
        with pytest.raises(UnknownService, match="provision"):
            await adapter.consume(ghost).__aenter__()
        with pytest.raises(UnknownService, match="provision"):
            await adapter.consume(ghost).receive(1, 0)
        with pytest.raises(UnknownService):
            await adapter.stats("wms-ghost", "wms")
        with pytest.raises(UnknownService):
            await adapter.parking("wms-ghost", "wms").browse(None, 10)
        with pytest.raises(UnknownService):
            await adapter.unsubscribe("wms-ghost", "wms")


async def test_a_consumer_notices_that_its_service_was_unsubscribed(tmp_path: Path) -> None:
    """An unsubscribed service's consumer is told; subscribed anew, it starts from there."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        await adapter.unsubscribe("wms-stock", "wms")
        with pytest.raises(UnknownService):
            await consumer.receive(1, 0.1)
        await adapter.publish("wms", [Event("missed")])
        await adapter.provision([SUB], "create")
        await adapter.publish("wms", [Event("seen")])
        assert [delivery.event.type for delivery in await receive(consumer)] == ["seen"]


async def test_unsubscribe_refuses_while_anything_is_left(tmp_path: Path) -> None:
    """Ready, held, delayed or parked: each keeps the subscription; the refusal says how many."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:

        async def refused(words: str) -> None:
            with pytest.raises(BrokerError, match=words):
                await adapter.unsubscribe("wms-stock", "wms")

        await adapter.publish("wms", [Event("a")])
        await refused("1 messages and 0 dead letters")
        (delivery,) = await receive(consumer)
        await refused("1 messages")
        await consumer.settle([(delivery, Requeue(time.time() + 0.2, 0.2, {}))])
        await refused("1 messages")
        (delivery,) = await receive(consumer)
        await consumer.settle([(delivery, parking(delivery))])
        await refused("0 messages and 1 dead letters")
        letters = adapter.parking("wms-stock", "wms")
        await letters.purge([letter.address for letter in (await letters.browse(None, 10)).letters])
        await adapter.unsubscribe("wms-stock", "wms")


async def test_provision_begins_at_the_end_and_can_be_repeated(tmp_path: Path) -> None:
    """A new service gets nothing from before; provisioning again moves nothing; verify only looks."""
    late = Subscription("wms-late", "wms")
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("before")])
        assert await adapter.provision([late], "off") == []
        (drift,) = await adapter.provision([SUB, late], "verify")
        assert (drift.resource, drift.found, drift.wanted) == ("wms.queue.wms-late", "missing", "present")
        assert await adapter.provision([late], "create") == []
        await adapter.publish("wms", [Event("after")])
        await adapter.provision([SUB, late], "create")
        assert await adapter.provision([SUB, late], "verify") == []
        assert (await adapter.stats("wms-late", "wms")).ready == 1
        assert (await adapter.stats("wms-stock", "wms")).ready == 2


async def test_a_blocked_event_loop_keeps_its_leases(tmp_path: Path) -> None:
    """Leases are renewed by a thread: a handler that blocks the loop for longer than a lease loses nothing."""
    url = f"sqlite:///{tmp_path}/bus.db?lease=300ms"
    async with Bus(url, source="wms-api") as bus:
        stock = Service("wms-stock")
        await bus.provision(stock)
        await bus.publish("order.created")
        async with bus.adapter.consume(stock.subscription()) as consumer:
            (delivery,) = await consumer.receive(1, 5.0)
            # A second consumer in a process of its own looks for work all the while that this loop stands still.
            command = [sys.executable, "-c", _LOOK, url]
            other = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: ASYNC221 - it must block
            assert other.stdout.strip() == "0"
            assert await consumer.settle([(delivery, ACK)]) == ["done"]


_LOOK = """
import asyncio, sys
from eventbus import Bus, Service

async def main():
    stock = Service("wms-stock")
    async with Bus(sys.argv[1]) as bus:
        async with bus.adapter.consume(stock.subscription()) as consumer:
            print(len(await consumer.receive(1, 1.5)))

asyncio.run(main())
"""
