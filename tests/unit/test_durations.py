"""Durations as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import ConfigError
from eventbus.durations import human, seconds


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, 5.0),
        (0, 0.0),
        (0.25, 0.25),
        (timedelta(minutes=1), 60.0),
        ("5", 5.0),
        ("5s", 5.0),
        ("0", 0.0),
        ("250ms", 0.25),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("3m", 180.0),
        ("3min", 180.0),
        ("1.5h", 5400.0),
        ("1h30m", 5400.0),
        ("1m30s", 90.0),
        ("1s500ms", 1.5),
        (" 5S ", 5.0),
        ("5 s", 5.0),
        ("2H", 7200.0),
    ],
    ids=str,
)
def test_a_duration(value, expected):
    """Numbers are seconds; texts have units; timedeltas are what they are."""
    assert seconds(value) == pytest.approx(expected)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "soon",
        "s",
        "5x",
        "5 s x",
        "-5s",
        "-1",
        "1m30",
        "5,5s",
        "1e3",
        "0x10",
        "inf",
        "nan",
        "5s\x00",
        "9" * 400,
        "1.s",
        ".5s",
        -1,
        -0.001,
        float("nan"),
        float("inf"),
        10**10,
        10**400,
        True,
        False,
        None,
        [],
        b"5s",
        timedelta(seconds=-1),
        timedelta.max,
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_duration_is_a_config_error(value):
    """A ConfigError that shows the value, never another exception."""
    with pytest.raises(ConfigError, match="duration"):
        seconds(value)


@given(st.text(max_size=20) | st.text("0123456789.smhdin -", max_size=12))
def test_any_text_is_a_duration_or_a_config_error(text):
    """Nothing else comes out of the parser."""
    try:
        found = seconds(text)
    except ConfigError:
        return
    assert 0 <= found < 10**10


@given(st.integers(0, 100), st.integers(0, 59), st.integers(0, 59))
def test_parts_add_up(hours, minutes, rest):
    """An hour, a minute and a second in one text are their sum."""
    assert seconds(f"{hours}h{minutes}m{rest}s") == hours * 3600 + minutes * 60 + rest


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0ms"),
        (0.25, "250ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59, "59s"),
        (60, "1m"),
        (90, "1.5m"),
        (3600, "1h"),
        (86400, "1d"),
        (864000, "10d"),
    ],
)
def test_a_short_text_for_people(value, text):
    """The largest unit that fits, with at most one digit after the point."""
    assert human(value) == text


@given(st.floats(0.001, 10**9))
def test_the_short_text_is_about_right(value):
    """Reading it again gives the value to within the rounding of its last digit."""
    assert seconds(human(value)) == pytest.approx(value, rel=0.06, abs=0.0006)
