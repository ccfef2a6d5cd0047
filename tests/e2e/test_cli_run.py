"""`eventbus run` and `topology`: check, consume, drain, several processes under one supervisor."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest

from .conftest import Cli

Until = Callable[[Callable[[], object], str], None]

APP = """
import asyncio, os, time
from pathlib import Path
from eventbus import Service

wms = Service("wms-cincout", grace=10)
both = [wms]

def write(text):
    with open("seen.txt", "a") as file:
        file.write(text + "\\n")

@wms.on("order.slow")
async def slow(order: dict) -> None:
    write("began")
    while not Path("go.txt").exists():
        await asyncio.sleep(0.02)
    write("done")

@wms.on("order.*")
async def reserve(order: dict) -> None:
    write(f"order {order['id']}")

stuck = Service("wms-stuck", grace=0.2)

@stuck.on("#")
def hang(order: dict) -> None:
    write("hangs")
    time.sleep(300)
"""

CONFIG = """
version = 1
url = "${EVENTBUS_URL:-sqlite:///bus.db}"
[services.wms-cincout]
[[services.wms-cincout.routes]]
on = "order.slow"
handler = "app:slow"
[[services.wms-cincout.routes]]
on = "order.*"
handler = "app:reserve"
retry = { base = "1s", cap = "60s", max_attempts = 5 }
[[services.wms-cincout.routes]]
on = "invoice.#"
forward = "https://billing.internal/events"
"""

LOG = ("--log", "json")
URL = ("--url", "sqlite:///bus.db")


@pytest.fixture(autouse=True)
def _app(cli: Cli) -> None:
    cli.write("app.py", APP)
    cli.write("bus.toml", CONFIG)


def seen(cli: Cli) -> list[str]:
    path = cli.folder / "seen.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_check_says_what_would_run_and_opens_nothing(cli: Cli) -> None:
    """Services, routes and policies; exit code 0; no file is made."""
    done = cli("run", "bus.toml", "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "bus.toml is fine: would run 1 service on sqlite:///bus.db" in done.stdout
    assert "app:reserve" in done.stdout
    assert "https://billing.internal/events" in done.stdout
    report = json.loads(cli("run", "--check", "--json").stdout)
    [service] = report["services"]
    assert [route["on"] for route in service["routes"]] == ["order.slow", "order.*", "invoice.#"]
    assert [route["kind"] for route in service["routes"]] == ["handler", "handler", "forward"]
    assert service["routes"][1]["max_attempts"] == 5
    assert not list(cli.folder.glob("bus.db*"))


def test_check_says_what_the_broker_cannot_keep(cli: Cli) -> None:
    """A setting that needs a place to be kept, on a broker that has none: exit code 2, and what to write."""
    text = """url = "amqp://127.0.0.1"\n[services.wms-a]\nidempotency = {}\n"""
    (cli.folder / "rabbit.toml").write_text(text)
    done = cli("run", "rabbit.toml", "--check")
    assert done.returncode == 2
    assert (
        "wms-a.idempotency: rabbitmq has no place to keep it; name one, such as store = 'redis://host'" in done.stderr
    )


def test_check_of_a_service_in_code(cli: Cli) -> None:
    """`app:wms`, or a list of services."""
    for target in ("app:wms", "app:both"):
        report = json.loads(cli("run", target, "--check", "--json", *URL).stdout)
        assert report["services"][0]["name"] == "wms-cincout"


@pytest.mark.parametrize(("target", "words"), [("app:wsm", "did you mean 'wms'?"), ("app:APP", "'app' has no 'APP'")])
def test_check_finds_a_wrong_name(cli: Cli, target: str, words: str) -> None:
    """Exit code 2 and what is there instead."""
    done = cli("run", target, "--check", *URL)
    assert done.returncode == 2
    assert words in done.stderr


def test_topology(cli: Cli) -> None:
    """As a table, as JSON, as a flowchart; handlers are not imported."""
    (cli.folder / "app.py").unlink()
    assert "wms.dlq.wms-cincout" in cli("topology", "show", "bus.toml").stdout
    names = {r["name"] for r in json.loads(cli("topology", "show", "--format", "json").stdout)["resources"]}
    assert {"wms.queue.wms-cincout", "wms.dlq.wms-cincout"} <= names
    assert json.loads(cli("topology", "show", "--json", "--url", "memory://").stdout)["resources"]
    chart = cli("topology", "show", "--format", "mermaid").stdout
    assert chart.startswith("flowchart TD\n")
    assert "-->" in chart
    assert not list(cli.folder.glob("bus.db*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("target", [("bus.toml",), ("app:wms", *URL)])
def test_a_signal_drains(cli: Cli, until: Until, number: int, target: tuple[str, ...]) -> None:
    """What runs is finished and settled, then the process leaves with 0."""
    running = cli.start("run", *target, *LOG)
    running.wait_for("started")
    assert cli("publish", "order.slow", "{}", "--source", "wms-api", *URL).stderr == ""
    until(lambda: seen(cli) == ["began"], "the handler has begun")
    running.process.send_signal(number)
    running.wait_for("stopping")
    cli.write("go.txt", "")
    assert running.end(None) == 0
    assert seen(cli) == ["began", "done"]
    assert running.logged("stopped")[0]["left"] == 0
    assert cli("dlq", "count", "wms-cincout", *URL).stdout == "0\n"


def test_something_left_is_exit_code_1(cli: Cli, until: Until) -> None:
    """A handler that hangs in a thread past the grace is left behind, and the process still ends."""
    running = cli.start("run", "app:stuck", *LOG, *URL)
    running.wait_for("started")
    cli("publish", "a", "{}", "--prefix", "wms", *URL)
    until(lambda: seen(cli) == ["hangs"], "the handler hangs")
    assert running.end() == 1


def test_text_logs(cli: Cli, until: Until) -> None:
    """For people: one line per event; nothing below the level."""
    running = cli.start("run", "bus.toml")
    until(lambda: any("INFO    started services=wms-cincout" in line for line in running.text), "started")
    assert running.end() == 0
    quiet = cli.start("run", "bus.toml", "--log-level", "error")
    cli("publish", "order.created", '{"id": 1}', "--source", "wms-api", *URL)
    until(lambda: seen(cli), "it consumes")
    assert quiet.end() == 0
    assert quiet.text == []


def test_a_dead_worker_is_replaced_and_all_drain(cli: Cli, until: Until) -> None:
    """Two processes; one is killed, another takes its place; SIGTERM ends them all with 0."""
    running = cli.start("run", "bus.toml", "--workers", "2", *LOG)
    pids = [int(str(row["worker_pid"])) for row in running.wait_for("worker_started", 2)]
    running.wait_for("started", 2)
    os.kill(pids[0], signal.SIGKILL)
    [ended] = running.wait_for("worker_ended")
    assert ended["exit_code"] == -signal.SIGKILL
    pids.append(int(str(running.wait_for("worker_started", 3)[2]["worker_pid"])))
    running.wait_for("started", 3)
    for number in range(3):
        cli("publish", "order.created", json.dumps({"id": number}), "--source", "wms-api", *URL)
    until(lambda: len(seen(cli)) == 3, "three events are handled")
    assert running.end() == 0
    assert not any(map(alive, pids))
    assert len(running.logged("stopped")) == 2


def test_workers_drain_what_they_have_in_hand(cli: Cli, until: Until) -> None:
    """Ctrl-C at the supervisor: the workers finish first."""
    running = cli.start("run", "bus.toml", "--workers", "2", *LOG)
    running.wait_for("started", 2)
    cli("publish", "order.slow", "{}", "--source", "wms-api", *URL)
    until(lambda: seen(cli) == ["began"], "the handler has begun")
    running.process.send_signal(signal.SIGINT)
    running.wait_for("stopping", 2)
    cli.write("go.txt", "")
    assert running.end(None) == 0
    assert seen(cli) == ["began", "done"]


def test_workers_end_with_a_supervisor_that_was_killed(cli: Cli, until: Until) -> None:
    """No orphan goes on consuming."""
    running = cli.start("run", "bus.toml", "--workers", "2", *LOG)
    running.wait_for("started", 2)
    pids = [int(str(row["worker_pid"])) for row in running.logged("worker_started")]
    running.process.kill()
    until(lambda: not any(map(alive, pids)), "the workers are gone")


def test_workers_need_a_bus_that_several_processes_share(cli: Cli) -> None:
    """memory:// lives in one process."""
    done = cli("run", "bus.toml", "--workers", "2", "--url", "memory://")
    assert done.returncode == 2
    assert "lives in one process" in done.stderr


def test_a_worker_that_cannot_start_is_not_tried_for_ever(cli: Cli) -> None:
    """Wrong usage that shows only in the worker ends the supervisor with the same code."""
    (cli.folder / "folder").mkdir()
    done = cli("run", "bus.toml", "--workers", "2", "--url", "sqlite:///folder/none/bus.db", *LOG)
    assert done.returncode == 2


def test_a_worker_that_keeps_dying_is_started_less_and_less_often(cli: Cli) -> None:
    """Half a second, a second, two; the other one goes on meanwhile, and SIGTERM still ends it all with 0."""
    cli.write("bus.toml", CONFIG)
    cli.write("sitecustomize.py", DYING)
    running = cli.start("run", "bus.toml", "--workers", "2", *LOG, env={"PYTHONPATH": str(cli.folder)})
    ended = running.wait_for("worker_ended", 2)
    assert [(row["worker"], row["exit_code"]) for row in ended[:2]] == [(2, 7), (2, 7)]
    assert [row["next_start"] for row in ended[:2]] == [0.5, 1.0]
    running.wait_for("started")
    assert running.end() == 0


DYING = """
import os, sys
if "--worker" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("--worker") + 1] == "2":
    os._exit(7)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # killed and not yet collected by its parent, whoever that is now
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
