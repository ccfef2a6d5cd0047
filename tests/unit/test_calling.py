"""A line: handlers one after the other, each in a context of its own, whatever the one before did."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from eventbus.worker.calling import NOTHING, Aborted, Line, Returned

MARK: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="")


async def _quick(value: object) -> object:
    return value


async def _marking(value: str) -> str:
    before = MARK.get()
    MARK.set(value)
    await asyncio.sleep(0)
    return f"{before}{MARK.get()}"


async def _failing(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def _failing_at_once(error: BaseException) -> None:
    raise error


async def _call(line: Line, call: object, *arguments: object) -> object:
    begun = line.begin(call, arguments)  # type: ignore[arg-type]
    return begun.value if isinstance(begun, Returned) else await begun.rest()


async def test_who_never_waits_has_ended_where_it_was_called() -> None:
    """One after the other, with what each returned."""
    line = Line()
    assert line.begin(_quick, [None]) is NOTHING
    begun = line.begin(_quick, [425])
    assert isinstance(begun, Returned)
    assert begun.value == 425


async def test_no_handler_sees_what_the_one_before_put_into_a_context_variable() -> None:
    """Before its first wait and after it, each has its own."""
    line = Line()
    assert [await _call(line, _marking, name) for name in "abc"] == ["a", "b", "c"]
    assert MARK.get() == ""


@pytest.mark.parametrize("failing", [_failing, _failing_at_once])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("x"), ValueError), (SystemExit(1), BaseException), (GeneratorExit(), Aborted)],
)
async def test_after_a_failure_the_line_goes_on(
    failing: object, error: BaseException, raised: type[BaseException]
) -> None:
    """Whatever it was: the next handler is called as if nothing had been."""
    line = Line()
    with pytest.raises(raised):
        await _call(line, failing, error)
    assert await _call(line, _marking, "next") == "next"


async def test_a_handler_may_end_by_a_cancellation_of_its_own() -> None:
    """Nobody has cancelled us: it is its outcome, and not our end."""
    with pytest.raises(Aborted):
        Line().begin(_failing_at_once, [asyncio.CancelledError()])


async def test_a_line_that_is_closed_closes_its_handler() -> None:
    """Where the loop ends with a handler waiting, its `finally` is run."""
    ended = False

    async def waiting() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(3600)
        finally:
            ended = True

    begun = Line().begin(waiting, ())
    assert isinstance(begun, Line)
    rest = begun.rest()
    rest.send(None)
    rest.close()
    assert ended
