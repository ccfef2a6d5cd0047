"""`run --workers N`: N processes under one parent that opens nothing itself. A dead one is started again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final

from eventbus import telemetry
from eventbus.cli.exits import DONE, FAILED, UNREACHABLE, USAGE
from eventbus.cli.interrupts import pause

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
_SETTLED_IN: Final = 60.0
"""A worker that lived this long is started again without delay."""


async def supervise(
    command: Sequence[str], number: int, *, url: str | None, patience: float, listening: socket.socket | None = None
) -> int:
    """Keep `number` processes of an `eventbus` command alive until SIGTERM or SIGINT; returns the exit code.

    The URL goes through the environment: a command line can be read by every user of the machine. `listening` is a
    socket that they all take connections from.
    """
    environment = dict(os.environ) | ({"EVENTBUS_URL": url} if url else {})
    return await _Supervisor([*command], environment, number, patience, listening).run()


class _Supervisor:
    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        number: int,
        patience: float,
        listening: socket.socket | None,
    ) -> None:
        self._command, self._environment = command, environment
        self._listening = listening
        self._up = asyncio.Event()
        self._number, self._patience = number, patience
        self._stopping = asyncio.Event()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._signals = 0
        self._code = DONE

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        keepers = [asyncio.ensure_future(self._keep(slot)) for slot in range(1, self._number + 1)]
        try:
            await self._stopping.wait()
            _, late = await asyncio.wait(keepers, timeout=self._patience)
            if late:
                self._code = self._code or FAILED
                for slot, process in self._running.items():
                    telemetry.log(logging.ERROR, "worker_killed", {"worker": slot, "pid": process.pid})
                    process.kill()
            await asyncio.gather(*keepers)
        finally:
            for process in self._running.values():
                process.kill()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._code

    def _on_signal(self) -> None:
        """The first signal drains the workers; the next one ends them, as it would end a single process."""
        self._signals += 1
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        self._up.set()
        if self._listening is not None:
            self._listening.close()
        for process in self._running.values():
            if process.returncode is None:
                process.terminate()

    async def _keep(self, slot: int) -> None:
        """One place for a worker: start it, wait for its end, start the next one."""
        wait, first = FIRST_PAUSE, True
        if slot > 1:
            await self._up.wait()  # what is wrong with all of them is said once, by the first
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                code = await self._live(slot)
            except OSError as error:  # no memory, no process to be had: as if it had ended at once
                telemetry.log(logging.ERROR, "worker_not_started", {"worker": slot, "error": str(error)})
                code = FAILED
            if self._stopping.is_set():
                self._account(slot, code)
                return
            fields = {"worker": slot, "exit_code": code, "next_start": wait}
            telemetry.log(logging.ERROR, "worker_ended", fields)
            if code == USAGE or (first and code == UNREACHABLE):
                self._code = code  # the others would say the same
                self._stop()
                return
            if time.monotonic() - began > _SETTLED_IN:
                wait = FIRST_PAUSE
            await pause(self._stopping, wait)
            wait, first = min(LONGEST_PAUSE, wait * 2), False

    async def _live(self, slot: int) -> int:
        ready, told = os.pipe()
        inherited = [told]
        command = [sys.executable, "-m", "eventbus", *self._command, "--worker", str(slot), "--ready-fd", str(told)]
        if self._listening is not None:
            inherited.append(self._listening.fileno())
            command += ["--listen-fd", str(self._listening.fileno())]
        loop = asyncio.get_running_loop()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,  # closed when we are gone, however we went
                env=self._environment,
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on once
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(told)
        loop.add_reader(ready, self._on_ready, ready)
        self._running[slot] = process
        telemetry.log(logging.INFO, "worker_started", {"worker": slot, "worker_pid": process.pid})
        if self._stopping.is_set():
            process.terminate()
        try:
            return await process.wait()
        finally:
            loop.remove_reader(ready)
            os.close(ready)
            del self._running[slot]

    def _on_ready(self, ready: int) -> None:
        """A worker says that it is up, or is gone without a word."""
        asyncio.get_running_loop().remove_reader(ready)
        if os.read(ready, 1):
            self._up.set()

    def _account(self, slot: int, code: int) -> None:
        # One SIGTERM never kills a worker that has begun; one that dies of it had nothing in hand yet.
        if code == DONE or (code == -signal.SIGTERM and self._signals <= 1):
            return
        telemetry.log(logging.ERROR, "worker_left_something", {"worker": slot, "exit_code": code})
        self._code = self._code or FAILED
