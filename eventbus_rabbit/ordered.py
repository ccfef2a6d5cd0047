"""The consumer of a service that keeps the order of keys: RabbitMQ makes one consumer active, and it gives up no place.

A message keeps its place in the queue only while it stays unacknowledged. So nothing is sent again here: notes stand
in a queue beside the work queue, under the event's id, and what is handed back is left to the end of the channel.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Final

from eventbus import headers as reserved
from eventbus.adapter import Settled
from eventbus.errors import BrokerError, EventBusError
from eventbus.event import Event, new_id
from eventbus.settlement import Delivery, HeaderDelta, Release, Settlement
from eventbus_rabbit import frames
from eventbus_rabbit.consumer import CLOSE_TIMEOUT, RabbitConsumer, receipt_of
from eventbus_rabbit.link import Link
from eventbus_rabbit.messages import Message, incoming, outgoing
from eventbus_rabbit.publisher import Outgoing, Publisher
from eventbus_rabbit.sessions import Receipt, Session

log = logging.getLogger("eventbus.rabbit")
ARRIVAL: Final = 10.0
RELEASED_AT_ONCE: Final = 1000


class SideNotes(Session):
    """The notes of one service, each held by the active consumer: when it dies they are the next one's.

    A note is told by its event's id. A later one takes the place of an earlier one.
    """

    def __init__(self, link: Link, publisher: Publisher, queue: str) -> None:
        super().__init__(lambda deliveries: None)
        self._link = link
        self._publisher = publisher
        self._queue = queue
        self._notes: dict[str, tuple[int, HeaderDelta]] = {}
        self._old: list[int] = []
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self.released: set[str] = set()
        """Events that the former consumer handed back in good order: nobody's suspects."""

    async def take_all(self) -> None:
        """Take all notes there are."""
        wire = await self._link.channel(self)
        self.use(wire)
        await wire.qos(0)
        self.tag = await wire.consume(self._queue)
        ready, _ = await wire.count(self._queue)  # answered after everything that was delivered before
        if ready:
            raise BrokerError(f"{ready} notes in {self._queue} are still on their way; looked for again")
        await self._drop_old()

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        """A note: of a former consumer, or one that we have just written."""
        message = Message(*frames.read_deliver(method), properties, body)
        try:
            note = json.loads(message.body)
            if "released" in note:
                self.released.update(note["released"])
                self._old.append(message.tag)
                return
            event, delta, mark = str(note["event"]), dict(note["headers"]), str(note["mark"])
        except (ValueError, TypeError, KeyError):  # a stranger's
            log.warning("note_unreadable in %s", self._queue)
            self._old.append(message.tag)
            return
        if event in self._notes:
            self._old.append(self._notes[event][0])
        self._notes[event] = (message.tag, delta)
        arrival = self._waiting.pop(mark, None)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def of(self, event: Event) -> HeaderDelta:
        """What is noted of an event."""
        return self._notes.get(_name(event), (0, {}))[1]

    async def write(self, event: Event, delta: HeaderDelta) -> None:
        """Write a note durably; it takes the place of the one before."""
        mark = new_id()
        note = Event("eventbus.note", {"event": _name(event), "headers": dict(delta), "mark": mark})
        arrival = self._waiting[mark] = asyncio.get_running_loop().create_future()
        try:
            await self._send(note)
            async with asyncio.timeout(ARRIVAL):
                await arrival
        except TimeoutError:
            raise BrokerError(f"the note of {event.id} did not come back from {self._queue}") from None
        finally:
            self._waiting.pop(mark, None)
        await self._drop_old()

    async def release(self, events: Sequence[Event]) -> None:
        """Say which events were handed back, so that the next consumer does not suspect them."""
        names = [_name(event) for event in events]
        for start in range(0, len(names), RELEASED_AT_ONCE):
            await self._send(Event("eventbus.note", {"released": names[start : start + RELEASED_AT_ONCE]}))

    async def forget(self, events: Sequence[Event]) -> None:
        """These are settled: their notes go."""
        for event in events:
            found = self._notes.pop(_name(event), None)
            if found is not None:
                self._old.append(found[0])
        await self._drop_old()

    async def _send(self, note: Event) -> None:
        message = outgoing(note, "", self._queue, self._publisher.frame_max)
        if not isinstance(message, Outgoing) or (await self._publisher.send([message]))[0] != "stored":
            raise BrokerError(f"a note was not stored in {self._queue}")

    async def _drop_old(self) -> None:
        tags, self._old = self._old, []
        if tags and self.alive and self.wire is not None:
            await self.wire.write(b"".join(frames.ack(self.wire.number, tag, multiple=False) for tag in tags))


class OrderedRabbitConsumer(RabbitConsumer):
    """The active consumer handles what comes; the others wait at the broker."""

    _notes: SideNotes | None = None
    _noted_session: Session | None = None
    _make_notes: Callable[[], SideNotes]

    def use_notes(self, make: Callable[[], SideNotes]) -> OrderedRabbitConsumer:
        """How its notes are kept."""
        self._make_notes = make
        self._handed_back: dict[Receipt, Event] = {}
        return self

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """The same; but the first delivery on a channel says that we are the active consumer, and so the notes ours."""
        found = await super().receive(limit, timeout)
        if found and self._noted_session is not self._session:
            try:
                await self._take_notes()
            except EventBusError:
                # Without the notes nobody knows what came before: give the place back, and try again.
                session = self._session
                session.end()
                if session.wire is not None:
                    await session.wire.aclose()
                raise
            self._noted_session = self._session
        notes = self._notes
        for delivery in found if notes is not None else ():
            assert notes is not None
            self._apply(delivery, notes)
        return [delivery for delivery in found if receipt_of(delivery).ours]

    async def _take_notes(self) -> None:
        if self._notes is not None:
            await self._end_notes(self._notes)
        notes = self._make_notes()
        try:
            await notes.take_all()
        except BaseException:
            await self._end_notes(notes)
            raise
        self._notes = notes

    async def _end_notes(self, notes: SideNotes) -> None:
        notes.end()
        if notes.wire is not None:
            await notes.wire.aclose()

    def _apply(self, delivery: Delivery, notes: SideNotes) -> None:
        receipt = receipt_of(delivery)
        name = _name(delivery.event)
        if name in notes.released:
            notes.released.discard(name)
            delivery.suspect = False
        noted = notes.of(delivery.event)
        if noted:
            receipt.noted = noted
            mapping = self._subscription.mapping
            story = incoming(receipt.message, self.queue, mapping, back_exchange=self._rejects_from)[1]
            delivery.history = reserved.read_history(reserved.merge(story, noted))

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """What is handed back stays where it is until the channel ends; everything else as ever."""
        rest = [item for item in items if not isinstance(item[1], Release)]
        answers = dict(zip((id(item[0]) for item in rest), await super().settle(rest), strict=True)) if rest else {}
        for delivery, settlement in items:
            if isinstance(settlement, Release):
                answers[id(delivery)] = await self._release(delivery, settlement)
        if self._notes is not None:
            finished = [delivery.event for delivery, _ in rest if answers[id(delivery)] == "done"]
            await self._notes.forget(finished)
        return [answers[id(delivery)] for delivery, _ in items]

    async def _release(self, delivery: Delivery, settlement: Release) -> Settled:
        receipt = receipt_of(delivery)
        if not receipt.ours or receipt in self._handed_back:
            return "lost"
        if settlement.headers and not await self.note(delivery, settlement.headers):
            return "lost"
        self._handed_back[receipt] = delivery.event
        return "done"

    async def note(self, delivery: Delivery, headers: HeaderDelta) -> bool:
        """Beside the queue: the message itself keeps its place."""
        receipt = receipt_of(delivery)
        if not receipt.ours or self._notes is None:
            return False
        delta = {**receipt.noted, **headers}
        await self._notes.write(delivery.event, delta)
        receipt.noted = delta
        return receipt.ours

    async def aclose(self) -> None:
        """Leave everything unsettled in its place; the channel's end gives it to the next consumer, in order."""
        if self._closed:
            return
        session, notes = self._session, self._notes
        try:
            if notes is not None and session.alive:
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    unseen = [self._delivery(session, message) for message in session.buffer]
                    back = [event for receipt, event in self._handed_back.items() if receipt.ours]
                    await notes.release([*back, *(delivery.event for delivery in unseen if not delivery.suspect)])
        except (EventBusError, TimeoutError) as error:
            log.warning("close %s: %s; what was handed back is suspected", self.queue, error)
        finally:
            self._closed = True
            if notes is not None:  # first: whoever is active next must find them
                await self._end_notes(notes)
            session.end()
            if session.wire is not None:
                await session.wire.aclose()
            await self._holding.aclose()
            self._closed_callback(self)


def _name(event: Event) -> str:
    return f"{event.source} {event.id}"
