"""Faults on a real RabbitMQ: killed consumers, killed, paused and cut brokers, a deleted queue, a full DLQ.

Publishers and consumers are processes; the checker of the first issue counts what was lost, doubled, early or astray.
`EVENTBUS_FAULT_MESSAGES` says how many events at least (5,000).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from eventbus import Bus, EventBusError
from tests.brokers.rabbit import PORT, RabbitNode, node
from tests.faults.actor import MAX_RETRIES, SERVICES
from tests.faults.crew import Crew, parked_ids, provision
from tests.faults.journal import Findings, check, read

pytestmark = pytest.mark.skipif(
    "EVENTBUS_FAULT_SECONDS" not in os.environ, reason="takes minutes: run by `make faults`"
)

MESSAGES = int(os.environ.get("EVENTBUS_FAULT_MESSAGES", "5000"))
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

    def __init__(self, broker: RabbitNode, queue_type: str, name: str, folder: Path) -> None:
        self.broker, self.vhost = broker, f"{name}-{queue_type}"
        broker.ctl("add_vhost", self.vhost)
        broker.ctl("set_permissions", "-p", self.vhost, "guest", ".*", ".*", ".*")
        self.url = f"{broker.url}{self.vhost}"
        self.settings: Settings = {"rabbit": {"queue_type": queue_type}}
        self.journal = folder / "journal"
        self.crew = Crew(self.url, self.journal, self.settings, seed=1)

    def start(self, *names: str, **env: str) -> None:
        for name in names:
            role = "publish" if name in PUBLISHERS else "consume"
            self.crew.start(name, role, FAULT_PAUSE="0.005", **env)

    def accepted(self) -> int:
        return sum(len(record[1]) for record in read(self.journal) if record[0] == "accepted")  # type: ignore[arg-type]

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

    async def empty(self) -> bool:
        """Whether nothing is ready or delayed; what consumers hold is not seen from here."""
        try:
            async with Bus(self.url, source="wms-api", settings=self.settings) as bus:
                return not any(s.ready + s.delayed for s in [await bus.stats(name) for name in SERVICES])
        except EventBusError:
            return False

    async def drain(self) -> None:
        """Let the consumers finish: empty, stopped in good order, and still empty."""
        while True:
            # One that is told to stop before it is up dies of the signal.
            await self.until(self.consumed, "the consumers are up")
            await self.until(self.empty, "the queues are empty")
            # Exit code 1: something was left unsettled in time, and is in the queue again.
            codes = [self.crew.stop(name) for name in CONSUMERS]
            assert set(codes) <= {0, 1}
            if codes == [0, 0] and await self.empty():
                return
            self.start(*CONSUMERS)

    def consumed(self) -> bool:
        """Whether both consumers are at both queues."""
        return all(_consumers(self, f"wms.queue.{service}") == 2 for service in SERVICES)

    async def findings(self) -> Findings:
        parked, _ = await parked_ids(self.url, self.settings)
        return check(read(self.journal), parked, dict.fromkeys(SERVICES, MAX_RETRIES + 1))


@asynccontextmanager
async def running(
    broker: RabbitNode, queue_type: str, name: str, folder: Path, prepare: Callable[[Run], object] = lambda run: None
) -> AsyncIterator[Run]:
    run = Run(broker, queue_type, name, folder)
    await provision(run.url, run.settings, run.journal)
    prepare(run)
    run.start(*CONSUMERS, *PUBLISHERS)
    try:
        yield run
        for publisher in PUBLISHERS:
            run.crew.kill(publisher)
        await run.drain()
        found = await run.findings()
        print(f"\n{name} on {queue_type} queues: {found}")
        assert found.accepted >= MESSAGES
        assert found.parked > 0
        assert (found.early, found.strangers, found.over_limit) == ([], [], [])
        run_lost[name, queue_type] = len(found.lost)
    finally:
        run.crew.dismiss()


run_lost: dict[tuple[str, str], int] = {}
"""What each run lost; the test decides whether that is right."""


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_killed_consumers_lose_nothing(broker: RabbitNode, queue_type: str, tmp_path: Path) -> None:
    """Consumers die by SIGKILL again and again; their messages are handled by the others, none is lost."""
    async with running(broker, queue_type, "consumer-kill", tmp_path) as run:
        for part in range(1, 9):
            await run.published(MESSAGES * part // 9)
            victim = CONSUMERS[part % 2]
            run.crew.kill(victim)
            # Every other one dies by itself too, at the worst moment: the copy is stored, the original not yet acked.
            env = {"EVENTBUS_FAILPOINT": "rabbit.settle.between-copy-and-ack:0.05"} if part % 4 < 2 else {}
            run.start(victim, **env)
        for consumer in CONSUMERS:
            run.crew.kill(consumer)
            run.start(consumer)
        await run.published(MESSAGES)
    assert run_lost["consumer-kill", queue_type] == 0


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


async def test_a_paused_broker_loses_nothing(broker: RabbitNode, tmp_path: Path) -> None:
    """The broker stands still for 20 seconds; everybody waits, nothing is lost."""
    async with running(broker, "quorum", "pause", tmp_path) as run:
        await run.published(MESSAGES // 2)
        broker.pause()
        await asyncio.sleep(20)
        broker.resume()
        await run.published(MESSAGES)
    assert run_lost["pause", "quorum"] == 0


async def test_cut_connections_lose_nothing(broker: RabbitNode, tmp_path: Path) -> None:
    """Every connection is cut several times; publishers and consumers come back by themselves."""
    async with running(broker, "classic", "cut", tmp_path) as run:
        for part in range(1, 6):
            await run.published(MESSAGES * part // 6)
            broker.close_connections()
        await run.published(MESSAGES)
    assert run_lost["cut", "classic"] == 0


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
