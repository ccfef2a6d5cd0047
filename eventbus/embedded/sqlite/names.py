"""Names of what is in the file, for humans and for `x-original-queue`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from eventbus.adapter import Resource, Subscription, Topology
from eventbus.durations import human
from eventbus.embedded.sqlite.options import Options


def log(prefix: str) -> str:
    """The log of a prefix."""
    return f"{prefix}.main"


def queue(service: str, prefix: str) -> str:
    """The work queue of a service."""
    return f"{prefix}.queue.{service}"


def dlq(service: str, prefix: str) -> str:
    """The dead letters of a service."""
    return f"{prefix}.dlq.{service}"


def topology(subscriptions: Sequence[Subscription], options: Options) -> Topology:
    """A log per prefix; a subscription and a dead-letter queue per service."""
    resources: list[Resource] = []
    for prefix in dict.fromkeys(sub.prefix for sub in subscriptions):
        feeds = tuple(queue(sub.service, prefix) for sub in subscriptions if sub.prefix == prefix)
        resources.append(Resource("log", log(prefix), feeds=tuple(dict.fromkeys(feeds))))
    for sub in dict.fromkeys((sub.service, sub.prefix) for sub in subscriptions):
        age = options.dlq_max_age
        resources.append(Resource("subscription", queue(*sub), {"lease": human(options.lease)}, feeds=(dlq(*sub),)))
        resources.append(
            Resource(
                "dlq",
                dlq(*sub),
                {"max_age": None if age is None else human(age), "max_entries": options.dlq_max_entries},
            )
        )
    return Topology(tuple(resources))
