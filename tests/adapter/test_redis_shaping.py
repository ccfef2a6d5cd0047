"""Turns of tenants and the elected reader, on the real server."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from eventbus.adapter import Subscription
from eventbus.event import Event
from eventbus.settlement import ACK, Delivery, Release
from eventbus.shaping import Fairness
from eventbus_redis import RedisAdapter, turns
from eventbus_redis.leased import LeasedConsumer
from tests.brokers import redis


@pytest.fixture
async def adapter() -> AsyncIterator[RedisAdapter]:
    adapter = RedisAdapter.from_url(redis.shared_url(), {"lease": "1s"})
    await adapter.open()
    yield adapter
    await adapter.aclose()


def subscription(fairness: Fairness | None = None, *, ordered: bool = False) -> Subscription:
    prefix = f"t{secrets.token_hex(4)}"
    return Subscription(f"{prefix}-s", prefix, fairness=fairness, ordered=ordered)


async def receive(consumer: LeasedConsumer, number: int) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(15):
        while len(found) < number:
            found += await consumer.receive(number - len(found), 1.0)
    return found


async def test_tenants_come_by_turns_whatever_waits_before_them(
    adapter: RedisAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three in a row each, twice as many for a weight of two, although one tenant's backlog came first."""
    monkeypatch.setattr(turns, "BUDGET", 60.0)  # turns are among those that one receive has time to take over
    sub = subscription(Fairness(weights={"gold": 2}))
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a", n, tenant="big") for n in range(2500)])
    late = [Event("a", n, tenant=tenant) for tenant in ("x", "gold", None) for n in range(60)]
    await adapter.publish(sub.prefix, late)
    async with adapter.consume(sub) as consumer:
        found = await receive(consumer, 240)  # type: ignore[arg-type]
        counts = Counter(delivery.event.tenant for delivery in found)
        assert counts["x"] == counts[None] == 60 == counts["gold"]
        stats = await adapter.stats(sub.service, sub.prefix)
        assert (stats.ready, stats.inflight) == (2680 - 240, 240)
        assert await consumer.settle([(delivery, ACK) for delivery in found]) == ["done"] * 240
        mine = [delivery.event.data for delivery in found if delivery.event.tenant == "big"]
        assert mine == sorted(mine)  # type: ignore[type-var]


async def test_a_lonely_event_is_not_kept_waiting(adapter: RedisAdapter) -> None:
    """A consumer that waits is woken by the first new event."""
    sub = subscription(Fairness())
    await adapter.provision([sub], "create")
    async with adapter.consume(sub) as consumer:
        waiting = asyncio.ensure_future(consumer.receive(10, 5.0))
        await asyncio.sleep(0)
        await adapter.publish(sub.prefix, [Event("a", 1)])
        assert [delivery.event.data for delivery in await waiting] in ([1], [])
        rest = await consumer.receive(10, 5.0)
        assert len(rest) + len(waiting.result()) == 1


async def test_turns_can_be_switched_off_without_loss(adapter: RedisAdapter) -> None:
    """What waits in the tenants' lists is found by a consumer without fairness; then the service can leave."""
    sub = subscription(Fairness())
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a", n, tenant=f"t{n % 3}") for n in range(1500)])
    async with adapter.consume(sub) as fair:
        await receive(fair, 10)  # type: ignore[arg-type]
    plain = Subscription(sub.service, sub.prefix)
    seen: list[object] = []
    async with adapter.consume(plain) as consumer:
        while len(seen) < 1500:
            found = await receive(consumer, 10)  # type: ignore[arg-type]
            await consumer.settle([(delivery, ACK) for delivery in found])
            seen += [delivery.event.data for delivery in found]
    assert sorted(seen) == list(range(1500))  # type: ignore[type-var]
    await adapter.unsubscribe(sub.service, sub.prefix)


async def test_one_reads_and_another_takes_over_in_order(adapter: RedisAdapter) -> None:
    """The second replica gets nothing while the first reads; then what it left, in order, and only then new ones."""
    sub = subscription(ordered=True)
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a", n, key="k") for n in range(10)])
    async with adapter.consume(sub) as second:
        async with adapter.consume(sub) as first:
            held = await receive(first, 6)  # type: ignore[arg-type]
            assert await second.receive(10, 0.6) == []
            await first.settle([(held[0], ACK), (held[2], Release({"x-retries": 1})), (held[1], Release())])
        again = await receive(second, 9)  # type: ignore[arg-type]
        assert [delivery.event.data for delivery in again] == list(range(1, 10))
        assert [delivery.suspect for delivery in again] == [False] * 2 + [True] * 3 + [False] * 4
        assert [delivery.attempt for delivery in again[:3]] == [1, 2, 1]


async def test_a_dead_reader_is_followed_by_another(adapter: RedisAdapter) -> None:
    """A reader that vanishes without a word is followed once its lease is over; its late settlements are refused."""
    sub = subscription(ordered=True)
    await adapter.provision([sub], "create")
    await adapter.publish(sub.prefix, [Event("a", n, key="k") for n in range(4)])
    first = adapter.consume(sub)
    assert isinstance(first, LeasedConsumer)
    await first.__aenter__()
    held = await receive(first, 2)
    assert first._keeper is not None
    first._keeper.cancel()
    async with adapter.consume(sub) as second:
        again = await receive(second, 4)  # type: ignore[arg-type]
        assert [(delivery.event.data, delivery.suspect) for delivery in again] == [
            (0, True), (1, True), (2, False), (3, False)
        ]  # fmt: skip
        assert await first.settle([(delivery, ACK) for delivery in held]) == ["lost", "lost"]
        await second.settle([(delivery, ACK) for delivery in again])
    await first.aclose()
