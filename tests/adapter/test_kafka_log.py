"""The adapter on a real Kafka: bad input, order, new partitions, tiers, commits seen from outside."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Iterator, Sequence

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic

from eventbus import (
    BrokerError,
    Bus,
    Delivery,
    Event,
    PublishError,
    RetryPolicy,
    Service,
    TopologyMismatch,
    UnknownService,
    headers,
)
from eventbus.errors import BrokerUnavailable
from eventbus.settlement import ACK, Park, Retry, Settlement
from eventbus.testing.contract.harness import drained, eventually, running
from eventbus_kafka import KafkaAdapter, lanes
from eventbus_kafka._unread import Unread
from eventbus_kafka.log import LogConsumer
from eventbus_kafka.records import Record
from tests.brokers.kafka import shared_url

SMALL = {"partitions": 1, "retry_partitions": 1, "dlq_partitions": 1, "session_timeout": "3s"}


class Place:
    """A prefix of its own on the shared broker."""

    def __init__(self) -> None:
        self.prefix = f"k{secrets.token_hex(4)}"
        self.url = shared_url()
        self.address = self.url.removeprefix("kafka://")

    def bus(self, **settings: object) -> Bus:
        return Bus(self.url, source="api", prefix=self.prefix, settings={"kafka": {**SMALL, **settings}})

    def service(self, name: str = "stock", **options: object) -> Service:
        options = {"retry": RetryPolicy(max_retries=1, delay=0.1), "grace": 5.0} | options
        return Service(f"{self.prefix}-{name}", **options)  # type: ignore[arg-type]

    async def produce(self, *records: tuple[bytes | None, bytes | None, Sequence[tuple[str, bytes | None]]]) -> None:
        """As a stranger does it."""
        producer = AIOKafkaProducer(bootstrap_servers=self.address, acks="all", max_request_size=5_000_000)
        await producer.start()
        try:
            batch = producer.create_batch()
            for key, value, fields in records:
                batch.append(key=key, value=value, timestamp=None, headers=list(fields))
            await (await producer.send_batch(batch, f"{self.prefix}.main", partition=0))
        finally:
            await producer.stop()

    async def read(self, topic: str) -> list[object]:
        consumer = AIOKafkaConsumer(bootstrap_servers=self.address, enable_auto_commit=False)
        await consumer.start()
        try:
            tp = TopicPartition(topic, 0)
            consumer.assign([tp])
            end = (await consumer.end_offsets([tp]))[tp]
            consumer.seek(tp, 0)
            found: list[object] = []
            while len(found) < end:
                found += (await consumer.getmany(timeout_ms=1000)).get(tp, [])
            return found
        finally:
            await consumer.stop()


@pytest.fixture
def place() -> Place:
    return Place()


async def test_strange_records_are_retried_and_parked_to_the_byte(place: Place) -> None:
    """Null key, null value, repeated and null headers: the same bytes on the retry topic and in the dead letter."""
    service = place.service()
    seen: list[tuple[str | None, bytes]] = []

    @service.on("#")
    async def handle(event: Event) -> int:
        seen.append((event.key, event.body))
        return 500

    odd = [("h", b"1"), ("n", None), ("h", b"\xff\x00"), ("x-retries", b"77"), ("", b"e")]
    async with place.bus() as bus:
        await bus.provision(service)
        await place.produce((None, None, odd), (b"\xff", b"{}", []), (b"k", b"", odd))
        async with running(bus, service):

            async def all_parked() -> bool:
                return await bus.dead_letters(service).count() == 3

            await eventually(all_parked, "all three were parked")
        letters = (await bus.dead_letters(service).browse()).letters
    assert len(seen) == 6
    assert {letter.retries for letter in letters} == {1}
    assert sorted(letter.id for letter in letters) == [f"{place.prefix}.main/0/{n}" for n in range(3)]
    retry, parked = f"{place.prefix}.retry.{service.name}", f"{place.prefix}.dlq.{service.name}"
    for topics in ([f"{retry}.100", f"{retry}.0"], [parked]):  # a retry that is nearly due takes the shorter road
        found = {record.key: record for topic in topics for record in await place.read(topic)}  # type: ignore[attr-defined]
        assert {key: record.value for key, record in found.items()} == {None: None, b"\xff": b"{}", b"k": b""}
        for key in (None, b"k"):
            kept = [(n, v) for n, v in found[key].headers if not n.startswith("x-")]
            assert kept == [(name, value) for name, value in odd if name != "x-retries"]


async def test_a_record_as_large_as_the_topic_takes_can_be_parked(place: Place) -> None:
    """Retry and dead-letter topics take 64 KiB more than the shared one."""
    service = place.service(retry=RetryPolicy(max_retries=0))

    @service.on("#")
    async def handle(event: Event) -> int:
        return 500

    largest = 200_000
    async with place.bus(max_event_bytes=largest) as bus:
        await bus.provision(service)
        await place.produce((b"k", b"x" * (largest - 200), []))
        async with running(bus, service):
            await eventually(bus.dead_letters(service).count, "it was parked")
        letter = (await bus.dead_letters(service).browse()).letters[0]
    assert len(letter.body) == largest - 200


async def test_a_dead_letter_topic_that_is_too_small_is_said_at_start(place: Place) -> None:
    """A topic that somebody else made, and that would not take every message with its story, is a mismatch."""
    service = place.service()
    async with place.bus(max_event_bytes=200_000) as bus:
        await bus.provision(service)
    admin = AIOKafkaAdminClient(bootstrap_servers=place.address)
    await admin.start()
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

    dlq = f"{place.prefix}.dlq.{service.name}"
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, dlq, {"max.message.bytes": "1000"})])
    await admin.close()
    async with place.bus(max_event_bytes=200_000) as bus:
        assert isinstance(bus.adapter, KafkaAdapter)
        client = bus.adapter.client

        async def changed() -> bool:
            return (await client.configs([dlq]))[dlq]["max.message.bytes"] == "1000"

        await eventually(changed, "the broker has heard of it")
        with pytest.raises(TopologyMismatch, match=r"max\.message\.bytes is 1000"):
            await bus.provision(service)


async def test_an_event_that_kafka_refuses_is_refused_by_itself(place: Place) -> None:
    """A topic with a smaller limit than we were told: the large one is refused, its neighbours are stored."""
    service = place.service()
    async with place.bus(max_event_bytes=200_000) as bus:
        await bus.provision(service)
    async with place.bus(max_event_bytes=1_000_000) as bus:
        events = [Event("a", b"1", key="k"), Event("b", b"x" * 500_000, key="k"), Event("c", b"3", key="k")]
        with pytest.raises(PublishError) as caught:
            await bus.publish_many(events)
        assert [result.status for result in caught.value.results] == ["stored", "refused", "stored"]
        assert "max.message.bytes" in caught.value.results[1].error
        assert (await bus.stats(service)).ready == 2


async def test_publishing_where_nobody_subscribed_makes_no_topic(place: Place) -> None:
    """The broker makes topics that are asked for by name; we ask for all of them."""
    async with place.bus() as bus:
        await bus.publish("a")
        assert isinstance(bus.adapter, KafkaAdapter)
        assert not [topic for topic in await bus.adapter.client.topics() if topic.startswith(place.prefix)]


async def test_an_event_is_refused_where_the_shared_topic_was_deleted(place: Place) -> None:
    """Its services are subscribed and would never see it: that is not the same as nobody being there."""
    service = place.service()
    async with place.bus() as operator, place.bus() as publisher:
        await operator.provision(service)
        assert isinstance(operator.adapter, KafkaAdapter)
        await operator.adapter.client.delete([f"{place.prefix}.main"])
        with pytest.raises(PublishError, match=rf"is gone, but services are subscribed .*{service.name}.*provision"):
            await publisher.publish("a")
        await operator.provision(service)
        await publisher.publish("a")
        assert (await operator.stats(service)).ready == 1


async def test_a_shared_topic_that_takes_less_than_what_is_set_is_said_at_start(place: Place) -> None:
    """An event of the size that the setting allows would be refused, one by one, later."""
    async with place.bus() as bus:
        await bus.provision(place.service())
    async with place.bus(max_event_bytes=2_000_000) as bus:
        with pytest.raises(TopologyMismatch, match=r"main: max.message.bytes is 1048576, wanted 2000000 or more"):
            await bus.provision(place.service())


async def test_a_service_that_nobody_provisioned_is_unknown(place: Place) -> None:
    """Consuming, looking and counting say so at once."""
    service = place.service()
    bus = Bus(place.url, prefix=place.prefix, provision="off", settings={"kafka": SMALL})
    async with bus:
        with pytest.raises(UnknownService):
            async with running(bus, service):
                pass
        with pytest.raises(UnknownService):
            await bus.stats(service)
        with pytest.raises(UnknownService):
            await bus.dead_letters(service).count()


async def test_a_wrong_address_is_an_error_within_its_deadline() -> None:
    """Nobody listens, or somebody listens who never answers."""
    with socket.create_server(("127.0.0.1", 19199)):
        for port in (19198, 19199):
            async with asyncio.timeout(10):
                with pytest.raises(BrokerUnavailable, match=str(port)):
                    await Bus(f"kafka://127.0.0.1:{port}?connect_timeout=1s").open()


async def test_partition_order_is_kept_by_a_single_handler(place: Place) -> None:
    """concurrency=1: events of a partition are handled in the order they stand in, across a restart too."""
    seen: list[object] = []

    def replica() -> Service:
        service = place.service(concurrency=1)

        @service.on("#")
        async def handle(event: Event) -> None:
            seen.append(event.data)
            await asyncio.sleep(0)

        return service

    async with place.bus() as bus:
        await bus.provision(replica())
        await bus.publish_many([Event("a", n, key="same") for n in range(300)])
        async with running(bus, replica()):
            await eventually(lambda: len(seen) > 50, "some were handled")
    async with place.bus() as bus, running(bus, replica()):
        await eventually(lambda: len(seen) >= 300, "all were handled")
    assert seen == list(range(300))


async def test_new_partitions_are_read_from_their_start(place: Place) -> None:
    """What was written to a new partition before anybody noticed it is not skipped."""
    service = place.service()
    seen: list[str] = []

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.type)

    async with place.bus() as bus:
        await bus.provision(service)
        admin = AIOKafkaAdminClient(bootstrap_servers=place.address)
        await admin.start()
        await admin.create_partitions({f"{place.prefix}.main": NewPartitions(3)})
        await admin.close()
        async with place.bus() as other:
            await other.publish_many([Event(f"e{n}", key=str(n)) for n in range(30)])
        async with running(bus, service):
            await eventually(lambda: len(seen) == 30, "all came", within=30)
            await drained(bus, service)


async def test_new_partitions_are_written_to(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher hears of them while it runs, so that they take their share of the load."""
    monkeypatch.setattr("eventbus_kafka._client.METADATA_AGE", 100)
    service, main = place.service(), f"{place.prefix}.main"
    async with place.bus() as bus:
        await bus.provision(service)
        assert isinstance(bus.adapter, KafkaAdapter)
        client = bus.adapter.client
        await bus.publish("first")
        admin = AIOKafkaAdminClient(bootstrap_servers=place.address)
        await admin.start()
        await admin.create_partitions({main: NewPartitions(2)})
        await admin.close()

        async def written() -> bool:
            await bus.publish_many([Event("a", key=str(n)) for n in range(20)])
            return (await client.ends([(main, 1)]))[main, 1] > 0

        await eventually(written, "the new partition is written to")


async def test_a_topic_that_was_made_anew_with_fewer_partitions_is_written_to(place: Place) -> None:
    """A publisher that fails once asks again how many there are, and does not write to the old ones for ever."""
    service, main = place.service(), f"{place.prefix}.main"
    events = [Event("a", key=str(number)) for number in range(20)]
    async with place.bus(partitions=8, timeout="2s") as bus:
        await bus.provision(service)
        await bus.publish_many(events)
        admin = AIOKafkaAdminClient(bootstrap_servers=place.address)
        await admin.start()
        await admin.delete_topics([main])
        await admin.create_topics([NewTopic(main, 2, 1)])
        await admin.close()

        async def written() -> bool:
            try:
                await bus.publish_many(events)
            except PublishError:
                return False
            return True

        await eventually(written, "all events are stored")


async def test_every_tier_that_exists_is_read(place: Place) -> None:
    """Retries of a policy that nobody has any more come back all the same."""
    calls: list[int] = []

    def replica(delay: float) -> Service:
        service = place.service(retry=RetryPolicy(max_retries=3, delay=delay), max_local_delay=0)

        @service.on("#")
        async def handle(event: Event, delivery: Delivery) -> int | None:
            calls.append(delivery.attempt)
            return 500 if delivery.attempt == 1 else None

        return service

    async with place.bus() as bus, running(bus, replica(1.3)):
        await bus.publish("a")
        await eventually(lambda: calls, "it failed once")
        await eventually(lambda: _delayed(bus, replica(1.3)), "it waits on its road")
    async with place.bus() as bus, running(bus, replica(60.0)):
        await eventually(lambda: calls == [1, 2], "it came back")


async def _delayed(bus: Bus, service: Service) -> bool:
    return (await bus.stats(service)).delayed == 1


async def test_provisioning_again_never_moves_a_group(place: Place) -> None:
    """The ends are committed once; what came since is not skipped, with a new partition count neither."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        await bus.publish_many([Event("a", n) for n in range(5)])
        await asyncio.gather(*(bus.provision(service) for _ in range(3)))
        assert (await bus.stats(service)).ready == 5


async def test_a_group_with_members_cannot_be_unsubscribed(place: Place) -> None:
    """Its consumers would go on reading."""
    service = place.service()

    @service.on("#")
    async def handle(event: Event) -> None:
        return None

    async with place.bus() as bus, running(bus, service):
        await bus.publish("a")
        await drained(bus, service)
        with pytest.raises(BrokerError, match="cannot be deleted"):
            await bus.unsubscribe(service)


async def test_a_node_that_has_not_heard_of_a_topic_is_not_believed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stood still says for a moment that there is no such topic; nobody is told that nobody is subscribed."""
    service = place.service()
    async with place.bus() as publisher, place.bus() as other:
        await other.provision(service)
        assert isinstance(publisher.adapter, KafkaAdapter)
        client, asked = publisher.adapter.client, list[object]()

        async def not_heard(topics: object) -> dict[str, int]:
            asked.append(topics)
            return {}

        with monkeypatch.context() as stale:
            stale.setattr(client, "_describe", not_heard)
            (result,) = await publisher.adapter.publish(place.prefix, [Event("a")])
            assert (result.status, result.subscribed) == ("stored", None)
            assert asked, "one node was asked first"
            (result,) = await publisher.adapter.publish(f"{place.prefix}x", [Event("a")])
            assert (result.status, result.subscribed) == ("stored", False)
        assert (await other.stats(service)).ready == 1


async def test_a_road_that_cannot_be_made_fails_only_those_who_need_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was acknowledged or parked with them is done, and stays done when they are tried again; one line says so."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        await bus.publish_many([Event("a", n) for n in range(4)])
        async with bus.adapter.consume(service.subscription()) as consumer:
            held = [delivery for _ in range(4) for delivery in await receive(consumer)]

            tried: list[object] = []

            async def down(topics: object) -> None:
                tried.append(topics)
                raise BrokerUnavailable("the controller is away")

            items: list[tuple[Delivery, Settlement]] = [(held[0], ACK)]
            items += [(delivery, Retry(time.time() + 60, 60.0, {})) for delivery in held[1:3]]
            items += [(held[3], Park("permanent", {headers.PARK_REASON: "permanent"}, "no such order"))]
            with monkeypatch.context() as broken:
                broken.setattr(bus.adapter._provisioner, "create", down)  # type: ignore[attr-defined]
                assert await consumer.settle(items) == ["done", "failed", "failed", "done"]
            assert len(tried) == 1, "they do not wait for it one after the other"
            said = [record for record in caplog.records if getattr(record, "event", "") == "copy_failed"]
            assert [record.fields["others"] for record in said] == [1]  # type: ignore[attr-defined]
            left = items[1:3]

            async def all_done() -> bool:
                nonlocal left
                answers = await consumer.settle(left)
                left = [item for item, answer in zip(left, answers, strict=True) if answer == "failed"]
                return not left

            await eventually(all_done, "they are tried again, and done")


async def test_looking_at_a_service_does_not_bring_its_topics_back(place: Place) -> None:
    """Brokers make topics that are asked for (by default), and one who has asked before asks again and again."""
    service = place.service()
    async with place.bus() as looking, place.bus() as leaving:
        await looking.provision(service)
        await looking.publish("a")
        async with looking.adapter.consume(service.subscription()) as consumer:
            (delivery,) = await receive(consumer)
            await consumer.settle([(delivery, ACK)])
        assert (await looking.stats(service)).ready == 0
        await leaving.unsubscribe(service)
        assert isinstance(looking.adapter, KafkaAdapter)
        client = looking.adapter.client
        for connections in (client._open._client, client._look._client, client._producer._made.client):
            connections.add_topic(f"{place.prefix}.dlq.{service.name}")
            await connections.force_metadata_update()
        assert [topic for topic in await client.topics() if service.name in topic] == []
        with pytest.raises(UnknownService):
            await looking.stats(service)


async def test_a_bus_does_not_ask_for_all_topics_of_the_cluster_again_and_again(place: Place) -> None:
    """A cluster may have ten thousand of them: what is refreshed every few seconds is what was asked for."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        await bus.stats(service)
        assert isinstance(bus.adapter, KafkaAdapter)
        for connections in (bus.adapter.client._open._client, bus.adapter.client._look._client):
            await connections.force_metadata_update()
            assert all(topic.startswith(place.prefix) for topic in connections.cluster.topics())


async def test_a_batch_is_read_on_from_where_the_consumer_before_us_came_to(place: Place) -> None:
    """Kafka gives out whole batches: what was finished of one is not handled again, all of the rest is."""
    service = place.service()
    async with place.bus(compression="lz4") as bus:
        await bus.provision(service)
        await bus.publish_many([Event("a", n) for n in range(60)])
        done: list[object] = []
        for number in (7, 30, 23):
            async with bus.adapter.consume(service.subscription()) as consumer:
                got: list[Delivery] = []
                while len(got) < number:
                    got += await consumer.receive(number - len(got), 10.0)
                assert await consumer.settle([(delivery, ACK) for delivery in got]) == ["done"] * number
                done += [delivery.event.data for delivery in got]
        assert done == list(range(60))


async def test_partitions_share_the_memory_of_their_consumer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backlog in each, none keeps more than its share and what came with it, and all of it is handled."""
    share = 16 * 1024
    monkeypatch.setattr("eventbus_kafka._unread.IN_ALL", 5 * share)
    service = place.service()
    seen: list[int] = []

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.data["n"])  # type: ignore[index]

    async with place.bus(partitions=4) as bus:  # and one for re-driven events
        await bus.provision(service)
        for start in range(0, 4000, 100):
            await bus.publish_many([Event("a", {"n": n, "x": "x" * 100}) for n in range(start, start + 100)])
        async with bus.adapter.consume(service.subscription()) as consumer:
            assert isinstance(consumer, LogConsumer)
            await eventually(lambda: sum(lane.full for lane in consumer.lanes.values()) == 4, "all are full")
            assert max(lane._bytes for lane in consumer.lanes.values()) < 2 * share
        async with running(bus, service):
            await eventually(lambda: len(seen) >= 4000, "all are handled")
    assert sorted(seen) == list(range(4000))


async def test_a_partition_that_cannot_be_read_holds_up_no_other(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its consumer says what is wrong, handles what stands elsewhere, and passes over nothing."""
    service, spoiled = place.service(), f"{place.prefix}.main/0"
    seen: list[object] = []

    @service.on("#")
    async def handle(data: int) -> None:
        seen.append(data)

    def bad_batch() -> Iterator[Record]:
        raise ValueError("no such codec")
        yield  # type: ignore[unreachable]

    begin = Unread.__init__

    def spoil(self: Unread, batches: Sequence[object], where: str) -> None:
        begin(self, batches, where)  # type: ignore[arg-type]
        if where.endswith(spoiled):
            self._records = bad_batch()

    async with place.bus(partitions=2) as bus:
        await bus.provision(service)
        with monkeypatch.context() as broken:
            broken.setattr(Unread, "__init__", spoil)
            async with running(bus, service):
                await bus.publish_many([Event("a", n) for n in range(256)])
                await eventually(lambda: len(seen) == 128, "the other partition was handled")
                await eventually(lambda: not bus.health[service.name].ready, "whoever asks is told")
        assert any(f"{spoiled}: what was fetched" in record.getMessage() for record in caplog.records)
        async with running(bus, service):
            await eventually(lambda: len(seen) == 256, "once it can be read, all is handled")
    assert sorted(seen) == list(range(256))  # type: ignore[type-var]


async def test_a_log_that_was_cut_is_read_from_where_it_begins_now(place: Place) -> None:
    """Offsets that were read before come again: they are other messages, and a consumer must not trip over them."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        await bus.publish_many([Event("a", n) for n in range(3)])
        async with bus.adapter.consume(service.subscription()) as consumer:
            assert isinstance(consumer, LogConsumer)
            first = [delivery for _ in range(3) for delivery in await receive(consumer)]
            assert consumer._member is not None
            consumer._member.begin({(f"{place.prefix}.main", 0): 0})  # as the driver does it where a log is shorter
            again = [delivery for _ in range(3) for delivery in await receive(consumer)]
            assert [delivery.event.data for delivery in again] == [0, 1, 2]
            assert await consumer.settle([(delivery, ACK) for delivery in first]) == ["lost"] * 3
            assert await consumer.settle([(delivery, ACK) for delivery in again]) == ["done"] * 3


async def test_what_retention_took_before_it_was_read_is_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can handle it any more, but it must not go without a word; a marker of a transaction is none of it."""
    service = place.service()
    main = f"{place.prefix}.main"
    async with place.bus() as bus:
        await bus.provision(service)
        producer = AIOKafkaProducer(bootstrap_servers=place.address, transactional_id=place.prefix, acks="all")
        await producer.start()
        try:
            for number in range(3):  # each is followed by a marker
                async with producer.transaction():
                    await producer.send(main, str(number).encode())
        finally:
            await producer.stop()
        assert isinstance(bus.adapter, KafkaAdapter)
        for seen in (["0", "1", "2"], ["3"]):
            async with bus.adapter.consume(service.subscription()) as consumer:
                assert isinstance(consumer, LogConsumer)
                got = [delivery for _ in seen for delivery in await receive(consumer)]
                assert [str(delivery.event.data) for delivery in got] == seen
                await eventually(lambda: not consumer._skipped, "it has looked where the log begins")
                await consumer.settle([(delivery, ACK) for delivery in got])
                await eventually(lambda: all(not lane.dirty for lane in consumer.lanes.values()), "all is committed")
            told = [record.fields for record in caplog.records if getattr(record, "event", "") == "messages_expired"]  # type: ignore[attr-defined]
            if seen[0] == "0":
                assert told == []
                await bus.publish_many([Event("a", n) for n in (1, 2, 3)])
                await bus.adapter.client.truncate({(main, 0): 8})
        (fields,) = told
        assert (fields["topic"], fields["goes_on_at"]) == (main, 8)
        assert fields["was_at"] in (5, 6), "behind the last message, or behind its marker"


async def test_what_retention_took_is_told_also_where_it_took_everything(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing comes that would show a gap; the place where the next event will stand shows it."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        await bus.publish_many([Event("a", n) for n in range(5)])
        assert isinstance(bus.adapter, KafkaAdapter)
        await bus.adapter.client.truncate({(f"{place.prefix}.main", 0): 5})

        def told() -> list[tuple[int, int]]:
            said = [record.fields for record in caplog.records if getattr(record, "event", "") == "messages_expired"]  # type: ignore[attr-defined]
            return [(fields["was_at"], fields["goes_on_at"]) for fields in said]

        async with bus.adapter.consume(service.subscription()) as consumer:
            await eventually(lambda: told() == [(0, 5)], "it is told")
            await bus.publish("b")
            (delivery,) = await receive(consumer)
            assert delivery.event.type == "b"
            assert told() == [(0, 5)]


async def receive(consumer: object) -> list[Delivery]:
    while True:
        found: list[Delivery] = await consumer.receive(1, 1.0)  # type: ignore[attr-defined]
        if found:
            return found


async def test_a_partition_goes_on_once_its_slowest_message_is_done(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many were finished behind it that no more were fetched, and nothing was left to take; then it was finished."""
    monkeypatch.setattr(lanes, "MOST_OPEN", 600)
    service = place.service()
    may_end, seen = asyncio.Event(), set[int]()

    @service.on("#")
    async def handle(event: Event) -> None:
        if event.body == b"0":
            await may_end.wait()
        seen.add(int(event.body))

    async with place.bus() as bus:
        await bus.provision(service)
        await bus.publish_many([Event("t", str(number).encode()) for number in range(5000)])
        async with running(bus, service):
            assert isinstance(bus.adapter, KafkaAdapter)
            (consumer,) = bus.adapter._consumers

            def stuck() -> bool:
                lane = consumer.lanes.get((f"{place.prefix}.main", 0))
                return lane is not None and lane.paused and not lane.in_hand

            await eventually(stuck, "the partition was paused, all was taken")
            assert 0 < len(seen) < 5000
            may_end.set()
            await eventually(lambda: len(seen) == 5000, "the rest was fetched and handled")
