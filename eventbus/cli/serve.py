"""`eventbus serve`: the admin API, health and metrics, until stopped. `eventbus token`: who may use it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from eventbus import telemetry
from eventbus.cli import logs
from eventbus.cli.connection import NOT_GIVEN, Connection, Place, find, must_exist
from eventbus.cli.exits import DONE, UsageError
from eventbus.cli.interrupts import start, stop_signals
from eventbus.cli.output import note, say, say_json
from eventbus.durations import seconds
from eventbus.errors import ConfigError
from eventbus.listening import Address
from eventbus.redaction import redact_url
from eventbus.service import Service

if TYPE_CHECKING:
    from eventbus.cli.plan import Plan
    from eventbus.config.models import AdminTable
    from eventbus.console.tokens import Keyring


def serve(
    target: str | None = None,
    *,
    service: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)] = None,
    listen: str | None = None,
    connection: Connection = NOT_GIVEN,
    log: logs.LogFormat = "text",
    log_level: logs.LogLevel = "info",
) -> int:
    """The admin API, health and metrics until SIGTERM or Ctrl-C. No token is needed on loopback while there is none.

    Parameters
    ----------
    target
        A bus.toml: its services are the queues that are known, [admin] says who may look after them.
    service
        A service that is known, where there is no bus.toml; may be given more than once.
    listen
        Address and port; [admin] listen in the bus.toml, else 127.0.0.1:8000.
    connection
        Which bus.
    log
        Lines for people, or JSON objects.
    log_level
        The least that is logged.
    """
    need_console()
    place = find(Connection(connection.url, target or connection.config))
    logs.configure(log, log_level)
    return start(_serve(place, [Service(name) for name in service or ()], listen))


async def _serve(place: Place, named: Sequence[Service], listen: str | None) -> int:
    from eventbus.console import server
    from eventbus.console.app import make_app
    from eventbus.console.desk import Desk
    from eventbus.console.health import BrokerReadiness
    from eventbus.console.metrics import Metrics, collect

    admin = _admin(place)
    services = [*(place.config.outline() if place.config is not None else ()), *named]
    keyring = _keyring(admin)
    where = Address.parse(listen or admin.listen)
    server.check(where, bool(keyring))
    listening = where.bind()
    bus = place.bus()
    must_exist(bus)
    collect()
    with listening, stop_signals() as stopped:
        async with bus:
            readiness = BrokerReadiness(bus, services)
            metrics = Metrics(bus, services, tenants=admin.tenant_metrics)
            app = make_app(
                Desk(bus, services, readiness=readiness, metrics=metrics),
                keyring=keyring,
                hosts=None if keyring else server.names_of(where),
                rate=admin.rate,
                max_body=admin.max_body_kib * 1024,
            )
            async with server.serving(app, listening) as address:
                fields = {"address": address, "url": redact_url(bus.url), "tokens": len(admin.tokens)}
                telemetry.log(logging.INFO, "serving", fields)
                await stopped.wait()
                telemetry.log(logging.INFO, "stopping", {"address": address})
    telemetry.log(logging.INFO, "stopped", {"address": address})
    return DONE


def _admin(place: Place) -> AdminTable:
    from eventbus.config.models import AdminTable

    return place.config.admin if place.config is not None else AdminTable()


def _keyring(admin: AdminTable) -> Keyring:
    from eventbus.console.tokens import Keyring, Token

    return Keyring(
        [
            Token(
                token.name,
                token.role,
                token.hash,
                None if token.tenants is None else frozenset(token.tenants),
                token.expires,
            )
            for token in admin.tokens
        ]
    )


@asynccontextmanager
async def health_served(listen: str, plan: Plan) -> AsyncIterator[str]:
    """Health, metrics and stats of a process that consumes; gives the address. See `collect_metrics`."""
    from eventbus.console import server
    from eventbus.console.app import HEALTH_ROUTES, OPEN_HEALTH_ROUTES, make_app
    from eventbus.console.desk import Desk
    from eventbus.console.health import ConsumerReadiness
    from eventbus.console.metrics import Metrics

    bus, services = plan.bus, plan.services
    admin = _admin(plan.place)
    keyring, metrics = _keyring(admin), Metrics(bus, services, tenants=admin.tenant_metrics)
    desk = Desk(bus, services, readiness=ConsumerReadiness(bus, services), metrics=metrics)
    where = Address.parse(listen)
    routes = HEALTH_ROUTES if keyring or where.is_loopback else OPEN_HEALTH_ROUTES
    with where.bind() as listening:
        async with server.serving(make_app(desk, routes=routes, keyring=keyring), listening) as address:
            yield address


def collect_metrics() -> None:
    """Begin to count, before anything is made that counts."""
    need_console()
    from eventbus.console.metrics import collect

    collect()


def need_console() -> None:
    """An error that says what to install, where the extra is missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"this needs {error.name}: pip install 'eventbus-core[console]'") from None


def token(
    name: str,
    *,
    role: Literal["viewer", "operator", "admin"] = "viewer",
    tenant: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)] = None,
    expires: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Make a token for the admin API: printed once, and the table for bus.toml that knows only its hash.

    Parameters
    ----------
    name
        Whose it is: it stands in the audit log and in x-redriven-by.
    role
        What it may do: look; also put back; also purge and import.
    tenant
        It sees nothing but what belongs to this tenant; may be given more than once.
    expires
        After so long it is refused: 90d, 12h.
    json
        Print the result as JSON.
    """
    from eventbus.config.models import TokenTable
    from eventbus.console.tokens import hash_of, new_token

    secret = new_token()
    end = None if expires is None else _end(expires)
    try:
        TokenTable(name=name, role=role, hash=hash_of(secret), tenants=tenant, expires=end)
    except ValueError:
        raise UsageError(f"{name!r}: a token's name has letters, digits, dots, hyphens, @ and underscores") from None
    facts: dict[str, object] = {"name": name, "role": role, "hash": hash_of(secret)}
    if tenant:
        facts["tenants"] = tenant
    if end is not None:
        facts["expires"] = end.isoformat()
    if json:
        say_json({"token": secret} | facts)
        return DONE
    note("The token, shown only now; give it to its owner (EVENTBUS_TOKEN for `eventbus dlq --api`):")
    say(secret)
    note("\nInto bus.toml:\n")
    say("[[admin.tokens]]")
    for key, value in facts.items():
        say(f"{key} = {_toml(value)}")
    return DONE


def _end(expires: str) -> datetime:
    left = seconds(expires)
    if left <= 0:
        raise UsageError(f"--expires {expires}: must be longer than zero")
    return (datetime.now(timezone.utc) + timedelta(seconds=left)).replace(microsecond=0)


def _toml(value: object) -> str:
    from json import dumps

    return dumps(value, ensure_ascii=False)  # texts and lists of texts are the same in both
