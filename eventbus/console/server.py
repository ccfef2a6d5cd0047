"""An app on a socket: uvicorn in the event loop that is there, stopped by us."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from eventbus.console.guard import LOOPBACK_NAMES, is_loopback
from eventbus.errors import ConfigError

GRACE: Final = 10
"""Seconds that answers on their way get when the server stops."""


def address(listen: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:8000", "[::]:8000", ":8000" or "8000"; without a host it is loopback."""
    host, colon, port = listen.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 65535 or (colon and ":" in host and not host.startswith("[")):
        raise ConfigError(f"{listen!r} is no address to listen on; write 127.0.0.1:8000, [::1]:8000 or 8000")
    return host.strip("[]") or "127.0.0.1", int(port)


def names_of(host: str) -> frozenset[str] | None:
    """The names a server on that address answers to while it asks for no token."""
    shown = f"[{host}]" if ":" in host else host
    return LOOPBACK_NAMES | {shown.lower()}


def check(host: str, tokens: bool) -> None:
    """Whoever reaches it without a token is an admin: then only this machine may reach it."""
    if not tokens and not is_loopback(host):
        raise ConfigError(
            f"listening on {host} needs a token: make one with `eventbus token NAME --role viewer` and put what it "
            f"prints into bus.toml, or listen on 127.0.0.1"
        )


def bind(host: str, port: int) -> socket.socket:
    """The socket; taken before anything else is opened."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno) if error.errno else error}"
        ) from None


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
    host, port = listening.getsockname()[:2]
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.001)
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await running
