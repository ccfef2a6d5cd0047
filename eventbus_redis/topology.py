"""What a configuration needs on the server, as data. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from eventbus.adapter import Resource, Subscription, Topology
from eventbus.durations import human
from eventbus_redis.options import Options


def topology(subscriptions: Sequence[Subscription], options: Options) -> Topology:
    """A stream per prefix; a consumer group, a stream, a sorted set and dead letters per service."""
    resources: list[Resource] = []
    names = options.names
    for prefix in dict.fromkeys(sub.prefix for sub in subscriptions):
        queues = dict.fromkeys(
            names.of_service(sub.service, prefix).queue for sub in subscriptions if sub.prefix == prefix
        )
        main = names.of_prefix(prefix).main
        resources.append(Resource("stream", main, feeds=tuple(queues), note="a consumer group per service"))
    age = options.dlq_max_age
    for service, prefix in dict.fromkeys((sub.service, sub.prefix) for sub in subscriptions):
        keys = names.of_service(service, prefix)
        retention = {"max_age": None if age is None else human(age), "max_entries": options.dlq_max_entries}
        resources += [
            Resource("group", f"{keys.main} {service}", {"lease": human(options.lease)}),
            Resource("stream", keys.queue, feeds=(keys.retry, keys.dlq)),
            Resource("sorted set", keys.retry, feeds=(keys.queue,)),
            Resource("dlq", keys.dlq, retention, feeds=(keys.queue,)),
        ]
    return Topology(tuple(resources))
