"""Queues, exchanges and bindings that services need, as data. Pure; arguments by the server's version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from eventbus.adapter import Resource, Subscription, Topology
from eventbus.errors import ConfigError
from eventbus.scheduling.tiers import tier_for
from eventbus_rabbit.names import Names

QueueType: TypeAlias = Literal["classic", "quorum"]
Arguments: TypeAlias = Mapping[str, str | int]

HOLDING_TTL: Final = 1_000
HOLDING_EXPIRES: Final = 600_000
"""Ten minutes without a consumer: everything in it has gone back long before."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable queue and its bindings (exchange, key)."""

    name: str
    arguments: Arguments
    bindings: tuple[tuple[str, str], ...] = ()
    role: Literal["work", "retry", "tier", "dead", "notes"] = "work"


def exchanges(names: Names) -> list[Exchange]:
    """The exchanges of a service."""
    found = {
        names.exchange: Exchange(names.exchange, names.layout.exchange_type),
        names.retry_exchange: Exchange(names.retry_exchange, "direct"),
    }
    for name in (names.dead_letter_exchange, names.reject_exchange):
        if name and name not in found:
            found[name] = Exchange(name, "direct")
    return list(found.values())


def queues(names: Names, sub: Subscription, queue_type: QueueType, version: tuple[int, ...]) -> list[Queue]:
    """The queues of a service, with the roads that its policies ask for."""
    only_one: dict[str, str | int] = {"x-single-active-consumer": True} if sub.ordered else {}
    work = Queue(
        names.queue,
        _common(queue_type, version)
        | only_one
        | {"x-dead-letter-exchange": names.reject_exchange, "x-dead-letter-routing-key": names.reject_key},
        tuple((names.exchange, key) for key in names.bindings(sub.patterns)),
    )
    dead = Queue(
        names.dead_letter_queue,
        _common(queue_type, version),
        ((names.dead_letter_exchange, names.dead_letter_key),) if names.dead_letter_exchange else (),
        "dead",
    )
    base = retry_queue(names, names.base, queue_type, base=True)
    wanted = sorted({tier_for(names.tiers(), delay) for delay in sub.delays} - {names.base})
    notes = [Queue(names.notes_queue, _common(queue_type, version), (), "notes")] if sub.ordered else []
    return [work, dead, *notes, base, *(retry_queue(names, ms, queue_type) for ms in wanted)]


def retry_queue(names: Names, ms: int, queue_type: QueueType, *, base: bool = False) -> Queue:
    """The queue of one delay: no consumer; when the TTL is over its messages go back to the work queue."""
    arguments: dict[str, str | int] = {
        "x-message-ttl": ms,
        "x-dead-letter-exchange": names.back_exchange,
        "x-dead-letter-routing-key": names.back_key,
    }
    if queue_type == "quorum":
        # At-least-once needs reject-publish; without it RabbitMQ falls back to at-most-once without a word.
        arguments |= {
            "x-queue-type": "quorum",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    if base:
        return Queue(names.retry_queue, arguments, ((names.retry_exchange, names.retry_key),), "retry")
    return Queue(names.tier_queue(ms), arguments, ((names.retry_exchange, names.tier_key(ms)),), "tier")


def holding_queue(names: Names, mark: str, queue_type: QueueType) -> Queue:
    """The queue of one consumer for what it holds with a note: taken the moment it arrives, back if the taker dies."""
    way_back = retry_queue(names, HOLDING_TTL, queue_type).arguments
    return Queue(names.holding_queue(mark), {**way_back, "x-expires": HOLDING_EXPIRES}, (), "tier")


def _common(queue_type: QueueType, version: tuple[int, ...]) -> dict[str, str | int]:
    if queue_type == "classic":
        return {}
    # From 4.0 a quorum queue drops a message after 20 returns unless told otherwise. Before 4.0 the same -1 means
    # "over the limit at the first return": one look at a dead-letter queue emptied it.
    return {"x-queue-type": "quorum"} | ({"x-delivery-limit": -1} if version >= (4,) else {})


def weaknesses(queue_type: QueueType, retry: str, version: tuple[int, ...]) -> list[str]:
    """What a killed broker may lose by these settings, for whoever starts a bus on them."""
    found = []
    server = ".".join(str(part) for part in version)
    if queue_type == "classic" and version >= (4,):
        found.append(
            f"classic queues on RabbitMQ {server}: a killed broker may lose retries whose delay ended in its last "
            "second; queue_type = 'quorum' does not"
        )
    if retry == "dead-letter":
        found.append(
            f"retry = 'dead-letter' on RabbitMQ {server}: a killed broker may lose messages that were being rejected; "
            "retry = 'copy' does not"
        )
    return found


def describe(plans: Iterable[tuple[Names, list[Queue]]]) -> Topology:
    """Everything as resources, for showing, comparing and exporting."""
    made: dict[tuple[str, str], Resource] = {}
    feeds: dict[str, list[str]] = {}
    for names, found in plans:
        for queue in found:
            for exchange, key in queue.bindings:
                feeds.setdefault(exchange, []).append(queue.name)
                made[f"binding {exchange} {key}", queue.name] = Resource(
                    "binding",
                    f"{exchange} -> {queue.name}" + (f" ({key})" if key else ""),
                    {"source": exchange, "destination": queue.name, "key": key},
                )
        for wanted in exchanges(names):
            made["exchange", wanted.name] = Resource("exchange", wanted.name, {"type": wanted.type})
        for queue in found:
            made["queue", queue.name] = Resource(
                "queue", queue.name, dict(queue.arguments), _next(names, queue), queue.role
            )
    resources = [
        Resource(r.kind, r.name, r.arguments, tuple(dict.fromkeys(feeds.get(r.name, ()))) or r.feeds, r.note)
        for r in made.values()
    ]
    order = {"exchange": 0, "queue": 1, "binding": 2}
    return Topology(tuple(sorted(resources, key=lambda r: order[r.kind])))


def _next(names: Names, queue: Queue) -> tuple[str, ...]:
    if queue.role == "work":
        return (names.reject_exchange, names.dead_letter_queue)
    return () if queue.role in ("dead", "notes") else (names.queue,)


def check_distinct(plans: Sequence[tuple[Names, list[Queue]]]) -> None:
    """Two services with one queue would take each other's messages."""
    owners: dict[str, str] = {}
    for names, found in plans:
        for queue in found:
            owner = owners.setdefault(queue.name, names.service)
            if owner != names.service:
                raise ConfigError(
                    f"{owner} and {names.service} would share the queue {queue.name}; put {{service}} into its template"
                )


def definitions(topology: Topology, vhost: str = "/") -> dict[str, object]:
    """The topology as RabbitMQ's definitions.json, to be imported as seed 1 does."""
    queues = [r for r in topology.resources if r.kind == "queue"]
    bindings = [r for r in topology.resources if r.kind == "binding"]
    return {
        "vhosts": [{"name": vhost}],
        "exchanges": [
            {
                "name": r.name,
                "vhost": vhost,
                "type": r.arguments["type"],
                "durable": True,
                "auto_delete": False,
                "internal": False,
                "arguments": {},
            }
            for r in topology.resources
            if r.kind == "exchange"
        ],
        "queues": [
            {"name": r.name, "vhost": vhost, "durable": True, "auto_delete": False, "arguments": dict(r.arguments)}
            for r in queues
        ],
        "bindings": [
            {
                "source": r.arguments["source"],
                "vhost": vhost,
                "destination": r.arguments["destination"],
                "destination_type": "queue",
                "routing_key": r.arguments["key"],
                "arguments": {},
            }
            for r in bindings
        ],
    }
