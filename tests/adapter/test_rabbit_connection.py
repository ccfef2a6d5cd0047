"""Connections of the RabbitMQ adapter: ready-made ones, lost ones, deleted queues, and two operators at one queue."""

from __future__ import annotations

import asyncio

import aio_pika
import pytest

from eventbus import BrokerError, Bus, Event, RetryPolicy, Service
from eventbus.adapter import Subscription
from eventbus.settlement import ACK
from eventbus.testing.contract.harness import drained, eventually, running
from eventbus_rabbit import RabbitAdapter, scanning
from tests.adapter.rabbit_support import bus, fresh, stranger, work_queue
from tests.brokers.rabbit import shared_url


def _service(prefix: str, answer: int | None = None, **options: object) -> tuple[Service, list[object]]:
    service = Service(f"{prefix}-stock", **{"retry": RetryPolicy(max_retries=1, delay=0.1)} | options)  # type: ignore[arg-type]
    seen: list[object] = []

    @service.on("#")
    async def handle(event: Event) -> int | None:
        seen.append(event.data)
        return answer

    return service, seen


@pytest.mark.parametrize("robust", [True, False], ids=["robust", "plain"])
async def test_a_ready_made_connection_is_used_and_left_open(robust: bool) -> None:
    """Publish, retry, park, browse and re-drive on the user's own aio-pika connection; it stays his."""
    prefix = fresh()
    service, seen = _service(prefix, answer=500)
    connection = await (aio_pika.connect_robust if robust else aio_pika.connect)(shared_url())
    try:
        adapter = RabbitAdapter(connection=connection)
        async with Bus("amqp://", source=f"{prefix}-api", adapter=adapter) as here:
            async with running(here, service):
                await here.publish("t", {"n": 1}, headers={"x-mine": "yes"})
                await eventually(here.dead_letters(service).count, "it was parked")
            letter = (await here.dead_letters(service).browse()).letters[0]
            assert (letter.data, letter.headers) == ({"n": 1}, {"x-mine": "yes"})
            assert (await here.dead_letters(service).redrive()).done == 1
        assert not connection.is_closed
        assert seen == [{"n": 1}, {"n": 1}]
    finally:
        await connection.close()


async def test_a_cut_connection_heals_by_itself() -> None:
    """The consumer comes back after its connection was cut; what it held is delivered again, nothing is lost."""
    prefix = fresh()
    service, seen = _service(prefix)
    async with bus(prefix) as here, running(here, service):
        await here.publish("t", 1)
        await eventually(lambda: seen == [1], "the first was handled")
        for link in (here.adapter._consuming, here.adapter._publishing):  # type: ignore[attr-defined]
            link._connection.transport.connection._writer_task.cancel()  # as a broken socket ends it

        async def publishes() -> bool:
            try:
                await here.publish("t", 2)
            except Exception:  # noqa: BLE001 - the first publish meets the cut
                return False
            return True

        await eventually(publishes, "publishing works again")
        await eventually(lambda: 2 in seen, "and so does consuming")
        await drained(here, service)


async def test_a_deleted_queue_is_made_again_and_consumed() -> None:
    """The queue is deleted under the consumer: it is provisioned again, and events arrive."""
    prefix = fresh()
    service, seen = _service(prefix)
    async with bus(prefix) as here, stranger() as channel, running(here, service):
        await here.publish("t", 1)
        await eventually(lambda: seen == [1], "the first was handled")
        await channel.queue_delete(work_queue(service))

        async def arrives() -> bool:
            await here.publish("t", 2)
            return 2 in seen

        await eventually(arrives, "events arrive again")


async def test_a_deleted_road_is_made_again() -> None:
    """A retry whose queue was deleted is kept and goes its way once the road is back."""
    prefix = fresh()
    service, seen = _service(prefix, answer=500)
    async with bus(prefix) as here, stranger() as channel, running(here, service):
        await channel.queue_delete(f"{prefix}.retry-queue.{service.name}.100")
        await here.publish("t", 1)
        await eventually(here.dead_letters(service).count, "it was retried and parked")
    assert seen == [1, 1]


async def test_a_second_operator_is_told_who_holds_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one looks through the dead letters another waits a little, and is then told who is at it."""
    monkeypatch.setattr(scanning, "PATIENCE", 0.2)
    prefix = fresh()
    service, _ = _service(prefix, answer=500, retry=RetryPolicy(max_retries=0))
    async with bus(prefix) as here, bus(prefix) as there:
        async with running(here, service):
            await here.publish("t", 1)
            await eventually(here.dead_letters(service).count, "it was parked")
        parking = here.adapter.parking(service.name, service.prefix)
        async with parking._scanner.scan(None):  # type: ignore[attr-defined]
            with pytest.raises(BrokerError, match="process"):
                await there.dead_letters(service).browse()
        assert len((await there.dead_letters(service).browse()).letters) == 1


async def test_looking_at_a_long_queue_is_linear() -> None:
    """Pages beyond the first are read ahead: two thousand letters in pages of fifty take few scans."""
    prefix = fresh()
    service, _ = _service(prefix, answer=500, retry=RetryPolicy(max_retries=0))
    async with bus(prefix) as here:
        async with running(here, service):
            for start in range(0, 2000, 500):
                await here.publish_many([Event("t", start + n) for n in range(500)])

            async def all_parked() -> bool:
                return await here.dead_letters(service).count() == 2000

            await eventually(all_parked, "2000 parked", within=60)
        letters = here.dead_letters(service)
        scans = 0
        scanner = letters._parking._scanner  # type: ignore[attr-defined]
        hold = scanner._hold

        async def counted(number: int) -> object:
            nonlocal scans
            scans += 1
            return await hold(number)

        scanner._hold = counted
        seen, cursor = [], None
        while True:
            page = await letters.browse(after=cursor, limit=50)
            seen += [letter.data for letter in page.letters]
            cursor = page.next
            if cursor is None:
                break
        assert sorted(seen) == list(range(2000))
        assert scans <= 3
        assert await letters.count() == 2000


async def test_a_slow_message_does_not_hold_back_the_acks_of_the_others() -> None:
    """Finished deliveries behind an unfinished one are acknowledged: they are not delivered again."""
    prefix = fresh()
    adapter = RabbitAdapter.from_url(shared_url(), {})
    sub = Subscription(f"{prefix}-stock", prefix)
    await adapter.open()
    try:
        await adapter.provision([sub], "create")
        await adapter.publish(prefix, [Event("t", n) for n in range(10)])
        async with adapter.consume(sub) as consumer:
            got = []
            while len(got) < 10:
                got += await consumer.receive(10 - len(got), 1.0)
            rest = [delivery for n, delivery in enumerate(got) if n != 3]
            assert await consumer.settle([(delivery, ACK) for delivery in rest]) == ["done"] * 9
        async with adapter.consume(sub) as consumer:
            again = await consumer.receive(10, 5.0)
            assert [delivery.event.data for delivery in again] == [3]
            assert await consumer.receive(10, 0.2) == []
            await consumer.settle([(again[0], ACK)])
    finally:
        await adapter.aclose()


async def test_an_idle_consumer_wakes_at_once() -> None:
    """`wake` ends a waiting receive long before its timeout."""
    prefix = fresh()
    adapter = RabbitAdapter.from_url(shared_url(), {})
    sub = Subscription(f"{prefix}-stock", prefix)
    await adapter.open()
    try:
        await adapter.provision([sub], "create")
        async with adapter.consume(sub) as consumer:
            waiting = asyncio.ensure_future(consumer.receive(1, 60.0))
            await asyncio.sleep(0)
            consumer.wake()
            assert await asyncio.wait_for(waiting, 5.0) == []
    finally:
        await adapter.aclose()
