"""An app on a socket: uvicorn in the event loop that is there, stopped by us."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from eventbus.console.guard import LOOPBACK_NAMES, host_name
from eventbus.errors import ConfigError
from eventbus.listening import Address

GRACE: Final = 10
"""Seconds that answers on their way get when the server stops."""


def names_of(address: Address) -> frozenset[str]:
    """The names a server on that address answers to while it asks for no token."""
    return LOOPBACK_NAMES | {host_name(str(address))}


def check(address: Address, tokens: bool) -> None:
    """Whoever reaches it without a token is an admin: then only this machine may reach it."""
    if not tokens and not address.is_loopback:
        raise ConfigError(
            f"listening on {address.host} needs a token: make one with `eventbus token NAME --role viewer` and put "
            f"what it prints into bus.toml, or listen on 127.0.0.1"
        )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: they stop the work first, then this."""
        yield


@asynccontextmanager
async def serving(app: ASGIApp, listening: socket.socket) -> AsyncIterator[str]:
    """Serve in the background; gives the URL. Ends when the answers on their way are sent."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # whoever is on this machine could write any address into the audit log
        lifespan="off",
        h11_max_incomplete_event_size=64 * 1024,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=GRACE,
    )
    server = _Server(config)
    running = asyncio.ensure_future(server.serve([listening]))
    address = Address(*listening.getsockname()[:2])
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.001)
        yield f"http://{address}"
    finally:
        server.should_exit = True
        await running
