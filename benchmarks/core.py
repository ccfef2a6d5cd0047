"""What the core itself costs: a memory bus and a no-op handler. And what importing it costs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from benchmarks.measure import DATA, goal, json_cost, measured, show
from benchmarks.ours import counted
from eventbus import Bus, Event, Service


async def _memory(number: int) -> float:
    service = Service("bench-noop", concurrency=64)
    done = counted(service, number)
    async with Bus("memory://", source="bench-api") as bus:
        await bus.provision(service)
        with measured(number) as creating:
            events = [Event("order.created", DATA) for _ in range(number)]
        show("create events (encode the body)", creating)
        with measured(number) as publishing:
            for start in range(0, number, 500):
                await bus.publish_many(events[start : start + 500])
        show("publish_many, 500 at a time", publishing)
        with measured(number) as consuming:
            async with bus.serving(service):
                await done.wait()
        show("receive, handle, decide, settle", consuming)
    return publishing.cpu_us + consuming.cpu_us


def run() -> bool:
    print("core: memory:// with a no-op handler, body of 250 bytes")
    yardstick = json_cost()
    cost = min(asyncio.run(_memory(60_000)) for _ in range(2))
    ok = goal("CPU per event in us, scaled to json.loads = 3 us", cost * 3.0 / yardstick, 20, at_most=True)
    bare, full = _start("pass"), _start("import eventbus")
    print(f"  python -c pass {bare * 1000:.0f} ms, import eventbus {full * 1000:.0f} ms")
    return goal("import eventbus above python -c pass, ms", (full - bare) * 1000, 150, at_most=True) and ok


def _start(code: str) -> float:
    best = float("inf")
    for _ in range(9):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        best = min(best, time.perf_counter() - started)
    return best
