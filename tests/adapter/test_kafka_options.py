"""URLs, settings, names and topology of Kafka: what is taken, and what each mistake says."""

from __future__ import annotations

import pytest

from eventbus.adapter import Subscription
from eventbus.errors import ConfigError
from eventbus_kafka import KafkaAdapter
from eventbus_kafka.names import Templates, names_of, subscriptions_in, templates, tiers_of, topics_of
from eventbus_kafka.options import read


def test_a_url_says_hosts_login_and_settings() -> None:
    """Several hosts, a login with odd characters, settings in the query or in the table."""
    found = read("kafka://user:p%40ss@a:9093,b,[::1]:9094?tls=true&sasl_mechanism=SCRAM-SHA-512", {"partitions": 12})
    assert found.servers == ["a:9093", "b:9092", "[::1]:9094"]
    assert (found.username, found.password, found.tls, found.partitions) == ("user", "p@ss", True, 12)
    assert "p@ss" not in repr(found)
    assert read("kafka://", {}).servers == ["localhost:9092"]


def test_seed_3s_dead_letter_topic_is_a_matter_of_settings() -> None:
    """3 partitions, 30 days, snappy, 2 MB, and its names."""
    settings = {
        "dlq_partitions": 3, "dlq_retention": "30d", "dlq_compression": "snappy", "dlq_max_bytes": 2_000_000,
        "names": {"main": "execution.tickets", "dlq": "execution.tickets.dlq"},
    }  # fmt: skip
    options = read("kafka://localhost", settings)
    names = names_of(options.names, "worker-agents", "worker")
    dlq = next(topic for topic in topics_of(names, (), options) if topic.name == "execution.tickets.dlq")
    assert (names.main, dlq.partitions) == ("execution.tickets", 3)
    assert dlq.config["retention.ms"] == str(30 * 86_400_000)
    assert (dlq.config["compression.type"], dlq.config["max.message.bytes"]) == ("snappy", "2000000")


@pytest.mark.parametrize(
    ("url", "settings", "said"),
    [
        ("kafka://a:x", {}, "'a:x' is not host:port"),
        ("kafka://a/b", {}, "write kafka://"),
        ("kafka://a", {"partition": 3}, "kafka.partition = 3: unknown setting"),
        ("kafka://a", {"partitions": 0}, "kafka.partitions = 0: must be a whole number from 1"),
        ("kafka://a", {"partitions": True}, "kafka.partitions = True"),
        ("kafka://a?partitions=3", {"partitions": 4}, "give it once"),
        ("kafka://a", {"drain": "soon"}, "kafka.drain = 'soon'"),
        ("kafka://a", {"session_timeout": "1ms"}, "must be from"),
        ("kafka://a", {"tls": "maybe"}, "kafka.tls = 'maybe': must be true or false"),
        ("kafka://a", {"sasl_mechanism": "MD5"}, "must be 'PLAIN' or"),
        ("kafka://u:p@a", {"sasl_mechanism": "GSSAPI"}, "must be 'PLAIN' or"),
        ("kafka://a", {"sasl_mechanism": "SCRAM-SHA-512"}, "only with a login"),
        ("kafka://u@a", {}, "user 'u' has no password"),
        ("kafka://a", {"cafile": "x"}, "only with tls = true"),
        ("kafka://a", {"tls": True, "keyfile": "x"}, "give certfile too"),
        ("kafka://a", {"replication": 2}, "use 3"),
        ("kafka://a", {"dlq_max_bytes": 1_000_000}, "could not be parked"),
        ("kafka://a", {"dlq_format": "xml"}, "must be 'headers' or 'embedded'"),
        ("kafka://a", {"names": {"main": "{service}"}}, "unknown {service}; known are {prefix}"),
        ("kafka://a", {"names": {"retry": "x"}}, "needs {ms}"),
        ("kafka://a", {"names": {"topic": "x"}}, "unknown name"),
        ("kafka://a", {"names": {"dlq": "{"}}, "kafka.names.dlq"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(url: str, settings: dict[str, object], said: str) -> None:
    """One line: key, value, what is allowed."""
    with pytest.raises(ConfigError) as caught:
        read(url, settings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cafile": "/no/ca.pem"}, "kafka.cafile = '/no/ca.pem': cannot be used: [Errno 2]"),
        ({"certfile": "/no/c.pem"}, "kafka.certfile = '/no/c.pem': cannot be used: [Errno 2]"),
        ({"certfile": "/no/c.pem", "keyfile": "/no/k"}, "certfile = '/no/c.pem', keyfile = '/no/k': cannot be used"),
    ],
)
def test_a_file_of_tls_that_cannot_be_used_is_named(settings: dict[str, object], said: str) -> None:
    """Not only that one of three files is wrong."""
    with pytest.raises(ConfigError) as caught:
        read("kafka://a?tls=true", settings).context()
    assert said in str(caught.value)


def test_names_are_those_of_the_spec() -> None:
    """Topics and groups of a service, and which retry topic has which delay."""
    names = names_of(Templates(), "wms-stock", "wms")
    assert (names.main, names.group, names.readers) == ("wms.main", "wms.wms-stock", "wms.wms-stock-dlq")
    assert (names.dlq, names.state) == ("wms.dlq.wms-stock", "wms.dlq-state.wms-stock")
    assert (names.redriven, names.tier(5000)) == ("wms.retry.wms-stock.0", "wms.retry.wms-stock.5000")
    others = ("wms.retry.wms-stock.x", "wms.retry.wms-stock-b.5000", "wms.main", "wms.retry.wms-stock.")
    assert [names.delay_of(topic) for topic in ("wms.retry.wms-stock.5000", *others)] == [5000, None, None, None, None]


@pytest.mark.parametrize(
    ("chosen", "service", "said"),
    [
        ({}, "s" * 240, "249"),
        ({"dlq": "a:b"}, "s", "letters, digits"),
        ({"dlq": "é"}, "s", "letters, digits"),
        ({"dlq": "a.b", "dlq_state": "a_b"}, "s", "two of its topics"),
    ],
)
def test_a_name_that_kafka_would_refuse_is_refused_first(chosen: dict[str, str], service: str, said: str) -> None:
    """Length, characters, and the '.' and '_' that Kafka takes for the same."""
    with pytest.raises(ConfigError, match=said):
        names_of(templates(chosen), service, "wms")


@pytest.mark.parametrize(
    ("delays", "tiers"),
    [
        ((), (0,)),
        ((5.0,), (0, 5000)),
        ((1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0), (0, 1000, 2000, 4000, 8000, 16000, 32000)),
        ((10.0, 12.0, 19.0, 20.0), (0, 10000, 20000)),
        ((0.001, 0.2), (0, 200)),
    ],
)
def test_delays_get_roads_by_ratio_two(delays: tuple[float, ...], tiers: tuple[int, ...]) -> None:
    """Delays close together share a road; `.0` is always there."""
    assert tiers_of(delays) == tiers


def test_a_retry_topic_tells_who_is_subscribed() -> None:
    """Of this prefix and no other, by whatever template; not by the topics of other delays."""
    there = ["wms.retry.wms-stock.0", "wms.retry.wms-stock.5000", "wmsx.retry.wmsx-a.0", "wms.main", "wms.retry..0"]
    assert subscriptions_in(Templates(), "wms", there) == ["wms.retry.wms-stock.0"]
    assert subscriptions_in(Templates(retry="again.{ms}"), "wms", [*there, "again.0", "again.5"]) == ["again.0"]


def test_two_services_cannot_have_one_name() -> None:
    """As members of one group each would get a part of the events; alone, a service may be called anything."""
    adapter = KafkaAdapter.from_url("kafka://a", {"names": {"group": "all"}})
    assert adapter.names("wms-stock", "wms").group == adapter.names("wms-stock", "wms").group == "all"
    with pytest.raises(ConfigError, match=r"names.group: wms-stock and wms-billing would share 'all'.*\{service\}"):
        adapter.names("wms-billing", "wms")


def test_the_topology_is_told_without_a_broker() -> None:
    """Topics with their settings, groups, and who feeds whom; the sign of the subscription is made last."""
    adapter = KafkaAdapter.from_url("kafka://nowhere", {"max_event_bytes": 1_000_000})
    subs = [Subscription("wms-a", "wms", delays=(5.0,)), Subscription("wms-b", "wms")]
    found = {resource.name: resource for resource in adapter.topology(subs).resources}
    assert set(found["wms.main"].feeds) == {"wms.wms-a", "wms.wms-b"}
    assert found["wms.retry.wms-a.5000"].arguments["max.message.bytes"] == str(1_000_000 + 65_536)
    assert found["wms.dlq-state.wms-a"].arguments["cleanup.policy"] == "compact"
    names = names_of(adapter.options.names, "wms-a", "wms")
    assert topics_of(names, (5.0,), adapter.options)[-1].name == names.redriven
