"""The names of everything on the broker, per layout. Pure; the layouts are data.

`event-bus` is seed 4 to the letter, `per-queue` seed 1, `raffle` seed 0. Any name can be replaced by a template over
`{prefix} {service} {ms} {queue}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

from eventbus.errors import ConfigError
from eventbus.event import new_id
from eventbus.naming import template_fields
from eventbus.scheduling.tiers import TIERS

MAX_NAME: Final = 255


@dataclass(frozen=True, slots=True)
class Layout:
    """Templates of names, and how messages find their way between them."""

    exchange: str
    exchange_type: Literal["fanout", "topic", "direct"]
    queue: str
    retry_exchange: str
    retry_queue: str
    retry_key: str
    retry_ms: int
    tier_queue: str
    tier_key: str
    dead_letter_queue: str
    dead_letter_exchange: str
    """Where parked copies are published; empty: the default exchange, straight to the queue."""
    dead_letter_key: str
    reject_exchange: str
    """The work queue's own dead-letter exchange, and its key: where a plain reject goes."""
    reject_key: str
    back_exchange: str
    """The retry queues' dead-letter exchange, and its key: how a message comes back when its time is over."""
    back_key: str


LAYOUTS: Final[Mapping[str, Layout]] = {
    "event-bus": Layout(
        exchange="{prefix}.main-exchange",
        exchange_type="fanout",
        queue="{prefix}.queue.{service}",
        retry_exchange="{prefix}.retry-exchange.{service}",
        retry_queue="{prefix}.retry-queue.{service}",
        retry_key="retry",
        retry_ms=5_000,
        tier_queue="{prefix}.retry-queue.{service}.{ms}",
        tier_key="retry.{ms}",
        dead_letter_queue="{prefix}.dlq.{service}",
        dead_letter_exchange="",
        dead_letter_key="{prefix}.dlq.{service}",
        reject_exchange="{prefix}.retry-exchange.{service}",
        reject_key="retry",
        back_exchange="",
        back_key="{queue}",
    ),
    "per-queue": Layout(
        exchange="domain.events",
        exchange_type="topic",
        queue="q.{service}",
        retry_exchange="retry.{queue}",
        retry_queue="{queue}.retry",
        retry_key="retry",
        retry_ms=15_000,
        tier_queue="{queue}.retry.{ms}",
        tier_key="retry.{ms}",
        dead_letter_queue="{queue}.dlq",
        dead_letter_exchange="dlq.{queue}",
        dead_letter_key="parking",
        reject_exchange="retry.{queue}",
        reject_key="retry",
        back_exchange="",
        back_key="{queue}",
    ),
    "raffle": Layout(
        exchange="{prefix}_exchange",
        exchange_type="direct",
        queue="{prefix}_queue",
        retry_exchange="{prefix}_retry_exchange",
        retry_queue="{prefix}_retry_10s",
        retry_key="{prefix}_retry_10s",
        retry_ms=10_000,
        tier_queue="{prefix}_retry_{ms}",
        tier_key="{prefix}_retry_{ms}",
        dead_letter_queue="{prefix}_dlq",
        dead_letter_exchange="{prefix}_dlx",
        dead_letter_key="{prefix}_dlq",
        reject_exchange="{prefix}_dlx",
        reject_key="{prefix}_dlq",
        back_exchange="{prefix}_exchange",
        back_key="{queue}",
    ),
}

TEMPLATES: Final = tuple(field.name for field in fields(Layout) if field.name not in ("exchange_type", "retry_ms"))
_FIELDS: Final = ("prefix", "service", "queue", "ms")
_PER_SERVICE: Final = ("queue", "dead_letter_queue", "tier_queue")


def layout(name: str, templates: Mapping[str, str], retry_ms: int | None = None) -> Layout:
    """A shipped layout with some of its names replaced."""
    if name not in LAYOUTS:
        raise ConfigError(f"rabbit.layout = {name!r}: must be one of {', '.join(LAYOUTS)}")
    for key, template in templates.items():
        if key not in TEMPLATES:
            raise ConfigError(f"rabbit.names.{key}: unknown name; known are {', '.join(TEMPLATES)}")
        _check_template(key, template)
    chosen = replace(LAYOUTS[name], **templates)  # type: ignore[arg-type]
    return chosen if retry_ms is None else replace(chosen, retry_ms=retry_ms)


def _check_template(key: str, template: str) -> None:
    used = template_fields(f"rabbit.names.{key}", template, _FIELDS)
    if ("ms" in used) != (key in ("tier_queue", "tier_key")):
        raise ConfigError(
            f"rabbit.names.{key} = {template!r}: {{ms}} belongs in tier_queue and tier_key, and only there"
        )
    if template.startswith("amq."):
        raise ConfigError(f"rabbit.names.{key} = {template!r}: names that begin with 'amq.' belong to RabbitMQ")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one service."""

    layout: Layout
    prefix: str
    service: str
    exchange: str
    queue: str
    retry_exchange: str
    retry_queue: str
    retry_key: str
    dead_letter_queue: str
    dead_letter_exchange: str
    dead_letter_key: str
    reject_exchange: str
    reject_key: str
    back_exchange: str
    back_key: str

    @property
    def base(self) -> int:
        """The delay of the base retry queue, in ms."""
        return self.layout.retry_ms

    @property
    def rejects_are_retries(self) -> bool:
        """Whether a plain reject goes round the retry loop; in seed 0 it goes to the dead letters."""
        return self.reject_exchange == self.retry_exchange

    def tier_queue(self, ms: int) -> str:
        """The queue of one tier."""
        return self._format(self.layout.tier_queue, ms)

    def tier_key(self, ms: int) -> str:
        """The routing key of one tier on the retry exchange."""
        return self._format(self.layout.tier_key, ms)

    def holding_queue(self, mark: str) -> str:
        """The queue of one consumer for what it holds with a note."""
        return f"{self.retry_queue}.held.{mark}"

    @property
    def notes_queue(self) -> str:
        """Where the notes of a service stand that keeps the order of keys."""
        return f"{self.queue}.notes"

    def tiers(self) -> list[int]:
        """Every delay that may have a queue, shortest first: a fixed set, so that everybody knows all names.

        A depth can be told, and a service unsubscribed, by one who never saw its policy.
        """
        return sorted({*TIERS, self.base})

    def publish_key(self, type: str) -> str:
        """The routing key of a published event."""
        return publish_key(self.layout, self.prefix, type)

    def bindings(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """The keys that bind the work queue to the main exchange."""
        if self.layout.exchange_type == "fanout":
            return ("",)
        return patterns or ("#",) if self.layout.exchange_type == "topic" else (self.queue,)

    def _format(self, template: str, ms: int) -> str:
        return template.format(prefix=self.prefix, service=self.service, queue=self.queue, ms=ms)


def names_of(chosen: Layout, service: str, prefix: str) -> Names:
    """All names of a service."""
    queue = chosen.queue.format(prefix=prefix, service=service, queue="", ms="")

    def fill(template: str) -> str:
        return template.format(prefix=prefix, service=service, queue=queue, ms="")

    found = Names(
        chosen,
        prefix,
        service,
        exchange_of(chosen, prefix),
        queue,
        fill(chosen.retry_exchange),
        fill(chosen.retry_queue),
        fill(chosen.retry_key),
        fill(chosen.dead_letter_queue),
        fill(chosen.dead_letter_exchange),
        fill(chosen.dead_letter_key),
        fill(chosen.reject_exchange),
        fill(chosen.reject_key),
        fill(chosen.back_exchange),
        fill(chosen.back_key),
    )
    candidates = (found.tier_queue(max(TIERS)), found.holding_queue(new_id()), found.retry_exchange)
    longest = max((*candidates, found.dead_letter_queue), key=len)
    if len(longest.encode()) > MAX_NAME:
        raise ConfigError(f"{longest}: RabbitMQ takes names of at most {MAX_NAME} bytes; shorten service or prefix")
    return found


def exchange_of(chosen: Layout, prefix: str) -> str:
    """The exchange that publishers of a prefix use."""
    return chosen.exchange.format(prefix=prefix, service="", queue="", ms="")


def publish_key(chosen: Layout, prefix: str, type: str) -> str:
    """The routing key of an event of this type."""
    if chosen.exchange_type == "topic":
        return type
    return "" if chosen.exchange_type == "fanout" else chosen.queue.format(prefix=prefix, service="", queue="", ms="")
