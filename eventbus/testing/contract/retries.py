"""Retries: how often, how long, to whom (spec 3)."""

from __future__ import annotations

import asyncio
import itertools
import time

from eventbus import headers
from eventbus.event import Event
from eventbus.policy import RetryPolicy
from eventbus.settlement import Delivery
from eventbus.status import Outcome, retry
from eventbus.testing.contract.harness import BrokerUnderTest, Contract, drained, eventually, running


class RetryContract(Contract):
    """The delayed retry loop of one service."""

    async def test_retries_used_up_park_after_n_plus_one_calls(self, broker: BrokerUnderTest) -> None:
        """max_retries=N means N+1 calls, then parked as max-retries; each call knows its number and the last."""
        service = broker.service(retry=RetryPolicy(max_retries=2, delay=0.1))
        calls: list[tuple[int, bool]] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> int:
            calls.append((delivery.attempt, delivery.is_last_attempt))
            return 500

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await eventually(bus.dead_letters(service).count, "it was parked")
            letter = (await bus.dead_letters(service).browse()).letters[0]
        assert calls == [(1, False), (2, False), (3, True)]
        assert (letter.reason, letter.retries, letter.status) == ("max-retries", 2, 500)

    async def test_a_retry_comes_only_to_the_service_that_failed(self, broker: BrokerUnderTest) -> None:
        """Another service that got the same event does not see the retries."""
        failing, other = broker.service("failing"), broker.service("other")
        seen: list[str] = []

        @failing.on("#")
        async def fail(event: Event, delivery: Delivery) -> int | None:
            seen.append("failing")
            return 500 if delivery.attempt < 3 else None

        @other.on("#")
        async def fine(event: Event) -> None:
            seen.append("other")

        async with broker.bus() as bus, running(bus, failing, other):
            await bus.publish("order.created")
            await eventually(lambda: seen.count("failing") == 3, "the third attempt came")
            await drained(bus, failing)
            await drained(bus, other)
        assert seen.count("other") == 1

    async def test_a_retry_is_never_early_and_not_very_late(self, broker: BrokerUnderTest) -> None:
        """Each retry comes after its delay, and at most the broker's own lateness after it."""
        delay = 0.4
        service = broker.service(retry=RetryPolicy(max_retries=2, delay=delay))
        calls: list[float] = []

        @service.on("#")
        async def handle(event: Event) -> int:
            calls.append(time.time())
            return 500

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await eventually(lambda: len(calls) == 3, "all attempts were made")
        for before, after in itertools.pairwise(calls):
            assert after - before >= delay - 0.002
            assert after - before <= delay + broker.lateness(delay) + 0.5  # a busy machine is not the broker

    async def test_a_long_delay_does_not_block_a_shorter_one(self, broker: BrokerUnderTest) -> None:
        """A message that waits long does not hold back one that was delayed later but is due sooner."""
        service = broker.service(max_local_delay=0)
        order: list[str] = []

        @service.on("*")
        async def handle(event: Event, delivery: Delivery) -> Outcome | None:
            if delivery.attempt == 1:
                return retry(after=30.0 if event.type == "long" else 0.2)
            order.append(event.type)
            return None

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("long")
            await asyncio.sleep(0.05)  # so that the long one is surely first in line
            await bus.publish("short")
            await eventually(lambda: order, "the short one came back", within=10)
        assert order == ["short"]

    async def test_retry_after_is_kept_where_it_is_longer(self, broker: BrokerUnderTest) -> None:
        """retry(after=...) waits the larger of it and the policy's delay."""
        service = broker.service(retry=RetryPolicy(max_retries=1, delay=0.1))
        calls: list[float] = []

        @service.on("#")
        async def handle(event: Event) -> Outcome | None:
            calls.append(time.time())
            return retry("busy", after=0.6) if len(calls) == 1 else None

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await eventually(lambda: len(calls) == 2, "it came again")
        assert calls[1] - calls[0] >= 0.598

    async def test_attempts_survive_a_restart_of_the_consumer(self, broker: BrokerUnderTest) -> None:
        """The count goes on with another consumer, and the policy of that consumer is applied to it."""
        calls: list[int] = []

        def replica(max_retries: int) -> object:
            service = broker.service(retry=RetryPolicy(max_retries=max_retries, delay=0.2))

            @service.on("#")
            async def handle(event: Event, delivery: Delivery) -> int:
                calls.append(delivery.attempt)
                return 500

            return service

        async with broker.bus() as bus, running(bus, replica(10)):  # type: ignore[arg-type]
            await bus.publish("order.created")
            await eventually(lambda: len(calls) >= 2, "two attempts were made")
        made = len(calls)
        second = replica(made)
        async with broker.bus() as bus, running(bus, second):  # type: ignore[arg-type]
            await eventually(bus.dead_letters(second).count, "it was parked")  # type: ignore[arg-type]
        assert calls == list(range(1, made + 2))

    async def test_a_retried_message_is_the_same_message(self, broker: BrokerUnderTest) -> None:
        """Body, id, key, tenant and the publisher's headers are the same at every attempt."""
        service = broker.service()
        seen: list[Event] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> int | None:
            seen.append(event)
            return 500 if delivery.attempt == 1 else None

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("blob", b"\x00\xff", key="k", tenant="acme", headers={"x-mine": "yes"})
            await eventually(lambda: len(seen) == 2, "it came again")
        first, second = seen
        for name in ("id", "type", "source", "time", "key", "tenant", "body", "content_type"):
            assert getattr(first, name) == getattr(second, name), name
        assert second.headers["x-mine"] == "yes"
        assert not any(headers.is_reserved(name) for name in second.headers)

    async def test_in_place_retries_hold_the_message(self, broker: BrokerUnderTest) -> None:
        """mode="in-place" calls again without letting the next event of a single-file route pass."""
        service = broker.service(retry=RetryPolicy(max_retries=2, delay=0.1, mode="in-place"))
        order: list[tuple[int, int]] = []

        @service.on("#", concurrency=1)
        async def handle(event: Event, delivery: Delivery) -> int | None:
            number = int(str(event.data))
            order.append((number, delivery.attempt))
            return 500 if number == 1 else None

        async with broker.bus() as bus:
            await bus.provision(service)
            await bus.publish("a", 1)
            await bus.publish("a", 2)
            async with running(bus, service):
                await eventually(lambda: (2, 1) in order, "the second event was handled")
                await eventually(bus.dead_letters(service).count, "the first one was parked")
        assert order == [(1, 1), (1, 2), (1, 3), (2, 1)]
