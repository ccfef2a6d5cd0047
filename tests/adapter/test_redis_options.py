"""What the URL and the [redis] table may say, and what is said about what they may not."""

from __future__ import annotations

import pytest

from eventbus.errors import ConfigError
from eventbus.registry import open_adapter
from eventbus_redis import RedisAdapter, names
from eventbus_redis.options import Options, read


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", {"hosts": (("localhost", 6379),), "db": 0, "tls": False}),
        ("redis://cache:6380/3", {"hosts": (("cache", 6380),), "db": 3}),
        ("rediss://ana:p%40ss@cache", {"username": "ana", "password": "p@ss", "tls": True}),
        ("redis://:secret@cache", {"username": None, "password": "secret"}),
        ("redis://[::1]:7000", {"hosts": (("::1", 7000),)}),
        ("redis://a:1,b?sentinel=mymaster", {"hosts": (("a", 1), ("b", 26379)), "sentinel": "mymaster"}),
        ("redis://a,b:2?cluster=true", {"hosts": (("a", 6379), ("b", 2)), "cluster": True}),
        ("redis://?lease=10s&dlq_max_age=2d&dlq_max_entries=5", {"lease": 10.0, "dlq_max_age": 172800.0}),
        ("redis://?dlq_max_age=none&dlq_max_entries=none", {"dlq_max_age": None, "dlq_max_entries": None}),
    ],
)
def test_urls_are_read(url: str, expected: dict[str, object]) -> None:
    """One server, login, TLS, Sentinel, Cluster, and every setting in the query."""
    found = read(url, {})
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_defaults_are_those_of_seed_2() -> None:
    """Seven days and ten thousand dead letters, a lease of half a minute."""
    assert (Options().dlq_max_age, Options().dlq_max_entries, Options().lease) == (604800.0, 10_000, 30.0)


@pytest.mark.parametrize(
    ("url", "settings", "words"),
    [
        ("redis://h/x", {}, ["'x'", "number of a database"]),
        ("redis://h:port", {}, ["'h:port'", "host:port"]),
        ("redis://h:0", {}, ["host:port"]),
        ("redis://h#x", {}, ["redis://host:6379/0"]),
        ("redis://h?leese=1", {}, ["redis.leese", "unknown setting", "lease"]),
        ("redis://h", {"lease": "soon"}, ["redis.lease", "'soon'", "5s"]),
        ("redis://h", {"lease": "1ms"}, ["redis.lease", "200ms"]),
        ("redis://h", {"lease": True}, ["redis.lease"]),
        ("redis://h", {"lease": [1]}, ["redis.lease", "duration"]),
        ("redis://h", {"timeout": "10m"}, ["redis.timeout", "1m"]),
        ("redis://h", {"dlq_max_entries": 0}, ["redis.dlq_max_entries", "from 1"]),
        ("redis://h", {"dlq_max_entries": "many"}, ["redis.dlq_max_entries", "'many'"]),
        ("redis://h", {"max_event_bytes": 10}, ["redis.max_event_bytes"]),
        ("redis://h?sentinel=m&cluster=true", {}, ["sentinel", "cluster", "not both"]),
        ("redis://h/1?cluster=true", {}, ["Cluster", "database 0"]),
        ("redis://h?cluster=maybe", {}, ["redis.cluster", "true or false"]),
        ("redis://h?lease=1s", {"lease": "2s"}, ["redis.lease", "once"]),
        ("rediss://h?ssl_cert_reqs=perhaps", {}, ["ssl_cert_reqs", "'required' or 'none'"]),
    ],
)
def test_a_bad_setting_names_the_key_the_value_and_what_is_allowed(
    url: str, settings: dict[str, object], words: list[str]
) -> None:
    """One line, with everything in it that is needed to mend it."""
    with pytest.raises(ConfigError) as caught:
        open_adapter(url, {"redis": settings})
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_secrets_are_not_shown() -> None:
    """Neither in errors nor in the options' text."""
    with pytest.raises(ConfigError) as caught:
        read("redis://ana:hunter2@h/x", {})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        read("redis://h?sentinel_password=hunter2", {"sentinel_password": "other"})
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(read("redis://ana:hunter2@h", {}))


def test_both_schemes_lead_here() -> None:
    """redis:// and rediss:// are found in a plain checkout."""
    assert isinstance(open_adapter("redis://h"), RedisAdapter)
    assert isinstance(open_adapter("rediss://h"), RedisAdapter)


def test_all_keys_of_a_prefix_share_a_hash_tag() -> None:
    """The keys of spec 6; the braces put them into one slot of a cluster."""
    keys = names.DEFAULT.of_service("wms-cincout", "wms")
    assert (keys.main, keys.queue) == ("{wms}:main", "{wms}:queue:wms-cincout")
    assert (keys.retry, keys.dlq) == ("{wms}:retry:wms-cincout", "{wms}:dlq:wms-cincout")
    assert all(key.startswith("{wms}:") for key in keys.all())


def test_the_topology_is_pure() -> None:
    """What a configuration needs is told without a server."""
    from eventbus import Service

    sub = Service("wms-cincout").subscription()
    resources = open_adapter("redis://nowhere").topology([sub, sub]).resources
    assert [resource.name for resource in resources] == [
        "{wms}:main",
        "{wms}:main wms-cincout",
        "{wms}:queue:wms-cincout",
        "{wms}:retry:wms-cincout",
        "{wms}:dlq:wms-cincout",
    ]


def test_names_can_be_replaced_by_templates() -> None:
    """Four templates; every other key is one of them with a suffix, and all are in one slot."""
    templates = {"main": "bus:{{{prefix}}}:events", "queue": "bus:{{{prefix}}}:{service}"}
    adapter = RedisAdapter.from_url("redis://h", {"names": templates})
    keys = adapter.options.names.of_service("wms-cincout", "wms")
    assert (keys.main, keys.services) == ("bus:{wms}:events", "bus:{wms}:events:services")
    assert (keys.queue, keys.notes) == ("bus:{wms}:wms-cincout", "bus:{wms}:wms-cincout:notes")
    assert keys.dlq == "{wms}:dlq:wms-cincout"
    assert {names.hash_tag(key) for key in keys.all()} == {"wms"}


@pytest.mark.parametrize(
    ("templates", "words"),
    [
        ({"main": "{prefix}:main"}, ["redis.names.main", "no hash tag", "{{{prefix}}}"]),
        ({"main": "{{}}{prefix}:main"}, ["redis.names.main", "no hash tag"]),
        ({"queue": "{{{service}}}:{prefix}"}, ["redis.names.queue", "hash tag differs", "one slot"]),
        ({"dlq": "{prefix}:dlq:{service}"}, ["redis.names.dlq", "hash tag differs"]),
        ({"main": "{{bus}}:{prefix}:main"}, ["redis.names.queue", "hash tag differs"]),
        ({"main": "{{x}}:main"}, ["redis.names.main", "{prefix}"]),
        ({"main": "{{{prefix}}}:{service}"}, ["redis.names.main", "must have {prefix}"]),
        ({"retry": "{{{prefix}}}:retry"}, ["redis.names.retry", "{prefix} and {service}"]),
        ({"retry": "{{{prefix}}}:{service}:{ms}"}, ["redis.names.retry", "unknown {ms}"]),
        ({"queue": "{{{prefix}}}:{service}", "dlq": "{{{prefix}}}:{service}"}, ["{p}:p-s", "name them apart"]),
        ({"queue": "{{{prefix}}}:dlq:{service}:ids"}, ["{p}:dlq:p-s:ids", "name them apart"]),
        ({"queue": "{{{prefix}:{service}"}, ["redis.names.queue"]),
        ({"dead": "x"}, ["redis.names.dead", "unknown name", "dlq"]),
        ({"queue": 5}, ["redis.names.queue", "must be a text"]),
    ],
)
def test_a_template_that_would_mix_up_keys_is_refused(templates: dict[str, object], words: list[str]) -> None:
    """One slot per prefix, one key per purpose: said at construction, with the template that breaks it."""
    with pytest.raises(ConfigError) as caught:
        open_adapter("redis://h", {"redis": {"names": templates}})
    assert all(word in str(caught.value) for word in words), caught.value


def test_names_must_be_a_table() -> None:
    """A text in their place says what to write."""
    with pytest.raises(ConfigError, match="must be a table of templates"):
        open_adapter("redis://h?names=x")
