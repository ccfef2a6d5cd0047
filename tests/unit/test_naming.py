"""Names of services, and topic patterns with the meaning AMQP gives them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import Bus, ConfigError, Service
from eventbus.naming import (
    check_pattern,
    check_prefix,
    check_service,
    is_pattern,
    literal_length,
    matches,
    prefix_of,
)


@pytest.mark.parametrize("name", ["a", "0", "wms", "wms-cincout", "a--b", "a-1-b", "x" * 100, "1-2"])
def test_a_good_service_name(name):
    """Letters, digits and inner hyphens, up to 100."""
    assert check_service(name) == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        pytest.param("", "use a-z", id="empty"),
        pytest.param("-", "use a-z", id="hyphen"),
        pytest.param("-a", "'a'", id="leading hyphen"),
        pytest.param("a-", "'a'", id="trailing hyphen"),
        pytest.param("WMS", "'wms'", id="capital letters"),
        pytest.param("wms_cincout", "'wms-cincout'", id="underscore"),
        pytest.param("wms.cincout", "'wms-cincout'", id="dot"),
        pytest.param("wms cincout", "'wms-cincout'", id="space"),
        pytest.param("wms\n", "'wms'", id="line feed at the end"),
        pytest.param("wms/../x", "'wms-x'", id="path"),
        pytest.param("é", "use a-z", id="accent"),
        pytest.param("٣", "use a-z", id="arabic digit"),
        pytest.param("x" * 101, "at most 100", id="101 characters"),
        pytest.param(None, "use a-z", id="None"),
        pytest.param(5, "use a-z", id="number"),
    ],
)
def test_a_bad_service_name_names_the_fix(name, hint):
    """The error says what is allowed and, where it can, what to write instead."""
    with pytest.raises(ConfigError, match=hint):
        check_service(name)
    with pytest.raises(ConfigError):
        Service(name)


@given(st.text(max_size=150))
def test_the_fix_that_is_offered_is_a_good_name(name):
    """Whoever copies the suggestion gets a service."""
    try:
        check_service(name)
    except ConfigError as error:
        _, offered, fix = str(error).rpartition("try ")
        if offered:
            assert check_service(fix.strip("'"))


@pytest.mark.parametrize(
    ("service", "prefix"),
    [("wms-cincout", "wms"), ("wms", "default"), ("a-b-c", "a"), ("amq", "default"), ("1-2", "1"), ("", "default")],
)
def test_the_prefix_is_what_stands_before_the_first_hyphen(service, prefix):
    """Without a hyphen it is `default`."""
    assert prefix_of(service) == prefix


@pytest.mark.parametrize("prefix", ["amq", "", "A", "a.b", "a_b", "-a", "a-", "x" * 101, "a\n", None, 5])
def test_a_bad_prefix_is_refused(prefix):
    """`amq` belongs to RabbitMQ; anything else must be a name."""
    with pytest.raises(ConfigError, match="prefix"):
        check_prefix(prefix)
    if prefix is not None:
        with pytest.raises(ConfigError, match="prefix"):
            Service("wms", prefix=prefix)


def test_a_service_cannot_have_the_prefix_amq_by_its_name():
    """`amq-orders` would declare queues that RabbitMQ refuses."""
    with pytest.raises(ConfigError, match="amq"):
        Service("amq-orders")
    assert Service("amq-orders", prefix="mine").prefix == "mine"
    with pytest.raises(ConfigError, match="amq"):
        Bus("memory://", source="amq-orders")


@pytest.mark.parametrize("pattern", ["order", "order.created", "order.*", "#", "*", "a.#.b", "#.#", "*.*.*", "A-b_c.é"])
def test_a_good_pattern(pattern):
    """Words joined by dots; `*` and `#` are words."""
    assert check_pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", ["", ".", "a.", ".a", "a..b", "or*", "*a", "a.b#", "##", "**", "*#", None, 5])
def test_a_bad_pattern_is_refused(pattern):
    """Empty words, and wildcards inside words, are errors that show the pattern."""
    with pytest.raises(ConfigError, match="pattern"):
        check_pattern(pattern)
    with pytest.raises(ConfigError, match="pattern"):
        Service("wms").on(pattern)(lambda event: None)


@pytest.mark.parametrize(
    ("pattern", "type", "expected"),
    [
        ("order.created", "order.created", True),
        ("order.created", "order.creates", False),
        ("order.created", "orderxcreated", False),
        ("order.created", "order", False),
        ("order.created", "order.created.v2", False),
        ("order", "Order", False),
        ("*", "order", True),
        ("*", "order.created", False),
        ("*.*", "order", False),
        ("*.*", "order.created", True),
        ("order.*", "order.created", True),
        ("order.*", "order", False),
        ("order.*", "order.created.v2", False),
        ("order.*", "orders.created", False),
        ("order.*", "order.", True),
        ("*.created", "order.created", True),
        ("*.created", "created", False),
        ("*.created", "a.order.created", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.c", False),
        ("a.*.c", "a.b.b.c", False),
        ("#", "order", True),
        ("#", "order.created.v2", True),
        ("#", "..", True),
        ("order.#", "order", True),
        ("order.#", "order.created", True),
        ("order.#", "order.created.v2", True),
        ("order.#", "orders", False),
        ("order.#", "orders.created", False),
        ("#.created", "created", True),
        ("#.created", "a.b.created", True),
        ("#.created", "recreated", False),
        ("#.created", "created.a", False),
        ("a.#.c", "a.c", True),
        ("a.#.c", "a.b.c", True),
        ("a.#.c", "a.b.b.b.c", True),
        ("a.#.c", "a.bc", False),
        ("a.#.c", "ac", False),
        ("a.#.c", "a", False),
        ("#.*", "a", True),
        ("#.*", "a.b.c", True),
        ("*.#", "a", True),
        ("*.#.*", "a", False),
        ("*.#.*", "a.b", True),
        ("#.a.#", "a", True),
        ("#.a.#", "b.a.c", True),
        ("#.a.#", "b.c", False),
        ("#.#", "a", True),
        ("#.#.a", "a", True),
        ("a.#.#.b", "a.b", True),
        ("a+b.*", "a+b.c", True),
        ("a+b.*", "aab.c", False),
        ("(a.*", "(a.b", True),
        ("a.*", "a.b\nc", True),
        ("a", "a\n", False),
    ],
)
def test_patterns_match_as_amqp_topics_do(pattern, type, expected):
    """`*` is exactly one word, `#` any number of words, also none; dots divide words, everything else is literal."""
    assert matches(pattern, type) is expected


def reference(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return any(reference(rest, words[skip:]) for skip in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and reference(rest, words[1:])


@given(
    st.lists(st.sampled_from(["*", "#", "a", "b", "ab"]), min_size=1, max_size=6),
    st.lists(st.sampled_from(["a", "b", "ab", "", "a+", "*"]), min_size=1, max_size=6),
)
def test_patterns_agree_with_a_slow_and_plain_matcher(pattern, words):
    """Word by word, with no regular expression."""
    type = ".".join(words)
    if not type:  # RabbitMQ takes an empty routing key for no words at all; an event always has a type
        return
    assert matches(".".join(pattern), type) is reference(pattern, words)


def test_a_pattern_of_many_wildcards_is_matched_in_no_time():
    """Event types come from strangers: no route of a service may make one expensive."""
    code = (
        "from eventbus.naming import matches\n"
        "for pattern in ('#.a.#.a.#.a.#.a.#.a.#.b', '.'.join('#' * 12) + '.b'):\n"
        "    assert not matches(pattern, '.'.join('a' * 500))\n"
    )
    try:
        subprocess.run([sys.executable, "-c", code], timeout=10, check=True)
    except subprocess.TimeoutExpired:
        pytest.fail("matching one event type took longer than 10 s")


@pytest.mark.parametrize(
    ("pattern", "length"),
    [("order.created", 13), ("order.*", 6), ("order.#", 6), ("#", 0), ("*.a", 0), ("a.#.b.*", 2)],
)
def test_the_literal_beginning(pattern, length):
    """What stands before the first wildcard decides which pattern is more exact."""
    assert literal_length(pattern) == length
    assert is_pattern(pattern) is (pattern != "order.created")
