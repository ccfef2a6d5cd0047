"""Which route takes an event: exactly one, by rules that do not depend on luck."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import ConfigError, Event, RetryPolicy, Service, StatusMap
from eventbus.naming import literal_length, matches


def service(*patterns: str, **options: object) -> Service:
    made = Service("wms-cincout", **options)  # type: ignore[arg-type]
    for pattern in patterns:
        made.on(pattern)(lambda event: None)
    return made


def taken_by(made: Service, type: str) -> str | None:
    route = made.route(type)
    return None if route is None else route.pattern


@pytest.mark.parametrize(
    ("patterns", "type", "expected"),
    [
        pytest.param(["#", "order.*", "order.created"], "order.created", "order.created", id="exact before pattern"),
        pytest.param(["order.created", "order.*", "#"], "order.created", "order.created", id="in any order"),
        pytest.param(["#", "order.#", "order.line.*"], "order.line.added", "order.line.*", id="longest beginning"),
        pytest.param(["order.#", "order.*"], "order.created", "order.#", id="first declared among equals"),
        pytest.param(["order.*", "order.#"], "order.created", "order.*", id="first declared among equals, reversed"),
        pytest.param(["*.created", "#"], "order.created", "*.created", id="no beginning at all: order of declaration"),
        pytest.param(["#", "*.created"], "order.created", "#", id="no beginning at all, reversed"),
        pytest.param(["order.*"], "order.created.v2", None, id="no route"),
        pytest.param(["order.*"], "Order.created", None, id="case matters"),
        pytest.param([], "order.created", None, id="no routes"),
        pytest.param(["order.*", "order.line.#"], "order.line", "order.line.#", id="# may be nothing"),
        pytest.param(["order.*"], "order.*", "order.*", id="a type that looks like the pattern"),
    ],
)
def test_precedence(patterns, type, expected):
    """Exact type, then the longer literal beginning, then the order of declaration."""
    made = service(*patterns)
    assert taken_by(made, type) == expected
    assert taken_by(made, type) == expected  # from the cache too


WORDS = st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=3).map(".".join)


@given(st.lists(WORDS, unique=True, max_size=6), st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join))
def test_the_rule_holds_for_any_routes(patterns, type):
    """The chosen route is the best of all that match, by a plain reading of the rule."""
    fitting = [p for p in patterns if matches(p, type)]
    best = None
    if fitting:
        exact = [p for p in fitting if p == type and not set(p) & {"*", "#"}]
        best = exact[0] if exact else max(fitting, key=lambda p: (literal_length(p), -patterns.index(p)))
    assert taken_by(service(*patterns), type) == best


@pytest.mark.parametrize("pattern", ["order.created", "order.*", "#"])
def test_two_routes_for_one_pattern_are_an_error(pattern):
    """Equal patterns name both handlers."""
    made = service(pattern)
    with pytest.raises(ConfigError, match="two routes"):
        made.on(pattern)(lambda event: None)
    with pytest.raises(ConfigError, match="two routes"):
        made.batch(pattern)(lambda events: None)
    assert len(made.routes) == 1


def test_a_route_added_later_is_seen():
    """The cache of decisions does not outlive a declaration."""
    made = service("#")
    assert taken_by(made, "order.created") == "#"
    made.on("order.created")(lambda event: None)
    assert taken_by(made, "order.created") == "order.created"


def test_the_cache_does_not_grow_with_strangers_types():
    """Twenty thousand made-up types leave at most ten thousand entries, and still find their route."""
    made = service("order.*")
    for n in range(20_000):
        assert taken_by(made, f"order.{n}") == "order.*"
    assert len(made._cache) <= 10_000


def test_decorators_return_the_function_itself():
    """Handlers can be called straight from a test."""
    made = Service("wms")

    def one(event: Event) -> None: ...
    def many(events: list[Event]) -> None: ...
    def dead(letters): ...

    assert made.on("a")(one) is one
    assert made.batch("b")(many) is many
    assert made.dead_letters()(dead) is dead
    with pytest.raises(ConfigError, match="already"):
        made.dead_letters()(dead)


def test_a_routes_settings_go_over_the_services():
    """Retry, status map, permanent exceptions, concurrency and timeout: the route's own, else the service's."""
    made = Service(
        "wms",
        concurrency=7,
        timeout="9s",
        status={404: "park", 500: "park"},
        permanent=(KeyError,),
        retry=RetryPolicy(),
    )
    made.on("a")(lambda event: None)
    made.on(
        "b",
        concurrency=1,
        timeout=1,
        status={404: "ack"},
        permanent=(OSError,),
        retry=RetryPolicy(max_retries=1),
    )(lambda event: None)
    a, b = made.routes
    assert (a.concurrency, a.timeout, a.policy) == (7, 9.0, made.policy)
    assert (b.concurrency, b.timeout, b.policy.retry.max_retries) == (1, 1.0, 1)
    assert b.policy.statuses == StatusMap({404: "ack", 500: "park"})
    assert b.policy.permanent == (KeyError, OSError)


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": True},
        {"concurrency": 1.5},
        {"timeout": 0},
        {"timeout": "soon"},
        {"timeout": -1},
        {"max_crashes": 0},
        {"prefetch": 0},
        {"grace": -1},
        {"max_local_delay": "x"},
        {"status": {"9xx": "park"}},
        {"dlq": False},
        {"dlq": False, "on_exhausted": "park"},
        {"on_exhausted": "pork"},
        {"unknown_code": "prak"},
        {"permanent": ("KeyError",)},
        {"permanent": KeyError},
        {"permanent_codes": "550"},
        {"retryable_codes": "421"},
    ],
    ids=str,
)
def test_a_bad_setting_of_a_service_is_a_config_error(options):
    """Every setting is checked at construction, not at the first failure of a message."""
    with pytest.raises(ConfigError):
        Service("wms", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"timeout": 0},
        {"status": {404: "x"}},
        {"permanent": ("KeyError",)},
        {"permanent": KeyError},
        {"retry": RetryPolicy(max_retries=300, delay=5, mode="in-place")},
        {"retry": RetryPolicy(max_retries=1_000_000, delay=0.05, mode="in-place")},
    ],
    ids=str,
)
def test_a_bad_setting_of_a_route_is_a_config_error(options):
    """Every setting of a route is checked when it is declared."""
    with pytest.raises(ConfigError):
        Service("wms").on("a", **options)(lambda event: None)


@pytest.mark.parametrize("options", [{"size": 0}, {"timeout": 0}, {"concurrency": 0}, {"on_error": "explode"}], ids=str)
def test_a_bad_setting_of_a_batch_is_a_config_error(options):
    """Every setting of a batch route is checked when it is declared."""
    with pytest.raises(ConfigError):
        Service("wms").batch("a", **options)(lambda events: None)


def test_error_codes_may_be_given_as_numbers():
    """A list of SMTP codes is a list of texts."""
    assert Service("wms", permanent_codes=[550]).policy.permanent_codes == frozenset({"550"})


def test_prefetch_is_twice_what_the_routes_can_hold():
    """At least 256, at most 20,000; one set by hand must hold the largest route."""
    assert service("a").prefetch == 256
    assert service(*"abcd", concurrency=100).prefetch == 800
    with pytest.raises(ConfigError, match="prefetch"):
        _ = service("a", concurrency=64, prefetch=10).prefetch


def test_a_subscription_tells_an_adapter_all_it_needs():
    """Names, patterns, and every delay that any policy can ask for."""
    made = Service("wms-cincout", retry=RetryPolicy(delay=5))
    made.on("a.*", retry=RetryPolicy.exponential(base=1, factor=2, cap=4, max_retries=9))(lambda event: None)
    found = made.subscription()
    assert (found.service, found.prefix, found.patterns, found.delays) == (
        "wms-cincout",
        "wms",
        ("a.*",),
        (5.0, 1.0, 2.0, 4.0),
    )
    assert Service("wms").subscription().patterns == ("#",)
