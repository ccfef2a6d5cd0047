"""Publishing and delivery: every service gets its own copy, as it was sent (spec 1, 4, 6, 7)."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from eventbus.errors import PublishError
from eventbus.event import Event
from eventbus.settlement import Delivery
from eventbus.testing.contract.harness import BrokerUnderTest, Contract, drained, eventually, running


class DeliveryContract(Contract):
    """What is published arrives, once per service, unchanged."""

    async def test_every_service_gets_its_own_copy(self, broker: BrokerUnderTest) -> None:
        """Two services of one prefix each get the event; a service of another prefix does not."""
        seen: list[str] = []
        services = [broker.service("stock"), broker.service("billing"), broker.service("other", prefix="elsewhere")]
        for service in services:

            @service.on("order.created")
            async def handle(event: Event, delivery: Delivery) -> None:
                seen.append(delivery.service)

        async with broker.bus() as bus, running(bus, *services):
            await bus.publish("order.created", {"id": 1})
            await eventually(lambda: len(seen) >= 2, "both services saw it")
            await drained(bus, services[2])
        assert sorted(seen) == sorted(service.name for service in services[:2])

    async def test_replicas_share_one_subscription(self, broker: BrokerUnderTest) -> None:
        """Two consumers of one service handle each event once between them."""
        seen: list[str] = []

        def replica() -> object:
            service = broker.service()

            @service.on("#")
            async def handle(event: Event) -> None:
                seen.append(event.id)

            return service

        one, two = replica(), replica()
        async with (
            broker.bus() as bus,
            broker.bus() as other,
            running(bus, one),  # type: ignore[arg-type]
            running(other, two),  # type: ignore[arg-type]
        ):
            sent = [Event("order.created", {"n": n}) for n in range(200)]
            await bus.publish_many(sent)
            await eventually(lambda: len(seen) >= 200, "all 200 were handled")
        assert sorted(seen) == sorted(event.id for event in sent)

    async def test_a_service_gets_nothing_from_before_its_subscription(self, broker: BrokerUnderTest) -> None:
        """Events accepted before a service was provisioned are not delivered to it."""
        early, late = broker.service("early"), broker.service("late")
        seen: list[str] = []

        @late.on("#")
        async def handle(event: Event) -> None:
            seen.append(event.type)

        async with broker.bus() as bus:
            await bus.provision(early)
            await bus.publish("before")
            await bus.provision(late)
            await bus.publish("after")
            async with running(bus, late):
                await eventually(lambda: seen, "the later event came")
                await drained(bus, late)
        assert seen == ["after"]

    async def test_events_wait_for_a_service_that_is_not_running(self, broker: BrokerUnderTest) -> None:
        """A provisioned service gets what was published while none of its replicas ran."""
        service = broker.service()
        seen: list[object] = []

        @service.on("#")
        async def handle(event: Event) -> None:
            seen.append(event.data)

        async with broker.bus() as bus:
            await bus.provision(service)
            for n in range(5):
                await bus.publish("order.created", n)
            assert (await bus.stats(service)).ready == 5
        async with broker.bus() as bus, running(bus, service):
            await eventually(lambda: len(seen) == 5, "all five came")
        assert sorted(seen) == [0, 1, 2, 3, 4]  # type: ignore[type-var]

    async def test_all_attributes_arrive_as_they_were_sent(self, broker: BrokerUnderTest) -> None:
        """Id, type, source, time, key, tenant, correlation id, headers, extensions and body arrive unchanged."""
        service = broker.service()
        seen: list[Event] = []

        @service.on("#")
        async def handle(event: Event) -> None:
            seen.append(event)

        sent = Event(
            "order.created",
            {"nome": "João", "itens": [1, 2]},
            id="a-1",
            source="wms-api",
            time=datetime(2026, 5, 4, 3, 2, 1, 123000, timezone.utc),
            key="pedido-1",
            tenant="acme",
            correlation_id="corr-1",
            headers={"x-origin": "teste", "x-number": "7"},
            expires_at=datetime(2099, 1, 1, tzinfo=timezone.utc),
            extensions={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        )
        async with broker.bus() as bus, running(bus, service):
            await bus.publish(sent)
            await eventually(lambda: seen, "the event came")
        got = seen[0]
        for name in ("id", "type", "source", "time", "key", "tenant", "correlation_id", "expires_at", "data"):
            assert getattr(got, name) == getattr(sent, name), name
        assert got.headers["x-origin"] == "teste"
        assert got.headers["x-number"] == "7"
        assert got.extensions["traceparent"] == sent.extensions["traceparent"]

    @pytest.mark.parametrize(
        "body", [b"", b"\x00\xff\xfe", bytes(range(256)) * 40, b"{not json"], ids=["empty", "bytes", "10k", "broken"]
    )
    async def test_the_body_arrives_to_the_byte(self, broker: BrokerUnderTest, body: bytes) -> None:
        """A handler that asks for bytes gets exactly what was published."""
        service = broker.service()
        seen: list[bytes] = []

        @service.on("#")
        async def handle(data: bytes) -> None:
            seen.append(data)

        async with broker.bus() as bus, running(bus, service):
            await bus.publish("blob", body)
            await eventually(lambda: seen, "the event came")
        assert seen == [body]

    async def test_an_event_nobody_wants_is_not_an_error(self, broker: BrokerUnderTest) -> None:
        """Publishing without any subscriber succeeds."""
        async with broker.bus() as bus:
            results = await bus.publish_many([Event("order.created")])
        assert [result.status for result in results] == ["stored"]
        assert results[0].subscribed in (False, None)

    async def test_publish_many_answers_for_each_event(self, broker: BrokerUnderTest) -> None:
        """One event that could never be parked is refused by itself; the others are stored and delivered."""
        service = broker.service()
        seen: list[str] = []

        @service.on("#")
        async def handle(event: Event) -> None:
            seen.append(event.type)

        async with broker.bus() as bus, running(bus, service):
            too_large = Event("large", b"x" * bus.adapter.capabilities.max_event_bytes)
            with pytest.raises(PublishError) as caught:
                await bus.publish_many([Event("first"), too_large, Event("last")])
            assert [result.status for result in caught.value.results] == ["stored", "refused", "stored"]
            await eventually(lambda: len(seen) == 2, "the two others came")
        assert sorted(seen) == ["first", "last"]

    async def test_reserved_headers_cannot_be_forged(self, broker: BrokerUnderTest) -> None:
        """A publisher's x-retries, x-due-at and the like are stripped: the event has a fresh history."""
        service = broker.service()
        seen: list[Delivery] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> None:
            seen.append(delivery)

        forged = {"x-retries": 3, "x-due-at": 99_999_999_999_999, "x-crashes": 9, "x-redriven-by": "me", "kept": "yes"}
        async with broker.bus() as bus, running(bus, service):
            await bus.publish("order.created", headers=forged)
            await eventually(lambda: seen, "the event came at once")
        assert seen[0].attempt == 1
        assert seen[0].event.headers == {"kept": "yes"}

    async def test_structured_cloudevents_are_read(self, broker: BrokerUnderTest) -> None:
        """A structured-mode message is delivered as the event inside it."""
        service = broker.service()
        seen: list[Event] = []

        @service.on("pedido.criado")
        async def handle(event: Event) -> None:
            seen.append(event)

        envelope = (
            b'{"specversion":"1.0","id":"s-1","type":"pedido.criado","source":"/erp","tenant":"acme",'
            b'"data":{"total":10}}'
        )
        async with broker.bus() as bus, running(bus, service):
            await bus.publish("envelope", envelope, content_type="application/cloudevents+json")
            await eventually(lambda: seen, "the inner event came")
        assert (seen[0].id, seen[0].source, seen[0].tenant) == ("s-1", "/erp", "acme")
        assert seen[0].data == {"total": 10}

    async def test_process_after_is_kept(self, broker: BrokerUnderTest) -> None:
        """An event that is not due yet waits; the handler is not called early, and no retry is spent."""
        service = broker.service()
        calls: list[tuple[float, int]] = []

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> None:
            calls.append((datetime.now(timezone.utc).timestamp(), delivery.attempt))

        async with broker.bus() as bus, running(bus, service):
            sent = await bus.publish("mail.due", process_after=timedelta(seconds=0.6))
            await eventually(lambda: calls, "it was handled")
        assert sent.process_after is not None
        late = calls[0][0] - sent.process_after.timestamp()
        assert 0 <= late <= broker.lateness(0.6) + 0.5
        assert calls[0][1] == 1

    async def test_depths_are_told(self, broker: BrokerUnderTest) -> None:
        """Stats tell what is ready, delayed and parked."""
        service = broker.service(max_local_delay=0)

        @service.on("slow")
        async def slow(event: Event) -> int:
            return 500

        @service.on("bad", permanent=(KeyError,))
        async def bad(event: Event) -> None:
            raise KeyError("x")

        async with broker.bus() as bus:
            await bus.provision(service)
            await bus.publish("slow", process_after=timedelta(seconds=60))
            await bus.publish("bad")
            async with running(bus, service):

                async def sorted_out() -> bool:
                    stats = await bus.stats(service)
                    return stats.delayed == 1 and stats.parked == 1 and stats.inflight == 0

                await eventually(sorted_out, "one is delayed and one parked")
            await bus.publish("later")
            await eventually(lambda: _ready(bus, service), "one is ready")


async def _ready(bus: object, service: object) -> bool:
    stats = await bus.stats(service)  # type: ignore[attr-defined]
    return bool(stats.ready == 1)
