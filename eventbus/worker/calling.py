"""Calling a handler: in a context of its own, within a deadline, in a thread if it is a plain function."""

from __future__ import annotations

import asyncio
import contextvars
import math
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from eventbus.status import Outcome

_GRAIN: Final = 0.02  # deadlines may be this much late; one timer then serves many calls


class Aborted(Exception):
    """A handler ended by something that is no Exception: sys.exit(), a cancellation from inside, and the like."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        super().__init__(cause)


def failure(error: Exception) -> Outcome:
    """The outcome of a handler that raised."""
    if not isinstance(error, Aborted):
        return Outcome(error=error)
    return Outcome(error=error.cause, reason=f"the handler ended by {type(error.cause).__name__}")


class Call:
    """A handler that is running now."""

    __slots__ = ("deadline", "on_timeout", "task", "timed_out")

    def __init__(self, deadline: float, task: asyncio.Task[object], on_timeout: Callable[[], None] | None) -> None:
        self.deadline = deadline
        self.task = task
        self.on_timeout = on_timeout
        self.timed_out = False


class Deadlines:
    """One timer for all running calls: a timeout object for each would cost more than the call itself.

    An overdue coroutine is cancelled; for an overdue thread `on_timeout` answers in its place.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Calls with the same timeout end in the order of their start, so the first of each group is the next due.
        self._groups: dict[float, dict[Call, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # the deadline that the timer is for: nobody's is before it

    def start(self, timeout: float, on_timeout: Callable[[], None] | None = None) -> Call:
        """Watch the current task's call."""
        task = asyncio.current_task()
        assert task is not None
        call = Call(self._loop.time() + timeout, task, on_timeout)
        self._groups.setdefault(timeout, {})[call] = None
        if call.deadline < self._due:
            self._arm(call.deadline)
        return call

    def stop(self, call: Call, timeout: float) -> None:
        """The call has ended."""
        self._groups[timeout].pop(call, None)

    def close(self) -> None:
        """Forget everything."""
        if self._timer is not None:
            self._timer.cancel()
        self._groups.clear()

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = when
        self._timer = self._loop.call_at(when + _GRAIN, self._sweep)

    def _sweep(self) -> None:
        self._timer, self._due = None, math.inf
        now = self._loop.time()
        following: float | None = None
        for group in self._groups.values():
            while group:
                call = next(iter(group))
                if call.deadline > now:
                    following = call.deadline if following is None else min(following, call.deadline)
                    break
                del group[call]
                call.timed_out = True
                if call.on_timeout is not None:
                    call.on_timeout()
                else:
                    call.task.cancel()
        if following is not None:
            self._arm(following)


class Returned:
    """A handler that has ended, with what it returned."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


NOTHING: Final = Returned(None)


class Line:
    """Calls one coroutine handler after the other, each in a context of its own, without the price of a task.

    Workers are reused for message after message; what a handler puts into a context variable (a logger's fields,
    a tracing span) must not show up in the next one.
    """

    __slots__ = ("_generator", "_run", "_waiting_for")

    def __init__(self) -> None:
        self._run: Callable[..., object] = contextvars.copy_context().run
        self._waiting_for: object = None
        self._renew()

    def _renew(self) -> None:
        self._generator = _one_by_one()
        next(self._generator)

    def begin(self, call: Callable[..., object], arguments: Sequence[object]) -> Returned | Line:
        """Call a handler and run it up to its first wait. The line itself is the answer if there is one: see `rest`.

        Raises what the handler raises; Aborted for what is no Exception and was not meant for us.
        """
        run = contextvars.copy_context().run
        try:
            answer = run(self._generator.send, call(*arguments))
        except BaseException as error:
            self._renew()
            if isinstance(error, (Exception, KeyboardInterrupt)) or _our_own_end(error):
                raise
            raise Aborted(error) from error
        if type(answer) is Returned:
            return answer
        self._run, self._waiting_for = run, answer
        return self

    @types.coroutine
    def rest(self) -> Generator[object, object, object]:
        """Await what is left of the handler that has begun, still in its own context."""
        generator, run, waiting_for = self._generator, self._run, self._waiting_for
        try:
            while type(waiting_for) is not Returned:
                try:
                    answer = yield waiting_for
                except GeneratorExit:
                    run(generator.close)
                    raise
                except BaseException as error:  # noqa: BLE001 - cancellation too belongs into the handler
                    step: Callable[..., object] = generator.throw
                    answer = error
                else:
                    step = generator.send
                try:
                    waiting_for = run(step, answer)
                except GeneratorExit as error:
                    raise Aborted(error) from error  # raised by the handler itself; ours comes by the yield above
        except BaseException:
            self._renew()
            raise
        return waiting_for.value


@types.coroutine
def _one_by_one() -> Generator[object, Any, None]:
    """Run each coroutine that is sent in; yields what it waits for, and in the end what it has Returned.

    Whoever drives a coroutine by hand learns of its end by an exception, which costs more than all the rest of a quick
    handler; whoever delegates to it does not.
    """
    ended: Returned | None = None
    while True:
        coroutine = yield ended
        value = yield from coroutine
        ended = NOTHING if value is None else Returned(value)


def _our_own_end(error: BaseException) -> bool:
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
