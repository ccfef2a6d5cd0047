"""The command line: help, typos, exit codes, one line per error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eventbus.cli.exits import code_of
from eventbus.errors import BrokerError, BrokerUnavailable, ConfigError, InvalidEvent, UnknownService

from .conftest import Cli, environment

URL = "sqlite:///bus.db"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dlq", "cuont", "wms-a"], ["Did you mean", "count"]),
        (["publsh", "a"], ["Did you mean", "publish"]),
        (["dlq", "count"], ["service", "requires an argument"]),
        (["dlq", "count", "wms-a", "--wher", "x"], ["--wher", "Did you mean --where?"]),
        (["publish", "a", "--ulr", URL], ["--ulr", "Did you mean --url?"]),
        (["publish", "a", "b", "c"], ["c"]),
        (["run", "--workers", "many"], ["--workers", "many"]),
        (["run", "bus.toml", "--log", "xml"], ["xml", "json"]),
        (["run", "bus.toml"], ["bus.toml: no such file"]),
        (["run", "bus"], ["'bus'", "bus.toml", "app:wms"]),
        (["run", "nowhere:wms", "--url", URL], ["nowhere:wms: no module named 'nowhere'"]),
        (["run", "json:loads", "--url", URL], ["json:loads: is not a Service but a function"]),
        (["run", "json:load_", "--url", URL], ["'json' has no 'load_'; did you mean 'load'?"]),
        (["topology", "show"], ["bus.toml: no such file"]),
        (["dlq", "count", "wms-a"], ["no bus: give --url"]),
        (["publish", "a"], ["no bus: give --url"]),
        (["publish", "a", "{", "--url", URL], ["the data is not JSON"]),
        (["publish", "a", "text", "--url", URL], ["the data is not JSON", "with quotes"]),
        (["publish", "a", "@nowhere", "--url", URL], ["nowhere: cannot be read"]),
        (["publish", "a\nb", "--url", URL], ["control character"]),
        (["publish", "a", "--header", "x", "--url", URL], ["--header 'x': write name=value"]),
        (["publish", "a", "--ttl", "x", "--url", URL], ["'x' is not a duration"]),
        (["publish", "a", "--process-after", "2026-99", "--url", URL], ["--process-after '2026-99'"]),
        (["publish", "a", "--prefix", "A_b", "--url", URL], ["prefix 'A_b'"]),
        (["publish", "a", "--url", "ampq://u:sekrit@h"], ["ampq://***@h", "no adapter", "did you mean 'amqp'?"]),
        (["publish", "a", "--url", "u:sekrit@h"], ["***@h", "is not a bus URL"]),
        (["publish", "a", "--lines", "--id", "1", "--url", URL], ["--id"]),
        (["dlq", "count", "Wms_A", "--url", URL], ["service name 'Wms_A'", "try 'wms-a'"]),
        (["dlq", "count", "wms-a", "--url", URL, "--where", "stats=5"], ["unknown field 'stats'"]),
        (["dlq", "list", "wms-a", "--url", URL, "--limit", "0"], ["--limit 0"]),
        (["dlq", "redrive", "wms-a", "--url", URL, "--rate", "0"], ["--rate 0"]),
        (["dlq", "redrive", "wms-a", "--url", URL, "--id", "a", "--where", "status=1"], ["--id or --where"]),
        (["dlq", "stats", "wms-a", "--url", URL, "--by", "colour"], ["colour"]),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(cli: Cli, arguments: list[str], words: list[str]) -> None:
    """What was typed wrong is said on stderr; nothing is made."""
    done = cli(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert "sekrit" not in line
    assert not list(cli.folder.glob("bus.db*"))


@pytest.mark.parametrize("command", ["count", "list", "stats", "redrive", "purge", "export"])
def test_looking_does_not_make_a_bus(cli: Cli, command: str) -> None:
    """A SQLite file that is not there is said to be not there, and still is not there afterwards."""
    done = cli("dlq", command, "wms-a", "--url", URL)
    assert (done.returncode, done.stdout) == (3, "")
    assert "there is no file" in done.stderr
    assert not list(cli.folder.iterdir())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (UnknownService("x"), 2),
        (InvalidEvent("x"), 2),
        (BrokerError("x"), 1),
        (BrokerUnavailable("x"), 3),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    """0 done, 1 failed, 2 wrong usage, 3 broker not reachable."""
    assert code_of(error) == code  # type: ignore[arg-type]


def test_help_and_version(cli: Cli) -> None:
    """`eventbus` alone says what there is."""
    for arguments in ([], ["--help"], ["dlq", "--help"], ["run", "--help"], ["demo", "--help"]):
        done = cli(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Usage: eventbus" in done.stdout
    assert cli("--version").stdout.strip()[0].isdigit()


def test_without_the_extra_it_says_what_to_install(cli: Cli) -> None:
    """The core alone has no command line; one line says what brings it."""
    code = "import sys; sys.modules['cyclopts'] = None; from eventbus.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "error: the command line needs cyclopts: pip install 'eventbus-core[cli]'\n"


def test_a_bad_config_is_one_line_per_problem(cli: Cli) -> None:
    """Every problem of the file at once, each on a line of its own."""
    cli.write("bus.toml", 'url = "memory://"\nsorce = "x"\n[services.wms-a]\ntimeout = "soon"\n')
    done = cli("run", "--check")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: bus.toml: services.wms-a.timeout = 'soon': not a duration; write '5s', '250ms', '1h30m' or a number "
        "of seconds",
        "error: bus.toml: sorce: unknown key; did you mean 'source'?",
    ]
