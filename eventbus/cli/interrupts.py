"""Starting the event loop, and Ctrl-C that lets the current piece of work finish first."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Literal, NoReturn, TypeVar

T = TypeVar("T")


def start(work: Coroutine[object, object, T]) -> T:
    """Run the work in an event loop: uvloop's where it is installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one does what signals do."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    caught = (signal.SIGINT, signal.SIGTERM)

    def release() -> None:
        for number in caught:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop() -> None:
        stopped.set()
        release()

    for number in caught:
        loop.add_signal_handler(number, stop)
    try:
        yield stopped
    finally:
        release()


async def pause(stopped: asyncio.Event, seconds: float) -> None:
    """Wait that long, or until stopped."""
    try:
        async with asyncio.timeout(seconds):
            await stopped.wait()
    except TimeoutError:
        return


async def unless_stopped(stopped: asyncio.Event, function: Callable[[], T]) -> T | None:
    """What a blocking function returns; None if we are stopped first. Its thread is then left behind."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def call() -> None:
        try:
            value = function()
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            loop.call_soon_threadsafe(finish, None, error)
        else:
            loop.call_soon_threadsafe(finish, value, None)

    # Not a pool's thread: the loop would wait for it at its end, and it may wait for input that never comes.
    threading.Thread(target=call, name="eventbus reader", daemon=True).start()
    halt = asyncio.ensure_future(stopped.wait())
    waits: set[asyncio.Future[T] | asyncio.Future[Literal[True]]] = {result, halt}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    halt.cancel()
    if result.done():
        return result.result()
    result.cancel()
    return None


def hard_exit(code: int) -> NoReturn:
    """Leave although a thread still runs: everything that had to be written is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
