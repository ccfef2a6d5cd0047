"""amqp:// beside raw aio-pika and FastStream, in one run on one broker: publish, consume and settle, retry, latency.

Rounds are interleaved and the best of each counts: the machine is noisy, the order must not decide.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import time
from collections.abc import Awaitable, Callable

import aio_pika

from benchmarks.measure import Figure, goal, measured, show
from eventbus import Bus, Event, RetryPolicy, Service
from eventbus.policy import DEFAULT_POLICY, decide
from eventbus.status import retry

MESSAGES = 30_000
IN_FLIGHT = 256
PREFETCH = 256
BODY = json.dumps({"id": 12345, "customer": "acme", "note": ""}).encode().replace(b'""', b'"' + b"x" * 203 + b'"')
ROUNDS = 2


def _url() -> str:
    from tests.brokers.rabbit import shared_url

    return shared_url()


# --- publish -------------------------------------------------------------------------------------------------------


async def _publish_raw(number: int) -> Figure:
    """aio-pika, awaited, 256 in flight."""
    connection = await aio_pika.connect(_url())
    channel = await connection.channel()
    exchange = await channel.get_exchange("bench.main-exchange", ensure=False)
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one() -> None:
        async with gate:
            await exchange.publish(aio_pika.Message(BODY, delivery_mode=2), "")

    with measured(number) as figure:
        await asyncio.gather(*(one() for _ in range(number)))
    await connection.close()
    return figure


async def _publish_faststream(number: int) -> Figure:
    from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange

    broker = RabbitBroker(_url(), logger=None)
    exchange = RabbitExchange("bench.main-exchange", type=ExchangeType.FANOUT, durable=True)
    gate = asyncio.Semaphore(IN_FLIGHT)
    await broker.start()

    async def one() -> None:
        async with gate:
            await broker.publish(BODY, exchange=exchange, persist=True)

    with measured(number) as figure:
        await asyncio.gather(*(one() for _ in range(number)))
    await broker.stop()
    return figure


async def _publish_ours(number: int) -> Figure:
    async with Bus(_url(), source="bench-api") as bus:
        with measured(number) as figure:
            for start in range(0, number, 1000):
                await bus.publish_many([Event("order.created", BODY) for _ in range(min(1000, number - start))])
    return figure


# --- consume -------------------------------------------------------------------------------------------------------


async def _fill(number: int) -> None:
    async with Bus(_url(), source="bench-api") as bus:
        await bus.provision(Service("bench-work"))
        async with _channel() as channel:
            await (await channel.get_queue("bench.queue.bench-work", ensure=False)).purge()
        for start in range(0, number, 1000):
            await bus.publish_many([Event("order.created", BODY) for _ in range(min(1000, number - start))])


class _channel:  # noqa: N801 - a context manager that reads as one
    async def __aenter__(self) -> aio_pika.abc.AbstractChannel:
        self._connection = await aio_pika.connect(_url())
        return await self._connection.channel()

    async def __aexit__(self, *exc: object) -> None:
        await self._connection.close()


async def _consume_iterator(number: int) -> Figure:
    """aio-pika's queue iterator, ack each."""
    async with _channel() as channel:
        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await channel.get_queue("bench.queue.bench-work", ensure=False)
        left = number
        with measured(number) as figure:
            async with queue.iterator() as messages:
                async for message in messages:
                    await message.ack()
                    left -= 1
                    if not left:
                        break
    return figure


async def _consume_callback(number: int) -> Figure:
    """aio-pika's callback with process()."""
    async with _channel() as channel:
        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await channel.get_queue("bench.queue.bench-work", ensure=False)
        left, done = number, asyncio.Event()

        async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            nonlocal left
            async with message.process():
                pass
            left -= 1
            if not left:
                done.set()

        with measured(number) as figure:
            await queue.consume(handle)
            await done.wait()
    return figure


async def _consume_faststream(number: int) -> Figure:
    from faststream import AckPolicy
    from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

    broker = RabbitBroker(_url(), logger=None, default_channel=Channel(prefetch_count=PREFETCH))
    left, done = number, asyncio.Event()

    @broker.subscriber(RabbitQueue("bench.queue.bench-work", declare=False), ack_policy=AckPolicy.NACK_ON_ERROR)
    async def handle(body: bytes) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    with measured(number) as figure:
        await broker.start()
        await done.wait()
    await broker.stop()
    return figure


async def _consume_ours(number: int, *, slow_every: int = 0) -> Figure:
    """Ours. With slow ones the run ends a second after the last of them began, however fast the others are.

    So of 30,000 messages at 15,000/s a third of the time is that one second, and from 30,000/s on it is more than half:
    the rate until the last message has begun is printed too.
    """
    service = Service("bench-work", concurrency=64, prefetch=PREFETCH)
    left, done, seen, begun = number, asyncio.Event(), 0, 0.0

    @service.on("#")
    async def handle(body: bytes) -> None:
        nonlocal left, seen, begun
        seen += 1
        if seen == number:
            begun = time.perf_counter()
        if slow_every and seen % slow_every == slow_every // 2:
            await asyncio.sleep(1.0)
        left -= 1
        if not left:
            done.set()

    async with Bus(_url(), source="bench-api") as bus:
        await bus.provision(service)
        started = time.perf_counter()
        with measured(number) as figure:
            async with bus.serving(service):
                await done.wait()
    if slow_every:
        print(f"    {number / (begun - started):>9,.0f}/s  until the last message has begun")
    return figure


# --- retry ---------------------------------------------------------------------------------------------------------


async def _retry(number: int, at_once: int) -> Figure:
    """Copy, confirm, ack; in batches, or message by message."""
    service = Service("bench-work", retry=RetryPolicy(delay=60.0), prefetch=PREFETCH)
    sub = service.subscription()
    async with Bus(_url(), source="bench-api") as bus:
        await bus.provision(service)
        async with bus.adapter.consume(sub) as consumer:
            done = 0
            with measured(number) as figure:
                while done < number:
                    got = await consumer.receive(min(at_once, number - done), 5.0)
                    now = time.time()
                    await consumer.settle([(d, decide(retry("again"), d, DEFAULT_POLICY, now=now)) for d in got])
                    done += len(got)
    async with _channel() as channel:
        for name in ("bench.retry-queue.bench-work", "bench.queue.bench-work"):
            await (await channel.get_queue(name, ensure=False)).purge()
    return figure


# --- latency -------------------------------------------------------------------------------------------------------


async def _latency_raw(number: int) -> float:
    async with _channel() as channel:
        queue = await channel.get_queue("bench.queue.bench-work", ensure=False)
        exchange = await channel.get_exchange("bench.main-exchange", ensure=False)
        arrived = asyncio.Event()

        async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            arrived.set()
            await message.ack()

        await queue.consume(handle)

        async def send() -> None:
            await exchange.publish(aio_pika.Message(BODY, delivery_mode=2), "")

        return await _round_trips(number, send, arrived)


async def _latency_ours(number: int) -> float:
    service = Service("bench-work")
    arrived = asyncio.Event()

    @service.on("#")
    async def handle(body: bytes) -> None:
        arrived.set()

    async with Bus(_url(), source="bench-api") as bus, bus.serving(service):

        async def send() -> None:
            await bus.publish("order.created", BODY)

        return await _round_trips(number, send, arrived)


async def _round_trips(number: int, send: Callable[[], Awaitable[None]], arrived: asyncio.Event) -> float:
    times = []
    for _ in range(number):
        arrived.clear()
        started = time.perf_counter()
        await asyncio.gather(send(), arrived.wait())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# --- all -----------------------------------------------------------------------------------------------------------


def _best(name: str, figures: list[Figure]) -> None:
    show(name, _fastest(figures))


def _fastest(figures: list[Figure]) -> Figure:
    return max(figures, key=lambda figure: figure.rate)


def _rounds(
    contestants: dict[str, Callable[[], Awaitable[Figure]]], prepare: Callable[[], Awaitable[None]]
) -> dict[str, list[Figure]]:
    found: dict[str, list[Figure]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, run in contestants.items():
            asyncio.run(prepare())
            found[name].append(asyncio.run(run()))  # type: ignore[arg-type]
            print(f"    {found[name][-1].rate:>9,.0f}/s  {name}", flush=True)
    for name, figures in found.items():
        _best(name, figures)
    return found


async def _empty() -> None:
    await _fill(0)


def run() -> bool:
    logging.disable(logging.WARNING)
    print(
        f"rabbitmq: classic queues, persistent, confirmed, {MESSAGES:,} messages of {len(BODY)} bytes, best of {ROUNDS}"
    )
    number = MESSAGES
    published = _rounds(
        {
            "publish: raw aio-pika, 256 in flight": lambda: _publish_raw(number),
            "publish: FastStream, 256 in flight": lambda: _publish_faststream(number),
            "publish: ours, publish_many of 1000": lambda: _publish_ours(number),
        },
        _empty,
    )
    consumed = _rounds(
        {
            "consume: raw iterator, ack each": lambda: _consume_iterator(number),
            "consume: raw callback, process()": lambda: _consume_callback(number),
            "consume: FastStream, at least once": lambda: _consume_faststream(number),
            "consume: ours": lambda: _consume_ours(number),
            "consume: ours, one of 1 s in 1,000": lambda: _consume_ours(number, slow_every=1000),
        },
        lambda: _fill(number),
    )
    few = number // 3
    retried = _rounds(
        {
            "retry: ours, message by message": lambda: _retry(few, 1),
            "retry: ours, in batches of 256": lambda: _retry(few, 256),
        },
        lambda: _fill(few),
    )
    asyncio.run(_fill(0))
    latencies = [(asyncio.run(_latency_raw(300)), asyncio.run(_latency_ours(300))) for _ in range(ROUNDS)]
    raw_latency, our_latency = (min(column) for column in zip(*latencies, strict=True))
    print(f"  latency on an idle bus, median: raw {raw_latency * 1e3:.2f} ms, ours {our_latency * 1e3:.2f} ms")
    raw, stream, ours = map(_fastest, published.values())
    iterator, callback, faststream, mine, _ = map(_fastest, consumed.values())
    singly, batched = map(_fastest, retried.values())
    # In pairs: the two ran one after the other, and a machine that is busy for a while is so for both.
    *_, without, with_slow = consumed.values()
    share = max(slow.rate / quick.rate for quick, slow in zip(without, with_slow, strict=True))
    results = [
        goal("publish against raw aio-pika", ours.rate / raw.rate, 1.5),
        goal("publish against FastStream", ours.rate / stream.rate, 2.0),
        goal("CPU of publish, share of raw aio-pika's", ours.cpu_us / raw.cpu_us, 0.34, at_most=True),
        goal("CPU of publish, share of FastStream's", ours.cpu_us / stream.cpu_us, 0.34, at_most=True),
        goal("consume+settle against the iterator", mine.rate / iterator.rate, 2.0),
        goal("consume+settle against the callback", mine.rate / callback.rate, 1.5),
        goal("consume+settle against FastStream", mine.rate / faststream.rate, 2.5),
        goal("with one of 1 s in every 1,000, share of the rate without", share, 0.5),
        goal("retry in batches against one by one", batched.rate / singly.rate, 1.8),
        goal("latency on an idle bus against raw", our_latency / raw_latency, 1.3, at_most=True),
    ]
    logging.disable(logging.NOTSET)
    return all(results)


if __name__ == "__main__":
    raise SystemExit(0 if run() else 1)
