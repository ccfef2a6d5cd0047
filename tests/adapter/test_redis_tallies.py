"""Stats of dead letters by index: after whatever happens to letters, the counters equal a full scan."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from eventbus import Event, Service, headers
from eventbus.adapter import BodyMapping, Redrive, Subscription
from eventbus.facets import FACETS, facets
from eventbus.policy import DEFAULT_POLICY, decide
from eventbus.settlement import ACK, RELEASE, Park, Requeue
from eventbus.status import Outcome, park
from eventbus_redis import RedisAdapter
from eventbus_redis.parking import RedisParking
from tests.adapter.test_redis_streams import make, take
from tests.brokers import redis

ERRORS = (
    park("no such mailbox"),
    park("order 7 is gone"),
    Outcome(error=ValueError("\u00e4 \u0000 \U0001f4a5"), code="550"),
)
TENANTS = (None, "acme", "caf\u00e9", '{"a": 1}', " ")

PARKED = st.tuples(st.just("park"), st.integers(1, 4), st.sampled_from(ERRORS), st.sampled_from(TENANTS))
NAMES = ("redrive", "redrive skimmed", "redrive late", "purge", "read", "put off", "too many", "too old")
CHANGES = st.sampled_from(NAMES).map(lambda name: (name,))


async def counted(parking: RedisParking) -> None:
    """Every counter, and the depth, against the letters themselves."""
    letters = (await parking.browse(None, 1000)).letters
    assert await parking.depth() == len(letters)
    for facet in FACETS:
        assert await parking.tally(facet) == Counter(facets(x.event, x.headers)[facet] for x in letters), facet


class Life:
    """One service whose letters come and go."""

    def __init__(self, adapter: RedisAdapter, sub: Subscription) -> None:
        self.adapter, self.sub = adapter, sub
        self.parking = adapter.parking(sub.service, sub.prefix)

    async def run(self, steps: Sequence[tuple[object, ...]]) -> None:
        await self.adapter.provision([self.sub], "create")
        for name, *arguments in steps:
            await getattr(self, f"do_{str(name).replace(' ', '_')}")(*arguments)
            await counted(self.parking)

    async def addresses(self) -> list[str]:
        return [letter.address for letter in (await self.parking.browse(None, 1000)).letters]

    async def do_park(self, number: int, outcome: Outcome, tenant: str | None) -> None:
        events = [Event(f"order.{n % 2}", {"n": n}, tenant=tenant) for n in range(number)]
        await self.adapter.publish(self.sub.prefix, events)
        async with self.adapter.consume(self.sub) as consumer:
            held = await take(consumer, number)
            for delivery in held:  # also those that were re-driven before
                verdict = decide(outcome, delivery, DEFAULT_POLICY)
                parked = verdict if isinstance(verdict, Park) else Park("max-retries", verdict.headers)  # type: ignore[union-attr]
                assert await consumer.settle([(delivery, parked)]) == ["done"]

    async def do_redrive(self) -> None:
        chosen = (await self.addresses())[::2]
        assert set(await self.parking.redrive([Redrive(a, {headers.REDRIVEN_COUNT: 1}) for a in chosen])) <= {"done"}
        assert set(await self.parking.redrive([Redrive(a, {}) for a in chosen])) <= {"gone"}

    async def do_redrive_skimmed(self) -> None:
        chosen = [letter.address for letter in (await self.parking.skim(None, 1000)).letters][::2]
        assert set(await self.parking.redrive([Redrive(a, {}) for a in chosen])) <= {"done"}

    async def do_redrive_late(self) -> None:
        """Another operator was faster with some of the letters that were skimmed."""
        chosen = [letter.address for letter in (await self.parking.skim(None, 1000)).letters]
        taken = chosen[::3]
        await self.adapter.parking(self.sub.service, self.sub.prefix).redrive([Redrive(a, {}) for a in taken])
        answers = await self.parking.redrive([Redrive(a, {}) for a in chosen[:-1]])
        assert answers == ["gone" if a in taken else "done" for a in chosen[:-1]]

    async def do_purge(self) -> None:
        chosen = (await self.addresses())[1::2]
        assert set(await self.parking.purge([*chosen, "1-1"])) <= {"done", "gone"}
        assert set(await self.parking.purge(chosen)) <= {"gone"}

    async def do_read(self) -> None:
        await self._read(ACK)

    async def do_put_off(self) -> None:
        await self._read(Requeue(0.0, 0.0, {}))
        await self._read(RELEASE)

    async def _read(self, verdict: object) -> None:
        async with self.adapter.consume(replace(self.sub, dead_letters=True)) as consumer:
            held = await consumer.receive(2, 0.01)
            await consumer.settle([(delivery, verdict) for delivery in held])  # type: ignore[misc]

    async def do_too_many(self) -> None:
        await self._expire(dlq_max_entries=2)

    async def do_too_old(self) -> None:
        await asyncio.sleep(0.002)
        await self._expire(dlq_max_age=0.001)

    async def _expire(self, **limits: float) -> None:
        before = self.adapter.options
        self.adapter.options = replace(before, **limits)  # type: ignore[arg-type]
        await self.adapter.expire(self.sub.service, self.sub.prefix)
        self.adapter.options = before


@settings(max_examples=30)
@example([("park", 4, ERRORS[0], "acme"), ("redrive late",)])
@example([("park", 4, ERRORS[2], "caf\u00e9"), ("park", 1, ERRORS[0], " "), ("redrive skimmed",)])
@given(st.lists(st.one_of(PARKED, CHANGES), max_size=8))
def test_the_index_equals_a_full_scan_after_every_operation(steps: list[tuple[object, ...]]) -> None:
    """Park, re-drive, purge, read, put off, expire by number and by age, in any order."""

    async def live() -> None:
        adapter = make(dlq_max_age=None, dlq_max_entries=None)
        await adapter.open()
        try:
            await Life(adapter, Service(f"t{secrets.token_hex(4)}-stock").subscription()).run(steps)
        finally:
            await adapter.aclose()

    asyncio.run(live())


@pytest.fixture
async def adapter() -> AsyncIterator[RedisAdapter]:
    adapter = make()
    await adapter.open()
    yield adapter
    await adapter.aclose()


@pytest.fixture
async def client() -> AsyncIterator[Redis]:
    client = Redis.from_url(redis.shared_url())
    yield client
    await client.aclose()


@pytest.fixture
def sub() -> Subscription:
    return Service(f"t{secrets.token_hex(4)}-stock").subscription()


async def test_letters_of_strangers_are_counted_as_their_readers_see_them(
    adapter: RedisAdapter, client: Redis, sub: Subscription
) -> None:
    """A consumer may take a tenant from the body; who browses does not know its mapping, and the index agrees."""
    sub = replace(sub, mapping=BodyMapping(tenant="companyId", type="kind"))
    await adapter.provision([sub], "create")
    await client.xadd(f"{{{sub.prefix}}}:main", {"data": '{"companyId": "acme", "kind": "a.b"}'})
    async with adapter.consume(sub) as consumer:
        (delivery,) = await take(consumer, 1)
        assert (delivery.event.tenant, delivery.event.type) == ("acme", "a.b")
        assert await consumer.settle([(delivery, decide(park("no"), delivery, DEFAULT_POLICY))]) == ["done"]
    await counted(adapter.parking(sub.service, sub.prefix))


async def test_an_index_that_does_not_add_up_is_not_believed(
    adapter: RedisAdapter, client: Redis, sub: Subscription
) -> None:
    """Whoever deletes letters by hand makes stats slower, not wrong: the core counts by browsing then."""
    life = Life(adapter, sub)
    await life.run([("park", 3, ERRORS[0], None)])
    assert await life.parking.tally("reason") == {"permanent": 3}
    await client.xdel(f"{{{sub.prefix}}}:dlq:{sub.service}", (await life.addresses())[0])
    assert await life.parking.tally("reason") is None


async def test_unsubscribing_leaves_nothing_behind(adapter: RedisAdapter, client: Redis, sub: Subscription) -> None:
    """With the last letter the counters are gone, and with the subscription every key of the service."""
    life = Life(adapter, sub)
    await life.run([("park", 3, ERRORS[2], "acme"), ("redrive",), ("purge",), ("read",), ("park", 1, ERRORS[0], None)])
    await life.parking.purge(await life.addresses())
    async with adapter.consume(sub) as consumer:
        held = await consumer.receive(10, 0.05)
        await consumer.settle([(delivery, ACK) for delivery in held])
    await adapter.unsubscribe(sub.service, sub.prefix)
    assert [key async for key in client.scan_iter(f"{{{sub.prefix}}}:*{sub.service}*")] == []


async def test_an_empty_queue_has_empty_tallies(adapter: RedisAdapter, sub: Subscription) -> None:
    """Known and empty, not unknown."""
    await adapter.provision([sub], "create")
    parking = adapter.parking(sub.service, sub.prefix)
    assert [await parking.tally(facet) for facet in FACETS] == [{}] * len(FACETS)
