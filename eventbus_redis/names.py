"""Names of the keys, for Redis and for humans. Pure.

Four templates over `{prefix}` and `{service}`; every other key is one of those four with a suffix. Braces that are
written double stay: they are the hash tag, which puts all keys of a prefix into one slot, so that scripts over them
run on Redis Cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from eventbus.errors import ConfigError
from eventbus.facets import FACETS
from eventbus.naming import template_fields


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """The keys that all services of a prefix share."""

    main: str
    """The stream of all events; a consumer group per service."""
    services: str
    """Who is subscribed, and up to which id each has finished."""
    guard: str
    """Set for a moment by whoever trims, so that not everybody does."""


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """The keys of one service."""

    main: str
    services: str
    queue: str
    """Its own stream: retries that became due, re-drives, releases."""
    notes: str
    """Crash notes and attempts beside what is held."""
    retry: str
    """What waits, by the time it is due."""
    payload: str
    """The messages that wait."""
    dlq: str
    """The stream of dead letters."""
    ids: str
    """Where the dead letters of an event id stand."""
    tallies: tuple[str, ...]
    """How many dead letters have each value, a hash per facet, in the order of FACETS."""
    waiting: str
    """Dead letters being read or waiting for another try, by the time they can be read again."""
    owners: str
    """Who reads which dead letter."""
    turns: str
    """The row of tenants, and the beginning of the names of their lists."""
    turns_number: str
    """How many events wait in those lists."""
    reader: str
    """Who reads for a service that keeps the order of keys."""

    @property
    def letters(self) -> tuple[str, ...]:
        """All that changes when a letter goes."""
        return (self.dlq, self.ids, self.waiting, self.owners, *self.tallies)

    def all(self) -> tuple[str, ...]:
        """Every key."""
        own = (self.queue, self.notes, self.turns, self.turns_number, self.reader, self.retry, self.payload)
        return (self.main, self.services, *own, *self.letters)


@dataclass(frozen=True, slots=True)
class Names:
    """The templates of a bus."""

    main: str = "{{{prefix}}}:main"
    queue: str = "{{{prefix}}}:queue:{service}"
    retry: str = "{{{prefix}}}:retry:{service}"
    dlq: str = "{{{prefix}}}:dlq:{service}"

    def of_prefix(self, prefix: str) -> PrefixKeys:
        """The keys of a prefix."""
        main = self.main.format(prefix=prefix)
        return PrefixKeys(main, f"{main}:services", f"{main}:trimming")

    def of_service(self, service: str, prefix: str) -> ServiceKeys:
        """The keys of a service."""
        shared = self.of_prefix(prefix)
        queue, retry, dlq = (
            template.format(prefix=prefix, service=service) for template in (self.queue, self.retry, self.dlq)
        )
        return ServiceKeys(
            main=shared.main,
            services=shared.services,
            queue=queue,
            notes=f"{queue}:notes",
            retry=retry,
            payload=f"{retry}:payload",
            dlq=dlq,
            ids=f"{dlq}:ids",
            tallies=tuple(f"{dlq}:tally:{facet}" for facet in FACETS),
            waiting=f"{dlq}:waiting",
            owners=f"{dlq}:owners",
            turns=f"{queue}:turns",
            turns_number=f"{queue}:turns@",
            reader=f"{queue}:reader",
        )


DEFAULT: Final = Names()
_ALL: Final = tuple(field.name for field in fields(Names))
_EXAMPLE: Final = DEFAULT.queue


def read(templates: Mapping[str, object]) -> Names:
    """The names with some of them replaced; ConfigError for what would mix up keys, or part them on a cluster."""
    for key, template in templates.items():
        if key not in _ALL:
            raise ConfigError(f"redis.names.{key}: unknown name; known are {', '.join(_ALL)}")
        setting = f"redis.names.{key}"
        if not isinstance(template, str) or not template:
            raise ConfigError(f"{setting} = {template!r}: must be a text such as {_EXAMPLE!r}")
        used = template_fields(setting, template, ("prefix", "service"))
        needed = {"prefix"} if key == "main" else {"prefix", "service"}
        if used != needed:
            wanted = " and ".join(f"{{{name}}}" for name in sorted(needed))
            raise ConfigError(f"{setting} = {template!r}: must have {wanted} in it, and nothing else to fill in")
    names = replace(DEFAULT, **templates)  # type: ignore[arg-type]
    _check_slots(names)
    _check_different(names)
    return names


def hash_tag(key: str) -> str:
    """The part of a key that Redis Cluster chooses its slot by."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if start >= 0 and end > start + 1 else key


def _check_slots(names: Names) -> None:
    tags = {key: hash_tag(getattr(names, key).format(prefix="p", service="p-s")) for key in _ALL}
    main = names.main.format(prefix="p")
    if tags["main"] == main:  # no tag at all, so that even its own suffixed keys would part
        raise ConfigError(
            f"redis.names.main = {names.main!r}: has no hash tag; write one, such as {{{{{{prefix}}}}}}, "
            "so that all keys of a prefix are in one slot of a cluster"
        )
    for key, tag in tags.items():
        if tag != tags["main"]:
            raise ConfigError(
                f"redis.names.{key} = {getattr(names, key)!r}: its hash tag differs from that of "
                f"redis.names.main = {names.main!r}; all keys of a prefix must be in one slot of a cluster"
            )


def _check_different(names: Names) -> None:
    keys = Counter([*names.of_service("p-s", "p").all(), names.of_prefix("p").guard])
    key, number = keys.most_common(1)[0]
    if number > 1:
        raise ConfigError(f"redis.names: {key!r} would be the key for {number} purposes; name them apart")
