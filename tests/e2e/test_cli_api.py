"""`eventbus dlq --api`: whatever a command says straight on the broker, it says through the admin API."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from eventbus.cli import main
from eventbus.cli.remote import RemoteLetters
from eventbus.console.tokens import hash_of
from eventbus.parking import DeadLetters

from .conftest import Cli, Running

CONFIG = """
url = "sqlite:///served.db"
[services.wms-cincout]
[[admin.tokens]]
name = "anna"
role = "admin"
hash = "{anna}"
[[admin.tokens]]
name = "vera"
role = "viewer"
hash = "{vera}"
"""


@pytest.fixture
def api(cli: Cli, letters: dict[str, str]) -> str:
    """The same dead letters twice: in bus.db, and in served.db behind an admin API whose address this is."""
    shutil.copy(cli.folder / "bus.db", cli.folder / "served.db")
    cli.write("served.toml", CONFIG.format(anna=hash_of("t-anna"), vera=hash_of("t-vera")))
    running: Running = cli.start("serve", "served.toml", "--listen", "127.0.0.1:0", "--log", "json")
    [row] = running.wait_for("serving")
    return str(row["address"])


@dataclass
class Said:
    """What a command has said."""

    returncode: int
    stdout: str
    stderr: str


class Command(Protocol):
    """`eventbus`, in this process: it starts a hundred times faster."""

    def __call__(self, *words: str, typed: str = "", token: str = "") -> Said: ...


@pytest.fixture
def eventbus(cli: Cli, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(cli.folder)

    def command(*words: str, typed: str = "", token: str = "") -> Said:
        monkeypatch.setenv("EVENTBUS_TOKEN", token)
        cli.write("typed", typed)
        with open("typed") as keyboard:
            monkeypatch.setattr("sys.stdin", keyboard)
            code = main(words)
        answer = capfd.readouterr()
        return Said(code, answer.out, answer.err)

    return command


def said(text: str, way: str) -> str:
    """Without what depends on the moment, and on the name of the way."""
    text = re.sub(r"\S+ ago|\d{4}-\d\d-\d\dT\S+(?= by)", "WHEN", text)
    return re.sub(r" +", " ", text.replace(f"{way}.jsonl", "FILE").replace(f"{way}-", "FILE-"))


S = "wms-cincout"
ORDERS: list[tuple[tuple[str, ...], str]] = [
    (("count", S), ""),
    (("count", S, "--where", "status=500", "--json"), ""),
    (("list", S), ""),
    (("list", S, "--limit", "2", "--json"), ""),
    (("list", S, "--where", "tenant=nobody"), ""),
    (("show", S, "{3}"), ""),
    (("show", S, "{3}", "--json"), ""),
    (("show", S, "nobody"), ""),
    (("stats", S), ""),
    (("stats", S, "--by", "tenant", "--json"), ""),
    (("stats", S, "--by", "fingerprint"), ""),
    (("list", S, "--where", "colour=red"), ""),
    (("list", S, "--after", "nowhere"), ""),
    (("export", S), ""),
    (("export", S, "--output", "{way}.jsonl", "--json"), ""),
    (("redrive", S, "--dry-run", "--json"), ""),
    (("redrive", S, "--id", "{1}", "--id", "nobody", "--json"), ""),
    (("redrive", S, "--where", "status=404", "--rate", "50", "--reset-attempts"), ""),
    (("edit", S, "{2}", "--body", '{"mended": true}'), ""),
    (("edit", S, "{2}", "--body", "again"), ""),
    (("count", S), ""),
    (("import", S, "{way}.jsonl"), ""),
    (("import", S, "{way}.jsonl", "--json"), ""),
    (("import", S, "@-"), "not a letter\n"),
    (("purge", S), "7\n"),
    (("purge", S, "--dry-run"), ""),
    (("purge", S, "--id", "{1}", "--yes", "--export", "{way}-one.jsonl"), ""),
    (("purge", S, "--export", "{way}-purged.jsonl"), "2\n"),
    (("purge", S, "--yes", "--json"), ""),
    (("import", S, "{way}-purged.jsonl", "--dry-run"), ""),
    (("redrive", S), ""),
]
"""Commands, each with what is typed at it; one after the other, on the broker and through the API."""


def test_every_command_says_the_same_both_ways(cli: Cli, letters: dict[str, str], api: str, eventbus: Command) -> None:
    """Output, errors and exit code; what one command has moved, the next one finds."""
    names = {"{1}": letters["1"], "{2}": letters["2"], "{3}": letters["3"]}
    for order, typed in ORDERS:
        answers = []
        for way, options in (("straight", ("--url", "sqlite:///bus.db")), ("api", ("--api", api))):
            words = [names.get(word, word).replace("{way}", way) for word in order]
            done = eventbus("dlq", *words, *options, typed=typed, token="t-anna")
            answers.append((done.returncode, said(done.stdout, way), said(done.stderr, way)))
        assert answers[0] == answers[1], order
    for name in ("", "-one", "-purged"):
        one, two = ((cli.folder / f"{way}{name}.jsonl").read_text() for way in ("straight", "api"))
        assert one.splitlines() == two.splitlines()


def test_what_it_says_when_it_cannot(eventbus: Command, letters: dict[str, str], api: str) -> None:
    """No token, a wrong one, one that may only look, nobody there, an unknown service, two ways at once."""
    ask = ("dlq", "count", S, "--api", api)
    assert "there is no token" in eventbus(*ask).stderr
    assert eventbus(*ask).returncode == 1
    wrong = eventbus(*ask, token="t-nobody")
    assert (wrong.returncode, "nobody has this token" in wrong.stderr) == (1, True)
    refused = eventbus("dlq", "redrive", S, "--api", api, token="t-vera")
    assert (refused.returncode, "needs operator" in refused.stderr) == (1, True)
    assert "t-vera" not in refused.stderr
    gone = eventbus("dlq", "count", S, "--api", "http://127.0.0.1:1")
    assert (gone.returncode, "does not answer" in gone.stderr) == (3, True)
    unknown = eventbus("dlq", "count", "wms-nope", "--api", api, token="t-vera")
    assert (unknown.returncode, "wms-nope" in unknown.stderr) == (2, True)
    both = eventbus(*ask, "--url", "sqlite:///bus.db")
    assert (both.returncode, "give --api, or --url" in both.stderr) == (2, True)
    assert eventbus("dlq", "count", S, "--api", "ftp://x").returncode == 2
    erase = eventbus("dlq", "purge", S, "--api", api, "--yes", "--erase", token="t-anna")
    assert (erase.returncode, "is for good on this broker" in erase.stderr) == (2, True)
    assert eventbus("dlq", "count", S, "--api", api, token="t-anna").stdout == "3\n"


def test_the_token_in_a_file(cli: Cli, letters: dict[str, str], api: str, eventbus: Command) -> None:
    """Nothing secret is typed into a command line."""
    cli.write("token", "t-vera\n")
    assert eventbus("dlq", "count", S, "--api", api, "--token-file", "token").stdout == "3\n"
    missing = eventbus("dlq", "count", S, "--api", api, "--token-file", "nowhere")
    assert (missing.returncode, "cannot be read" in missing.stderr) == (2, True)


def test_the_same_methods() -> None:
    """A new operation cannot be forgotten: whatever looks at the broker itself is done here in its own way."""
    own = {name for name in vars(RemoteLetters) if not name.startswith("_")}
    every = {name for name, value in vars(DeadLetters).items() if not name.startswith("_") and callable(value)}
    assert every - own == {"export"}  # made from `all`


def test_large_runs_go_in_pieces(cli: Cli, letters: dict[str, str], api: str, eventbus: Command) -> None:
    """More letters than fit a page or a request: all are listed, re-driven and imported, none twice."""
    [line, *_] = eventbus("dlq", "export", S, "--api", api, token="t-anna").stdout.splitlines()
    row = json.loads(line)
    many = [json.dumps(row | {"id": f"m{number}"}) for number in range(1203)]
    Path(cli.folder / "many.jsonl").write_text("\n".join(many) + "\n")
    assert eventbus("dlq", "import", S, "many.jsonl", "--api", api, token="t-anna").stdout == "1203 imported\n"
    listed = json.loads(eventbus("dlq", "list", S, "--limit", "450", "--json", "--api", api, token="t-anna").stdout)
    assert len({letter["address"] for letter in listed["letters"]}) == 450
    report = json.loads(eventbus("dlq", "redrive", S, "--limit", "1100", "--json", "--api", api, token="t-anna").stdout)
    assert (report["matched"], report["done"], len(report["ids"])) == (1100, 1100, 1000)
    assert (
        eventbus("dlq", "purge", S, "--api", api, "--export", "rest.jsonl", typed="106\n", token="t-anna").stdout
        == "106 purged\n"
    )
    assert len((cli.folder / "rest.jsonl").read_text().splitlines()) == 106
