"""Waiting: not for ever, and not to be disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from anyio import CancelScope


async def wait_for(event: asyncio.Event, timeout: float) -> None:
    """Return when the event is set or the time is over, whichever is first."""
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return


async def undisturbed(coroutine: Coroutine[object, object, None]) -> None:
    """See something through, however often we are cancelled meanwhile; the cancellation comes out afterwards.

    For winding down: what is cut off in the middle of a shutdown would be a crash to whoever receives it next.
    """
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    with CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
