"""The breaker as a table of moments, and as a machine that hypothesis drives."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventbus.errors import ConfigError
from eventbus.forward.breaker import Breaker


def fail(breaker: Breaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        assert breaker.allow(now)
        breaker.record(False, now)


def test_it_opens_after_ten_failures_in_a_row():
    """Nine failures change nothing, the tenth opens it for five seconds."""
    breaker = Breaker()
    fail(breaker, 9)
    assert breaker.state == "closed"
    assert breaker.wait(0.0) == 0.0
    assert breaker.opens_at is None
    fail(breaker, 1)
    assert breaker.state == "open"
    assert not breaker.allow(0.0)
    assert breaker.wait(1.0) == 4.0
    assert breaker.opens_at == 5.0


def test_a_success_in_between_starts_the_count_again():
    """Only failures in a row count."""
    breaker = Breaker(failures=3)
    for _ in range(20):
        fail(breaker, 2)
        breaker.record(True, 0.0)
    assert breaker.state == "closed"


def test_the_open_time_doubles_to_its_maximum_and_falls_back_after_a_success():
    """5, 10, 20, 40, 60, 60 seconds; then a good probe, and 5 again."""
    breaker = Breaker()
    fail(breaker, 10)
    now, waits = 0.0, []
    for _ in range(6):
        waits.append(breaker.wait(now))
        now += breaker.wait(now)
        fail(breaker, 1, now)
    assert waits == [5, 10, 20, 40, 60, 60]
    now += breaker.wait(now)
    assert breaker.allow(now)
    breaker.record(True, now)
    assert breaker.state == "closed"
    fail(breaker, 10, now)
    assert breaker.wait(now) == 5.0


def test_one_probe_goes_when_the_time_is_up():
    """Half-open lets exactly one call through; the others look again soon."""
    breaker = Breaker()
    fail(breaker, 10)
    assert not breaker.allow(4.99)
    assert breaker.allow(5.0)
    assert breaker.state == "half-open"
    assert not breaker.allow(5.0)
    assert not breaker.allow(500.0)
    assert breaker.wait(5.0) == 1.0


def test_a_probe_that_is_called_off_makes_room_for_another():
    """A shutdown in the middle of a probe does not keep the breaker half-open for ever."""
    breaker = Breaker()
    fail(breaker, 10)
    assert breaker.allow(5.0)
    breaker.forget(breaker.epoch)
    assert breaker.wait(5.0) == 0.0
    assert breaker.allow(5.0)


@pytest.mark.parametrize("late", [True, False])
def test_the_late_result_of_an_earlier_state_is_ignored(late):
    """A call from before the opening neither closes nor doubles anything, nor stands in for the probe."""
    breaker = Breaker()
    assert breaker.allow(0.0)
    slow = breaker.epoch
    fail(breaker, 10)
    breaker.record(late, 1.0, slow)
    assert breaker.state == "open"
    assert breaker.allow(5.0)
    breaker.record(late, 5.0, slow)
    breaker.forget(slow)
    assert breaker.state == "half-open"
    assert not breaker.allow(5.0)


def test_a_clock_that_is_set_back_does_not_keep_it_open():
    """The wait is never longer than the open time, whatever the clock does."""
    breaker = Breaker()
    fail(breaker, 10, now=10_000.0)
    assert breaker.wait(0.0) == 5.0
    assert breaker.allow(5.0)


@pytest.mark.parametrize(
    "settings",
    [{"failures": 0}, {"failures": True}, {"failures": 1.5}, {"open": 0}, {"open": "2m"}, {"open": 5, "max": 4}],
)
def test_impossible_settings_name_the_key(settings):
    """A bad number is an error at construction."""
    with pytest.raises(ConfigError, match="breaker"):
        Breaker(**settings)


def test_durations_are_written_as_everywhere_else():
    """Texts such as '5s' are taken."""
    breaker = Breaker(open="500ms", max="1m")
    assert (breaker.open, breaker.max) == (0.5, 60.0)


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["ok", "fail", "forget", "late"])), max_size=200))
@example([(0.0, "fail"), (0.0, "fail"), (0.9816481211807784, "fail"), (0.9816481211807784, "ok")])
def test_it_never_locks_up_and_never_lets_two_probes_go(steps):
    """Whatever happens, waiting as told leads to an allowed call, and half-open has one call in flight."""
    breaker, now, old = Breaker(failures=3), 0.0, 0
    for pause, end in steps:
        now += pause
        assert 0.0 <= breaker.wait(now) <= breaker.max
        if not breaker.allow(now):
            assert breaker.state == "open"
            now += breaker.wait(now)
            assert breaker.allow(now)
        epoch = breaker.epoch
        if breaker.state == "half-open":
            assert not breaker.allow(now)
        if end == "late" and old != epoch:
            breaker.record(True, now, old)
        if end == "forget":
            breaker.forget(epoch)
        else:
            breaker.record(end == "ok", now, epoch)
        old = epoch


def closed_again(**numbers: float) -> Breaker:
    breaker = Breaker(failures=2, **numbers)  # type: ignore[arg-type]
    fail(breaker, 2)
    assert breaker.allow(5.0)
    breaker.record(True, 5.0)
    assert breaker.state == "closed"
    return breaker


def test_an_endpoint_that_comes_back_gets_a_few_calls_first():
    """One at a time, one more for every four that succeed, and from 64 on any number."""
    breaker = closed_again()
    limits = []
    while breaker.limit is not None:
        limits.append(breaker.limit)
        assert breaker.room == breaker.limit
        for _ in range(breaker.limit):
            assert breaker.allow(5.0)
        assert breaker.room == 0
        assert not breaker.allow(5.0)
        for _ in range(limits[-1]):
            breaker.record(True, 5.0)
    assert limits[:8] == [1, 1, 1, 1, 2, 2, 3, 3]
    assert limits[-1] < 64
    assert all(breaker.allow(5.0) for _ in range(1000))
    assert breaker.room is None


def test_a_failure_while_it_comes_back_halves_what_it_gets():
    """And as many as ever in a row open it again."""
    breaker = closed_again()
    for _ in range(40):
        assert breaker.allow(5.0)
        breaker.record(True, 5.0)
    assert breaker.limit == 11
    assert breaker.allow(5.0)
    breaker.record(False, 5.0)
    assert breaker.limit == 6
    assert breaker.state == "closed"
    assert breaker.allow(5.0)
    breaker.record(False, 5.0)
    assert breaker.state == "open"
    assert breaker.limit is None


def test_a_call_that_is_called_off_makes_room():
    """A shutdown in the middle leaves no place taken."""
    breaker = closed_again()
    assert breaker.allow(5.0)
    assert not breaker.allow(5.0)
    breaker.forget(breaker.epoch)
    assert breaker.allow(5.0)
