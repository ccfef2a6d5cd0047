"""A fault run on Kafka: publishers, consumers, a journal, and what the stock tools say was committed meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from eventbus import Bus, EventBusError
from eventbus_kafka import KafkaAdapter
from eventbus_kafka.names import Templates
from eventbus_kafka.records import Record
from tests.brokers.kafka import KafkaNode
from tests.faults.actor import MAX_RETRIES, SERVICES
from tests.faults.crew import Crew, parked_ids, provision
from tests.faults.journal import Findings, Journal, check, read

PUBLISHERS = ("publisher-1", "publisher-2")
CONSUMERS = ("consumer-1", "consumer-2")
WITHIN = 180.0
MANY = 1000
Settings = dict[str, dict[str, object]]


@dataclass
class Sample:
    """What was committed at a moment, and how far the journal was then."""

    at: float
    group: str
    committed: dict[tuple[str, int], tuple[int, int]]
    journal: int


@dataclass
class Copy:
    """One record of one message: on the shared topic, on a retry topic, or a dead letter."""

    topic: str
    partition: int
    offset: int
    id: str
    at: float


@dataclass
class Run:
    """One fault run, with topics of its own on a shared broker."""

    nodes: Sequence[KafkaNode]
    name: str
    folder: Path
    extra: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {
            key: f"{self.name}.{getattr(Templates(), key)}" for key in ("main", "retry", "dlq", "dlq_state", "group")
        }
        kafka = {"partitions": 6, "retry_partitions": 2, "dlq_partitions": 2, "session_timeout": "3s", "names": names}
        self.settings: Settings = {"kafka": {**kafka, **self.extra}}
        self.url = "kafka://" + ",".join(node.address for node in self.nodes)
        self.journal = self.folder / "journal"
        self.crew = Crew(self.url, self.journal, self.settings, seed=1)
        self.samples: list[Sample] = []
        self.names = {name: self._adapter().names(name, "wms") for name in SERVICES}

    def _adapter(self) -> KafkaAdapter:
        return KafkaAdapter.from_url(self.url, self.settings["kafka"])

    @property
    def node(self) -> KafkaNode:
        return next(node for node in self.nodes if node.answers())

    def start(self, *names: str, **env: str) -> None:
        for name in names:
            role = "publish" if name in PUBLISHERS else "consume"
            self.crew.start(name, role, **env)

    def accepted(self) -> int:
        return sum(len(record[1]) for record in read(self.journal) if record[0] == "accepted")  # type: ignore[arg-type]

    def called(self) -> int:
        return sum(record[0] == "call" for record in read(self.journal))

    async def until(self, condition: Callable[[], bool | Awaitable[bool]], what: str, within: float = WITHIN) -> None:
        deadline = time.monotonic() + within
        while True:
            found = condition()
            if found is True or (not isinstance(found, bool) and await found):
                return
            assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
            await asyncio.sleep(0.1)

    async def published(self, number: int) -> None:
        await self.until(lambda: self.accepted() >= number, f"{number} accepted")

    async def progress(self) -> None:
        """Wait until handlers are called again."""
        before = self.called()
        await self.until(lambda: self.called() > before + 20, "handlers are called")

    async def empty(self) -> bool:
        """Whether every message of every service is committed, as the broker sees it."""
        try:
            async with Bus(self.url, source="wms-api", settings=self.settings) as bus:
                return not any(s.ready + s.delayed for s in [await bus.stats(name) for name in SERVICES])
        except EventBusError:
            return False

    async def drain(self) -> None:
        """Let the consumers finish, stopped in good order, with nothing left."""
        while True:
            await self.until(self.empty, "the topics are consumed")
            codes = [self.crew.stop(name) for name in CONSUMERS]
            assert set(codes) <= {0, 1, -15}, codes
            if await self.empty():
                return
            self.start(*CONSUMERS)
            await self.progress()

    # --- what was committed ----------------------------------------------------------------------------------

    async def sample(self, *, sure: bool = False) -> None:
        """Ask the stock tool what the groups have committed; a broker that is down has no answer."""
        for name in SERVICES:
            group = self.names[name].group
            try:
                committed = await asyncio.to_thread(self.node.committed, group)
            except (RuntimeError, StopIteration):
                assert not sure
                continue
            self.samples.append(Sample(time.time(), name, committed, self.journal.stat().st_size))

    async def keep_sampling(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(1.0)

    async def check_commits(self) -> int:
        """No sample may say that a message was committed that was neither handled to its end nor copied by then."""
        copies = await self._copies()
        by_id: dict[str, dict[str, list[Copy]]] = {name: defaultdict(list) for name in SERVICES}
        for name, found in copies.items():
            for copy in found:
                by_id[name][copy.id].append(copy)
        checked = 0
        for sample in self.samples:
            done = self._done(sample)
            for copy in copies[sample.group]:
                at = sample.committed.get((copy.topic, copy.partition))
                if at is None or copy.offset >= at[0] or copy.topic == self.names[sample.group].dlq:
                    continue
                checked += 1
                later = any(
                    other is not copy and copy.at <= other.at <= sample.at for other in by_id[sample.group][copy.id]
                )
                assert later or copy.id in done, (
                    f"{sample.group}: {copy.topic}[{copy.partition}] is committed at {at[0]}, but {copy.id} at "
                    f"{copy.offset} was neither finished nor copied then"
                )
        return checked

    def _done(self, sample: Sample) -> set[object]:
        with self.journal.open("rb") as lines:
            text = lines.read(sample.journal)
        part = self.folder / "journal-part"
        part.write_bytes(text)
        return {record[2] for record in read(part) if record[0] == "done" and record[1] == sample.group}

    async def _copies(self) -> dict[str, list[Copy]]:
        """Every record of every topic a service reads or writes."""
        adapter = self._adapter()
        await adapter.open()
        found: dict[str, list[Copy]] = {}
        try:
            topics = await adapter.client.topics()
            for name, names in self.names.items():
                mine = [t for t in topics if t in (names.main, names.dlq) or names.delay_of(t) is not None]
                partitions = [(topic, number) for topic in mine for number in range(topics[topic])]
                begins, ends = await adapter.client.begins(partitions), await adapter.client.ends(partitions)
                found[name] = []
                for tp, records in (await adapter.client.read(begins, ends)).items():
                    found[name] += [
                        Copy(*tp, record.offset, _id(record), record.timestamp / 1000) for record in records
                    ]
        finally:
            await adapter.aclose()
        return found

    async def ids(self, topic: str) -> tuple[list[str], int]:
        """The ids of all messages that a topic has, and how many offsets it has had."""
        adapter = self._adapter()
        await adapter.open()
        try:
            partitions = [(topic, number) for number in range(await adapter.client.partitions(topic))]
            ends = await adapter.client.ends(partitions)
            found = await adapter.client.read(await adapter.client.begins(partitions), ends)
            return [_id(record) for records in found.values() for record in records], sum(ends.values())
        finally:
            await adapter.aclose()

    async def findings(self) -> Findings:
        parked, _ = await parked_ids(self.url, self.settings)
        return check(read(self.journal), parked, dict.fromkeys(SERVICES, MAX_RETRIES + 1))


@asynccontextmanager
async def running(
    nodes: Sequence[KafkaNode],
    name: str,
    folder: Path,
    messages: int,
    *,
    publishers: Sequence[str] = PUBLISHERS,
    pause: str = "0.02",
    prepare: Callable[[Run], Awaitable[None]] | None = None,
    consumer_env: dict[str, str] | None = None,
    **extra: object,
) -> AsyncIterator[Run]:
    """Run it; at the end nothing is lost, early, astray, or committed too soon."""
    run = Run(nodes, name, folder, extra)
    if prepare is not None:
        await prepare(run)
    await provision(run.url, run.settings, run.journal)
    run.start(*CONSUMERS, **(consumer_env or {}))
    run.start(*publishers, FAULT_PAUSE=pause)
    sampling = asyncio.create_task(run.keep_sampling())
    try:
        yield run
        for publisher in publishers:
            run.crew.kill(publisher)
        await run.drain()
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await run.sample(sure=True)
        found = await run.findings()
        checked = await run.check_commits()
        print(f"\n{name}: {found}; {checked} commits of {len(run.samples)} samples are right")
        assert found.accepted >= messages
        assert found.parked > 0
        assert (found.lost, found.early, found.strangers, found.over_limit) == ([], [], [], [])
        assert checked > 0
        if messages > MANY:  # of fewer most may have been in flight when somebody died
            assert found.duplicates < found.accepted // 4, "what was finished long before is not handled again"
        for sample in run.samples[-len(SERVICES) :]:
            behind = {tp: at for tp, at in sample.committed.items() if at[0] != at[1]}
            assert not behind, f"{sample.group} did not commit to the end: {behind}"
    finally:
        sampling.cancel()
        run.crew.dismiss()


def _id(record: Record) -> str:
    return (next((raw for key, raw in record.headers if key == "ce_id"), b"") or b"").decode()


def accept(journal: Path, ids: Sequence[str]) -> None:
    """Write down that these were published by the test itself."""
    Journal(str(journal)).write("accepted", list(ids))
