"""Dead letters: the story they carry, and what an operator can do with them (spec 5)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eventbus.bus import Bus
from eventbus.deadletter import DeadLetter
from eventbus.errors import BrokerError
from eventbus.event import Event
from eventbus.policy import RetryPolicy
from eventbus.service import Service
from eventbus.settlement import Delivery
from eventbus.testing.contract.harness import BrokerUnderTest, Contract, drained, eventually, running


async def _park(broker: BrokerUnderTest, bus: Bus, service: Service, events: Sequence[Event]) -> None:
    """Park events of a service by a handler that always fails."""
    failing = Service(service.name, prefix=service.prefix, retry=RetryPolicy(max_retries=0))

    @failing.on("#")
    async def fail(event: Event) -> None:
        raise ValueError(f"cannot do {event.type}")

    letters = bus.dead_letters(service)
    async with broker.bus() as other, running(other, failing):
        await bus.publish_many(events)

        async def parked() -> bool:
            return await letters.count() == len(events)

        await eventually(parked, f"{len(events)} parked")


class DeadLetterContract(Contract):
    """Look, re-drive, purge: nothing lost, nothing doubled in the quiet case."""

    async def test_a_letter_tells_its_whole_story(self, broker: BrokerUnderTest) -> None:
        """Queue, status, error, counts, times and every attempt are in the letter; body and headers as they were."""
        service = broker.service(retry=RetryPolicy(max_retries=2, delay=0.1))

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> int:
            return 500 + delivery.attempt

        async with broker.bus() as bus, running(bus, service):
            sent = await bus.publish(
                "order.created", b"\x00\xffraw", key="k1", tenant="acme", headers={"x-mine": "as it was"}
            )
            await eventually(bus.dead_letters(service).count, "it was parked")
            letter = (await bus.dead_letters(service).browse()).letters[0]
        assert (letter.id, letter.type, letter.key, letter.tenant) == (sent.id, "order.created", "k1", "acme")
        assert letter.body == b"\x00\xffraw"
        assert letter.headers["x-mine"] == "as it was"
        assert service.name in letter.original_queue
        assert (letter.reason, letter.status, letter.retries) == ("max-retries", 503, 2)
        assert letter.error
        assert [(attempt.number, attempt.reason) for attempt in letter.attempts] == [(1, "501"), (2, "502"), (3, "503")]
        times = (letter.enqueued_at, letter.first_failed_at, letter.last_failed_at, letter.parked_at)
        assert None not in times
        assert list(times) == sorted(times)  # type: ignore[type-var]

    async def test_looking_consumes_nothing(self, broker: BrokerUnderTest) -> None:
        """Count, pages, filters, stats, get and export read the same letters again and again."""
        service = broker.service()
        async with broker.bus() as bus:
            await bus.provision(service)
            events = [Event(f"order.{n % 2}", {"n": n}, tenant=f"t{n % 3}") for n in range(12)]
            await _park(broker, bus, service, events)
            letters = bus.dead_letters(service)
            for _ in range(2):
                seen, cursor = [], None
                while True:
                    page = await letters.browse(after=cursor, limit=5)
                    seen += [letter.id for letter in page.letters]
                    cursor = page.next
                    if cursor is None:
                        break
                assert sorted(seen) == sorted(event.id for event in events)
                assert await letters.count() == 12
                assert await letters.count("type=order.1 tenant=t1") == 2
                assert await letters.stats("type") == {"order.0": 6, "order.1": 6}
                assert [letter.id for letter in await letters.get(events[3].id)] == [events[3].id]
                assert len([row async for row in letters.export()]) == 12
            assert (await bus.stats(service)).parked == 12

    async def test_redrive_brings_letters_back_to_their_service_alone(self, broker: BrokerUnderTest) -> None:
        """A re-driven letter is handled by its own service, as it was sent, and by nobody else."""
        service, other = broker.service("mine"), broker.service("other")
        seen: list[tuple[str, Event, Delivery]] = []
        for one in (service, other):

            @one.on("#")
            async def handle(event: Event, delivery: Delivery) -> None:
                seen.append((delivery.service, event, delivery))

        async with broker.bus() as bus:
            await bus.provision(service)
            sent = Event("order.created", b"\x00\xff", key="k", tenant="acme", headers={"x-mine": "yes"})
            await _park(broker, bus, service, [sent])
            await bus.provision(other)
            report = await bus.dead_letters(service).redrive(by="ana")
            assert (report.done, report.failed, report.gone) == (1, 0, 0)
            async with running(bus, service, other):
                await eventually(lambda: seen, "it was handled")
                await drained(bus, service)
                await drained(bus, other)
            assert await bus.dead_letters(service).count() == 0
        assert [name for name, _, _ in seen] == [service.name]
        _, event, delivery = seen[0]
        assert (event.id, event.body, event.key, event.tenant) == (sent.id, sent.body, "k", "acme")
        assert event.headers == {"x-mine": "yes"}
        assert delivery.history.redriven == 1

    async def test_the_count_goes_on_after_a_redrive_and_a_call_is_sure(self, broker: BrokerUnderTest) -> None:
        """An exhausted letter gets exactly one call and is parked again; with reset_attempts it starts over."""
        service = broker.service(retry=RetryPolicy(max_retries=1, delay=0.1))
        calls: list[int] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> int:
            calls.append(delivery.attempt)
            return 500

        async with broker.bus() as bus, running(bus, service):
            letters = bus.dead_letters(service)
            await bus.publish("order.created")
            await eventually(letters.count, "it was parked")
            await letters.redrive(by="ana")
            await eventually(lambda: len(calls) == 3, "it got its call")
            await eventually(letters.count, "it was parked again")
            again = (await letters.browse()).letters[0]
            assert (again.redriven, again.redriven_by, again.retries) == (1, "ana", 1)
            await letters.redrive(reset_attempts=True)
            await eventually(lambda: len(calls) == 5, "it started over")
        assert calls == [1, 2, 2, 1, 2]

    async def test_redrive_chooses_by_id_filter_and_limit(self, broker: BrokerUnderTest) -> None:
        """Only the chosen letters move, a dry run moves none, and what is gone is said to be gone."""
        service = broker.service()
        async with broker.bus() as bus:
            await bus.provision(service)
            events = [Event(f"order.{n}", {"n": n}) for n in range(6)]
            await _park(broker, bus, service, events)
            letters = bus.dead_letters(service)
            assert (await letters.redrive(dry_run=True)).matched == 6
            assert await letters.count() == 6
            assert (await letters.redrive([events[0].id])).ids == [events[0].id]
            assert (await letters.redrive(where="type=order.1")).ids == [events[1].id]
            assert (await letters.redrive(limit=2)).done == 2
            assert await letters.count() == 2
            assert (await letters.redrive([events[0].id])).matched == 0
            assert (await bus.stats(service)).ready == 4

    async def test_two_operators_do_not_double(self, broker: BrokerUnderTest) -> None:
        """When two move the same letters, each letter is moved by one of them."""
        service = broker.service()
        seen: list[str] = []

        @service.on("#")
        async def handle(event: Event) -> None:
            seen.append(event.id)

        async with broker.bus() as bus, broker.bus() as second:
            await bus.provision(service)
            events = [Event("order.created", {"n": n}) for n in range(30)]
            await _park(broker, bus, service, events)
            page = await bus.dead_letters(service).browse(limit=30)
            ids = [letter.id for letter in page.letters]
            first = await bus.dead_letters(service).redrive(ids[:20])
            rest = await second.dead_letters(service).redrive(ids)
            assert (first.done, rest.done) == (20, 10)
            async with running(bus, service):
                await eventually(lambda: len(seen) >= 30, "all came back")
                await drained(bus, service)
        assert sorted(seen) == sorted(event.id for event in events)

    async def test_purge_removes_for_good(self, broker: BrokerUnderTest) -> None:
        """Purged letters are gone; the others stay."""
        service = broker.service()
        async with broker.bus() as bus:
            await bus.provision(service)
            await _park(broker, bus, service, [Event(f"order.{n}") for n in range(4)])
            letters = bus.dead_letters(service)
            assert (await letters.purge(where="type=order.2", dry_run=True)).matched == 1
            assert (await letters.purge(where="type=order.2")).done == 1
            assert (await letters.purge(limit=1)).done == 1
            assert await letters.count() == 2
            stats = await bus.stats(service)
            assert (stats.ready, stats.parked) == (0, 2)

    async def test_a_dead_letter_consumer_gets_them_and_failure_leaves_them(self, broker: BrokerUnderTest) -> None:
        """@service.dead_letters gets the letters; a failing call leaves them parked, success removes them."""
        service = broker.service()
        calls: list[list[DeadLetter]] = []
        fail = True

        @service.dead_letters(batch=10)
        async def keep(letters: list[DeadLetter]) -> int:
            calls.append(letters)
            return 500 if fail else 200

        async with broker.bus() as bus:
            await bus.provision(service)
            sent = Event("order.created", b"\x00\xff", headers={"x-mine": "yes"})
            await _park(broker, bus, service, [sent])
            async with running(bus, service):
                await eventually(lambda: calls, "the consumer was called")
            assert await bus.dead_letters(service).count() == 1
            fail = False
            letter = calls[0][0]
            assert (letter.id, letter.body, letter.reason) == (sent.id, sent.body, "max-retries")
            assert letter.headers == {"x-mine": "yes"}
            # Whoever looks at it later: it is still there, with its story, and can be re-driven.
            assert (await bus.dead_letters(service).redrive()).done == 1

    async def test_unsubscribe_loses_nothing(self, broker: BrokerUnderTest) -> None:
        """A service with messages cannot be unsubscribed; an empty one gets nothing any more afterwards."""
        service = broker.service()
        async with broker.bus() as bus:
            await bus.provision(service)
            await bus.publish("order.created")
            await eventually(lambda: _ready(bus, service), "it is there")
            with pytest.raises(BrokerError):
                await bus.unsubscribe(service)

            @service.on("#")
            async def handle(event: Event) -> None:
                return None

            async with running(bus, service):
                await drained(bus, service)
            await bus.unsubscribe(service)
            await bus.publish("order.created")
            await bus.provision(service)
            assert (await bus.stats(service)).ready == 0


async def _ready(bus: Bus, service: Service) -> bool:
    return (await bus.stats(service)).ready == 1
