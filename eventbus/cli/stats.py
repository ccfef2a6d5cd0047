"""`eventbus stats`: how services stand: their queues, and where they run the endpoints and their breakers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from eventbus.cli.connection import ANYWHERE, AnyConnection, find, must_exist
from eventbus.cli.exits import DONE, UsageError
from eventbus.cli.interrupts import start
from eventbus.cli.output import say_json, say_table
from eventbus.durations import human
from eventbus.errors import UnknownService


def stats(
    *services: Annotated[str, Parameter(help="Only these; without a name, all of the bus.toml or of the API.")],
    connection: AnyConnection = ANYWHERE,
    json: Annotated[bool, Parameter(negative=(), help="Print the result as JSON.")] = False,
) -> int:
    """How services stand: ready, in flight, delayed, parked; through `--api`, also how their endpoints do.

    Breakers are known to the process that forwards: ask its `--health` address, `--api http://127.0.0.1:8000`.
    """
    found = start(_remote(services, connection) if connection.api else _straight(services, connection))
    if json:
        say_json({"services": found})
        return DONE
    say_table(("service", "ready", "in flight", "delayed", "parked", "oldest"), [_depths(one) for one in found])
    endpoints = [_endpoint(one["service"], endpoint) for one in found for endpoint in one["endpoints"]]
    if endpoints:
        say_table(("service", "endpoint", "breaker", "failures", "next probe", "calls at a time"), endpoints)
    return DONE


async def _straight(names: Sequence[str], connection: AnyConnection) -> list[dict[str, Any]]:
    from eventbus.standing import standing

    place = find(connection)
    services = [place.service(name, connection.prefix) for name in names]
    if not names and place.config is not None:
        services = place.config.outline()
    if not services:
        raise UsageError("name a service, such as: eventbus stats wms-cincout; or give a --config with services in it")
    bus = place.bus()
    must_exist(bus)
    async with bus:
        found = [await standing(bus, service) for service in services]
    for one in found:
        if names and not one.subscribed:  # who asks for it by name wants to hear of a slip
            known = ", ".join(s.name for s in place.config.outline()) if place.config is not None else ""
            hint = f" (the bus.toml has {known})" if known else ""
            raise UnknownService(f"{one.service} is not subscribed here; mistyped, or never provisioned?{hint}")
    return [asdict(one) for one in found]


async def _remote(names: Sequence[str], connection: AnyConnection) -> list[dict[str, Any]]:
    from eventbus.cli.api import admin_api

    assert connection.api is not None
    async with admin_api(connection.api, connection.token_file) as api:
        found: list[dict[str, Any]] = (await api.get("/admin/stats"))["services"]
    known = {one["service"]: one for one in found}
    for name in names:
        if name not in known:
            raise UnknownService(f"{connection.api} does not know {name}; it knows {', '.join(known) or 'no service'}")
    return [known[name] for name in names] or found


def _depths(one: Mapping[str, Any]) -> tuple[object, ...]:
    if not one["subscribed"]:
        return one["service"], "never ran", "", "", "", ""
    about = "" if one["exact"] else "~"
    oldest = one["oldest_parked"]
    depths = [f"{about}{one[name]}" for name in ("ready", "inflight", "delayed", "parked")]
    return one["service"], *depths, "" if oldest is None else human(round(oldest))


def _endpoint(service: str, endpoint: Mapping[str, Any]) -> tuple[object, ...]:
    probe, limit = endpoint["probe_at"], endpoint["limit"]
    return (
        service,
        endpoint["url"],
        endpoint["breaker"],
        endpoint["failures"],
        "" if probe is None else f"in {human(max(0, round(probe - time.time())))}",
        "all" if limit is None else limit,
    )
