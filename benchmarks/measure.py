"""Measuring: wall time and CPU of a piece of work, and a table that says how it compares."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

DATA = {
    "id": 12345,
    "customer": "acme",
    "items": [{"sku": f"sku-{n}", "quantity": n} for n in range(5)],
    "note": "x" * 40,
}


@dataclass
class Figure:
    """How long a number of events took."""

    events: int
    wall: float = 0.0
    cpu: float = 0.0

    @property
    def rate(self) -> float:
        return self.events / self.wall

    @property
    def cpu_us(self) -> float:
        return self.cpu / self.events * 1e6

    def __str__(self) -> str:
        return f"{self.rate:>11,.0f} events/s {self.cpu_us * 0.01:>8.3f} s CPU per 10,000"


@contextmanager
def measured(events: int) -> Iterator[Figure]:
    figure = Figure(events)
    wall, cpu = time.perf_counter(), time.process_time()
    yield figure
    figure.wall, figure.cpu = time.perf_counter() - wall, time.process_time() - cpu


def show(name: str, figure: Figure) -> Figure:
    print(f"  {name:<52} {figure}", flush=True)
    return figure


def goal(text: str, value: float, wanted: float, *, at_most: bool = False) -> bool:
    met = value <= wanted if at_most else value >= wanted
    print(
        f"  {'ok  ' if met else 'MISS'} {text}: {value:.2f} (goal: {'at most' if at_most else 'at least'} {wanted:g})"
    )
    return met


def goal_of_rounds(text: str, ours: Sequence[Figure], theirs: Sequence[Figure], wanted: float) -> bool:
    """Judge by the median of the ratios, one for each round: what slows the machine down slows both of a round."""
    ratios = [mine.rate / other.rate for mine, other in zip(ours, theirs, strict=True)]
    text = f"{text}, median of {len(ratios)} rounds from {min(ratios):.2f} to {max(ratios):.2f}"
    return goal(text, statistics.median(ratios), wanted)


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the fastest event loop that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def json_cost() -> float:
    """Microseconds of json.loads of 250 bytes here: the yardstick for CPU figures."""
    text = json.dumps({f"k{n}": f"value-{n}" for n in range(14)})
    best = min(_loads(text) for _ in range(20))
    print(f"  json.loads of {len(text)} bytes: {best:.2f} us")
    return best


def _loads(text: str) -> float:
    started = time.process_time()
    for _ in range(5000):
        json.loads(text)
    return (time.process_time() - started) / 5000 * 1e6
