"""`eventbus dlq`: look, put back, put away; the same for people and for programs."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from eventbus import Bus, Service

from .conftest import DEADLINE, Cli, environment

URL = ("--url", "sqlite:///bus.db")


def test_count(cli: Cli, letters: dict[str, str]) -> None:
    """A number; as JSON exactly {"count": 3}."""
    assert cli("dlq", "count", "wms-cincout", *URL).stdout == "3\n"
    assert cli("dlq", "count", "wms-cincout", *URL, "--json").stdout == '{"count": 3}\n'
    assert cli("dlq", "count", "wms-cincout", *URL, "--where", "status=500", "--json").stdout == '{"count": 2}\n'


def test_an_unknown_service_is_wrong_usage(cli: Cli, letters: dict[str, str]) -> None:
    """The file is there, the service is not."""
    done = cli("dlq", "count", "wms-cincuot", *URL)
    assert done.returncode == 2
    assert done.stderr.startswith("error: wms-cincuot ")


def test_list(cli: Cli, letters: dict[str, str]) -> None:
    """Oldest first, page by page, nothing consumed."""
    done = cli("dlq", "list", "wms-cincout", *URL)
    assert done.returncode == 0
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["id", "type", "tenant", "reason", "status", "retries", "parked", "error"]
    assert [row.split()[0] for row in rows] == [letters["1"], letters["2"], letters["3"]]
    assert "\x1b" not in done.stdout
    first = json.loads(cli("dlq", "list", "wms-cincout", *URL, "--limit", "2", "--json").stdout)
    assert [letter["id"] for letter in first["letters"]] == [letters["1"], letters["2"]]
    rest = cli("dlq", "list", "wms-cincout", *URL, "--after", first["next"], "--json")
    assert [letter["data"]["id"] for letter in json.loads(rest.stdout)["letters"]] == [3]
    assert cli("dlq", "list", "wms-cincout", *URL, "--where", "tenant=x").stdout == "nothing parked fits the filter\n"


def test_show(cli: Cli, letters: dict[str, str]) -> None:
    """The whole story of one; an id that is not there is a failure."""
    done = cli("dlq", "show", "wms-cincout", letters["3"], *URL)
    assert done.returncode == 0
    for words in ("price.changed", "permanent", "404", "shop = 7", "São João"):
        assert words in done.stdout
    row = json.loads(cli("dlq", "show", "wms-cincout", "--id", letters["3"], *URL, "--json").stdout)
    assert (row["type"], row["status"], row["tenant"]) == ("price.changed", 404, "acme")
    assert json.loads(row["body"]) == row["data"] == {"id": 3, "nome": "São João"}
    missing = cli("dlq", "show", "wms-cincout", "nope", *URL)
    assert missing.returncode == 1
    assert "no dead letter with the id 'nope'" in missing.stderr


def test_stats(cli: Cli, letters: dict[str, str]) -> None:
    """How many of each."""
    assert json.loads(cli("dlq", "stats", "wms-cincout", *URL, "--json").stdout) == {"max-retries": 2, "permanent": 1}
    assert json.loads(cli("dlq", "stats", "wms-cincout", *URL, "--by", "tenant", "--json").stdout) == {
        "acme": 2,
        "globex": 1,
    }
    assert "order.created  2" in cli("dlq", "stats", "wms-cincout", *URL, "--by", "type").stdout


async def ready(cli: Cli) -> int:
    async with Bus(f"sqlite:///{cli.folder}/bus.db") as bus:
        return (await bus.stats(Service("wms-cincout"))).ready


async def test_redrive(cli: Cli, letters: dict[str, str]) -> None:
    """Dry run, by id, by filter, the oldest ones, at a rate; what was put back stands in the queue."""
    dry = cli("dlq", "redrive", "wms-cincout", *URL, "--dry-run", "--json")
    report = json.loads(dry.stdout)
    assert (report["matched"], report["done"], report["dry_run"]) == (3, 0, True)
    assert report["ids"] == [letters["1"], letters["2"], letters["3"]]
    one = json.loads(cli("dlq", "redrive", "wms-cincout", *URL, "--id", letters["2"], "--json").stdout)
    assert (one["done"], one["ids"]) == (1, [letters["2"]])
    some = cli("dlq", "redrive", "wms-cincout", *URL, "--where", "status=404", "--rate", "50", "--reset-attempts")
    assert (some.returncode, some.stdout) == (0, "1 re-driven\n")
    assert cli("dlq", "redrive", "wms-cincout", *URL, "--limit", "5").stdout == "1 re-driven\n"
    assert cli("dlq", "redrive", "wms-cincout", *URL).stdout == "0 re-driven\n"
    assert await ready(cli) == 3


def test_purge_asks_for_the_number(cli: Cli, letters: dict[str, str]) -> None:
    """Only the right number goes on; --yes does not ask; a dry run does nothing."""
    assert "would be purged" in cli("dlq", "purge", "wms-cincout", *URL, "--dry-run").stdout
    for answer in ("", "y\n", "2\n"):
        refused = cli("dlq", "purge", "wms-cincout", *URL, input=answer)
        assert refused.returncode == 1
        assert "Type 3 to go on" in refused.stderr
        assert "error: not confirmed; nothing was removed" in refused.stderr
    assert cli("dlq", "count", "wms-cincout", *URL).stdout == "3\n"
    done = cli("dlq", "purge", "wms-cincout", *URL, "--limit", "1", input="1\n")
    assert (done.returncode, done.stdout) == (0, "1 purged\n")
    report = json.loads(cli("dlq", "purge", "wms-cincout", *URL, "--id", letters["2"], "--yes", "--json").stdout)
    assert (report["matched"], report["done"], report["ids"]) == (1, 1, [letters["2"]])
    assert cli("dlq", "purge", "wms-cincout", *URL, "--where", "status=404", "--yes").stdout == "1 purged\n"
    assert cli("dlq", "purge", "wms-cincout", *URL).stdout == "0 purged\n"


def test_export(cli: Cli, letters: dict[str, str]) -> None:
    """JSON lines to standard output or to a new file; an old file is not overwritten."""
    lines = cli("dlq", "export", "wms-cincout", *URL).stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [letters["1"], letters["2"], letters["3"]]
    done = cli("dlq", "export", "wms-cincout", *URL, "--output", "out.jsonl", "--where", "status=404", "--json")
    assert json.loads(done.stdout) == {"exported": 1}
    [row] = (cli.folder / "out.jsonl").read_text().splitlines()
    assert json.loads(row)["id"] == letters["3"]
    again = cli("dlq", "export", "wms-cincout", *URL, "--output", "out.jsonl")
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_purge_writes_what_it_removes_and_import_brings_it_back(cli: Cli, letters: dict[str, str]) -> None:
    """Each letter is in the file before it is gone; the file parks it again, once."""
    before = cli("dlq", "export", "wms-cincout", *URL).stdout
    done = cli("dlq", "purge", "wms-cincout", *URL, "--export", "gone.jsonl", "--yes", "--json")
    assert json.loads(done.stdout)["done"] == 3
    assert cli("dlq", "count", "wms-cincout", *URL).stdout == "0\n"
    assert (cli.folder / "gone.jsonl").read_text() == before
    again = cli("dlq", "purge", "wms-cincout", *URL, "--export", "gone.jsonl", "--yes")
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    assert cli("dlq", "import", "wms-cincout", "gone.jsonl", *URL, "--dry-run").stdout.startswith("3 would be imported")
    assert cli("dlq", "import", "wms-cincout", "gone.jsonl", *URL).stdout == "3 imported\n"
    piped = cli("dlq", "import", "wms-cincout", "-", *URL, input=before)
    assert piped.stdout == "0 imported, 3 stand there already\n"
    for kept, line in zip(
        before.splitlines(), cli("dlq", "export", "wms-cincout", *URL).stdout.splitlines(), strict=True
    ):
        old, new = json.loads(kept), json.loads(line)
        assert {**old, "address": ""} == {**new, "address": ""}
    bad = cli("dlq", "import", "wms-cincout", "-", *URL, input="nonsense\n")
    assert (bad.returncode, "line 1 is no exported letter" in bad.stderr) == (2, True)


def test_edit_puts_a_letter_back_with_another_body(cli: Cli, letters: dict[str, str]) -> None:
    """By an option, a file, or the user's editor; the trace says who and what."""
    done = cli("dlq", "edit", "wms-cincout", letters["1"], *URL, "--body", '{"id": 11}')
    assert (done.returncode, done.stdout) == (0, "1 edited and re-driven\n")
    cli.write("body.json", '{"id": 22}')
    assert cli("dlq", "edit", "wms-cincout", letters["2"], *URL, "--body", "@body.json", "--json").returncode == 0
    editor = cli.write("editor.sh", '#!/bin/sh\nprintf \'{"id": 33}\\n\' > "$1"\n')
    editor.chmod(0o755)
    edited = cli("dlq", "edit", "wms-cincout", letters["3"], *URL, env={"EDITOR": str(editor)})
    assert (edited.returncode, edited.stdout) == (0, "1 edited and re-driven\n")
    missing = cli("dlq", "edit", "wms-cincout", "nope", *URL, "--body", "x")
    assert (missing.returncode, "no dead letter with the id 'nope'" in missing.stderr) == (1, True)


def test_an_unchanged_body_is_not_sent(cli: Cli, letters: dict[str, str]) -> None:
    """An editor that changes nothing, or none at all, does nothing."""
    same = cli("dlq", "edit", "wms-cincout", letters["1"], *URL, env={"EDITOR": "true"})
    assert (same.returncode, "was not changed" in same.stderr) == (1, True)
    none = cli("dlq", "edit", "wms-cincout", letters["1"], *URL, env={"EDITOR": "", "VISUAL": ""})
    assert (none.returncode, "--body" in none.stderr) == (2, True)
    assert cli("dlq", "count", "wms-cincout", *URL).stdout == "3\n"


def test_older_than_is_a_filter(cli: Cli, letters: dict[str, str]) -> None:
    """Nothing is an hour old here; everything is older than nothing."""
    assert cli("dlq", "purge", "wms-cincout", *URL, "--older-than", "1h", "--yes").stdout == "0 purged\n"
    assert cli("dlq", "redrive", "wms-cincout", *URL, "--older-than", "0s", "--dry-run").stdout.startswith("3 would be")


def test_a_canary_that_is_parked_again_stops_the_redrive(cli: Cli, letters: dict[str, str]) -> None:
    """One goes first, comes back, and the others stay; exit code 1 says that not all was done."""
    cli.write("app.py", "from eventbus import RetryPolicy, Service\n" + FAILING)
    worker = cli.start("run", "app:wms", *URL, "--log", "json")
    done = cli("dlq", "redrive", "wms-cincout", *URL, "--canary", "1")
    assert (done.returncode, done.stdout) == (1, "1 re-driven\n")
    assert "error: canary: 1 of 1 were parked again; the others still stand there" in done.stderr
    assert worker.end() == 0
    assert cli("dlq", "count", "wms-cincout", *URL).stdout == "3\n"


FAILING = """
wms = Service("wms-cincout", retry=RetryPolicy(max_retries=0))

@wms.on("#")
async def fail(event: object) -> int:
    return 500
"""


@pytest.mark.parametrize("columns", [80, 200])
def test_a_table_fits_its_terminal(cli: Cli, letters: dict[str, str], columns: int) -> None:
    """On a terminal no line is longer than it is wide, and the ids are whole."""
    shown = on_terminal(cli, columns, "dlq", "list", "wms-cincout", *URL)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines()]
    assert max(map(len, lines)) <= columns
    for id in letters.values():
        assert any(id in line for line in lines)
    assert any("tenant" in line for line in lines) == (columns == 200)


def test_a_long_redrive_shows_a_bar_on_a_terminal(cli: Cli, letters: dict[str, str]) -> None:
    """What is done, of how many; in a pipe there is none of it."""
    shown = on_terminal(cli, 100, "dlq", "redrive", "wms-cincout", *URL, "--rate", "4")
    assert "re-driving" in shown
    assert "/3" in shown
    assert "3 re-driven" in shown


def on_terminal(cli: Cli, columns: int, *arguments: str) -> str:
    """What a command prints on a terminal of that width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "eventbus", *arguments],
        cwd=cli.folder,
        env=environment(TERM="xterm-256color"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    parts: list[bytes] = []
    try:
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not part:
                break
            parts.append(part)
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    return b"".join(parts).decode()


def test_ctrl_c_stops_a_redrive_between_two_letters(cli: Cli, letters: dict[str, str]) -> None:
    """A slow re-drive that is interrupted says how many were done; the others still stand there."""
    process = cli.popen("dlq", "redrive", "wms-cincout", *URL, "--rate", "0.01")
    try:
        end = time.monotonic() + DEADLINE
        while cli("dlq", "count", "wms-cincout", *URL).stdout != "2\n":
            assert time.monotonic() < end
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (1, "1 re-driven\n")
    assert "error: stopped; 1 were done, the others still stand there" in err
    assert cli("dlq", "count", "wms-cincout", *URL).stdout == "2\n"


async def test_a_prefix_set_by_hand(cli: Cli) -> None:
    """From --prefix, or from the config, where the handlers need not be importable."""
    async with Bus(f"sqlite:///{cli.folder}/bus.db") as bus:
        await bus.provision(Service("wms-a", prefix="other"))
    assert cli("dlq", "count", "wms-a", *URL).returncode == 2
    assert cli("dlq", "count", "wms-a", *URL, "--prefix", "other", "--json").stdout == '{"count": 0}\n'
    cli.write(
        "bus.toml",
        'url = "sqlite:///bus.db"\n[services.wms-a]\nprefix = "other"\n'
        '[[services.wms-a.routes]]\non = "#"\nhandler = "nowhere:at_all"\n',
    )
    assert cli("dlq", "count", "wms-a", "--config", "bus.toml", "--json").stdout == '{"count": 0}\n'
    assert cli("dlq", "count", "wms-a", "--json").stdout == '{"count": 0}\n'  # bus.toml where we stand


@pytest.mark.parametrize("command", ["list", "show"])
async def test_what_strangers_wrote_cannot_drive_the_terminal(cli: Cli, command: str) -> None:
    """Control codes in an error text are shown, not obeyed."""
    import anyio

    service = Service("wms-a")

    @service.on("#")
    async def refuse(event: object) -> object:
        from eventbus import park

        return park("\x1b[2Jgone\x07")

    async with Bus(f"sqlite:///{cli.folder}/bus.db", source="wms-x") as bus, bus.serving(service):
        await bus.publish("a", {"t": "\x1b[31m"}, id="e1")
        with anyio.fail_after(DEADLINE):
            while not await bus.dead_letters(service).count():
                await anyio.sleep(0.01)
    done = cli("dlq", command, "wms-a", *(["e1"] if command == "show" else []), *URL)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "gone" in done.stdout
