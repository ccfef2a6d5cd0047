"""The commands in one place, and how every error becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TextIO

from cyclopts import App, CycloptsError

from eventbus.cli.exits import DONE, FAILED, USAGE, code_of
from eventbus.cli.output import complain
from eventbus.errors import EventBusError


def _version() -> str:
    try:
        return version("eventbus-core")
    except PackageNotFoundError:
        return "0 (not installed)"


app = App(
    name="eventbus",
    help="Publish events, run the services that handle them, and look after their dead letters.",
    version=_version,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # ours to handle: one line, and exit code 1
)
# By name and not by import: a command starts without paying for the others.
app.command("eventbus.cli.demo:demo", name="demo", help="The whole story in a few seconds, on a temporary bus.")
app.command("eventbus.cli.run:run", name="run", help="Consume until stopped: bus.toml, or app:service.")
app.command("eventbus.cli.publish:publish", name="publish", help="Publish one event, or many with --lines.")
app.command("eventbus.cli.dlq:app", name="dlq", help="Dead letters: list, show, stats, redrive, edit, purge ...")
app.command("eventbus.cli.stats:stats", name="stats", help="How services stand: queues, endpoints, breakers.")
app.command("eventbus.cli.serve:serve", name="serve", help="The admin API, health and metrics over HTTP.")
app.command("eventbus.cli.serve:token", name="token", help="Make a token for the admin API.")
app.command("eventbus.cli.topology:app", name="topology", help="What a configuration needs on the broker.")


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line; returns the exit code and lets no exception out."""
    for stream in (sys.stdout, sys.stderr):
        _be_printable(stream)
    try:
        result = app(
            _tokens(arguments), exit_on_error=False, print_error=False, result_action="return_value", backend="asyncio"
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except CycloptsError as error:
        error.verbose = False
        complain(" ".join(str(error).split()))
        return USAGE
    except EventBusError as error:
        complain(str(error) or type(error).__name__)
        return code_of(error)
    except KeyboardInterrupt:
        complain("stopped")
        return FAILED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; the interpreter must not stumble over the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:  # noqa: BLE001 - users never see a traceback, unless they ask for it
        if os.environ.get("EVENTBUS_DEBUG"):
            raise
        text = " ".join(str(error).split())
        complain(f"unexpected {type(error).__name__}: {text} (EVENTBUS_DEBUG=1 shows where; please report it)")
        return FAILED


def _tokens(arguments: Sequence[str]) -> list[str]:
    # A lone "-" looks like an option to the parser; here it is a file's name: standard input.
    if arguments[:1] == ["publish"] or arguments[:2] in (["dlq", "import"], ["dlq", "edit"]):
        return ["@-" if token == "-" else token for token in arguments]
    return list(arguments)


def _be_printable(stream: TextIO) -> None:
    with contextlib.suppress(AttributeError):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]
