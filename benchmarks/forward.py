"""Forwarding: `eventbus run` beside a plain loop of the raw client and aiohttp, in one run on each broker.

A light endpoint in a second process; 64 in flight. Rounds are interleaved: the table shows the best of each, and the
median of the rounds' ratios counts. `python -m benchmarks.forward [rabbit] [redis] [sqlite] [kafka]` chooses; the
events are on the broker before anybody starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Figure, goal, goal_of_rounds, show
from benchmarks.plain import IN_FLIGHT, NAME
from eventbus import Bus, Event, Service

NUMBER = int(os.environ.get("EVENTBUS_BENCH_EVENTS", "60000"))
ROUNDS = int(os.environ.get("EVENTBUS_BENCH_ROUNDS", "3"))
PORT = int(os.environ.get("EVENTBUS_BENCH_PORT", "18650"))
BODY = json.dumps({"id": 12345, "customer": "acme", "note": ""}).encode().replace(b'""', b'"' + b"x" * 203 + b'"')
SERVICE = "bench-forward"
GOALS = {"rabbit": 2.0, "redis": 1.7, "kafka": 1.7}


@dataclass
class Run(Figure):
    """A figure, and the memory that the process took at most."""

    rss: float = 0.0

    def __str__(self) -> str:
        return f"{super().__str__()} {self.rss:>6.0f} MB"


def _config(url: str, route: str) -> str:
    return f"""
url = "{url}"
[services.{SERVICE}]
concurrency = {IN_FLIGHT}
[[services.{SERVICE}.routes]]
on = "#"
forward = "http://127.0.0.1:{PORT}/events"
{route}
"""


# --- filling -------------------------------------------------------------------------------------------------------


async def _fill_ours(url: str) -> None:
    async with Bus(url, source="bench-api") as bus:
        await bus.provision(Service(SERVICE))
        for start in range(0, NUMBER, 1000):
            await bus.publish_many([Event("order.created", BODY) for _ in range(min(1000, NUMBER - start))])


async def _fill_rabbit(url: str) -> None:
    import aio_pika

    connection = await aio_pika.connect(url)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(NAME, durable=True)
        await queue.purge()
        for start in range(0, NUMBER, 500):
            messages = [aio_pika.Message(BODY, message_id=str(n), delivery_mode=2) for n in range(start, start + 500)]
            await asyncio.gather(*(channel.default_exchange.publish(message, NAME) for message in messages))


async def _fill_redis(url: str) -> None:
    from redis.asyncio import Redis

    client = Redis.from_url(url)
    await client.delete(NAME)
    await client.xgroup_create(NAME, NAME, "0", mkstream=True)
    for _ in range(0, NUMBER, 1000):
        pipeline = client.pipeline()
        for _ in range(1000):
            pipeline.xadd(NAME, {"data": BODY})
        await pipeline.execute()
    await client.aclose()


async def _fill_kafka(url: str) -> None:
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(bootstrap_servers=url.partition("://")[2].partition("/")[0], acks="all")
    await producer.start()
    await asyncio.gather(*[await producer.send(NAME, BODY) for _ in range(NUMBER)])
    await producer.stop()


async def _fill_sqlite(url: str) -> None:
    db = sqlite3.connect(url.removeprefix("sqlite:///") + "-plain")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE IF NOT EXISTS queue (id INTEGER PRIMARY KEY, body BLOB)")
    db.executemany("INSERT INTO queue (body) VALUES (?)", [(BODY,)] * NUMBER)
    db.commit()
    db.close()


_FILL = {"rabbit": _fill_rabbit, "redis": _fill_redis, "kafka": _fill_kafka, "sqlite": _fill_sqlite}


# --- running -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def endpoint() -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.endpoint", str(PORT)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def count() -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", timeout=30) as answer:
        return json.loads(answer.read())


def family(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in family(int(child)))]


def cpu_of(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss_of(pids: list[int]) -> float:
    """The largest of them, at its highest, in MB."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return max(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _measure(command: list[str], folder: Path) -> Run:
    """Start it, wait until the endpoint has every event, stop it; what the start itself took is not counted."""
    with endpoint():
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, env=environment())
        try:
            while not count()["events"]:
                time.sleep(0.005)
                if process.poll() is not None:
                    raise SystemExit(f"{command[0]} ended with {process.returncode}")
            before = cpu_of(family(process.pid))
            missed = count()["events"]
            while (counted := count())["events"] < NUMBER:
                time.sleep(0.05)
            pids = family(process.pid)
            run = Run(NUMBER, counted["last"] - counted["first"], 0.0, rss_of(pids))
            run.cpu = (cpu_of(pids) - before) * NUMBER / (NUMBER - missed)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            return run
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
    return kept | {"PYTHONPATH": str(Path(__file__).parents[1])}


def _contestants(broker: str, url: str, folder: Path) -> dict[str, Callable[[], Run]]:
    (folder / "single.toml").write_text(_config(url, ""))
    batch = 'mode = "batch"\nbatch = { size = 100, timeout = "20ms", concurrency = 8 }'
    (folder / "batch.toml").write_text(_config(url, batch))

    def plain() -> Run:
        asyncio.run(_FILL[broker](url))
        return _measure(["benchmarks.plain", broker, url, f"http://127.0.0.1:{PORT}/events"], folder)

    def ours(file: str, *more: str) -> Run:
        asyncio.run(_fill_ours(url))
        return _measure(["eventbus", "run", file, "--log-level", "warning", *more], folder)

    return {
        f"{broker}: plain loop, aiohttp": plain,
        f"{broker}: eventbus run": lambda: ours("single.toml"),
        f"{broker}: eventbus run --workers 2": lambda: ours("single.toml", "--workers", "2"),
        f"{broker}: eventbus run, 100 events per POST": lambda: ours("batch.toml"),
    }


@contextlib.contextmanager
def broker_url(name: str, folder: Path) -> Iterator[str]:
    if name == "sqlite":
        yield f"sqlite:///{folder}/bus.db"
    elif name == "redis":
        from tests.brokers.redis import RedisServer

        with RedisServer(None, "--maxmemory", "4gb") as server:
            yield server.url
    elif name == "rabbit":
        from tests.brokers.rabbit import shared_url

        yield shared_url()
    else:
        from tests.brokers.kafka import shared_url as kafka_url

        yield kafka_url()


def _bench(broker: str) -> bool:
    with tempfile.TemporaryDirectory() as name, broker_url(broker, Path(name)) as url:
        runs: dict[str, list[Run]] = {}
        contestants = _contestants(broker, url, Path(name))
        for _ in range(ROUNDS):
            for label, contestant in contestants.items():
                runs.setdefault(label, []).append(contestant())
                print(f"    {runs[label][-1].rate:>9,.0f}/s  {label}", flush=True)
        best = [max(found, key=lambda run: run.rate) for found in runs.values()]
        for label, run in zip(runs, best, strict=True):
            show(label, run)
    plains, singles, _, batches = runs.values()
    plain, single, _, batch = best
    results = [
        goal_of_rounds("batch mode against single", batches, singles, 2),
        goal("RSS in MB", single.rss, 80, at_most=True),
    ]
    if broker in GOALS:
        results.append(goal_of_rounds("eventbus run against the plain loop", singles, plains, GOALS[broker]))
    # On a machine that is busy with other things the rates say little; what an event costs stays the same.
    print(f"  CPU per event: eventbus run {single.cpu_us / plain.cpu_us:.2f} of the plain loop", end="; ")
    print(f"batch mode {batch.cpu_us / single.cpu_us:.2f} of single")
    return all(results)


def run(*brokers: str) -> bool:
    print(f"forward: {NUMBER:,} events of {len(BODY)} bytes, {IN_FLIGHT} in flight, {ROUNDS} rounds, with uvloop")
    results = [_bench(broker) for broker in brokers or ("rabbit", "redis", "sqlite", "kafka")]
    return all(results)


if __name__ == "__main__":
    sys.exit(0 if run(*sys.argv[1:]) else 1)
