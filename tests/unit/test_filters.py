"""The filter language of the dead-letter operations."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import ConfigError, DeadLetter, Event
from eventbus.filters import FIELDS, Filter

PARKED = datetime(2025, 6, 1, 12, 0, tzinfo=timezone.utc)
NOW = (PARKED + timedelta(hours=2)).timestamp()


def letter(**changes: object) -> DeadLetter:
    values: dict[str, object] = {
        "address": "1",
        "id": "o-1",
        "type": "order.created",
        "time": PARKED,
        "service": "wms",
        "tenant": "acme",
        "key": "k 1",
        "reason": "max-retries",
        "error": "500: it's Boom",
        "error_code": "550",
        "status": 500,
        "retries": 10,
        "redriven": 1,
        "parked_at": PARKED,
        "event": Event("order.created"),
    }
    return DeadLetter(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("", True),
        ("   ", True),
        ("status=500", True),
        ("status=501", False),
        ("status!=500", False),
        ("status>499", True),
        ("status>=500", True),
        ("status<500", False),
        ("status<=500", True),
        ("status=5xx", True),
        ("status=4xx", False),
        ("status!=4xx", True),
        ("status!=5xx", False),
        ("age>1h", True),
        ("age>2h", False),
        ("age>=2h", True),
        ("age<1d", True),
        ("age=2h", True),
        ("age>1h30m", True),
        ("type=order.created", True),
        ("type=order.*", True),
        ("type=#", True),
        ("type=invoice.#", False),
        ("type!=order.*", False),
        ("type!=invoice.*", True),
        ("type~CREATED", True),
        ("tenant=acme", True),
        ("tenant=ACME", False),
        ("tenant!=acme", False),
        ("tenant~cm", True),
        ("reason=max-retries", True),
        ("code=550", True),
        ("code=55", False),
        ("code~5", True),
        ("id=o-1", True),
        ('key="k 1"', True),
        ("key='k 1'", True),
        ("error~boom", True),
        ('error~"it\'s"', True),
        ("error~'\"'", False),
        ("retries=10", True),
        ("retries>9", True),
        ("retries<10", False),
        ("redriven>=1", True),
        ("status = 500", True),
        ("status=500 tenant=acme", True),
        ("status=500 tenant=other", False),
        ("\tstatus=500\n  age>1h  ", True),
        ("id=a=b", False),
    ],
)
def test_a_filter_matches(where, expected):
    """Each field, each operator, and terms that must all hold."""
    assert Filter.of(where).matches(letter(), NOW) is expected


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("status=500", False),
        ("status!=500", True),
        ("status<500", False),
        ("status=5xx", False),
        ("status!=5xx", True),
        ("age>1h", False),
        ("age<1h", False),
        ("tenant=acme", False),
        ("tenant!=acme", True),
        ("tenant=''", True),
        ("code~5", False),
    ],
)
def test_what_a_letter_does_not_have_equals_nothing(where, expected):
    """A missing status, age, tenant or code matches only what asks for a difference."""
    empty = letter(status=None, parked_at=None, tenant=None, error_code=None)
    assert Filter.of(where).matches(empty, NOW) is expected


@pytest.mark.parametrize(
    "where",
    [
        "status",
        "status=",
        "=500",
        "status==",
        "bogus=1",
        "STATUS=500",
        "status=abc",
        "status=6xx",
        "status~5",
        "status>5xx",
        "status=5XX0",
        "age>soon",
        "age>-1h",
        "age~1h",
        "retries=many",
        "retries~1",
        "retries=-1",
        "retries=1.5",
        "retries=²",
        "status=²",
        "tenant>acme",
        "id<=5",
        "type>a",
        "type=order*",
        "type=order..created",
        "500",
        "status=500,tenant=acme",
        "tenant='acme",
        'tenant="acme',
        "status=500 and tenant=acme",
    ],
    ids=ascii,
)
def test_what_cannot_be_read_is_a_config_error(where):
    """A purge must never guess: a bad filter is one line that says what is allowed."""
    with pytest.raises(ConfigError, match=r"filter|duration|pattern"):
        Filter.of(where)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("error=\"'quoted'\"", "'quoted'"),
        ("error='say \"x\"'", 'say "x"'),
        ("error=\"it's 'x'\"", "it's 'x'"),
        ("error='\"'", '"'),
    ],
)
def test_only_the_outer_quotes_are_taken_off(where, value):
    """Quotes inside a quoted text belong to it."""
    assert Filter.of(where).matches(letter(error=value), NOW)


@given(
    st.text(max_size=30)
    | st.lists(st.sampled_from([*FIELDS, "=", "!=", ">", "~", "'", '"', " ", "5", "1h"])).map("".join)
)
def test_any_text_is_a_filter_or_a_config_error(text):
    """Nothing else comes out of the parser, and what does can be asked."""
    try:
        found = Filter.of(text)
    except ConfigError:
        return
    assert found.matches(letter(), NOW) in (True, False)
    assert found.empty is (not text.strip())


def test_a_filter_is_made_once():
    """A Filter passes through, None is everything."""
    made = Filter.of("status=500")
    assert Filter.of(made) is made
    assert Filter.of(None).empty
    assert Filter.of(None).matches(letter(), NOW)
