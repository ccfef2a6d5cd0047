"""The default sender: HTTP/1.1 on asyncio protocols, a small pool of kept connections per host, and nothing else.

Four times less CPU per request than aiohttp, because it does only what forwarding needs: POST, one answer of at most
64 KiB, no redirects, no cookies, no proxies, no decompression, no retries. Answers are parsed by llhttp (httptools),
TLS is the standard library's.

One thing is sent again: a request on a *kept* connection that turns out to be closed before one byte of an answer
came. Servers close idle connections whenever they like, and that must not cost an event one of its retries. It goes
out once more, on a new connection. An endpoint that took the request and died may so see it twice, with the same
`idempotency-key`, as with any other redelivery.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, urlsplit

from eventbus.errors import ConfigError
from eventbus.forward.egress import resolve
from eventbus.forward.port import Answer, SendFailed
from eventbus.forward.senders import OwnSender

try:
    from eventbus.forward.lean_connection import Connection
except ImportError as error:
    raise ConfigError("forwarding over HTTP needs httptools: pip install 'eventbus-core[http]'") from error

_KEEP_ALIVE: Final = 30.0
"""How long an unused connection is kept; routers forget about silent ones after minutes, without a word."""
_MAX_AGE: Final = 300.0
"""A busy connection is opened anew after this time, so that changes of DNS and of load balancers are seen."""
_DNS_TTL: Final = 10.0
_ONE_WRITE: Final = 64 * 1024
_UNQUOTED: Final = "!#$%&'()*+,/:;=?@[]~"


@dataclass(kw_only=True, eq=False)
class LeanSender(OwnSender):
    """POST over kept connections, at most `max_connections` to one host."""

    _targets: dict[str, _Target] = field(default_factory=dict, init=False)
    _pools: dict[tuple[str, str, int], _Pool] = field(default_factory=dict, init=False)

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes, *, timeout: float) -> Answer:
        """Send one POST and read its answer."""
        target = self._targets.get(url) or self._target(url)
        head = _head(target.start, headers, len(body))
        if len(body) <= _ONE_WRITE:
            head, body = head + body, b""
        pool = target.pool
        deadline = pool.loop.time() + timeout
        connection = pool.idle()
        if connection is None:
            connection = await pool.connect(deadline, timeout)
        try:
            pool.watch(deadline)
            return await connection.exchange(head, body, deadline, timeout)
        except SendFailed:
            if not (connection.kept and connection.silent):
                raise
        finally:
            pool.give_back(connection)
        connection = await pool.connect(deadline, timeout)
        try:
            pool.watch(deadline)
            return await connection.exchange(head, body, deadline, timeout)
        finally:
            pool.give_back(connection)

    async def aclose(self) -> None:
        """Close every connection; a later `post` opens new ones."""
        pools, self._pools, self._targets = self._pools, {}, {}
        for pool in pools.values():
            pool.close()
        await asyncio.sleep(0)  # the transports' own end

    def _target(self, url: str) -> _Target:
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").encode("idna").decode(), parts.port
        except (ValueError, UnicodeError):
            raise SendFailed("protocol", "the URL cannot be used", connected=False) from None
        secure = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not host:
            raise SendFailed("protocol", "the URL cannot be used", connected=False)
        key = (parts.scheme, host, port or (443 if secure else 80))
        pool = self._pools.get(key)
        if pool is None:
            context = (self.ssl_context or ssl.create_default_context()) if secure else None
            pool = self._pools[key] = _Pool(key[1], key[2], context, self)
        target = self._targets[url] = _Target(pool, _start(parts.path, parts.query, host, port))
        return target


class _Target:
    __slots__ = ("pool", "start")

    def __init__(self, pool: _Pool, start: str) -> None:
        self.pool, self.start = pool, start


class _Pool:
    """The connections to one host: those in use are with their requests, the idle ones here, latest first."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None, told: OwnSender) -> None:
        self.loop = asyncio.get_running_loop()
        self._host, self._port, self._context, self._egress = host, port, context, told.egress
        self._places = told.max_connections
        self._connect_timeout = told.connect_timeout
        self._taken = 0  # places: connections, and attempts to make one
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._sweeper: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf  # nobody's deadline is before this: one timer serves all requests
        self._alarm: asyncio.TimerHandle | None = None
        self._lookup: asyncio.Task[Sequence[str]] | None = None
        self._looked_up = 0.0
        self._shut = False

    def idle(self) -> Connection | None:
        """A kept connection, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closing:
                return connection
        return None

    def give_back(self, connection: Connection) -> None:
        """A request has ended: keep its connection for the next one, unless it must not be used again."""
        now = self.loop.time()
        if not connection.reusable or self._shut or now > connection.expires:
            connection.reusable = False
            connection.abort()
            return
        connection.idle_since = now
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(_KEEP_ALIVE, self._sweep)
        if self._waiting:
            self._wake()

    def watch(self, deadline: float) -> None:
        """See to it that a request that is about to be sent is ended when it is overdue."""
        if deadline >= self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = deadline
        self._alarm = self.loop.call_at(deadline, self._expire)

    async def connect(self, deadline: float, timeout: float) -> Connection:
        """A connection, new unless one is given back while we wait for a free place."""
        while self._taken >= self._places:
            await self._wait_for_place(deadline, timeout)
            kept = self.idle()
            if kept is not None:
                return kept
        self._taken += 1
        connection = Connection(self._on_closed)
        self._all.add(connection)
        now = self.loop.time()
        limit = min(deadline, now + self._connect_timeout)
        try:
            async with asyncio.timeout_at(limit):
                await self._open(connection, limit)
        except BaseException as error:
            connection.abort()
            if connection in self._all and not connection.gone:  # never was one; a real one says itself that it ended
                self._on_closed(connection)
            if isinstance(error, TimeoutError):
                raise SendFailed("timeout", f"no connection within {limit - now:.3g} s", connected=False) from None
            raise
        connection.expires = now + _MAX_AGE
        if self._shut:
            connection.abort()
            raise SendFailed("reset", "the sender was closed", connected=False)
        return connection

    def close(self) -> None:
        """Close all of them, also those in use."""
        self._shut = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        if self._lookup is not None:
            self._lookup.cancel()
        self._idle.clear()
        for connection in list(self._all):
            connection.abort()

    async def _open(self, connection: Connection, limit: float) -> None:
        addresses = list(await self._addresses())
        hostname = self._host if self._context is not None else None
        for number, address in enumerate(addresses):
            # An address that swallows packets leaves the others their share of the time.
            share = (limit - self.loop.time()) / (len(addresses) - number)
            try:
                async with asyncio.timeout(share):
                    await self.loop.create_connection(
                        lambda: connection, address, self._port, ssl=self._context, server_hostname=hostname
                    )
                return
            except ssl.SSLError as error:
                raise SendFailed("tls", str(error), connected=False) from None
            except OSError as error:  # TimeoutError is one
                if number + 1 < len(addresses):
                    continue
                self._looked_up = 0.0  # look again next time: the host may have moved
                if isinstance(error, TimeoutError) and not error.errno:
                    raise
                if self._context is not None and isinstance(error, (ConnectionResetError, ConnectionAbortedError)):
                    raise SendFailed("tls", f"closed during the handshake: {error}", connected=False) from None
                raise SendFailed("refused", f"{self._host}:{self._port}: {error}", connected=False) from None

    async def _addresses(self) -> Sequence[str]:
        now = self.loop.time()
        if self._lookup is None or (self._lookup.done() and now > self._looked_up + _DNS_TTL):
            self._lookup = self.loop.create_task(resolve(self._host, self._port, self._egress))
            self._looked_up = now
        try:
            # Shielded: one lookup serves all who wait, and must not end with the first who gives up.
            return await asyncio.shield(self._lookup)
        except SendFailed:
            self._looked_up = 0.0
            raise

    async def _wait_for_place(self, deadline: float, timeout: float) -> None:
        place = self.loop.create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout_at(deadline):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self._wake()  # it was ours, and we do not take it
            if isinstance(error, TimeoutError):
                raise SendFailed("timeout", f"no free connection within {timeout:g} s", connected=False) from None
            raise

    def _wake(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return

    def _on_closed(self, connection: Connection) -> None:
        if connection not in self._all:
            return
        self._all.remove(connection)
        self._taken -= 1
        if connection in self._idle:
            self._idle.remove(connection)
        self._wake()

    def _expire(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        now = self.loop.time()
        for connection in list(self._all):
            if connection.deadline <= now:
                connection.expire()
        following = min(
            (connection.deadline for connection in self._all if connection.deadline > now), default=math.inf
        )
        if following < math.inf:
            self.watch(following)

    def _sweep(self) -> None:
        self._sweeper = None
        before = self.loop.time() - _KEEP_ALIVE
        while self._idle and self._idle[0].idle_since <= before:
            self._idle.popleft().abort()
        if self._idle:
            self._sweeper = self.loop.call_at(self._idle[0].idle_since + _KEEP_ALIVE, self._sweep)


def _start(path: str, query: str, host: str, port: int | None) -> str:
    """The request line and the headers that are always the same."""
    place = quote(path or "/", safe=_UNQUOTED) + (f"?{quote(query, safe=_UNQUOTED)}" if query else "")
    name = f"[{host}]" if ":" in host else host
    return (
        f"POST {place} HTTP/1.1\r\nhost: {name if port is None else f'{name}:{port}'}\r\n"
        "accept: */*\r\naccept-encoding: identity\r\nuser-agent: eventbus\r\n"
    )


def _head(start: str, headers: Sequence[tuple[str, str]], length: int) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if lines.count("\r") != len(headers) or lines.count("\n") != len(headers) or "\x00" in lines:
        raise SendFailed("protocol", "a header holds a line break", connected=False)
    return f"{start}{lines}content-length: {length}\r\n\r\n".encode("utf-8", "replace")
