"""The journal that actors of a fault run write, and the checker that reads it.

A record is one write of one line to a file opened for append: it is in the kernel before the write returns, so it
survives a SIGKILL of its writer, and lines of several processes do not mix.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


class Journal:
    """Where an actor writes down what it did."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, *record: object) -> None:
        os.write(self._file, json.dumps(record).encode() + b"\n")


def read(path: Path) -> Iterator[list[object]]:
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return  # it is being written: to go on would be to read its rest as a line
            yield json.loads(line)


@dataclass
class Findings:
    """What the checker found; everything but `duplicates` and the totals must be empty."""

    accepted: int = 0
    calls: int = 0
    parked: int = 0
    duplicates: int = 0
    lost: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    over_limit: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"accepted {self.accepted}, calls {self.calls}, parked {self.parked}, duplicates {self.duplicates}, "
            f"lost {len(self.lost)}, early {len(self.early)}, wrong service {len(self.strangers)}, "
            f"over the limit {len(self.over_limit)}"
        )


def check(
    records: Iterable[list[object]], parked: dict[str, Counter[str]], services: dict[str, int], *, slack: float = 0.002
) -> Findings:
    """Compare what was accepted with what was handled or stands parked.

    Records: ["accepted", id], ["call", service, id, attempt, time], ["done", service, id],
    ["failed", service, id, attempt, time, delay]. `parked`: ids by service. `services`: max attempts by service.
    """
    found = Findings()
    accepted: set[str] = set()
    attempted: set[str] = set()
    done: dict[str, Counter[str]] = defaultdict(Counter)
    due: dict[tuple[str, str, int], float] = {}
    for kind, *rest in records:
        if kind == "accepted":
            accepted.update(rest[0])  # type: ignore[arg-type]
        elif kind == "sending":
            attempted.update(rest[0])  # type: ignore[arg-type]
        elif kind == "call":
            service, id, attempt, at = rest
            found.calls += 1
            if service not in services:
                found.strangers.append(f"{service} {id}")
            elif attempt > services[service]:  # type: ignore[operator, index]
                found.over_limit.append(f"{service} {id} attempt {attempt}")
            not_before = due.get((service, id, attempt))  # type: ignore[arg-type]
            if not_before is not None and at < not_before - slack:  # type: ignore[operator]
                found.early.append(f"{service} {id} attempt {attempt}: {not_before - at:.3f} s")  # type: ignore[operator]
        elif kind == "failed":
            service, id, attempt, at, delay = rest
            key = (service, id, attempt + 1)  # type: ignore[operator]
            # A duplicate may fail twice; the earlier due time is the one that is sure.
            due[key] = min(due.get(key, float("inf")), at + delay)  # type: ignore[operator, index]
        elif kind == "done":
            done[rest[0]][rest[1]] += 1  # type: ignore[index]
    found.accepted = len(accepted)
    for service in services:
        found.parked += sum(parked[service].values())
        settled = done[service].keys() | parked[service].keys()
        found.lost += [f"{service} {id}" for id in sorted(accepted - settled)]
        found.strangers += [f"{service} {id}" for id in sorted(settled - attempted - accepted)]
        found.duplicates += sum(number - 1 for number in done[service].values() if number > 1)
        found.duplicates += sum(1 for id in done[service] if id in parked[service])
    return found
