"""The listener: takes connections on a socket, publishes what they bring, and stops in good order."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from email.utils import formatdate
from typing import Final

from eventbus import telemetry
from eventbus.bus import Bus
from eventbus.errors import ConfigError
from eventbus.event import Event
from eventbus.ingest.exchange import Exchange
from eventbus.ingest.intake import Intake
from eventbus.ingest.protocol import Connection
from eventbus.ingest.requests import Refused
from eventbus.listening import Address

MAX_CONNECTIONS: Final = 1024
MAX_HELD: Final = 64 * 1024 * 1024
"""Bytes of bodies in memory, over all connections."""
GRACE: Final = 15.0
"""Seconds for requests that are under way when the listener is told to stop."""
_SWEEP: Final = 1.0


class Listener:
    """`POST /events` on a listening socket: `async with Listener(bus, Address.parse("127.0.0.1:8080").bind()): ...`

    Publishes on a bus that is open. Without a token the socket must be one that only this machine can reach.
    """

    def __init__(self, bus: Bus, listening: socket.socket, token: str = "") -> None:
        self.token = token.encode()
        self.stopping = False
        self._bus = bus
        self._socket = listening
        self._intake = Intake(bus)
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._held = 0
        self._date = b""
        self._counted: Counter[int] | None = Counter() if telemetry.measuring() else None
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(Address(*self._socket.getsockname()[:2]))

    async def __aenter__(self) -> Listener:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Take connections from now on."""
        if self._server is not None:
            raise ConfigError("this listener is open already")
        self._sweep()
        self._server = await asyncio.get_running_loop().create_server(lambda: Connection(self), sock=self._socket)

    async def aclose(self) -> None:
        """Take no more; answer what is under way, within the grace time; close what is left."""
        if self._server is None or self.stopping:
            return
        self.stopping = True
        self._server.close()
        for connection in list(self._connections):
            connection.wind_up()
        try:
            async with asyncio.timeout(GRACE):
                await self._empty.wait()
                await self._intake.aclose()
        except TimeoutError:
            telemetry.log(logging.ERROR, "requests_left", {"connections": len(self._connections)})
            for connection in list(self._connections):
                connection.expire()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._report()

    # --- for the connections ---------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> bool:
        """There is one more; False if it is one too many."""
        if len(self._connections) >= MAX_CONNECTIONS:
            # One that only keeps its place makes room; without any it is we who are busy.
            idle = min((found for found in self._connections if found.idle), key=_deadline, default=None)
            if idle is not None:
                self._connections.discard(idle)
                idle.expire()
        self._connections.add(connection)
        self._empty.clear()
        return len(self._connections) <= MAX_CONNECTIONS

    def closed(self, connection: Connection) -> None:
        """There is one less."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def hold(self, size: int) -> bool:
        """Take memory for this many bytes of bodies; False if it is used up."""
        if self._held + size > MAX_HELD:
            return False
        self._held += size
        return True

    def let_go(self, size: int) -> None:
        """Give it back."""
        self._held -= size

    def check(self, events: Sequence[Event]) -> None:
        """Raises Refused for events that the broker could never take."""
        for event in events:
            problem = self._bus.too_large(event)
            if problem is not None:
                raise Refused(413, f"{problem.error}; nothing of this request is taken")

    def publish(self, events: Sequence[Event], size: int, exchange: Exchange) -> None:
        """Publish them, and tell the exchange what became of each."""
        self._intake.add(events, size, exchange.published)

    def date(self) -> bytes:
        """The `date:` line of an answer, at most a second old."""
        return self._date

    def count(self, status: int) -> None:
        """A request was answered."""
        if self._counted is not None:
            self._counted[status] += 1

    # --- once a second ---------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        for connection in [found for found in self._connections if found.deadline <= now]:
            connection.expire()
        self._intake.expire(now)
        self._report()
        self._sweeping = loop.call_later(_SWEEP, self._sweep)

    def _report(self) -> None:
        if self._counted:
            for status, number in self._counted.items():
                telemetry.requests.add(number, {"status": status})
            self._counted.clear()


def _deadline(connection: Connection) -> float:
    return connection.deadline
