"""Names of the keys, for Redis and for humans. Pure.

The braces are a hash tag: all keys of a prefix live in one slot, so that scripts over them run on Redis Cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eventbus.adapter import Resource, Subscription, Topology
from eventbus.durations import human
from eventbus_redis.options import Options


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
    retry: str
    """What waits, by the time it is due."""
    payload: str
    """The messages that wait."""
    notes: str
    """Crash notes and attempts beside what is held."""
    dlq: str
    """The stream of dead letters."""
    ids: str
    """Where the dead letters of an event id stand."""
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


def of_prefix(prefix: str) -> PrefixKeys:
    """The keys of a prefix."""
    tag = f"{{{prefix}}}"
    return PrefixKeys(f"{tag}:main", f"{tag}:services", f"{tag}:trimming")


def of_service(service: str, prefix: str) -> ServiceKeys:
    """The keys of a service."""
    tag, shared = f"{{{prefix}}}", of_prefix(prefix)
    dlq, retry = f"{tag}:dlq:{service}", f"{tag}:retry:{service}"
    return ServiceKeys(
        main=shared.main,
        services=shared.services,
        queue=f"{tag}:queue:{service}",
        retry=retry,
        payload=f"{retry}:payload",
        notes=f"{tag}:notes:{service}",
        dlq=dlq,
        ids=f"{dlq}:ids",
        waiting=f"{dlq}:waiting",
        owners=f"{dlq}:owners",
        turns=f"{tag}:turns:{service}",
        turns_number=f"{tag}:turns:{service}@",
        reader=f"{tag}:reader:{service}",
    )


def topology(subscriptions: Sequence[Subscription], options: Options) -> Topology:
    """A stream per prefix; a consumer group, a stream, a sorted set and dead letters per service."""
    resources: list[Resource] = []
    for prefix in dict.fromkeys(sub.prefix for sub in subscriptions):
        shared = of_prefix(prefix)
        queues = dict.fromkeys(of_service(sub.service, prefix).queue for sub in subscriptions if sub.prefix == prefix)
        resources.append(Resource("stream", shared.main, feeds=tuple(queues), note="a consumer group per service"))
    age = options.dlq_max_age
    for service, prefix in dict.fromkeys((sub.service, sub.prefix) for sub in subscriptions):
        keys = of_service(service, prefix)
        retention = {"max_age": None if age is None else human(age), "max_entries": options.dlq_max_entries}
        resources += [
            Resource("group", f"{keys.main} {service}", {"lease": human(options.lease)}),
            Resource("stream", keys.queue, feeds=(keys.retry, keys.dlq)),
            Resource("sorted set", keys.retry, feeds=(keys.queue,)),
            Resource("dlq", keys.dlq, retention, feeds=(keys.queue,)),
        ]
    return Topology(tuple(resources))
