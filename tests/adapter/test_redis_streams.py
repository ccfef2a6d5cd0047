"""What only the Redis adapter has: fencing, leases, the mover, trimming, groups made again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from eventbus import Bus, Delivery, Event, RetryPolicy, Service, headers
from eventbus.adapter import Consumer, Subscription
from eventbus.errors import BrokerUnavailable, UnknownService
from eventbus.policy import DEFAULT_POLICY, decide
from eventbus.settlement import ACK, RELEASE, Park, Requeue, Retry
from eventbus.status import park
from eventbus.testing.contract.harness import eventually
from eventbus_redis import RedisAdapter
from eventbus_redis.work import WorkConsumer
from tests.brokers import redis


@pytest.fixture
async def client() -> AsyncIterator[Redis]:
    client = Redis.from_url(redis.shared_url())
    yield client
    await client.aclose()


@pytest.fixture
async def adapter() -> AsyncIterator[RedisAdapter]:
    adapter = make()
    await adapter.open()
    yield adapter
    await adapter.aclose()


@pytest.fixture
def sub() -> Subscription:
    return Service(f"t{secrets.token_hex(4)}-stock").subscription()


def make(**settings: object) -> RedisAdapter:
    return RedisAdapter.from_url(redis.shared_url(), {"lease": "1s"} | settings)


async def take(consumer: Consumer, number: int = 1) -> list[Delivery]:
    found: list[Delivery] = []

    async def enough() -> bool:
        found.extend(await consumer.receive(number - len(found), 0.2))
        return len(found) >= number

    await eventually(enough, f"{number} deliveries")
    return found


def retry_in(seconds: float) -> Retry:
    return Retry(time.time() + seconds, seconds, {headers.RETRIES: 1})


async def test_a_zombies_settlements_are_lost(adapter: RedisAdapter, sub: Subscription) -> None:
    """A consumer whose entries were claimed by another can neither acknowledge nor park nor note them."""
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a", n) for n in range(3)])
    zombie = await adapter.consume(sub).__aenter__()
    held = await take(zombie, 3)
    zombie._ending.set()  # type: ignore[attr-defined]  # it stands still
    lost: list[Delivery] = []
    zombie.lost = lost.extend  # type: ignore[method-assign,assignment]
    async with adapter.consume(sub) as other:
        taken = await take(other, 3)
        assert all(delivery.suspect for delivery in taken)
        verdict = decide(park("late"), held[1], DEFAULT_POLICY)
        assert await zombie.settle([(held[0], ACK), (held[1], verdict)]) == ["lost", "lost"]
        assert not await zombie.note(held[2], {headers.CRASHES: 1})
        assert await other.settle([(delivery, ACK) for delivery in taken]) == ["done"] * 3
    await zombie.aclose()
    stats = await adapter.stats(sub.service, sub.prefix)
    assert (stats.ready, stats.inflight, stats.parked) == (0, 0, 0)


async def test_a_renewal_does_not_steal_back(adapter: RedisAdapter, sub: Subscription) -> None:
    """Who comes back to life hears what was taken away; the new owner keeps it."""
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a")])
    first = await adapter.consume(sub).__aenter__()
    held = await take(first)
    first._ending.set()  # type: ignore[attr-defined]
    lost: list[Delivery] = []
    first.lost = lost.extend  # type: ignore[method-assign,assignment]
    async with adapter.consume(sub) as second:
        taken = await take(second)
        await first._renew()  # type: ignore[attr-defined]
        assert lost == held
        assert await second.settle([(taken[0], ACK)]) == ["done"]
    await first.aclose()


async def test_a_lease_is_renewed_while_it_is_held(adapter: RedisAdapter, sub: Subscription) -> None:
    """A delivery held for several leases stays with its consumer."""
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a")])
    async with adapter.consume(sub) as first, adapter.consume(sub) as second:
        held = await take(first)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            assert await second.receive(10, 0.5) == []
        assert await first.settle([(held[0], ACK)]) == ["done"]


async def test_a_note_survives_the_consumer_and_goes_with_the_message(
    adapter: RedisAdapter, sub: Subscription, client: Redis
) -> None:
    """A crash note is read by whoever claims the entry, and removed with it."""
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a")])
    async with adapter.consume(sub) as first:
        assert await first.note((await take(first))[0], {headers.CRASHES: 2})
    async with adapter.consume(sub) as second:
        again = (await take(second))[0]
        assert (again.suspect, again.history.crashes) == (True, 2)
        assert await client.hlen(f"{{{sub.prefix}}}:queue:{sub.service}:notes") == 1
        assert await second.settle([(again, ACK)]) == ["done"]
    assert await client.hlen(f"{{{sub.prefix}}}:queue:{sub.service}:notes") == 0


async def test_what_a_closing_consumer_never_handed_out_is_no_suspect(adapter: RedisAdapter, sub: Subscription) -> None:
    """Entries that were read and not passed on are released: nobody can have crashed on them."""
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a", n) for n in range(4)])
    async with adapter.consume(sub) as first:
        held = await take(first, 4)
        assert await first.settle([(d, RELEASE) for d in held[:2]]) == ["done"] * 2
        await adapter.publish(sub.prefix, [Event("b")])
        # Two in its own stream, one in the shared one, and a limit of one: the rest waits inside.
        assert len(await first.receive(1, 1.0)) == 1
    async with adapter.consume(sub) as second:
        found = await take(second, 5)
        assert sum(delivery.suspect for delivery in found) == 3
        await second.settle([(delivery, ACK) for delivery in found])


async def test_a_receive_that_is_cancelled_loses_nothing(adapter: RedisAdapter, sub: Subscription) -> None:
    """The call goes on; what it brings is there for the next receive, not as suspect."""
    await adapter.provision([sub], "create")
    async with adapter.consume(sub) as consumer:
        found: list[Delivery] = []
        for _ in range(5):
            receiving = asyncio.create_task(consumer.receive(10, 5.0))
            await asyncio.sleep(0.02)
            receiving.cancel()
            (result,) = await asyncio.gather(receiving, return_exceptions=True)
            found += result if isinstance(result, list) else []
            await adapter.publish(sub.prefix, [Event("a")])
        found += await take(consumer, 5 - len(found))
        assert not any(delivery.suspect for delivery in found)
        assert await consumer.settle([(delivery, ACK) for delivery in found]) == ["done"] * 5


async def test_a_receive_that_is_cancelled_as_its_answer_arrives_loses_nothing(
    adapter: RedisAdapter, sub: Subscription
) -> None:
    """The moment between the arrival of entries and the turn of whoever waits for them."""
    await adapter.provision([sub], "create")
    consumer = adapter.consume(sub)
    assert isinstance(consumer, WorkConsumer)
    async with consumer:
        receiving = asyncio.create_task(consumer.receive(10, 5.0))
        await eventually(lambda: consumer._reading is not None, "it reads")
        assert consumer._reading is not None
        consumer._reading.add_done_callback(lambda _: receiving.cancel())
        await adapter.publish(sub.prefix, [Event("a", id="once")])
        (result,) = await asyncio.gather(receiving, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError)
        (delivery,) = await take(consumer)
        assert (delivery.event.id, delivery.suspect) == ("once", False)


async def test_wake_ends_a_waiting_receive(adapter: RedisAdapter, sub: Subscription) -> None:
    """A worker that shuts down does not wait for its timeout."""
    await adapter.provision([sub], "create")
    async with adapter.consume(sub) as consumer:
        started = time.monotonic()
        receiving = asyncio.create_task(consumer.receive(10, 30.0))
        await asyncio.sleep(0.05)
        consumer.wake()
        assert await receiving == []
        assert time.monotonic() - started < 15


async def test_several_movers_move_each_message_once(adapter: RedisAdapter, sub: Subscription) -> None:
    """Many retries due at once, four consumers: each comes to one of them."""
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a", n) for n in range(600)])
    async with adapter.consume(sub) as consumer:
        held = await take(consumer, 600)
        assert set(await consumer.settle([(delivery, retry_in(0.5)) for delivery in held])) == {"done"}
    assert (await adapter.stats(sub.service, sub.prefix)).delayed > 0
    consumers = [await adapter.consume(sub).__aenter__() for _ in range(4)]
    found: list[Delivery] = []
    try:

        async def all_came() -> bool:
            for some in await asyncio.gather(*(consumer.receive(50, 0.2) for consumer in consumers)):
                found.extend(some)
            return len(found) >= 600

        await eventually(all_came, "all 600 came back")
        assert sorted(int(str(d.event.data)) for d in found) == list(range(600))
        assert {delivery.attempt for delivery in found} == {2}
    finally:
        for consumer in consumers:
            await consumer.aclose()


async def test_delays_of_seed_2_are_kept() -> None:
    """1, 2, 4, 8 and 16 s with a quarter of jitter, on a scale of one to twenty: never early, in order, in range."""
    scale = 1 / 20
    service = Service(
        f"t{secrets.token_hex(4)}-mail",
        retry=RetryPolicy.exponential(base=scale, factor=2, cap=60 * scale, jitter=0.25, max_attempts=6),
    )
    calls: list[tuple[int, float]] = []

    @service.on("#")
    async def handle(event: Event, delivery: Delivery) -> int:
        calls.append((delivery.attempt, time.time()))
        return 500

    settings = {"redis": {"lease": "1s"}}
    url, source = redis.shared_url(), f"{service.prefix}-api"
    async with Bus(url, source=source, settings=settings) as bus, bus.serving(service):
        await bus.publish("mail.send")
        await eventually(bus.dead_letters(service).count, "it was parked after its attempts")
    assert [attempt for attempt, _ in calls] == [1, 2, 3, 4, 5, 6]
    for (attempt, before), (_, after) in itertools.pairwise(calls):
        shortest = 2 ** (attempt - 1) * scale * 0.75
        assert shortest - 0.002 <= after - before <= 2 ** (attempt - 1) * scale * 1.25 + 0.25 + 0.5  # a busy machine


async def test_a_finished_stream_does_not_grow(adapter: RedisAdapter, sub: Subscription, client: Redis) -> None:
    """What every service has finished is trimmed; what one has not is kept, to the last entry."""
    slow = Service(f"{sub.prefix}-slow").subscription()
    await adapter.provision([sub, slow], "create")
    stream = f"{{{sub.prefix}}}:main"
    async with adapter.consume(sub) as consumer:
        for _ in range(10):
            await adapter.publish(sub.prefix, [Event("a", n) for n in range(500)])
            found = await take(consumer, 500)
            await consumer.settle([(delivery, ACK) for delivery in found])
        await client.delete(adapter.options.names.of_prefix(sub.prefix).guard)  # nobody trimmed a moment ago
        await adapter.trim(sub.prefix)
        assert await client.xlen(stream) == 5000, "the slow service has not read any of it"
        async with adapter.consume(slow) as late:
            for _ in range(10):
                found = await take(late, 500)
                await late.settle([(delivery, ACK) for delivery in found])

            async def trimmed() -> bool:
                return int(await client.xlen(stream)) <= 200  # whole nodes of the stream are removed

            await eventually(trimmed, "the stream was trimmed")


async def test_a_held_entry_is_never_trimmed(adapter: RedisAdapter, sub: Subscription, client: Redis) -> None:
    """The oldest entry is still being handled while thousands after it are finished."""
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("first")])
    async with adapter.consume(sub) as consumer:
        first = (await take(consumer))[0]
        for _ in range(6):
            await adapter.publish(sub.prefix, [Event("a", n) for n in range(500)])
            found = await take(consumer, 500)
            await consumer.settle([(delivery, ACK) for delivery in found])
        await adapter.trim(sub.prefix)
        assert await consumer.settle([(first, retry_in(0.0))]) == ["done"]
        again = (await take(consumer))[0]
        assert (again.event.type, again.attempt) == ("first", 2)
        await consumer.settle([(again, ACK)])


async def test_an_entry_trimmed_by_hand_is_still_settled(
    adapter: RedisAdapter, sub: Subscription, client: Redis
) -> None:
    """Somebody ran XTRIM: what a consumer holds is retried and parked from its memory, to the byte."""
    await adapter.provision([sub], "create")
    sent = [Event("a", b"\x00\xff", headers={"x-mine": "yes"}), Event("b", b"\x01")]
    await adapter.publish(sub.prefix, sent)
    async with adapter.consume(sub) as consumer:
        held = await take(consumer, 2)
        await client.xtrim(f"{{{sub.prefix}}}:main", maxlen=0, approximate=False)
        verdict = decide(park("no"), held[1], DEFAULT_POLICY)
        assert isinstance(verdict, Park)
        assert await consumer.settle([(held[0], retry_in(0.0)), (held[1], verdict)]) == ["done", "done"]
        again = (await take(consumer))[0]
        assert (again.event, again.attempt) == (sent[0], 2)
        await consumer.settle([(again, ACK)])
    page = await adapter.parking(sub.service, sub.prefix).browse(None, 10)
    assert [letter.event for letter in page.letters] == [sent[1]]


async def test_a_lagging_service_is_reported_with_its_size(sub: Subscription, caplog: pytest.LogCaptureFixture) -> None:
    """A service that does not keep up is named, with the number of events and bytes that it holds back."""
    adapter = make(lag_warning=100)
    await adapter.open()
    try:
        await adapter.provision([sub], "create")
        await adapter.publish(sub.prefix, [Event("a", "x" * 100) for _ in range(150)])
        with caplog.at_level(logging.WARNING, "eventbus"):
            await adapter.trim(sub.prefix)
        (record,) = [record for record in caplog.records if record.event == "service_lagging"]  # type: ignore[attr-defined]
        assert record.fields["service"] == sub.service  # type: ignore[attr-defined]
        assert record.fields["messages"] == 150  # type: ignore[attr-defined]
        assert record.fields["bytes"] > 15_000  # type: ignore[attr-defined]
    finally:
        await adapter.aclose()


async def test_an_abandoned_service_is_reported_by_those_who_are_left(caplog: pytest.LogCaptureFixture) -> None:
    """By a neighbour that consumes, and by a publisher when nobody consumes any more."""
    prefix = f"t{secrets.token_hex(4)}"
    abandoned, alive = Service(f"{prefix}-gone"), Service(f"{prefix}-alive")
    settings = {"redis": {"lag_warning": 20, "lease": "1s"}}
    url, source = redis.shared_url(), f"{prefix}-api"

    def reported() -> bool:
        found = [r.fields for r in caplog.records if r.event == "service_lagging"]  # type: ignore[attr-defined]
        return any(fields["service"] == abandoned.name and fields["bytes"] > 0 for fields in found)

    with caplog.at_level(logging.WARNING, "eventbus"):
        async with Bus(url, source=source, settings=settings) as bus:
            await bus.provision(abandoned, alive)
            await bus.publish_many([Event("a", n) for n in range(30)])
        caplog.clear()
        async with Bus(url, source=source, settings=settings) as bus, bus.serving(alive):
            await eventually(reported, "the neighbour said so")
        caplog.clear()
        async with Bus(url, source=source, settings=settings) as bus:
            await asyncio.sleep(0.5)  # whoever looked last is still remembered for a moment
            await bus.publish("a")
            await eventually(reported, "the publisher said so")


async def test_the_next_batch_is_read_while_this_one_is_handled(adapter: RedisAdapter, sub: Subscription) -> None:
    """Within the prefetch; what was read ahead and never handed out goes back at the end, and is no suspect."""
    sub = replace(sub, prefetch=1024)
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a", n) for n in range(1000)])

    async def inflight(number: int) -> None:
        async def found() -> bool:
            return (await adapter.stats(sub.service, sub.prefix)).inflight == number

        await eventually(found, f"{number} in flight")

    async with adapter.consume(sub) as consumer:
        first = await consumer.receive(512, 1.0)
        assert len(first) == 256
        await inflight(512)
        assert set(await consumer.settle([(delivery, ACK) for delivery in first])) == {"done"}
        await inflight(256)
    consumer = adapter.consume(replace(sub, prefetch=600))
    assert isinstance(consumer, WorkConsumer)
    async with consumer:
        rest = await take(consumer, 256)
        assert consumer._reading is None  # no room for another batch of both streams
        rest += await take(consumer, 1000 - 256 - 256)
        assert not any(delivery.suspect or delivery.history.retries for delivery in rest)
        assert len({delivery.event.id for delivery in [*first, *rest]}) == 1000
        assert set(await consumer.settle([(delivery, ACK) for delivery in rest])) == {"done"}
    assert (await adapter.stats(sub.service, sub.prefix)).ready == 0


async def test_a_destroyed_group_goes_on_from_the_stored_id(
    adapter: RedisAdapter, sub: Subscription, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """XGROUP DESTROY: what was finished before the last trimming is not delivered again, the rest is; it is said."""
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("done", n) for n in range(300)])
    async with adapter.consume(sub) as consumer:
        found = await take(consumer, 300)
        await consumer.settle([(delivery, ACK) for delivery in found])
        await client.delete(adapter.options.names.of_prefix(sub.prefix).guard)  # nobody trimmed a moment ago
        await adapter.trim(sub.prefix)
        await adapter.publish(sub.prefix, [Event("open", n) for n in range(20)])
        held = await take(consumer, 10)
        await client.xgroup_destroy(f"{{{sub.prefix}}}:main", sub.service)
        again = await take(consumer, 20)
        assert {delivery.event.type for delivery in again} == {"open"}
        assert await consumer.settle([(held[0], ACK)]) == ["lost"]
        assert await consumer.settle([(delivery, ACK) for delivery in again]) == ["done"] * 20
        stats = await adapter.stats(sub.service, sub.prefix)
        assert (stats.ready, stats.inflight) == (0, 0)
    assert "group_recreated" in caplog.text


async def test_an_unsubscribed_service_is_not_brought_back(adapter: RedisAdapter, sub: Subscription) -> None:
    """A running consumer hears that its service is gone; it does not subscribe it again."""
    await adapter.provision([sub], "create")
    async with adapter.consume(sub) as consumer:
        await adapter.unsubscribe(sub.service, sub.prefix)
        with pytest.raises(UnknownService):
            await consumer.receive(1, 0.1)
    with pytest.raises(UnknownService):
        await adapter.stats(sub.service, sub.prefix)


async def test_publishing_for_nobody_stores_nothing(adapter: RedisAdapter, sub: Subscription, client: Redis) -> None:
    """Without a subscriber the answer says so, and no memory is taken; also after the last one has left."""
    results = await adapter.publish(sub.prefix, [Event("a")])
    assert (results[0].status, results[0].subscribed) == ("stored", False)
    assert not await client.exists(f"{{{sub.prefix}}}:main")
    await adapter.provision([sub], "create")
    assert (await adapter.publish(sub.prefix, [Event("a")]))[0].subscribed is True
    async with adapter.consume(sub) as consumer:
        await consumer.settle([((await take(consumer))[0], ACK)])
    await adapter.unsubscribe(sub.service, sub.prefix)
    assert (await adapter.publish(sub.prefix, [Event("a")]))[0].subscribed is False


async def test_a_foreign_message_keeps_its_id_through_retries(
    adapter: RedisAdapter, sub: Subscription, client: Redis
) -> None:
    """A plain XADD of another program: the stream id is its id, at every attempt and in the dead letters."""
    await adapter.provision([sub], "create")
    id = (await client.xadd(f"{{{sub.prefix}}}:main", {"payload": b"\xff", "lang": "pt"})).decode()
    async with adapter.consume(sub) as consumer:
        first = (await take(consumer))[0]
        await consumer.settle([(first, retry_in(0.0))])
        second = (await take(consumer))[0]
        assert (first.event.id, second.event.id, second.event.body) == (id, id, b"\xff")
        assert abs(second.enqueued_at - int(id.partition("-")[0]) / 1000) < 0.001
        await consumer.settle([(second, decide(park("no"), second, DEFAULT_POLICY))])
    (letter,) = await adapter.parking(sub.service, sub.prefix).find(id)
    assert (letter.event.id, letter.event.body, letter.event.headers) == (id, b"\xff", {"lang": "pt"})


async def test_many_callers_share_calls(adapter: RedisAdapter, sub: Subscription) -> None:
    """A thousand publishers at once: each hears of its own event, and all are stored."""
    await adapter.provision([sub], "create")
    results = await asyncio.gather(*(adapter.publish(sub.prefix, [Event("a", n)]) for n in range(1000)))
    assert [result.status for (result,) in results] == ["stored"] * 1000
    assert (await adapter.stats(sub.service, sub.prefix)).ready == 1000


async def test_a_delay_of_years_is_a_delay(adapter: RedisAdapter, sub: Subscription) -> None:
    """A due time far beyond any calendar neither overflows nor comes early."""
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a")])
    async with adapter.consume(sub) as consumer:
        held = await take(consumer)
        far = Requeue(time.time() + 3e9, 3e9, {})
        assert await consumer.settle([(held[0], far)]) == ["done"]
        assert await consumer.receive(1, 0.5) == []
    assert (await adapter.stats(sub.service, sub.prefix)).delayed == 1


async def test_nobody_there_is_said(sub: Subscription) -> None:
    """A server that does not answer is BrokerUnavailable, with its address."""
    adapter = RedisAdapter.from_url("redis://127.0.0.1:6389", {})
    with pytest.raises(BrokerUnavailable, match=r"127.0.0.1:6389.*is Redis running"):
        await adapter.open()
    await adapter.aclose()
