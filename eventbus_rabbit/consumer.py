"""Consuming a work queue: receive, settle (copies first, confirmed, then acks in one write), crash notes.

A delivery belongs to a session, the life of one channel. When the channel is gone the broker delivers everything
unsettled again: those deliveries are lost to us, and settling them changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from eventbus import headers as reserved
from eventbus.adapter import Consumer, Settled, Subscription
from eventbus.errors import BrokerError, BrokerUnavailable, EventBusError
from eventbus.event import new_id
from eventbus.failpoints import failpoint
from eventbus.settlement import Ack, Delivery, HeaderDelta, Park, Release, Requeue, Retry, Settlement
from eventbus_rabbit import frames
from eventbus_rabbit._errors import NotFound
from eventbus_rabbit.link import Link, Wire
from eventbus_rabbit.messages import Message, copy, incoming
from eventbus_rabbit.names import Names
from eventbus_rabbit.publisher import Outgoing, Publisher
from eventbus_rabbit.roads import Roads

log = logging.getLogger("eventbus.rabbit")
CLOSE_TIMEOUT: Final = 5.0


class Receipt:
    """The handle of a delivery: its message, the session it belongs to, and headers noted while it is held."""

    __slots__ = ("message", "noted", "session")

    def __init__(self, session: Session, message: Message) -> None:
        self.session = session
        self.message = message
        self.noted: HeaderDelta = {}


class Session:
    """The life of one consuming channel: what came and is not taken yet, what is taken and not settled."""

    def __init__(self, signal: asyncio.Event) -> None:
        self._signal = signal
        self.buffer: deque[Message] = deque()
        self.open: dict[int, Delivery] = {}
        self.seen = 0
        self.wire: Wire | None = None
        self.tag = ""
        self.cancelled = False
        self.dead = False

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        """A message from the broker."""
        self.seen += 1
        self.buffer.append(Message(*frames.read_deliver(method), properties, body))
        self._signal.set()

    def confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        """Nothing is published on this channel."""

    def returned(self, method: bytes, properties: bytes) -> None:
        """Nothing is published on this channel."""

    @property
    def alive(self) -> bool:
        """Whether what it delivered is still ours."""
        return not self.dead and self.wire is not None and self.wire.alive

    def owns(self, receipt: Receipt) -> bool:
        """Whether a delivery is ours to settle."""
        return receipt.session is self and receipt.message.tag in self.open

    def acks(self, tags: Sequence[int]) -> bytes:
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
        for tag in tags:
            del self.open[tag]
            if tag > prefix:
                parts.append(frames.ack(number, tag, multiple=False))
        if prefix:
            parts.append(frames.ack(number, prefix, multiple=True))
        return b"".join(parts)


class RabbitConsumer(Consumer):
    """One consumer of a service's work queue."""

    def __init__(
        self,
        link: Link,
        publisher: Publisher,
        names: Names,
        roads: Roads,
        subscription: Subscription,
        *,
        prefetch: int,
        reject_to_retry: bool,
        repair: Callable[[], Awaitable[None]],
        closed: Callable[[RabbitConsumer], None],
    ) -> None:
        self.queue = names.queue
        self._link = link
        self._publisher = publisher
        self._names = names
        self._roads = roads
        self._subscription = subscription
        self._prefetch = prefetch
        self._reject_to_retry = reject_to_retry
        self._repair = repair
        self._closed_callback = closed
        self._signal = asyncio.Event()
        self._woken = False
        self._closed = False
        self._session = Session(self._signal)
        self._session.dead = True

    async def __aenter__(self) -> RabbitConsumer:
        await self._restore()
        return self

    # --- receive ---------------------------------------------------------------------------------------------

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """What has been delivered; waits for the first. A lost channel is opened again here."""
        timer = asyncio.get_running_loop().call_later(timeout, self._expire)
        try:
            while True:
                self._signal.clear()
                session = self._session
                if session.buffer and not session.dead:
                    return [
                        self._delivery(session, session.buffer.popleft())
                        for _ in range(min(limit, len(session.buffer)))
                    ]
                if self._woken or self._closed:
                    return []
                if session.cancelled or not session.alive:
                    await self._restore()
                    continue
                await self._signal.wait()
        finally:
            timer.cancel()
            self._woken = False

    def _expire(self) -> None:
        self._woken = True
        self._signal.set()

    def wake(self) -> None:
        """Make a waiting receive return."""
        self._expire()

    def _delivery(self, session: Session, message: Message) -> Delivery:
        event, _, history, problem = incoming(
            message, self.queue, self._subscription.mapping, back_exchange=self._names.back_exchange
        )
        stamp = message.properties.timestamp or 0
        delivery = Delivery(
            event,
            self._subscription.service,
            self.queue,
            Receipt(session, message),
            history,
            message.redelivered,
            # A copy made by `note`: the count it carries is that of the call to come.
            history.crashes > 0 and not message.redelivered,
            problem,
            float(stamp) if stamp < 0xFFFFFFFF else 0.0,
        )
        session.open[message.tag] = delivery
        return delivery

    async def _restore(self) -> None:
        """Open the channel and consume, again if need be."""
        if self._closed:
            raise BrokerUnavailable("the consumer is closed")
        session = self._session
        if session.cancelled and session.alive:
            # The queue was deleted: what was taken before can still be settled on this channel.
            await self._consume(session)
            session.cancelled = False
            return
        session = Session(self._signal)
        wire = await self._link.channel(session)
        session.wire = wire
        wire.on_close(lambda: self._lose(session))
        wire.on_cancel(lambda: self._cancelled(session))
        try:
            await wire.qos(self._prefetch)
            await self._consume(session)
        except BaseException:
            session.dead = True
            await wire.aclose()
            raise
        self._session = session

    async def _consume(self, session: Session) -> None:
        assert session.wire is not None
        try:
            session.tag = await session.wire.consume(self.queue)
        except NotFound:
            log.warning("queue_missing %s", self.queue)
            await self._repair()
            raise BrokerError(f"the queue {self.queue} is missing; it is looked for again") from None

    def _cancelled(self, session: Session) -> None:
        log.warning("consumer_cancelled %s: its queue was deleted", self.queue)
        session.cancelled = True
        self._signal.set()

    def _lose(self, session: Session) -> None:
        """The channel is gone: the broker gives everything unsettled to somebody else."""
        if session.dead:
            return
        session.dead = True
        session.buffer.clear()
        lost = list(session.open.values())
        session.open.clear()
        self._signal.set()
        if lost and not self._closed:
            self.lost(lost)

    # --- settle ----------------------------------------------------------------------------------------------

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """Copies first and confirmed; then the acks, as few as possible, in one write."""
        session = self._session
        answers: list[Settled] = ["lost"] * len(items)
        acked: list[int] = []
        rejected: list[int] = []
        copies: list[tuple[int, Outgoing, int]] = []
        for position, (delivery, settlement) in enumerate(items):
            receipt = delivery.receipt
            if not isinstance(receipt, Receipt) or not session.alive or not session.owns(receipt):
                continue
            if isinstance(settlement, Ack):
                acked.append(position)
            elif self._rejects(settlement, receipt):
                rejected.append(position)
            else:
                copies.append((position, *await self._copy(delivery, receipt, settlement)))
        await self._finish(session, items, answers, acked, rejected)
        if copies:
            stored = await self._publish(copies, answers)
            failpoint("rabbit.settle.between-copy-and-ack")
            await self._finish(session, items, answers, stored, [])
        return answers

    def _rejects(self, settlement: Settlement, receipt: Receipt) -> bool:
        """Seed 4's literal way: nack into the dead-letter exchange, where its delay is long enough."""
        return (
            self._reject_to_retry
            and isinstance(settlement, Retry)
            and settlement.due_at - time.time() <= self._names.base / 1000
            and not receipt.noted
        )

    async def _copy(self, delivery: Delivery, receipt: Receipt, settlement: Settlement) -> tuple[Outgoing, int]:
        delta = {**receipt.noted, **settlement.headers} if receipt.noted else settlement.headers  # type: ignore[union-attr]
        names, road, parked_as = self._names, 0, ""
        if isinstance(settlement, Park):
            exchange, key = names.dead_letter_exchange, names.dead_letter_key
            parked_as = new_id()
        elif isinstance(settlement, (Retry, Requeue)):
            road, key = await self._roads.choose(settlement.due_at)
            exchange = names.retry_exchange
        else:
            exchange, key = "", names.queue
        message = copy(
            receipt.message,
            delivery.event,
            delivery.history.retries,
            delta,
            exchange=exchange,
            key=key,
            frame_max=self._publisher.frame_max,
            parked_as=parked_as,
            queue=self.queue,
        )
        return message, road

    async def _publish(self, copies: list[tuple[int, Outgoing, int]], answers: list[Settled]) -> list[int]:
        """Publish copies; returns the positions of those that are stored."""
        try:
            results = await self._publisher.send([message for _, message, _ in copies])
        except EventBusError as error:
            log.warning("copy_failed %s: %s", self.queue, error)
            results = ["unknown"] * len(copies)
        stored = []
        for (position, message, road), result in zip(copies, results, strict=True):
            if result == "stored":
                stored.append(position)
                continue
            answers[position] = "failed"
            if result == "late" and road:
                log.error("no confirm from %s with key %s: another road is used", message.exchange, message.key)
                self._roads.avoid(road)
            elif result == "unrouted":
                log.error("no queue behind %s with key %s: the message is kept", message.exchange, message.key)
                if road:
                    self._roads.forget(road)
                else:
                    await self._mend()
        return stored

    async def _mend(self) -> None:
        """A queue of ours is missing: make it again, where that is allowed."""
        try:
            await self._repair()
        except EventBusError as error:
            log.warning("repair_failed %s: %s", self.queue, error)

    async def _finish(
        self,
        session: Session,
        items: Sequence[tuple[Delivery, Settlement]],
        answers: list[Settled],
        acked: list[int],
        rejected: list[int],
    ) -> None:
        """Reject and acknowledge on the channel, in one write."""
        # Looked at again: the channel may have gone, or another call settled it, while copies were confirmed.
        mine = [
            (position, receipt.message.tag) for position in acked if (receipt := _ours(session, items[position][0]))
        ]
        away = [
            (position, receipt.message.tag) for position in rejected if (receipt := _ours(session, items[position][0]))
        ]
        for position in (*acked, *rejected):
            answers[position] = "lost"
        if not (mine or away) or session.wire is None:
            return
        parts = []
        for _, tag in away:  # before the acks: an ack "up to here" must not swallow them
            del session.open[tag]
            parts.append(frames.nack(session.wire.number, tag, multiple=False, requeue=False))
        parts.append(session.acks([tag for _, tag in mine]))
        try:
            await session.wire.write(b"".join(parts))
        except EventBusError:
            return
        for position, _ in (*mine, *away):
            answers[position] = "done"

    async def note(self, delivery: Delivery, headers: HeaderDelta) -> bool:
        """A crash note travels with a copy to the own queue; attempts of in-place retry are kept in memory.

        RabbitMQ has no place beside a message that is held. A copy would let the next message pass, which in-place
        retry forbids: its attempts go with the next copy (retry, park, release), and only a crash forgets them.
        """
        receipt, session = delivery.receipt, self._session
        if not isinstance(receipt, Receipt) or not session.alive or not session.owns(receipt):
            return False
        if not headers.get(reserved.CRASHES):
            receipt.noted = {**receipt.noted, **headers}
            return True
        answer = (await self.settle([(delivery, Release({**receipt.noted, **headers}))]))[0]
        if answer == "failed":
            raise BrokerError(f"the crash note of {delivery.event.id} was not stored in {self.queue}")
        return False

    # --- close -----------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Deliveries that are here and not settled."""
        return len(self._session.buffer) + len(self._session.open)

    @property
    def activity(self) -> tuple[int, int, int]:
        """Changes whenever something is delivered or settled."""
        return id(self._session), self._session.seen, len(self._session.open)

    async def barrier(self) -> None:
        """Return when every delivery that the broker has sent before is here."""
        session = self._session
        if session.alive and session.wire is not None:
            await session.wire.count(self.queue)

    async def aclose(self) -> None:
        """Stop deliveries, hand back what was never started, and let go of the rest."""
        if self._closed:
            return
        session = self._session
        try:
            if session.alive and session.wire is not None:
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    if not session.cancelled:
                        await session.wire.cancel(session.tag)
                    # Prefetched and never seen by the worker: sent again, so that nobody suspects them.
                    unseen = [self._delivery(session, message) for message in session.buffer]
                    session.buffer.clear()
                    await self.settle([(delivery, Release()) for delivery in unseen if not delivery.suspect])
        except (EventBusError, TimeoutError) as error:
            log.warning("close %s: %s; what was not settled is delivered again", self.queue, error)
        finally:
            self._closed = True
            self._signal.set()
            session.dead = True
            session.open.clear()
            if session.wire is not None:
                await session.wire.aclose()
            self._closed_callback(self)


def _ours(session: Session, delivery: Delivery) -> Receipt | None:
    receipt = delivery.receipt
    return receipt if isinstance(receipt, Receipt) and session.alive and session.owns(receipt) else None
