"""Consuming a work queue: receive, settle (copies first, confirmed, then acks in one write), notes.

A delivery belongs to a session, the life of one channel. When the channel is gone the broker delivers everything
unsettled again: those deliveries are lost to us, and settling them changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from eventbus import headers as reserved
from eventbus.adapter import Consumer, Settled, Subscription
from eventbus.errors import BrokerError, BrokerUnavailable, EventBusError
from eventbus.failpoints import failpoint
from eventbus.settlement import Ack, Delivery, HeaderDelta, Park, Release, Requeue, Retry, Settlement
from eventbus_rabbit._errors import NotFound, Refused
from eventbus_rabbit.holding import Holding
from eventbus_rabbit.link import Link
from eventbus_rabbit.messages import HELD, NO_MARKS, NOTED, Message, copy, incoming, new_mark, only_rejected
from eventbus_rabbit.names import Names
from eventbus_rabbit.publisher import Outgoing, Publisher
from eventbus_rabbit.roads import Roads
from eventbus_rabbit.sessions import Receipt, Session

log = logging.getLogger("eventbus.rabbit")
CLOSE_TIMEOUT: Final = 5.0


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
        holding: Holding,
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
        self._holding = holding
        self._rejects_from = names.back_exchange if names.rejects_are_retries else None
        self._woken = False
        self._closed = False
        self._session = self._new_session()

    async def __aenter__(self) -> RabbitConsumer:
        await self._restore()
        return self

    # --- receive ---------------------------------------------------------------------------------------------

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """What has been delivered; waits for the first. A lost channel is opened again here."""
        timer = asyncio.get_running_loop().call_later(timeout, self._expire)
        try:
            while True:
                session = self._session
                session.arrived.clear()
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
                await session.arrived.wait()
        finally:
            timer.cancel()
            self._woken = False

    def _expire(self) -> None:
        self._woken = True
        self._session.arrived.set()

    def wake(self) -> None:
        """Make a waiting receive return."""
        self._expire()

    def _delivery(self, session: Session, message: Message) -> Delivery:
        event, _, history, problem = incoming(
            message, self.queue, self._subscription.mapping, back_exchange=self._rejects_from
        )
        if history.crashes and self._holding.survived(message):
            history = replace(history, crashes=history.crashes - 1)
        stamp = message.properties.timestamp or 0
        delivery = Delivery(
            event,
            self._subscription.service,
            self.queue,
            Receipt(session, message),
            history,
            self._suspicious(message),
            NOTED in message.properties.headers and not message.redelivered,
            problem,
            float(stamp) if stamp < 0xFFFFFFFF else 0.0,
        )
        session.open[message.tag] = delivery
        return delivery

    def _suspicious(self, message: Message) -> bool:
        """Whether it was delivered before and never settled."""
        if HELD in message.properties.headers:
            return True
        if not message.redelivered or self._link.version < (4,) or message.exchange != self._rejects_from:
            return message.redelivered
        return not only_rejected(message, self.queue)

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
        session = self._new_session()
        wire = await self._link.channel(session)
        session.use(wire)
        wire.on_cancel(lambda: self._cancelled(session))
        try:
            await wire.qos(self._prefetch)
            await self._consume(session)
        except BaseException:
            session.end()
            await wire.aclose()
            raise
        self._session = session

    def _new_session(self) -> Session:
        return Session(self.tell_lost)

    def tell_lost(self, deliveries: list[Delivery]) -> None:
        """A channel is gone, and these with it."""
        if not self._closed:
            self.lost(deliveries)

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
        session.arrived.set()

    # --- settle ----------------------------------------------------------------------------------------------

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """Copies first and confirmed; then the acks, as few as possible, in one write."""
        answers: list[Settled] = ["lost"] * len(items)
        acked: list[int] = []
        rejected: list[int] = []
        copies: list[tuple[int, Outgoing, int]] = []
        missing = False
        for position, (delivery, settlement) in enumerate(items):
            receipt = delivery.receipt
            if not isinstance(receipt, Receipt):
                continue
            if isinstance(settlement, Ack):
                acked.append(position)  # its session knows whether it is still ours
            elif not receipt.ours:
                continue
            elif self._rejects(settlement, receipt):
                rejected.append(position)
            else:
                # One whose road cannot be made now waits by itself: those beside it are settled all the same.
                try:
                    copies.append((position, *await self._copy(delivery, receipt, settlement)))
                except EventBusError as error:
                    log.warning("no_road %s: %s", self.queue, error)
                    missing = missing or isinstance(error, NotFound)
                    answers[position] = "failed"
        await self._finish(items, answers, acked, rejected)
        if missing:
            await self._mend()
        if copies:
            stored = await self._publish(copies, answers)
            failpoint("rabbit.settle.between-copy-and-ack")
            await self._finish(items, answers, stored, [])
        return answers

    def _rejects(self, settlement: Settlement, receipt: Receipt) -> bool:
        """Seed 4's literal way: nack into the dead-letter exchange, where its delay is long enough."""
        return (
            self._reject_to_retry
            and isinstance(settlement, Retry)
            and settlement.due_at - time.time() <= self._names.base / 1000
            and receipt.session is self._session
            and not receipt.noted
        )

    async def _copy(self, delivery: Delivery, receipt: Receipt, settlement: Settlement) -> tuple[Outgoing, int]:
        delta = {**receipt.noted, **settlement.headers} if receipt.noted else settlement.headers  # type: ignore[union-attr]
        names, road, parked_as = self._names, 0, ""
        if isinstance(settlement, Park):
            exchange, key = names.dead_letter_exchange, names.dead_letter_key
            parked_as = new_mark()
        elif isinstance(settlement, (Retry, Requeue)):
            road, key = await self._roads.choose(settlement.due_at)
            exchange = names.retry_exchange
        else:
            exchange, key = "", names.queue
        return self._outgoing(delivery, receipt, delta, exchange, key, parked_as=parked_as), road

    def _outgoing(
        self,
        delivery: Delivery,
        receipt: Receipt,
        delta: HeaderDelta,
        exchange: str,
        key: str,
        *,
        parked_as: str = "",
        marks: Mapping[str, str] = NO_MARKS,
    ) -> Outgoing:
        return copy(
            receipt.message,
            delivery.event,
            delivery.history.retries,
            delta,
            exchange=exchange,
            key=key,
            frame_max=self._publisher.frame_max,
            parked_as=parked_as,
            queue=self.queue,
            marks=marks,
        )

    async def _publish(self, copies: list[tuple[int, Outgoing, int]], answers: list[Settled]) -> list[int]:
        """Publish copies; returns the positions of those that are stored."""
        try:
            results = await self._publisher.send([message for _, message, _ in copies])
        except EventBusError as error:
            log.warning("copy_failed %s: %s", self.queue, error)
            results = ["unknown"] * len(copies)
        stored, missing = [], False
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
                    missing = True
            elif result == "missing":
                missing = True
        if missing:
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
        items: Sequence[tuple[Delivery, Settlement]],
        answers: list[Settled],
        acked: list[int],
        rejected: list[int],
    ) -> None:
        """Reject and acknowledge. What is no longer ours, because its channel went meanwhile, is lost."""
        receipts = {position: receipt_of(items[position][0]) for position in (*acked, *rejected)}
        away = [receipts[position] for position in rejected]
        done: set[Receipt] = set()
        for session in {receipt.session for receipt in receipts.values()}:
            done |= await session.settle([receipts[position] for position in acked], away)
        for position, receipt in receipts.items():
            answers[position] = "done" if receipt in done else "lost"

    # --- note ------------------------------------------------------------------------------------------------

    async def note(self, delivery: Delivery, headers: HeaderDelta) -> bool:
        """Swap the delivery for a copy with the note, which we hold instead (holding.py).

        Where no queue may be made, a crash note travels with a copy to the own queue, and attempts of in-place retry
        are kept in memory until the next copy (retry, park, release): only a crash forgets them.
        """
        receipt = delivery.receipt
        if not isinstance(receipt, Receipt) or not receipt.ours:
            return False
        delta = {**receipt.noted, **headers}
        try:
            return await self._holding.swap(
                delivery,
                receipt,
                lambda queue, mark: self._outgoing(delivery, receipt, delta, "", queue, marks={HELD: mark}),
            )
        except Refused:
            if not headers.get(reserved.CRASHES):
                receipt.noted = delta
                return True
        noted = self._outgoing(delivery, receipt, delta, "", self.queue, marks={NOTED: "1"})
        if await self._publisher.send([noted]) != ["stored"]:
            raise BrokerError(f"the crash note of {delivery.event.id} was not stored in {self.queue}")
        await receipt.session.settle([receipt])
        return False

    # --- close -----------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Deliveries that are here and not settled."""
        return len(self._session.buffer) + len(self._session.open) + len(self._holding.session.open)

    @property
    def activity(self) -> tuple[int, int, int]:
        """Changes whenever something is delivered or settled."""
        return id(self._session), self._session.seen, len(self._session.open) + len(self._holding.session.open)

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
            session.end()
            if session.wire is not None:
                await session.wire.aclose()
            await self._holding.aclose()
            self._closed_callback(self)


def receipt_of(delivery: Delivery) -> Receipt:
    """The receipt of a delivery of ours."""
    receipt = delivery.receipt
    assert isinstance(receipt, Receipt)
    return receipt
