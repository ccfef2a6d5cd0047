"""A runner per route: its lane, its pool of coroutines, and the call of its handler.

The pool is fixed and grows only as far as it is needed: a task per message would cost a quarter more.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from anyio import CapacityLimiter, to_thread

from eventbus import telemetry
from eventbus.batch import Batch
from eventbus.clock import Clock
from eventbus.errors import EventBusError, InvalidOutcome, InvalidPayload
from eventbus.scheduling.lanes import Lane
from eventbus.scheduling.shaped import ShapedLane
from eventbus.service import BatchWindow, Route
from eventbus.settlement import Delivery, Retry
from eventbus.status import ACKED, Outcome, outcome_of
from eventbus.worker.batches import call_batch
from eventbus.worker.calling import Aborted, Deadlines, Paused, Returned, begin, failure, rest_of
from eventbus.worker.solitude import Solitude

_LONG_RUN: Final = 0.01  # handlers that never await still let the loop breathe this often


class Office(Protocol):
    """What a runner needs of its worker."""

    def conclude(self, delivery: Delivery, outcome: Outcome, route: Route, *, in_place: bool) -> Retry | None:
        """Decide and settle; or, for a route that retries in place, give back the retry to be waited for."""

    async def wait_in_place(self, delivery: Delivery, retry: Retry) -> bool:
        """Hold a delivery until its retry is due; False when it is not to be called again."""

    def release(self, delivery: Delivery) -> None:
        """Hand back a delivery whose handler was stopped."""

    def leave(self, delivery: Delivery) -> None:
        """Leave a delivery unsettled whose thread goes on after we are gone."""

    def expired(self, delivery: Delivery) -> bool:
        """Park a delivery that expired while it waited for its turn; False if it did not."""

    def lane_opened(self) -> None:
        """A batch has ended, so that another may start."""


class Runner:
    """Runs one route's handler, at most `concurrency` at a time."""

    def __init__(
        self,
        route: Route,
        lane: Lane[Delivery] | ShapedLane[Delivery],
        *,
        service: str,
        clock: Clock,
        deadlines: Deadlines,
        solitude: Solitude,
        office: Office,
    ) -> None:
        self.route = route
        self.lane = lane
        self.stuck = 0
        self._clock = clock
        self._deadlines = deadlines
        self._solitude = solitude
        self._office = office
        self.tasks: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._limiter = None if route.signature.is_async else CapacityLimiter(route.concurrency + 1)
        self._measuring = telemetry.measuring()
        self._tracing = telemetry.tracing()
        self._on_finish: asyncio.Future[None] | None = None
        self._alone_hung: asyncio.Event | None = None
        self._closing = False
        self._flushing = False
        self._labels = {"service": service, "route": route.name}
        self._in_place = route.policy.retry.mode == "in-place"
        # Whether handlers run up to their first wait right where they were taken from the lane. Most of them end
        # there: those cost no coroutine, no deadline and no wake-up of another member of the pool.
        self._eager = route.batch is None and route.signature.is_async and not self._tracing

    # --- the pool --------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """There is work: wake the pool. An eager pool sends one ahead, who calls the others when it has to wait."""
        self._wake(1 if self._eager else self.lane.limit)

    def _wake(self, most: int) -> None:
        if self._solitude.shut or self._closing:
            return
        lane, window = self.lane, self.route.batch
        wanted = min(
            len(lane.ready) if window is None else lane.batches(window.size, self._patience(window), self._now()),
            lane.limit - lane.running,
            most,
        )
        while wanted > 0 and self._idle:
            idle = self._idle.pop()
            if not idle.done():
                idle.set_result(None)
                wanted -= 1
        loop = asyncio.get_running_loop()
        while wanted > 0 and len(self.tasks) < lane.limit:
            task = loop.create_task(self._work(), name=f"eventbus {self.route.name}")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            wanted -= 1

    def flush(self) -> None:
        """Send off the batch that is filling, however small: no more will come."""
        self._flushing = True
        self._wake(self.lane.limit)

    def _patience(self, window: BatchWindow) -> float:
        return 0.0 if self._flushing else window.timeout

    @property
    def next_batch_at(self) -> float | None:
        """When the batch that is filling must go, full or not."""
        window, oldest = self.route.batch, self.lane.oldest
        if window is None or oldest is None or self.lane.running >= self.lane.limit:
            return None
        return oldest + window.timeout

    def held_back(self, now: float) -> int:
        """How many ready deliveries wait for time alone: for a batch's window, or for a rate."""
        if self.route.batch is not None and (self.next_batch_at or 0.0) > now:
            return len(self.lane.ready) % self.route.batch.size  # full batches do not wait for their window
        return self.lane.held_back(now)

    @property
    def running(self) -> int:
        """Handlers in a call now, without threads that hang past their deadline."""
        return self.lane.running - self.stuck

    def close(self) -> None:
        """Start nothing more; whoever is idle goes home."""
        self._closing = True
        for idle in self._idle:
            if not idle.done():
                idle.set_result(None)
        self._idle.clear()

    async def finished(self) -> None:
        """Wait until no handler is running."""
        while self.running > 0:
            done = asyncio.get_running_loop().create_future()
            self._on_finish = done
            await done

    async def _work(self) -> None:
        lane, solitude, window = self.lane, self._solitude, self.route.batch
        loop = asyncio.get_running_loop()
        breath = loop.time()
        while not self._closing:
            taken: Sequence[Delivery] | Delivery | None = None
            if not solitude.shut:
                if window is None:
                    taken = lane.take()
                else:
                    taken = lane.take_batch(window.size, self._patience(window), self._now())
            if taken is None:
                idle = loop.create_future()
                self._idle.append(idle)
                await idle
                breath = loop.time()
                continue
            try:
                if not isinstance(taken, Delivery):
                    solitude.enter()
                    await self._handle_batch(taken)
                    continue
                started = time.perf_counter() if self._measuring else 0.0
                begun = self._begin(taken) if self._eager and taken.event.expires_at is None else None
                if begun is ACKED or (isinstance(begun, Outcome) and not self._in_place):
                    self._took(started)
                    self._conclude(taken, begun)
                else:
                    solitude.enter()
                    await self._handle(taken, begun, started)
            finally:
                self._ended(1 if isinstance(taken, Delivery) else len(taken))
            if loop.time() - breath > _LONG_RUN:
                await asyncio.sleep(0)
                breath = loop.time()

    def _ended(self, items: int) -> None:
        self.lane.running -= 1
        self.lane.in_hand -= items
        if self._on_finish is not None:
            self._tell_finished()
        if self.route.batch is not None:
            self._office.lane_opened()

    def _tell_finished(self) -> None:
        if self._on_finish is not None and not self._on_finish.done():
            self._on_finish.set_result(None)

    def _now(self) -> float:
        return self._clock.now()

    # --- one call --------------------------------------------------------------------------------------------

    async def handle_alone(self, delivery: Delivery) -> None:
        """Handle a suspect; the caller has seen to it that nothing else runs."""
        self._solitude.enter()
        self.lane.running += 1
        self.lane.in_hand += 1
        hung = self._alone_hung = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._alone(delivery), name=f"eventbus {self.route.name} alone")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: hung.set())
        # Until it has ended; or hangs in a thread, which from then on keeps a slot of this route and nothing else.
        await hung.wait()
        self._alone_hung = None

    async def _alone(self, delivery: Delivery) -> None:
        try:
            if self.route.batch is None:
                # Never in place: that would wait for a door which we hold shut ourselves.
                await self._handle(delivery, in_place=False)
            else:
                await self._handle_batch([delivery])
        finally:
            self._ended(1)

    async def _handle(
        self, delivery: Delivery, begun: Outcome | Paused | None = None, started: float = 0.0, *, in_place: bool = True
    ) -> None:
        """Call the handler, again and again if its policy retries in place; then pass on what came of it."""
        left = False  # whether the door of solitude was closed behind us already
        try:
            while begun is not None or not self._office.expired(delivery):
                if begun is None:
                    outcome = await self._outcome(delivery)
                else:
                    outcome = begun if isinstance(begun, Outcome) else await self._outcome_of(begun)
                    self._took(started)
                    begun = None
                if outcome is None:  # a thread that hung: answered for already, and no longer counted
                    left = True
                    return
                retry = self._conclude(delivery, outcome, in_place=in_place)
                if retry is None:
                    return
                self._solitude.leave()
                left = True
                if not await self._office.wait_in_place(delivery, retry):
                    return
                await self._solitude.enter_when_open()
                left = False
        except asyncio.CancelledError:
            self._hand_back([delivery])
            raise
        finally:
            if not left:
                self._solitude.leave()

    def _hand_back(self, deliveries: Sequence[Delivery]) -> None:
        # A thread goes on although we no longer wait for it: its message is left unsettled, not offered to others.
        for delivery in deliveries:
            if self.route.signature.is_async:
                self._office.release(delivery)
            else:
                self._office.leave(delivery)

    def _conclude(self, delivery: Delivery, outcome: Outcome, *, in_place: bool = False) -> Retry | None:
        return self._office.conclude(delivery, outcome, self.route, in_place=in_place)

    def _begin(self, delivery: Delivery) -> Outcome | Paused:
        """Run a coroutine handler up to its first wait."""
        arguments = self._decode(delivery)
        if isinstance(arguments, Outcome):
            return arguments
        try:
            begun = self._start(arguments)
        except asyncio.CancelledError:
            self._hand_back([delivery])
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            return failure(error)
        return begun if isinstance(begun, Paused) else self._said(begun.value)

    async def _outcome_of(self, paused: Paused) -> Outcome:
        """The outcome of a handler that has begun."""
        try:
            return self._said(await self._rest(paused))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            return failure(error)

    async def _outcome(self, delivery: Delivery) -> Outcome | None:
        """The same from the beginning, measured and traced where somebody listens."""
        if not (self._measuring or self._tracing):
            return await self._call(delivery)
        started = time.perf_counter()
        if self._tracing:
            with telemetry.consumer_span(delivery) as span:
                outcome = await self._call(delivery)
                if outcome is not None and outcome.error is not None:
                    telemetry.failed(span, repr(outcome.error))
        else:
            outcome = await self._call(delivery)
        self._took(started)
        return outcome

    def _took(self, started: float) -> None:
        if self._measuring:
            telemetry.handler_seconds.record(time.perf_counter() - started, self._labels)

    async def _call(self, delivery: Delivery) -> Outcome | None:
        """The handler's outcome, whatever it does; None if it hangs in a thread and was answered for."""
        try:
            arguments = self._decode(delivery)
            if isinstance(arguments, Outcome):
                return arguments
            return self._said(await self._result(arguments, [delivery]))
        except _Hung:
            return None
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            return failure(error)

    def _said(self, result: object) -> Outcome:
        if result is None:
            return ACKED
        try:
            return outcome_of(result)
        except InvalidOutcome as error:
            telemetry.log(logging.ERROR, "invalid_outcome", {"route": self.route.name, "error": str(error)})
            return Outcome(error=error)

    async def _result(
        self,
        arguments: Sequence[object],
        deliveries: Sequence[Delivery],
        on_hung: Callable[[], None] | None = None,
    ) -> object:
        """Call the handler within its deadline; raises TimeoutError when it is over."""
        route = self.route
        if not route.signature.is_async:
            return await self._in_thread(functools.partial(route.call, *arguments), deliveries, on_hung)
        begun = self._start(arguments)
        return await self._rest(begun) if isinstance(begun, Paused) else begun.value

    def _start(self, arguments: Sequence[object]) -> Returned | Paused:
        try:
            return begin(self.route.call(*arguments))  # type: ignore[arg-type]
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise Aborted(error) from error

    async def _rest(self, paused: Paused) -> object:
        """Await the rest of a handler within its deadline, which counts from here: until now nobody else ran either."""
        if self._eager and self.lane.running < self.lane.limit:
            self._wake(self.lane.limit)
        timeout = self.route.timeout
        call = self._deadlines.start(timeout)
        try:
            return await rest_of(paused)
        except asyncio.CancelledError as error:
            if call.timed_out and call.task.cancelling() <= 1:
                raise TimeoutError(f"no answer within {timeout:g} s") from None
            if call.task.cancelling():
                raise
            raise Aborted(error) from error
        except (Exception, KeyboardInterrupt, GeneratorExit):
            raise  # this GeneratorExit is our own end; a handler's was Aborted by rest_of
        except BaseException as error:
            raise Aborted(error) from error
        finally:
            self._deadlines.stop(call, timeout)
            if call.timed_out:
                call.task.uncancel()

    async def _in_thread(
        self, function: Callable[[], object], deliveries: Sequence[Delivery], on_hung: Callable[[], None] | None
    ) -> object:
        """Run a plain function in a thread. Nobody can stop a thread: a hanging one keeps its slot and is counted."""

        def answer() -> None:
            self.stuck += 1
            self._solitude.leave()
            telemetry.stuck.add(1, self._labels)
            telemetry.log(logging.ERROR, "handler_stuck", telemetry.about(deliveries[0]) | {"route": self.route.name})
            late = Outcome(error=TimeoutError(f"no answer within {self.route.timeout:g} s; its thread still runs"))
            for delivery in deliveries:
                self._conclude(delivery, late)
            if on_hung is not None:
                on_hung()
            self._tell_finished()
            if self._alone_hung is not None:
                self._alone_hung.set()

        call = self._deadlines.start(self.route.timeout, answer)
        try:
            result = await to_thread.run_sync(function, limiter=self._limiter)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and call.task.cancelling():
                raise  # we are shutting down, and no longer wait for the thread
            if call.timed_out:
                raise _Hung from None
            if isinstance(error, (Exception, KeyboardInterrupt)):
                raise
            raise Aborted(error) from error
        finally:
            self._deadlines.stop(call, self.route.timeout)
            if call.timed_out:
                self.stuck -= 1
                telemetry.stuck.add(-1, self._labels)
        if call.timed_out:
            raise _Hung
        return result

    # --- a batch ---------------------------------------------------------------------------------------------

    async def _handle_batch(self, deliveries: Sequence[Delivery]) -> None:
        """Call the handler with many; each of them is concluded by itself, and none of them twice."""
        waiting = dict.fromkeys(deliveries)  # those without an outcome so far
        rows: dict[Delivery, list[object]] = {}
        hung = False

        def conclude(delivery: Delivery, outcome: Outcome) -> None:
            del waiting[delivery]
            self._conclude(delivery, outcome)

        def answered_for(part: Sequence[Delivery]) -> None:
            # Their thread hangs; the rest of the batch has not been called yet, and is handed back.
            for delivery in part:
                del waiting[delivery]
            for delivery in waiting:
                self._office.release(delivery)
            waiting.clear()

        async def call(part: Sequence[Delivery], batch: Batch) -> object:
            columns = list(zip(*(rows[delivery] for delivery in part), strict=True))
            arguments = [
                batch if decode is None else list(column)
                for decode, column in zip(self.route.signature.arguments, columns, strict=True)
            ]
            return await self._result(arguments, part, lambda: answered_for(part))

        try:
            for delivery in deliveries:
                if self._office.expired(delivery):
                    del waiting[delivery]
                    continue
                row = self._decode(delivery)
                if isinstance(row, Outcome):
                    conclude(delivery, row)  # leaves before the batch
                else:
                    rows[delivery] = row
            split = self.route.batch is not None and self.route.batch.on_error == "split"
            if rows:
                await call_batch(list(rows), call, conclude, split=split)
        except _Hung:
            hung = True
        except asyncio.CancelledError:
            self._hand_back(list(waiting))
            raise
        finally:
            if not hung:
                self._solitude.leave()

    def _decode(self, delivery: Delivery) -> list[object] | Outcome:
        try:
            return [decode(delivery) if decode else None for decode in self.route.signature.arguments]
        except EventBusError as error:
            return Outcome(error=error)
        except Exception as error:  # noqa: BLE001 - a validator of the user's own raised something unheard of
            return Outcome(error=InvalidPayload(f"{type(error).__name__}: {error}"))


class _Hung(BaseException):
    """A thread came back after its deadline: its delivery was answered for, its result is dropped."""
