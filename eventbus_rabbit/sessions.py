"""A session: the life of one consuming channel, what came on it, and the frames that settle it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from eventbus.errors import EventBusError
from eventbus.settlement import Delivery, HeaderDelta
from eventbus_rabbit import frames
from eventbus_rabbit.link import Wire
from eventbus_rabbit.messages import Message


class Receipt:
    """The handle of a delivery: its message, the session it belongs to, and headers noted while it is held."""

    __slots__ = ("message", "noted", "session")

    def __init__(self, session: Session, message: Message) -> None:
        self.session = session
        self.message = message
        self.noted: HeaderDelta = {}

    @property
    def ours(self) -> bool:
        """Whether the delivery can still be settled."""
        return self.session.alive and self.message.tag in self.session.open


class Session:
    """What came on a channel and is not taken yet, what is taken and not settled."""

    def __init__(self, lost: Callable[[list[Delivery]], None]) -> None:
        self._lost = lost
        self._order = asyncio.Lock()
        self.arrived = asyncio.Event()
        self.buffer: deque[Message] = deque()
        self.open: dict[int, Delivery | None] = {}
        """Deliveries in the order of their tags; None for one that nobody waited for any more."""
        self.seen = 0
        self.wire: Wire | None = None
        self.tag = ""
        self.cancelled = False
        self.dead = False

    # --- what the channel brings -----------------------------------------------------------------------------

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        """A message from the broker."""
        self.seen += 1
        self.buffer.append(Message(*frames.read_deliver(method), properties, body))
        self.arrived.set()

    def confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        """Nothing is published on this channel."""

    def returned(self, method: bytes, properties: bytes) -> None:
        """Nothing is published on this channel."""

    def use(self, wire: Wire) -> None:
        """Live on this channel."""
        self.wire = wire
        wire.on_close(self.lose)

    @property
    def alive(self) -> bool:
        """Whether what it delivered is still ours."""
        return not self.dead and self.wire is not None and self.wire.alive

    def lose(self) -> None:
        """The channel is gone: the broker gives everything unsettled to somebody else."""
        if self.dead:
            return
        lost = [delivery for delivery in self.open.values() if delivery is not None]
        self.end()
        if lost:
            self._lost(lost)

    def end(self) -> None:
        """Nothing of this is ours any more."""
        self.dead = True
        self.buffer.clear()
        self.open.clear()
        self.arrived.set()

    # --- settle ----------------------------------------------------------------------------------------------

    async def settle(self, acked: Sequence[Receipt], rejected: Sequence[Receipt] = ()) -> set[Receipt]:
        """Acknowledge and reject in one write; returns those that are settled, the others are no longer ours.

        One at a time: an ack "up to here" that overtook the frames of another call would name what they settle, and
        RabbitMQ closes the channel at a tag it does not know, or takes for acknowledged what was to be rejected.
        """
        async with self._order:
            if self.wire is None or not self.alive:  # asked once: for each of many it would cost more than the rest
                return set()
            mine = [receipt for receipt in acked if receipt.session is self and receipt.message.tag in self.open]
            away = [receipt for receipt in rejected if receipt.session is self and receipt.message.tag in self.open]
            if not (mine or away):
                return set()
            parts = []
            for receipt in away:  # before the acks: an ack "up to here" must not swallow them
                del self.open[receipt.message.tag]
                parts.append(frames.nack(self.wire.number, receipt.message.tag, multiple=False, requeue=False))
            parts.append(self._acks([receipt.message.tag for receipt in mine]))
            try:
                await self.wire.write(b"".join(parts))
            except BaseException as error:
                # What was not written stays unsettled at the broker until the channel is gone.
                wire = self.wire
                self.lose()
                await wire.aclose()
                if isinstance(error, EventBusError):
                    return set()
                raise
            return {*mine, *away}

    def _acks(self, tags: Sequence[int]) -> bytes:
        """The frames that acknowledge deliveries, and forgets these.

        The unbroken row of finished ones at the beginning is one ack "up to here", named by a tag that is still open
        (a settled one closes the channel); every other finished one has an ack of its own. So a slow message costs
        its successors nothing but their own ack.
        """
        assert self.wire is not None
        number, finished = self.wire.number, set(tags)
        prefix = 0
        for tag in self.open:
            if tag not in finished:
                break
            prefix = tag
        parts = []
        for tag in finished:
            del self.open[tag]
            if tag > prefix:
                parts.append(frames.ack(number, tag, multiple=False))
        if prefix:
            parts.append(frames.ack(number, prefix, multiple=True))
        return b"".join(parts)
