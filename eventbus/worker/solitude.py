"""Solitude: a suspect is handled with nothing else in flight in the whole process.

Only then does a crash tell which message did it. All workers of a process share one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Solitude:
    """Counts running handlers; whoever wants to be alone shuts the door and waits until they are done."""

    def __init__(self) -> None:
        self._running = 0
        self._wanting = 0
        self._turn = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()
        self._open = asyncio.Event()
        self._open.set()
        self._reopened: list[Callable[[], None]] = []

    @property
    def shut(self) -> bool:
        """Whether no handler may start now."""
        return self._wanting > 0

    def on_reopen(self, callback: Callable[[], None]) -> None:
        """Have a callback called whenever handlers may start again."""
        self._reopened.append(callback)

    def enter(self) -> None:
        """A handler starts."""
        self._running += 1
        self._empty.clear()

    def leave(self) -> None:
        """A handler has ended, or hangs in a thread and no longer counts."""
        self._running -= 1
        if self._running == 0:
            self._empty.set()

    async def enter_when_open(self) -> None:
        """A handler that stepped out (an in-place retry waiting) starts again."""
        while self._wanting:
            await self._open.wait()
        self.enter()

    async def __aenter__(self) -> None:
        self._wanting += 1
        self._open.clear()
        try:
            await self._turn.acquire()
            try:
                await self._empty.wait()
            except BaseException:
                self._turn.release()
                raise
        except BaseException:
            self._reopen()
            raise

    async def __aexit__(self, *exc: object) -> None:
        self._turn.release()
        self._reopen()

    def _reopen(self) -> None:
        self._wanting -= 1
        if not self._wanting:
            self._open.set()
            for callback in self._reopened:
                callback()
