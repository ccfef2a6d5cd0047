"""The names of topics and groups, and what each topic is made with. Pure.

`{prefix}.main` is shared; `{prefix}.retry.{service}.{ms}` (`.0` is the re-drive), `{prefix}.dlq.{service}` and
`{prefix}.dlq-state.{service}` belong to one service, whose group is `{prefix}.{service}`. Templates replace them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from eventbus.adapter import Resource, Subscription, Topology
from eventbus.errors import ConfigError
from eventbus.naming import template_fields

if TYPE_CHECKING:
    from eventbus_kafka.options import Options

LONGEST: Final = 249
_ALLOWED: Final = re.compile(r"[a-zA-Z0-9._-]+")
_SPARSE: Final = 2.0
"""Delays closer together than this ratio share a road; the worker waits for the rest."""


@dataclass(frozen=True, slots=True)
class Templates:
    """How things are called, over `{prefix} {service} {ms}`."""

    main: str = "{prefix}.main"
    retry: str = "{prefix}.retry.{service}.{ms}"
    dlq: str = "{prefix}.dlq.{service}"
    dlq_state: str = "{prefix}.dlq-state.{service}"
    group: str = "{prefix}.{service}"


def templates(given: Mapping[str, str]) -> Templates:
    """The templates with some of them replaced; ConfigError says what is wrong with one."""
    known = [field.name for field in fields(Templates)]
    for key, template in given.items():
        if key not in known:
            raise ConfigError(f"kafka.names.{key}: unknown name; known are {', '.join(known)}")
        allowed = ("prefix",) if key == "main" else ("prefix", "service", *(("ms",) if key == "retry" else ()))
        used = template_fields(f"kafka.names.{key}", template, allowed)
        if key == "retry" and "ms" not in used:
            raise ConfigError(f"kafka.names.retry = {template!r}: needs {{ms}}, a topic for each delay")
    return Templates(**given)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one service."""

    service: str
    main: str
    dlq: str
    state: str
    group: str
    retry: str
    """The template of its retry topics, over {ms}."""

    @property
    def redriven(self) -> str:
        """The topic that re-driven messages come by; it also tells that the service is subscribed."""
        return self.tier(0)

    @property
    def readers(self) -> str:
        """The group of those who read the dead letters."""
        return f"{self.group}-dlq"

    def tier(self, ms: int) -> str:
        """The topic of one delay."""
        return self.retry.replace("{ms}", str(ms))

    def delay_of(self, topic: str) -> int | None:
        """The delay of a retry topic of this service, in ms; None for any other topic."""
        head, _, tail = self.retry.partition("{ms}")
        if not topic.startswith(head) or not topic.endswith(tail):
            return None
        middle = topic[len(head) : len(topic) - len(tail)]
        return int(middle) if middle.isascii() and middle.isdigit() and len(middle) < 12 else None


def main_topic(chosen: Templates, prefix: str) -> str:
    """The topic that all services of a prefix share."""
    return chosen.main.format(prefix=prefix)


def subscriptions_in(chosen: Templates, prefix: str, topics: Iterable[str]) -> list[str]:
    """Those of the topics that tell that a service of the prefix is subscribed."""
    parts = chosen.retry.format(prefix=prefix, service="{service}", ms=0).split("{service}")
    sign = re.compile("[a-z0-9-]+".join(map(re.escape, parts)))
    return sorted(filter(sign.fullmatch, topics))


def names_of(chosen: Templates, service: str, prefix: str) -> Names:
    """All names of a service; ConfigError for one that Kafka would refuse."""
    found = Names(
        service,
        main_topic(chosen, prefix),
        chosen.dlq.format(prefix=prefix, service=service),
        chosen.dlq_state.format(prefix=prefix, service=service),
        chosen.group.format(prefix=prefix, service=service),
        chosen.retry.format(prefix=prefix, service=service, ms="{ms}"),
    )
    topics = [found.main, found.dlq, found.state, found.tier(43_200_000)]
    for topic in topics:
        if len(topic) > LONGEST or not _ALLOWED.fullmatch(topic) or topic in (".", ".."):
            raise ConfigError(f"{topic}: Kafka takes topics of at most {LONGEST} letters, digits, '.', '_' and '-'")
    if len({topic.replace("_", ".") for topic in topics}) < len(topics):
        raise ConfigError(f"{service}: two of its topics have one name (Kafka takes '.' and '_' for the same)")
    return found


def tiers_of(delays: Sequence[float]) -> tuple[int, ...]:
    """The roads that a policy's delays get from the start, in ms; those close together share one. `.0` is the first."""
    chosen = [0]
    for ms in sorted({round(delay * 1000) for delay in delays}):
        if ms >= max(25, chosen[-1] * _SPARSE):
            chosen.append(ms)
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it is to be made."""

    name: str
    partitions: int
    config: Mapping[str, str]


def topics_of(names: Names, delays: Sequence[float], options: Options) -> list[Topic]:
    """The topics of one service; the shared one first, the sign of its subscription last."""
    dlq = {
        "retention.ms": _millis(options.dlq_retention),
        "max.message.bytes": str(options.copy_bytes),
        "compression.type": _compression(options.dlq_compression),
        "message.timestamp.type": "LogAppendTime",  # pages are in the order of parking
        "cleanup.policy": "delete",
    }
    state = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"}
    tiers = [tier_topic(names, ms, options) for ms in reversed(tiers_of(delays))]
    return [
        main_of(names.main, options),
        Topic(names.dlq, options.dlq_partitions, dlq),
        Topic(names.state, 1, state),
        *tiers,
    ]


def main_of(name: str, options: Options) -> Topic:
    """The shared topic."""
    config = {"retention.ms": _millis(options.retention), "max.message.bytes": str(options.max_event_bytes)}
    return Topic(name, options.partitions, config)


def tier_topic(names: Names, ms: int, options: Options) -> Topic:
    """The topic of one delay."""
    config = {
        "retention.ms": _millis(options.retry_retention),
        "max.message.bytes": str(options.copy_bytes),
        "cleanup.policy": "delete",
    }
    return Topic(names.tier(ms), options.retry_partitions, config)


def topology(subscriptions: Sequence[Subscription], options: Options) -> Topology:
    """A topic per prefix; tiers, dead letters and their state per service."""
    resources: dict[str, Resource] = {}
    for sub in subscriptions:
        names = names_of(options.names, sub.service, sub.prefix)
        for topic in topics_of(names, sub.delays, options):
            known = resources.get(topic.name)
            feeds, note = _role(names, topic.name)
            if known is not None:
                feeds = tuple(dict.fromkeys(known.feeds + feeds))
            arguments: dict[str, str | int | bool | None] = {"partitions": topic.partitions, **topic.config}
            resources[topic.name] = Resource("topic", topic.name, arguments, feeds, note)
        resources[f"group {names.group}"] = Resource("group", names.group, feeds=(names.redriven, names.dlq))
    return Topology(tuple(resources.values()))


def _role(names: Names, topic: str) -> tuple[tuple[str, ...], str]:
    if topic == names.main:
        return (names.group,), "a consumer group per service"
    if topic == names.dlq:
        return (names.redriven,), "dead letters, append-only"
    if topic == names.state:
        return (), "what was re-driven or purged"
    return (names.group,), "re-driven" if topic == names.redriven else "retries of this delay"


def _millis(age: float | None) -> str:
    return "-1" if age is None else str(round(age * 1000))


def _compression(name: str) -> str:
    return "uncompressed" if name == "none" else name
