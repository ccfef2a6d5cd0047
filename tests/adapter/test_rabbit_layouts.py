"""The layouts of seeds 0 and 1 with the publishers and topologies that those documents describe; and the options."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from yarl import URL

from eventbus import Batch, Bus, DeadLetter, Event, Outcome, RetryPolicy, Service
from eventbus.testing.contract.harness import drained, eventually, running
from tests.adapter.rabbit_support import bus, fresh, get, stranger, work_queue
from tests.brokers.rabbit import PORT, shared_url


async def _declare(channel: AbstractChannel, queue: str, arguments: dict[str, object] | None = None) -> None:
    await channel.declare_queue(queue, durable=True, arguments=arguments)  # type: ignore[arg-type]


# --- seed 1 --------------------------------------------------------------------------------------------------------

MVP = {
    "q.validator": ["files.uploaded.*"],
    "q.thumbnail": ["files.validated.*"],
    "q.projection": ["#"],
}


async def _seed_1(channel: AbstractChannel) -> None:
    """What `definitions.json` of seed 1 makes: for each q.X its retry and its dead letters."""
    await channel.declare_exchange("domain.events", "topic", durable=True)
    for queue, keys in MVP.items():
        await channel.declare_exchange(f"retry.{queue}", "direct", durable=True)
        await channel.declare_exchange(f"dlq.{queue}", "direct", durable=True)
        await _declare(
            channel, queue, {"x-dead-letter-exchange": f"retry.{queue}", "x-dead-letter-routing-key": "retry"}
        )
        way_back = {"x-message-ttl": 15000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
        await _declare(channel, f"{queue}.retry", way_back)  # type: ignore[arg-type]
        await _declare(channel, f"{queue}.dlq")
        for key in keys:
            await (await channel.get_queue(queue)).bind("domain.events", key)
        await (await channel.get_queue(f"{queue}.retry")).bind(f"retry.{queue}", "retry")
        await (await channel.get_queue(f"{queue}.dlq")).bind(f"dlq.{queue}", "parking")


async def test_per_queue_takes_over_the_pipeline_of_seed_1() -> None:
    """Its queues, publisher and parking: a retry reaches only the queue that failed, re-drive takes the retry road."""
    seen: list[tuple[str, str, int]] = []
    works = False

    def service(name: str, pattern: str) -> Service:
        found = Service(name, prefix="domain", retry=RetryPolicy(max_retries=2, delay=0.1))

        @found.on(pattern)
        async def handle(event: Event, delivery: object) -> Outcome | None:
            seen.append((name, event.type, event.data["n"]))  # type: ignore[index]
            fails = name == "validator" and not works
            return Outcome(status=500, reason="virus scanner is down") if fails else None

        return found

    validator, thumbnail = service("validator", "files.uploaded.*"), service("thumbnail", "files.validated.*")
    projection = service("projection", "#")
    async with stranger() as channel, bus("domain", layout="per-queue") as here:
        await _seed_1(channel)
        events = await channel.get_exchange("domain.events")
        async with running(here, validator, thumbnail, projection):
            await events.publish(aio_pika.Message(b'{"n": 1}', message_id="m-1"), "files.uploaded.pdf")
            await eventually(here.dead_letters(validator).count, "the validator gave up")
            await drained(here, projection)
        assert sorted(seen) == [("projection", "files.uploaded.pdf", 1)] + [("validator", "files.uploaded.pdf", 1)] * 3
        letter = await get(channel, "q.validator.dlq")
        assert letter is not None
        assert (letter.exchange, letter.routing_key, letter.message_id) == ("dlq.q.validator", "parking", "m-1")
        assert (letter.headers["x-final-retry-count"], letter.headers["x-original-queue"]) == (2, "q.validator")
        await letter.nack(requeue=True)
        seen.clear()
        works = True
        assert (await here.dead_letters(validator).redrive(via="retry", delay=15.0)).done == 1
        async with running(here, validator):
            # Seed 1's road is 15 s long; nobody needs to wait for it here.
            waiting = await get(channel, "q.validator.retry")
            assert waiting is not None
            assert waiting.headers["x-redriven-count"] == 1
            await channel.default_exchange.publish(aio_pika.Message(waiting.body, type=waiting.type), "q.validator")
            await waiting.ack()
            await eventually(lambda: seen == [("validator", "files.uploaded.pdf", 1)], "it was validated at last")


async def test_commands_of_seed_1_have_an_exchange_of_their_own() -> None:
    """A template replaces one name: q.upload.commands hangs on domain.commands, by the keys of its routes."""
    service = Service("upload.commands".replace(".", "-"), prefix="domain")
    seen: list[str] = []

    @service.on("commands.upload.#")
    async def upload(event: Event) -> None:
        seen.append(event.type)

    @service.on("commands.file.reprocess.*")
    async def reprocess(event: Event) -> None:
        seen.append(event.type)

    names = {"exchange": "domain.commands", "queue": "q.upload.commands"}
    async with stranger() as channel, bus("domain", layout="per-queue", names=names) as here, running(here, service):
        commands = await channel.get_exchange("domain.commands")
        for key in ("commands.upload.start.now", "commands.file.reprocess.7", "commands.upload"):
            await commands.publish(aio_pika.Message(b"{}"), key)
        with pytest.raises(aio_pika.exceptions.PublishError):
            await commands.publish(aio_pika.Message(b"{}"), "commands.file.delete.7")
        await eventually(lambda: len(seen) == 3, "all three arrived")
    assert sorted(seen) == ["commands.file.reprocess.7", "commands.upload", "commands.upload.start.now"]


# --- seed 0 --------------------------------------------------------------------------------------------------------


async def _seed_0(channel: AbstractChannel) -> None:
    """Exchanges and queues of the RaffleAPI, by its document."""
    for name in ("raffle_exchange", "raffle_retry_exchange", "raffle_dlx"):
        await channel.declare_exchange(name, "direct", durable=True)
    await _declare(
        channel,
        "raffle_queue",
        {"x-dead-letter-exchange": "raffle_dlx", "x-dead-letter-routing-key": "raffle_dlq"},
    )
    await _declare(
        channel,
        "raffle_retry_10s",
        {
            "x-message-ttl": 10000,
            "x-dead-letter-exchange": "raffle_exchange",
            "x-dead-letter-routing-key": "raffle_queue",
        },
    )
    await _declare(channel, "raffle_dlq")
    for queue, exchange in (
        ("raffle_queue", "raffle_exchange"),
        ("raffle_retry_10s", "raffle_retry_exchange"),
        ("raffle_dlq", "raffle_dlx"),
    ):
        await (await channel.get_queue(queue)).bind(exchange, queue)


async def test_raffle_takes_over_the_users_of_seed_0() -> None:
    """Batches of plain JSON, x-retries and x-retry-reason on the way round, bad JSON to the DLQ, the DLQ consumer."""
    service = Service("raffle-users", retry=RetryPolicy(max_retries=3, delay=10.0))
    inserted: list[str] = []
    buried: list[DeadLetter] = []

    @service.batch("#", size=1000, timeout=0.2, concurrency=2)
    async def insert(users: list[dict[str, str]], batch: Batch) -> None:
        for position, user in enumerate(users):
            if user["name"] == "unlucky":
                batch[position].retry("connection timeout", code="db_error")
            else:
                inserted.append(user["name"])

    @service.dead_letters(batch=100)
    async def bury(letters: list[DeadLetter]) -> None:
        buried.extend(letters)

    async with stranger() as channel, bus("raffle", layout="raffle") as here:
        await _seed_0(channel)
        exchange = await channel.get_exchange("raffle_exchange")
        async with running(here, service):
            for name in ("ana", "unlucky", "joao"):
                body = json.dumps({"id": f"uuid-{name}", "name": name, "email": f"{name}@email.com"}).encode()
                forged = {"x-death": [{"queue": "raffle_queue", "reason": "rejected", "count": 3}]}
                await exchange.publish(aio_pika.Message(body, headers=forged), "raffle_queue")  # type: ignore[arg-type]
            await exchange.publish(aio_pika.Message(b"{not json"), "raffle_queue")
            await eventually(lambda: sorted(inserted) == ["ana", "joao"], "the lucky ones are in")
            await eventually(lambda: len(buried) == 1, "the bad one went to the dead letters, and was read there")
            waiting: list[aio_pika.abc.AbstractIncomingMessage] = []

            async def on_its_way() -> bool:
                found = await get(channel, "raffle_retry_10s")
                waiting.extend([found] if found else [])
                return bool(waiting)

            await eventually(on_its_way, "the unlucky one waits for its retry")
        assert (buried[0].reason, buried[0].body) == ("undecodable", b"{not json")
        assert waiting[0].headers["x-retries"] == 1  # and not four: a publisher's x-death is his own affair
        assert waiting[0].headers["x-retry-reason"] == "db_error: connection timeout"
        assert json.loads(waiting[0].body)["name"] == "unlucky"
        await waiting[0].ack()


# --- options -------------------------------------------------------------------------------------------------------


async def test_prefetch_in_the_url_bounds_what_a_consumer_holds() -> None:
    """With ?prefetch=3 three deliveries are here and the other seven wait at the broker."""
    prefix = fresh()
    service = Service(f"{prefix}-stock", concurrency=10)
    go, started = asyncio.Event(), 0

    @service.on("#")
    async def handle(event: Event) -> None:
        nonlocal started
        started += 1
        await go.wait()

    async with Bus(f"{shared_url()}?prefetch=3", source=f"{prefix}-api") as here, stranger() as channel:
        await here.provision(service)
        await here.publish_many([Event("t", n) for n in range(10)])
        async with running(here, service):
            await eventually(lambda: started == 3, "three are being handled")
            waiting = await channel.declare_queue(work_queue(service), passive=True)
            assert waiting.declaration_result.message_count == 7
            go.set()
            await drained(here, service)
    assert started == 10


@asynccontextmanager
async def _door(port: int) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A second address of the broker; the callable shuts it and cuts everybody who came in by it."""
    url = URL(shared_url())
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(url.host, url.port)
        writers.extend((writer, inner_writer))
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = await asyncio.start_server(let_in, "127.0.0.1", port)

    async def shut() -> None:
        server.close()
        for writer in writers:
            writer.close()

    try:
        yield shut
    finally:
        await shut()


async def test_when_a_host_goes_the_next_one_is_used() -> None:
    """Two hosts in the URL; the one in use goes away, and publishing and consuming go on by the other."""
    prefix = fresh()
    service = Service(f"{prefix}-stock")
    seen: list[object] = []

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.data)

    broker = URL(shared_url())
    hosts = f"127.0.0.1:{PORT + 8},{broker.host}:{broker.port}"
    async with (
        _door(PORT + 8) as shut,
        Bus(f"amqp://guest:guest@{hosts}{broker.raw_path}", source=f"{prefix}-api") as here,
        running(here, service),
    ):
        await here.publish("t", 1)
        await eventually(lambda: seen == [1], "the first host works")
        await shut()

        async def goes_on() -> bool:
            try:
                await here.publish("t", 2)
            except Exception:  # noqa: BLE001 - the first one may meet the cut
                return False
            return 2 in seen

        await eventually(goes_on, "the second host took over")
        await drained(here, service)


async def test_start_up_warns_of_what_a_killed_broker_may_lose(caplog: pytest.LogCaptureFixture) -> None:
    """Classic queues on RabbitMQ 4 are warned of at every start, on RabbitMQ 3 and on quorum queues nobody is."""
    with caplog.at_level(logging.WARNING, "eventbus.rabbit"):
        async with bus("x", queue_type="quorum"):
            pass
        assert not caplog.records
        async with bus("x") as here:
            version = here.adapter._consuming.version  # type: ignore[attr-defined]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (1 if version >= (4,) else 0)
    assert all("classic queues" in text for text in warned)
