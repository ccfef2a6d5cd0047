"""100,000 dead letters against 1,000, on every broker: first page, stats and count; a scan and its memory; a re-drive.

EVENTBUS_BENCH_LETTERS is another number than 100,000, EVENTBUS_BENCH_BROKERS some of sqlite,redis,rabbitmq,kafka.

Where the broker has an index (SQLite, Redis) looking must cost the same at any depth; where it has none (RabbitMQ,
Kafka) the whole queue is read, and what that takes is printed. Looking happens in a process of its own, so that its
memory is only that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

from benchmarks.measure import DATA, Figure, goal, measured, show
from eventbus import Bus, Event, Service
from eventbus import headers as h
from eventbus.adapter import Parked

FEW, MANY = 1_000, int(os.environ.get("EVENTBUS_BENCH_LETTERS", "100000"))
MOVED = 10_000
PIECE = 500
CALLERS = 64
REPEAT = 15
INDEXED = ("sqlite", "redis")
Settings = dict[str, dict[str, object]]


@contextmanager
def _sqlite() -> Iterator[tuple[str, Settings]]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{folder}/bus.db", {}


@contextmanager
def _redis() -> Iterator[tuple[str, Settings]]:
    from tests.brokers.redis import RedisServer

    with RedisServer() as server:
        yield server.url, {"redis": {"dlq_max_entries": 10 * MANY}}


@contextmanager
def _rabbit() -> Iterator[tuple[str, Settings]]:
    from tests.brokers import rabbit

    yield rabbit.shared_url(), {"rabbit": {"timeout": "120s"}}


@contextmanager
def _kafka() -> Iterator[tuple[str, Settings]]:
    from tests.brokers import kafka

    yield kafka.shared_url(), {"kafka": {"partitions": 1, "retry_partitions": 1, "dlq_partitions": 3}}


BROKERS = {"sqlite": _sqlite, "redis": _redis, "rabbitmq": _rabbit, "kafka": _kafka}


def _letter(n: int) -> Parked:
    parked = datetime(2026, 3, 1, tzinfo=timezone.utc) + timedelta(seconds=n)
    event = Event(f"order.{n % 7}", DATA, tenant=f"tenant-{n % 20}", source="bench")
    return Parked(
        "",
        event,
        {
            h.PARK_REASON: "max-retries" if n % 3 else "permanent",
            h.FINAL_STATUS: 500 if n % 3 else 404,
            h.FINAL_ERROR: f"500: no answer from order {n}",
            h.FINAL_RETRIES: 10,
            h.RETRIES: 10,
            h.PARKED_AT: parked.isoformat(),
            h.ATTEMPTS: json.dumps([[k, 1_700_000_000_000 + k, "500: no answer"] for k in range(11)]),
        },
    )


async def _fill(bus: Bus, service: Service, number: int) -> None:
    await bus.provision(service)
    parking = bus.adapter.parking(service.name, service.prefix)
    for start in range(0, number, 1000):
        answers = await parking.restore([_letter(n) for n in range(start, min(number, start + 1000))])
        assert set(answers) == {"done"}


async def _timed(work: Callable[[], Awaitable[object]], repeat: int) -> float:
    """The median, in milliseconds."""
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        await work()
        times.append((time.perf_counter() - started) * 1000)
    return sorted(times)[len(times) // 2]


async def _look(url: str, settings: Settings, service: str, repeat: int) -> dict[str, float]:
    """What a look costs, in this process; its memory before and at most."""
    async with Bus(url, settings=settings) as bus:
        letters = bus.dead_letters(service)
        page = await letters.browse(limit=20)
        assert len(page.letters) == 20
        before = _rss()
        found = {
            "count": await _timed(letters.count, repeat),
            "first page": await _timed(lambda: letters.browse(limit=20), repeat),
            "stats": await _timed(lambda: letters.stats("fingerprint"), repeat),
        }
        read = told = 0

        def on_scan(so_far: int) -> None:
            nonlocal read, told
            read, told = so_far, told + 1

        letters.on_scan = on_scan
        started = time.perf_counter()
        matched = await letters.count("status=404 type=order.3")
        found["scan"] = (time.perf_counter() - started) * 1000
        assert matched > 0
        return found | {"read": read, "told": told, "memory": _rss() - before, "rss": _rss()}


def _rss() -> float:
    """The most this process ever had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _looked(url: str, settings: Settings, service: str, repeat: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.dead_letters", url, json.dumps(settings), service, str(repeat)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


async def _moving(bus: Bus, name: str) -> bool:
    """A re-drive beside publishing as many events, in pieces of the same size."""
    service = Service(f"bench{os.getpid()}-moved", prefix=f"move{os.getpid()}")
    await _fill(bus, service, MOVED)
    events = [Event("order.created", DATA) for _ in range(MOVED)]
    other = Bus(bus.url, prefix=service.prefix, adapter=bus.adapter)
    other._open = True
    with measured(MOVED) as publishing:
        for start in range(0, MOVED, PIECE):
            await other.publish_many(events[start : start + PIECE])
    del events  # an operator does not carry a publisher's events through every garbage collection
    singly = await _one_by_one(other)
    letters = bus.dead_letters(service)  # the operations are imported with the first use of them
    with measured(MOVED) as redriving:
        report = await letters.redrive()
    assert report.done == MOVED, report
    show(f"{name}: published, {PIECE} at a time", publishing)
    show(f"{name}: published one by one, {CALLERS} callers at once", singly)
    show(f"{name}: re-driven", redriving)
    met = goal(f"{name}: re-drive rate to that of publish, {CALLERS} callers", redriving.rate / singly.rate, 0.5)
    return goal(f"{name}: re-drive rate to that of publish_many", redriving.rate / publishing.rate, 0.5) and met


async def _one_by_one(bus: Bus) -> Figure:
    """Publishing as most do: one event each call, from many places."""

    async def caller() -> None:
        for _ in range(MOVED // CALLERS):
            await bus.publish(Event("order.created", DATA))

    with measured(MOVED // CALLERS * CALLERS) as publishing:
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return publishing


async def _run(name: str) -> bool:
    met = True
    with BROKERS[name]() as (url, settings):
        services = {number: Service(f"bench{os.getpid()}-n{number}") for number in (FEW, MANY)}
        async with Bus(url, settings=settings) as bus:
            for number, service in services.items():
                await _fill(bus, service, number)
            met &= await _moving(bus, name)
        found = {}
        for number, service in services.items():
            repeat = REPEAT if name in INDEXED or number == FEW else 1
            found[number] = await asyncio.to_thread(_looked, url, settings, service.name, repeat)
            shown = ", ".join(f"{what} {found[number][what]:.1f} ms" for what in ("count", "first page", "stats"))
            print(f"  {name}: {number:>7,} letters: {shown}")
            seen = found[number]
            print(
                f"  {name}: {number:>7,} letters: a filter reads {seen['read']:,.0f} in {seen['scan'] / 1000:.2f} s, "
                f"says {seen['told']:,.0f} times how far it is, takes {seen['memory']:.0f} MB more memory "
                f"({seen['rss']:.0f} MB in all)"
            )
        if name in INDEXED:
            for what in ("count", "first page", "stats"):
                ratio = found[MANY][what] / found[FEW][what]
                met &= goal(f"{name}: {what}, {MANY:,} to {FEW:,} letters", ratio, 3, at_most=True)
        else:
            size = MANY * (len(json.dumps(DATA)) + 1000) / 1024 / 1024
            share = max(0.0, found[MANY]["memory"]) / size
            met &= goal(f"{name}: memory of a scan to that of all letters ({size:.0f} MB)", share, 0.5, at_most=True)
    return met


def run() -> bool:
    logging.disable(logging.WARNING)
    chosen = os.environ.get("EVENTBUS_BENCH_BROKERS", ",".join(BROKERS)).split(",")
    print(f"dead letters: {MANY:,} against {FEW:,}")
    results = [asyncio.run(_run(name)) for name in chosen]
    return all(results)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(asyncio.run(_look(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])))))
