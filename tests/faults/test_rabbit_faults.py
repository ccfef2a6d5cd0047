"""Faults on a real RabbitMQ: killed consumers, killed, paused and cut brokers, a deleted queue, a full DLQ.

Publishers and consumers are processes; the checker (journal.py) counts what was lost, doubled, early or astray. A short
run is always made, the long ones by `make faults`; `EVENTBUS_FAULT_MESSAGES` says how many events at least (5,000).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aio_pika
import pytest

from eventbus import Bus
from tests.brokers.rabbit import PORT, RabbitNode, node
from tests.faults.actor import MAX_RETRIES, POISONED, SERVICES
from tests.faults.crew import Crew, parked_ids, provision
from tests.faults.journal import Findings, Journal, check, read

long = pytest.mark.skipif("EVENTBUS_FAULT_SECONDS" not in os.environ, reason="takes minutes: run by `make faults`")

MESSAGES = int(os.environ.get("EVENTBUS_FAULT_MESSAGES", "5000"))
FEW = 1_500
PUBLISHERS = ("publisher-1", "publisher-2")
CONSUMERS = ("consumer-1", "consumer-2")
WITHIN = 180.0
Settings = dict[str, dict[str, object]]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitNode]:
    """A broker made to be killed."""
    with node("faults", PORT + 2, Path(tmp_path_factory.mktemp("rabbit"))) as found:
        yield found


class Run:
    """One fault run: a vhost, publishers, consumers, a journal."""

    def __init__(self, broker: RabbitNode, queue_type: str, name: str, folder: Path, messages: int) -> None:
        self.broker, self.vhost = broker, f"{name}-{queue_type}"
        broker.ctl("add_vhost", self.vhost)
        broker.ctl("set_permissions", "-p", self.vhost, "guest", ".*", ".*", ".*")
        self.url = f"{broker.url}{self.vhost}"
        self.settings: Settings = {"rabbit": {"queue_type": queue_type}}
        self.journal = folder / "journal"
        self.max_crashes = 3
        self.poisoned: set[str] = set()
        self.messages = messages
        self.crew = Crew(self.url, self.journal, self.settings, seed=1)

    def start(self, *names: str, **env: str) -> None:
        for name in names:
            role = "publish" if name in PUBLISHERS else "consume"
            more = {"FAULT_MAX_CRASHES": str(self.max_crashes), "FAULT_EVENTS": str(self.messages * 0.6)}
            self.crew.start(name, role, FAULT_PAUSE="0.005", **more, **env)

    def accepted(self) -> int:
        return sum(len(record[1]) for record in read(self.journal) if record[0] == "accepted")  # type: ignore[arg-type]

    async def poison(self, id: str) -> None:
        """Publish an event that kills whoever handles it."""
        self.poisoned.add(id)
        journal = Journal(str(self.journal))
        journal.write("sending", [id])
        async with Bus(self.url, source="wms-api", settings=self.settings) as bus:
            await bus.publish("order.poison", id=id)
        journal.write("accepted", [id])

    async def until(self, condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        deadline = time.monotonic() + WITHIN
        while True:
            found = condition()
            if found is True or (not isinstance(found, bool) and await found):
                return
            assert time.monotonic() < deadline, f"not within {WITHIN:g} s: {what}"
            await asyncio.sleep(0.1)

    async def published(self, number: int) -> None:
        await self.until(lambda: self.accepted() >= number, f"{number} accepted")

    async def drain(self) -> None:
        """Let the consumers finish: stopped in good order with nothing left, in the queues or in their hands."""
        while True:
            await self.until(self.idle, "nothing seems left, and all consumers are up")
            codes = [self.crew.stop(name) for name in CONSUMERS]
            assert set(codes) <= {0, 1, POISONED}
            if codes == [0, 0] and await self.empty():
                return
            self.start(*CONSUMERS)

    def idle(self) -> bool:
        """Whether it is time to look; the broker's own figures are seconds old."""
        depths = self.broker.depths(self.vhost)
        return self.consumed() and not any(number for queue, number in depths.items() if ".dlq." not in queue)

    async def empty(self) -> bool:
        """Whether no queue holds anything, while nobody consumes. The work queues last: there all roads end."""
        connection = await aio_pika.connect(self.url)
        async with connection, connection.channel() as channel:
            names = sorted(self.broker.depths(self.vhost), key=lambda name: ".queue." in name)
            queues = [await channel.declare_queue(name, passive=True) for name in names if ".dlq." not in name]
        return not any(queue.declaration_result.message_count for queue in queues)

    def consumed(self) -> bool:
        """Whether both consumers are at both queues; one that died, of poison or at a failpoint, is replaced."""
        for name in CONSUMERS:
            if not self.crew.running(name):
                self.start(name)
        return all(_consumers(self, f"wms.queue.{service}") == 2 for service in SERVICES)

    async def looping(self) -> list[set[str]]:
        """Which events each service found to kill their process."""
        async with Bus(self.url, source="wms-api", settings=self.settings) as bus:
            return [
                {letter.id async for letter in bus.dead_letters(name).all() if letter.reason == "crash-loop"}
                for name in SERVICES
            ]

    async def findings(self) -> tuple[Findings, Counter[str]]:
        parked, reasons = await parked_ids(self.url, self.settings)
        return check(read(self.journal), parked, dict.fromkeys(SERVICES, MAX_RETRIES + 1)), reasons


@asynccontextmanager
async def running(
    broker: RabbitNode,
    queue_type: str,
    name: str,
    folder: Path,
    prepare: Callable[[Run], object] = lambda run: None,
    *,
    messages: int = MESSAGES,
    poisoned: int = 0,
) -> AsyncIterator[Run]:
    run = Run(broker, queue_type, name, folder, messages)
    await provision(run.url, run.settings, run.journal)
    prepare(run)
    run.start(*CONSUMERS, *PUBLISHERS)
    try:
        yield run
        for publisher in PUBLISHERS:
            run.crew.kill(publisher)
        await run.drain()
        found, reasons = await run.findings()
        print(f"\n{name} on {queue_type} queues: {found}; parked as {dict(reasons)}")
        assert found.accepted >= messages
        assert found.parked > 0
        # Every poisoned event ends there in every service, and no innocent does.
        assert await run.looping() == [run.poisoned] * len(SERVICES)
        assert len(run.poisoned) == poisoned
        assert set(reasons) <= {"max-retries", "crash-loop"}
        assert (found.early, found.strangers, found.over_limit) == ([], [], [])
        run_lost[name, queue_type] = len(found.lost)
    finally:
        run.crew.dismiss()


run_lost: dict[tuple[str, str], int] = {}
"""What each run lost; the test decides whether that is right."""


async def test_killed_consumers_and_a_killed_broker_in_short(broker: RabbitNode, tmp_path: Path) -> None:
    """Quorum queues, consumers and the broker die by SIGKILL, one event kills whoever handles it: nothing is lost."""

    def short(run: Run) -> None:
        run.max_crashes = 2  # fewer restarts; two, because a broker that dies under a suspect looks like a crash

    async with running(broker, "quorum", "short", tmp_path, short, messages=FEW, poisoned=1) as run:
        await run.published(FEW // 4)
        await run.poison("poison-1")
        for victim in CONSUMERS:
            run.crew.kill(victim)
            run.start(victim)
        await run.published(FEW // 2)
        broker.kill()
        broker.start()
        await run.published(FEW)
    assert run_lost["short", "quorum"] == 0


@long
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_killed_consumers_lose_nothing(broker: RabbitNode, queue_type: str, tmp_path: Path) -> None:
    """Consumers die by SIGKILL again and again; their messages are handled by the others, none is lost."""
    async with running(broker, queue_type, "consumer-kill", tmp_path, poisoned=2) as run:
        await run.poison("poison-1")
        for part in range(1, 9):
            await run.published(MESSAGES * part // 9)
            victim = CONSUMERS[part % 2]
            run.crew.kill(victim)
            # Every other one dies by itself too, at the worst moment: the copy is stored, the original not yet acked.
            env = {"EVENTBUS_FAILPOINT": "rabbit.settle.between-copy-and-ack:0.05"} if part % 4 < 2 else {}
            run.start(victim, **env)
        await run.poison("poison-2")
        for _ in range(5):  # in quick succession: what was prefetched and never started is no crash
            for consumer in CONSUMERS:
                await run.until(run.consumed, "both consume")
                run.crew.kill(consumer)
                run.start(consumer)
        await run.published(MESSAGES)
    assert run_lost["consumer-kill", queue_type] == 0


@long
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_a_killed_broker(broker: RabbitNode, queue_type: str, tmp_path: Path) -> None:
    """SIGKILL of the broker in the middle of retries: quorum loses nothing; the figure of classic is printed."""
    async with running(broker, queue_type, "broker-kill", tmp_path) as run:
        for part in (1, 2, 3):
            await run.published(MESSAGES * part // 4)
            broker.kill()
            broker.start()
        await run.published(MESSAGES)
    lost = run_lost["broker-kill", queue_type]
    print(f"broker killed three times, {queue_type}: {lost} lost")
    if queue_type == "quorum":
        assert lost == 0


@long
async def test_a_paused_broker_loses_nothing(broker: RabbitNode, tmp_path: Path) -> None:
    """The broker stands still for 20 seconds; everybody waits, nothing is lost."""
    async with running(broker, "quorum", "pause", tmp_path) as run:
        await run.published(MESSAGES // 2)
        broker.pause()
        await asyncio.sleep(20)
        broker.resume()
        await run.published(MESSAGES)
    assert run_lost["pause", "quorum"] == 0


@long
async def test_cut_connections_lose_nothing(broker: RabbitNode, tmp_path: Path) -> None:
    """Every connection is cut several times; publishers and consumers come back by themselves."""
    async with running(broker, "classic", "cut", tmp_path) as run:
        for part in range(1, 6):
            await run.published(MESSAGES * part // 6)
            broker.close_connections()
        await run.published(MESSAGES)
    assert run_lost["cut", "classic"] == 0


@long
async def test_a_deleted_queue_comes_back(broker: RabbitNode, tmp_path: Path) -> None:
    """A work queue is deleted under its consumers, while it is empty: they make it again and go on."""
    async with running(broker, "classic", "deleted", tmp_path) as run:
        await run.published(MESSAGES // 2)
        for publisher in PUBLISHERS:
            run.crew.kill(publisher)
        await run.drain()  # what stands in a deleted queue is lost by the one who deletes it
        run.start(*CONSUMERS)
        queue = f"wms.queue.{SERVICES[0]}"
        await run.until(lambda: _consumers(run, queue) == 2, "the consumers are back")
        run.broker.ctl("delete_queue", "-p", run.vhost, queue)
        await run.until(lambda: _consumers(run, queue) == 2, "the queue is made again and consumed")
        run.start(*PUBLISHERS)
        await run.published(MESSAGES)
    assert run_lost["deleted", "classic"] == 0


@long
async def test_a_full_dead_letter_queue_loses_nothing(broker: RabbitNode, tmp_path: Path) -> None:
    """The DLQ refuses for a while: messages stay with their consumers and are parked once there is room."""

    def limit(run: Run) -> None:
        # Before anything is parked: a limit set on a longer queue drops from its head, whatever its overflow says.
        definition = '{"max-length": 5, "overflow": "reject-publish"}'
        broker.ctl("set_policy", "-p", run.vhost, "full", r"^wms\.dlq\.", definition, "--apply-to", "queues")

    async with running(broker, "classic", "dlq-full", tmp_path, limit) as run:
        await run.published(MESSAGES // 2)
        broker.ctl("clear_policy", "-p", run.vhost, "full")
        await run.published(MESSAGES)
    assert run_lost["dlq-full", "classic"] == 0


def _consumers(run: Run, queue: str) -> int:
    out = run.broker.ctl("list_queues", "-p", run.vhost, "--no-table-headers", "name", "consumers")
    rows = dict(line.split("\t") for line in out.splitlines() if "\t" in line)
    return int(rows.get(queue, 0))
