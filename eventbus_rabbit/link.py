"""The link: one connection to the broker, opened when it is needed and again when it is gone.

There is one for publishing and one for consuming: a broker that holds back publishers must not hold back acks. Every
call of the client library is made here, in channels.py and in tapping.py, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import aio_pika
import aiormq
from aio_pika.abc import AbstractConnection
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from aiormq.exceptions import ChannelNotFoundEntity
from pamqp.commands import Basic

from eventbus.errors import BrokerUnavailable
from eventbus_rabbit._errors import CLIENT_ERRORS, Rejected, translated
from eventbus_rabbit.options import Options
from eventbus_rabbit.tapping import FrameQueue, Receiver, Tap, TappedTransport

CLOSE_TIMEOUT: Final = 3.0


class Link:
    """One connection, and channels on it."""

    def __init__(self, options: Options, purpose: str, ready_made: AbstractConnection | None = None) -> None:
        self._options = options
        self._purpose = purpose
        self._ready_made = ready_made
        self._connection: AbstractConnection | None = None
        self._taps: dict[int, Tap] = {}
        self._lock = asyncio.Lock()
        self._host = 0
        self._number = 0
        self._few = asyncio.Semaphore(4)
        self._closed = False
        self.version: tuple[int, ...] = (0,)
        """The server's version, known once it is open."""

    @property
    def where(self) -> str:
        """Where it leads, for error texts."""
        return self._options.where

    async def open(self) -> None:
        """Connect, if it is not connected."""
        self._closed = False
        await self._client()

    async def aclose(self) -> None:
        """Disconnect; a ready-made connection stays open, it belongs to somebody else."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None and self._ready_made is None:
            await _quietly(connection.close())

    async def _client(self) -> aiormq.Connection:
        """The open client connection below aio-pika's."""
        found = self._alive()
        if found is not None:
            return found
        async with self._lock:
            found = self._alive()
            if found is not None:
                return found
            if self._closed:
                raise BrokerUnavailable("the bus is closed")
            await (self._connect() if self._ready_made is None else self._wait_for_ready_made())
            found = self._alive()
            if found is None:
                raise BrokerUnavailable(f"RabbitMQ at {self.where} closed the connection at once")
            version = str((found.server_properties or {}).get("version", "0"))
            self.version = tuple(int(part) for part in version.split("-")[0].split(".") if part.isdigit()) or (0,)
            return found

    def _alive(self) -> aiormq.Connection | None:
        connection = self._connection
        transport = getattr(connection, "transport", None)
        found = None if transport is None else transport.connection
        return found if isinstance(found, aiormq.Connection) and found.is_opened else None

    async def _connect(self) -> None:
        """Try the hosts in turn, beginning with the one that worked last."""
        if self._connection is not None:
            await _quietly(self._connection.close())
        urls, context = self._options.urls, self._options.tls()
        last: BrokerUnavailable | None = None
        for _ in urls:
            url = urls[self._host % len(urls)]
            transport = TappedTransport()
            connection = aio_pika.Connection(
                url.update_query(heartbeat=str(self._options.heartbeat), name=f"eventbus {self._purpose}"),
                ssl_context=context,
            )
            connection.kwargs["transport_factory"] = transport
            try:
                with translated("connecting", where=f"{url.host}:{url.port}"):
                    async with asyncio.timeout(self._options.connect_timeout):
                        await connection.connect()
            except BrokerUnavailable as error:
                await _quietly(connection.close())
                last = error if not isinstance(last, Rejected) else last
                self._host += 1
                continue
            self._connection, self._taps = connection, transport.taps
            return
        assert last is not None
        raise last

    async def _wait_for_ready_made(self) -> None:
        connection = self._ready_made
        assert connection is not None
        if connection.is_closed:
            raise BrokerUnavailable(
                "the ready-made connection is closed; use aio_pika.connect_robust for one that heals"
            )
        with translated("waiting for the ready-made connection"):
            async with asyncio.timeout(self._options.connect_timeout):
                await connection.connected.wait()
        self._connection = connection

    async def channel(self, receiver: Receiver | None = None, *, confirms: bool = False) -> Wire:
        """A new channel; what it delivers and confirms goes to the receiver."""
        with translated("opening a channel", where=self.where):
            client = await self._client()
            async with asyncio.timeout(self._options.timeout):
                channel = await client.channel(self._next_number(client), publisher_confirms=False)
            assert isinstance(channel, Channel)
            if receiver is not None:
                tap = Tap(receiver)
                if self._ready_made is None:
                    self._taps[channel.number] = tap
                    number, taps = channel.number, self._taps
                    channel.closing.add_done_callback(lambda _: taps.pop(number, None))
                else:
                    channel.frames = FrameQueue(tap, channel.frames)  # type: ignore[assignment]
            wire = Wire(channel, client, self._options.timeout)
            if confirms:
                async with asyncio.timeout(self._options.timeout):
                    await channel.confirm_delivery()
            return wire

    def _next_number(self, client: aiormq.Connection) -> int:
        # The client frees a number before its close-ok is on the wire; the next open of the same number then closes the
        # whole connection ("second channel.open seen"). Going round the numbers keeps them apart.
        highest = min(client.connection_tune.channel_max or 2047, 2047)
        for _ in range(highest):
            self._number = self._number % highest + 1
            if self._number not in client.channels:
                return self._number
        raise BrokerUnavailable(f"all {highest} channels of the connection are in use")

    @contextlib.asynccontextmanager
    async def throwaway(self) -> AsyncIterator[Wire]:
        """A channel for calls that may fail: RabbitMQ closes the channel of every failed call."""
        async with self._few:  # the client drops a close-ok when more than ten frames wait to be written
            wire = await self.channel()
            try:
                yield wire
            finally:
                await wire.aclose()


class Wire:
    """One channel: the calls that wait for an answer, each with a deadline, and a way to write frames."""

    def __init__(self, channel: Channel, client: aiormq.Connection, timeout: float) -> None:
        self._channel = channel
        self._client = client
        self._timeout = timeout
        self.number = channel.number
        self.frame_max = client.connection_tune.frame_max or 131_072

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        return not self._channel.is_closed and self._client.is_opened

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this when the channel is gone, whoever closed it."""
        self._channel.closing.add_done_callback(lambda _: callback())

    @property
    def missed_exchange(self) -> bool:
        """Whether the broker closed it because something was published to an exchange that is not there."""
        closing = self._channel.closing
        return closing.done() and not closing.cancelled() and isinstance(closing.exception(), ChannelNotFoundEntity)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call this when the server cancels the consumer: its queue was deleted."""
        self._channel.on_consumer_cancel_callbacks.add(lambda frame: callback())

    async def write(self, payload: bytes, *, drained: bool = False) -> None:
        """Send frames in one write; with `drained`, wait until the socket has room again."""
        if not self.alive:
            raise BrokerUnavailable("the channel is closed")
        with translated("sending"):
            async with asyncio.timeout(self._timeout):
                done = self._channel.create_future() if drained else None
                await self._channel.write_queue.put(
                    ChannelFrame(payload=payload, should_close=False, drain_future=done)
                )
                if done is not None:
                    await done

    async def qos(self, prefetch: int) -> None:
        """How many deliveries may be unsettled."""
        await self._call("basic.qos", self._channel.basic_qos(prefetch_count=prefetch))

    async def consume(self, queue: str, *, exclusive: bool = False) -> str:
        """Start deliveries; they go to the channel's receiver. Returns the consumer's tag."""

        async def nobody(message: object) -> None:
            """Deliveries are tapped off before the client sees them."""

        answer = await self._call(queue, self._channel.basic_consume(queue, nobody, exclusive=exclusive))
        return str(answer.consumer_tag)

    async def cancel(self, tag: str) -> None:
        """Stop deliveries."""
        await self._call("basic.cancel", self._channel.basic_cancel(tag))

    async def get(self, queue: str) -> tuple[int, bool, str, str, bytes, bytes] | None:
        """One message (tag, redelivered, exchange, key, properties, body), or None where there is none."""
        found = await self._call(queue, self._channel.basic_get(queue))
        how = found.delivery
        if not isinstance(how, Basic.GetOk) or how.delivery_tag is None:
            return None
        properties = found.header.marshal()[12:]
        return how.delivery_tag, bool(how.redelivered), how.exchange, how.routing_key or "", properties, found.body

    async def count(self, queue: str) -> tuple[int, int]:
        """Messages ready and consumers of a queue. NotFound closes the channel."""
        answer = await self._call(queue, self._channel.queue_declare(queue, passive=True))
        return int(answer.message_count or 0), int(answer.consumer_count or 0)

    async def declare_queue(self, queue: str, arguments: Mapping[str, str | int]) -> None:
        """Make a durable queue, or check that it is as wanted."""
        await self._call(queue, self._channel.queue_declare(queue, durable=True, arguments=dict(arguments) or None))

    async def declare_exchange(self, exchange: str, kind: str, *, passive: bool = False) -> None:
        """Make a durable exchange, or check that it is there (passive) or as wanted."""
        call = self._channel.exchange_declare(exchange, exchange_type=kind, durable=True, passive=passive)
        await self._call(exchange, call)

    async def bind(self, queue: str, exchange: str, key: str) -> None:
        """Bind a queue; doing it again changes nothing."""
        await self._call(f"{exchange} -> {queue}", self._channel.queue_bind(queue, exchange, key))

    async def unbind(self, queue: str, exchange: str, key: str) -> None:
        """Take a binding away."""
        await self._call(f"{exchange} -> {queue}", self._channel.queue_unbind(queue, exchange, key))

    async def delete_queue(self, queue: str) -> None:
        """Delete a queue and what is in it."""
        await self._call(queue, self._channel.queue_delete(queue))

    async def delete_exchange(self, exchange: str) -> None:
        """Delete an exchange."""
        await self._call(exchange, self._channel.exchange_delete(exchange))

    async def _call(self, what: str, call: Any) -> Any:
        with translated(what):
            async with asyncio.timeout(self._timeout):
                return await call

    async def aclose(self) -> None:
        """Close the channel; what was not settled on it goes back to its queue."""
        if self.alive:
            await _quietly(self._channel.close())


async def _quietly(call: Any) -> None:
    """Close something within a deadline, whatever state it is in."""
    with contextlib.suppress(*CLIENT_ERRORS, asyncio.CancelledError):
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await call
