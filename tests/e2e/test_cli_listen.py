"""`eventbus run --listen`: publishing over HTTP as a user has it, with one process or several."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Cli, Running

Until = Callable[[Callable[[], object], str], None]
LOG = ("--log", "json")
URL = ("--url", "sqlite:///bus.db")
ANYWHERE = ("--listen", "127.0.0.1:0")
APP = """
from eventbus import Event, Service

wms = Service("wms-cincout")

@wms.on("#")
async def keep(event: Event) -> None:
    with open("seen.txt", "a") as file:
        file.write(event.id + "\\n")
"""
CONFIG = """
version = 1
url = "sqlite:///bus.db"
[listen]
address = "127.0.0.1:0"
[services.wms-cincout]
[[services.wms-cincout.routes]]
on = "#"
handler = "app:keep"
"""


@pytest.fixture(autouse=True)
def _files(cli: Cli) -> None:
    cli.write("app.py", APP)
    cli.write("bus.toml", CONFIG)


def seen(cli: Cli) -> list[str]:
    path = cli.folder / "seen.txt"
    return path.read_text().splitlines() if path.exists() else []


def address(running: Running) -> str:
    return str(running.wait_for("started")[0]["listen"])


def post(where: str, id: str, *, token: str = "") -> int:
    headers = {"content-type": "application/json", "ce-type": "order.created", "ce-id": id}
    if token:
        headers["authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"http://{where}/events", data=b"{}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            assert json.loads(response.read()) == {"id": id}
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("target", [("bus.toml",), ("app:wms", *URL, *ANYWHERE, "--config", "bus.toml")])
def test_events_come_in_and_are_handled(cli: Cli, until: Until, target: tuple[str, ...]) -> None:
    """By bus.toml, or by an option beside a service in code; SIGTERM ends it with 0."""
    running = cli.start("run", *target, *LOG)
    where = address(running)
    assert post(where, "1") == 202
    until(lambda: seen(cli) == ["1"], "the event is handled")
    assert running.end() == 0


def test_publishing_only(cli: Cli) -> None:
    """No service at all: a file with nothing but [listen], or an URL and --listen."""
    (cli.folder / "bus.toml").write_text('url = "sqlite:///bus.db"\nsource = "wms-api"\n[listen]\naddress = "[::1]:0"')
    report = json.loads(cli("run", "bus.toml", "--check", "--json").stdout)
    assert (report["listen"], report["services"], report["prefix"]) == ("[::1]:0", [], "wms")
    assert "listen for events on [::1]:0" in cli("run", "--check").stdout
    (cli.folder / "bus.toml").unlink()
    running = cli.start("run", *URL, *ANYWHERE, *LOG)
    assert post(address(running), "1") == 202
    assert running.end() == 0


@pytest.mark.parametrize(
    ("text", "option", "words"),
    [
        ("", "0.0.0.0:0", "--listen = '0.0.0.0:0': others than this machine can reach it, so a token is needed"),
        ("", "nowhere", "--listen = 'nowhere': write HOST:PORT"),
        ("address = '[::]:0'", "", "bus.toml: listen.address = '[::]:0': others than this machine"),
        ("address = '127.0.0.1:0'\ntoken_file = 'none'", "", "listen.token_file: cannot be read: none: No such file"),
        ("address = '127.0.0.1:0'\ntoken_file = 'empty'", "", "listen.token_file: empty: the token must be"),
        ("address = 'no.such.host.invalid:1'\ntoken = 't'", "", "the host is not known"),
    ],
)
def test_one_line_says_what_is_wrong(cli: Cli, text: str, option: str, words: str) -> None:
    """Exit code 2, at start, before anything is opened."""
    cli.write("empty", "\n")
    cli.write("bus.toml", f'url = "sqlite:///bus.db"\n[listen]\n{text}')
    done = cli("run", *(("--listen", option) if option else ()))
    assert done.returncode == 2
    assert words in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error")]) == 1


def test_a_token_by_environment_and_by_file(cli: Cli) -> None:
    """Where others can reach the address, who does not send it is 401; it stands in no log."""
    cli.write("token", "sekrit-1\n")
    cli.write("bus.toml", 'url = "sqlite:///bus.db"\n[listen]\naddress = "0.0.0.0:0"\ntoken_file = "token"')
    by_file = cli.start("run", *LOG)
    by_environment = cli.start(
        "run", "app:wms", "--listen", "0.0.0.0:0", env={"EVENTBUS_LISTEN__TOKEN": "sekrit-2", "EVENTBUS_URL": URL[1]}
    )
    until_started = lambda: [line for line in by_environment.text if "listen=" in line]  # noqa: E731
    running = [(by_file, "sekrit-1", address(by_file))]
    for _ in range(3000):
        if until_started():
            break
        threading.Event().wait(0.01)
    running.append((by_environment, "sekrit-2", until_started()[0].partition("listen=")[2].strip()))
    for process, token, where in running:
        where = where.replace("0.0.0.0", "127.0.0.1")
        assert [post(where, "1"), post(where, "1", token="x"), post(where, "1", token=token)] == [401, 401, 202]
        assert process.end() == 0
        assert "sekrit" not in "".join(process.text)


def test_workers_share_the_address(cli: Cli, until: Until) -> None:
    """Killed workers are replaced, clients see at most a broken connection; every 202 is handled; SIGTERM: 0."""
    running = cli.start("run", "bus.toml", "--workers", "2", *LOG)
    running.wait_for("started", 2)
    where = address(running)
    accepted: list[str] = []
    stop = threading.Event()

    def publish(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                if post(where, f"{name}-{number}") == 202:
                    accepted.append(f"{name}-{number}")
            except (OSError, urllib.error.URLError):
                continue  # its worker was killed: nobody knows, and it was not promised

    threads = [threading.Thread(target=publish, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    try:
        for killed in range(1, 4):
            before = len(accepted)
            until(lambda before=before: len(accepted) > before + 50, "events are accepted")
            pid = int(str(running.logged("worker_started")[-1]["worker_pid"]))
            os.kill(pid, signal.SIGKILL)
            running.wait_for("worker_ended", killed)
            running.wait_for("started", 2 + killed)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    until(lambda: set(accepted) <= set(seen(cli)), "every accepted event is handled")
    assert running.end() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where.rpartition(":")[0], int(where.rpartition(":")[2])), 1)


def test_an_address_that_is_taken_is_said_once(cli: Cli) -> None:
    """By the supervisor, before any worker is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cli("run", "bus.toml", "--listen", f"127.0.0.1:{port}", "--workers", "3", *LOG)
    assert done.returncode == 2
    assert done.stderr.count("Address already in use") == 1
    assert "worker_started" not in done.stderr
    assert not list(Path(cli.folder).glob("bus.db"))


def test_what_is_wrong_with_every_worker_is_said_once(cli: Cli) -> None:
    """The first one is up before the others are started: one line, not three; the exit code is its own."""
    done = cli("run", "bus.toml", "--workers", "3", "--url", "redis://127.0.0.1:18690/0", *LOG)
    assert done.returncode == 3
    assert len([line for line in done.stderr.splitlines() if line.startswith("error")]) == 1
    assert done.stderr.count("worker_started") == 1


def test_a_worker_that_dies_at_once_does_not_spin(cli: Cli, until: Until) -> None:
    """Each start waits twice as long as the one before, and the others do not begin."""
    cli.write("app.py", APP + "\nimport os, sys\nif '--worker' in sys.argv:\n    os._exit(7)\n")
    running = cli.start("run", "bus.toml", "--workers", "3", *LOG)
    ended = running.wait_for("worker_ended", 3)
    assert [row["next_start"] for row in ended] == [0.5, 1.0, 2.0]
    assert {(row["worker"], row["exit_code"]) for row in ended} == {(1, 7)}
    assert running.end() == 0
