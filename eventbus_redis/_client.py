"""The only place that talks to redis-py: connecting (one server, Sentinel, Cluster, TLS, ACL) and calling.

Every call has a deadline, none is repeated behind our back: whether a script may run twice is for the caller to say.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import hiredis
from redis import exceptions
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from eventbus.errors import BrokerError, ConfigError
from eventbus_redis._errors import translated
from eventbus_redis._scripts import Script
from eventbus_redis.options import Options

Argument: TypeAlias = str | bytes | int
Entry: TypeAlias = tuple[bytes, list[bytes]]
"""The id of a stream entry and its fields, one after the other."""
Reading: TypeAlias = "asyncio.Task[Any]"
"""A call that reads, under way."""

AnyClient: TypeAlias = "Redis | RedisCluster"


class Client:
    """A connection pool to one Redis, however it is reached."""

    def __init__(self, options: Options, ready_made: AnyClient | None = None) -> None:
        self.options = options
        self.address = ",".join(f"{host}:{port}" for host, port in options.hosts)
        self._ready_made = ready_made
        self._redis: Any = None
        self._sentinel: Any = None
        self._cluster = False
        self._calls: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Connect, and see that somebody answers."""
        if self._redis is not None:
            return
        if self._ready_made is not None:
            self._use(self._ready_made)
        else:
            self._make()
        client = self._open
        try:
            with translated(self.address):
                if self._cluster:
                    await client.initialize()
                await self._call("PING", at="")
        except BrokerError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Disconnect; a client that was given ready-made is left to its owner."""
        if self._calls:
            await asyncio.gather(*self._calls, return_exceptions=True)
        client, self._redis = self._redis, None
        sentinel, self._sentinel = self._sentinel, None
        for each in (client if self._ready_made is None else None, *(sentinel.sentinels if sentinel else ())):
            if each is None:
                continue
            try:
                await each.aclose()
                pool = getattr(each, "connection_pool", None)
                if pool is not None:
                    await pool.disconnect()
            except (exceptions.RedisError, OSError):
                pass  # it is gone already

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument] = ()) -> Any:
        """Run a script by its hash; a server that does not know it (restart, failover) gets its text."""
        with translated(self.address):
            try:
                return await self._call("EVALSHA", script.sha, len(keys), *keys, *arguments)
            except exceptions.NoScriptError:
                return await self._call("EVAL", script.text, len(keys), *keys, *arguments)

    def line(self) -> Line:
        """A line of calls that do not wait for one another's answers."""
        return Line(self)

    def start_reading(
        self, group: str, consumer: str, count: int, block: int | None, streams: Mapping[str, str]
    ) -> Reading:
        """Ask for entries of streams for a consumer, waiting for `block` milliseconds for the first.

        Sent before anybody else has a turn: the server gets them ready while we do something else.
        """
        wait: tuple[Argument, ...] = () if block is None else ("BLOCK", block)
        return self._start(
            "XREADGROUP", "GROUP", group, consumer, "COUNT", count, *wait,
            "STREAMS", *streams, *streams.values(), at=next(iter(streams)),
        )  # fmt: skip

    async def entries_of(self, reading: Reading) -> dict[str, list[Entry]]:
        """What a reading brings, by stream. It may be awaited again by whoever was cancelled meanwhile."""
        with translated(self.address):
            return _by_stream(await asyncio.shield(reading), parsed=self._cluster)

    async def wait_for(self, stream: str, after: str, block: int) -> None:
        """Return when a stream has an entry after an id, or after `block` milliseconds. Nothing is consumed."""
        with translated(self.address):
            await self._call("XREAD", "COUNT", 1, "BLOCK", block, "STREAMS", stream, after, at=stream)

    async def entries(self, stream: str, start: str, count: int) -> list[Entry]:
        """Entries of a stream from an id on."""
        with translated(self.address):
            reply = await self._call("XRANGE", stream, start, "+", "COUNT", count, at=stream)
        return [_entry(row) for row in reply or ()]

    async def length(self, stream: str) -> int:
        """How many entries a stream has."""
        with translated(self.address):
            return int(await self._call("XLEN", stream, at=stream))

    async def field(self, key: str, name: str) -> bytes | None:
        """A field of a hash."""
        with translated(self.address):
            found: bytes | None = await self._call("HGET", key, name, at=key)
        return found

    async def memory_of(self, key: str) -> int:
        """Bytes that a key takes, roughly."""
        with translated(self.address):
            return int(await self._call("MEMORY", "USAGE", key, at=key) or 0)

    async def info(self) -> dict[str, str]:
        """What the server says about itself."""
        with translated(self.address):
            text = await self._call("INFO", at="")
        if isinstance(text, dict):  # parsed by the driver
            return {str(name): str(value) for name, value in text.items()}
        found = {}
        for line in bytes(text).decode("utf-8", "replace").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                found[name] = value
        return found

    async def setting(self, name: str) -> str:
        """A setting of the server; "" where it may not be asked."""
        try:
            reply = await self._call(*(("CONFIG GET",) if self._cluster else ("CONFIG", "GET")), name, at="")
        except exceptions.RedisError:
            return ""
        values = list(reply.values()) if isinstance(reply, dict) else list(reply or ())[1::2]
        if not values:
            return ""
        return values[0].decode() if isinstance(values[0], bytes) else str(values[0])

    @property
    def _open(self) -> Any:
        if self._redis is None:
            raise BrokerError("the bus is not open; use it inside `async with Bus(...) as bus:`")
        return self._redis

    async def _call(self, *command: Argument, at: str | None = None) -> Any:
        """Send a command and read its answer. `at`: the key whose node of a cluster to ask; "": any node."""
        return await asyncio.shield(self._start(*command, at=at))

    def _start(self, *command: Argument, at: str | None = None) -> asyncio.Task[Any]:
        """Send a command.

        In a task of its own, so that whoever is cancelled while waiting does not cancel the reading: the answer
        would be lost with its entries, and a cancel inside redis-py was seen to be swallowed.
        """
        client = self._open
        where: dict[str, object] = {}
        if self._cluster and at is not None:
            where["target_nodes"] = client.get_node_from_key(at) if at else client.get_random_node()
        work = client.execute_command(*command, **where) if self._cluster else self._exchange(client, command)
        call = asyncio.get_running_loop().create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _exchange(self, client: Any, command: tuple[Argument, ...]) -> Any:
        # Packed in C: redis-py's asyncio client packs in Python, which is most of what publishing would cost.
        packed = hiredis.pack_command(command)  # type: ignore[arg-type]
        pool = client.connection_pool
        # One deadline of ours for all of it. With redis-py's (socket_timeout) every write goes through a task of its
        # own (asyncio.wait_for, before Python 3.12): it leaves only after all that is ready to run has run.
        async with asyncio.timeout(self.options.timeout):
            connection = await pool.get_connection()
            try:
                # A connection that fails or is cancelled is closed by redis-py before the error gets here.
                await connection.send_packed_command(packed, check_health=False)
                return await connection.read_response()
            finally:
                await pool.release(connection)

    def _use(self, client: AnyClient) -> None:
        if isinstance(client, RedisCluster):
            self._redis, self._cluster = client, True
            return
        if client.connection_pool.connection_kwargs.get("decode_responses"):
            raise ConfigError("the Redis client decodes responses to text; make it with decode_responses=False")
        self._redis = client

    def _make(self) -> None:
        options = self.options
        common: dict[str, Any] = {
            "username": options.username,
            "password": options.password,
            "protocol": 2,
            "socket_timeout": options.timeout if options.cluster else None,  # see _exchange
            "socket_connect_timeout": min(options.timeout, 5.0),
            "socket_keepalive": True,
            "client_name": options.client_name,
            # redis-py's own limit is 100: with one reading call per service that is soon an error, not a queue.
            "max_connections": 10_000,
        }
        if options.tls:
            common |= {
                "ssl": True,
                "ssl_cert_reqs": ssl.CERT_NONE if options.ssl_cert_reqs == "none" else ssl.CERT_REQUIRED,
                "ssl_ca_certs": options.ssl_ca_certs,
                "ssl_certfile": options.ssl_certfile,
                "ssl_keyfile": options.ssl_keyfile,
                "ssl_check_hostname": options.ssl_check_hostname and options.ssl_cert_reqs != "none",
            }
        never = Retry(NoBackoff(), 0)
        if options.cluster:
            from redis.asyncio.cluster import ClusterNode

            nodes = [ClusterNode(host, port) for host, port in options.hosts]
            self._redis = RedisCluster(startup_nodes=nodes, retry=never, **common)
            self._cluster = True
        elif options.sentinel:
            guards = {
                name: value for name, value in common.items() if name not in ("username", "password", "max_connections")
            }
            # Asking every Sentinel, even those that hang, must fit into the deadline of the call that asks.
            share = options.timeout / (len(options.hosts) + 1)
            guards |= {"password": options.sentinel_password, "socket_timeout": share, "socket_connect_timeout": share}
            self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
                list(options.hosts), sentinel_kwargs={**guards, "retry": never}
            )
            self._redis = self._sentinel.master_for(options.sentinel, db=options.db, retry=never, **common)
        else:
            ((host, port), *_) = options.hosts
            self._redis = Redis(host=host, port=port, db=options.db, retry=never, **common)


class Line:
    """Calls on one connection, each sent before the one before is answered; the server carries them out in order."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._writing = asyncio.Lock()
        self._trip: _Trip | None = None

    async def call(self, head: tuple[Argument, ...], number: int, packed: Sequence[bytes]) -> Any:
        """Send a command, of whose arguments the last, so many, are packed already; its answer.

        A script goes as text: by its hash, the first of several calls could be refused and the second carried out.
        """
        client = self._client
        with translated(client.address):
            if client._cluster:  # redis-py looks for the node, and packs
                async with self._writing:
                    return await client._call(*head, *_unpacked(number, packed))
            first = hiredis.pack_command(head).partition(b"\r\n")[2]  # type: ignore[arg-type]
            command = b"".join((b"*%d\r\n" % (len(head) + number), first, *packed))
            return await self._exchange(client._open.connection_pool, command)

    async def _exchange(self, pool: Any, packed: bytes) -> Any:
        async with self._writing, asyncio.timeout(self._client.options.timeout):
            trip = await self._write(pool, packed)
        try:
            # A lock lets in first who came first: answers are read in the order in which their calls were written.
            async with trip.reading, asyncio.timeout(self._client.options.timeout):
                return await trip.read()
        except asyncio.CancelledError:
            trip.broken = True  # our answer is still to come, and would be taken for the next one's
            raise
        finally:
            await self._leave(trip)

    async def _write(self, pool: Any, packed: bytes) -> _Trip:
        trip = self._trip
        if trip is None or trip.broken:
            trip = self._trip = _Trip(await pool.get_connection(), pool)
        trip.under_way += 1
        try:
            await trip.connection.send_packed_command(packed, check_health=False)
        except BaseException:
            trip.broken = True
            await self._leave(trip)
            raise
        return trip

    async def _leave(self, trip: _Trip) -> None:
        trip.under_way -= 1
        if not trip.under_way:
            if self._trip is trip:
                self._trip = None
            if trip.broken:
                await trip.connection.disconnect(nowait=True)
            await trip.pool.release(trip.connection)


class _Trip:
    """A connection while calls of a line are under way on it."""

    __slots__ = ("broken", "connection", "pool", "reading", "under_way")

    def __init__(self, connection: Any, pool: Any) -> None:
        self.connection = connection
        self.pool = pool
        self.reading = asyncio.Lock()
        self.under_way = 0
        self.broken = False

    async def read(self) -> Any:
        """The next answer."""
        if self.broken:  # whatever is there to read now is not for us
            raise exceptions.ConnectionError("the connection was lost")
        try:
            return await self.connection.read_response()
        except exceptions.ResponseError:
            raise  # that is an answer
        except BaseException:
            self.broken = True
            raise


def _unpacked(number: int, packed: Sequence[bytes]) -> list[bytes]:
    reader = hiredis.Reader()
    reader.feed(b"".join((b"*%d\r\n" % number, *packed)))
    found: list[bytes] = reader.gets()
    return found


def _by_stream(reply: Any, *, parsed: bool) -> dict[str, list[Entry]]:
    if not reply:
        return {}
    rows = reply.items() if isinstance(reply, dict) else reply
    return {_name(stream): [_entry(row) for row in entries] if parsed else entries for stream, entries in rows}


def _entry(row: Any) -> Entry:
    id, fields = row
    if isinstance(fields, dict):  # a cluster's client parses answers
        return id, [part for pair in fields.items() for part in pair]
    return id, fields if fields is not None else []


def _name(stream: Any) -> str:
    return stream.decode() if isinstance(stream, bytes) else str(stream)
