"""SqliteAdapter: the bus in one file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from eventbus.adapter import (
    PARKING_MARGIN,
    Adapter,
    Capabilities,
    Consumer,
    Drift,
    ProvisionMode,
    PublishResult,
    Settled,
    Stats,
    Subscription,
    Topology,
)
from eventbus.embedded.sqlite import names, options, rows
from eventbus.embedded.sqlite import subscriptions as subs
from eventbus.embedded.sqlite.consumers import LetterConsumer, WorkConsumer
from eventbus.embedded.sqlite.failures import FateUnknown, NotStored
from eventbus.embedded.sqlite.letters import EXPIRE_AT_ONCE, Expire, Retention
from eventbus.embedded.sqlite.parking import SqliteParking
from eventbus.embedded.sqlite.publishing import Publish
from eventbus.embedded.sqlite.reader import Reader
from eventbus.embedded.sqlite.renewal import Renewal
from eventbus.embedded.sqlite.store import SqliteStore
from eventbus.embedded.sqlite.watch import Watch
from eventbus.embedded.sqlite.writer import Writer
from eventbus.errors import BrokerError, InvalidEvent
from eventbus.event import Event

_FOR_SOMEBODY: Final = PublishResult("stored", subscribed=True)
_FOR_NOBODY: Final = PublishResult("stored", subscribed=False)


class SqliteAdapter(Adapter):
    """The durable bus of one machine: `sqlite:///bus.db`, or `sqlite:////var/lib/app/bus.db?lease=10s`."""

    name = "sqlite"
    capabilities = Capabilities(
        durable=True,
        multi_process=True,
        delay_precision="never early, at most 250 ms late",
        exact_depth=True,
        fair_receive=True,
        key_order=True,
        max_event_bytes=16 * 1024 * 1024,
    )

    def __init__(self, settings: options.Options) -> None:
        self.options = settings
        self.path = settings.path
        self.background: set[asyncio.Future[list[Settled]]] = set()
        """Hand-backs of cancelled receives, awaited before the file is closed."""
        self.capabilities = replace(type(self).capabilities, max_event_bytes=settings.max_event_bytes)
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._watch: Watch | None = None
        self.renewal = Renewal(settings.lease)

    @classmethod
    def from_url(cls, url: str, settings: Mapping[str, object]) -> SqliteAdapter:
        """`sqlite:///relative/file`, `sqlite:////absolute/file`; settings in the query or in the [sqlite] table."""
        return cls(options.read(url, settings))

    # --- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the file, made or migrated where needed. Nothing happens if it is open."""
        if self._writer is not None:
            return
        watch = Watch(self.path)
        self.renewal = Renewal(self.options.lease)
        writer = Writer(self.path, self.options.lock_timeout, watch.committed)
        await writer.start()
        self._writer, self._watch, self._reader = writer, watch, Reader(self.path)
        if self.options.dlq_max_age is not None or self.options.dlq_max_entries is not None:
            await self._expire_all()

    async def aclose(self) -> None:
        """Finish what is queued, and close."""
        if self._writer is None or self._reader is None or self._watch is None:
            return
        if self.background:
            await asyncio.gather(*self.background, return_exceptions=True)
        self.renewal.close()
        writer, reader, watch = self._writer, self._reader, self._watch
        self._writer = self._reader = self._watch = None
        if writer.foreign:
            return  # a fork's copy: threads and locks belong to the parent
        await watch.aclose()
        await reader.aclose()
        await writer.stop()

    @property
    def writer(self) -> Writer:
        """The open writer; BrokerError while the bus is closed, or after a fork."""
        if self._writer is None:
            raise BrokerError(f"{self.path} is not open; use the bus inside `async with Bus(...) as bus:`")
        self._writer.check()
        return self._writer

    @property
    def reader(self) -> Reader:
        """The open reader."""
        self.writer.check()
        assert self._reader is not None
        return self._reader

    @property
    def watch(self) -> Watch:
        """The open watch."""
        self.writer.check()
        assert self._watch is not None
        return self._watch

    # --- topology --------------------------------------------------------------------------------------------

    def topology(self, subscriptions: Sequence[Subscription]) -> Topology:
        """A log per prefix; a subscription and a dead-letter queue per service."""
        return names.topology(subscriptions, self.options)

    async def provision(self, subscriptions: Sequence[Subscription], mode: ProvisionMode) -> list[Drift]:
        """Subscribe the services at the end of their logs."""
        if mode == "off":
            return []
        drifts = []
        for sub in subscriptions:
            found = await self.reader.query(partial(subs.find, service=sub.service, prefix=sub.prefix))
            if found is not None:
                continue
            if mode == "verify":
                drifts.append(Drift(names.queue(sub.service, sub.prefix), "subscription", "missing", "present"))
            else:
                await self.writer.submit(subs.Subscribe(sub.service, sub.prefix))
        return drifts

    async def unsubscribe(self, service: str, prefix: str) -> None:
        """Undo provision; refused while the service has messages or dead letters."""
        await self.writer.submit(subs.Unsubscribe(service, prefix, self.path))

    # --- publish, consume ------------------------------------------------------------------------------------

    async def publish(self, prefix: str, events: Sequence[Event]) -> list[PublishResult]:
        """Append to the prefix's log; returns once the disk has it."""
        results: list[PublishResult] = [_FOR_SOMEBODY] * len(events)
        room, lines, places = self.options.max_event_bytes - PARKING_MARGIN, [], []
        for place, event in enumerate(events):
            try:
                row = rows.to_row(event)
            except InvalidEvent as error:
                results[place] = PublishResult("refused", str(error))
                continue
            if len(event.body) + len(row[-1] or "") > room:
                results[place] = PublishResult("refused", f"larger than {room} bytes (sqlite.max_event_bytes)")
                continue
            lines.append(row)
            places.append(place)
        if not lines:
            return results
        try:
            answer = _FOR_SOMEBODY if await self.writer.submit(Publish(prefix, lines)) else _FOR_NOBODY
        except NotStored as error:
            answer = PublishResult("refused", str(error), later=True)
        except FateUnknown as error:
            answer = PublishResult("unknown", str(error))
        if answer is not _FOR_SOMEBODY:
            for place in places:
                results[place] = answer
        return results

    def consume(self, subscription: Subscription) -> Consumer:
        """A consumer of the service's queue, or of its dead letters."""
        return LetterConsumer(self, subscription) if subscription.dead_letters else WorkConsumer(self, subscription)

    # --- look ------------------------------------------------------------------------------------------------

    def parking(self, service: str, prefix: str) -> SqliteParking:
        """The service's dead letters."""
        return SqliteParking(self, service, prefix)

    async def stats(self, service: str, prefix: str) -> Stats:
        """Exact depths."""
        now = int(self.now() * 1000)
        found = await self.reader.query(lambda connection: subs.count(connection, service, prefix, now))
        if found is None:
            raise subs.unknown(service, self.path)
        return found

    def store(self) -> SqliteStore:
        """In the same file, by a connection of its own."""
        return SqliteStore(self.path, self.options.lock_timeout)

    def now(self) -> float:
        """The time that all processes on this machine share."""
        return time.time()

    def retention(self, service: str) -> Retention:
        """How long, and how many, dead letters of a service are kept."""
        return Retention(service, self.options.dlq_max_age, self.options.dlq_max_entries)

    async def _expire_all(self) -> None:
        found = await self.reader.query(lambda c: c.execute("SELECT id, service FROM subscriptions").fetchall())
        for number, service in found:
            while await self.writer.submit(Expire(number, self.retention(service))) >= EXPIRE_AT_ONCE:
                pass
