"""`eventbus topology`: show, diff, apply, export, on SQLite, Redis and RabbitMQ."""

from __future__ import annotations

import json
import os
import secrets

import pytest

from eventbus import Bus
from tests.brokers import rabbit, redis
from tests.brokers.rabbit import RabbitNode
from tests.e2e.conftest import Cli

CONFIG = """
version = 1
url = "{url}"

[services.{service}]
retry = {{ max_retries = 3, delay = "2s" }}

[[services.{service}.routes]]
on = "order.*"
forward = "http://127.0.0.1:9/events"

[rabbit]
layout = "{layout}"
queue_type = "{queue_type}"
settling = 0
"""


@pytest.fixture(scope="module")
def broker() -> RabbitNode:
    """The shared RabbitMQ, for its rabbitmqctl."""
    if rabbit.URL_VARIABLE in os.environ:
        pytest.skip("needs rabbitmqctl of a broker of our own")
    rabbit.shared_url()
    return RabbitNode()


def _configure(
    cli: Cli, url: str, layout: str = "event-bus", queue_type: str = "classic", service: str = "wms-cincout"
) -> None:
    cli.write("bus.toml", CONFIG.format(url=url, layout=layout, queue_type=queue_type, service=service))


@pytest.mark.parametrize("scheme", ["sqlite", "redis"])
def test_a_bus_is_compared_and_made(cli: Cli, scheme: str) -> None:
    """Diff says what is missing and exits with 1; apply makes it; then there is no difference."""
    url = f"sqlite:///{cli.folder}/bus.db" if scheme == "sqlite" else redis.shared_url()
    _configure(cli, url, service=f"w{secrets.token_hex(4)}-stock")
    if scheme == "sqlite":
        missing = cli("topology", "diff")
        assert missing.returncode == 3  # looking makes no file
        assert "there is no file" in missing.stderr
        assert cli("publish", "order.created").returncode == 0
    before = cli("topology", "diff", "--json")
    assert before.returncode == 1
    assert [row["found"] for row in json.loads(before.stdout)["drift"]] == ["missing"]
    assert "missing" in cli("topology", "diff").stdout
    made = cli("topology", "apply")
    assert made.returncode == 0
    assert made.stdout.startswith("made ")
    after = cli("topology", "diff")
    assert (after.returncode, after.stdout) == (0, "no difference\n")
    assert cli("topology", "apply").stdout == "nothing to do\n"
    exported = cli("topology", "export")
    assert json.loads(exported.stdout)["resources"]
    refused = cli("topology", "export", "--format", "rabbitmq-definitions")
    assert refused.returncode == 2
    assert f"this bus is {scheme}" in refused.stderr


@pytest.mark.parametrize(
    ("layout", "queue_type"), [("event-bus", "quorum"), ("per-queue", "classic"), ("raffle", "quorum")]
)
async def test_definitions_are_imported_by_a_real_broker(
    cli: Cli, broker: RabbitNode, layout: str, queue_type: str
) -> None:
    """The export goes in by rabbitmqctl as it is; then nothing differs, and events arrive."""
    prefix = f"w{secrets.token_hex(4)}"
    url = rabbit.shared_url()
    _configure(cli, url, layout, queue_type, service=f"{prefix}-stock")
    before = cli("topology", "diff", "--format", "json")
    assert before.returncode == 1
    exported = cli("topology", "export")
    assert (exported.returncode, exported.stderr) == (0, "")
    found = json.loads(exported.stdout)
    queues = {entry["name"] for entry in found["queues"]}
    assert len(queues) == 4
    assert queues <= {row["resource"] for row in json.loads(before.stdout)["drift"]}
    assert found["vhosts"] == [{"name": url.rpartition("/")[2]}]
    broker.ctl("import_definitions", str(cli.write("definitions.json", exported.stdout)))
    after = cli("topology", "diff")
    assert (after.returncode, after.stdout) == (0, "no difference\n")
    assert cli("publish", "order.created", "--prefix", prefix).returncode == 0
    settings = {"rabbit": {"layout": layout, "queue_type": queue_type}}
    async with Bus(url, prefix=prefix, settings=settings) as bus:
        assert (await bus.stats(f"{prefix}-stock")).ready == 1


def test_what_differs_is_told_and_left_alone(cli: Cli) -> None:
    """A classic queue where quorum is wanted: diff and apply name argument, found and wanted, and exit with 1."""
    service = f"w{secrets.token_hex(4)}-stock"
    _configure(cli, rabbit.shared_url(), service=service)
    queue = f"{service.partition('-')[0]}.queue.{service}"
    made = cli("topology", "apply", "--json")
    assert made.returncode == 0
    assert queue in json.loads(made.stdout)["made"]
    _configure(cli, rabbit.shared_url(), queue_type="quorum", service=service)
    compared, applied = cli("topology", "diff"), cli("topology", "apply")
    for done in (compared, applied):
        assert done.returncode == 1
        row = next(line for line in done.stdout.splitlines() if line.startswith(queue))
        assert "quorum" in row.split()[-1]
    assert "stay as they are" in applied.stderr


def test_an_export_needs_no_broker(cli: Cli) -> None:
    """Where nobody answers the arguments are those of the oldest server, and that is said."""
    _configure(cli, "amqp://127.0.0.1:5669/", queue_type="quorum")
    done = cli("topology", "export", "bus.toml")
    assert done.returncode == 0
    assert "not asked for its version" in done.stderr
    assert json.loads(done.stdout)["queues"]
    chart = cli("topology", "show", "--format", "mermaid").stdout
    assert chart.count("-->") >= 5
    assert cli("topology", "diff").returncode == 3
