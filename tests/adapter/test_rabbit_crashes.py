"""What a crash leaves behind on RabbitMQ: notes that count for one message, attempts that survive, acks in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from eventbus import Delivery, Event, RetryPolicy, Service, headers
from eventbus.adapter import Adapter, Consumer, Subscription
from eventbus.errors import BrokerUnavailable
from eventbus.registry import open_adapter
from eventbus.settlement import ACK, FRESH
from eventbus.testing.contract.harness import drained, eventually, running
from eventbus_rabbit.messages import Message
from eventbus_rabbit.publisher import Confirms, Outgoing, Publisher
from eventbus_rabbit.sessions import Receipt, Session
from eventbus_rabbit.values import Properties, decode, encode_table, write_properties
from tests.adapter.rabbit_support import bus, fresh, stranger, work_queue
from tests.brokers.rabbit import shared_url

QUEUES = pytest.mark.parametrize("queue_type", ["classic", "quorum"])


def _settings(queue_type: str) -> dict[str, object]:
    return {"queue_type": queue_type, "settling": 0}


@asynccontextmanager
async def _process(sub: Subscription, queue_type: str) -> AsyncIterator[tuple[Adapter, Consumer]]:
    """A consumer whose connections are cut at the end, as when its process dies: nothing is handed back."""
    adapter = open_adapter(shared_url(), {"rabbit": _settings(queue_type)})
    await adapter.open()
    try:
        await adapter.provision([sub], "create")
        yield adapter, await adapter.consume(sub).__aenter__()
    finally:
        await adapter.aclose()


async def _receive(consumer: Consumer, number: int) -> list[Delivery]:
    found: list[Delivery] = []

    async def all_here() -> bool:
        found.extend(await consumer.receive(number - len(found), 0.2))
        return len(found) >= number

    await eventually(all_here, f"{number} deliveries")
    return found


# --- notes ---------------------------------------------------------------------------------------------------------


@QUEUES
async def test_a_crash_counts_only_for_the_message_that_was_handled(queue_type: str) -> None:
    """However often a process dies with a full prefetch: only the one it handled alone has a crash to its name."""
    prefix = fresh()
    sub = Service(f"{prefix}-stock").subscription()
    async with _process(sub, queue_type) as (adapter, consumer):
        await adapter.publish(prefix, [Event("t", n) for n in range(6)])
        await _receive(consumer, 6)
    for crashes in range(4):
        async with _process(sub, queue_type) as (_, consumer):
            got = await _receive(consumer, 6)
            assert all(delivery.suspect and not delivery.noted for delivery in got)
            found = {delivery.event.data: delivery.history.crashes for delivery in got}
            assert found == {0: crashes} | dict.fromkeys(range(1, 6), 0)
            guilty = next(delivery for delivery in got if delivery.event.data == 0)
            assert await consumer.note(guilty, {headers.CRASHES: crashes + 1})


@QUEUES
async def test_a_noted_delivery_is_still_ours_to_settle(queue_type: str) -> None:
    """After the note the delivery is acknowledged, and nothing of it is left anywhere."""
    prefix = fresh()
    service = Service(f"{prefix}-stock")
    async with _process(service.subscription(), queue_type) as (adapter, consumer):
        await adapter.publish(prefix, [Event("t", n) for n in range(3)])
        first, second, third = await _receive(consumer, 3)
        assert await consumer.note(second, {headers.CRASHES: 1})
        assert await consumer.note(second, {headers.CRASHES: None})
        assert await consumer.settle([(third, ACK), (second, ACK), (first, ACK)]) == ["done"] * 3
        assert await consumer.settle([(second, ACK)]) == ["lost"]
        await consumer.aclose()
        stats = await adapter.stats(service.name, prefix)
        assert (stats.ready, stats.inflight, stats.delayed) == (0, 0, 0)


async def test_a_note_for_a_delivery_that_was_taken_away_leaves_one_message() -> None:
    """The channel goes while the note is stored: the original comes again, the copy does not."""
    prefix = fresh()
    service = Service(f"{prefix}-stock")
    async with _process(service.subscription(), "classic") as (adapter, consumer):
        await adapter.publish(prefix, [Event("t")])
        delivery = (await _receive(consumer, 1))[0]
        publisher = adapter._copies  # type: ignore[attr-defined]
        send = publisher.send

        async def send_and_lose(messages: list[Outgoing]) -> object:
            answers = await send(messages)
            receipt = delivery.receipt
            assert isinstance(receipt, Receipt)
            assert receipt.session.wire is not None
            await receipt.session.wire.aclose()
            return answers

        publisher.send = send_and_lose
        assert not await consumer.note(delivery, {headers.CRASHES: 1})
        publisher.send = send
        again = (await _receive(consumer, 1))[0]
        assert (again.suspect, again.history.crashes) == (True, 0)
        assert await consumer.settle([(again, ACK)]) == ["done"]
        assert await consumer.receive(1, 1.5) == []


async def test_a_lost_channel_is_no_crash_to_the_one_who_survived_it() -> None:
    """The connection goes while a suspect is handled: the process that is still there does not count it."""
    prefix = fresh()
    service = Service(f"{prefix}-stock")
    async with _process(service.subscription(), "classic") as (adapter, consumer):
        await adapter.publish(prefix, [Event("t")])
        delivery = (await _receive(consumer, 1))[0]
        delivery.noted = await consumer.note(delivery, {headers.CRASHES: 1})
        receipt = delivery.receipt
        assert isinstance(receipt, Receipt)
        assert receipt.session.wire is not None
        await receipt.session.wire.aclose()
        again = (await _receive(consumer, 1))[0]
        assert (again.suspect, again.history.crashes) == (True, 0)
        assert await consumer.settle([(again, ACK)]) == ["done"]


@QUEUES
async def test_in_place_attempts_survive_a_crash(queue_type: str) -> None:
    """Two attempts were made in place when the process died: the next one makes the third."""
    prefix = fresh()
    calls: list[int] = []
    service = Service(f"{prefix}-stock", retry=RetryPolicy(max_retries=3, delay=2.0, mode="in-place"), grace=0.1)

    @service.on("#")
    async def handle(event: Event, delivery: Delivery) -> int | None:
        calls.append(delivery.attempt)
        return 500 if delivery.attempt < 3 else None

    dying = bus(prefix, **_settings(queue_type))
    await dying.open()
    await dying.provision(service)
    await dying.publish("t")
    task = asyncio.create_task(dying.run(service, signals=False))
    adapter = dying.adapter
    await eventually(lambda: _held_retries(adapter) == 2, "two attempts were made and written down")
    for link in (adapter._consuming, adapter._publishing):  # type: ignore[attr-defined]
        await link.aclose()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert calls == [1, 2]
    async with bus(prefix, **_settings(queue_type)) as here, running(here, service):
        await eventually(lambda: len(calls) == 3, "it came again")
        await drained(here, service)
    await dying.aclose()
    assert calls == [1, 2, 3]


def _held_retries(adapter: Adapter) -> int:
    """The attempts written on the copy that a consumer holds."""
    held = [consumer._holding.session.open for consumer in adapter._consumers]  # type: ignore[attr-defined]
    receipts = [delivery.receipt for entry in held for delivery in entry.values()]
    return max((decode(r.message.properties.headers.get(headers.RETRIES, b"V")) or 0 for r in receipts), default=0)


# --- acks ----------------------------------------------------------------------------------------------------------


class _SlowWire:
    """A channel whose writes wait for a permit."""

    number, alive = 1, True

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.permits = asyncio.Semaphore(0)
        self.closed = False

    def on_close(self, callback: object) -> None:
        """Never."""

    async def write(self, payload: bytes, *, drained: bool = False) -> None:
        await self.permits.acquire()
        self.written.append(payload)

    async def aclose(self) -> None:
        self.closed = True


def _session(wire: object, lost: list[Delivery]) -> tuple[Session, list[Receipt]]:
    session = Session(lost.extend)
    session.use(wire)  # type: ignore[arg-type]
    properties = write_properties(Properties(), encode_table({}))
    receipts = [Receipt(session, Message(tag, False, "", "q", properties, b"")) for tag in (1, 2, 3)]
    for receipt in receipts:
        session.open[receipt.message.tag] = Delivery(Event("t"), "s", "q", receipt, FRESH)
    return session, receipts


async def test_acks_of_one_channel_never_overtake_each_other() -> None:
    """While one call's rejects wait to be written, another's ack "up to here" waits too, and does not swallow them."""
    wire = _SlowWire()
    session, (one, two, three) = _session(wire, [])
    rejecting = asyncio.create_task(session.settle([], [one, two]))
    await asyncio.sleep(0)
    acking = asyncio.create_task(session.settle([three]))
    await asyncio.sleep(0)
    assert wire.written == []
    assert three.message.tag in session.open  # not even counted as settled yet
    wire.permits.release()
    wire.permits.release()
    assert await rejecting == {one, two}
    assert await acking == {three}
    assert [frame.count(b"\xce") for frame in wire.written] == [2, 1]


async def test_what_could_not_be_written_is_let_go() -> None:
    """A write that fails leaves its deliveries unsettled at the broker: the channel is closed, and they come again."""

    class Broken(_SlowWire):
        async def write(self, payload: bytes, *, drained: bool = False) -> None:
            raise BrokerUnavailable("sending: RabbitMQ did not answer in time")

    wire, lost = Broken(), list[Delivery]()
    session, (one, two, three) = _session(wire, lost)
    assert await session.settle([one]) == set()
    assert wire.closed
    assert [delivery.receipt for delivery in lost] == [two, three]
    assert await session.settle([two, three]) == set()


# --- confirms ------------------------------------------------------------------------------------------------------


async def test_a_publish_that_was_cancelled_unwritten_spoils_no_other() -> None:
    """The broker numbers what it gets: after a write that may not have happened the next goes by another channel."""
    wires: list[_SlowWire] = []

    class Wire(_SlowWire):
        frame_max = 131_072

    class Link:
        async def channel(self, receiver: Confirms, *, confirms: bool) -> _SlowWire:
            wires.append(Wire())
            wires[-1].confirms = receiver  # type: ignore[attr-defined]
            return wires[-1]

    publisher = Publisher(Link(), 5.0)  # type: ignore[arg-type]
    message = Outgoing("", "q", write_properties(Properties(), encode_table({})), b"", b"1")
    sending = asyncio.create_task(publisher.send([message]))
    await eventually(lambda: wires, "it is being written")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    again = asyncio.create_task(publisher.send([message]))
    await eventually(lambda: len(wires) == 2, "another channel is opened")
    wires[1].permits.release()
    await eventually(lambda: wires[1].written, "it is written there")
    wires[1].confirms.confirmed(1, False, True)  # type: ignore[attr-defined]
    assert await again == ["stored"]
    await publisher.aclose()


async def test_a_deleted_retry_exchange_is_made_again() -> None:
    """Copies that find no exchange are kept; it is made again with its queues, and they go their way."""
    prefix = fresh()
    service = Service(f"{prefix}-stock", retry=RetryPolicy(max_retries=1, delay=0.1))

    @service.on("#")
    async def handle(event: Event) -> int:
        return 500

    async with bus(prefix) as here, stranger() as channel, running(here, service):
        await channel.exchange_delete(f"{prefix}.retry-exchange.{service.name}")
        await here.publish("t")
        await eventually(here.dead_letters(service).count, "it was retried and parked")
        await drained(here, service)


async def test_without_the_right_to_configure_a_note_goes_through_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """No queue of our own: the crash note travels with a copy that is noted, and the next crash counts on from it."""
    from eventbus_rabbit._errors import Refused
    from eventbus_rabbit.holding import Holding

    async def refused(self: Holding) -> None:
        raise Refused("not permitted")

    monkeypatch.setattr(Holding, "_ready", refused)
    prefix = fresh()
    service = Service(f"{prefix}-stock")
    async with _process(service.subscription(), "classic") as (adapter, consumer):
        await adapter.publish(prefix, [Event("t")])
        await _receive(consumer, 1)
    async with _process(service.subscription(), "classic") as (_, consumer):
        suspect = (await _receive(consumer, 1))[0]
        assert not await consumer.note(suspect, {headers.CRASHES: 1})
        copy = (await _receive(consumer, 1))[0]
        assert (copy.noted, copy.suspect, copy.history.crashes) == (True, False, 1)
        assert await consumer.note(copy, {headers.RETRIES: 1})  # attempts in place: kept in memory
    async with _process(service.subscription(), "classic") as (_, consumer):
        again = (await _receive(consumer, 1))[0]
        assert (again.noted, again.suspect, again.history.crashes) == (False, True, 1)
    async with stranger() as channel:
        await channel.queue_delete(work_queue(service))
