"""bus.toml: what a good file means."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eventbus import ConfigError, ConsumerStatus, Fairness, Idempotency, Rate, RetryPolicy
from eventbus.config import BusConfig, load

SAMPLE = """
version = 1
url = "${EVENTBUS_URL:-sqlite:///bus.db}"       # ${NAME:-default} works in every value

[services.wms-cincout]
concurrency = 64
retry = { max_retries = "${MAX_RETRIES:-10}", delay = "5s" }   # or { base = "1s", factor = 2, cap = "60s" ... }

[[services.wms-cincout.routes]]
on = "order.*"
forward = "http://127.0.0.1:8000/events"        # or handler = "app:reserve"
timeout = "10s"
status = { 404 = "park", "4xx" = "drop" }
sign = { secret = "${CINCOUT_SECRET}" }
breaker = { failures = 10, open = "5s", max = "60s" }          # on by default; breaker = false turns it off

[rabbit]                                         # only what one broker has: [rabbit] [kafka] [redis] [sqlite]
queue_type = "quorum"
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, env: dict[str, str] | None = None, **options: str) -> BusConfig:
    Path("bus.toml").write_text(text)
    return load("bus.toml", env or {}, **options)


def memory(text: str, env: dict[str, str] | None = None) -> BusConfig:
    return read(f'url = "memory://"\n{text}', env)


def test_the_sample_of_the_docs_works_as_it_stands() -> None:
    """The file in api.md gives the service, route and settings that it describes."""
    config = read(SAMPLE, {"CINCOUT_SECRET": "s3cret"})
    assert (config.url, config.prefix, config.provision) == ("sqlite:///bus.db", "wms", "create")
    assert config.settings["rabbit"] == {"queue_type": "quorum"}
    [service] = config.services()
    [route] = service.routes
    assert (service.name, service.prefix, service.concurrency) == ("wms-cincout", "wms", 64)
    assert route.policy.retry == RetryPolicy(max_retries=10, delay=5.0)
    assert route.policy.statuses[404] is ConsumerStatus.PARK
    assert route.endpoint is not None
    assert route.endpoint.timeout == 10.0
    assert route.endpoint.breaker is not None
    assert config.bus().prefix == "wms"


def test_a_secret_is_not_in_any_repr() -> None:
    """Neither the config nor what it builds shows a secret."""
    config = read(SAMPLE, {"CINCOUT_SECRET": "s3cret", "EVENTBUS_URL": "memory://"})
    shown = repr(config) + repr(config.services()[0].routes) + repr(config._table)
    assert "s3cret" not in shown


@pytest.mark.parametrize(
    ("written", "env", "value"),
    [
        ("${NAME:-wms-api}", {}, "wms-api"),
        ("${NAME:-wms-api}", {"NAME": "crm-api"}, "crm-api"),
        ("${NAME:-wms-api}", {"NAME": ""}, "wms-api"),
        ("${NAME}", {"NAME": "a"}, "a"),
        ("${NAME}", {"NAME": ""}, ""),
        ("${A}-${B:-b}", {"A": "a"}, "a-b"),
        ("${NAME:-}", {}, ""),
        ("a$$b", {}, "a$b"),
        ("$${NAME}", {}, "${NAME}"),
        ("pa$word$", {}, "pa$word$"),
        ("${NAME}", {"NAME": "${OTHER}"}, "${OTHER}"),
    ],
)
def test_variables_in_values(written: str, env: dict[str, str], value: str) -> None:
    """${NAME}, ${NAME:-default} and $$; a lone dollar is a dollar, and what a variable holds is not read again."""
    assert memory(f'source = "{written}"', env).source == value


def test_a_value_that_is_one_variable_becomes_what_the_key_wants() -> None:
    """Numbers, durations and booleans can come from the environment."""
    config = memory(
        """
        [services.wms-a]
        concurrency = "${N}"
        timeout = "${T}"
        strict = "${S}"
        [[services.wms-a.routes]]
        on = "#"
        forward = "http://127.0.0.1/${PATH_PART:-events}"
        breaker = "${B:-false}"
        """,
        {"N": "7", "T": "250ms", "S": "true"},
    )
    [service] = config.services()
    assert (service.concurrency, service.timeout, service.strict) == (7, 0.25, True)
    endpoint = service.routes[0].endpoint
    assert endpoint is not None
    assert endpoint.url == "http://127.0.0.1/events"
    assert endpoint.breaker is None


def test_the_environment_goes_before_the_file_and_an_option_before_both() -> None:
    """EVENTBUS_URL and relatives replace keys; nested ones are joined by two underscores."""
    text = 'url = "${UNSET}"\nprefix = "a"\n[sqlite]\nlease = "5s"\nlock_timeout = 1\n'
    env = {
        "EVENTBUS_URL": "sqlite:///x.db",
        "EVENTBUS_SOURCE": "wms-api",
        "EVENTBUS_PREFIX": "b",
        "EVENTBUS_PROVISION": "verify",
        "EVENTBUS_SQLITE__LEASE": "30",
        "EVENTBUS_TEST_RABBIT_URL": "of no interest",
    }
    config = read(text, env)
    assert (config.url, config.source, config.prefix, config.provision) == ("sqlite:///x.db", "wms-api", "b", "verify")
    assert config.settings["sqlite"] == {"lease": "30", "lock_timeout": 1}
    assert read(text, env, url="memory://").url == "memory://"


def test_an_empty_variable_replaces_nothing() -> None:
    """EVENTBUS_URL= is the same as no EVENTBUS_URL."""
    assert memory("", {"EVENTBUS_URL": "", "EVENTBUS_PREFIX": ""}).url == "memory://"


@pytest.mark.parametrize(
    ("services", "prefix"),
    [
        (["wms-a", "wms-b"], "wms"),
        (["wms-a", "crm-b"], "default"),
        (["plain"], "default"),
        ([], "default"),
    ],
)
def test_the_prefix_is_that_of_all_services(services: list[str], prefix: str) -> None:
    """Publishing reaches the services of the file, if they have one prefix in common."""
    assert memory("\n".join(f"[services.{name}]" for name in services)).prefix == prefix


def test_a_prefix_set_by_hand_is_known_without_importing_anything() -> None:
    """The dead-letter commands need the prefix of a service, not its handlers."""
    config = memory('[services.wms-a]\nprefix = "x"\n[[services.wms-a.routes]]\non = "#"\nhandler = "nowhere:f"')
    assert config.prefixes == {"wms-a": "x"}
    assert config.prefix == "x"
    assert config.outline()[0].prefix == "x"


def test_every_key_of_a_service_and_a_route_is_carried_over() -> None:
    """Whatever Service() takes can be written in the file."""
    Path("every_app.py").write_text(
        "class Bad(Exception): ...\n"
        "def one(event): ...\n"
        "def many(batch: list): ...\n"
        "class Shop:\n    @staticmethod\n    def sell(event): ...\n"
    )
    config = memory(
        """
        [mapping]
        tenant = "data.companyId"
        [services.wms-a]
        concurrency = 3
        timeout = 2
        retry = { base = "1s", factor = 3, cap = "9s", jitter = 0.1, max_attempts = 5 }
        status = { "4xx" = "park" }
        permanent = ["LookupError"]
        permanent_codes = [550, "MessageRejected"]
        retryable_codes = ["421"]
        unknown_code = "park"
        strict = true
        dlq = false
        on_exhausted = "discard"
        prefetch = 5000
        max_local_delay = "1m"
        max_crashes = 2
        grace = "1s"
        mapping = { type = "data.kind" }
        [[services.wms-a.routes]]
        on = "a"
        handler = "every_app:one"
        timeout = "1s"
        concurrency = 9
        retry = { max_attempts = 3, delay = 0, mode = "in-place" }
        status = { 404 = "ack" }
        permanent = ["KeyError", "every_app:Bad"]
        [[services.wms-a.routes]]
        on = "b"
        handler = "every_app:many"
        timeout = "4s"
        batch = { size = 10, timeout = "2s", concurrency = 1, on_error = "fail-all" }
        [[services.wms-a.routes]]
        on = "c"
        handler = "every_app:Shop.sell"
        [[services.wms-a.routes]]
        on = "d"
        forward = "https://x.example/e"
        mode = "structured"
        breaker = false
        auth = { basic = { user = "u", password = "p" } }
        sign = { secrets = ["new", "old"] }
        """
    )
    [service] = config.services()
    one, many, _, forward = service.routes
    assert (service.concurrency, service.timeout, service.strict, service.prefetch) == (3, 2.0, True, 5000)
    assert (service.max_local_delay, service.max_crashes, service.grace) == (60.0, 2, 1.0)
    assert (service.mapping.tenant, service.mapping.type) == ("data.companyId", "data.kind")
    policy = service.policy
    assert policy.retry == RetryPolicy.exponential(base=1, factor=3, cap=9, jitter=0.1, max_attempts=5)
    assert policy.permanent == (LookupError,)
    assert (policy.permanent_codes, policy.retryable_codes) == ({"550", "MessageRejected"}, {"421"})
    assert (policy.unknown_code, policy.on_exhausted) == ("park", "discard")
    assert (one.timeout, one.concurrency, one.policy.retry.mode) == (1.0, 9, "in-place")
    assert [kind.__name__ for kind in one.policy.permanent] == ["LookupError", "KeyError", "Bad"]
    assert one.policy.statuses[404] is ConsumerStatus.ACK
    assert one.policy.statuses[400] is ConsumerStatus.PARK
    assert many.batch is not None
    assert (many.batch.size, many.batch.timeout, many.batch.on_error) == (10, 2.0, "fail-all")
    assert (many.concurrency, many.timeout) == (1, 4.0)
    assert forward.endpoint is not None
    assert (forward.endpoint.mode, forward.endpoint.breaker) == ("structured", None)


def test_a_token_is_read_from_a_file_beside_the_config(tmp_path: Path) -> None:
    """bearer_file is looked for where bus.toml stands, and only when the services are built."""
    text = """
        [[services.wms-a.routes]]
        on = "#"
        forward = "http://127.0.0.1/e"
        auth = { bearer_file = "token.txt" }
    """
    config = memory(text)
    with pytest.raises(ConfigError, match=r"routes\[0\].auth.bearer_file: cannot be read: token.txt: No such file"):
        config.services()
    Path("token.txt").write_text("abc123\n")
    assert config.services()[0].routes[0].endpoint is not None


def test_a_table_of_another_broker_is_kept_for_the_day_of_the_swap() -> None:
    """The URL decides which table is used; the others may stay."""
    config = memory("[kafka]\nacks = 'all'\n[sqlite]\nnonsense = 1")
    assert set(config.settings) == {"kafka", "sqlite"}
    config.bus()


def test_the_config_is_no_part_of_the_package_itself() -> None:
    """`import eventbus` pays neither for the config nor for the command line."""
    import subprocess

    heavy = "['eventbus.config', 'pydantic_settings', 'cyclopts', 'rich', 'aiohttp', 'eventbus.cli']"
    code = f"import eventbus, sys; sys.exit(str([m for m in {heavy} if m in sys.modules] or 0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() in ("", "0")


def test_all_of_shaping_can_be_said_in_the_file(tmp_path: Path) -> None:
    """Fairness, rates, idempotency and order are settings of bus.toml as they are in code."""
    path = tmp_path / "bus.toml"
    path.write_text(
        """
        url = "memory://"
        [services.mail-gateway]
        fairness = { in_a_row = 3, weights = { acme = 2 } }
        rate = [{ limit = 100, period = "60s" }, { limit = 10, period = "1s", by = "tenant", tenants = { acme = 20 } }]
        idempotency = { store = "memory://", window = "7d", claim = "1m" }
        ordering = "key"
        permanent_codes = [550, "MessageRejected"]
        [[services.mail-gateway.routes]]
        on = "mail.*"
        forward = "http://127.0.0.1/send"
        rate = { limit = 5, period = "1s", scope = "service", store = "sqlite:///rates.db" }
        [services.plain]
        fairness = true
        """
    )
    gateway, plain = load(path, {}).services()
    assert gateway.fairness == Fairness(weights={"acme": 2.0})
    assert gateway.rates == (Rate(100, 60.0), Rate(10, 1.0, by="tenant", tenants={"acme": 20}))
    assert gateway.idempotency == Idempotency("memory://", window="7d", claim=60.0)
    assert (gateway.ordering, plain.ordering, plain.fairness) == ("key", None, Fairness())
    assert gateway.routes[0].rates == (Rate(5, 1.0, scope="service", store="sqlite:///rates.db"),)
