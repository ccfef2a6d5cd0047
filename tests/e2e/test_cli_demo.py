"""`eventbus demo`: the showpiece works where stdout is a pipe, and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time

from .conftest import DEADLINE, Cli, environment


def test_the_demo_tells_the_whole_story_in_a_pipe(cli: Cli) -> None:
    """Every status, what was parked and why, the re-drive; under 20 s, exit code 0, no control codes."""
    began = time.monotonic()
    folder = cli.folder / "tmp"
    folder.mkdir()
    done = cli("demo", env={"EVENTBUS_URL": "amqp://nobody.invalid", "TMPDIR": str(folder)})
    assert time.monotonic() - began < 20
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for status in (200, 409, 425, 429, 500, 404):
        assert re.search(rf"call \d  {status} ", done.stdout), status
    for words in ("ACK: done", "DROP: into the retry loop", "REQUEUE: not yet", "(max-retries)", "(permanent)"):
        assert words in done.stdout
    assert "8 events published, 21 calls made, 3 parked and re-driven, 8 handled, 0 lost" in done.stdout
    assert len(re.findall(r"^    eventbus ", done.stdout, re.MULTILINE)) == 3
    assert not list(folder.iterdir())


def test_the_demo_is_a_live_table_on_a_terminal(cli: Cli) -> None:
    """On a terminal the table changes in place; the last line a user sees is the next thing to type."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "eventbus", "demo"],
        cwd=cli.folder,
        env=environment(TERM="xterm", COLUMNS="120"),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    shown = b""
    try:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # what Linux says at the end of a terminal
                break
            if not piece:
                break
            shown += piece
        assert process.wait(DEADLINE) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    text = shown.decode()
    assert "\x1b[" in text
    assert "500 500 500 500 200" in text
    assert "0 lost" in text


def test_ctrl_c_ends_the_demo_in_one_line(cli: Cli) -> None:
    """No traceback, and the temporary bus is gone."""
    folder = cli.folder / "tmp"
    folder.mkdir()
    process = cli.popen("demo", TMPDIR=str(folder))
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "409" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (1, "error: stopped\n")
    assert not list(folder.iterdir())
