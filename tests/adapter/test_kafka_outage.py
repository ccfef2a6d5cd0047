"""A Kafka that is down while nothing is to be done: readiness, and what reaches a user's log meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventbus import Bus, Event, Service
from eventbus.console.health import ConsumerReadiness
from eventbus.testing.contract.harness import eventually
from eventbus_kafka import KafkaAdapter
from eventbus_kafka._client import Client
from eventbus_kafka._logs import MINUTE, Readable
from eventbus_kafka.names import Topic
from eventbus_kafka.options import read
from eventbus_kafka.records import Outgoing
from tests.brokers.kafka import KafkaNode, node

PORT = 19600
SETTINGS = {"partitions": 1, "retry_partitions": 1, "dlq_partitions": 1, "session_timeout": "6s", "timeout": "2s"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaNode]:
    """A broker made to be killed."""
    with node(PORT, Path(tmp_path_factory.mktemp("kafka"))) as found:
        yield found


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_an_idle_consumer_is_not_ready_while_its_broker_is_down(
    broker: KafkaNode, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Red within seconds though there is nothing to fetch or to commit, red until it is back, then green by itself.

    And the log has one line of ours for it, and a few of the client's instead of seventy a second.
    """
    caplog.set_level(logging.INFO)
    service = Service(f"{fault}-stock")
    seen: list[str] = []

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.type)

    async with Bus(broker.url, source="api", prefix=fault, settings={"kafka": SETTINGS}) as bus:
        readiness = ConsumerReadiness(bus, [service])

        async def ready() -> bool:
            return not (await readiness.look())[service.name]

        async def not_ready() -> bool:
            return not await ready()

        async with bus.serving(service):
            await bus.publish("before")
            await eventually(lambda: seen, "it was handled")
            await eventually(ready, "it is ready")
            caplog.clear()
            broker.kill() if fault == "killed" else broker.pause()
            await eventually(not_ready, "it says so", within=10)
            words = [(await asyncio.sleep(0.1), await readiness.look())[1][service.name] for _ in range(40)]
            assert set(words) == {"does not receive"}
            said = [record for record in caplog.records if record.levelno >= logging.WARNING]
            ours = [record for record in said if record.name == "eventbus"]
            assert [record.event for record in ours] == ["connection_lost"]  # type: ignore[attr-defined]
            assert broker.address in ours[0].fields["error"]  # type: ignore[attr-defined]
            assert len({record.msg for record in said if record not in ours}) == len(said) - 1 < 15
            await asyncio.to_thread(broker.start) if fault == "killed" else broker.resume()
            await eventually(ready, "it is ready again", within=30)
            await bus.publish("after")
            await eventually(lambda: seen == ["before", "after"], "it goes on", within=30)


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_a_busy_consumer_is_not_ready_while_its_broker_is_down(broker: KafkaNode, fault: str) -> None:
    """Much was fetched ahead, but whether it is handled cannot be said: nothing more is begun, and readiness is red."""
    service = Service(f"busy{fault}-stock", concurrency=1)
    seen: set[object] = set()
    pace = 0.1

    @service.on("#")
    async def handle(number: int) -> None:
        seen.add(number)
        await asyncio.sleep(pace)

    settings = {"kafka": SETTINGS | {"timeout": "30s"}}
    async with Bus(broker.url, source="api", prefix=f"busy{fault}", settings=settings) as bus:
        readiness = ConsumerReadiness(bus, [service])

        async def not_ready() -> bool:
            return bool((await readiness.look())[service.name])

        async with bus.serving(service):
            await bus.publish_many([Event("a", n) for n in range(2000)])
            await eventually(lambda: len(seen) > 20, "it works")
            broker.kill() if fault == "killed" else broker.pause()
            await eventually(not_ready, "it says so", within=15)
            assert len(seen) < 1000
            pace = 0.0
            await asyncio.to_thread(broker.start) if fault == "killed" else broker.resume()
            await eventually(lambda: len(seen) == 2000, "it goes on", within=60)


async def test_a_broker_that_comes_up_is_not_taken_for_one_without_commits(broker: KafkaNode) -> None:
    """While it loads what groups have committed it says so; who took that for nothing handled all of the log again."""
    topic, group = "much", "much-committed"
    partitions = [(topic, number) for number in range(400)]
    client = Client(read(broker.url, {"timeout": "60s"}))
    await client.open()
    try:
        await client.create([Topic(topic, len(partitions), {})], 1, 1)
        for turn in range(60):  # so much that loading it takes a moment
            await client.commit_first(group, dict.fromkeys(partitions, turn))
        broker.kill()
        broker.start(wait=False)
        found = [await client.committed(group, partitions)]
        restarted = asyncio.create_task(asyncio.to_thread(broker.start))
        while not restarted.done():
            found.append(await client.committed(group, partitions))
        await restarted
        assert all(some == dict.fromkeys(partitions, (turn, "")) for some in found)
    finally:
        await client.aclose()


async def test_a_spoiled_batch_stops_no_other_partition(broker: KafkaNode, caplog: pytest.LogCaptureFixture) -> None:
    """What stands before it is handled, what stands elsewhere too, without one rebalance; it is not passed over."""
    service, seen = Service("spoiled-stock"), list[bytes]()

    @service.on("#")
    async def handle(data: bytes) -> None:
        seen.append(data)

    settings = {"kafka": SETTINGS | {"partitions": 2}}
    async with Bus(broker.url, source="api", prefix="spoiled", settings=settings) as bus:
        await bus.provision(service)
        assert isinstance(bus.adapter, KafkaAdapter)
        client = bus.adapter.client

        async def write(partition: int, *bodies: bytes) -> None:
            for body in bodies:  # a batch of its own for each
                await client.append([Outgoing("spoiled.main", None, body, [], partition)])

        await write(0, b"before", b"SPOILED", b"after")
        (log,) = (broker.folder / "data" / "spoiled.main-0").glob("*.log")
        with log.open("r+b") as bytes_on_disk:
            bytes_on_disk.seek(log.read_bytes().index(b"SPOILED"))
            bytes_on_disk.write(b"spoiled")
        async with bus.serving(service):
            await eventually(lambda: b"before" in seen, "what stands before it was handled")
            assert bus.adapter._consumers[0]._member is not None
            generation = bus.adapter._consumers[0]._member._consumer._coordinator.generation
            await write(1, *(b"%d" % number for number in range(20)))
            await eventually(lambda: len(seen) == 21, "what stands elsewhere was handled", within=30)
            await eventually(lambda: not bus.health[service.name].ready, "whoever asks is told")
            assert bus.adapter._consumers[0]._member._consumer._coordinator.generation == generation
        assert sorted(seen) == sorted([b"before", *(b"%d" % number for number in range(20))])
    said = [record.getMessage() for record in caplog.records]
    assert any("spoiled.main/0: what was fetched from offset 1 on" in text and "checksum" in text for text in said)


def test_each_kind_of_line_passes_once_a_minute_and_says_how_many_did_not() -> None:
    """What is below WARNING does not pass, but for who looks for a bug; all does once somebody has set a level."""
    now = [1000.0]
    readable = Readable(lambda: now[0])

    def passes(message: str, *args: object, level: int = logging.ERROR, name: str = "aiokafka.conn") -> str | None:
        record = logging.LogRecord(name, level, __file__, 1, message, args, None)
        return record.getMessage() if readable.filter(record) else None

    assert passes("no node %s", 1) == "no node 1"
    assert passes("no node %s", 2) is None
    assert passes("no group %s", 2) == "no group 2"
    assert passes("joined", level=logging.INFO) is None
    before = logging.root.level
    logging.root.setLevel(logging.DEBUG)
    try:
        assert [passes("joined", level=logging.INFO) for _ in range(2)] == ["joined", "joined"]
    finally:
        logging.root.setLevel(before)
    now[0] += MINUTE
    assert passes("no node %s", 3) == "no node 3 (and 1 more like it since the last)"
    assert passes("no node %s", 4) is None
    chosen = logging.getLogger("aiokafka.conn")
    chosen.setLevel(logging.ERROR)
    try:
        assert passes("no node %s", 5) == "no node 5"
        assert passes("joined", level=logging.INFO) == "joined"
        assert passes("no node %s", 5, name="aiokafka.cluster") == "no node 5"
        assert passes("no node %s", 6, name="aiokafka.cluster") is None
    finally:
        chosen.setLevel(logging.NOTSET)
