"""Faults on a real Kafka: killed, stopped and restarted consumers, a killed broker, moving coordinators, gaps.

A short run is part of `make test`; the others take minutes: `make faults`, and with three nodes `make faults-kafka`.
`EVENTBUS_FAULT_MESSAGES` says how many events at least (5,000).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from eventbus import Bus, Event
from eventbus_kafka.records import outgoing
from tests.brokers.kafka import KafkaNode, cluster, node
from tests.faults.crew import provision
from tests.faults.journal import Journal, read
from tests.faults.kafka_run import CONSUMERS, PUBLISHERS, Run, accept, running

LONG = "EVENTBUS_FAULT_SECONDS" in os.environ
THREE = os.environ.get("EVENTBUS_FAULT_KAFKA") == "3"
MESSAGES = int(os.environ.get("EVENTBUS_FAULT_MESSAGES", "5000"))
takes_minutes = pytest.mark.skipif(not LONG, reason="takes minutes: run by `make faults`")
needs_three = pytest.mark.skipif(not THREE, reason="needs three nodes: run by `make faults-kafka`")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[KafkaNode]]:
    """A broker made to be killed."""
    with node(19120, Path(tmp_path_factory.mktemp("kafka")), conf="log.cleaner.backoff.ms=100") as found:
        yield [found]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[KafkaNode]]:
    """Three brokers: replication 3, two of them in sync at least."""
    with cluster(19140, Path(tmp_path_factory.mktemp("kafka"))) as found:
        yield found


async def test_killed_consumers_lose_nothing_in_short(alone: list[KafkaNode], tmp_path: Path) -> None:
    """Both consumers die by SIGKILL, one of them between the copy and the commit; none of a few hundred is lost."""
    async with running(alone, "short", tmp_path, 400, publishers=PUBLISHERS[:1], pause="0.1") as run:
        await run.published(150)
        await run.progress()
        run.crew.kill(CONSUMERS[0])
        run.start(CONSUMERS[0], EVENTBUS_FAILPOINT="kafka.settle.between-copy-and-commit:0.2")
        await run.published(300)
        await run.until(lambda: not run.crew.running(CONSUMERS[0]), "it died at the failpoint")
        run.start(CONSUMERS[0])
        run.crew.kill(CONSUMERS[1])
        run.start(CONSUMERS[1])
        await run.published(400)


@takes_minutes
async def test_killed_consumers_lose_nothing(alone: list[KafkaNode], tmp_path: Path) -> None:
    """Consumers die by SIGKILL again and again, at random and at the worst moments."""
    async with running(alone, "consumer-kill", tmp_path, MESSAGES) as run:
        points = ("kafka.settle.between-copy-and-commit", "kafka.commit.before", "kafka.commit.after")
        for part in range(1, 9):
            await run.published(MESSAGES * part // 9)
            victim = CONSUMERS[part % 2]
            run.crew.kill(victim)
            run.start(victim, EVENTBUS_FAILPOINT=f"{points[part % 3]}:0.05" if part % 4 < 2 else "")
        for consumer in CONSUMERS:
            run.crew.kill(consumer)
            run.start(consumer)
        await run.published(MESSAGES)


@takes_minutes
async def test_rolling_restarts_lose_nothing(alone: list[KafkaNode], tmp_path: Path) -> None:
    """One consumer after the other is restarted, while handlers run: a rebalance at every step."""
    async with running(alone, "rolling", tmp_path, MESSAGES) as run:
        for part in range(1, 13):
            await run.published(MESSAGES * part // 13)
            one = CONSUMERS[part % 2]
            assert run.crew.stop(one) in (0, 1, -signal.SIGTERM)
            run.start(one)
        await run.published(MESSAGES)


@takes_minutes
async def test_a_frozen_consumer_comes_back_as_a_stranger(alone: list[KafkaNode], tmp_path: Path) -> None:
    """SIGSTOP beyond the session timeout: others take over, and what it says when it wakes up counts for nothing."""
    async with running(alone, "frozen", tmp_path, MESSAGES) as run:
        for part in (1, 2, 3):
            await run.published(MESSAGES * part // 4)
            run.crew.signal(CONSUMERS[part % 2], signal.SIGSTOP)
            await asyncio.sleep(7)
            await run.progress()
            run.crew.signal(CONSUMERS[part % 2], signal.SIGCONT)
            await run.progress()
        await run.published(MESSAGES)


@takes_minutes
async def test_a_killed_broker_loses_nothing(alone: list[KafkaNode], tmp_path: Path) -> None:
    """SIGKILL of the only broker in the middle of retries, three times."""
    async with running(alone, "broker-kill", tmp_path, MESSAGES) as run:
        for part in (1, 2, 3):
            await run.published(MESSAGES * part // 4)
            await asyncio.to_thread(alone[0].restart)
            await run.progress()
        await run.published(MESSAGES)


@takes_minutes
async def test_a_handler_slower_than_the_poll_interval_keeps_its_partition(
    alone: list[KafkaNode], tmp_path: Path
) -> None:
    """A handler of 14 s, where a consumer that does not poll for 10 s is put out: called once, neighbours go on."""
    env = {"FAULT_SLOW": "14"}
    async with running(alone, "slow", tmp_path, MESSAGES, consumer_env=env, session_timeout="1s") as run:
        await run.progress()
        async with Bus(run.url, source="wms-api", settings=run.settings) as bus:
            slow = [Event("order.slow", {"n": n}, id=f"slow-{n}") for n in range(6)]
            await bus.publish_many(slow)
        accept(run.journal, [event.id for event in slow])
        await run.published(MESSAGES)
        await run.until(lambda: _calls(run, "slow-") >= 12, "the slow ones were called")
    firsts = Counter(tuple(record[1:3]) for record in read(run.journal) if _is_first_call(record, "slow-"))
    assert set(firsts.values()) == {1}


@takes_minutes
async def test_partitions_added_under_load_are_read_from_their_start(alone: list[KafkaNode], tmp_path: Path) -> None:
    """Six partitions become twelve while publishers and consumers run."""
    async with running(alone, "grown", tmp_path, MESSAGES) as run:
        await run.published(MESSAGES // 3)
        main = _main(run)
        alone[0].tool(
            "org.apache.kafka.tools.TopicCommand",
            *("--bootstrap-server", alone[0].address, "--alter", "--topic", main, "--partitions", "12"),
        )
        await run.published(MESSAGES)

        async def all_are_used() -> bool:
            await run.sample(sure=True)
            committed = run.samples[-1].committed.items()
            return {tp[1] for tp, (offset, _) in committed if tp[0] == main and offset} == set(range(12))

        await run.until(all_are_used, "messages are written to the new partitions, and read")


async def test_a_topic_with_gaps_is_consumed_to_its_end_in_short(alone: list[KafkaNode], tmp_path: Path) -> None:
    """Markers, aborted transactions and compaction before and under a consumer that is killed once."""
    await _with_gaps(alone, "gaps-short", tmp_path, 300, kills=1)


@takes_minutes
async def test_a_topic_with_gaps_is_consumed_to_its_end(alone: list[KafkaNode], tmp_path: Path) -> None:
    """The same with thousands of messages, and consumers that are killed again and again."""
    await _with_gaps(alone, "gaps", tmp_path, MESSAGES, kills=6)


@needs_three
async def test_a_killed_coordinator_loses_nothing(three: list[KafkaNode], tmp_path: Path) -> None:
    """One node of three after the other is killed, so the coordinator and the leaders move; RF 3, min.isr 2."""
    async with running(three, "coordinator", tmp_path, MESSAGES) as run:
        for part, victim in enumerate(three, 1):
            await run.published(MESSAGES * part // 4)
            victim.kill()
            await run.progress()
            await asyncio.to_thread(victim.start)
            await run.progress()
        await run.published(MESSAGES)


@needs_three
async def test_a_frozen_node_loses_nothing(three: list[KafkaNode], tmp_path: Path) -> None:
    """A node stands still for 15 seconds, with its connections open, and comes back."""
    async with running(three, "node-frozen", tmp_path, MESSAGES) as run:
        await run.published(MESSAGES // 3)
        three[0].pause()
        await asyncio.sleep(15)
        await run.progress()
        three[0].resume()
        await run.published(MESSAGES)


async def _with_gaps(nodes: list[KafkaNode], name: str, folder: Path, messages: int, *, kills: int) -> None:
    """Half of the topic is written and compacted before anybody reads it, the rest under consumers that are killed."""
    gaps = Gaps(nodes[0])

    async def prepare(run: Run) -> None:
        await gaps.compact(run)
        await gaps.write(run, messages // 2)
        await gaps.compacted(run)

    try:
        async with running(nodes, name, folder, messages, publishers=(), prepare=prepare) as run:
            await run.progress()
            for kill in range(1, kills + 1):
                await gaps.write(run, messages * (kills + kill) // (2 * kills))
                run.crew.kill(CONSUMERS[kill % 2])
                run.start(CONSUMERS[kill % 2])
            await gaps.compacted(run)
            await run.until(run.crew.up, "all receive again")
        assert _calls(run, "aborted-") == 0
    finally:
        await gaps.aclose()


class Gaps:
    """A stranger that writes to a compacted topic in transactions: offsets without a message of every kind."""

    def __init__(self, node: KafkaNode) -> None:
        self._node = node
        self._producer: AIOKafkaProducer | None = None
        self.written = 0

    async def compact(self, run: Run) -> None:
        """Make the shared topic a compacted one, with small segments."""
        await provision(run.url, run.settings, run.journal)
        settings = "cleanup.policy=compact,segment.ms=300,min.cleanable.dirty.ratio=0.01,max.compaction.lag.ms=500"
        where = ("--bootstrap-server", self._node.address, "--entity-type", "topics", "--entity-name", _main(run))
        self._node.tool("kafka.admin.ConfigCommand", *where, "--alter", "--add-config", settings)
        self._producer = AIOKafkaProducer(bootstrap_servers=self._node.address, transactional_id=run.name, acks="all")
        await self._producer.start()

    async def write(self, run: Run, upto: int) -> None:
        """Events to be handled, each after one of the same key that need not be; some are taken back."""
        assert self._producer is not None
        while self.written < upto:
            numbers = range(self.written, self.written + 10)
            old = [Event("order.created", {"n": n}, id=f"old-{n}", key=f"k{n}") for n in numbers]
            good = [Event("order.created", {"n": n}, id=f"good-{n}", key=f"k{n}") for n in numbers]
            bad = [Event("order.created", {"n": n}, id=f"aborted-{n}", key=f"k{n}") for n in numbers[:3]]
            Journal(str(run.journal)).write("sending", [event.id for event in old])
            await _transaction(self._producer, _main(run), old, commit=True)
            if self.written % 50 == 0:
                await _transaction(self._producer, _main(run), bad, commit=False)
            await _transaction(self._producer, _main(run), good, commit=True)
            accept(run.journal, [event.id for event in good])
            self.written += 10

    async def compacted(self, run: Run) -> None:
        """Wait until the broker has thrown most of the old ones away; never of the newest segment, so more begin."""
        bad = [Event("order.created", id=f"aborted-roll-{n}", key=f"roll{n}") for n in range(30)]

        async def most_are_gone() -> bool:
            assert self._producer is not None
            await _transaction(self._producer, _main(run), bad, commit=False)
            ids, offsets = await run.ids(_main(run))
            old = sum(id.startswith("old-") for id in ids)
            return old < self.written // 3 and len(ids) < offsets * 0.7

        await run.until(most_are_gone, "the topic is compacted")

    async def aclose(self) -> None:
        if self._producer is not None:
            await self._producer.stop()


def _main(run: Run) -> str:
    return next(iter(run.names.values())).main


async def _transaction(producer: AIOKafkaProducer, topic: str, events: Sequence[Event], *, commit: bool) -> None:
    await producer.begin_transaction()
    for event in events:
        record = outgoing(event, topic)
        await producer.send(topic, record.value, key=record.key, headers=list(record.headers))
    await (producer.commit_transaction() if commit else producer.abort_transaction())


def _calls(run: Run, prefix: str) -> int:
    return sum(record[0] == "call" and str(record[2]).startswith(prefix) for record in read(run.journal))


def _is_first_call(record: list[object], prefix: str) -> bool:
    return record[0] == "call" and str(record[2]).startswith(prefix) and record[3] == 1
