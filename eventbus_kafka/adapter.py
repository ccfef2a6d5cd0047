"""KafkaAdapter: the bus on Apache Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from eventbus import headers, telemetry
from eventbus.adapter import (
    PARKING_MARGIN,
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
from eventbus.errors import BrokerError, BrokerUnavailable, ConfigError, InvalidEvent, UnknownService
from eventbus.event import Event
from eventbus.failpoints import failpoint
from eventbus.scheduling.tiers import TIERS, tier_for
from eventbus.settlement import Delivery
from eventbus_kafka import names as naming
from eventbus_kafka import options as reading
from eventbus_kafka import records
from eventbus_kafka._client import Client
from eventbus_kafka._errors import Refused, TooLarge
from eventbus_kafka.letters import LetterConsumer
from eventbus_kafka.log import LogConsumer
from eventbus_kafka.names import Names, main_topic, names_of
from eventbus_kafka.offsets import decode
from eventbus_kafka.parking import KafkaParking
from eventbus_kafka.provisioning import Provisioner
from eventbus_kafka.state import Letters
from eventbus_kafka.work import WorkConsumer

TOPICS_AGE: Final = 30.0
ROAD_AGAIN: Final = 1.0
"""Seconds between two attempts at making a retry topic while nobody answers."""
FEW_BYTES: Final = 32 * 1024
"""More than attributes and headers of an event take: a body far below the limit needs no counting."""
_STORED: Final = PublishResult("stored")
_FOR_NOBODY: Final = PublishResult("stored", subscribed=False)


class KafkaAdapter(Adapter):
    """The bus on Kafka: `kafka://host:9092,other:9092`, `kafka://user:password@host:9093?tls=true`."""

    name = "kafka"
    capabilities = Capabilities(
        durable=True,
        multi_process=True,
        delay_precision="tiers; the worker waits for the exact time",
        exact_depth=False,
        key_order=True,
        max_event_bytes=1024 * 1024,
    )

    def __init__(self, settings: reading.Options, client: Mapping[str, object] | None = None) -> None:
        self.options = settings
        self.client = Client(settings, client)
        self.capabilities = replace(type(self).capabilities, max_event_bytes=settings.max_event_bytes)
        self._provisioner = Provisioner(self)
        self._consumers: list[LogConsumer] = []
        self._letters: dict[str, Letters] = {}
        self._owners: dict[tuple[str, str], tuple[str, str]] = {}
        self._making = asyncio.Lock()
        self._closed_roads: set[str] = set()
        self._no_road: tuple[float, BrokerUnavailable] | None = None

    @classmethod
    def from_url(cls, url: str, settings: Mapping[str, object]) -> KafkaAdapter:
        """The forms are in docs/kafka.md; settings in the query or in the [kafka] table."""
        return cls(reading.read(url, settings))

    @classmethod
    def from_client(cls, client: Mapping[str, object], **settings: object) -> KafkaAdapter:
        """On connection parameters of aiokafka, such as an `ssl_context` or `sasl_oauth_token_provider` of yours."""
        return cls(reading.read("kafka://ready-made", settings), client)

    # --- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect."""
        await self.client.open()

    async def aclose(self) -> None:
        """Finish what is being written, and disconnect."""
        self._letters.clear()
        await self.client.aclose()

    def opened(self, consumer: LogConsumer) -> None:
        """A consumer begins."""
        self._consumers.append(consumer)

    def closed(self, consumer: LogConsumer) -> None:
        """A consumer has ended."""
        if consumer in self._consumers:
            self._consumers.remove(consumer)

    async def say_all(self, asking: LogConsumer) -> None:
        """See that what all other consumers here noted and took back is committed, as far as they may commit now."""
        for consumer in list(self._consumers):  # one may close meanwhile
            if consumer is not asking:
                with contextlib.suppress(BrokerError):  # its group moves: it commits later, or is another's by then
                    await consumer.say()

    # --- topology --------------------------------------------------------------------------------------------

    def topology(self, subscriptions: Sequence[Subscription]) -> Topology:
        """A topic per prefix; retry topics, dead letters and their state per service."""
        return naming.topology(subscriptions, self.options)

    async def provision(self, subscriptions: Sequence[Subscription], mode: ProvisionMode) -> list[Drift]:
        """Make the topics, and commit the ends of the shared one for a new group."""
        return await self._provisioner.provision(subscriptions, mode)

    async def unsubscribe(self, service: str, prefix: str) -> None:
        """Undo provision; refused while the service has messages, dead letters or consumers."""
        names = self.names(service, prefix)
        stats = await self.stats(service, prefix)
        left = stats.ready + stats.inflight + stats.delayed + stats.parked
        if left:
            raise BrokerError(f"{service} still has {left} messages; consume, re-drive or purge them first")
        await self.client.delete_group(names.group)
        await self.client.delete_group(names.readers)
        tiers = [topic for topic in await self.client.topics() if names.delay_of(topic) is not None]
        await self.client.delete([*tiers, names.dlq, names.state])
        self._letters.pop(names.dlq, None)

    def names(self, service: str, prefix: str) -> Names:
        """The names of a service; ConfigError where another service has one of them."""
        found = names_of(self.options.names, service, prefix)
        mine = {"group": found.group, "dlq": found.dlq, "dlq_state": found.state, "retry": found.retry}
        for key, name in mine.items():
            owner = self._owners.setdefault((key, name), (prefix, service))
            if owner != (prefix, service):
                both = f"{owner[1]} and {service} would share {name!r}, and take each other's events"
                raise ConfigError(f"kafka.names.{key}: {both}; put {{service}} into it")
        return found

    def letters(self, names: Names) -> Letters:
        """What is known of a service's dead letters; shared by all who ask here."""
        return self._letters.setdefault(names.dlq, Letters(self.client, names.state))

    async def road(self, names: Names, delay: float) -> str:
        """The retry topic for a delay, made if there is none near it; one that may not be made is done without."""
        known = sorted(ms for ms in map(names.delay_of, self.client.known) if ms is not None) or [0]
        ms = tier_for(known, delay)
        wanted = round(delay * 1000)
        if wanted < TIERS[0] or ms * 2 > wanted or names.main in self._closed_roads:
            return names.tier(ms)
        better = tier_for(TIERS, delay)
        if better <= ms:
            return names.tier(ms)
        async with self._making:
            if self._no_road is not None and asyncio.get_running_loop().time() < self._no_road[0]:
                raise self._no_road[1].with_traceback(None)  # hundreds may want one: they shall not wait in a row
            topic = naming.tier_topic(names, better, self.options)
            try:
                if not await self.client.partitions(topic.name):
                    await self._provisioner.create([topic])
            except Refused as error:
                self._closed_roads.add(names.main)  # no right to create: the roads there are must do
                fields = {"service": names.service, "topic": topic.name, "error": str(error)}
                telemetry.log(logging.WARNING, "road_refused", fields)
                return names.tier(ms)
            except BrokerUnavailable as error:
                self._no_road = asyncio.get_running_loop().time() + ROAD_AGAIN, error
                raise
        for consumer in self._consumers:
            consumer.look_for_topics()
        return topic.name

    # --- publish, consume ------------------------------------------------------------------------------------

    async def publish(self, prefix: str, events: Sequence[Event]) -> list[PublishResult]:
        """Write to the shared topic; returns once all in-sync replicas have it."""
        topic = main_topic(self.options.names, prefix)
        try:
            if not await self.client.partitions(topic):
                return [await self._for_nobody(prefix, topic)] * len(events)
        except Refused as error:
            return [_refused(error)] * len(events)
        results: list[PublishResult] = [_STORED] * len(events)
        room = self.options.max_event_bytes - PARKING_MARGIN
        ready: list[records.Outgoing] = []
        places: list[int] = []
        for place, event in enumerate(events):
            try:
                record = records.outgoing(event, topic)
            except InvalidEvent as error:
                results[place] = PublishResult("refused", str(error))
                continue
            if len(event.body) > room // 2 - FEW_BYTES and records.size_of(record) > room:
                results[place] = PublishResult("refused", f"larger than {room} bytes (kafka.max_event_bytes)")
                continue
            ready.append(record)
            places.append(place)
        failpoint("kafka.publish.before")
        answers = await self.client.send(ready)
        failpoint("kafka.publish.after")
        for place, answer in zip(places, answers, strict=True):
            if answer is not None:
                results[place] = _refused(answer)
        return results

    async def _for_nobody(self, prefix: str, topic: str) -> PublishResult:
        """There is no shared topic: nobody ever subscribed, or somebody deleted it."""
        signs = naming.subscriptions_in(self.options.names, prefix, await self.client.topics(age=TOPICS_AGE))
        if not signs:
            return _FOR_NOBODY
        problem = f"topic {topic} is gone, but services are subscribed ({', '.join(signs)}); provision them again"
        return PublishResult("refused", f"{self.client.where}: {problem}", later=True)

    def consume(self, subscription: Subscription) -> Consumer:
        """A consumer of the service's work, or of its dead letters."""
        names = self.names(subscription.service, subscription.prefix)
        return (LetterConsumer if subscription.dead_letters else WorkConsumer)(self, subscription, names)

    def report(self, delivery: Delivery, error: BrokerError, *, others: int = 0) -> None:
        """Say why a copy could not be written, and how many others with it; the messages stay where they are."""
        telemetry.log(logging.ERROR, "copy_failed", telemetry.about(delivery) | {"others": others, "error": str(error)})

    # --- look ------------------------------------------------------------------------------------------------

    def parking(self, service: str, prefix: str) -> KafkaParking:
        """The service's dead letters."""
        return KafkaParking(self, self.names(service, prefix))

    async def stats(self, service: str, prefix: str) -> Stats:
        """Depths by offsets: what is committed, less what the commit says is finished beyond it.

        What consumers of other processes hold counts as ready; offsets that no message has count as messages.
        """
        names = self.names(service, prefix)
        topics = await self._topics(names)
        if names.redriven not in topics or names.main not in topics:
            self.client.permitted(names.main, names.redriven)
            raise UnknownService(f"{service} is not subscribed at {self.client.where}; provision it first")
        tiers = [topic for topic in topics if names.delay_of(topic) is not None]
        partitions = [(topic, number) for topic in [names.main, *tiers] for number in range(topics[topic])]
        committed = await self.client.committed(names.group, partitions)
        ends = await self.client.ends(partitions)
        fresh = [tp for tp in partitions if tp not in committed]
        begins = await self.client.begins(fresh) if fresh else {}
        mine = {tp: lane for consumer in self._consumers for tp, lane in consumer.lanes.items()}
        ready = inflight = delayed = 0
        for tp in partitions:
            lane = mine.get(tp)
            if lane is not None:
                left = max(0, ends[tp] - lane.ledger.position) + lane.ledger.open
                held = len(lane.held)
            else:
                at, metadata = committed.get(tp) or (begins[tp], "")
                finished = sum(end - start for start, end in decode(at, metadata).finished)
                left, held = max(0, ends[tp] - at - finished), 0
            inflight += held
            if names.delay_of(tp[0]):
                delayed += max(0, left - held)
            else:
                ready += max(0, left - held)
        parked, oldest = await self._parked(names)
        return Stats(ready, inflight, delayed, parked, oldest, exact=False)

    async def _topics(self, names: Names) -> Mapping[str, int]:
        """The shared topic and all tiers of a service; a tier of an odd delay made by others is seen after a while."""
        await self.client.topics(age=TOPICS_AGE)
        odd = [topic for topic in self.client.known if names.delay_of(topic) is not None]
        return await self.client.describe([names.main, names.redriven, *map(names.tier, TIERS), *odd])

    async def _parked(self, names: Names) -> tuple[int, float | None]:
        parking = KafkaParking(self, names)
        parked = await parking.depth()
        if not parked:
            return 0, None
        first = (await parking.browse(None, 1)).letters
        if not first:
            return parked, None
        at = headers.moment(first[0].headers.get(headers.PARKED_AT))
        return parked, max(0.0, time.time() - at) if at else None


def _refused(error: BrokerError) -> PublishResult:
    """Only its size is the event's own fault: rights can be granted, and a broker that did not answer may have it."""
    if isinstance(error, BrokerUnavailable):
        return PublishResult("unknown", str(error))
    return PublishResult("refused", str(error), later=not isinstance(error, TooLarge))
