"""A runner per route: its lane, its pool of coroutines, and the call of its handler.

The pool is fixed and grows only as far as it is needed: a task per message would cost a quarter more.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from time import perf_counter
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
from eventbus.worker.calling import Aborted, Deadlines, Line, Returned, failure
from eventbus.worker.solitude import Solitude

_LONG_RUN: Final = 0.01  # handlers that never await still let the loop breathe this often


class Office(Protocol):
    """What a runner needs of its worker."""

    def conclude(self, delivery: Delivery, outcome: Outcome, route: Route, *, in_place: bool = False) -> Retry | None:
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
        self._read = route.signature.read
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
        # Whether handlers run up to their first wait right where they were taken from the lane, see `_ahead`.
        self._eager = route.batch is None and route.signature.is_async and not self._tracing
        self.max_attempts = route.policy.max_attempts

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
        line, until = Line(), perf_counter() + _LONG_RUN
        while not self._closing:
            taken = self._take()
            if taken is None:
                idle = asyncio.get_running_loop().create_future()
                self._idle.append(idle)
                await idle
                until = perf_counter() + _LONG_RUN
                continue
            try:
                if not isinstance(taken, Delivery):
                    self._solitude.enter()
                    await self._handle_batch(taken)
                elif not self._eager:
                    self._solitude.enter()
                    await self._handle(taken)
                elif (begun := self._ahead(taken, line, until)) is not None:
                    self._solitude.enter()
                    await self._handle(*begun)
            finally:
                self._ended(1 if isinstance(taken, Delivery) else len(taken))
            if perf_counter() > until:
                await asyncio.sleep(0)
                until = perf_counter() + _LONG_RUN

    def _take(self) -> Sequence[Delivery] | Delivery | None:
        if self._solitude.shut:
            return None
        window = self.route.batch
        if window is None:
            return self.lane.take()
        return self.lane.take_batch(window.size, self._patience(window), self._now())

    def _ahead(self, delivery: Delivery, line: Line, until: float) -> tuple[Delivery, Outcome | Line, float] | None:
        """Handle this one and those behind it, up to the first that has to wait: it is returned, and what has begun.

        Most never wait: those cost no coroutine, no deadline, no place in the lane, and no wake-up of another member
        of the pool.
        """
        route, lane, conclude = self.route, self.lane, self._office.conclude
        following: Delivery | None = delivery
        while following is not None:
            delivery = following
            if delivery.event.expires_at is None or not self._office.expired(delivery):
                started = perf_counter() if self._measuring else 0.0
                begun = self._begin(delivery, line)
                if begun is not ACKED and (self._in_place or not isinstance(begun, Outcome)):
                    return delivery, begun, started
                if started:
                    self._took(started)
                conclude(delivery, begun, route)
            following = lane.following() if perf_counter() < until else None
        return None

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
        self, delivery: Delivery, begun: Outcome | Line | None = None, started: float = 0.0, *, in_place: bool = True
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
                retry = self._office.conclude(delivery, outcome, self.route, in_place=in_place)
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

    def _begin(self, delivery: Delivery, line: Line) -> Outcome | Line:
        """Run a coroutine handler up to its first wait."""
        try:
            arguments = self._read(delivery)
        except Exception as error:  # noqa: BLE001 - see there
            return _unfit(error)
        try:
            begun = line.begin(self.route.call, arguments)
        except asyncio.CancelledError:
            self._hand_back([delivery])
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            return failure(error)
        return self._said(begun.value) if isinstance(begun, Returned) else begun

    async def _outcome_of(self, line: Line) -> Outcome:
        """The outcome of a handler that has begun."""
        try:
            return self._said(await self._rest(line))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            return failure(error)

    async def _outcome(self, delivery: Delivery) -> Outcome | None:
        """The same from the beginning, measured and traced where somebody listens."""
        if not (self._measuring or self._tracing):
            return await self._call(delivery)
        started = perf_counter()
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
            telemetry.handler_seconds.record(perf_counter() - started, self._labels)

    async def _call(self, delivery: Delivery) -> Outcome | None:
        """The handler's outcome, whatever it does; None if it hangs in a thread and was answered for."""
        try:
            arguments = self._read(delivery)
        except Exception as error:  # noqa: BLE001 - see there
            return _unfit(error)
        try:
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
        begun = Line().begin(route.call, arguments)
        return begun.value if isinstance(begun, Returned) else await self._rest(begun)

    async def _rest(self, line: Line) -> object:
        """Await the rest of a handler within its deadline, which counts from here: until now nobody else ran either."""
        if self._eager and self.lane.running < self.lane.limit:
            self._wake(self.lane.limit)
        timeout = self.route.timeout
        call = self._deadlines.start(timeout)
        try:
            return await line.rest()
        except asyncio.CancelledError as error:
            if call.timed_out and call.task.cancelling() <= 1:
                raise TimeoutError(f"no answer within {timeout:g} s") from None
            if call.task.cancelling():
                raise
            raise Aborted(error) from error
        except (Exception, KeyboardInterrupt, GeneratorExit):
            raise  # this GeneratorExit is our own end; a handler's was Aborted by the line
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
                self._office.conclude(delivery, late, self.route)
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
        rows: dict[Delivery, Sequence[object]] = {}
        hung = False

        def conclude(delivery: Delivery, outcome: Outcome) -> None:
            del waiting[delivery]
            self._office.conclude(delivery, outcome, self.route)

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
                try:
                    rows[delivery] = self._read(delivery)
                except Exception as error:  # noqa: BLE001 - see there
                    conclude(delivery, _unfit(error))  # leaves before the batch
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


def _unfit(error: Exception) -> Outcome:
    """The outcome of a body that is not what its handler asks for."""
    if isinstance(error, EventBusError):
        return Outcome(error=error)
    # A validator of the user's own raised something unheard of.
    return Outcome(error=InvalidPayload(f"{type(error).__name__}: {error}"))


class _Hung(BaseException):
    """A thread came back after its deadline: its delivery was answered for, its result is dropped."""
