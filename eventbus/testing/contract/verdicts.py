"""Verdicts: what each answer of a handler leads to (spec 2)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from http import HTTPStatus

import pytest

from eventbus.batch import Batch
from eventbus.event import Event
from eventbus.policy import RetryPolicy
from eventbus.settlement import Delivery
from eventbus.status import ConsumerStatus, Outcome, park, requeue, retry
from eventbus.testing.contract.harness import BrokerUnderTest, Contract, drained, eventually, running


class _Response:
    status_code = 204


def _raise(delivery: Delivery) -> object:
    raise ValueError("does not work")


class VerdictContract(Contract):
    """The table of spec 2, row by row, from outside."""

    @pytest.mark.parametrize(
        "answer",
        [None, 200, 299, HTTPStatus.ACCEPTED, ConsumerStatus.ACK, Outcome(status=204), _Response()],
        ids=["none", "200", "299", "HTTPStatus", "ConsumerStatus", "Outcome", "response"],
    )
    async def test_success_removes_the_message(self, broker: BrokerUnderTest, answer: object) -> None:
        """2xx, None, ACK and anything with a 2xx status_code: handled once and gone."""
        service = broker.service()
        calls: list[int] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> object:
            calls.append(delivery.attempt)
            return answer

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await eventually(lambda: calls, "it was handled")
            await drained(bus, service)
            assert await bus.dead_letters(service).count() == 0
        assert calls == [1]

    @pytest.mark.parametrize(
        "answer",
        [
            *(lambda d, s=s: s for s in (409, 429, 500, 503, 404, 400, 302, 100)),
            lambda d: ConsumerStatus.DROP,
            lambda d: retry("again"),
            lambda d: True,
            lambda d: "yes",
            _raise,
        ],
        ids=["409", "429", "500", "503", "404", "400", "302", "100", "DROP", "retry", "bool", "str", "exception"],
    )
    async def test_failure_goes_into_the_retry_loop(
        self, broker: BrokerUnderTest, answer: Callable[[Delivery], object]
    ) -> None:
        """409, 429, 5xx, other 4xx, 3xx, exceptions and non-verdicts come back as attempt 2."""
        service = broker.service()
        calls: list[int] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> object:
            calls.append(delivery.attempt)
            return answer(delivery) if delivery.attempt == 1 else None

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await eventually(lambda: len(calls) == 2, "it came again")
            await drained(bus, service)
            assert await bus.dead_letters(service).count() == 0
        assert calls == [1, 2]

    @pytest.mark.parametrize("where", ["in memory", "by the broker"])
    async def test_not_yet_costs_no_retry(self, broker: BrokerUnderTest, where: str) -> None:
        """425 and requeue() come again and again with the same attempt number, held in memory or delayed."""
        service = broker.service(
            max_local_delay=30 if where == "in memory" else 0, retry=RetryPolicy(max_retries=0, delay=0.1)
        )
        calls: list[int] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> object:
            calls.append(delivery.attempt)
            return [425, requeue(after=0.1), ConsumerStatus.REQUEUE, None][len(calls) - 1]

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await eventually(lambda: len(calls) == 4, "it came four times")
            await drained(bus, service)
            assert await bus.dead_letters(service).count() == 0
        assert calls == [1, 1, 1, 1]

    @pytest.mark.parametrize("answer", [ConsumerStatus.PARK, park("no such product")], ids=["PARK", "park()"])
    async def test_park_parks_at_once(self, broker: BrokerUnderTest, answer: object) -> None:
        """PARK goes to the dead-letter queue without a retry."""
        service = broker.service()
        calls: list[int] = []

        @service.on("#")
        async def handle(event: Event) -> object:
            calls.append(1)
            return answer

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await _parked(broker, bus, service, 1)
            letter = (await bus.dead_letters(service).browse()).letters[0]
        assert calls == [1]
        assert (letter.reason, letter.retries) == ("permanent", 0)
        if isinstance(answer, Outcome):
            assert "no such product" in letter.error

    async def test_a_route_may_map_a_status(self, broker: BrokerUnderTest) -> None:
        """A status map per route: 404 parks, 5xx acknowledges."""
        service = broker.service()

        @service.on("missing", status={404: "park"})
        async def missing(event: Event) -> int:
            return 404

        @service.on("ignored", status={"5xx": "ack"})
        async def ignored(event: Event) -> int:
            return 503

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("ignored")
            await bus.publish("missing")
            await _parked(broker, bus, service, 1)
            letter = (await bus.dead_letters(service).browse()).letters[0]
        assert (letter.type, letter.status, letter.reason) == ("missing", 404, "permanent")

    async def test_a_permanent_exception_parks_at_once(self, broker: BrokerUnderTest) -> None:
        """An exception type declared permanent is not retried."""
        service = broker.service()
        calls: list[int] = []

        @service.on("#", permanent=(KeyError,))
        async def handle(event: Event) -> None:
            calls.append(1)
            raise KeyError("sku")

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await _parked(broker, bus, service, 1)
            letter = (await bus.dead_letters(service).browse()).letters[0]
        assert (letter.reason, letter.error_type, len(calls)) == ("permanent", "KeyError", 1)

    async def test_permanent_error_codes_park_and_retryable_ones_do_not(self, broker: BrokerUnderTest) -> None:
        """Seed 2's error codes have their own lists and never go through the HTTP map."""
        service = broker.service(permanent_codes=("550", "500"), retryable_codes=("421",))
        calls: Counter[str] = Counter()

        @service.on("#")
        async def handle(event: Event) -> Outcome | None:
            calls[event.type] += 1
            return Outcome(code=event.type, reason="smtp") if calls[event.type] == 1 else None

        async with broker.bus() as bus, running(bus, service):
            for code in ("550", "500", "421"):
                await bus.publish(code)
            await _parked(broker, bus, service, 2)
            await eventually(lambda: calls["421"] == 2, "421 came again")
            letters = (await bus.dead_letters(service).browse()).letters
        assert {letter.error_code for letter in letters} == {"550", "500"}

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"{broken", "undecodable"),
            (b'{"a": NaN}', "undecodable"),
            (b'{"a": 1, "a": 2}', "undecodable"),
            (b"[" * 10_000 + b"]" * 10_000, "undecodable"),
            (b"\xff\xfe", "undecodable"),
            (b"[1, 2]", "invalid"),
            (b"", "invalid"),
        ],
        ids=["broken", "NaN", "duplicate-key", "deep", "not-utf8", "wrong-type", "empty"],
    )
    async def test_a_bad_payload_parks_without_a_call(self, broker: BrokerUnderTest, data: bytes, reason: str) -> None:
        """What cannot be decoded or does not fit the payload type is parked; the handler never sees it."""
        service = broker.service()
        calls: list[object] = []

        @service.on("#")
        async def handle(order: dict) -> None:  # type: ignore[type-arg]
            calls.append(order)

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created", data, content_type="application/json")
            await _parked(broker, bus, service, 1)
            letter = (await bus.dead_letters(service).browse()).letters[0]
        assert calls == []
        assert (letter.reason, letter.body) == (reason, data)

    async def test_a_broken_structured_event_parks(self, broker: BrokerUnderTest) -> None:
        """A message that claims to be a CloudEvent and is none is undecodable."""
        service = broker.service()

        @service.on("#")
        async def handle(event: Event) -> None:
            raise AssertionError("must not be called")

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("x", b'{"specversion":"1.0"}', content_type="application/cloudevents+json")
            await _parked(broker, bus, service, 1)
            letter = (await bus.dead_letters(service).browse()).letters[0]
        assert letter.reason == "undecodable"

    async def test_an_expired_event_parks_without_a_call(self, broker: BrokerUnderTest) -> None:
        """An event past its expires_at is parked, not handled."""
        service = broker.service()
        calls: list[object] = []

        @service.on("#")
        async def handle(event: Event) -> None:
            calls.append(event)

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("mail.due", ttl=timedelta(seconds=-1))
            await _parked(broker, bus, service, 1)
            letter = (await bus.dead_letters(service).browse()).letters[0]
        assert (letter.reason, calls) == ("expired", [])

    async def test_an_event_without_a_route_is_acknowledged(self, broker: BrokerUnderTest) -> None:
        """Without a route an event is acknowledged; a strict service parks it as no-route."""
        lax, strict = broker.service("lax"), broker.service("strict", strict=True)
        for service in (lax, strict):

            @service.on("known")
            async def handle(event: Event) -> None:
                return None

        async with broker.bus() as bus, running(bus, lax, strict):
            await bus.publish("unknown")
            await _parked(broker, bus, strict, 1)
            await drained(bus, lax)
            assert await bus.dead_letters(lax).count() == 0
            letter = (await bus.dead_letters(strict).browse()).letters[0]
        assert letter.reason == "no-route"

    async def test_a_handler_past_its_timeout_is_retried(self, broker: BrokerUnderTest) -> None:
        """A handler that does not answer in time is stopped and its event comes again."""
        service = broker.service()
        calls: list[int] = []

        @service.on("#", timeout=0.1)
        async def handle(event: Event, delivery: Delivery) -> None:
            calls.append(delivery.attempt)
            if delivery.attempt == 1:
                await asyncio.Event().wait()

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await eventually(lambda: len(calls) == 2, "it came again")
            await drained(bus, service)
        assert calls == [1, 2]

    async def test_plain_functions_are_handlers_too(self, broker: BrokerUnderTest) -> None:
        """A sync handler runs in a thread, and its answers count the same."""
        service = broker.service()
        calls: list[int] = []

        @service.on("#")
        def handle(event: Event, delivery: Delivery) -> int:
            calls.append(delivery.attempt)
            return 500 if delivery.attempt == 1 else 200

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created")
            await eventually(lambda: len(calls) == 2, "it came again")
            await drained(bus, service)
        assert calls == [1, 2]

    async def test_every_event_of_a_batch_has_its_own_verdict(self, broker: BrokerUnderTest) -> None:
        """In a batch one event is parked by name and one poisons the call; the rest are acknowledged at no cost."""
        service = broker.service(retry=RetryPolicy(max_retries=1, delay=0.1))
        attempts: Counter[int] = Counter()

        @service.batch("user.created", size=50, timeout=0.1)
        async def insert(users: list[dict], batch: Batch) -> None:  # type: ignore[type-arg]
            if any(user["n"] == 7 for user in users):
                raise RuntimeError("poisoned")
            for position, user in enumerate(users):
                attempts[user["n"]] += 1
                if user["n"] == 3:
                    batch[position].park("e-mail already taken")

        async with broker.bus() as bus, running(bus, service):
            await bus.publish_many([Event("user.created", {"n": n}) for n in range(20)])
            await _parked(broker, bus, service, 2)
            await drained(bus, service)
            letters = (await bus.dead_letters(service).browse()).letters
        assert {(letter.data["n"], letter.reason) for letter in letters} == {  # type: ignore[index]
            (3, "permanent"),
            (7, "max-retries"),
        }
        assert sorted(attempts) == [n for n in range(20) if n != 7]
        assert set(attempts.values()) == {1}


async def _parked(broker: BrokerUnderTest, bus: object, service: object, number: int) -> None:
    letters = bus.dead_letters(service)  # type: ignore[attr-defined]

    async def enough() -> bool:
        return bool(await letters.count() >= number)

    await eventually(enough, f"{number} parked")
