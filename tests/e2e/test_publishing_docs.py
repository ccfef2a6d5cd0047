"""The examples of docs/publishing.md: every curl is run as it stands, and answers what the page says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from eventbus.config.models import ListenTable

from .conftest import Cli

PAGE = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text()
EXAMPLES = re.findall(r"```sh\n(curl .*?)```\n\n```\n(\d+) (.*?)\n```", PAGE, re.DOTALL)


def test_the_curl_examples(cli: Cli) -> None:
    """Status and body, by the real curl against a real process."""
    if shutil.which("curl") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("curl is not installed")
    assert len(EXAMPLES) == 5
    running = cli.start("run", "--listen", "127.0.0.1:0", "--url", "sqlite:///bus.db", "--log", "json")
    address = str(running.wait_for("started")[0]["listen"])
    for command, status, shown in EXAMPLES:
        line = command.replace("127.0.0.1:8080", address) + " -s -w '\\n%{http_code}'"
        line = line.replace("\n -s", " -s")
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=30, check=True)
        body, _, code = done.stdout.rpartition("\n")
        assert code == status, done.stdout
        wanted, found = json.loads(shown), json.loads(body)
        if "error" in wanted:
            assert found["error"].startswith(wanted["error"].removesuffix("..."))
        elif len(wanted.get("id", "")) == 32:  # one that was made here
            assert re.fullmatch(r"[0-9a-f]{32}", found["id"])
        else:
            assert found == wanted
    assert running.end() == 0


def test_the_settings_are_real() -> None:
    """Every table on the page is one that bus.toml knows."""
    tables = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert len(tables) == 2
    for table in tables:
        ListenTable.model_validate(tomllib.loads(table)["listen"])
