"""RedisAdapter: the bus on Redis Streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from eventbus import telemetry
from eventbus.adapter import (
    Adapter,
    Capabilities,
    Consumer,
    Drift,
    ProvisionMode,
    PublishResult,
    Stats,
    Subscription,
    Topology,
)
from eventbus.errors import BrokerError, EventBusError, UnknownService
from eventbus.event import Event
from eventbus_redis import _scripts, options, preconditions
from eventbus_redis._client import AnyClient, Client
from eventbus_redis.letters import LetterConsumer
from eventbus_redis.ordered import OrderedConsumer
from eventbus_redis.parking import RedisParking
from eventbus_redis.publishing import Outbox
from eventbus_redis.store import RedisStore
from eventbus_redis.topology import topology
from eventbus_redis.turns import FairConsumer
from eventbus_redis.work import WorkConsumer

TRIM_GUARD: Final = 400
TRIM_AT_ONCE: Final = 100_000
EXPIRE_AT_ONCE: Final = 500
COUNTED: Final = 100_000
COUNTED_AT_ONCE: Final = 100
REPORT_INTERVAL: Final = 30.0


class RedisAdapter(Adapter):
    """The bus on Redis: `redis://host:6379/0`, `rediss://user:password@host`, `redis://s1,s2?sentinel=mymaster`."""

    name = "redis"
    capabilities = Capabilities(
        durable=True,
        multi_process=True,
        delay_precision="never early, at most 250 ms late",
        exact_depth=True,
        fair_receive=True,
        key_order=True,
        max_event_bytes=16 * 1024 * 1024,
    )

    def __init__(self, settings: options.Options, client: AnyClient | None = None) -> None:
        self.options = settings
        self.client = Client(settings, client)
        # The size limit is a setting here, and so differs between instances: past the ClassVar by intent.
        vars(self)["capabilities"] = replace(type(self).capabilities, max_event_bytes=settings.max_event_bytes)
        self._outboxes: dict[str, Outbox] = {}
        self._known: set[tuple[str, str]] = set()
        self._reported: dict[str, float] = {}
        self._late = 0
        self._looked: dict[str, float] = {}
        self._looking: set[asyncio.Task[None]] = set()

    @classmethod
    def from_url(cls, url: str, settings: Mapping[str, object]) -> RedisAdapter:
        """The forms are in docs/redis.md; settings in the query or in the [redis] table."""
        return cls(options.read(url, settings))

    @classmethod
    def from_client(cls, client: AnyClient, **settings: object) -> RedisAdapter:
        """On a client made by the application (redis.asyncio.Redis or RedisCluster); it stays the application's."""
        return cls(options.read("redis://ready-made", settings), client)

    # --- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, and check what the promise rests on."""
        await self.client.open()
        try:
            self._late = await preconditions.check(self.client)
        except BrokerError:
            await self.client.aclose()
            raise

    async def aclose(self) -> None:
        """Finish what is being published, and disconnect."""
        await asyncio.gather(*(outbox.aclose() for outbox in self._outboxes.values()), *self._looking)
        self._outboxes.clear()
        self._known.clear()
        await self.client.aclose()

    # --- topology --------------------------------------------------------------------------------------------

    def topology(self, subscriptions: Sequence[Subscription]) -> Topology:
        """A stream per prefix; a group, a stream, a sorted set and dead letters per service."""
        return topology(subscriptions, self.options)

    async def provision(self, subscriptions: Sequence[Subscription], mode: ProvisionMode) -> list[Drift]:
        """Make the consumer groups, at the end of their streams."""
        drifts: list[Drift] = []
        for sub in subscriptions if mode != "off" else ():
            keys = self.options.names.of_service(sub.service, sub.prefix)
            if mode == "create":
                await self.client.run(
                    _scripts.SUBSCRIBE, (keys.main, keys.services, keys.queue), (sub.service, "create")
                )
                self._known.add((sub.service, sub.prefix))
            elif await self.client.field(keys.services, sub.service) is None:
                drifts.append(Drift(f"{keys.main} {sub.service}", "subscription", "missing", "present"))
        return drifts

    async def unsubscribe(self, service: str, prefix: str) -> None:
        """Undo provision; refused while the service has messages or dead letters."""
        k = self.options.names.of_service(service, prefix)
        mine = (k.queue, k.retry, k.payload, k.notes, k.reader, k.turns, k.turns_number)
        keys = (k.main, k.services, *mine, *k.letters)
        left = await self.client.run(_scripts.UNSUBSCRIBE, keys, (service,))
        if left < 0:
            raise self._unknown(service)
        if left:
            raise BrokerError(f"{service} still has {left} messages; consume, re-drive or purge them first")
        self._known.discard((service, prefix))

    async def check_subscribed(self, service: str, prefix: str) -> None:
        """UnknownService for a service that nobody has provisioned; asked once."""
        if (service, prefix) in self._known:
            return
        if await self.client.field(self.options.names.of_prefix(prefix).services, service) is None:
            raise self._unknown(service)
        self._known.add((service, prefix))

    # --- publish, consume ------------------------------------------------------------------------------------

    async def publish(self, prefix: str, events: Sequence[Event]) -> list[PublishResult]:
        """Add to the prefix's stream; returns once the server has it."""
        outbox = self._outboxes.get(prefix)
        if outbox is None:
            outbox = self._outboxes[prefix] = Outbox(self.client, prefix)
        results = await outbox.publish(events)
        self._look_after(prefix)
        return results

    def consume(self, subscription: Subscription) -> Consumer:
        """A consumer of the service's queue, or of its dead letters."""
        if subscription.dead_letters:
            return LetterConsumer(self, subscription)
        if subscription.ordered:
            return OrderedConsumer(self, subscription)
        return (FairConsumer if subscription.fairness else WorkConsumer)(self, subscription)

    def store(self) -> RedisStore:
        """On the same server, by the same connections."""
        return RedisStore(self.client)

    # --- look ------------------------------------------------------------------------------------------------

    def parking(self, service: str, prefix: str) -> RedisParking:
        """The service's dead letters."""
        return RedisParking(self, service, prefix)

    async def stats(self, service: str, prefix: str) -> Stats:
        """Depths. A few unread entries are counted; many are the server's own figure, which `exact` tells apart."""
        k = self.options.names.of_service(service, prefix)
        keys = (k.main, k.services, k.queue, k.retry, k.dlq, k.turns_number)
        found = await self.client.run(_scripts.STATS, keys, (service, COUNTED_AT_ONCE))
        if found == -1:
            raise self._unknown(service)
        unread, counted, last, pending, queued, waiting, delayed, due, parked, age = found
        exact = counted > 0
        if counted < 0:
            unread, exact = await self._count(k.main, last.decode())
        return Stats(
            ready=unread + max(0, queued - waiting) + due,
            inflight=pending + waiting,
            delayed=delayed - due,
            parked=parked,
            oldest_parked=None if age < 0 else age / 1000,
            exact=exact,
        )

    async def _count(self, stream: str, after: str) -> tuple[int, bool]:
        number = 0
        while number < COUNTED:
            page = await self.client.entries(stream, f"({after}", 1000)
            number += len(page)
            if len(page) < 1000:
                return number, True
            after = page[-1][0].decode()
        return number, False

    # --- keep house ------------------------------------------------------------------------------------------

    def _look_after(self, prefix: str) -> None:
        """Publishers look too, now and then: where no consumer runs any more, nobody else would report it."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._looked.get(prefix, -REPORT_INTERVAL) < REPORT_INTERVAL:
            return
        self._looked[prefix] = loop.time()
        look = loop.create_task(self._look(prefix), name=f"eventbus redis look {prefix}")
        self._looking.add(look)
        look.add_done_callback(self._looking.discard)

    async def _look(self, prefix: str) -> None:
        try:
            await self.trim(prefix)
        except EventBusError as error:
            telemetry.log(logging.WARNING, "trim_failed", {"prefix": prefix, "error": str(error)})

    async def trim(self, prefix: str) -> None:
        """Remove from the shared stream what every service has finished; report who holds it back."""
        keys = self.options.names.of_prefix(prefix)
        while True:
            found = await self.client.run(
                _scripts.TRIM, (keys.main, keys.services, keys.guard), (TRIM_GUARD, TRIM_AT_ONCE)
            )
            if not found:
                return
            await self._report(prefix, keys.main, found[1], found[2:])
            if found[0] < TRIM_AT_ONCE:
                return
            await asyncio.sleep(TRIM_GUARD / 1000)

    async def _report(self, prefix: str, stream: str, length: int, rows: Sequence[Any]) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reported.get(prefix, -REPORT_INTERVAL) < REPORT_INTERVAL:
            return
        self._reported[prefix] = now
        self._late = await preconditions.check_again(self.client, self._late)
        size = 0
        for place in range(0, len(rows), 4):
            service, _, unread, pending = rows[place : place + 4]
            behind = (unread if unread >= 0 else length) + pending
            if behind < self.options.lag_warning:
                continue
            size = size or await self.client.memory_of(stream)
            telemetry.log(
                logging.WARNING,
                "service_lagging",
                {
                    "service": service.decode(),
                    "stream": stream,
                    "messages": behind,
                    "bytes": size * min(behind, length) // max(1, length),
                    "fix": "start more replicas, or unsubscribe the service if nobody needs it any more",
                },
            )

    async def expire(self, service: str, prefix: str) -> int:
        """Remove dead letters that are too old or too many, oldest first; counted and logged."""
        k, settings = self.options.names.of_service(service, prefix), self.options
        age = -1 if settings.dlq_max_age is None else round(settings.dlq_max_age * 1000)
        most = -1 if settings.dlq_max_entries is None else settings.dlq_max_entries
        total_old = total_many = 0
        while True:
            old: int
            many: int
            old, many = await self.client.run(_scripts.LETTERS_EXPIRE, k.letters, (age, most, EXPIRE_AT_ONCE))
            total_old, total_many = total_old + old, total_many + many
            if old + many < EXPIRE_AT_ONCE:
                break
        if total_old or total_many:
            telemetry.purged.add(total_old + total_many, {"service": service, "reason": "retention"})
            telemetry.log(
                logging.WARNING,
                "dlq_expired",
                {"service": service, "queue": k.dlq, "too_old": total_old, "too_many": total_many},
            )
        return total_old + total_many

    def _unknown(self, service: str) -> UnknownService:
        return UnknownService(f"{service} is not subscribed at {self.client.address}; provision it first")
