"""`eventbus topology ...`: what a configuration needs on the broker: shown, compared, made, exported."""

from __future__ import annotations

import json as jsonlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Literal

from cyclopts import App, Parameter

from eventbus.adapter import Drift, Topology
from eventbus.cli.connection import NOT_GIVEN, Connection, must_exist
from eventbus.cli.exits import DONE, FAILED, UsageError
from eventbus.cli.interrupts import start
from eventbus.cli.output import clean, note, say, say_json, say_table
from eventbus.cli.plan import Plan, make
from eventbus.errors import BrokerUnavailable

app = App(name="topology", help="What a configuration needs on the broker: shown, compared, made, exported.")

Target = Annotated[str | None, Parameter(help="A bus.toml (the default), or a service as module:name.")]
AsJson = Annotated[bool, Parameter(negative=(), help="The same as --format json.")]
Table = Annotated[Literal["table", "json"], Parameter(help="A table, or JSON.")]
Format = Annotated[
    Literal["table", "json", "mermaid", "rabbitmq-definitions"],
    Parameter(help="A table, JSON, a Mermaid flowchart, or the definitions.json that RabbitMQ imports."),
]


@app.command
def show(
    target: Target = None,
    *,
    format: Format = "table",
    connection: Connection = NOT_GIVEN,
    json: AsJson = False,
) -> int:
    """Names and arguments of everything the configuration needs on the broker. Nothing is opened or imported."""
    plan = make(target, connection, imports=False)
    _print(plan, plan.bus.topology(*plan.services), "json" if json else format)
    return DONE


@app.command
def export(
    target: Target = None,
    *,
    format: Format | None = None,
    connection: Connection = NOT_GIVEN,
    json: AsJson = False,
) -> int:
    """The same as a file for the broker's own tools (RabbitMQ: definitions.json), elsewhere as JSON.

    The broker is asked for its version, because the right arguments depend on it; nothing is changed on it.
    """
    plan = make(target, connection, imports=False)
    own = f"{plan.bus.adapter.name}-definitions"
    chosen = "json" if json else format or (own if _definitions(plan) is not None else "json")
    if chosen == own:
        start(_ask_version(plan))
    _print(plan, plan.bus.topology(*plan.services), chosen)
    return DONE


@app.command
def diff(
    target: Target = None, *, format: Table = "table", connection: Connection = NOT_GIVEN, json: AsJson = False
) -> int:
    """What differs on the broker from what the configuration needs. Nothing is changed; exit code 1: something does."""
    plan = make(target, connection, imports=False)

    async def work() -> int:
        async with _opened(plan):
            drifts = await plan.bus.adapter.provision(plan.subscriptions, "verify")
        if json or format == "json":
            say_json({"drift": _rows(drifts)})
        elif drifts:
            _say_drifts(drifts)
        else:
            say("no difference")
        return FAILED if drifts else DONE

    return start(work())


@app.command
def apply(
    target: Target = None, *, format: Table = "table", connection: Connection = NOT_GIVEN, json: AsJson = False
) -> int:
    """Make what is missing on the broker. Nothing that exists is changed; exit code 1: something differs and stays."""
    plan = make(target, connection, imports=False)

    async def work() -> int:
        async with _opened(plan, made=True):
            adapter = plan.bus.adapter
            before = await adapter.provision(plan.subscriptions, "verify")
            left = await adapter.provision(plan.subscriptions, "create")
        made = [drift for drift in before if drift.found == "missing" and drift not in left]
        if json or format == "json":
            say_json({"made": [drift.resource for drift in made], "drift": _rows(left)})
            return FAILED if left else DONE
        for drift in made:
            say(f"made {clean(drift.resource)}")
        if left:
            note("these differ and stay as they are; delete them by hand, or change the configuration:")
            _say_drifts(left)
        elif not made:
            say("nothing to do")
        return FAILED if left else DONE

    return start(work())


@asynccontextmanager
async def _opened(plan: Plan, *, made: bool = False) -> AsyncIterator[None]:
    if not made:
        must_exist(plan.bus)
    async with plan.bus:
        yield


async def _ask_version(plan: Plan) -> None:
    try:
        async with plan.bus:
            pass
    except BrokerUnavailable as error:
        note(f"the broker was not asked for its version, the arguments are those of the oldest: {clean(error)}")


def _definitions(plan: Plan) -> object | None:
    return plan.bus.adapter.definitions(plan.bus.topology(*plan.services))


def _print(plan: Plan, topology: Topology, format: str) -> None:
    if format == "json":
        say_json(_data(topology))
    elif format == "mermaid":
        say(mermaid(topology))
    elif format == "table":
        rows = [
            (r.kind, r.name, " ".join(f"{k}={v}" for k, v in r.arguments.items()), ", ".join(r.feeds), r.note)
            for r in topology.resources
        ]
        say_table(("kind", "name", "arguments", "feeds", "note"), rows)
    else:
        adapter = plan.bus.adapter
        if format != f"{adapter.name}-definitions":
            raise UsageError(f"--format {format}: this bus is {adapter.name}; use table, json or mermaid")
        say(jsonlib.dumps(adapter.definitions(topology), indent=2, ensure_ascii=False))


def _rows(drifts: Sequence[Drift]) -> list[dict[str, str]]:
    return [{"resource": d.resource, "argument": d.argument, "found": d.found, "wanted": d.wanted} for d in drifts]


def _say_drifts(drifts: Sequence[Drift]) -> None:
    say_table(("resource", "argument", "found", "wanted"), [tuple(row.values()) for row in _rows(drifts)])


def _data(topology: Topology) -> dict[str, object]:
    return {
        "resources": [
            {
                "kind": resource.kind,
                "name": resource.name,
                "arguments": dict(resource.arguments),
                "feeds": list(resource.feeds),
                "note": resource.note,
            }
            for resource in topology.resources
        ]
    }


def mermaid(topology: Topology) -> str:
    """A flowchart: what feeds what."""
    shown = [resource for resource in topology.resources if resource.kind != "binding"]  # the arrows say it
    ids = {resource.name: f"r{number}" for number, resource in enumerate(shown)}
    lines = ["flowchart TD"]
    for resource in shown:
        label = f"{clean(resource.name)}<br/>{clean(resource.kind)}".replace('"', "'")
        lines.append(f'    {ids[resource.name]}["{label}"]')
    for resource in shown:
        for fed in resource.feeds:
            if fed in ids:
                lines.append(f"    {ids[resource.name]} --> {ids[fed]}")
    return "\n".join(lines)
