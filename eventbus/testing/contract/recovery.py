"""Recovery: consumers that vanish, crash or are stopped lose nothing (spec 2, 7, 8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from eventbus import headers
from eventbus.adapter import Adapter, Consumer, Subscription
from eventbus.errors import TopologyMismatch
from eventbus.event import Event
from eventbus.policy import DEFAULT_POLICY, decide, requeue_until
from eventbus.settlement import ACK, RELEASE, Delivery, Park
from eventbus.status import Outcome, park, retry
from eventbus.testing.contract.harness import DEADLINE, BrokerUnderTest, Contract, drained, eventually, running


async def _receive(consumer: Consumer, number: int = 1) -> list[Delivery]:
    found: list[Delivery] = []
    deadline = asyncio.get_running_loop().time() + DEADLINE
    while len(found) < number:
        assert asyncio.get_running_loop().time() < deadline, f"only {len(found)} of {number} deliveries came"
        found += await consumer.receive(number - len(found), 0.5)
    return found


@asynccontextmanager
async def _subscribed(broker: BrokerUnderTest, subscription: Subscription) -> AsyncIterator[Adapter]:
    """An open adapter on which the service is provisioned."""
    adapter = broker.adapter()
    await adapter.open()
    try:
        await adapter.provision([subscription], "create")
        yield adapter
    finally:
        await adapter.aclose()


class RecoveryContract(Contract):
    """What happens when a consumer goes away in the middle."""

    async def test_what_a_vanished_consumer_held_comes_again_as_suspect(self, broker: BrokerUnderTest) -> None:
        """Unsettled deliveries of a consumer that is gone are delivered again, marked suspect, attempts unchanged."""
        sub = broker.service().subscription()
        async with _subscribed(broker, sub) as adapter:
            event = Event("order.created")
            await adapter.publish(sub.prefix, [event])
            async with adapter.consume(sub) as first:
                delivery = (await _receive(first))[0]
                assert not delivery.suspect
            async with adapter.consume(sub) as second:
                again = (await _receive(second))[0]
                assert (again.event.id, again.suspect, again.attempt) == (event.id, True, 1)
                assert await second.settle([(again, ACK)]) == ["done"]

    async def test_a_released_delivery_comes_again_unsuspected(self, broker: BrokerUnderTest) -> None:
        """Release hands a delivery back at no cost: soon received again, not as suspect, attempts unchanged."""
        sub = broker.service().subscription()
        async with _subscribed(broker, sub) as adapter:
            await adapter.publish(sub.prefix, [Event("order.created")])
            async with adapter.consume(sub) as consumer:
                delivery = (await _receive(consumer))[0]
                assert await consumer.settle([(delivery, RELEASE)]) == ["done"]
                again = (await _receive(consumer))[0]
                assert (again.suspect, again.attempt) == (False, 1)
                await consumer.settle([(again, ACK)])

    async def test_settle_answers_for_each(self, broker: BrokerUnderTest) -> None:
        """One settle call carries out different settlements, with one answer each."""
        sub = broker.service().subscription()
        async with _subscribed(broker, sub) as adapter:
            await adapter.publish(sub.prefix, [Event("order.created", n) for n in range(5)])
            async with adapter.consume(sub) as consumer:
                got = await _receive(consumer, 5)
                now = 1_000_000_000.0
                answers = await consumer.settle(
                    [
                        (got[0], ACK),
                        (got[1], decide(retry("x"), got[1], DEFAULT_POLICY)),
                        (got[2], decide(park("y"), got[2], DEFAULT_POLICY)),
                        (got[3], requeue_until(got[3], now + 5e9, now=now)),
                        (got[4], RELEASE),
                    ]
                )
                assert answers == ["done"] * 5
                stats = await adapter.stats(sub.service, sub.prefix)
                assert (stats.delayed, stats.parked) == (2, 1)
                again = (await _receive(consumer))[0]
                assert again.event.data == got[4].event.data
                await consumer.settle([(again, ACK)])

    async def test_settling_twice_is_lost(self, broker: BrokerUnderTest) -> None:
        """A delivery that is settled already is no longer ours: the second settle changes nothing."""
        sub = broker.service().subscription()
        async with _subscribed(broker, sub) as adapter:
            await adapter.publish(sub.prefix, [Event("order.created")])
            async with adapter.consume(sub) as consumer:
                delivery = (await _receive(consumer))[0]
                assert await consumer.settle([(delivery, ACK)]) == ["done"]
                verdict = decide(park("late"), delivery, DEFAULT_POLICY)
                assert isinstance(verdict, Park)
                assert await consumer.settle([(delivery, verdict)]) == ["lost"]
                assert (await adapter.stats(sub.service, sub.prefix)).parked == 0

    async def test_a_crash_loop_is_parked_alone(self, broker: BrokerUnderTest) -> None:
        """A message whose consumer vanished again and again while it was handled alone is parked as crash-loop."""
        service = broker.service(max_crashes=2)
        calls: list[str] = []

        @service.on("#")
        async def handle(event: Event) -> None:
            calls.append(event.type)

        sub = service.subscription()
        async with _subscribed(broker, sub) as adapter:
            await adapter.publish(sub.prefix, [Event("poison")])
            async with adapter.consume(sub) as consumer:
                await _receive(consumer)
            for crashes in range(2):
                async with adapter.consume(sub) as consumer:
                    delivery = (await _receive(consumer))[0]
                    assert delivery.suspect or delivery.noted
                    if not delivery.noted and not await consumer.note(delivery, {headers.CRASHES: crashes + 1}):
                        delivery = (await _receive(consumer))[0]  # the note travels with a copy
                        assert delivery.noted
            await adapter.publish(sub.prefix, [Event("innocent")])
        async with broker.bus() as bus, running(bus, service):
            await eventually(lambda: calls == ["innocent"], "the neighbour was handled")
            await eventually(bus.dead_letters(service).count, "the poisoned one was parked")
            letter = (await bus.dead_letters(service).browse()).letters[0]
            await drained(bus, service)
        assert (letter.type, letter.reason) == ("poison", "crash-loop")
        assert calls == ["innocent"]

    async def test_a_suspect_that_behaves_is_handled(self, broker: BrokerUnderTest) -> None:
        """A suspect that does no harm is handled like any other, and its failures are only failures."""
        service = broker.service()
        calls: list[int] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> int | None:
            calls.append(delivery.attempt)
            return 500 if delivery.attempt == 1 else None

        sub = service.subscription()
        async with _subscribed(broker, sub) as adapter:
            await adapter.publish(sub.prefix, [Event("order.created")])
            async with adapter.consume(sub) as consumer:
                await _receive(consumer)
        async with broker.bus() as bus, running(bus, service):
            await eventually(lambda: len(calls) == 2, "it was handled, failed, and came again")
            await drained(bus, service)
        assert calls == [1, 2]

    async def test_a_shutdown_loses_nothing_and_costs_nothing(self, broker: BrokerUnderTest) -> None:
        """A stopped consumer finishes what runs and hands back the rest; the next one handles it as attempt 1."""
        started = asyncio.Event()
        seen: list[tuple[object, int]] = []

        def replica(concurrency: int, *, slow: bool) -> object:
            service = broker.service(concurrency=concurrency)

            @service.on("#")
            async def handle(event: Event, delivery: Delivery) -> None:
                if slow:
                    started.set()
                    await asyncio.sleep(0.1)
                seen.append((event.data, delivery.attempt))

            return service

        async with broker.bus() as bus:
            first = replica(2, slow=True)
            await bus.provision(first)  # type: ignore[arg-type]
            await bus.publish_many([Event("order.created", n) for n in range(40)])
            async with running(bus, first):  # type: ignore[arg-type]
                await started.wait()
            finished = len(seen)
            assert 2 <= finished < 40
        second = replica(8, slow=False)
        async with broker.bus() as bus, running(bus, second):  # type: ignore[arg-type]
            await eventually(lambda: len(seen) >= 40, "the rest was handled")
            await drained(bus, second)  # type: ignore[arg-type]
        assert sorted(seen, key=str) == sorted(((n, 1) for n in range(40)), key=str)

    async def test_provision_can_be_repeated_and_verified(self, broker: BrokerUnderTest) -> None:
        """Provisioning twice changes nothing; `verify` says what is missing and makes nothing."""
        service = broker.service()
        async with broker.bus(provision="verify") as bus:
            with pytest.raises(TopologyMismatch, match="eventbus topology apply"):
                await bus.provision(service)
        async with broker.bus() as bus:
            await bus.provision(service)
            await bus.publish("order.created")
            await bus.provision(service)
            assert (await bus.stats(service)).ready == 1
        async with broker.bus(provision="verify") as bus:
            await bus.provision(service)

    async def test_a_slow_route_does_not_starve_another(self, broker: BrokerUnderTest) -> None:
        """While one route hangs with a full lane, events of another route behind it are still handled."""
        service = broker.service(prefetch=16)
        stop = asyncio.Event()
        fast: list[object] = []

        @service.on("slow", concurrency=2)
        async def slow(event: Event) -> None:
            await stop.wait()

        @service.on("fast", concurrency=2)
        async def quick(event: Event) -> None:
            fast.append(event.data)

        async with broker.bus() as bus:
            await bus.provision(service)
            await bus.publish_many([Event("slow", n) for n in range(40)])
            await bus.publish_many([Event("fast", n) for n in range(5)])
            async with running(bus, service):
                await eventually(lambda: len(fast) == 5, "the fast route got through")
                stop.set()
        assert sorted(fast) == [0, 1, 2, 3, 4]  # type: ignore[type-var]

    async def test_a_parked_outcome_of_a_lost_delivery_is_not_parked_twice(self, broker: BrokerUnderTest) -> None:
        """When two consumers parked the same delivery one after the other, only the owner's counts."""
        sub = broker.service().subscription()
        async with _subscribed(broker, sub) as adapter:
            await adapter.publish(sub.prefix, [Event("order.created")])
            first = await adapter.consume(sub).__aenter__()
            old = (await _receive(first))[0]
            await first.aclose()
            async with adapter.consume(sub) as second:
                new = (await _receive(second))[0]
                verdict = decide(Outcome(status=404), new, DEFAULT_POLICY)
                assert await second.settle([(new, verdict)]) == ["done"]
            assert await first.settle([(old, decide(park("late"), old, DEFAULT_POLICY))]) == ["lost"]
            assert (await adapter.stats(sub.service, sub.prefix)).parked == 0
