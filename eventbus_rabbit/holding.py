"""Holding: notes that survive a crash, for a broker that has no place beside a message that is held.

A noted delivery is swapped for a copy of it that carries the note. The copy goes to a queue which only this consumer
reads, and is taken there; then the original is acknowledged. While we live nobody else sees the copy. When we die its
time in that queue is long over, and RabbitMQ sends it back to the work queue at once, marked as held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from eventbus.errors import BrokerError
from eventbus.event import new_id
from eventbus.settlement import Delivery
from eventbus_rabbit import frames
from eventbus_rabbit.link import Link
from eventbus_rabbit.messages import HELD, Message
from eventbus_rabbit.names import Names
from eventbus_rabbit.publisher import Outgoing, Publisher
from eventbus_rabbit.sessions import Receipt, Session
from eventbus_rabbit.topology import QueueType, holding_queue
from eventbus_rabbit.values import decode

ARRIVAL: Final = 10.0
"""How long a copy may take from its confirm to us."""


class HoldingSession(Session):
    """The channel that takes the copies: each is claimed by its mark the moment it arrives."""

    def __init__(self, lost: Callable[[list[Delivery]], None]) -> None:
        super().__init__(lost)
        self.queue = ""
        self.waiting: dict[str, tuple[Delivery, asyncio.Future[Message]]] = {}
        self.clean = True
        """Whether every copy that was ever sent here was also taken here."""

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        """A copy of ours."""
        message = Message(*frames.read_deliver(method), properties, body)
        mark = decode(message.properties.headers.get(HELD, b"V"))
        delivery, future = self.waiting.pop(mark, (None, None)) if isinstance(mark, str) else (None, None)
        # One that nobody waits for is left alone: it goes back when the channel closes, as a duplicate.
        self.open[message.tag] = delivery
        if future is not None and not future.done():
            future.set_result(message)

    def end(self) -> None:
        """Nobody's copy will arrive any more."""
        super().end()
        for _, future in self.waiting.values():
            future.cancel()
        self.waiting.clear()


class Holding:
    """Swaps deliveries of one consumer for noted copies; its queue is made on first need."""

    def __init__(
        self,
        link: Link,
        publisher: Publisher,
        names: Names,
        queue_type: QueueType,
        settling: float,
    ) -> None:
        self._link = link
        self._publisher = publisher
        self._names = names
        self._queue_type: QueueType = queue_type
        self._settling = settling
        self._lock = asyncio.Lock()
        self.lost: Callable[[list[Delivery]], None] = lambda deliveries: None
        self.session = HoldingSession(self._lose)
        self._survived: set[bytes] = set()

    def _lose(self, deliveries: list[Delivery]) -> None:
        """The channel is gone, and we are not: whatever these did, they did not kill their process."""
        for delivery in deliveries:
            if delivery.noted and isinstance(delivery.receipt, Receipt):
                self._survived.add(delivery.receipt.message.properties.headers[HELD])
        self.lost(deliveries)

    def survived(self, message: Message) -> bool:
        """Whether a message that came back counts a crash which we know was none."""
        mark = message.properties.headers.get(HELD, b"")
        if mark not in self._survived:
            return False
        self._survived.remove(mark)
        return True

    async def swap(self, delivery: Delivery, receipt: Receipt, copy: Callable[[str, str], Outgoing]) -> bool:
        """Put a copy made by `copy(queue, mark)` in the place of the delivery; False if the delivery is lost.

        Raises BrokerError if the copy is not stored; the delivery is still ours then. Raises Refused where we may not
        make a queue.
        """
        session = await self._ready()
        mark = new_id()
        arrival: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        session.waiting[mark] = (delivery, arrival)
        try:
            answer = (await self._publisher.send([copy(session.queue, mark)]))[0]
            if answer != "stored":
                raise BrokerError(f"the note of {delivery.event.id} was not stored in {session.queue}: {answer}")
            async with asyncio.timeout(ARRIVAL):
                message = await asyncio.shield(arrival)
        except BaseException as error:
            session.clean = False  # the copy may still come
            if isinstance(error, TimeoutError) or arrival.cancelled():
                raise BrokerError(f"the noted copy of {delivery.event.id} did not come back to us") from error
            raise
        finally:
            session.waiting.pop(mark, None)
        held = Receipt(session, message)
        if not await receipt.session.settle([receipt]):
            await session.settle([held])  # the original is delivered again, to whoever: one of the two is enough
            return False
        receipt.session, receipt.message = session, message
        return True

    async def _ready(self) -> HoldingSession:
        async with self._lock:
            if not self.session.alive:
                session = HoldingSession(self._lose)
                wanted = holding_queue(self._names, new_id(), self._queue_type)
                async with self._link.throwaway() as wire:
                    await wire.declare_queue(wanted.name, wanted.arguments)
                await asyncio.sleep(self._settling)
                wire = await self._link.channel(session)
                session.use(wire)
                await wire.qos(0)  # what is held is bounded by what the work queue's channel lets us have
                session.tag = await wire.consume(wanted.name)
                session.queue = wanted.name
                self.session = session
            return self.session

    async def aclose(self) -> None:
        """Let go: what is still held goes back to the work queue, and the queue expires once it is unused."""
        session = self.session
        if session.wire is None:
            return
        empty = session.alive and session.clean and not session.open
        session.end()
        await session.wire.aclose()
        if empty:
            async with self._link.throwaway() as wire:
                await wire.delete_queue(session.queue)
