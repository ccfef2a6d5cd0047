"""Waiting for an event, but not for ever."""

from __future__ import annotations

import asyncio


async def wait_for(event: asyncio.Event, timeout: float) -> None:
    """Return when the event is set or the time is over, whichever is first."""
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return
