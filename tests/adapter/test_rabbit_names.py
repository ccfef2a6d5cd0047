"""Names, layouts and topology of RabbitMQ: the tables of the seeds, to the letter."""

from __future__ import annotations

import itertools
import json
from typing import Literal

import pytest

from eventbus.adapter import Resource, Subscription
from eventbus.errors import ConfigError
from eventbus.scheduling.tiers import TIERS, tier_for
from eventbus_rabbit import RabbitAdapter
from eventbus_rabbit.names import LAYOUTS, layout, names_of
from eventbus_rabbit.topology import definitions, queues, weaknesses


def resources(kind: str, url: str = "amqp://localhost", delays: tuple[float, ...] = (5.0,), **settings: object) -> dict:
    service = str(settings.pop("service", "wms-cincout"))
    adapter = RabbitAdapter.from_url(url, settings)
    patterns = ("files.uploaded.*", "files.validated.#")
    sub = Subscription(service, str(settings.get("prefix", service.partition("-")[0])), patterns, delays)
    return {r.name: r for r in adapter.topology([sub]).resources if r.kind == kind}


def arguments(found: dict[str, Resource]) -> dict[str, dict[str, object]]:
    return {name: dict(resource.arguments) for name, resource in found.items()}


def test_the_default_layout_is_seed_4_to_the_letter() -> None:
    """Exchanges, queues and bindings are exactly the two tables of seed 4; classic queues carry no type argument."""
    assert arguments(resources("exchange")) == {
        "wms.main-exchange": {"type": "fanout"},
        "wms.retry-exchange.wms-cincout": {"type": "direct"},
    }
    assert arguments(resources("queue")) == {
        "wms.queue.wms-cincout": {
            "x-dead-letter-exchange": "wms.retry-exchange.wms-cincout",
            "x-dead-letter-routing-key": "retry",
        },
        "wms.retry-queue.wms-cincout": {
            "x-message-ttl": 5000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "wms.queue.wms-cincout",
        },
        "wms.dlq.wms-cincout": {},
    }
    bindings = {
        (r.arguments["source"], r.arguments["key"], r.arguments["destination"]) for r in resources("binding").values()
    }
    assert bindings == {
        ("wms.main-exchange", "", "wms.queue.wms-cincout"),
        ("wms.retry-exchange.wms-cincout", "retry", "wms.retry-queue.wms-cincout"),
    }


def test_delays_of_a_policy_have_a_road_of_their_own() -> None:
    """A delay other than the base one is a tier: its queue, its TTL, its key."""
    found = resources("queue", delays=(0.2, 5.0, 60.0))
    assert found["wms.retry-queue.wms-cincout.200"].arguments["x-message-ttl"] == 200
    assert found["wms.retry-queue.wms-cincout.60000"].arguments["x-message-ttl"] == 60_000
    assert "wms.retry-queue.wms-cincout.5000" not in found
    keys = {r.arguments["key"] for r in resources("binding", delays=(0.2,)).values()}
    assert keys == {"", "retry", "retry.200"}


def test_per_queue_is_seed_1() -> None:
    """Topic exchange, bindings from the routes, retry.q.X, q.X.retry with 15 s, dlq.q.X with key parking, q.X.dlq."""
    options: dict[str, object] = {"layout": "per-queue", "service": "validator", "delays": (15.0,)}
    assert arguments(resources("exchange", **options)) == {  # type: ignore[arg-type]
        "domain.events": {"type": "topic"},
        "retry.q.validator": {"type": "direct"},
        "dlq.q.validator": {"type": "direct"},
    }
    found = arguments(resources("queue", **options))  # type: ignore[arg-type]
    assert found["q.validator"] == {
        "x-dead-letter-exchange": "retry.q.validator",
        "x-dead-letter-routing-key": "retry",
    }
    assert found["q.validator.retry"] == {
        "x-message-ttl": 15000,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "q.validator",
    }
    assert found["q.validator.dlq"] == {}
    bindings = {
        (r.arguments["source"], r.arguments["key"], r.arguments["destination"])
        for r in resources("binding", **options).values()  # type: ignore[arg-type]
    }
    assert ("domain.events", "files.uploaded.*", "q.validator") in bindings
    assert ("dlq.q.validator", "parking", "q.validator.dlq") in bindings


def test_raffle_is_seed_0() -> None:
    """Direct exchanges, the 10 s retry queue, the dead-letter exchange: seed 0's names and arguments."""
    options: dict[str, object] = {"layout": "raffle", "service": "raffle-users", "delays": (10.0,)}
    assert arguments(resources("exchange", **options)) == {  # type: ignore[arg-type]
        "raffle_exchange": {"type": "direct"},
        "raffle_retry_exchange": {"type": "direct"},
        "raffle_dlx": {"type": "direct"},
    }
    assert arguments(resources("queue", **options)) == {  # type: ignore[arg-type]
        "raffle_queue": {"x-dead-letter-exchange": "raffle_dlx", "x-dead-letter-routing-key": "raffle_dlq"},
        "raffle_retry_10s": {
            "x-message-ttl": 10000,
            "x-dead-letter-exchange": "raffle_exchange",
            "x-dead-letter-routing-key": "raffle_queue",
        },
        "raffle_dlq": {},
    }


@pytest.mark.parametrize(("version", "limit"), [((3, 10, 8), None), ((3, 13), None), ((4, 0, 5), -1), ((4, 1), -1)])
def test_quorum_arguments_depend_on_the_server(version: tuple[int, ...], limit: int | None) -> None:
    """At-least-once dead-lettering on the retry queues; the delivery limit is lifted only where -1 means that."""
    names = names_of(LAYOUTS["event-bus"], "wms-cincout", "wms")
    found = {
        queue.role: queue.arguments for queue in queues(names, Subscription("wms-cincout", "wms"), "quorum", version)
    }
    assert found["retry"]["x-dead-letter-strategy"] == "at-least-once"
    assert found["retry"]["x-overflow"] == "reject-publish"
    assert [found[role].get("x-delivery-limit") for role in ("work", "dead", "retry")] == [limit, limit, None]
    assert {arguments["x-queue-type"] for arguments in found.values()} == {"quorum"}


@pytest.mark.parametrize(
    ("queue_type", "retry", "version", "words"),
    [
        ("classic", "copy", (3, 10, 8), []),
        ("classic", "copy", (4, 0, 5), ["classic queues on RabbitMQ 4.0.5"]),
        ("quorum", "copy", (4, 0, 5), []),
        ("quorum", "dead-letter", (3, 10, 8), ["retry = 'dead-letter'"]),
        ("classic", "dead-letter", (4, 1), ["classic queues", "retry = 'dead-letter'"]),
    ],
)
def test_what_a_killed_broker_may_lose_is_known(
    queue_type: Literal["classic", "quorum"], retry: str, version: tuple[int, ...], words: list[str]
) -> None:
    """Classic queues on a 4.x broker and the literal nack are weaker, and start-up says so."""
    found = weaknesses(queue_type, retry, version)
    assert len(found) == len(words)
    assert all(part in text for part, text in zip(words, found, strict=True))


def test_templates_replace_names() -> None:
    """A template over prefix, service and ms replaces a name; everything that refers to it follows."""
    names = {"queue": "{service}-work", "tier_queue": "{service}-later-{ms}", "tier_key": "later-{ms}"}
    found = resources("queue", delays=(0.2,), names=names)
    assert found["wms-cincout-later-200"].arguments["x-dead-letter-routing-key"] == "wms-cincout-work"


@pytest.mark.parametrize(
    ("key", "template"),
    [
        ("queue", "{nonsense}"),
        ("queue", "{service"),
        ("queue", "q.{ms}"),
        ("tier_queue", "without-delay"),
        ("nonsense", "x"),
        ("queue", "amq.{service}"),
    ],
)
def test_a_bad_template_is_named(key: str, template: str) -> None:
    """An unknown field, a missing brace, a delay in the wrong place: the error names the key."""
    with pytest.raises(ConfigError, match=key):
        layout("event-bus", {key: template})


def test_two_services_never_share_a_queue() -> None:
    """A layout whose queue has no service in its name serves one service per prefix."""
    adapter = RabbitAdapter.from_url("amqp://localhost", {"layout": "raffle"})
    with pytest.raises(ConfigError, match="raffle_queue"):
        adapter.topology([Subscription("raffle-a", "raffle"), Subscription("raffle-b", "raffle")])


@pytest.mark.parametrize(
    ("delay", "tier"),
    [
        (0.0, 25),
        (0.01, 25),
        (0.2, 200),
        (0.3, 200),
        (4.8, 4000),
        (4.93, 5000),
        (5.0, 5000),
        (7.8, 5000),
        (60, 60_000),
        (1200, 300_000),
        (9e9, 43_200_000),
    ],
)
def test_a_road_is_never_longer_than_the_delay(delay: float, tier: int) -> None:
    """The longest road that fits (one that is a fiftieth longer does too); below the shortest, the shortest."""
    assert tier_for(sorted({*TIERS, 5000}), delay) == tier


def test_roads_are_close_enough_that_few_are_needed() -> None:
    """Up to five minutes the next shorter road is at least two fifths of a delay."""
    tiers = sorted(tier for tier in {*TIERS, 5000} if tier <= 300_000)
    assert all(later / earlier <= 2.5 for earlier, later in itertools.pairwise(tiers))


def test_definitions_can_be_imported_by_rabbitmq() -> None:
    """The export is JSON with exchanges, queues and bindings of the whole topology."""
    adapter = RabbitAdapter.from_url("amqp://localhost", {})
    found = json.loads(json.dumps(definitions(adapter.topology([Subscription("wms-cincout", "wms", delays=(5.0,))]))))
    assert {queue["name"] for queue in found["queues"]} == {
        "wms.queue.wms-cincout",
        "wms.retry-queue.wms-cincout",
        "wms.dlq.wms-cincout",
    }
    assert {exchange["type"] for exchange in found["exchanges"]} == {"fanout", "direct"}
    assert len(found["bindings"]) == 2


def test_a_name_too_long_for_amqp_is_refused() -> None:
    """RabbitMQ takes 255 bytes; longer names fail at construction and not in the middle of a retry."""
    with pytest.raises(ConfigError, match="255"):
        names_of(LAYOUTS["event-bus"], "x" * 150, "y" * 100)
