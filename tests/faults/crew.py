"""Starting, killing and stopping the actors of a fault run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TypeAlias

from eventbus import Bus
from tests.faults.actor import SERVICES
from tests.faults.journal import Journal, read

Settings: TypeAlias = dict[str, dict[str, object]]


class Crew:
    """Processes by name. Every one of them is ours, and only ours are killed."""

    def __init__(self, url: str, journal: Path, settings: Settings, seed: int) -> None:
        self.url, self.journal, self.settings = url, journal, settings
        self.random = random.Random(seed)
        self.kills = 0
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0
        Journal(str(journal))

    def start(self, name: str, role: str, **env: str) -> subprocess.Popen[bytes]:
        self._starts += 1
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.actor", role, self.url, str(self.journal), f"{name}-{self._starts}"],
            env=os.environ | {"FAULT_SETTINGS": json.dumps(self.settings)} | env,
            cwd=Path(__file__).parents[2],
        )
        self._members[name] = process
        return process

    def up(self) -> bool:
        """Whether all who run now have said that they receive; one may have been killed before it could."""
        return all(self._said(process) for process in self._members.values())

    def _said(self, process: subprocess.Popen[bytes]) -> bool:
        return any(record[:2] == ["up", process.pid] for record in read(self.journal))

    def running(self, name: str) -> bool:
        return self._members[name].poll() is None

    def kill(self, name: str) -> None:
        process = self._members[name]
        if process.poll() is None:
            process.kill()
        process.wait(10)
        self.kills += 1

    def signal(self, name: str, number: signal.Signals) -> None:
        self._members[name].send_signal(number)

    def stop(self, name: str) -> int:
        """Ask a consumer to stop, and its exit code. One that is not up yet has no ear for it: SIGTERM is its death."""
        process = self._members.pop(name)
        deadline = time.monotonic() + 60
        while process.poll() is None and not self._said(process):
            assert time.monotonic() < deadline, f"{name} never came up"
            time.sleep(0.02)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        return process.wait(60)

    def dismiss(self) -> None:
        for process in self._members.values():
            if process.poll() is None:
                process.kill()
            process.wait(10)


async def provision(url: str, settings: Settings, journal: Path) -> None:
    from tests.faults.actor import services

    async with Bus(url, source="wms-api", settings=settings) as bus:
        await bus.provision(*services(Journal(str(journal))))


async def wait_until_done(url: str, settings: Settings, within: float) -> None:
    """Wait until nothing is ready, in flight or delayed for any service."""
    deadline = time.monotonic() + within
    async with Bus(url, source="wms-api", settings=settings) as bus:
        while True:
            stats = [await bus.stats(name) for name in SERVICES]
            left = sum(entry.ready + entry.inflight + entry.delayed for entry in stats)
            if not left:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"{left} messages were still not settled after {within:g} s: {stats}")
            await asyncio.sleep(0.1)


async def parked_ids(url: str, settings: Settings) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Ids of parked messages by service, and how many there are of each reason."""
    ids: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    async with Bus(url, source="wms-api", settings=settings) as bus:
        for name in SERVICES:
            ids[name] = Counter()
            async for letter in bus.dead_letters(name).all():
                ids[name][letter.id] += 1
                reasons[letter.reason] += 1
    return ids, reasons
