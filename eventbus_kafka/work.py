"""The consumer of a service's work: its group on the shared topic and on all its retry topics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from eventbus import headers
from eventbus.adapter import Settled, Subscription
from eventbus.errors import BrokerError, UnknownService
from eventbus.failpoints import failpoint
from eventbus.settlement import FRESH, Ack, Delivery, Park, Release, Requeue, Retry, Settlement
from eventbus_kafka import records
from eventbus_kafka.lanes import Lane, receipt_of
from eventbus_kafka.log import LogConsumer
from eventbus_kafka.names import Names, tiers_of
from eventbus_kafka.offsets import NoRoom
from eventbus_kafka.records import Outgoing, Record

if TYPE_CHECKING:
    from eventbus_kafka.adapter import KafkaAdapter

_FATES: Final[dict[bool, Settled]] = {True: "done", False: "lost"}


class WorkConsumer(LogConsumer):
    """A message is settled once it is acknowledged here, or its copy is on a retry or dead-letter topic."""

    def __init__(self, adapter: KafkaAdapter, subscription: Subscription, names: Names) -> None:
        super().__init__(adapter, subscription, names, names.group)
        self.queue = f"{names.main}/{names.group}"
        self._service, self._mapping = subscription.service, subscription.mapping

    async def _wanted_topics(self) -> list[str]:
        names = self._names
        sure = [names.main, *(names.tier(ms) for ms in tiers_of(self._subscription.delays))]
        # A broker may hear of new topics a moment later than the one that made them.
        topics = {**await self._client.topics(), **await self._client.describe(sure)}
        if names.main not in topics or names.redriven not in topics:
            self._client.permitted(names.main, names.redriven)
            raise UnknownService(
                f"{names.service} is not subscribed at {self._client.where}: {names.main} or {names.redriven} is "
                f"missing; provision it first"
            )
        return sorted([names.main, *(topic for topic in topics if names.delay_of(topic) is not None)])

    def _deliver(self, lane: Lane, record: Record) -> Delivery:
        offset, told = record.offset, lane.tier is not None
        story, problem = records.NO_STORY, ""
        event = None if told else records.usual(record)
        if event is None:
            event, story, problem = records.incoming(record, lane.tp, self._mapping, told=told)
        if offset in lane.notes:
            story = {**story, **lane.notes[offset]}
        delivery = Delivery(
            event,
            self._service,
            self.queue,
            (lane, record),
            headers.read_history(story) if story else FRESH,
            offset < lane.legacy_end and lane.is_suspect(offset),
            False,
            problem,
            records.written_at(record),
        )
        lane.held[offset] = delivery
        return delivery

    # --- settle ----------------------------------------------------------------------------------------------

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """Acknowledge at once, which costs nothing; copies are confirmed before their originals count as finished."""
        answers: list[Settled] = ["lost"] * len(items)
        copies: list[int] = []
        released: dict[Lane, list[Record]] = {}
        for place, (delivery, settlement) in enumerate(items):
            lane, record = receipt_of(delivery)
            offset = record.offset
            if lane.fenced or lane.held.get(offset) is not delivery:
                continue
            if offset in lane.notes:  # a note that outlives its message is a crash to the next consumer
                self._commit_soon.set()
            if type(settlement) is Ack:
                lane.finish(offset)
                answers[place] = "done"
            elif isinstance(settlement, Release):
                del lane.held[offset]
                self._change_note(lane, offset, settlement)
                released.setdefault(lane, []).append(record)
                answers[place] = "done"
            else:
                copies.append(place)
        for lane, some in released.items():
            lane.put_back(some)
            self._arrived.set()
        if copies:
            await self._copy(items, copies, answers)
        self._settled.set()
        return answers

    def _change_note(self, lane: Lane, offset: int, release: Release) -> None:
        if release.headers and offset in lane.notes:
            with contextlib.suppress(NoRoom):
                lane.note(offset, release.headers)

    async def _copy(
        self, items: Sequence[tuple[Delivery, Settlement]], places: Sequence[int], answers: list[Settled]
    ) -> None:
        ready: list[Outgoing] = []
        errors: dict[int, BrokerError | None] = {}
        for place in places:
            try:
                ready.append(await self._prepared(*items[place]))
                errors[place] = None
            except BrokerError as problem:  # its road could not be made; the others need another, or none
                errors[place] = problem
        failpoint("kafka.settle.before-copy")
        sent = await self._client.send(ready)
        failpoint("kafka.settle.between-copy-and-commit")
        errors |= zip([place for place in places if errors[place] is None], sent, strict=True)
        failed: list[tuple[Delivery, BrokerError]] = []
        for place, error in errors.items():
            delivery = items[place][0]
            if error is not None:
                answers[place] = "failed"
                failed.append((delivery, error))
                continue
            mine = self._mine(delivery)
            if mine:
                self._finish(delivery)
            answers[place] = _FATES[mine]
        if failed:
            self._adapter.report(*failed[0], others=len(failed) - 1)

    async def _prepared(self, delivery: Delivery, settlement: Settlement) -> Outgoing:
        lane, record = receipt_of(delivery)
        told = lane.tier is not None
        delta = {**lane.notes.get(record.offset, {}), **settlement.headers}  # type: ignore[union-attr]
        if isinstance(settlement, Park):
            letter = records.copy(record, lane.tp, self._names.dlq, delta, told=told)
            if self._adapter.options.dlq_format == "embedded":
                letter = records.with_metadata(letter, delivery.event, self._subscription.service)
            return letter
        assert isinstance(settlement, (Retry, Requeue))
        topic = await self._adapter.road(self._names, max(0.0, settlement.due_at - time.time()))
        if topic not in self._topics:
            self.look_for_topics()
        return records.copy(record, lane.tp, topic, delta, told=told)
