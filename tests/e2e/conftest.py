"""The command line as a user has it: a process, its exit code, what it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from eventbus import Bus, RetryPolicy, Service
from eventbus.event import Event

DEADLINE = 30.0


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
    kept.pop("COLUMNS", None)  # the terminal says how wide it is
    return kept | {"PYTHONUNBUFFERED": "1"} | more


class Cli:
    """Runs `eventbus` in a folder of its own, to its end or in the background."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.background: list[Running] = []

    def __call__(
        self, *arguments: str, input: str = "", env: dict[str, str] | None = None, timeout: float = DEADLINE
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "eventbus", *arguments],
            cwd=self.folder,
            env=environment(**(env or {})),
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert "Traceback" not in done.stdout + done.stderr
        return done

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> Running:
        running = Running([sys.executable, "-m", "eventbus", *arguments], self.folder, environment(**(env or {})))
        self.background.append(running)
        return running

    def popen(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """A process to talk to; the test ends it."""
        return subprocess.Popen(
            [sys.executable, "-m", "eventbus", *arguments],
            cwd=self.folder,
            env=environment(**env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path


class Running:
    """A process in the background that logs JSON lines to stderr."""

    def __init__(self, command: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.text: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.text.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def logged(self, event: str) -> list[dict[str, object]]:
        """The log events of this name so far."""
        rows = [json.loads(line) for line in list(self.text) if line.startswith("{")]
        return [row for row in rows if row.get("event") == event]

    def wait_for(self, event: str, number: int = 1) -> list[dict[str, object]]:
        """The log events of this name, as soon as there are so many."""
        until = time.monotonic() + DEADLINE
        with self._changed:
            while len(found := self.logged(event)) < number:
                left = until - time.monotonic()
                assert left > 0, f"no {event} in {''.join(self.text)}"
                assert self.process.poll() is None or self._reader.is_alive(), "".join(self.text)
                self._changed.wait(min(left, 0.2))
        return found

    def end(self, number: int | None = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; gives the exit code."""
        if number is not None and self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert "Traceback" not in "".join(self.text)
        return code

    def close(self) -> None:
        """Leave nothing behind, also after a failed test."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert self.process.stderr is not None
        if not self._reader.is_alive():
            self.process.stderr.close()


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """`eventbus` in an empty folder."""
    found = Cli(tmp_path)
    yield found
    for running in found.background:
        running.close()


@pytest.fixture
def until() -> Callable[[Callable[[], object], str], None]:
    """Wait for a condition, with a deadline."""

    def wait(condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, f"still not: {what}"
            time.sleep(0.02)

    return wait


PARKED = (
    ("order.created", {"id": 1}, "acme"),
    ("order.created", {"id": 2}, "globex"),
    ("price.changed", {"id": 3, "nome": "São João"}, "acme"),
)


@pytest.fixture
async def letters(cli: Cli) -> dict[str, str]:
    """bus.db with three dead letters of wms-cincout: two with 500, one with 404. Gives their ids by data id."""
    service = Service("wms-cincout", retry=RetryPolicy(max_retries=0), status={404: "park"})

    @service.on("order.*")
    async def fail(event: Event) -> int:
        return 500

    @service.on("price.*")
    async def missing(event: Event) -> int:
        return 404

    url = f"sqlite:///{cli.folder}/bus.db"
    async with Bus(url, source="wms-api") as bus, bus.serving(service):
        ids = {}
        for type, data, tenant in PARKED:
            event = await bus.publish(type, data, tenant=tenant, headers={"shop": "7"})
            ids[str(data["id"])] = event.id
            import anyio

            with anyio.fail_after(DEADLINE):  # one after the other, so that they stand in this order
                while await bus.dead_letters(service).count() < len(ids):
                    await anyio.sleep(0.01)
    return ids
