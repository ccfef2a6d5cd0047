"""Solitude: a suspect is handled with nothing else in flight in the whole process.

Only then does a crash tell which message did it. Everybody on one event loop shares one.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import ClassVar, Final

PATIENCE: Final = 30.0
"""How long the door stays shut for a suspect that waits for others to finish; then they get as long again."""


class Solitude:
    """Counts running handlers; whoever wants to be alone shuts the door and waits until they are done."""

    _of_loops: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Solitude]] = weakref.WeakKeyDictionary()

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._running = 0
        self._wanting = 0
        self._turn = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()
        self._open = asyncio.Event()
        self._open.set()
        self._reopened: list[Callable[[], None]] = []

    @classmethod
    def here(cls) -> Solitude:
        """The one of the running loop: two buses in one process must not blame each other's messages."""
        return cls._of_loops.setdefault(asyncio.get_running_loop(), cls())

    @property
    def shut(self) -> bool:
        """Whether no handler may start now."""
        return self._wanting > 0

    def on_reopen(self, callback: Callable[[], None]) -> None:
        """Have a callback called whenever handlers may start again."""
        self._reopened.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Call it no more."""
        self._reopened.remove(callback)

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
        """A handler that stepped out (an in-place retry waiting), or that is not in a lane, starts."""
        while self._wanting:
            await self._open.wait()
        self.enter()

    async def __aenter__(self) -> None:
        await self._turn.acquire()
        try:
            while not await self._alone():
                # A long handler runs: all the others must not stand still as long as it does.
                await asyncio.sleep(self._patience)
        except BaseException:
            self._turn.release()
            raise

    async def _alone(self) -> bool:
        self._wanting += 1
        self._open.clear()
        try:
            async with asyncio.timeout(self._patience):
                await self._empty.wait()
        except TimeoutError:
            self._reopen()
            return False
        except BaseException:
            self._reopen()
            raise
        return True

    async def __aexit__(self, *exc: object) -> None:
        self._turn.release()
        self._reopen()
        # Those who waited get a turn before the next suspect shuts the door again.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _reopen(self) -> None:
        self._wanting -= 1
        if not self._wanting:
            self._open.set()
            for callback in list(self._reopened):
                callback()
