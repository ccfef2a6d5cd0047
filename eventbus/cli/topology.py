"""`eventbus topology show bus.toml`: names and arguments of everything the config needs on the broker."""

from __future__ import annotations

from typing import Literal

from cyclopts import App

from eventbus.adapter import Topology
from eventbus.cli.connection import NOT_GIVEN, Connection
from eventbus.cli.exits import DONE
from eventbus.cli.output import clean, say, say_json, say_table
from eventbus.cli.plan import make
from eventbus.cli.run import Flag

app = App(name="topology", help="What a configuration needs on the broker.")


@app.command
def show(
    target: str | None = None,
    *,
    format: Literal["table", "json", "mermaid"] = "table",
    connection: Connection = NOT_GIVEN,
    json: Flag = False,
) -> int:
    """Names and arguments of everything the configuration needs on the broker. Nothing is opened or imported.

    Parameters
    ----------
    target
        A bus.toml (the default), or a service as module:name.
    format
        A table, JSON, or a Mermaid flowchart.
    connection
        Which bus.
    json
        The same as --format json.
    """
    plan = make(target, connection, imports=False)
    topology = plan.bus.topology(*plan.services)
    if json or format == "json":
        say_json(_data(topology))
    elif format == "mermaid":
        say(mermaid(topology))
    else:
        rows = [
            (r.kind, r.name, " ".join(f"{k}={v}" for k, v in r.arguments.items()), ", ".join(r.feeds), r.note)
            for r in topology.resources
        ]
        say_table(("kind", "name", "arguments", "feeds", "note"), rows)
    return DONE


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
    ids = {resource.name: f"r{number}" for number, resource in enumerate(topology.resources)}
    lines = ["flowchart TD"]
    for resource in topology.resources:
        label = f"{clean(resource.name)}<br/>{clean(resource.kind)}".replace('"', "'")
        lines.append(f'    {ids[resource.name]}["{label}"]')
    for resource in topology.resources:
        for fed in resource.feeds:
            if fed in ids:
                lines.append(f"    {ids[resource.name]} --> {ids[fed]}")
    return "\n".join(lines)
