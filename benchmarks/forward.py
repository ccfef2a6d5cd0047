"""Forwarding over HTTP beside a plain loop of the raw client and aiohttp, per broker, in one run.

A light endpoint runs in a process of its own and counts; every contestant runs in a process of its own too, so that its
CPU and memory are its own. 60,000 events of 250 bytes, 64 in flight, uvloop everywhere; rounds are interleaved and the
best of each counts.

    python -m benchmarks.forward [rabbit] [redis] [kafka] [sqlite] [outage]

`outage`: a route to an endpoint that is well, alone and then beside a route whose endpoint is down.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.measure import goal

EVENTS = int(os.environ.get("EVENTBUS_BENCH_EVENTS", "60000"))
IN_FLIGHT = 64
ROUNDS = int(os.environ.get("EVENTBUS_BENCH_ROUNDS", "2"))
BODY = json.dumps({"id": 12345, "customer": "acme", "note": ""}).encode().replace(b'""', b'"' + b"x" * 203 + b'"')
HEADERS = {"content-type": "application/json"}
PREFIX, SERVICE = "bench", "bench-http"
BROKERS = ("rabbit", "redis", "kafka", "sqlite", "outage")


# --- the endpoint, in its own process ------------------------------------------------------------------------------


class Light(asyncio.Protocol):
    """The least that is an HTTP server: reads requests by their length, answers 204, counts events."""

    def __init__(self, counter: mmap.mmap) -> None:
        self._counter = counter
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        data = self._data + data if self._data else data
        answers = events = 0
        while (end := data.find(b"\r\n\r\n")) >= 0:
            head = data[:end].lower()
            at = head.index(b"content-length:")
            length = int(head[at + 15 : (head.find(b"\r\n", at) + 1 or end + 1) - 1])
            if len(data) < end + 4 + length:
                break
            batch = head.find(b"x-eventbus-batch-size:")
            events += 1 if batch < 0 else int(head[batch + 22 : (head.find(b"\r\n", batch) + 1 or end + 1) - 1])
            answers += 1
            data = data[end + 4 + length :]
        self._data = data
        if answers:
            count = struct.unpack_from("q", self._counter)[0]
            struct.pack_into("q", self._counter, 0, count + events)
            self._transport.write(b"HTTP/1.1 204 No Content\r\n\r\n" * answers)  # type: ignore[attr-defined]


async def _endpoint(counter: str) -> None:
    memory = Counter(counter).memory
    server = await asyncio.get_running_loop().create_server(lambda: Light(memory), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Counter:
    """How many events the endpoint has got."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "r+b")  # noqa: SIM115 - as long as the process
        self.wall = self.cpu = 0.0
        self.memory = mmap.mmap(self._file.fileno(), 8)

    @property
    def value(self) -> int:
        return int(struct.unpack_from("q", self.memory)[0])

    def begin(self) -> None:
        """Connected, and ready to take the first event: what comes before is the same for ten events and a million."""
        self.wall, self.cpu = time.perf_counter(), _cpu()

    def reset(self) -> None:
        struct.pack_into("q", self.memory, 0, 0)


@contextmanager
def _endpoint_process(counter: str) -> Iterator[str]:
    process = subprocess.Popen(_command("endpoint", counter), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/events"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# --- contestants, each in its own process --------------------------------------------------------------------------


async def _ours(url: str, endpoint: str, counter: Counter, mode: str) -> None:
    from eventbus import Bus, Service
    from eventbus.service import BatchWindow

    service = Service(SERVICE, concurrency=IN_FLIGHT)
    if mode == "batch":
        service.forward("#", to=endpoint, mode="batch", batch=BatchWindow(size=100, timeout=0.05), concurrency=4)
    elif mode == "aiohttp":
        service.forward("#", to=endpoint, sender="aiohttp")
    else:
        service.forward("#", to=endpoint)
    async with Bus(url, source=f"{PREFIX}-api") as bus:
        await bus.provision(service)
        counter.begin()
        async with bus.serving(service):
            await _until(counter)


async def _until(counter: Counter) -> None:
    while counter.value < EVENTS:
        await asyncio.sleep(0.005)


async def _plain_rabbit(url: str, endpoint: str, counter: Counter) -> None:
    """aio-pika's callback, ack each, aiohttp."""
    import aio_pika
    import aiohttp

    left, done = EVENTS, asyncio.Event()
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=IN_FLIGHT)
    queue = await channel.get_queue(f"{PREFIX}.queue.{SERVICE}", ensure=False)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:

        async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            nonlocal left
            async with session.post(endpoint, data=message.body, headers=HEADERS) as answer:
                if answer.status < 300:
                    await message.ack()
            left -= 1
            if not left:
                done.set()

        counter.begin()
        await queue.consume(handle)
        await done.wait()
    await connection.close()


async def _plain_redis(url: str, endpoint: str, counter: Counter) -> None:
    """redis-py: XREADGROUP 64, a task each, XACK each, aiohttp."""
    import aiohttp
    from redis.asyncio import Redis

    client = Redis.from_url(url, protocol=2)
    left = EVENTS
    gate = asyncio.Semaphore(IN_FLIGHT)
    tasks: set[asyncio.Task[None]] = set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:

        async def handle(id: bytes, body: bytes) -> None:
            try:
                async with session.post(endpoint, data=body, headers=HEADERS) as answer:
                    if answer.status < 300:
                        await client.xack("plain", "plain", id)
            finally:
                gate.release()

        counter.begin()
        while left:
            entries = await client.xreadgroup("plain", "me", {"plain": ">"}, count=IN_FLIGHT, block=1000)
            for id, fields in entries[0][1]:
                await gate.acquire()
                task = asyncio.create_task(handle(id, fields[b"data"]))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            left -= len(entries[0][1])
        await asyncio.gather(*tasks)
    await client.aclose()


async def _plain_kafka(url: str, endpoint: str, counter: Counter) -> None:
    """aiokafka: getmany, 64 at a time, commit after each poll, aiohttp."""
    import aiohttp
    from aiokafka import AIOKafkaConsumer

    consumer = AIOKafkaConsumer(
        f"{PREFIX}.main",
        bootstrap_servers=url.removeprefix("kafka://"),
        group_id=f"plain-{time.time_ns()}",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    left = EVENTS
    gate = asyncio.Semaphore(IN_FLIGHT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:

        async def handle(body: bytes) -> None:
            async with (
                gate,
                session.post(endpoint, data=body, headers=HEADERS) as answer,
            ):
                assert answer.status < 300

        counter.begin()
        while left > 0:
            found = await consumer.getmany(timeout_ms=1000, max_records=500)
            records = [record for part in found.values() for record in part]
            await asyncio.gather(*(handle(record.value) for record in records))
            await consumer.commit()
            left -= len(records)
    await consumer.stop()


async def _beside(url: str, endpoint: str, counter: Counter, dead: bool) -> None:
    """A route that is well; with `dead` another one whose endpoint refuses, with a tenth of the events."""
    from eventbus import Bus, Event, Service

    service = Service(SERVICE, concurrency=IN_FLIGHT)
    service.forward("well", to=endpoint)
    service.forward("down", to="http://127.0.0.1:1/")
    async with Bus(url, source=f"{PREFIX}-api") as bus, bus.serving(service):
        if dead:
            await bus.publish_many([Event("down", BODY) for _ in range(1000)])
            while (await bus.stats(service)).endpoints[1].breaker == "closed":
                await asyncio.sleep(0.01)
        began = time.perf_counter()
        for start in range(0, EVENTS, 1000):
            await bus.publish_many([Event("well", BODY) for _ in range(min(1000, EVENTS - start))])
            if dead:
                await bus.publish_many([Event("down", BODY) for _ in range(100)])
        await _until(counter)
        print(json.dumps({"rate": EVENTS / (time.perf_counter() - began), "parked": (await bus.stats(service)).parked}))


PLAIN: dict[str, Callable[[str, str, Counter], Awaitable[None]]] = {
    "rabbit": _plain_rabbit,
    "redis": _plain_redis,
    "kafka": _plain_kafka,
}


async def _contestant(name: str, broker: str, url: str, endpoint: str, counter: str) -> None:
    import logging

    logging.disable(logging.WARNING)
    count = Counter(counter)
    if broker == "outage":
        await _beside(url, endpoint, count, name == "dead")
        return
    if name == "plain":
        await PLAIN[broker](url, endpoint, count)
    else:
        await _ours(url, endpoint, count, name)
    wall, cpu = time.perf_counter() - count.wall, _cpu() - count.cpu
    print(json.dumps({"wall": wall, "cpu": cpu, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def _cpu(who: int = resource.RUSAGE_SELF) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


# --- the run -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """One contestant's best round."""

    wall: float
    cpu: float
    rss: float

    @property
    def rate(self) -> float:
        return EVENTS / self.wall

    def __str__(self) -> str:
        return f"{self.rate:>9,.0f} events/s {self.cpu / EVENTS * 1e6:>7.1f} us CPU per event {self.rss:>6.0f} MB"


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.forward", "--child", *arguments]


async def _fill(broker: str, url: str) -> None:
    """The same events for everybody: in the service's own queue, and in the plain loop's stream."""
    from eventbus import Bus, Event, Service

    async with Bus(url, source=f"{PREFIX}-api") as bus:
        await bus.provision(Service(SERVICE))
        for start in range(0, EVENTS, 1000):
            await bus.publish_many([Event("order.created", BODY) for _ in range(min(1000, EVENTS - start))])


async def _fill_plain(broker: str, url: str) -> None:
    if broker != "redis":
        await _fill(broker, url)
        return
    from redis.asyncio import Redis

    client = Redis.from_url(url, protocol=2)
    await client.delete("plain")
    await client.xgroup_create("plain", "plain", "0", mkstream=True)
    for start in range(0, EVENTS, 1000):
        pipe = client.pipeline(transaction=False)
        for _ in range(min(1000, EVENTS - start)):
            pipe.xadd("plain", {"data": BODY})
        await pipe.execute()
    await client.aclose()


def _play(name: str, broker: str, url: str, endpoint: str, counter: Counter, path: str) -> Result:
    uvloop.run(_fill_plain(broker, url) if name == "plain" else _fill(broker, url))
    counter.reset()
    if name == "workers":
        return _workers(broker, url, endpoint, counter)
    done = subprocess.run(
        _command("contestant", name, broker, url, endpoint, path), check=True, capture_output=True, text=True
    )
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def _workers(broker: str, url: str, endpoint: str, counter: Counter) -> Result:
    """`eventbus run --workers 2`, from the first event to the last."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "bus.toml"
        route = f'[[services.{SERVICE}.routes]]\non = "#"\nforward = "{endpoint}"\nconcurrency = {IN_FLIGHT // 2}\n'
        config.write_text(f'version = 1\nurl = "{url}"\n[services.{SERVICE}]\n{route}')
        command = [sys.executable, "-m", "eventbus", "run", str(config), "--workers", "2", "--log-level", "error"]
        before = _cpu(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(command)
        while not counter.value and process.poll() is None:
            time.sleep(0.001)
        began = time.perf_counter()
        while counter.value < EVENTS and process.poll() is None:
            time.sleep(0.005)
        wall = time.perf_counter() - began
        if process.poll() is not None:
            raise SystemExit("the workers ended before their work was done")
        process.terminate()
        process.wait()
    cpu = _cpu(resource.RUSAGE_CHILDREN) - before  # with the start of three processes
    return Result(wall, cpu, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)


def _broker(broker: str, url: str, endpoint: str, counter: Counter, path: str) -> bool:
    names = {
        "plain": "plain loop: raw client, ack each, aiohttp",
        "aiohttp": "ours, sender aiohttp",
        "lean": "ours",
        "batch": "ours, batch mode (100 per POST)",
        "workers": "ours, --workers 2",
    }
    if broker == "sqlite":
        del names["plain"]
    print(f"{broker}: {EVENTS:,} events of {len(BODY)} bytes, {IN_FLIGHT} in flight, best of {ROUNDS}", flush=True)
    found: dict[str, list[Result]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            found[name].append(_play(name, broker, url, endpoint, counter, path))
            print(f"    {found[name][-1].rate:>9,.0f}/s  {names[name]}", flush=True)
    best = {name: max(results, key=lambda result: result.rate) for name, results in found.items()}
    for name, text in names.items():
        print(f"  {text:<44} {best[name]}")
    results = [
        goal("batch mode against single mode", best["batch"].rate / best["lean"].rate, 2.0),
        goal("MB of memory", best["lean"].rss, 80, at_most=True),
    ]
    if "plain" in best:
        wanted = 2.0 if broker == "rabbit" else 1.7
        results.append(goal("events/s against the plain loop", best["lean"].rate / best["plain"].rate, wanted))
        goal("CPU per event, share of the plain loop's", best["lean"].cpu / best["plain"].cpu, 0.6, at_most=True)
    return all(results)


def _outage(endpoint: str, counter: Counter, path: str) -> bool:
    print(f"outage: {EVENTS:,} events to an endpoint that is well, alone and beside one that is down", flush=True)
    rates: dict[str, list[float]] = {"alone": [], "dead": []}
    parked = 0
    for _ in range(ROUNDS + 1):
        for name, found in rates.items():
            counter.reset()
            command = _command("contestant", name, "outage", "memory://", endpoint, path)
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            told = json.loads(done.stdout.splitlines()[-1])
            found.append(told["rate"])
            parked += told["parked"]
            print(f"    {told['rate']:>9,.0f}/s  {'alone' if name == 'alone' else 'beside a dead one'}", flush=True)
    share = goal("rate beside a dead endpoint, share of alone", max(rates["dead"]) / max(rates["alone"]), 0.9)
    return goal("parked meanwhile", parked, 0, at_most=True) and share


@contextmanager
def _url(broker: str) -> Iterator[str]:
    if broker == "rabbit":
        from tests.brokers.rabbit import shared_url

        yield shared_url()
    elif broker == "redis":
        from tests.brokers.redis import RedisServer

        with RedisServer() as server:
            yield server.url
    elif broker == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/bus.db"
    else:
        from tests.brokers.kafka import shared_url as kafka_url

        yield kafka_url()


def run(brokers: tuple[str, ...] = BROKERS) -> bool:
    met = []
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\x00" * 8)
        file.flush()
        counter = Counter(file.name)
        with _endpoint_process(file.name) as endpoint:
            for broker in brokers:
                if broker == "outage":
                    met.append(_outage(endpoint, counter, file.name))
                    continue
                with _url(broker) as url:
                    met.append(_broker(broker, url, endpoint, counter, file.name))
    return all(met)


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:2] == ["--child", "endpoint"]:
        uvloop.run(_endpoint(arguments[2]))
        return 0
    if arguments[:2] == ["--child", "contestant"]:
        uvloop.run(_contestant(*arguments[2:]))
        return 0
    return 0 if run(tuple(arguments) or BROKERS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
