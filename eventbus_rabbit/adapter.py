"""RabbitAdapter: the seam of the event bus on RabbitMQ."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from aio_pika.abc import AbstractConnection

from eventbus.adapter import (
    Adapter,
    BodyMapping,
    Capabilities,
    Consumer,
    Drift,
    ProvisionMode,
    PublishResult,
    Stats,
    Subscription,
    Topology,
)
from eventbus.errors import BrokerError, EventBusError
from eventbus.event import Event
from eventbus.failpoints import failpoint
from eventbus_rabbit import options as reading
from eventbus_rabbit._errors import NotFound
from eventbus_rabbit.consumer import RabbitConsumer
from eventbus_rabbit.depths import Depths
from eventbus_rabbit.holding import Holding
from eventbus_rabbit.letters import RabbitDeadLetterConsumer
from eventbus_rabbit.link import Link
from eventbus_rabbit.messages import outgoing
from eventbus_rabbit.names import Names, exchange_of, names_of, publish_key
from eventbus_rabbit.options import Options
from eventbus_rabbit.ordered import OrderedRabbitConsumer, SideNotes
from eventbus_rabbit.parking import RabbitParking
from eventbus_rabbit.provisioning import Provisioner
from eventbus_rabbit.publisher import Outgoing, Publisher
from eventbus_rabbit.roads import Roads
from eventbus_rabbit.scanning import Scanner
from eventbus_rabbit.topology import Queue, check_distinct, definitions, describe, exchanges, queues, weaknesses

log = logging.getLogger("eventbus.rabbit")
_STORED = PublishResult("stored", subscribed=True)
_STORED_FOR_NOBODY = PublishResult("stored", subscribed=False)
_REFUSED_BY_QUEUE = PublishResult("unknown", "a queue refused it (length limit?); other services may have it")
_UNKNOWN = PublishResult("unknown", "RabbitMQ did not confirm it in time")


class RabbitAdapter(Adapter):
    """One RabbitMQ vhost. `RabbitAdapter(connection=...)` uses an aio-pika connection of yours."""

    name = "rabbitmq"
    capabilities = Capabilities(
        durable=True,
        multi_process=True,
        delay_precision="tiers; the worker waits for the exact time",
        exact_depth=False,
        key_order=True,
        max_event_bytes=16 * 1024 * 1024,
    )

    def __init__(
        self,
        options: Options | None = None,
        *,
        connection: AbstractConnection | None = None,
        consuming: AbstractConnection | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """From options, or from ready-made connections: one for all, or a second one for consuming."""
        self._options = options or reading.with_settings(settings or {})
        if options is None and connection is None:
            raise TypeError("RabbitAdapter needs a connection; or use RabbitAdapter.from_url")
        timeout = self._options.timeout
        self._publishing = Link(self._options, "publishing", connection)
        self._consuming = Link(self._options, "consuming", consuming or connection)
        self._publisher = Publisher(self._publishing, timeout)
        # A channel of their own: a copy that finds no exchange closes it, and events beside it would be unknown.
        self._copies = Publisher(self._publishing, timeout)
        quorum = self._options.queue_type == "quorum"
        self._provisioner = Provisioner(self._consuming, self._options.settling if quorum else 0.0)
        self._depths = Depths(self._consuming, self._consumers_of)
        self._consumers: list[RabbitConsumer] = []
        self._roads: dict[tuple[str, str], Roads] = {}
        self._exchanges: set[str] = set()

    @classmethod
    def from_url(cls, url: str, settings: Mapping[str, object]) -> RabbitAdapter:
        """`amqp://user:password@host:port/vhost?option=value`; the table is [rabbit]."""
        return cls(reading.read(url, settings))

    async def open(self) -> None:
        """Connect both links."""
        await self._consuming.open()
        try:
            await self._publishing.open()
        except EventBusError:
            await self._consuming.aclose()
            raise
        for weakness in weaknesses(self._options.queue_type, self._options.retry, self._consuming.version):
            log.warning(weakness)

    async def aclose(self) -> None:
        """Disconnect."""
        await self._publisher.aclose()
        await self._copies.aclose()
        await self._publishing.aclose()
        await self._consuming.aclose()

    # --- topology --------------------------------------------------------------------------------------------

    def topology(self, subscriptions: Sequence[Subscription]) -> Topology:
        """Exchanges, queues and bindings."""
        plans = [self._plan(sub) for sub in subscriptions]
        check_distinct(plans)
        return describe(plans)

    def definitions(self, topology: Topology) -> dict[str, object]:
        """`definitions.json`, as `rabbitmqctl import_definitions` reads it."""
        return definitions(topology, self._options.vhost)

    async def provision(self, subscriptions: Sequence[Subscription], mode: ProvisionMode) -> list[Drift]:
        """Make what is missing; compare what is there."""
        if mode == "off":
            return []
        plans = [self._plan(sub) for sub in subscriptions]
        check_distinct(plans)
        drifts: list[Drift] = []
        for names, wanted in plans:
            found, roads = await self._provisioner.provision(names, wanted, mode)
            drifts += found
            known = self._roads_of(names)
            known.may_create = mode == "create"
            known.known = roads or known.known
            for queue in wanted:
                self._depths.made(queue.name)
        return drifts

    def _plan(self, sub: Subscription) -> tuple[Names, list[Queue]]:
        names = self._names(sub.service, sub.prefix)
        return names, queues(names, sub, self._options.queue_type, self._consuming.version)

    def _names(self, service: str, prefix: str) -> Names:
        return names_of(self._options.layout, service, prefix)

    def _roads_of(self, names: Names) -> Roads:
        key = (names.service, names.prefix)
        if key not in self._roads:
            self._roads[key] = Roads(names, self._options.queue_type, self._provisioner, self._depths.made)
        return self._roads[key]

    async def unsubscribe(self, service: str, prefix: str) -> None:
        """Unbind, look once more whether something came, then delete the service's queues."""
        names = self._names(service, prefix)
        await self._refuse_while_in_use(names)
        sub = Subscription(service, prefix)
        async with self._consuming.throwaway() as wire:
            # Bindings by pattern are not known here; deleting the queue takes them away with it.
            for key in names.bindings(()) if names.layout.exchange_type != "topic" else ():
                await wire.unbind(names.queue, names.exchange, key)
        try:
            await self._refuse_while_in_use(names)
        except BrokerError:
            async with self._consuming.throwaway() as wire:
                for key in names.bindings(sub.patterns):
                    await wire.bind(names.queue, names.exchange, key)
            raise
        async with self._consuming.throwaway() as wire:
            every = (names.tier_queue(ms) for ms in names.tiers())
            for queue in (names.queue, names.retry_queue, *every, names.dead_letter_queue, names.notes_queue):
                await wire.delete_queue(queue)  # deleting what is not there is no error
            for exchange in exchanges(names):
                if exchange.name != names.exchange:
                    await wire.delete_exchange(exchange.name)
        self._roads.pop((service, prefix), None)

    async def _refuse_while_in_use(self, names: Names) -> None:
        stats = await self._depths.stats(names, names.tiers())
        left = stats.ready + stats.inflight + stats.delayed + stats.parked
        if left:
            raise BrokerError(f"{names.service} still has {left} messages; consume, re-drive or purge them first")
        async with self._consuming.throwaway() as wire:
            _, consumers = await wire.count(names.queue)
        if consumers:
            raise BrokerError(f"{names.service} still has {consumers} consumers; stop them first")

    # --- publishing ------------------------------------------------------------------------------------------

    async def publish(self, prefix: str, events: Sequence[Event]) -> list[PublishResult]:
        """Publish to the main exchange; each event is confirmed by all queues that take it."""
        layout = self._options.layout
        exchange = exchange_of(layout, prefix)
        if exchange not in self._exchanges:
            if not await self._is_there(exchange):
                return [_STORED_FOR_NOBODY] * len(events)  # nobody ever subscribed here
            self._exchanges.add(exchange)
        frame_max = self._publisher.frame_max
        ready = [outgoing(event, exchange, publish_key(layout, prefix, event.type), frame_max) for event in events]
        messages = [message for message in ready if isinstance(message, Outgoing)]
        failpoint("rabbit.publish.before")
        answers = iter(await self._publisher.send(messages))
        failpoint("rabbit.publish.after")
        results = []
        for message in ready:
            if isinstance(message, str):
                results.append(PublishResult("refused", message))
                continue
            answer = next(answers)
            if answer == "stored":
                results.append(_STORED)
            elif answer == "unrouted":
                results.append(_STORED_FOR_NOBODY)
            else:
                results.append(_REFUSED_BY_QUEUE if answer == "refused" else _UNKNOWN)
                self._exchanges.discard(exchange)  # it may be gone: look again next time
        return results

    async def _is_there(self, exchange: str) -> bool:
        try:
            async with self._publishing.throwaway() as wire:
                await wire.declare_exchange(exchange, self._options.layout.exchange_type, passive=True)
        except NotFound:
            return False
        return True

    # --- consuming -------------------------------------------------------------------------------------------

    def consume(self, subscription: Subscription) -> Consumer:
        """A consumer of the service's queue or dead letters."""
        names = self._names(subscription.service, subscription.prefix)
        if subscription.dead_letters:
            return RabbitDeadLetterConsumer(self._consuming, names, subscription)
        roads = self._roads_of(names)

        async def repair() -> None:
            if roads.may_create:
                await self.provision([subscription], "create")

        options = self._options
        holding = Holding(self._consuming, self._copies, names, options.queue_type, self._provisioner.settling)
        kind = OrderedRabbitConsumer if subscription.ordered else RabbitConsumer
        consumer = kind(
            self._consuming,
            self._copies,
            names,
            roads,
            subscription,
            prefetch=min(self._options.prefetch or subscription.prefetch, 65_535),
            holding=holding,
            reject_to_retry=self._options.retry == "dead-letter",
            repair=repair,
            closed=self._closed,
        )
        holding.lost = consumer.tell_lost
        if isinstance(consumer, OrderedRabbitConsumer):
            consumer.use_notes(lambda: SideNotes(self._consuming, self._copies, names.notes_queue))
        self._consumers.append(consumer)
        return consumer

    def _closed(self, consumer: RabbitConsumer) -> None:
        if consumer in self._consumers:
            self._consumers.remove(consumer)

    def _consumers_of(self, queue: str) -> list[RabbitConsumer]:
        return [consumer for consumer in self._consumers if consumer.queue == queue]

    # --- looking ---------------------------------------------------------------------------------------------

    def parking(self, service: str, prefix: str) -> RabbitParking:
        """The service's dead letters."""
        names = self._names(service, prefix)
        rotates = self._options.queue_type == "quorum"
        scanner = Scanner(self._consuming, self._copies, names.dead_letter_queue, quorum=rotates)
        roads = self._roads_of(names)
        return RabbitParking(scanner, self._copies, names, roads, BodyMapping(), rotates=rotates)

    async def stats(self, service: str, prefix: str) -> Stats:
        """Depths; what consumers in other processes hold is not counted."""
        names = self._names(service, prefix)
        return await self._depths.stats(names, names.tiers())
