"""kafka:// beside raw aiokafka and FastStream, one run on one broker; and the neighbours of one slow message."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks.measure import DATA, Figure, goal, goal_of_rounds, measured, show
from benchmarks.ours import figures
from eventbus import Bus, Event, Service
from tests.brokers.kafka import node

PORT = 19180
NUMBER = 30_000
FEW = 1_500
ROUNDS = 5
PARTITIONS = 6
SLOW = 5.0
BODY = json.dumps(DATA).encode()


async def _topics(address: str, *names: str, partitions: int = PARTITIONS) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, partitions, 1) for name in names])
    finally:
        await admin.close()


async def _fill(address: str, topic: str, number: int) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=address, linger_ms=5)
    await producer.start()
    try:
        for _ in range(0, number, 500):
            await asyncio.gather(*[await producer.send(topic, BODY) for _ in range(500)])
    finally:
        await producer.stop()


async def _raw_publish(address: str) -> Figure:
    """send_and_wait with 64 in flight, as safe as we are: all replicas, idempotent."""
    await _topics(address, "raw-publish")
    producer = AIOKafkaProducer(bootstrap_servers=address, acks="all", enable_idempotence=True)
    await producer.start()
    left = iter(range(NUMBER))

    async def caller() -> None:
        for _ in left:
            await producer.send_and_wait("raw-publish", BODY)

    try:
        with measured(NUMBER) as figure:
            await asyncio.gather(*(caller() for _ in range(64)))
    finally:
        await producer.stop()
    return figure


async def _raw_consume(address: str, group: str) -> Figure:
    """500 at a time, then a commit of the batch."""
    consumer = AIOKafkaConsumer(
        "raw", bootstrap_servers=address, group_id=group, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    left = NUMBER
    with measured(NUMBER) as figure:
        await consumer.start()
        while left > 0:
            batches = await consumer.getmany(timeout_ms=1000, max_records=500)
            left -= sum(len(records) for records in batches.values())
            if batches:
                await consumer.commit()
    await consumer.stop()
    return figure


async def _faststream(address: str, topic: str, number: int, **options: Any) -> Figure:
    """A subscriber as its documentation shows it."""
    from faststream.kafka import KafkaBroker

    await _topics(address, topic)
    await _fill(address, topic, number)
    broker = KafkaBroker(address, logger=None)
    left, done = number, asyncio.Event()

    def count(some: int) -> None:
        nonlocal left
        left -= some
        if left <= 0:
            done.set()

    if options.get("batch"):

        @broker.subscriber(topic, group_id=topic, auto_offset_reset="earliest", **options)
        async def handle_many(bodies: list[dict[str, Any]]) -> None:
            count(len(bodies))

    else:

        @broker.subscriber(topic, group_id=topic, auto_offset_reset="earliest", **options)
        async def handle(body: dict[str, Any]) -> None:
            count(1)

    try:
        with measured(number) as figure:
            await broker.start()
            async with asyncio.timeout(180):
                await done.wait()
    finally:
        await broker.stop()
    return figure


async def _neighbours(url: str, address: str) -> tuple[float, float]:
    """One message of 5 s, then 2,000 at 400/s in the same partition: the p99 of their latency here, and with raw."""
    late: list[float] = []
    service = Service("slow-a", concurrency=64)

    @service.on("order.#")
    async def handle(event: Event) -> None:
        if event.type == "order.slow":
            await asyncio.sleep(SLOW)
        else:
            late.append(time.time() - float(str(event.data)))

    settings = {"kafka": {"partitions": 1}}
    async with Bus(url, source="bench-api", prefix="slow", settings=settings) as bus, bus.serving(service):
        await bus.publish("order.slow")
        for _ in range(200):
            await bus.publish_many([Event("order.created", time.time()) for _ in range(10)])
            await asyncio.sleep(0.025)
        while len(late) < 2000:
            await asyncio.sleep(0.05)
    return _p99(late), await _raw_neighbours(address)


async def _raw_neighbours(address: str) -> float:
    """The same by getmany, all of a batch at once, then the commit."""
    await _topics(address, "raw-slow", partitions=1)
    late: list[float] = []
    consumer = AIOKafkaConsumer(
        "raw-slow", bootstrap_servers=address, group_id="s", enable_auto_commit=False, auto_offset_reset="earliest"
    )
    producer = AIOKafkaProducer(bootstrap_servers=address, acks="all", enable_idempotence=True)
    await consumer.start()
    await producer.start()

    async def handle(value: bytes) -> None:
        if value == b"slow":
            await asyncio.sleep(SLOW)
        else:
            late.append(time.time() - float(value))

    async def consume() -> None:
        while len(late) < 2000:
            batches = await consumer.getmany(timeout_ms=100, max_records=500)
            records = [record for some in batches.values() for record in some]
            await asyncio.gather(*(handle(record.value) for record in records))
            if records:
                await consumer.commit()

    try:
        consuming = asyncio.create_task(consume())
        await producer.send_and_wait("raw-slow", b"slow")
        for _ in range(200):
            await asyncio.gather(*[await producer.send("raw-slow", str(time.time()).encode()) for _ in range(10)])
            await asyncio.sleep(0.025)
        await consuming
    finally:
        await producer.stop()
        await consumer.stop()
    return _p99(late)


def _p99(late: list[float]) -> float:
    return sorted(late)[len(late) * 99 // 100]


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _prepare(address: str) -> None:
    await _topics(address, "raw")
    await _fill(address, "raw", NUMBER)


def run() -> bool:
    """All figures; whether all goals were met."""
    from faststream import AckPolicy

    print(f"kafka: one broker, {PARTITIONS} partitions, body of {len(BODY)} bytes, {NUMBER:,} messages")
    for name in ("faststream", "aiokafka"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("eventbus").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, node(PORT, Path(folder)) as broker:
        address, url = broker.address, broker.url
        _run(_prepare(address))
        raw_publish = show("raw aiokafka: send_and_wait, 64 in flight", _run(_raw_publish(address)))
        fast = show("FastStream: its default policy", _run(_faststream(address, "fast-default", NUMBER)))
        safe = show("FastStream: at least once", _run(_faststream(address, "fast-safe", FEW, ack_policy=AckPolicy.ACK)))
        raws, batches, consumed = list[Figure](), list[Figure](), list[Figure]()
        for turn in range(ROUNDS):
            one = _run(_raw_consume(address, f"raw-{turn}"))
            raws.append(show("raw aiokafka: getmany 500, commit per batch", one))
            one = _run(_faststream(address, f"fast-batch-{turn}", NUMBER, batch=True))
            batches.append(show("FastStream: batch subscriber", one))
            service = Service("bench-a", concurrency=64, prefetch=1024)
            publish, consume, singly = _run(figures(url, service, number=NUMBER))
            consumed.append(show("consume, handle (64 at once), settle", consume))
        show("publish_many, 500 at a time", publish)
        show("publish, 64 callers at once", singly)
        ours, its = _run(_neighbours(url, address))
        print(f"  p99 of the neighbours of one message of {SLOW:g} s: {ours * 1000:.0f} ms, raw {its * 1000:.0f} ms")
    results = [
        goal_of_rounds("consume+settle against raw, a commit per batch", consumed, raws, 1.0),
        goal_of_rounds("consume+settle against FastStream's batch subscriber", consumed, batches, 2.5),
        goal("publish_many against raw send, 64 in flight", publish.rate / raw_publish.rate, 1.2),
    ]
    print(f"  consume+settle against FastStream's default: {consume.rate / fast.rate:.1f}, at least once: ", end="")
    print(f"{consume.rate / safe.rate:.0f}; neighbours' p99 against raw's: {ours / its:.3f}")
    return all(results)


if __name__ == "__main__":
    run()
