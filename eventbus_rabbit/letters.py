"""The consumer of a dead-letter queue: takes letters one by one, so that an operator's exclusive look is possible."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from eventbus import headers as reserved
from eventbus.adapter import Consumer, Settled, Subscription
from eventbus.errors import EventBusError
from eventbus.settlement import Ack, Delivery, HeaderDelta, Requeue, Retry, Settlement
from eventbus_rabbit import frames
from eventbus_rabbit.link import Link, Wire
from eventbus_rabbit.messages import PARKED_ID, Message, incoming
from eventbus_rabbit.names import Names
from eventbus_rabbit.values import decode

POLL: Final = 0.25


class LetterReceipt:
    """A letter that is being read, and the channel that holds it."""

    __slots__ = ("message", "wire")

    def __init__(self, wire: Wire, message: Message) -> None:
        self.wire = wire
        self.message = message


class RabbitDeadLetterConsumer(Consumer):
    """Reads the dead letters in place; a letter stays parked until it is acknowledged."""

    def __init__(self, link: Link, names: Names, subscription: Subscription) -> None:
        self.queue = names.dead_letter_queue
        self._link = link
        self._names = names
        self._subscription = subscription
        self._wire: Wire | None = None
        self._held: dict[int, Delivery] = {}
        self._waiting: dict[str, float] = {}
        self._woken = asyncio.Event()

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """Letters that nobody reads now and that are not waiting for another try."""
        deadline = time.monotonic() + timeout
        while True:
            found = await self._take(limit)
            left = deadline - time.monotonic()
            if found or left <= 0 or self._woken.is_set():
                self._woken.clear()
                return found
            try:
                async with asyncio.timeout(min(POLL, left)):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _take(self, limit: int) -> list[Delivery]:
        wire = await self._ready()
        now, found, skipped = time.time(), list[Delivery](), list[int]()
        self._waiting = {mark: due for mark, due in self._waiting.items() if due > now}
        while len(found) < limit:
            raw = await wire.get(self.queue)
            if raw is None:
                break
            message = Message(*raw)
            if _mark(message) in self._waiting:
                skipped.append(message.tag)
                continue
            found.append(self._delivery(wire, message))
        if skipped:
            parts = [frames.nack(wire.number, tag, multiple=False, requeue=True) for tag in skipped]
            await wire.write(b"".join(parts))
        return found

    async def _ready(self) -> Wire:
        if self._wire is None or not self._wire.alive:
            lost = list(self._held.values())
            self._held.clear()
            if lost:
                self.lost(lost)
            self._wire = await self._link.channel()
        return self._wire

    def _delivery(self, wire: Wire, message: Message) -> Delivery:
        event, story, history, _ = incoming(message, self._names.queue, self._subscription.mapping, back_exchange=None)
        whole = event.rewritten(headers={**event.headers, **story})
        delivery = Delivery(whole, self._subscription.service, self.queue, LetterReceipt(wire, message), history)
        self._held[message.tag] = delivery
        return delivery

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """Ack removes; anything else leaves the letter where it is, for later."""
        answers: list[Settled] = []
        parts: list[bytes] = []
        for delivery, settlement in items:
            receipt = delivery.receipt
            if not isinstance(receipt, LetterReceipt) or receipt.wire is not self._wire or not receipt.wire.alive:
                answers.append("lost")
                continue
            tag = receipt.message.tag
            if self._held.pop(tag, None) is None:
                answers.append("lost")
                continue
            if isinstance(settlement, Ack):
                parts.append(frames.ack(receipt.wire.number, tag, multiple=False))
            else:
                if isinstance(settlement, (Retry, Requeue)):
                    self._waiting[_mark(receipt.message)] = settlement.due_at
                parts.append(frames.nack(receipt.wire.number, tag, multiple=False, requeue=True))
            answers.append("done")
        if parts and self._wire is not None:
            try:
                await self._wire.write(b"".join(parts))
                await self._wire.count(self.queue)  # so that what was given back can be seen when this returns
            except EventBusError:
                return ["lost"] * len(items)
        return answers

    async def note(self, delivery: Delivery, headers: HeaderDelta) -> bool:
        """Dead letters are never suspects and never retried in place."""
        return True

    def wake(self) -> None:
        """Make a waiting receive return."""
        self._woken.set()

    async def aclose(self) -> None:
        """Letters being read can be read by others again."""
        wire, self._wire = self._wire, None
        self._held.clear()
        if wire is not None:
            await wire.aclose()


def _mark(message: Message) -> str:
    raw = message.properties.headers.get(PARKED_ID)
    mark = decode(raw) if raw is not None else None
    if isinstance(mark, str):
        return mark
    return message.properties.message_id.decode("utf-8", "replace") or reserved.cut(repr(message.body[:64]), 200)
