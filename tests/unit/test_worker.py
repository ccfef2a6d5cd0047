"""The worker on a memory bus whose consumer can be told to fail: what it keeps, hands back, counts and tells."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import anyio
import pytest

from eventbus import Batch, Bus, DeadLetter, Delivery, Event, RetryPolicy, Service, headers
from eventbus.adapter import Consumer, Settled, Subscription
from eventbus.embedded.memory import MemoryAdapter, MemoryConsumer
from eventbus.errors import BrokerError, BrokerUnavailable
from eventbus.settlement import Park, Release, Settlement
from eventbus.status import requeue
from eventbus.testing.contract.harness import drained, eventually
from eventbus.worker import loop
from eventbus.worker.calling import Deadlines


class TroubledConsumer(MemoryConsumer):
    """A real consumer with a switch for each kind of trouble, and a record of what was settled."""

    def __init__(self, adapter: TroubledAdapter, subscription: Subscription) -> None:
        super().__init__(adapter._store, adapter._clock, subscription)
        self._adapter = adapter

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        if self._adapter.receive_breaks is not None:
            raise self._adapter.receive_breaks
        if self._adapter.receive_fails:
            raise BrokerUnavailable("the broker is away")
        return await super().receive(limit, timeout)

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        if self._adapter.settle_raises is not None:
            raise self._adapter.settle_raises
        good = [item for item in items if not self._adapter.refuses(item[1])]
        answers = dict(zip((id(item[0]) for item in good), await super().settle(good), strict=True))
        self._adapter.settled += good
        return [answers.get(id(delivery), "failed") for delivery, _ in items]


class TroubledAdapter(MemoryAdapter):
    def __init__(self) -> None:
        super().__init__()
        self.receive_fails = False
        self.receive_breaks: Exception | None = None
        self.settle_raises: Exception | None = None
        self.refuses: Callable[[Settlement], bool] = lambda settlement: False
        self.settled: list[tuple[Delivery, Settlement]] = []
        self.consumers: list[TroubledConsumer] = []

    def consume(self, subscription: Subscription) -> Consumer:
        consumer = TroubledConsumer(self, subscription)
        self.consumers.append(consumer)
        return consumer


@pytest.fixture
def adapter() -> TroubledAdapter:
    return TroubledAdapter()


def bus_on(adapter: TroubledAdapter) -> Bus:
    return Bus("memory://", prefix="t", adapter=adapter)


def service(name: str = "t-stock", **options: object) -> Service:
    options = {"retry": RetryPolicy(max_retries=2, delay=0.05), "grace": 5.0} | options
    return Service(name, **options)  # type: ignore[arg-type]


async def test_a_refused_parking_is_kept_and_tried_again(adapter: TroubledAdapter) -> None:
    """While the dead-letter queue refuses, the message stays with the worker, others go on, readiness is red."""
    adapter.refuses = lambda settlement: isinstance(settlement, Park)
    stock, calls = service(), []

    @stock.on("bad", status={404: "park"})
    async def bad(event: Event) -> int:
        calls.append("bad")
        return 404

    @stock.on("good")
    async def good(event: Event) -> None:
        calls.append("good")

    async with bus_on(adapter) as bus, bus.serving(stock):
        await bus.publish("bad")
        await eventually(lambda: bus.health["t-stock"].failing_settles == 1, "the failure is seen")
        assert not bus.health["t-stock"].ready
        await bus.publish("good")
        await eventually(lambda: "good" in calls, "other messages go on")
        adapter.refuses = lambda settlement: False
        await eventually(bus.dead_letters(stock).count, "it is parked once there is room")
        await eventually(lambda: bus.health["t-stock"].ready, "readiness is green again")
        await drained(bus, stock)
    assert calls.count("bad") == 1


@pytest.mark.parametrize(
    "error", [BrokerUnavailable("gone"), RuntimeError("a bug in the adapter")], ids=["broker", "bug"]
)
async def test_a_settle_call_that_raises_loses_nothing(adapter: TroubledAdapter, error: Exception) -> None:
    """When the whole settle call fails, every item of it is kept and settled later; the handler is not called again."""
    adapter.settle_raises = error
    stock, calls = service(), []

    @stock.on("#")
    async def handle(event: Event) -> None:
        calls.append(event.id)

    async with bus_on(adapter) as bus, bus.serving(stock):
        await bus.publish_many([Event("a") for _ in range(10)])
        await eventually(lambda: bus.health["t-stock"].failing_settles == 10, "all ten failed")
        adapter.settle_raises = None
        await drained(bus, stock)
    assert len(calls) == len(set(calls)) == 10


async def test_a_broken_connection_is_waited_out(adapter: TroubledAdapter, caplog: pytest.LogCaptureFixture) -> None:
    """A receive that fails is logged and tried again with a pause; consumption goes on when the broker is back."""
    adapter.receive_fails = True
    stock, calls = service(), []

    @stock.on("#")
    async def handle(event: Event) -> None:
        calls.append(event.id)

    with caplog.at_level(logging.WARNING, "eventbus"):
        async with bus_on(adapter) as bus, bus.serving(stock):
            await eventually(lambda: "connection_lost" in caplog.text, "it was logged")
            assert not bus.health["t-stock"].ready
            await bus.publish("a")
            adapter.receive_fails = False
            await eventually(lambda: calls, "the event was handled")


async def test_what_was_taken_away_is_not_started(adapter: TroubledAdapter) -> None:
    """Deliveries that the adapter reports as lost leave the lanes, and a late settle of a running one is lost."""
    stock, started, go = service(concurrency=1), [], asyncio.Event()

    @stock.on("#")
    async def handle(event: Event) -> None:
        started.append(event.data)
        await go.wait()

    async with bus_on(adapter) as bus, bus.serving(stock):
        await bus.publish_many([Event("a", n) for n in range(3)])
        await eventually(lambda: bus.health["t-stock"].held == 3 and started, "one runs, two wait")
        consumer = adapter.consumers[0]
        queue = consumer._queue
        held = [delivery for _, delivery in _lane(bus).ready]
        for delivery in held:
            message = delivery.receipt
            message.owner = "somebody else"  # type: ignore[attr-defined]
            del queue.inflight[message]  # type: ignore[arg-type]
        consumer.lost(held)
        await eventually(lambda: bus.health["t-stock"].held == 1, "the two are forgotten")
        go.set()
        await eventually(lambda: bus.health["t-stock"].held == 0, "the running one is settled")
    assert started == [0]


def _lane(bus: Bus):  # type: ignore[no-untyped-def]
    return next(iter(bus._workers[0]._runners.values())).lane  # type: ignore[union-attr]


async def test_shutdown_releases_the_unstarted_and_lets_the_running_finish(adapter: TroubledAdapter) -> None:
    """At stop, ready deliveries are released, waiting ones keep their time, running ones finish."""
    stock, started, go, seen = service(concurrency=1), asyncio.Event(), asyncio.Event(), []

    @stock.on("run")
    async def run(event: Event) -> None:
        started.set()
        await go.wait()
        seen.append(event.data)

    @stock.on("wait")
    async def wait(event: Event) -> object:
        return requeue(after=20)

    async with bus_on(adapter) as bus:
        await bus.provision(stock)
        await bus.publish("wait")
        await bus.publish_many([Event("run", n) for n in range(3)])
        running = asyncio.ensure_future(bus.run(stock, signals=False))
        await started.wait()
        await eventually(lambda: bus.health["t-stock"].waiting == 1, "one waits for its time")
        bus.stop()
        assert not bus.health["t-stock"].ready
        go.set()
        assert await running == 0
        stats = await bus.stats(stock)
    assert seen == [0]
    kinds = sorted(type(settlement).__name__ for _, settlement in adapter.settled)
    assert kinds == ["Ack", "Release", "Release", "Requeue"]
    assert (stats.ready, stats.delayed, stats.inflight) == (2, 1, 0)


async def test_a_handler_past_the_grace_is_stopped_and_its_event_released(adapter: TroubledAdapter) -> None:
    """After the grace time a running coroutine is cancelled and handed back at no cost."""
    stock, started, cancelled = service(grace=0.1), asyncio.Event(), []

    @stock.on("#")
    async def handle(event: Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(event.id)
            raise

    async with bus_on(adapter) as bus:
        await bus.provision(stock)
        await bus.publish("a")
        running = asyncio.ensure_future(bus.run(stock, signals=False))
        await started.wait()
        bus.stop()
        assert await running == 0
        assert (await bus.stats(stock)).ready == 1
    assert len(cancelled) == 1
    assert [type(settlement) for _, settlement in adapter.settled] == [Release]


async def test_a_stuck_thread_is_counted_keeps_its_slot_and_its_event_is_retried(adapter: TroubledAdapter) -> None:
    """A plain function past its deadline: the event goes into the retry loop, the slot stays taken until it returns."""
    stock = service(concurrency=1)
    hold, calls = threading.Event(), []

    @stock.on("#", timeout=0.1)
    def handle(event: Event, delivery: Delivery) -> None:
        calls.append(delivery.attempt)
        if delivery.attempt == 1:
            hold.wait(20)

    try:
        async with bus_on(adapter) as bus, bus.serving(stock):
            await bus.publish("a")
            await eventually(lambda: bus.health["t-stock"].stuck == 1, "the stuck thread is counted")
            await eventually(lambda: bus.health["t-stock"].held == 1, "its retry came back and waits for the slot")
            assert calls == [1]
            hold.set()
            await eventually(lambda: calls == [1, 2], "the slot was free again")
            await eventually(lambda: bus.health["t-stock"].stuck == 0, "no longer stuck")
    finally:
        hold.set()


async def test_a_hanging_call_is_ended_while_others_come_and_go() -> None:
    """One timer serves all deadlines: a call that begins must not put it off for those that run already."""
    deadlines, over = Deadlines(), asyncio.Event()
    deadlines.start(0.05, over.set)
    for _ in range(1000):
        if over.is_set():
            break
        quick = deadlines.start(0.05)
        await asyncio.sleep(0.001)
        deadlines.stop(quick, 0.05)
    assert over.is_set()
    deadlines.close()


async def test_handlers_that_wait_run_side_by_side(adapter: TroubledAdapter) -> None:
    """Those that end at once run one after the other on one coroutine; the first that waits calls the whole pool."""
    stock, everybody, quick = service(concurrency=8), asyncio.Barrier(8), 0

    @stock.on("#")
    async def handle(event: Event) -> None:
        nonlocal quick
        if event.type == "slow":
            await everybody.wait()
        else:
            quick += 1

    async with bus_on(adapter) as bus:
        await bus.provision(stock)
        kinds = ["quick", "slow", "quick", "slow", "slow"] + ["slow"] * 5 + ["quick"] * 10
        await bus.publish_many([Event(kind) for kind in kinds])
        async with bus.serving(stock):
            await eventually(lambda: quick == 12 and bus.busy == 0, "all were handled, eight of them together")
    assert not everybody.broken


async def test_a_handler_that_never_waits_has_a_context_of_its_own_too(adapter: TroubledAdapter) -> None:
    """A context variable set by a call that ends at once is not seen by the next."""
    mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark", default=0)
    stock, seen = service(concurrency=1), []

    @stock.on("#")
    async def handle(event: Event) -> None:
        seen.append(mark.get())
        mark.set(1)

    async with bus_on(adapter) as bus, bus.serving(stock):
        await bus.publish_many([Event("a"), Event("a"), Event("a")])
        await eventually(lambda: len(seen) == 3, "all were handled")
    assert seen == [0, 0, 0]


async def test_each_handler_has_a_context_of_its_own(adapter: TroubledAdapter) -> None:
    """A context variable set by one call is not seen by the next on the same coroutine of the pool."""
    mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark", default=0)
    stock, seen = service(concurrency=1), []

    @stock.on("#")
    async def handle(event: Event) -> None:
        before = mark.get()
        mark.set(int(str(event.data)))
        await asyncio.sleep(0)
        seen.append((before, mark.get()))

    async with bus_on(adapter) as bus, bus.serving(stock):
        await bus.publish_many([Event("a", n) for n in (1, 2, 3)])
        await eventually(lambda: len(seen) == 3, "all were handled")
    assert seen == [(0, 1), (0, 2), (0, 3)]


async def _cancelled_inside(event: Event, delivery: Delivery) -> None:
    if delivery.attempt == 1:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future


async def _exits(event: Event, delivery: Delivery) -> None:
    if delivery.attempt == 1:
        sys.exit(3)


async def _swallows_its_timeout(event: Event, delivery: Delivery) -> int:
    try:
        await asyncio.sleep(10 if delivery.attempt == 1 else 0)
    except asyncio.CancelledError:
        return 503
    return 200


async def _asks_for_a_timeout_of_its_own(event: Event, delivery: Delivery) -> None:
    if delivery.attempt == 1:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(10)


@pytest.mark.parametrize(
    "handler",
    [_cancelled_inside, _exits, _swallows_its_timeout, _asks_for_a_timeout_of_its_own],
    ids=lambda f: f.__name__,
)
async def test_strange_handlers_only_fail(adapter: TroubledAdapter, handler: Callable[..., object]) -> None:
    """Cancellation from inside, sys.exit, swallowed and own timeouts are failures of one event, nothing more."""
    stock, seen = service(concurrency=1), []
    stock.on("strange", timeout=0.1)(handler)

    @stock.on("done")
    async def done(event: Event) -> None:
        seen.append(event.type)

    async with bus_on(adapter) as bus, bus.serving(stock):
        await bus.publish("strange")
        await eventually(lambda: len(adapter.settled) == 2, "it failed once, then succeeded")
        await bus.publish("done")
        await eventually(lambda: seen, "the worker is well")
    assert [type(settlement).__name__ for _, settlement in adapter.settled] == ["Retry", "Ack", "Ack"]


async def test_suspects_of_two_services_are_handled_one_at_a_time(adapter: TroubledAdapter) -> None:
    """While a suspect is handled nothing else runs in the whole process, whichever service it belongs to."""
    services, running, most, alone = [service("t-one"), service("t-two")], 0, 0, []
    for entry in services:

        @entry.on("#")
        async def handle(event: Event, delivery: Delivery) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if delivery.suspect:
                alone.append(running)
            await asyncio.sleep(0.002)
            if delivery.suspect:
                alone.append(running)
            running -= 1

    async with bus_on(adapter) as bus:
        await bus.provision(*services)
        await bus.publish_many([Event("a") for _ in range(5)])
        for entry in services:  # a consumer of each takes them and vanishes
            async with adapter.consume(entry.subscription()) as consumer:
                assert len(await consumer.receive(5, 1.0)) == 5
        await bus.publish_many([Event("b") for _ in range(40)])
        async with bus.serving(*services):
            for entry in services:
                await drained(bus, entry)
    assert alone == [1] * 20
    assert most > 1


async def test_a_crash_note_is_taken_back_when_a_suspect_is_released(adapter: TroubledAdapter) -> None:
    """A suspect stopped by a shutdown was not a crash: its count is as before."""
    stock, started = service(grace=0.05), asyncio.Event()

    @stock.on("#")
    async def handle(event: Event) -> None:
        started.set()
        await asyncio.Event().wait()

    async with bus_on(adapter) as bus:
        await bus.provision(stock)
        await bus.publish("a")
        async with adapter.consume(stock.subscription()) as consumer:
            await consumer.receive(1, 1.0)
        running = asyncio.ensure_future(bus.run(stock, signals=False))
        await started.wait()
        queue = adapter.consumers[0]._queue
        assert next(iter(queue.inflight)).story[headers.CRASHES] == 1
        bus.stop()
        assert await running == 0
        assert headers.CRASHES not in queue.ready[0].story
        assert not queue.ready[0].suspect


async def test_a_full_waiting_room_sends_the_rest_by_the_delayed_road(adapter: TroubledAdapter) -> None:
    """At most half of prefetch waits in memory; more of them are delayed by the broker, attempts unchanged."""
    stock, seen = service(prefetch=8, concurrency=4), set()

    @stock.on("#")
    async def handle(event: Event, delivery: Delivery) -> object:
        assert delivery.attempt == 1
        if delivery.history.requeues == 0:
            return requeue(after=0.3)
        seen.add(event.id)
        return None

    async with bus_on(adapter) as bus, bus.serving(stock):
        await bus.publish_many([Event("a") for _ in range(12)])
        await eventually(lambda: bus.health["t-stock"].waiting == 4, "the room is full")
        await eventually(lambda: len(seen) == 12, "all were handled")
    kinds = [type(settlement).__name__ for _, settlement in adapter.settled]
    assert kinds.count("Ack") == 12
    assert kinds.count("Requeue") >= 8


async def test_log_events_tell_the_whole_story(adapter: TroubledAdapter, caplog: pytest.LogCaptureFixture) -> None:
    """retry_scheduled and message_parked carry service, queue, ids, attempts, reason and the broker's own code."""
    stock = service(retry=RetryPolicy(max_retries=1, delay=0.01))

    @stock.on("#")
    async def handle(event: Event) -> None:
        raise ValueError("db down at postgres://app:hunter2@db/x")

    with caplog.at_level(logging.WARNING, "eventbus"):
        async with bus_on(adapter) as bus, bus.serving(stock):
            sent = await bus.publish("order.created", tenant="acme", correlation_id="c-1")
            await eventually(bus.dead_letters(stock).count, "it was parked")
    records = {record.event: record.fields for record in caplog.records if hasattr(record, "event")}
    common = {"service": "t-stock", "event_id": sent.id, "type": "order.created", "tenant": "acme"}
    retried, parked = records["retry_scheduled"], records["message_parked"]
    assert retried.items() >= (common | {"attempt": 1, "max_attempts": 2, "correlation_id": "c-1"}).items()
    assert retried["next_delay"] == pytest.approx(0.01)
    assert "ValueError" in retried["reason"]
    assert parked.items() >= (common | {"park_reason": "max-retries", "attempt": 2}).items()
    assert parked["code"] == "MEMORY_MESSAGE_MAX_RETRIES_EXCEEDED"
    assert "hunter2" not in caplog.text


async def test_a_bug_in_an_adapter_turns_readiness_red_and_is_logged(
    adapter: TroubledAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that is none of ours ends the worker: logged, readiness red, and raised at the end."""
    stock = service()
    adapter.receive_breaks = RuntimeError("a bug")

    async def serve() -> None:
        async with bus_on(adapter) as bus, bus.serving(stock):
            await eventually(lambda: "worker_failed" in caplog.text, "it was logged")
            assert not bus.health["t-stock"].ready

    with caplog.at_level(logging.CRITICAL, "eventbus"), pytest.raises(RuntimeError, match="a bug"):
        await serve()


async def _suspects(adapter: TroubledAdapter, bus: Bus, stock: Service, *events: Event) -> None:
    """Publish events, and let a consumer take them and vanish."""
    await bus.provision(stock)
    await bus.publish_many(events)
    async with adapter.consume(stock.subscription()) as consumer:
        assert len(await consumer.receive(len(events), 1.0)) == len(events)


async def test_the_next_suspect_waits_until_the_outcome_of_the_last_one_is_settled(adapter: TroubledAdapter) -> None:
    """Its note still says that it crashed: if the next one killed the process, an innocent would be blamed for it."""
    services, settled_before, refused = [service("t-one"), service("t-two")], [], asyncio.Event()

    def refuse(settlement: Settlement) -> bool:
        refused.set()
        return True

    adapter.refuses = refuse
    for entry in services:

        @entry.on("#")
        async def handle(event: Event) -> None:
            settled_before.append(len(adapter.settled))

    async with bus_on(adapter) as bus:
        await bus.provision(*services)
        await bus.publish("a")
        for entry in services:  # a consumer of each takes it and vanishes
            async with adapter.consume(entry.subscription()) as consumer:
                assert len(await consumer.receive(1, 1.0)) == 1
        async with bus.serving(*services):
            await refused.wait()
            adapter.refuses = lambda settlement: False
            for entry in services:
                await drained(bus, entry)
    assert settled_before == [0, 1]


async def test_a_suspect_that_cannot_be_settled_does_not_stop_the_process(
    adapter: TroubledAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past a short time the others go on, although the broker takes no word."""
    monkeypatch.setattr(loop, "ANSWER_TIMEOUT", 0.05)
    adapter.settle_raises = BrokerUnavailable("the broker is away")
    stock, seen = service(), []

    @stock.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.type)

    async with bus_on(adapter) as bus:
        await _suspects(adapter, bus, stock, Event("a"), Event("b"))
        async with bus.serving(stock):
            await eventually(lambda: sorted(seen) == ["a", "b"], "both are handled")
            adapter.settle_raises = None
            await drained(bus, stock)


async def test_a_suspect_that_hangs_in_a_thread_does_not_shut_the_process(adapter: TroubledAdapter) -> None:
    """After its deadline the door opens again for everybody else; the thread keeps only its own slot."""
    stock, other, hold, seen = service("t-stock"), service("t-other"), threading.Event(), []

    @stock.on("hang", timeout=0.1)
    def hang(event: Event, delivery: Delivery) -> None:
        if delivery.suspect:
            hold.wait(20)

    @other.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.type)

    try:
        async with bus_on(adapter) as bus:
            await _suspects(adapter, bus, stock, Event("hang"))
            async with bus.serving(stock, other):
                await eventually(lambda: bus.health["t-stock"].stuck == 1, "the thread hangs")
                await bus.publish("later")
                await eventually(lambda: seen == ["later"], "the other service goes on")
                hold.set()
                await eventually(lambda: bus.health["t-stock"].stuck == 0, "the thread returned")
    finally:
        hold.set()


async def test_a_graceful_stop_is_never_a_crash(adapter: TroubledAdapter) -> None:
    """A suspect in a thread past the grace is left unsettled, and its crash note is taken back."""
    stock, hold, started = service(grace=0.05), threading.Event(), threading.Event()

    @stock.on("#")
    def handle(event: Event) -> None:
        started.set()
        hold.wait(20)

    try:
        async with bus_on(adapter) as bus:
            await _suspects(adapter, bus, stock, Event("a"))
            running = asyncio.ensure_future(bus.run(stock, signals=False))
            await eventually(started.is_set, "the handler runs")
            queue = adapter.consumers[0]._queue
            message = next(iter(queue.inflight))
            assert message.story[headers.CRASHES] == 1
            bus.stop()
            assert await running == 1
            assert headers.CRASHES not in message.story
    finally:
        hold.set()


@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_cancelled_run_still_drains(adapter: TroubledAdapter, how: str) -> None:
    """Cancelled from outside, by asyncio or by an anyio scope, the running handler is handed back, not lost."""
    stock, started = service(grace=0.05), asyncio.Event()

    @stock.on("#")
    async def handle(event: Event) -> None:
        started.set()
        await asyncio.Event().wait()

    async with bus_on(adapter) as bus:
        await bus.provision(stock)
        await bus.publish("a")
        if how == "task":
            task = asyncio.ensure_future(bus.run(stock, signals=False))
            await started.wait()
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with anyio.CancelScope() as scope:
                async with bus.serving(stock):
                    await started.wait()
                    scope.cancel()
                    await asyncio.sleep(0)
        stats = await bus.stats(stock)
        assert (stats.ready, stats.inflight) == (1, 0)
        assert not adapter.consumers[0]._queue.ready[0].suspect


async def test_a_stop_while_a_note_is_written_waits_for_it(
    adapter: TroubledAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop between the note and the call hands the suspect back with its count as before."""
    stock, noting, go, calls = service(), asyncio.Event(), asyncio.Event(), []
    write = TroubledConsumer.note

    async def slowly(self: TroubledConsumer, *arguments: object) -> bool:
        written = await write(self, *arguments)  # type: ignore[arg-type]
        noting.set()
        await go.wait()
        return written

    monkeypatch.setattr(TroubledConsumer, "note", slowly)

    @stock.on("#")
    async def handle(event: Event) -> None:
        calls.append(event.id)

    async with bus_on(adapter) as bus:
        await _suspects(adapter, bus, stock, Event("a"))
        running = asyncio.ensure_future(bus.run(stock, signals=False))
        await noting.wait()
        bus.stop()
        go.set()
        assert await running == 0
        queue = adapter.consumers[0]._queue
        assert headers.CRASHES not in queue.ready[0].story
    assert calls == []


async def test_a_handler_that_will_not_be_stopped_does_not_hang_the_shutdown(adapter: TroubledAdapter) -> None:
    """A coroutine that swallows every cancellation is left behind; run returns all the same."""
    stock, started, over = service(grace=0.05), asyncio.Event(), asyncio.Event()

    @stock.on("#")
    async def handle(event: Event) -> None:
        started.set()
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    async with bus_on(adapter) as bus:
        await bus.provision(stock)
        await bus.publish("a")
        running = asyncio.ensure_future(bus.run(stock, signals=False))
        await started.wait()
        bus.stop()
        async with asyncio.timeout(15):
            assert await running == 1
    over.set()
    await asyncio.sleep(0)


async def test_a_route_declared_while_running_is_served(adapter: TroubledAdapter) -> None:
    """A handler registered after the start gets its events."""
    stock, seen = service(), []

    @stock.on("first")
    async def first(event: Event) -> None:
        return None

    async with bus_on(adapter) as bus, bus.serving(stock):

        @stock.on("second")
        async def second(event: Event) -> None:
            seen.append(event.type)

        await bus.publish("second")
        await eventually(lambda: seen, "it was handled")


async def test_a_logging_filter_that_raises_harms_nobody(
    adapter: TroubledAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    """Telling of a message must not be what loses it."""
    stock, logger = service(), logging.getLogger("eventbus")

    def refuse(record: logging.LogRecord) -> bool:
        raise RuntimeError("a bad filter")

    @stock.on("#", status={404: "park"})
    async def handle(event: Event) -> int:
        return 404

    logger.addFilter(refuse)
    try:
        async with bus_on(adapter) as bus, bus.serving(stock):
            await bus.publish("a")
            await eventually(bus.dead_letters(stock).count, "it was parked")
            await drained(bus, stock)
    finally:
        logger.removeFilter(refuse)
    assert "could not be logged" in capsys.readouterr().err


async def test_a_start_that_fails_can_be_tried_again(adapter: TroubledAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second of two consumers cannot be opened, nothing is left behind, and the next start works."""
    one, two, seen = service("t-one"), service("t-two"), []

    @two.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.type)

    async def refuse(self: TroubledConsumer) -> TroubledConsumer:
        if "t-two" in self.queue:
            raise BrokerUnavailable("just now")
        return await MemoryConsumer.__aenter__(self)  # type: ignore[return-value]

    async with bus_on(adapter) as bus:
        monkeypatch.setattr(TroubledConsumer, "__aenter__", refuse)
        with pytest.raises(BrokerUnavailable):
            await bus.run(one, two, signals=False)
        assert not bus.health
        monkeypatch.undo()
        async with bus.serving(one, two):
            await bus.publish("a")
            await eventually(lambda: seen, "it runs now")


async def test_an_event_that_expires_in_its_lane_is_not_handled(adapter: TroubledAdapter) -> None:
    """Expiry is looked at again just before the call."""
    stock, seen, go = service(concurrency=1), [], asyncio.Event()

    @stock.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.type)
        await go.wait()

    async with bus_on(adapter) as bus, bus.serving(stock):
        await bus.publish("first")
        await eventually(lambda: seen, "the lane is taken")
        sent = await bus.publish("second", ttl=timedelta(milliseconds=100))
        assert sent.expires_at is not None
        await eventually(lambda: time.time() > sent.expires_at.timestamp(), "it has expired")
        go.set()
        await eventually(bus.dead_letters(stock).count, "it was parked")
    assert seen == ["first"]


async def test_a_waiting_event_keeps_its_time_through_a_restart(adapter: TroubledAdapter) -> None:
    """requeue(after=20) is not called again at once by the next consumer."""
    stock, calls = service(), []

    @stock.on("#")
    async def handle(event: Event) -> object:
        calls.append(event.id)
        return requeue(after=20)

    async with bus_on(adapter) as bus:
        await bus.provision(stock)
        await bus.publish("a")
        async with bus.serving(stock):
            await eventually(lambda: bus.health["t-stock"].waiting == 1, "it waits")
        async with bus.serving(stock):
            await bus.publish("b")
            await eventually(lambda: bus.health["t-stock"].waiting == 1, "the second one waits")
        assert (await bus.stats(stock)).delayed == 2
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_word_about_an_event_stands_whatever_the_batch_does(adapter: TroubledAdapter, kind: str) -> None:
    """Items acknowledged or parked by name keep their verdict when the call raises; the rest spend their own."""
    stock = service(retry=RetryPolicy(max_retries=0))

    def work(events: list[Event], batch: Batch) -> None:
        for item in batch:
            if item.event.data == "good":
                item.ack()
            elif item.event.data == "known":
                item.park("known")
        if any(item.outcome is None for item in batch):
            raise ValueError("poison")

    async def work_async(events: list[Event], batch: Batch) -> None:
        work(events, batch)

    stock.batch("#", size=3, timeout=5.0)(work if kind == "thread" else work_async)
    async with bus_on(adapter) as bus, bus.serving(stock):
        await bus.publish_many([Event("a", data) for data in ("good", "known", "poison")])
        await drained(bus, stock)
        letters = [letter async for letter in bus.dead_letters(stock).all()]
    assert {(letter.data, letter.reason) for letter in letters} == {("known", "permanent"), ("poison", "max-retries")}


async def test_a_batch_that_hangs_charges_only_the_part_that_hung(adapter: TroubledAdapter) -> None:
    """The half that was done stays done; the events not yet called are handed back at no cost."""
    stock, hold, calls = service(retry=RetryPolicy(max_retries=0)), threading.Event(), []

    @stock.batch("#", size=4, timeout=5.0, concurrency=1, handler_timeout=0.2)
    def work(events: list[Event]) -> None:
        calls.append([event.data for event in events])
        if len(events) == 4:
            raise ValueError("which one was it?")
        if [event.data for event in events] == [2] and not hold.is_set():
            hold.wait(20)

    try:
        async with bus_on(adapter) as bus, bus.serving(stock):
            await bus.publish_many([Event("a", n) for n in range(4)])
            await eventually(bus.dead_letters(stock).count, "the part that hung was charged")
            letters = [letter async for letter in bus.dead_letters(stock).all()]
            hold.set()
            await drained(bus, stock)
    finally:
        hold.set()
    assert [letter.data for letter in letters] == [2]
    assert calls[1:3] == [[0, 1], [2]], "the first half went well, so the second is spoiled and called in parts"
    assert calls[-1] == [3]


async def test_a_dead_letter_consumer_survives_its_handler(adapter: MemoryAdapter) -> None:
    """A cancellation or an exit out of its handler leaves the letters parked and the consumer alive."""
    stock, calls = service(), []

    @stock.on("#", status={404: "park"})
    async def handle(event: Event) -> int:
        return 404

    @stock.dead_letters(batch=1)
    async def keep(letters: list[DeadLetter]) -> None:
        calls.append(letters[0].type)
        if len(calls) == 1:
            raise asyncio.CancelledError
        if len(calls) == 2:
            sys.exit(3)

    async with Bus("memory://", prefix="t") as bus, bus.serving(stock):
        for type in ("one", "two", "three"):
            await bus.publish(type)
        await eventually(lambda: len(calls) == 3, "all three were read")

        async def two_left() -> bool:
            return await bus.dead_letters(stock).count() == 2

        await eventually(two_left, "only the third was done")


async def test_a_closed_bus_says_so() -> None:
    """Using a bus outside its context is an error with the fix, not a hang."""
    with pytest.raises(BrokerError, match="async with"):
        await Bus("memory://").publish("a")
