"""What `run` and `topology` are about: the bus and the services of a bus.toml, or of "app:service"."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from eventbus.adapter import Subscription
from eventbus.bus import Bus
from eventbus.cli.connection import DEFAULT_CONFIG, Connection, Place, find, given_url
from eventbus.cli.exits import UsageError
from eventbus.durations import human
from eventbus.errors import ConfigError
from eventbus.listening import Listening
from eventbus.policy import RetryPolicy
from eventbus.service import Route, Service


@dataclass(frozen=True, slots=True)
class Plan:
    """A bus that is not open yet, and what is to run on it."""

    target: str
    bus: Bus
    services: Sequence[Service]
    place: Place
    listening: Listening | None = None
    """Where events can be published over HTTP."""

    @property
    def subscriptions(self) -> list[Subscription]:
        """What the services ask of the broker."""
        return [service.subscription() for service in self.services]


def make(target: str | None, connection: Connection, *, imports: bool = True, listen: str | None = None) -> Plan:
    """Read a target; with `imports` false the handlers of a bus.toml are not imported, and nothing listens."""
    if (
        target is None
        and connection.config is None
        and listen
        and connection.url
        and not os.path.isfile(DEFAULT_CONFIG)
    ):
        place = find(connection)
        return Plan("", place.bus(), (), place, _listening(listen))  # publishing only
    target = target or connection.config or DEFAULT_CONFIG
    listening = None
    if _is_config(target):
        from eventbus.config import load

        config = load(target, url=given_url(connection.url))
        services = config.services() if imports else config.outline()
        place = Place(config.url, config)
        listening = config.listening(listen) if imports else None
    elif ":" in target:
        services = _services_at(target)
        place = find(connection)
        listening = _listening(listen) if imports else None
    else:
        raise UsageError(f"{target!r}: give a file such as bus.toml, or a service as module:name, such as app:wms")
    if not services and listening is None:
        raise UsageError(
            f"{target}: there is no service in it; add [services.NAME] with its routes, or --listen to publish only"
        )
    return Plan(target, place.bus(), services, place, listening)


def _listening(address: str | None) -> Listening | None:
    if address is None and not any(name.startswith("EVENTBUS_LISTEN__") for name in os.environ):
        return None
    from eventbus.config.listening import listening_by_environment

    return listening_by_environment(address)


def _is_config(target: str) -> bool:
    return target.endswith(".toml") or os.path.isfile(target)


def _services_at(target: str) -> list[Service]:
    from eventbus.config import find_object

    try:
        found = find_object(target)
    except ConfigError as error:
        raise ConfigError(f"{target}: {error}") from None
    services = []
    for service in found if isinstance(found, (list, tuple)) else [found]:
        if not isinstance(service, Service):
            raise ConfigError(f"{target}: is not a Service but a {type(service).__name__}")
        services.append(service)
    return services


def describe_retry(policy: RetryPolicy) -> str:
    """A retry policy in a few words."""
    if not policy.max_retries:
        return "none"
    growing = policy.factor != 1.0
    delay = f"{human(policy.base)} to {human(policy.cap)}" if growing else human(policy.base)
    place = ", in place" if policy.mode == "in-place" else ""
    return f"{policy.max_retries} x {delay}{place}"


def describe_route(route: Route) -> dict[str, object]:
    """What a route does, as data."""
    kind = "forward" if route.endpoint else "batch" if route.batch else "handler"
    return {
        "on": route.pattern,
        "kind": kind,
        "to": route.name,
        "concurrency": route.concurrency,
        "timeout": route.endpoint.timeout if route.endpoint else route.timeout,
        "max_attempts": route.policy.retry.max_attempts,
        "retry": describe_retry(route.policy.retry),
    }
