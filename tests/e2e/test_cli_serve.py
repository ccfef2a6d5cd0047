"""`eventbus serve`, `eventbus token`, `eventbus run --health`: as processes, asked over sockets."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eventbus.console.tokens import hash_of
from tests.brokers import promtool

from .conftest import Cli, Running

SERVICE = '[services.wms-cincout]\nretry = { max_retries = 0 }\n[[services.wms-cincout.routes]]\non = "#"\n'
HANDLER = """
async def handle(data: dict) -> int:
    return 200 if data.get("ok") else 500
"""


def served(cli: Cli, *options: str, log: str = "json") -> tuple[Running, str]:
    running = cli.start("serve", *options, "--listen", "127.0.0.1:0", "--log", log)
    [row] = running.wait_for("serving")
    return running, str(row["address"])


def test_a_token_is_made_shown_once_and_taken(cli: Cli, letters: dict[str, str]) -> None:
    """What it prints is what bus.toml needs; a server with it asks for it, and sees its tenant only."""
    done = cli("token", "ops.acme", "--role", "operator", "--tenant", "acme", "--expires", "90d")
    assert done.returncode == 0
    secret, table = done.stdout.split("\n", 1)
    [token] = tomllib.loads(table)["admin"]["tokens"]
    assert (token["name"], token["role"], token["hash"], token["tenants"]) == (
        "ops.acme",
        "operator",
        hash_of(secret),
        ["acme"],
    )
    assert secret not in table
    cli.write("bus.toml", f'url = "sqlite:///bus.db"\n[services.wms-cincout]\n{table}')
    running, address = served(cli, "bus.toml")
    assert httpx.get(f"{address}/admin/dlq/queues").status_code == 401
    mine = httpx.get(f"{address}/admin/dlq/queues", headers={"authorization": f"Bearer {secret}"}).json()
    assert mine["queues"][0]["messages"] == 2
    assert running.end() == 0
    assert secret not in "".join(running.text)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("token", "two words"), 2, "letters, digits"),
        (("token", "a", "--role", "root"), 2, "root"),
        (("token", "a", "--expires", "soon"), 2, "soon"),
        (("token", "a", "--expires", "0s"), 2, "longer than zero"),
        (("serve", "nowhere.toml"), 2, "no such file"),
        (("serve", "--url", "sqlite:///nowhere.db"), 3, "there is no file"),
        (("serve", "--url", "memory://", "--listen", "0.0.0.0:18790"), 2, "needs a token"),
        (("serve", "--url", "memory://", "--listen", "[::]:18790"), 2, "needs a token"),
        (("serve", "--url", "memory://", "--listen", "nowhere"), 2, "write HOST:PORT"),
        (("run", "app:wms", "--url", "memory://", "--health", "x"), 2, "app"),
    ],
)
def test_what_cannot_be_served_is_told_at_once(cli: Cli, words: tuple[str, ...], code: int, said: str) -> None:
    """One line, before anything is opened."""
    done = cli(*words)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_a_port_that_is_taken(cli: Cli, letters: dict[str, str]) -> None:
    """The second server says so."""
    _, address = served(cli, "--url", "sqlite:///bus.db", "--service", "wms-cincout")
    done = cli("serve", "--url", "sqlite:///bus.db", "--listen", address.removeprefix("http://"))
    assert (done.returncode, "cannot be listened on" in done.stderr) == (2, True)


def test_without_a_file_services_are_named_or_asked_for(cli: Cli, letters: dict[str, str]) -> None:
    """--service makes a list; without any, the broker is asked."""
    _, named = served(cli, "--url", "sqlite:///bus.db", "--service", "wms-cincout")
    [queue] = httpx.get(f"{named}/admin/dlq/queues").json()["queues"]
    assert queue["messages"] == 3
    assert httpx.get(f"{named}/admin/dlq/queues/wms-other/count").status_code == 404
    _, asked = served(cli, "--url", "sqlite:///bus.db")
    assert httpx.get(f"{asked}/admin/dlq/queues/wms-cincout/count").json() == {"count": 3}


def test_the_audit_log_of_a_server(cli: Cli, letters: dict[str, str]) -> None:
    """One JSON object per change, on stderr."""
    running, address = served(cli, "--url", "sqlite:///bus.db", "--service", "wms-cincout")
    httpx.post(f"{address}/admin/dlq/queues/wms-cincout/re-drive", json={"limit": 10})
    [row] = running.wait_for("audit")
    assert (row["by"], row["what"], row["messages"], row["outcome"]) == ("local", "re-drive via queue", 3, "done")
    assert running.end(signal.SIGINT) == 0


def figures(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, as Prometheus' own parser reads it."""
    families = list(text_string_to_metric_families(text))
    assert families
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def labelled(found: dict[Any, float], name: str, **labels: str) -> float:
    wanted = frozenset(labels.items())
    matching = [value for (one, said), value in found.items() if one == name and wanted <= said]
    assert matching, f"no {name} {labels} in {sorted({n for n, _ in found})}"
    return sum(matching)


def test_health_and_metrics_of_a_process_that_consumes(
    cli: Cli, until: Callable[[Callable[[], object], str], None]
) -> None:
    """/healthz, /readyz and /metrics beside the consumers, with the names of the documentation."""
    cli.write("app.py", HANDLER)
    cli.write("bus.toml", f'url = "sqlite:///bus.db"\n{SERVICE}handler = "app:handle"\n')
    running = cli.start("run", "bus.toml", "--health", "127.0.0.1:0", "--log", "json", env={"PYTHONPATH": "."})
    [row] = running.wait_for("health")
    address = row["address"]
    until(lambda: httpx.get(f"{address}/readyz").status_code == 200, "ready")
    assert httpx.get(f"{address}/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{address}/readyz").json() == {"ready": True, "services": {"wms-cincout": "ready"}}
    assert httpx.get(f"{address}/admin/dlq/queues").status_code == 404
    lines = "".join(json.dumps({"ok": ok}) + "\n" for ok in (True, True, False))
    assert cli("publish", "order.created", "-", "--lines", "--config", "bus.toml", input=lines).returncode == 0
    running.wait_for("message_parked")

    def parked() -> bool:
        return labelled(figures(httpx.get(f"{address}/metrics").text), "eventbus_queue_depth", state="parked") == 1

    until(parked, "the depth is told")
    answer = httpx.get(f"{address}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found, service = figures(answer.text), {"service": "wms-cincout"}
    assert labelled(found, "eventbus_received_total", **service) == 3
    assert labelled(found, "eventbus_handled_total", **service, verdict="ack", status="200", type="order.created") == 2
    assert labelled(found, "eventbus_handled_total", **service, verdict="park", status="500") == 1
    assert labelled(found, "eventbus_parked_total", **service, reason="max-retries", error_code="") == 1
    assert labelled(found, "eventbus_handler_seconds_count", **service) == 3
    assert labelled(found, "eventbus_handler_seconds_bucket", **service, le="0.005") <= 3
    assert {dict(said)["state"] for name, said in found if name == "eventbus_queue_depth"} == {
        "ready",
        "inflight",
        "delayed",
        "parked",
    }
    assert labelled(found, "eventbus_dlq_oldest_seconds", **service) >= 0
    assert running.end() == 0
    promtool.check_metrics("".join(line for line in answer.text.splitlines(True) if "eventbus_" in line))


SHAPED = """
url = "sqlite:///bus.db"
[admin]
tenant_metrics = 1
[services.wms-cincout]
retry = { max_retries = 0 }
fairness = true
idempotency = { window = "1h" }
[[services.wms-cincout.routes]]
on = "order.*"
handler = "app:handle"
[[services.wms-cincout.routes]]
on = "invoice.*"
forward = "http://127.0.0.1:9/events"
breaker = { failures = 1, open = "60s" }
"""


def test_metrics_of_tenants_duplicates_and_breakers(
    cli: Cli, until: Callable[[Callable[[], object], str], None]
) -> None:
    """The first tenant of each kind only, as asked for; what came twice; every breaker in every scrape."""
    cli.write("app.py", HANDLER)
    cli.write("bus.toml", SHAPED)
    running = cli.start("run", "bus.toml", "--health", "127.0.0.1:0", "--log", "json", env={"PYTHONPATH": "."})
    [row] = running.wait_for("health")
    running.wait_for("started")

    def publish(tenant: str, id: str, ok: bool, type: str = "order.created") -> None:
        words = ("publish", type, json.dumps({"ok": ok}), "--tenant", tenant, "--id", id, "--config", "bus.toml")
        assert cli(*words).returncode == 0

    for tenant, id in (("acme", "1"), ("acme", "2"), ("globex", "3")):
        publish(tenant, id, ok=False)
    running.wait_for("message_parked", 3)
    publish("globex", "4", ok=True)

    def read() -> dict[Any, float]:
        return figures(httpx.get(f"{row['address']}/metrics").text)

    until(
        lambda: any(name == "eventbus_handled_total" and ("verdict", "ack") in said for name, said in read()), "acked"
    )
    publish("globex", "4", ok=True)
    running.wait_for("duplicate_skipped")
    publish("initech", "5", ok=True, type="invoice.due")
    running.wait_for("breaker_opened")
    labelled(read(), "eventbus_breaker_state")
    found = read()  # the second scrape tells it, too
    service = {"service": "wms-cincout"}
    assert labelled(found, "eventbus_duplicates_total", **service, type="order.created") == 1
    assert labelled(found, "eventbus_breaker_state", **service, type="invoice.*") == 2
    parked = {said: value for (name, said), value in found.items() if name == "eventbus_tenant_parked"}
    assert parked == {frozenset({**service, "tenant": "acme"}.items()): 2}
    assert labelled(found, "eventbus_tenant_processed_total", **service) >= 2
    for name in ("priority", "consecutive", "rounds_waited"):
        labelled(found, f"eventbus_tenant_{name}", **service)
    assert running.end() == 0


def test_metrics_of_a_server(cli: Cli, letters: dict[str, str]) -> None:
    """Depths, and what was put back and removed through it."""
    running, address = served(cli, "--url", "sqlite:///bus.db", "--service", "wms-cincout")
    path = f"{address}/admin/dlq/queues/wms-cincout"
    assert httpx.post(f"{path}/re-drive", json={"limit": 2}).json()["done"] == 2
    assert httpx.post(f"{path}/purge", json={"limit": 1}).json()["done"] == 1
    text = httpx.get(f"{address}/metrics").text
    found = figures(text)
    assert labelled(found, "eventbus_redriven_total", service="wms-cincout") == 2
    assert labelled(found, "eventbus_purged_total", service="wms-cincout", reason="operator") == 1
    assert labelled(found, "eventbus_queue_depth", service="wms-cincout", state="ready") == 2
    assert httpx.get(f"{address}/readyz").json()["ready"] is True
    assert running.end() == 0


def test_each_worker_has_a_port_of_its_own(cli: Cli, until: Callable[[Callable[[], object], str], None]) -> None:
    """--workers 2 --health 18791: the first on it, the second on the next."""
    cli.write("app.py", HANDLER)
    cli.write("bus.toml", f'url = "sqlite:///bus.db"\n{SERVICE}handler = "app:handle"\n')
    options = ("--workers", "2", "--health", "18791", "--log", "json")
    running = cli.start("run", "bus.toml", *options, env={"PYTHONPATH": "."})
    rows = running.wait_for("health", 2)
    assert {row["address"] for row in rows} == {"http://127.0.0.1:18791", "http://127.0.0.1:18792"}
    for row in rows:
        until(lambda row=row: httpx.get(f"{row['address']}/readyz").status_code == 200, "ready")
    assert running.end() == 0


def test_a_broker_that_goes_away_makes_it_unready(cli: Cli, until: Callable[[Callable[[], object], str], None]) -> None:
    """The process lives, and says that it cannot work and why."""
    from tests.brokers.redis import RedisServer

    with RedisServer() as redis:
        cli.write("app.py", HANDLER)
        cli.write("bus.toml", f'url = "{redis.url}"\n{SERVICE}handler = "app:handle"\n')
        running = cli.start("run", "bus.toml", "--health", "127.0.0.1:0", "--log", "json", env={"PYTHONPATH": "."})
        [row] = running.wait_for("health")
        until(lambda: httpx.get(f"{row['address']}/readyz").status_code == 200, "ready")
        redis.kill()
        until(lambda: httpx.get(f"{row['address']}/readyz").status_code == 503, "unready")
        problem = httpx.get(f"{row['address']}/readyz").json()
        assert problem["type"] == "urn:eventbus:problem:not-ready"
        assert problem["detail"].startswith("wms-cincout: ")
        assert httpx.get(f"{row['address']}/healthz").status_code == 200
        redis.start()
        until(lambda: httpx.get(f"{row['address']}/readyz").status_code == 200, "ready again")
        assert running.end() == 0


def test_the_examples_of_the_documentation(cli: Cli, letters: dict[str, str]) -> None:
    """Every curl of docs/admin.md does what it says, one after the other, on three dead letters."""
    text = (Path(__file__).parents[2] / "docs" / "admin.md").read_text()
    running, address = served(cli, "--url", "sqlite:///bus.db", "--service", "wms-cincout")
    said = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        script = block.replace("http://127.0.0.1:8000", address)
        script = script.replace("curl -s ", "echo; curl -sS --fail-with-body ")
        done = subprocess.run(["bash", "-ec", script], cwd=cli.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        said += [json.loads(line) for line in done.stdout.splitlines() if line]
        if len(said) == 3:  # what was re-driven is put back for the examples below
            assert said[2]["done"] == 3
            run_again(cli)
    queues, messages, redriven, stats, count, dry, purged, imported, document = said
    assert queues["queues"][0]["messages"] == len(messages["messages"]) == redriven["done"] == 3
    assert stats["counts"] == {"acme": 2, "globex": 1}
    assert count == {"count": 2}
    assert (dry["matched"], dry["done"]) == (2, 0)
    assert purged["done"] == imported["done"] == 3
    assert document["openapi"] == "3.1.0"
    assert running.end() == 0


def run_again(cli: Cli) -> None:
    """Let the service park again what was put back to it."""
    cli.write("again.py", "async def handle(data: dict) -> int:\n    return 500\n")
    cli.write("again.toml", f'url = "sqlite:///bus.db"\n{SERVICE}handler = "again:handle"\n')
    running = cli.start("run", "again.toml", "--log", "json", env={"PYTHONPATH": "."})
    running.wait_for("message_parked", 3)
    assert running.end() == 0


def test_the_settings_of_the_documentation(cli: Cli) -> None:
    """The toml of docs/admin.md, with a hash in it, is a valid [admin]."""
    text = (Path(__file__).parents[2] / "docs" / "admin.md").read_text()
    [block] = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    cli.write("bus.toml", 'url = "memory://"\n' + block.replace("sha256:...", hash_of("x")))
    from eventbus.config import load

    [token] = load(cli.folder / "bus.toml", {}).admin.tokens
    assert (token.name, token.role, token.tenants) == ("ops", "operator", ["acme"])
