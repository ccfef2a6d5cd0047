"""The way of a message through a worker: receive -> admit -> handle -> decide -> settle, and the way out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from eventbus import headers, telemetry
from eventbus.adapter import Consumer, Settled
from eventbus.clock import Clock, SystemClock
from eventbus.errors import EventBusError
from eventbus.policy import decide, park_now, requeue_until
from eventbus.scheduling.fairness import TenantTurns
from eventbus.scheduling.keys import KeyLanes
from eventbus.scheduling.lanes import divert_delay
from eventbus.scheduling.waiting import WaitingRoom
from eventbus.service import MAX_IN_PLACE, Route, Service
from eventbus.settlement import (
    ACK,
    FRESH,
    RELEASE,
    Delivery,
    HeaderDelta,
    Park,
    ParkReason,
    Release,
    Requeue,
    Retry,
    Settlement,
)
from eventbus.status import ACKED, Outcome
from eventbus.worker.calling import Deadlines
from eventbus.worker.completed import ASK_AGAIN, Completed
from eventbus.worker.reports import Reports, note_failed
from eventbus.worker.runner import Runner
from eventbus.worker.settling import BACKOFF, SAY_AGAIN, Item, Settler
from eventbus.worker.shaping import Shapes, Stores
from eventbus.worker.solitude import Solitude
from eventbus.worker.waits import wait_for

RECEIVE_TIMEOUT: Final = 1.0
MAX_HELD_BYTES: Final = 64 * 1024 * 1024
"""Bodies a worker holds before it stops receiving: prefetch counts messages, and they may be large."""
DIVERT_INTERVAL: Final = 0.25
FLUSH_TIMEOUT: Final = 10.0
ANSWER_TIMEOUT: Final = 2.0
"""How long the process stands still for the broker's word about a suspect that was handled."""
Observe: TypeAlias = Callable[[Delivery, Outcome, Settlement], None]
"""Told of every outcome and what was decided; TestBus keeps them."""


@dataclass(frozen=True, slots=True)
class Health:
    """What readiness is judged by: progress, not pings."""

    receiving: bool
    failing_settles: int
    held: int
    running: int
    waiting: int
    stuck: int
    received: int = 0
    """Deliveries so far; what is no longer held of them is settled."""

    @property
    def ready(self) -> bool:
        """Whether this worker can do its work now."""
        return self.receiving and not self.failing_settles


class Worker:
    """Consumes for one service until stopped. `run` returns how many deliveries were left unsettled."""

    def __init__(
        self,
        service: Service,
        consumer: Consumer,
        *,
        broker: str = "eventbus",
        clock: Clock | None = None,
        solitude: Solitude | None = None,
        observe: Observe | None = None,
        stores: Stores = MappingProxyType({}),
    ) -> None:
        self.service = service
        self._consumer = consumer
        self._reports = Reports(service.name, broker)
        self._clock = clock or SystemClock()
        self._solitude = solitude or Solitude.here()
        self._prefetch = service.prefetch
        self._deadlines = Deadlines()
        self._alarm = asyncio.Event()
        self._shapes = Shapes(service, self._clock, stores, self._alarm.set, self._permitted)
        self._keys: KeyLanes[Delivery] | None = KeyLanes() if service.ordering else None
        self._holding: set[asyncio.Task[None]] = set()
        self._completed: Completed | None = None
        if service.idempotency is not None:
            self._completed = Completed(
                f"{service.prefix}/{service.name}", service.idempotency, stores[service.idempotency.store]
            )
        self._twins: list[Delivery] = []
        self._twins_asked: float | None = None
        self._runners: dict[int, Runner] = {}
        self._batching: list[Runner] = []
        for route in service.routes:
            self._runner(route)
        self._waiting: WaitingRoom[Delivery] = WaitingRoom(self._prefetch // 2)
        self._suspects: deque[Delivery] = deque()
        self._settler = Settler(consumer, self._settled, self._completed.record if self._completed else None)
        self._received = 0
        self._held = 0
        self._held_bytes = 0
        self._left: list[Delivery] = []
        self._alone = asyncio.Event()
        self._alone.set()
        self._lonely: Delivery | None = None
        self._answered = asyncio.Event()
        self._failure: BaseException | None = None
        self._in_place: list[float] = []
        self._observe = observe
        self._stopping = asyncio.Event()
        self._room = asyncio.Event()
        self._suspected = asyncio.Event()
        self._receiving = False
        self._solitude.on_reopen(self._kick)
        consumer.lost = self._on_lost

    # --- life ------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Receive, handle and settle until `stop`; then drain. Returns how many were left unsettled."""
        tasks = [
            asyncio.create_task(self._settler.run(), name=f"eventbus settle {self.service.name}"),
            asyncio.create_task(self._watch_clock(), name=f"eventbus clock {self.service.name}"),
            asyncio.create_task(self._handle_suspects(), name=f"eventbus suspects {self.service.name}"),
        ]
        if self._shapes.shared:
            tasks.append(asyncio.create_task(self._shapes.permits.run(), name=f"eventbus permits {self.service.name}"))
        for task in tasks:
            task.add_done_callback(self._on_helper_end)
        try:
            await self._receive()
            left = await self._drain(tasks[2])
            if self._failure is not None:
                raise self._failure
            return left
        except Exception as error:
            # A bug of ours or of the adapter. Whoever runs us in the background must hear of it before the end.
            telemetry.log(logging.CRITICAL, "worker_failed", {"service": self.service.name}, exc_info=error)
            raise
        finally:
            self._receiving = False
            self._solitude.forget(self._kick)
            for runner in self._runners.values():
                runner.close()
                tasks += runner.tasks
            for task in tasks:
                task.cancel()
            # A handler that swallows its cancellation is left behind: nobody can stop it, and nobody waits for it.
            await asyncio.wait(tasks, timeout=1.0)
            self._deadlines.close()

    def _on_helper_end(self, task: asyncio.Task[None]) -> None:
        """Without its settler or its clock a worker would hold messages for ever and look well: stop, and say why."""
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self.stop()

    def stop(self) -> None:
        """Stop receiving and drain; may be called from a signal handler of the loop, more than once."""
        self._stopping.set()
        self._consumer.wake()
        self._room.set()

    @property
    def health(self) -> Health:
        """How it is doing."""
        return Health(
            receiving=self._receiving and not self._stopping.is_set(),
            failing_settles=self._settler.failing,
            held=self._held,
            running=sum(runner.running for runner in self._runners.values()),
            waiting=len(self._waiting),
            stuck=sum(runner.stuck for runner in self._runners.values()),
            received=self._received,
        )

    @property
    def next_moment(self) -> float | None:
        """When time alone will make something happen here: a wait over, a batch window closed, a retry due."""
        asked = [self._shapes.permits.next_ask, self._twins_asked]
        return min([*self._moments(), *self._in_place, *(at for at in asked if at is not None)], default=None)

    def _moments(self) -> list[float]:
        moments = [self._waiting.next_due, *(runner.next_batch_at for runner in self._batching)]
        moments += [lane.opens_at for lane in self._shapes.lanes]
        return [moment for moment in moments if moment is not None]

    @property
    def turns(self) -> list[TenantTurns]:
        """How each tenant is doing; empty for a service without fairness."""
        return self._shapes.turns() if self.service.fairness else []

    def lane_opened(self) -> None:
        """A batch has ended, and the next one may have been filling since: look at the clock again."""
        self._alarm.set()

    @property
    def busy(self) -> int:
        """Deliveries on their way: all that are held, but for those that wait for a time to come."""
        now = self._clock.now()
        later = sum(due_at > now for due_at in self._in_place)
        if (self._waiting.next_due or 0.0) > now:
            later += len(self._waiting)
        if (self._shapes.permits.next_ask or math.inf) > now:
            later += sum(runner.held_back(now) for runner in self._runners.values())
        if self._keys is not None:
            later += self._keys.waiting
        if (self._twins_asked or 0.0) > now:
            later += len(self._twins)
        return self._held - later

    # --- receive ---------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            room = self._free()
            if room <= 0:
                await self._wait_for_room()
                continue
            try:
                deliveries = await self._consumer.receive(room, RECEIVE_TIMEOUT)
            except EventBusError as error:
                self._receiving = False
                if failures % SAY_AGAIN == 0:
                    fields = {"service": self.service.name, "queue": self._consumer.queue, "error": str(error)}
                    telemetry.log(logging.WARNING, "connection_lost", fields)
                pause = BACKOFF[min(failures, len(BACKOFF) - 1)]
                failures += 1
                await wait_for(self._stopping, pause)
                continue
            failures = 0
            self._receiving = True
            if deliveries:
                self._reports.received(len(deliveries))
                now = self._clock.now()
                self._received += len(deliveries)
                self._held += len(deliveries)
                self._held_bytes += sum([len(delivery.event.body) for delivery in deliveries])
                if self._completed is not None:
                    deliveries = await self._unseen(deliveries, self._completed)
                for delivery in deliveries:
                    if delivery.noted:  # its note came with it; the history shall be that of before this call
                        crashes = max(0, delivery.history.crashes - 1)
                        delivery.history = replace(delivery.history, crashes=crashes)
                self._admit(deliveries, now)
                self._kick()
                await asyncio.sleep(0)  # what has come is begun before there is more: fewer objects live at a time

    async def _unseen(self, deliveries: Sequence[Delivery], completed: Completed) -> list[Delivery]:
        """Those that were not completed before; the others are acknowledged, or wait for their twin to be done."""
        unseen: list[Delivery] = []
        for delivery, seen in zip(deliveries, await completed.ask(deliveries), strict=True):
            if seen == "done" and not delivery.problem:
                self._reports.duplicate(delivery)
                self._settler.add(delivery, ACK)
            elif seen == "claimed" and not delivery.problem:
                self._twins.append(delivery)
                if self._twins_asked is None:
                    self._twins_asked = self._clock.now()
                    self._hold(self._wait_for_twins(completed))
            else:
                unseen.append(delivery)
        return unseen

    async def _wait_for_twins(self, completed: Completed) -> None:
        """Copies of events that somebody is handling right now: ask again and again until that has ended."""
        while self._twins and not self._stopping.is_set():
            self._twins_asked = self._clock.now() + ASK_AGAIN
            await self._clock.wait(self._stopping, self._twins_asked)
            twins, self._twins = self._twins, []
            now = self._clock.now()
            self._admit(await self._unseen(twins, completed), now)
            self._kick()
        self._twins_asked = None

    def _hold(self, coroutine: Coroutine[object, object, None]) -> None:
        """See to deliveries that are held, beside everything else; the drain waits for it."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"eventbus holding {self.service.name}")
        self._holding.add(task)
        task.add_done_callback(self._holding.discard)
        task.add_done_callback(self._on_helper_end)

    def _free(self) -> int:
        """How many to receive now; none as long as there is much to do, and room for a few only."""
        room = self._prefetch - self._held if self._held_bytes < MAX_HELD_BYTES else 0
        if room < self._prefetch // 8 and any(runner.lane.ready for runner in self._runners.values()):
            return 0
        # Half at a time: while that half is handled and settled, the broker gets the other half ready.
        return min(room, max(1, self._prefetch // 2))

    async def _wait_for_room(self) -> None:
        """Wait until something is settled; a route that no longer keeps up gives its surplus away meanwhile."""
        self._room.clear()
        now = self._clock.now()
        for runner in self._runners.values() if self._keys is None else ():  # who is sent round comes out of order
            for delivery in runner.lane.surplus(now):
                due_at = now + divert_delay(delivery.history.requeues)
                self._settler.add(delivery, requeue_until(delivery, due_at, now=now))
        await wait_for(self._room, DIVERT_INTERVAL)

    # --- admit -----------------------------------------------------------------------------------------------

    def _admit(self, deliveries: Iterable[Delivery], now: float) -> None:
        """Find each delivery its place; one that breaks our code is parked, or it would stop us at every restart."""
        for delivery in deliveries:
            try:
                runner = self._runner_for(delivery, now)
                if runner is not None:
                    runner.lane.push(delivery, now)
            except Exception as error:  # noqa: BLE001 - see above
                telemetry.log(logging.ERROR, "admission_failed", telemetry.about(delivery), exc_info=error)
                self._park(delivery, Outcome(error=error, code="undecodable"), "undecodable", now)

    def _runner_for(self, delivery: Delivery, now: float) -> Runner | None:
        """Who may handle it now; None if its place is in the waiting room, among the suspects, or it is settled."""
        event = delivery.event
        if delivery.problem:
            self._park(delivery, Outcome(reason=delivery.problem, code="undecodable"), "undecodable", now)
            return None
        route = self.service.route(event.type)
        if route is None:
            self._unrouted(delivery, now)
            return None
        runner = self._runners.get(id(route)) or self._runner(route)
        delivery.max_attempts = runner.max_attempts
        if event.expires_at is not None and event.expires_at.timestamp() <= now:
            self._expire(delivery, now)
            return None
        if delivery.history is not FRESH or event.process_after is not None:
            due_at = delivery.history.due_at
            after = 0.0 if event.process_after is None else event.process_after.timestamp()
            # An event for later takes its place in the order of its key when its time comes, a retry keeps its own.
            if max(due_at, after) > now and (after > now or self._keys is None or event.key is None):
                self._postpone(delivery, max(due_at, after), now)
                return None
            if due_at > now:
                if self._leads(delivery):
                    self._waiting.admit(delivery, due_at, always=True)
                    self._alarm.set()
                return None
        if self._keys is not None and not self._leads(delivery):
            return None
        if delivery.suspect or delivery.noted:
            self._suspect(delivery, now)
            return None
        return runner

    def _leads(self, delivery: Delivery) -> bool:
        """Whether a delivery is the first of its key; if not, it waits until it is."""
        key = delivery.event.key
        return self._keys is None or key is None or self._keys.enter(key, delivery)

    def _runner(self, route: Route) -> Runner:
        """The route's runner; one that was declared while we run gets its own when it is first needed."""
        runner = self._runners.get(id(route))
        if runner is None:
            share = self._prefetch if len(self.service.routes) == 1 else max(1, self._prefetch // 2)
            lane = self._shapes.lane(route, share)
            runner = Runner(
                route,
                lane,
                service=self.service.name,
                clock=self._clock,
                deadlines=self._deadlines,
                solitude=self._solitude,
                office=self,
            )
            self._runners[id(route)] = runner
            if route.batch is not None:
                self._batching.append(runner)
        return runner

    def _unrouted(self, delivery: Delivery, now: float) -> None:
        self._reports.unrouted(delivery)
        if self.service.strict:
            reason = f"{self.service.name} has no route for {delivery.event.type}"
            self._park(delivery, Outcome(reason=reason, code="no-route"), "no-route", now)
        else:
            self._settler.add(delivery, ACK)

    def _expire(self, delivery: Delivery, now: float) -> None:
        assert delivery.event.expires_at is not None
        late = f"expired at {headers.iso(delivery.event.expires_at.timestamp())}"
        self._park(delivery, Outcome(reason=late, code="expired"), "expired", now)

    def _postpone(self, delivery: Delivery, due_at: float, now: float) -> None:
        """Not due yet: a seat in the waiting room, or the delayed road; costs no retry either way."""
        if due_at - now <= self.service.max_local_delay and self._waiting.admit(delivery, due_at):
            self._alarm.set()
        else:
            self._settler.add(delivery, requeue_until(delivery, due_at, now=now))

    def _suspect(self, delivery: Delivery, now: float) -> None:
        crashes = delivery.history.crashes
        if delivery.suspect and crashes >= self.service.max_crashes:
            reason = f"killed its process {crashes} times while it was handled alone"
            self._park(delivery, Outcome(reason=reason, code="crash-loop"), "crash-loop", now)
            return
        self._suspects.append(delivery)
        self._suspected.set()

    def _park(self, delivery: Delivery, outcome: Outcome, reason: ParkReason, now: float) -> None:
        self._finish(delivery, outcome, park_now(delivery, outcome, reason, self.service.policy, now=now))

    def _permitted(self) -> None:
        """Permits of a shared rate have come."""
        for lane in self._shapes.lanes:
            lane.reopen()
        self._kick()

    def _kick(self) -> None:
        """Set the pools to work, and the clock to the windows of batches that began to fill."""
        self._kick_pools()
        if self._batching:
            self._alarm.set()

    def _kick_pools(self) -> None:
        if not self._stopping.is_set():
            for runner in self._runners.values():
                if runner.lane.ready:
                    runner.kick()

    async def _watch_clock(self) -> None:
        """Bring back who waited long enough, and send off batches whose window is over."""
        while True:
            self._alarm.clear()
            now = self._clock.now()
            self._admit(self._waiting.due(now), now)
            self._kick_pools()
            # What is due already was set to work just now; a lane that is full or shut sets the alarm when it opens.
            await self._clock.wait(self._alarm, min((m for m in self._moments() if m > now), default=None))

    # --- handle (see runner.py) and decide -------------------------------------------------------------------

    async def _handle_suspects(self) -> None:
        """One suspect at a time, with nothing else in flight, after a durable note that says so."""
        while True:
            await self._suspected.wait()
            self._suspected.clear()
            while self._suspects and not self._stopping.is_set():
                async with self._solitude:
                    if self._suspects and not self._stopping.is_set():
                        self._alone.clear()
                        try:
                            await self._handle_alone(self._suspects.popleft())
                        finally:
                            self._alone.set()

    async def _handle_alone(self, delivery: Delivery) -> None:
        if not delivery.noted:
            crashes = delivery.history.crashes + 1
            try:
                ours = await self._consumer.note(delivery, {headers.CRASHES: crashes})
            except EventBusError as error:
                note_failed(delivery, error)
                self._suspects.appendleft(delivery)
                await wait_for(self._stopping, 1.0)
                self._suspected.set()
                return
            if not ours:
                self._gone(delivery)
                return
            delivery.noted = True
        if self._stopping.is_set():
            self.release(delivery)
            return
        route = self.service.route(delivery.event.type)
        assert route is not None
        telemetry.log(logging.WARNING, "suspect_handled_alone", telemetry.about(delivery))
        self._lonely = delivery
        self._answered.clear()
        await self._runner(route).handle_alone(delivery)
        # Its note says "crashed" until the broker has its outcome. The next suspect may kill us, so not before that.
        await wait_for(self._answered, ANSWER_TIMEOUT)
        self._lonely = None

    def conclude(self, delivery: Delivery, outcome: Outcome, route: Route, *, in_place: bool = False) -> Retry | None:
        """Decide what an outcome means, and see that it is carried out."""
        if outcome is ACKED and self._observe is None:  # by far the most, and every policy says the same of it
            if self._reports.counting:
                self._reports.decided(delivery, outcome, ACK)
            self._settler.add(delivery, ACK)
            return None
        now = self._clock.now()
        try:
            settlement = decide(outcome, delivery, route.policy, now=now)
        except Exception as error:  # noqa: BLE001 - whatever we got wrong, the message must not hang for ever
            telemetry.log(logging.ERROR, "decision_failed", telemetry.about(delivery), exc_info=error)
            outcome = Outcome(reason=f"deciding failed: {error!r}", code="decision_failed")
            settlement = decide(outcome, delivery, route.policy, now=now)
        if self._observe is not None:
            self._observe(delivery, outcome, settlement)
        if self._keys is not None and delivery.event.key is not None and isinstance(settlement, (Retry, Requeue)):
            self._reports.decided(delivery, outcome, settlement)
            self._keep_place(delivery, outcome, settlement, now)
            return None
        if isinstance(settlement, Requeue) and not delivery.noted and not self._stopping.is_set():
            if settlement.delay <= self.service.max_local_delay and len(self._waiting) < self._waiting.places:
                self._requeued(delivery, outcome, now)
                self._reports.decided(delivery, outcome, settlement)
                self._postpone(delivery, settlement.due_at, now)
                return None
        elif isinstance(settlement, Retry) and in_place and route.policy.retry.mode == "in-place":
            self._reports.decided(delivery, outcome, settlement)
            return settlement
        self._finish(delivery, outcome, settlement)
        return None

    def _requeued(self, delivery: Delivery, outcome: Outcome, now: float) -> None:
        history = delivery.history
        received = history.first_received_at or (0.0 if outcome.waiting else now)
        delivery.history = replace(history, requeues=history.requeues + 1, first_received_at=received)

    def _keep_place(self, delivery: Delivery, outcome: Outcome, settlement: Retry | Requeue, now: float) -> None:
        """Try again here and not by the delayed road: the followers of its key wait. No slot is held meanwhile."""
        if isinstance(settlement, Retry) or delivery.noted:
            self._hold(self._note_and_wait(delivery, outcome, settlement))
        else:
            self._requeued(delivery, outcome, now)
            self._wait_in_order(delivery, settlement)

    async def _note_and_wait(self, delivery: Delivery, outcome: Outcome, settlement: Retry | Requeue) -> None:
        """Write the attempt down beside the message, or take back the note of a suspect that did no harm."""
        try:
            if not await self._consumer.note(delivery, settlement.headers):
                self._gone(delivery)
                return
        except EventBusError as error:
            # Its place matters more than the note: only a crash before the next one would forget this attempt.
            note_failed(delivery, error)
        if isinstance(settlement, Retry):
            delivery.history = headers.after_retry(delivery.history, settlement.headers)
        else:
            self._requeued(delivery, outcome, self._clock.now())
        delivery.noted = delivery.suspect = False
        if delivery is self._lonely:
            self._answered.set()
        self._wait_in_order(delivery, settlement)

    def _wait_in_order(self, delivery: Delivery, settlement: Retry | Requeue) -> None:
        if self._stopping.is_set():
            self._settler.add(delivery, Release(settlement.headers))
            return
        self._waiting.admit(delivery, min(settlement.due_at, self._clock.now() + MAX_IN_PLACE), always=True)
        self._alarm.set()

    async def wait_in_place(self, delivery: Delivery, retry: Retry) -> bool:
        """Hold a delivery until its retry is due, with its attempts written down beside it."""
        try:
            if not await self._consumer.note(delivery, retry.headers):
                self._forget([delivery])
                return False
        except EventBusError as error:
            note_failed(delivery, error)
            self._settler.add(delivery, retry)
            return False
        delivery.history = headers.after_retry(delivery.history, retry.headers)
        delivery.noted = False
        self._in_place.append(retry.due_at)
        try:
            await self._clock.wait(self._stopping, retry.due_at)
        finally:
            self._in_place.remove(retry.due_at)
        if self._stopping.is_set():
            self._settler.add(delivery, RELEASE)
            return False
        return True

    def release(self, delivery: Delivery) -> None:
        """Hand back a delivery whose handler was stopped at shutdown; its crash note is taken back."""
        self._settler.add(delivery, Release(_unnoted(delivery)) if delivery.noted else RELEASE)

    def leave(self, delivery: Delivery) -> None:
        """A thread that goes on after us keeps its delivery unsettled; what it is doing is no crash."""
        self._left.append(delivery)

    def expired(self, delivery: Delivery) -> bool:
        """Park a delivery that expired while it waited for its turn."""
        expires_at = delivery.event.expires_at
        if expires_at is None:
            return False
        now = self._clock.now()
        if expires_at.timestamp() > now:
            return False
        self._expire(delivery, now)
        return True

    # --- settle ----------------------------------------------------------------------------------------------

    def _finish(self, delivery: Delivery, outcome: Outcome, settlement: Settlement) -> None:
        self._reports.decided(delivery, outcome, settlement)
        self._settler.add(delivery, settlement)

    def _settled(self, items: Sequence[Item], answers: Sequence[Settled]) -> None:
        """The broker has carried them out, or told us that they are no longer ours."""
        self._forget([delivery for delivery, _ in items])
        if self._keys is not None:
            self._go_on(items, answers, self._keys)
        for (delivery, settlement), answer in zip(items, answers, strict=True):
            if settlement is ACK and answer == "done":
                continue
            if answer == "lost":
                self._reports.lost(delivery)
            elif isinstance(settlement, Park):
                self._reports.parked(delivery, settlement)
        self._reports.add_up()

    def _go_on(self, items: Sequence[Item], answers: Sequence[Settled], keys: KeyLanes[Delivery]) -> None:
        """The followers of settled deliveries take their turn; those of lost ones are handed back, to come in order."""
        following: list[Delivery] = []
        for (delivery, _), answer in zip(items, answers, strict=True):
            key = delivery.event.key
            if key is None:
                continue
            if answer == "lost":
                self._scatter(delivery)
                continue
            successor = keys.leave(key, delivery)
            if successor is not None:
                following.append(successor)
        if following:
            self._admit(following, self._clock.now())
            self._kick()

    def _gone(self, delivery: Delivery) -> None:
        """A delivery was taken away from us unsettled."""
        self._forget([delivery])
        self._scatter(delivery)

    def _scatter(self, delivery: Delivery) -> None:
        if self._keys is not None and delivery.event.key is not None:
            for follower in self._keys.scatter(delivery.event.key, delivery):
                self.release(follower)

    def _forget(self, deliveries: Sequence[Delivery]) -> None:
        self._held -= len(deliveries)
        self._held_bytes -= sum([len(delivery.event.body) for delivery in deliveries])
        if self._lonely is not None and self._lonely in deliveries:
            self._answered.set()
        if not self._room.is_set() and self._free() > 0:
            self._room.set()

    def _on_lost(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """The adapter says that these were taken away: those not started are not started any more."""
        gone = set(deliveries)
        dropped = self._waiting.drop(gone)
        for runner in self._runners.values():
            dropped += runner.lane.drop(gone)
        dropped += [delivery for delivery in self._suspects if delivery in gone]
        self._suspects = deque(delivery for delivery in self._suspects if delivery not in gone)
        dropped += [delivery for delivery in self._twins if delivery in gone]
        self._twins = [delivery for delivery in self._twins if delivery not in gone]
        if self._keys is not None:
            dropped += self._keys.drop(gone)
        self._forget(dropped)
        for delivery in dropped:
            self._scatter(delivery)
        return dropped

    # --- shut down -------------------------------------------------------------------------------------------

    async def _drain(self, suspects: asyncio.Task[None]) -> int:
        """Release what has not started, wait for what runs, flush the settlements."""
        if self._batching:  # a batch that was filling is handled as it is; what stands behind it is handed back
            for runner in self._batching:
                runner.flush()
            await asyncio.sleep(0)
        self._hand_back_unstarted()
        try:
            async with asyncio.timeout(self.service.grace):
                await self._alone.wait()  # a suspect whose note is being written counts as started
                await asyncio.gather(*(runner.finished() for runner in self._runners.values()))
        except TimeoutError:
            telemetry.log(logging.WARNING, "grace_over", {"service": self.service.name, "running": self.health.running})
            stopped = [suspects, *(task for runner in self._runners.values() for task in runner.tasks)]
            for task in stopped:
                task.cancel()
            await asyncio.wait(stopped, timeout=1.0)
        if self._holding:
            await asyncio.wait(self._holding, timeout=FLUSH_TIMEOUT)
        self._hand_back_unstarted()  # a suspect that was put back meanwhile
        await self._take_back_notes()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT):
                await self._settler.empty.wait()
        except TimeoutError:
            telemetry.log(logging.ERROR, "settles_left", {"service": self.service.name, "held": self._held})
        return self._held

    def _hand_back_unstarted(self) -> None:
        now = self._clock.now()
        for due_at, delivery in self._waiting.clear():  # with its time: nobody else may call it early
            if self._keys is not None and delivery.event.key and self._keys.leads(delivery.event.key, delivery):
                self._settler.add(delivery, Release({headers.DUE_AT: math.ceil(due_at * 1000)}))
            else:
                self._settler.add(delivery, requeue_until(delivery, due_at, now=now))
        unstarted = [delivery for runner in self._runners.values() for delivery in runner.lane.clear()]
        unstarted += self._suspects
        unstarted += self._twins
        self._suspects.clear()
        self._twins.clear()
        if self._keys is not None:
            unstarted += self._keys.clear()
        for delivery in unstarted:
            self.release(delivery)

    async def _take_back_notes(self) -> None:
        """What a thread keeps after the grace time was not a crash."""
        for delivery in self._left:
            if delivery.noted:
                try:
                    await self._consumer.note(delivery, _unnoted(delivery))
                except EventBusError as error:
                    note_failed(delivery, error)


def _unnoted(delivery: Delivery) -> HeaderDelta:
    """The crash count as it was before the note for a call that did not crash."""
    return {headers.CRASHES: delivery.history.crashes or None}
