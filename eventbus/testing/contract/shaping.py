"""Shaping: fairness, rates, idempotency, order of keys, batches, times far ahead (spec 8).

What an adapter cannot do is not skipped: its test then sees that asking for it is an error at start, with the fix.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path

import pytest

from eventbus.batch import Batch
from eventbus.bus import Bus
from eventbus.errors import ConfigError
from eventbus.event import Event
from eventbus.policy import RetryPolicy
from eventbus.service import Service
from eventbus.settlement import Delivery
from eventbus.shaping import Fairness, Idempotency, Rate
from eventbus.status import Outcome
from eventbus.testing.contract.harness import BrokerUnderTest, Contract, drained, eventually, running

KEYS = 5


class ShapingContract(Contract):
    """Each point from outside, the same on every broker."""

    # --- fairness --------------------------------------------------------------------------------------------

    async def test_a_large_tenant_does_not_keep_the_others_waiting(self, broker: BrokerUnderTest) -> None:
        """With fairness the small tenants are done long before the large one, although it was there first."""
        service = broker.service(concurrency=1, prefetch=64, fairness=Fairness())
        order: list[str | None] = []
        going = asyncio.Event()

        @service.on("#")
        async def handle(event: Event) -> None:
            await going.wait()
            order.append(event.tenant)

        async with broker.bus() as bus:
            fair_receive = bus.adapter.capabilities.fair_receive
            reach = 400 if fair_receive else 24  # beyond it, a fetched window sees nothing
            await bus.provision(service)
            await bus.publish_many([Event("mail.due", n, tenant="large") for n in range(reach)])
            small = [Event("mail.due", n, tenant=f"small-{tenant}") for tenant in range(3) for n in range(6)]
            await bus.publish_many(small)
            async with running(bus, service):
                if not fair_receive:
                    await eventually(lambda: bus.health[service.name].held == reach + 18, "all are in the window")
                going.set()
                await eventually(lambda: len(order) == reach + 18, "all were handled")
                await drained(bus, service)
                turns = {turn.tenant: turn for turn in bus.fairness(service)}
        last = max(place for place, tenant in enumerate(order) if tenant != "large")
        # Their share of the work is 4 times their own 18; a worker may hold a window of the large one's by then.
        assert last < (4 * 18 + 64 if reach > 64 else reach)
        assert turns["large"].total_processed == reach
        assert {turn.total_processed for turn in turns.values()} == {reach, 6}
        assert turns["small-0"].last_processed_at is not None

    async def test_a_tenant_has_at_most_three_in_a_row(self, broker: BrokerUnderTest) -> None:
        """While others wait, a tenant gets three in a row; one with a weight of two gets six."""
        service = broker.service(concurrency=1, prefetch=64, fairness=Fairness(weights={"gold": 2}))
        order: list[str | None] = []
        started, going = asyncio.Event(), asyncio.Event()

        @service.on("#")
        async def handle(event: Event) -> None:
            started.set()
            await going.wait()
            order.append(event.tenant)

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("first", tenant="nobody")
            await started.wait()
            await bus.publish_many([Event("mail.due", tenant=tenant) for tenant in ("gold", "tin") for _ in range(12)])
            await eventually(lambda: bus.health[service.name].held == 25, "all of them were fetched")
            going.set()
            await eventually(lambda: len(order) == 25, "all were handled")
        runs = [(tenant, len(list(run))) for tenant, run in itertools.groupby(order[1:19])]
        assert sorted(runs) == [("gold", 6), ("gold", 6), ("tin", 3), ("tin", 3)]

    # --- rates -----------------------------------------------------------------------------------------------

    async def test_a_rate_is_never_exceeded_and_costs_nothing(self, broker: BrokerUnderTest) -> None:
        """At most so many calls in any period, by tenant with exceptions; no attempt is spent on waiting."""
        limits = Rate(4, 0.6, by="tenant", tenants={"gold": 8})
        service = broker.service(rate=[Rate(20, 0.6), limits], concurrency=32)
        calls: dict[str | None, list[float]] = defaultdict(list)
        attempts: Counter[int] = Counter()

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> None:
            calls[event.tenant].append(time.monotonic())
            attempts[delivery.attempt] += 1

        async with broker.bus() as bus, running(bus, service):
            events = [Event("mail.due", n, tenant=tenant) for tenant in ("gold", "tin") for n in range(12)]
            await bus.publish_many(events)
            await eventually(lambda: attempts.total() == 24, "all were handled")
            await drained(bus, service)
        for tenant, limit in (("gold", 8), ("tin", 4)):
            for first, last in zip(calls[tenant], calls[tenant][limit:], strict=False):
                assert last - first > 0.55
        assert attempts == {1: 24}

    async def test_a_route_that_must_wait_holds_no_slot_of_another(self, broker: BrokerUnderTest) -> None:
        """A route at its rate's end waits without keeping the events of other routes."""
        service = broker.service()
        seen: list[str] = []

        @service.on("mail.*", rate=Rate(1, 30.0), concurrency=1)
        async def mail(event: Event) -> None:
            seen.append(event.type)

        @service.on("order.*", concurrency=1)
        async def order(event: Event) -> None:
            seen.append(event.type)

        async with broker.bus() as bus, running(bus, service):
            await bus.publish_many([Event("mail.due"), Event("mail.due"), Event("order.created")])
            await eventually(lambda: sorted(seen) == ["mail.due", "order.created"], "one of each was handled")
            assert bus.health[service.name].running == 0

    async def test_a_rate_of_the_service_is_shared(self, broker: BrokerUnderTest, tmp_path: Path) -> None:
        """scope="service" counts all replicas together; a broker without a store of its own asks for one at start."""
        calls: list[float] = []
        store: str | None = None

        def replica() -> Service:
            service = broker.service(rate=Rate(5, 0.8, scope="service", store=store))

            @service.on("#")
            async def handle(event: Event) -> None:
                calls.append(time.monotonic())

            return service

        async with broker.bus() as bus:
            if bus.adapter.store() is None:
                with pytest.raises(ConfigError, match="store = "):
                    async with running(bus, replica()):
                        pass
                store = f"sqlite:///{tmp_path}/store.db"
            one, two = replica(), replica()
            await bus.provision(one)
            await bus.publish_many([Event("mail.due", n) for n in range(15)])
            other = bus if not bus.adapter.capabilities.multi_process else await self._another(broker)
            try:
                async with running(bus, one):
                    if other is bus:
                        await eventually(lambda: len(calls) == 15, "all were handled")
                    else:
                        async with running(other, two):
                            await eventually(lambda: len(calls) == 15, "all were handled")
            finally:
                if other is not bus:
                    await other.aclose()
        calls.sort()
        for first, last in zip(calls, calls[5:], strict=False):
            assert last - first > 0.75

    async def _another(self, broker: BrokerUnderTest) -> Bus:
        bus = broker.bus()
        await bus.open()
        return bus

    # --- idempotency -----------------------------------------------------------------------------------------

    async def test_what_is_completed_is_not_handled_again(self, broker: BrokerUnderTest) -> None:
        """A second copy of a completed event is acknowledged without a call; a failed one's retry is called."""
        service = broker.service(idempotency=Idempotency("memory://"))
        calls: list[tuple[str, int]] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> int:
            calls.append((event.id, delivery.attempt))
            return 500 if event.id == "fails" and delivery.attempt == 1 else 200

        async with broker.bus() as bus, running(bus, service):
            for id in ("a", "fails", "a", "b"):
                await bus.publish("mail.due", id=id)
                await drained(bus, service)
            await bus.publish("mail.due", id="a")
            await drained(bus, service)
            assert await bus.dead_letters(service).count() == 0
        assert calls == [("a", 1), ("fails", 1), ("fails", 2), ("b", 1)]

    async def test_completions_are_remembered_across_restarts(self, broker: BrokerUnderTest, tmp_path: Path) -> None:
        """The broker keeps them, or a store that is named; a broker without one of its own asks for it at start."""
        calls: list[str] = []
        store: str | None = None

        def replica() -> Service:
            service = broker.service(idempotency=Idempotency(store))

            @service.on("#")
            async def handle(event: Event) -> None:
                calls.append(event.id)

            return service

        async with broker.bus() as bus:
            service = replica()
            if bus.adapter.store() is None:
                with pytest.raises(ConfigError, match="store = "):
                    async with running(bus, service):
                        pass
                store = f"sqlite:///{tmp_path}/store.db"
            for _ in range(2):
                service = replica()
                async with running(bus, service):
                    await bus.publish("mail.due", id="a")
                    await drained(bus, service)
        assert calls == ["a"]

    async def test_a_redrive_of_a_completed_event_is_not_handled_again(self, broker: BrokerUnderTest) -> None:
        """A parked copy of an event that another copy completed is acknowledged when it is re-driven."""
        service = broker.service(idempotency=Idempotency("memory://"))
        calls: list[str] = []

        @service.on("#")
        async def handle(event: Event) -> int | Outcome:
            calls.append(event.type)
            return Outcome(code="550") if event.type == "bad" else 200

        @service.on("bad", retry=RetryPolicy(max_retries=0))
        async def bad(event: Event) -> int:
            calls.append(event.type)
            return 500

        async with broker.bus() as bus, running(bus, service):
            await bus.publish(Event("bad", id="a", source="x"))
            await eventually(bus.dead_letters(service).count, "the first copy was parked")
            await bus.publish(Event("good", id="a", source="x"))
            await drained(bus, service)
            await bus.dead_letters(service).redrive()
            await drained(bus, service)
            assert await bus.dead_letters(service).count() == 0
        assert calls == ["bad", "good"]

    async def test_a_claim_keeps_concurrent_copies_apart(self, broker: BrokerUnderTest) -> None:
        """With a claim a second copy waits while the first is handled, and is acknowledged when that is done."""
        service = broker.service(idempotency=Idempotency("memory://", claim="30s"))
        running_now, most, calls = 0, 0, 0

        @service.on("#")
        async def handle(event: Event) -> None:
            nonlocal running_now, most, calls
            calls += 1
            running_now += 1
            most = max(most, running_now)
            await asyncio.sleep(0.1)
            running_now -= 1

        async with broker.bus() as bus, running(bus, service):
            await bus.publish_many([Event("mail.due", id="a", source="x") for _ in range(4)])
            await drained(bus, service)
        assert (calls, most) == (1, 1)

    # --- order of keys ---------------------------------------------------------------------------------------

    async def test_the_order_of_keys_is_kept_or_refused(self, broker: BrokerUnderTest) -> None:
        """Events of a key are handled one by one, in order, also through retries; or asking for it is an error."""
        service = broker.service(ordering="key", retry=RetryPolicy(max_retries=3, delay=0.05), concurrency=16)
        done: dict[str | None, list[object]] = defaultdict(list)
        running_now: Counter[str | None] = Counter()
        retried = 0

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> int:
            nonlocal retried
            running_now[event.key] += 1
            assert running_now[event.key] == 1, "two of one key at once"
            await asyncio.sleep(0)
            running_now[event.key] -= 1
            number = event.data
            assert isinstance(number, int)
            if number % 7 == 0 and delivery.attempt < 3:
                retried += 1
                return 500
            done[event.key].append(number)
            return 200

        async with broker.bus() as bus:
            if not bus.adapter.capabilities.key_order:
                with pytest.raises(ConfigError, match="cannot keep the order of keys"):
                    async with running(bus, service):
                        pass
                return
            await bus.provision(service)
            await bus.publish_many([Event("order.changed", n, key=f"k{n % KEYS}") for n in range(60)])
            async with running(bus, service):
                await eventually(lambda: sum(map(len, done.values())) == 60, "all were handled")
                await drained(bus, service)
        assert done == {f"k{key}": list(range(key, 60, KEYS)) for key in range(KEYS)}
        assert retried == 18

    async def test_followers_wait_for_a_retry_and_go_on_after_a_parking(self, broker: BrokerUnderTest) -> None:
        """A failing event holds back its key and no other; once it is parked its followers go on."""
        service = broker.service(ordering="key", retry=RetryPolicy(max_retries=2, delay=0.15), concurrency=4)
        seen: list[tuple[object, int]] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> int:
            seen.append((event.data, delivery.attempt))
            return 500 if event.data == "poison" else 200

        async with broker.bus() as bus:
            if not bus.adapter.capabilities.key_order:
                with pytest.raises(ConfigError, match="leave it out"):
                    async with running(bus, service):
                        pass
                return
            async with running(bus, service):
                await bus.publish_many(
                    [Event("x", data, key=key) for key, data in (("a", "poison"), ("a", "next"), ("b", "other"))]
                )
                await eventually(lambda: ("next", 1) in seen, "the follower went on")
                await drained(bus, service)
                assert await bus.dead_letters(service).count() == 1
        assert [entry for entry in seen if entry[0] != "other"] == [
            ("poison", 1), ("poison", 2), ("poison", 3), ("next", 1)
        ]  # fmt: skip
        assert seen.index(("other", 1)) < 3

    async def test_the_order_of_keys_survives_a_restart(self, broker: BrokerUnderTest) -> None:
        """What a stopped replica hands back, and what a vanished one held, is handled in order by the next."""
        done: dict[str | None, list[object]] = defaultdict(list)

        def replica(stop_after: int) -> tuple[Service, asyncio.Event]:
            service, enough = broker.service(ordering="key", concurrency=8), asyncio.Event()

            @service.on("#")
            async def handle(event: Event) -> None:
                await asyncio.sleep(0.2 if enough.is_set() else 0.002)  # the stop comes before all are handled
                done[event.key].append(event.data)
                if sum(map(len, done.values())) >= stop_after:
                    enough.set()

            return service, enough

        async with broker.bus() as bus:
            first, enough = replica(30)
            if not bus.adapter.capabilities.key_order:
                with pytest.raises(ConfigError, match="use a broker that can"):
                    async with running(bus, first):
                        pass
                return
            await bus.provision(first)
            await bus.publish_many([Event("order.changed", n, key=f"k{n % KEYS}") for n in range(100)])
            async with running(bus, first):
                await enough.wait()
            assert sum(map(len, done.values())) < 100
            async with bus.adapter.consume(first.subscription()) as vanishing:
                await eventually(lambda: _some(vanishing), "it got something, and never said a word about it")
            second, _ = replica(1000)
            async with running(bus, second):
                await eventually(lambda: sum(map(len, done.values())) >= 100, "the rest was handled", within=60.0)
                await drained(bus, second)
        # First completions: a lease that ends while the machine stands still makes a duplicate, never another order.
        firsts = {key: list(dict.fromkeys(found)) for key, found in done.items()}
        assert firsts == {f"k{key}": list(range(key, 100, KEYS)) for key in range(KEYS)}

    # --- batches ---------------------------------------------------------------------------------------------

    async def test_one_poisoned_event_costs_a_batch_little(self, broker: BrokerUnderTest) -> None:
        """Of a batch with one poisoned event all others are acknowledged in one run, at no cost to their budget."""
        service = broker.service(retry=RetryPolicy(max_retries=0))
        size = 200
        calls: list[int] = []
        stored: list[object] = []

        @service.batch("#", size=size, timeout=0.5, concurrency=1)
        async def insert(rows: list[int], batch: Batch) -> None:
            calls.append(len(rows))
            assert all(entry.delivery.attempt == 1 for entry in batch)
            if 77 in rows:
                raise ValueError("duplicate key")
            stored.extend(rows)

        async with broker.bus() as bus:
            await bus.provision(service)
            await bus.publish_many([Event("user.created", n) for n in range(size)])
            async with running(bus, service):
                await eventually(bus.dead_letters(service).count, "the poisoned one was parked")
                await drained(bus, service)
        assert sorted(stored) == [n for n in range(size) if n != 77]  # type: ignore[type-var]
        batches = sum(count > 100 for count in calls)
        assert len(calls) <= max(batches, 1) + 2 * size.bit_length() + 3

    async def test_a_batch_that_is_filling_is_handled_at_shutdown(self, broker: BrokerUnderTest) -> None:
        """A stopped replica does not wait for its batch to fill, and does not throw it back either."""
        service = broker.service()
        calls: list[list[int]] = []

        @service.batch("#", size=100, timeout=60.0)
        async def insert(rows: list[int]) -> None:
            calls.append(rows)

        async with broker.bus() as bus:
            await bus.provision(service)
            await bus.publish_many([Event("user.created", n) for n in range(7)])
            async with running(bus, service):
                await eventually(lambda: bus.health[service.name].held == 7, "the batch is filling")
                assert calls == []
            stats = await bus.stats(service)
            assert (stats.ready, stats.inflight, stats.delayed) == (0, 0, 0)
        assert [sorted(rows) for rows in calls] == [list(range(7))]

    # --- times far ahead -------------------------------------------------------------------------------------

    async def test_an_event_for_days_ahead_waits_across_restarts(self, broker: BrokerUnderTest) -> None:
        """process_after days ahead: not called, not lost, through two restarts; a short one comes in time."""
        calls: list[str] = []

        def replica() -> Service:
            service = broker.service(max_local_delay=0.05)

            @service.on("#")
            async def handle(event: Event) -> None:
                calls.append(event.type)

            return service

        async with broker.bus() as bus:
            await bus.provision(replica())
            await bus.publish("later", process_after=timedelta(days=3), ttl=timedelta(days=4))
            service = replica()
            for number in range(2):
                async with running(bus, replica()):
                    await bus.publish(f"soon-{number}", process_after=timedelta(seconds=0.3))
                    await eventually(lambda n=number: f"soon-{n}" in calls, "the near one came")  # type: ignore[misc]
                    await eventually(lambda: _delayed(bus, service), "the far one waits at the broker")
            assert calls == ["soon-0", "soon-1"]
            stats = await bus.stats(service)
            assert (stats.ready, stats.delayed, stats.parked) == (0, 1, 0)

    async def test_an_event_past_its_time_is_parked_without_a_call(self, broker: BrokerUnderTest) -> None:
        """ttl: whoever comes too late is parked as expired, also after it waited for a later time."""
        service = broker.service()
        calls: list[str] = []

        @service.on("#")
        async def handle(event: Event) -> None:
            calls.append(event.type)

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("late", process_after=timedelta(seconds=0.4), ttl=timedelta(seconds=0.2))
            await eventually(bus.dead_letters(service).count, "it was parked")
            letter = (await bus.dead_letters(service).browse()).letters[0]
            await drained(bus, service)
        assert (letter.type, letter.reason, calls) == ("late", "expired", [])


async def _some(consumer: object) -> bool:
    return bool(await consumer.receive(5, 0.5))  # type: ignore[attr-defined]


async def _delayed(bus: Bus, service: Service) -> bool:
    stats = await bus.stats(service)
    return (stats.ready, stats.inflight, stats.delayed) == (0, 0, 1)
