"""`eventbus stats`: depths straight from the broker, and breakers from the process that forwards."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import httpx
import pytest

from tests.e2e.conftest import Cli

CONFIG = """
url = "sqlite:///bus.db"
source = "wms-api"
[services.wms-cincout]
[[services.wms-cincout.routes]]
on = "order.*"
forward = "{url}"
breaker = {{ failures = 2, open = "20s" }}
"""


def nobody() -> str:
    """A URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}/events?key=hunter2"


def test_depths_straight_from_the_broker(cli: Cli, letters: dict[str, str]) -> None:
    """By name, or all of the bus.toml; a service that never ran is told as such; nothing is known of breakers."""
    done = cli("stats", "wms-cincout", "--url", "sqlite:///bus.db", "--json")
    [found] = json.loads(done.stdout)["services"]
    assert (found["service"], found["subscribed"], found["parked"], found["ready"]) == ("wms-cincout", True, 3, 0)
    assert found["oldest_parked"] >= 0
    assert (found["consumer"], found["endpoints"]) == (None, [])
    cli.write("bus.toml", CONFIG.format(url=nobody()) + '[services.wms-new]\n[[services.wms-new.routes]]\non = "x"\n'
              f'forward = "{nobody()}"\n')  # fmt: skip
    table = cli("stats").stdout.splitlines()
    assert table[0].split() == ["service", "ready", "in", "flight", "delayed", "parked", "oldest"]
    assert table[1].split()[:5] == ["wms-cincout", "0", "0", "0", "3"]
    assert table[2].split() == ["wms-new", "never", "ran"]
    assert len(table) == 3
    slip = cli("stats", "wms-cincuot")
    assert (slip.returncode, slip.stdout) == (2, "")
    assert "wms-cincuot is not subscribed here" in slip.stderr
    assert "wms-cincout, wms-new" in slip.stderr


def test_the_breaker_of_a_running_forwarder(cli: Cli, until: Callable[[Callable[[], object], str], None]) -> None:
    """Closed, then open with its next probe; the URL without its query; through the address of --health."""
    cli.write("bus.toml", CONFIG.format(url=nobody()))
    running = cli.start("run", "bus.toml", "--health", "127.0.0.1:0", "--log", "json")
    [row] = running.wait_for("health")
    address = str(row["address"])
    running.wait_for("started")
    [before] = json.loads(cli("stats", "--api", address, "--json").stdout)["services"]
    assert [endpoint["breaker"] for endpoint in before["endpoints"]] == ["closed"]
    assert before["consumer"]["running"] == 0
    for _ in range(3):
        assert cli("publish", "order.created", "{}", "--config", "bus.toml").returncode == 0
    running.wait_for("breaker_opened")
    [found] = json.loads(cli("stats", "wms-cincout", "--api", address, "--json").stdout)["services"]
    [endpoint] = found["endpoints"]
    assert endpoint["breaker"] == "open"
    assert endpoint["url"].endswith("/events?***")
    assert endpoint["probe_at"] > 0
    assert found["parked"] == 0

    def waiting() -> int:
        return int(httpx.get(f"{address}/admin/stats").json()["services"][0]["consumer"]["waiting"])

    until(lambda: waiting() >= 1, "what was turned away waits here")
    shown = cli("stats", "--api", address)
    assert "hunter2" not in shown.stdout
    assert shown.stdout.splitlines()[-1].split()[2] == "open"
    assert running.end() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--url", "memory://"), 2, "name a service"),
        (("--url", "sqlite:///none.db", "wms-a"), 3, "there is no file"),
        (("--api", "http://127.0.0.1:1"), 3, "does not answer"),
        (("--api", "http://127.0.0.1:1", "--url", "memory://"), 2, "give --api, or --url"),
        (("--api", "nowhere"), 2, "--api: write http://"),
    ],
)
def test_what_cannot_be_asked(cli: Cli, arguments: tuple[str, ...], code: int, words: str) -> None:
    """One line that says what to do."""
    done = cli("stats", *arguments)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr


def test_a_service_that_the_api_does_not_know(cli: Cli) -> None:
    """Says which it knows."""
    cli.write("bus.toml", CONFIG.format(url=nobody()))
    running = cli.start("run", "bus.toml", "--health", "127.0.0.1:0", "--log", "json")
    [row] = running.wait_for("health")
    done = cli("stats", "wms-other", "--api", str(row["address"]))
    assert (done.returncode, "it knows wms-cincout" in done.stderr) == (2, True), done.stderr
    assert running.end() == 0


def test_others_than_this_machine_see_no_stats_without_a_token(cli: Cli) -> None:
    """--health on all addresses serves probes and metrics; what is for operators is not there."""
    cli.write("bus.toml", CONFIG.format(url=nobody()))
    running = cli.start("run", "bus.toml", "--health", "0.0.0.0:0", "--log", "json")
    [row] = running.wait_for("health")
    address = str(row["address"]).replace("0.0.0.0", "127.0.0.1")
    assert httpx.get(f"{address}/healthz").status_code == 200
    assert httpx.get(f"{address}/admin/stats").status_code == 404
    assert httpx.get(f"{address}/admin/fairness/wms-cincout").status_code == 404
    assert running.end() == 0
