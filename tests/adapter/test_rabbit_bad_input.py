"""Bad input on the real broker: wrong credentials, missing rights, things too large, things that differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aio_pika
import pytest

from eventbus import BrokerError, BrokerUnavailable, Bus, Event, PublishError, RetryPolicy, Service
from eventbus.errors import TopologyMismatch
from eventbus.testing.contract.harness import eventually, running
from tests.adapter.rabbit_support import bus, dead_letter_queue, fresh, get, stranger, work_queue
from tests.brokers.rabbit import PORT, RabbitNode, node, shared_url


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitNode]:
    """A broker of one's own: users and vhosts are changed here."""
    with node("badinput", PORT + 1, Path(tmp_path_factory.mktemp("rabbit"))) as found:
        found.ctl("add_vhost", "limited")
        found.ctl("add_user", "reader", "secret")
        found.ctl("set_permissions", "-p", "limited", "reader", "^$", ".*", ".*")
        found.ctl("set_permissions", "-p", "limited", "guest", ".*", ".*", ".*")
        yield found


async def test_a_wrong_password_says_so(own: RabbitNode) -> None:
    """Refused credentials are BrokerUnavailable with what to check, and never show the password."""
    with pytest.raises(BrokerUnavailable, match="password") as caught:
        async with Bus(f"amqp://guest:wrong-secret@127.0.0.1:{own.port}/"):
            pass
    assert "wrong-secret" not in str(caught.value)


async def test_a_missing_vhost_says_so(own: RabbitNode) -> None:
    """A vhost that does not exist is named."""
    with pytest.raises(BrokerUnavailable, match="vhost"):
        async with Bus(f"amqp://guest:guest@127.0.0.1:{own.port}/nowhere"):
            pass


async def test_nobody_there_says_so() -> None:
    """A port where nobody listens is BrokerUnavailable within the deadline; of several hosts one is enough."""
    with pytest.raises(BrokerUnavailable, match="is it running"):
        async with Bus("amqp://127.0.0.1:5669/"):
            pass
    rest = shared_url().partition("@")[2]
    async with Bus(f"amqp://guest:guest@127.0.0.1:5669,{rest}", source="x-api") as found:
        await found.publish_many([Event("t")])


async def test_without_the_right_to_configure_existing_queues_are_used(own: RabbitNode) -> None:
    """A user who may not configure cannot provision what is missing, and is told; what is there he can use."""
    service = Service("wms-limited", retry=RetryPolicy(max_retries=1, delay=5.0))
    seen: list[Event] = []

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event)

    limited = f"amqp://reader:secret@127.0.0.1:{own.port}/limited"
    async with Bus(limited, source="wms-api") as found:
        with pytest.raises(BrokerError, match="set_permissions"):
            await found.provision(service)
    async with Bus(f"amqp://guest:guest@127.0.0.1:{own.port}/limited", source="wms-api") as found:
        await found.provision(service)
    async with Bus(limited, source="wms-api", provision="verify") as found, running(found, service):
        await found.publish("order.created")
        await eventually(lambda: seen, "it was handled")


async def test_an_unroutable_event_is_counted_and_no_error() -> None:
    """An exchange without a queue: stored for nobody."""
    prefix = fresh()
    async with bus(prefix) as here, stranger() as channel:
        await channel.declare_exchange(f"{prefix}.main-exchange", "fanout", durable=True)
        results = await here.publish_many([Event("a"), Event("b")])
    assert [(result.status, result.subscribed) for result in results] == [("stored", False)] * 2


async def test_headers_over_the_frame_limit_are_refused_alone() -> None:
    """RabbitMQ takes all headers in one frame: an event that could not be parked later is refused by itself."""
    prefix = fresh()
    service, seen = _service(prefix)
    async with bus(prefix) as here, running(here, service):
        large = Event("large", headers={"x-large": "x" * 120_000})
        with pytest.raises(PublishError) as caught:
            await here.publish_many([Event("first"), large, Event("last")])
        assert [result.status for result in caught.value.results] == ["stored", "refused", "stored"]
        await eventually(lambda: len(seen) == 2, "the two others came")


@pytest.mark.parametrize("headers", [{"CC": "x"}, {"n" * 300: "x"}], ids=["CC", "long name"])
async def test_headers_that_rabbitmq_would_choke_on_are_refused(headers: dict[str, str]) -> None:
    """CC would route the event elsewhere, a long name is no AMQP: refused before anything is sent."""
    prefix = fresh()
    service, _ = _service(prefix)
    async with bus(prefix) as here:
        await here.provision(service)
        with pytest.raises(PublishError) as caught:
            await here.publish("t", headers=headers)
        assert caught.value.results[0].status == "refused"


async def test_a_foreign_message_with_headers_at_the_limit_is_still_parked() -> None:
    """Parking cannot fail on its own headers: where there is no room for all, the largest are left out."""
    prefix = fresh()
    service, _ = _service(prefix, answer=500)
    async with bus(prefix) as here, stranger() as channel, running(here, service):
        main = await channel.get_exchange(f"{prefix}.main-exchange", ensure=False)
        await main.publish(aio_pika.Message(b"body", headers={"small": "kept", "huge": "x" * 130_500}), routing_key="t")
        await eventually(here.dead_letters(service).count, "it was parked")
        letter = (await here.dead_letters(service).browse()).letters[0]
    assert (letter.reason, letter.body, letter.headers.get("small")) == ("max-retries", b"body", "kept")


async def test_a_timestamp_from_the_far_future_stops_nobody() -> None:
    """A time no calendar has is a foreign header like any other; the consumer lives on."""
    prefix = fresh()
    service, seen = _service(prefix)
    async with bus(prefix) as here, stranger() as channel, running(here, service):
        underlay = await channel.get_underlay_channel()

        from eventbus_rabbit import frames
        from eventbus_rabbit.link import Wire
        from eventbus_rabbit.values import Properties, encode_table, write_properties

        odd = Properties()
        odd.timestamp = 2**63
        odd.message_id = b"far"
        payload = write_properties(odd, encode_table({"when": b"T" + (2**63).to_bytes(8)}))
        number = underlay.number
        parts = [frames.publish(number, f"{prefix}.main-exchange", ""), *frames.content(number, payload, b"{}", 131072)]
        wire = Wire(underlay, underlay.connection, 5.0)  # type: ignore[arg-type]
        await wire.write(b"".join(parts))
        await eventually(lambda: seen, "it was handled")
    assert seen[0].id == "far"


async def test_a_differing_ttl_becomes_a_tier_and_anything_else_is_a_mismatch() -> None:
    """Somebody else's TTL stays, ours gets a tier queue; a differing dead-letter exchange names argument and values."""
    prefix = fresh()
    service, _ = _service(prefix, retry=RetryPolicy(max_retries=1, delay=5.0))
    async with bus(prefix) as here, stranger() as channel:
        base = f"{prefix}.retry-queue.{service.name}"
        arguments = {
            "x-message-ttl": 7000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": work_queue(service),
        }
        await channel.declare_queue(base, durable=True, arguments=arguments)  # type: ignore[arg-type]
        await here.provision(service)
        tier = await channel.declare_queue(f"{base}.5000", durable=True, passive=True)
        assert tier.declaration_result.message_count == 0
    other = fresh()
    service, _ = _service(other)
    async with bus(other) as here, stranger() as channel:
        await channel.declare_queue(
            work_queue(service), durable=True, arguments={"x-dead-letter-exchange": "elsewhere"}
        )
        with pytest.raises(TopologyMismatch, match="x-dead-letter-exchange is elsewhere, wanted"):
            await here.provision(service)


async def test_classic_and_quorum_do_not_mix() -> None:
    """Asking for quorum where classic queues stand is a mismatch that names the type, and changes nothing."""
    prefix = fresh()
    service, _ = _service(prefix)
    async with bus(prefix) as here:
        await here.provision(service)
    async with bus(prefix, queue_type="quorum") as here:
        with pytest.raises(TopologyMismatch, match="x-queue-type"):
            await here.provision(service)
    async with bus(prefix) as here:
        await here.provision(service)


async def test_a_full_dead_letter_queue_keeps_the_message_until_there_is_room(own: RabbitNode) -> None:
    """A DLQ that refuses: the message stays, readiness turns red, and it is parked when room comes."""
    prefix = fresh()
    service, _ = _service(prefix, answer=500)
    policy = f"full-{prefix}"
    async with Bus(own.url, source=f"{prefix}-api") as here, stranger(own.url) as channel:
        await here.provision(service)
        definition = '{"max-length": 1, "overflow": "reject-publish"}'
        own.ctl("set_policy", policy, f"^{dead_letter_queue(service)}$", definition, "--apply-to", "queues")
        try:
            async with running(here, service):
                await here.publish("first")
                await eventually(here.dead_letters(service).count, "one is parked")
                await here.publish("second")
                await eventually(lambda: here.health[service.name].failing_settles, "the second is refused")
                assert not here.health[service.name].ready
                letter = await get(channel, dead_letter_queue(service))
                assert letter is not None
                await letter.ack()
                await eventually(lambda: here.health[service.name].ready, "ready again")
                letters = (await here.dead_letters(service).browse()).letters
            assert [found.type for found in letters] == ["second" if letter.type == "first" else "first"]
        finally:
            own.ctl("clear_policy", policy)


def _service(prefix: str, answer: int | None = None, **options: object) -> tuple[Service, list[Event]]:
    service = Service(f"{prefix}-stock", **{"retry": RetryPolicy(max_retries=0)} | options)  # type: ignore[arg-type]
    seen: list[Event] = []

    @service.on("#")
    async def handle(event: Event) -> int | None:
        seen.append(event)
        return answer

    return service, seen
