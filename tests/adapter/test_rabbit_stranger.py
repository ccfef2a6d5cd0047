"""Side by side with a stranger: a consumer written straight on aio-pika from seed 4's document alone."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timezone
from decimal import Decimal

import aio_pika
import pytest
from aio_pika.abc import AbstractIncomingMessage

from eventbus import Delivery, Event, RetryPolicy, Service
from eventbus.testing.contract.harness import drained, eventually, running
from tests.adapter.rabbit_support import bus, dead_letter_queue, fresh, get, stranger, work_queue


class Seed4:
    """Seed 4's service in another language, as its document says: nack into the loop, park after ten, by hand."""

    def __init__(self, channel: aio_pika.abc.AbstractChannel, prefix: str, service: str, max_retries: int = 2) -> None:
        self.channel, self.prefix, self.service, self.max_retries = channel, prefix, service, max_retries
        self.seen: list[tuple[str, int]] = []
        self.answers = True

    async def declare(self) -> None:
        """The two tables of seed 4."""
        main = await self.channel.declare_exchange(f"{self.prefix}.main-exchange", "fanout", durable=True)
        retry = await self.channel.declare_exchange(
            f"{self.prefix}.retry-exchange.{self.service}", "direct", durable=True
        )
        self.queue = await self.channel.declare_queue(
            f"{self.prefix}.queue.{self.service}",
            durable=True,
            arguments={"x-dead-letter-exchange": retry.name, "x-dead-letter-routing-key": "retry"},
        )
        await self.queue.bind(main)
        loop = await self.channel.declare_queue(
            f"{self.prefix}.retry-queue.{self.service}",
            durable=True,
            arguments={
                "x-message-ttl": 5000,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": self.queue.name,
            },
        )
        await loop.bind(retry, "retry")
        await self.channel.declare_queue(f"{self.prefix}.dlq.{self.service}", durable=True)

    def retries(self, message: AbstractIncomingMessage) -> int:
        deaths = message.headers.get("x-death") or []
        return sum(
            int(d["count"])  # type: ignore[call-overload, index]
            for d in deaths  # type: ignore[union-attr]
            if d["queue"] == self.queue.name and d["reason"] == "rejected"  # type: ignore[call-overload, index]
        )

    async def handle(self, message: AbstractIncomingMessage) -> None:
        retries = self.retries(message)
        self.seen.append((message.body.decode(), retries))
        if self.answers:
            await message.ack()
        elif retries >= self.max_retries:
            await self.channel.default_exchange.publish(
                aio_pika.Message(
                    message.body,
                    headers={
                        **message.headers,
                        "x-original-queue": self.queue.name,
                        "x-final-status-code": 500,
                        "x-final-error": "it did not work",
                        "x-final-retry-count": retries,
                    },
                    message_id=message.message_id,
                    delivery_mode=2,
                ),
                routing_key=f"{self.prefix}.dlq.{self.service}",
            )
            await message.ack()
        else:
            await message.nack(requeue=False)


def ours(prefix: str, name: str = "stock", **options: object) -> tuple[Service, list[tuple[Event, Delivery]]]:
    service = Service(f"{prefix}-{name}", **{"retry": RetryPolicy(max_retries=3, delay=0.1)} | options)  # type: ignore[arg-type]
    seen: list[tuple[Event, Delivery]] = []

    @service.on("#")
    async def handle(event: Event, delivery: Delivery) -> object:
        seen.append((event, delivery))
        return event.headers.get("answer") and int(str(event.headers["answer"]))

    return service, seen


@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_both_declare_the_same_topology(first: str) -> None:
    """Whoever comes second declares everything again; nobody sees PRECONDITION_FAILED."""
    prefix = fresh()
    service, _ = ours(prefix, retry=RetryPolicy(delay=5.0))
    async with bus(prefix) as here, stranger() as channel:
        there = Seed4(channel, prefix, service.name)
        if first == "ours":
            await here.provision(service)
            await there.declare()
        else:
            await there.declare()
            await here.provision(service)
        await here.publish("order.created", {"n": 1})
        message = await there.queue.get()
        assert json.loads(message.body) == {"n": 1}
        await message.ack()


async def test_work_queue_retry_loop_and_dead_letters_are_shared() -> None:
    """What the stranger fails is retried by his nack and handled here as a later attempt, and the other way round."""
    prefix = fresh()
    service, seen = ours(prefix, retry=RetryPolicy(max_retries=5, delay=0.2))
    async with bus(prefix) as here, stranger() as channel:
        there = Seed4(channel, prefix, service.name)
        await there.declare()
        await here.provision(service)
        # Theirs fails first: the message goes through the loop of 5 s by nack, and ours takes it as attempt 2.
        await here.publish("order.created", {"n": 1})
        message = await there.queue.get()
        await message.nack(requeue=False)
        async with running(here, service):
            await eventually(lambda: seen, "it came back to ours")
            await drained(here, service)
        event, delivery = seen[0]
        assert (event.type, event.data, delivery.attempt) == ("order.created", {"n": 1}, 2)
        # Ours fails, then stops; the stranger gets the copy, without a count of his own.
        seen.clear()
        async with running(here, service):
            await here.publish("order.created", {"n": 2}, headers={"answer": "500"})
            await eventually(lambda: len(seen) >= 2, "ours tried it twice")
        await there.queue.consume(there.handle)
        await eventually(lambda: there.seen, "the stranger got it")
        assert json.loads(there.seen[0][0]) == {"n": 2}


async def test_a_letter_parked_by_the_stranger_is_ours_to_read_and_redrive() -> None:
    """His letter is browsed with its headers, and re-driven with the count going on where x-death left off."""
    prefix = fresh()
    service, seen = ours(prefix)
    async with bus(prefix) as here, stranger() as channel:
        there = Seed4(channel, prefix, service.name, max_retries=0)
        await there.declare()
        await here.provision(service)
        there.answers = False
        tag = await there.queue.consume(there.handle)
        await channel.default_exchange.publish(
            aio_pika.Message(b'{"id": 7}', message_id="m-7", type="order.created", headers={"mine": "yes"}),
            routing_key=work_queue(service),
        )
        letters = here.dead_letters(service)
        await eventually(letters.count, "he parked it")
        await there.queue.cancel(tag)
        letter = (await letters.browse()).letters[0]
        assert (letter.id, letter.status, letter.error, letter.original_queue) == (
            "m-7",
            500,
            "it did not work",
            work_queue(service),
        )
        assert letter.data == {"id": 7}
        assert letter.headers == {"mine": "yes"}
        assert (await letters.redrive(by="ana")).done == 1
        async with running(here, service):
            await eventually(lambda: seen, "it was handled")
        assert (seen[0][0].id, seen[0][1].history.redriven) == ("m-7", 1)


async def test_a_letter_parked_by_us_is_the_strangers_to_read() -> None:
    """Ours carries seed 4's headers, so his tools can inspect it and move it back by hand."""
    prefix = fresh()
    service, seen = ours(prefix, retry=RetryPolicy(max_retries=1, delay=0.1))
    async with bus(prefix) as here, stranger() as channel:
        async with running(here, service):
            await here.publish("order.created", {"n": 1}, headers={"answer": "503"})
            await eventually(here.dead_letters(service).count, "it was parked")
        message = await get(channel, dead_letter_queue(service))
        assert message is not None
        assert message.headers["x-original-queue"] == work_queue(service)
        assert (message.headers["x-final-status-code"], message.headers["x-final-retry-count"]) == (503, 1)
        assert message.headers["x-final-error"]
        seen.clear()
        await channel.default_exchange.publish(
            aio_pika.Message(message.body, headers=message.headers, delivery_mode=2), routing_key=work_queue(service)
        )
        await message.ack()
        async with running(here, service):
            await eventually(lambda: seen, "moved by hand, it was handled")
        assert seen[0][1].attempt == 2  # the count goes on


async def test_plain_json_of_a_foreign_publisher_is_read() -> None:
    """Without CloudEvents attributes: id is the message id, type the AMQP type or the routing key, body untouched."""
    prefix = fresh()
    service, seen = ours(prefix)
    async with bus(prefix) as here, stranger() as channel, running(here, service):
        main = await channel.get_exchange(f"{prefix}.main-exchange", ensure=False)
        await main.publish(aio_pika.Message(b'{"id": 1}', message_id="m-1", type="order.created"), routing_key="")
        await main.publish(aio_pika.Message(b'{"id": 2}', message_id="m-2"), routing_key="order.paid")
        await main.publish(aio_pika.Message(b'{"id": 3}'), routing_key="")
        await eventually(lambda: len(seen) == 3, "all three were handled")
    got = {event.data["id"]: event for event, _ in seen}  # type: ignore[index]
    assert (got[1].id, got[1].type) == ("m-1", "order.created")
    assert (got[2].id, got[2].type) == ("m-2", "order.paid")
    assert (got[3].type, bool(got[3].id)) == ("message", True)


async def test_a_foreign_message_keeps_id_and_type_through_retries() -> None:
    """The routing key is gone after the retry loop; the type that came from it is not."""
    prefix = fresh()
    service, seen = ours(prefix, retry=RetryPolicy(max_retries=1, delay=0.1))
    async with bus(prefix) as here, stranger() as channel, running(here, service):
        main = await channel.get_exchange(f"{prefix}.main-exchange", ensure=False)
        await main.publish(aio_pika.Message(b"1", headers={"answer": "500"}), routing_key="order.paid")
        await eventually(here.dead_letters(service).count, "it was tried twice and parked")
        letter = (await here.dead_letters(service).browse()).letters[0]
    assert {event.type for event, _ in seen} == {"order.paid"} == {letter.type}
    assert len({event.id for event, _ in seen} | {letter.id}) == 1


async def test_strange_headers_are_kept_through_retry_and_parking() -> None:
    """AMQP tables, arrays, times, decimals, floats and bytes arrive in the dead-letter queue as they were sent."""
    prefix = fresh()
    service, seen = ours(prefix, retry=RetryPolicy(max_retries=1, delay=0.1))
    odd = {
        "answer": "500",
        "table": {"inner": {"list": [1, "two", 3.5]}, "none": None},
        "array": [1, [2, [3]], {"a": True}],
        "time": datetime(2026, 5, 4, 3, 2, 1, tzinfo=timezone.utc),
        "decimal": Decimal("12.345"),
        "float": 0.1,
        "bytes": bytearray(b"\x00\xff"),
        "negative": -5,
        "large": 2**40,
    }
    async with bus(prefix) as here, stranger() as channel:
        await here.provision(service)
        main = await channel.get_exchange(f"{prefix}.main-exchange", ensure=False)
        await main.publish(
            aio_pika.Message(
                b"{}", headers=odd, content_encoding="identity", priority=3, reply_to="x", app_id="theirs"
            ),  # type: ignore[arg-type]
            routing_key="t",
        )
        before = await get(channel, work_queue(service))
        assert before is not None
        await before.nack(requeue=True)
        async with running(here, service):
            await eventually(here.dead_letters(service).count, "it was parked")
        after = await get(channel, dead_letter_queue(service))
        assert after is not None
        await after.ack()
    assert {name: after.headers[name] for name in odd} == dict(before.headers)
    assert (after.content_encoding, after.priority, after.reply_to, after.app_id) == ("identity", 3, "x", "theirs")
    assert after.body == b"{}"
    assert seen[0][0].headers["decimal"] == Decimal("12.345")


@pytest.mark.parametrize(
    "forged",
    [
        "nonsense",
        [],
        [{"queue": "QUEUE", "reason": "rejected", "count": 9}],
        [{"queue": "QUEUE", "reason": "rejected", "count": -3}, 7, None],
        {"a": "table"},
    ],
    ids=["text", "empty", "nine rejects", "odd entries", "table"],
)
async def test_a_forged_x_death_counts_nothing(forged: object) -> None:
    """A publisher can write any x-death: the message is handled as attempt 1 and has all its retries."""
    prefix = fresh()
    service, seen = ours(prefix, retry=RetryPolicy(max_retries=1, delay=0.1))
    if isinstance(forged, list):
        forged = [{**e, "queue": work_queue(service)} if isinstance(e, dict) else e for e in forged]
    async with bus(prefix) as here, stranger() as channel, running(here, service):
        main = await channel.get_exchange(f"{prefix}.main-exchange", ensure=False)
        headers = {"x-death": forged, "answer": "500"}
        await main.publish(aio_pika.Message(b"{}", headers=headers), routing_key="t")  # type: ignore[arg-type]
        await eventually(here.dead_letters(service).count, "it was parked after two calls")
    assert [delivery.attempt for _, delivery in seen] == [1, 2]


async def test_our_publisher_cannot_forge_x_death() -> None:
    """What only the broker writes is stripped from published events."""
    prefix = fresh()
    service, seen = ours(prefix)
    async with bus(prefix) as here, running(here, service):
        await here.publish("t", headers={"x-death": "forged", "x-delivery-count": 5, "kept": "yes"})
        await eventually(lambda: seen, "it was handled")
    assert seen[0][0].headers == {"kept": "yes"}


async def test_copies_never_follow_cc() -> None:
    """A stranger's CC header reached its queues when he published; our copies must not reach them again."""
    prefix = fresh()
    service, seen = ours(prefix, retry=RetryPolicy(max_retries=1, delay=0.1))
    other = f"{prefix}.other"
    async with bus(prefix) as here, stranger() as channel:
        await here.provision(service)
        await channel.declare_queue(other, exclusive=True)
        await channel.default_exchange.publish(
            aio_pika.Message(b"{}", headers={"CC": [other], "answer": "500"}), routing_key=work_queue(service)
        )
        async with running(here, service):
            await eventually(here.dead_letters(service).count, "it was parked")
        assert (await channel.declare_queue(other, exclusive=True, passive=True)).declaration_result.message_count == 1
    assert len(seen) == 2


async def test_a_strangers_user_id_and_expiration_do_not_stop_a_copy() -> None:
    """user_id of another user would close our channel, expiration would empty the DLQ: copies carry neither."""
    prefix = fresh()
    service, _ = ours(prefix, retry=RetryPolicy(max_retries=0))
    async with bus(prefix) as here, stranger() as channel, running(here, service):
        main = await channel.get_exchange(f"{prefix}.main-exchange", ensure=False)
        message = aio_pika.Message(b"{}", user_id="guest", expiration=60, headers={"answer": "500"})
        await main.publish(message, routing_key="t")
        await eventually(here.dead_letters(service).count, "it was parked")
        letter = await get(channel, dead_letter_queue(service))
        assert letter is not None
        assert (letter.expiration, letter.user_id) == (None, None)
        assert letter.headers["x-original-user-id"] == "guest"
        await letter.ack()


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_dead_letter_mode_is_seed_4s_literal_nack(queue_type: str) -> None:
    """With retry = "dead-letter" the broker moves the message and counts in x-death; ours goes on from that count."""
    prefix = fresh()
    service, seen = ours(prefix, retry=RetryPolicy(max_retries=1, delay=0.1))
    settings = {"retry": "dead-letter", "retry_ttl": "200ms", "queue_type": queue_type, "settling": 0}
    async with bus(prefix, **settings) as here:
        async with running(here, service):
            await here.publish("order.created", {"n": 1}, headers={"answer": "500"})
            await eventually(here.dead_letters(service).count, "it was parked")
        assert [delivery.suspect for _, delivery in seen] == [False, False]
        letter = (await here.dead_letters(service).browse()).letters[0]
        assert (letter.reason, letter.retries) == ("max-retries", 1)
        async with stranger() as channel:
            message = await get(channel, dead_letter_queue(service))
            assert message is not None
            assert message.headers["x-death"][0]["count"] == 1  # type: ignore[index, call-overload]
            await message.nack(requeue=True)
        await asyncio.sleep(0)
        seen.clear()
        assert (await here.dead_letters(service).redrive()).done == 1
        async with running(here, service):
            await eventually(lambda: seen, "it came back")
    assert seen[0][1].attempt == 2  # the count of the broker went over into ours
