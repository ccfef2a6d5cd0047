"""What one writes in an afternoon: the raw client in a loop, each event POSTed by aiohttp, then acknowledged.

`python -m benchmarks.plain rabbit|redis|kafka|sqlite URL ENDPOINT`: made to be killed when all events have come.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Awaitable, Callable

import aiohttp
import uvloop

IN_FLIGHT = 64
NAME = "bench-plain"
Post = Callable[[str, bytes], Awaitable[None]]


async def rabbit(url: str, post: Post) -> None:
    """aio-pika, prefetch 64, ack each."""
    import aio_pika

    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=IN_FLIGHT)
    queue = await channel.get_queue(NAME, ensure=False)

    async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        await post(message.message_id or "", message.body)
        await message.ack()

    await queue.consume(handle)
    await asyncio.Event().wait()


async def redis(url: str, post: Post) -> None:
    """redis-py, XREADGROUP 64, XACK each, 64 workers."""
    from redis.asyncio import Redis

    client = Redis.from_url(url, protocol=2)
    waiting: asyncio.Queue[tuple[bytes, dict[bytes, bytes]]] = asyncio.Queue(IN_FLIGHT)

    async def work() -> None:
        while True:
            id, fields = await waiting.get()
            await post(id.decode(), fields[b"data"])
            await client.xack(NAME, NAME, id)

    workers = [asyncio.create_task(work()) for _ in range(IN_FLIGHT)]
    while workers:
        for _, entries in await client.xreadgroup(NAME, "me", {NAME: ">"}, count=IN_FLIGHT, block=1000):
            for entry in entries:
                await waiting.put(entry)


async def kafka(url: str, post: Post) -> None:
    """aiokafka, getmany, 64 in flight, commit per batch."""
    from aiokafka import AIOKafkaConsumer

    servers = url.partition("://")[2].partition("/")[0]
    consumer = AIOKafkaConsumer(
        NAME, bootstrap_servers=servers, group_id=NAME, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    await consumer.start()
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(id: str, body: bytes) -> None:
        async with gate:
            await post(id, body)

    while True:
        found = await consumer.getmany(timeout_ms=1000, max_records=1000)
        records = [record for part in found.values() for record in part]
        await asyncio.gather(*(one(f"{record.partition}-{record.offset}", record.value) for record in records))
        if records:
            await consumer.commit()


async def sqlite(url: str, post: Post) -> None:
    """sqlite3, 64 rows at a time, a transaction for each that is done."""
    db = sqlite3.connect(url.removeprefix("sqlite:///") + "-plain", isolation_level=None)
    db.execute("PRAGMA synchronous=FULL")

    async def one(id: int, body: bytes) -> None:
        await post(str(id), body)
        db.execute("DELETE FROM queue WHERE id = ?", (id,))

    while True:
        rows = db.execute("SELECT id, body FROM queue ORDER BY id LIMIT ?", (IN_FLIGHT,)).fetchall()
        await asyncio.gather(*(one(*row) for row in rows))
        if not rows:
            await asyncio.sleep(0.1)


async def main() -> None:
    broker, url, endpoint = sys.argv[1:4]
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def post(id: str, body: bytes) -> None:
            head = {"content-type": "application/json", "ce-id": id, "ce-type": "order.created", "ce-source": "/bench"}
            async with session.post(endpoint, data=body, headers=head) as response:
                await response.read()
                assert response.status == 200

        await {"rabbit": rabbit, "redis": redis, "kafka": kafka, "sqlite": sqlite}[broker](url, post)


if __name__ == "__main__":
    uvloop.run(main())
