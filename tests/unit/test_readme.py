"""The README's examples run as they stand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def _block(language: str, first_line: str) -> str:
    for block in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL):
        if block.startswith(first_line):
            return block
    raise AssertionError(f"README has no {language} block that begins with {first_line!r}")


def test_the_python_example_runs_and_stops(tmp_path: Path) -> None:
    """app.py of the README handles its own event and exits with 0 on SIGTERM."""
    spoken = '    print("reserved", order, flush=True)\n    return 201 '
    code = _block("python", "# app.py").replace("    return 201 ", spoken)
    (tmp_path / "app.py").write_text(code)
    process = subprocess.Popen([sys.executable, "app.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "reserved {'id': 1}\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def test_the_config_example_is_valid(tmp_path: Path) -> None:
    """bus.toml of the README passes `eventbus run --check`, and an event can be published to it."""
    (tmp_path / "bus.toml").write_text(_block("toml", "# bus.toml"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}

    def eventbus(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "eventbus", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    checked = eventbus("run", "bus.toml", "--check")
    assert checked.returncode == 0, checked.stderr
    published = eventbus("publish", "order.created", '{"id": 1}', "--config", "bus.toml")
    assert published.returncode == 0, published.stderr


async def test_the_testing_example_holds() -> None:
    """The README's test of a handler passes for a handler that always fails."""
    from eventbus import Service

    wms = Service("wms-cincout")

    @wms.on("#")
    async def fail(order: dict) -> int:  # type: ignore[type-arg]
        return 500

    names: dict[str, object] = {"wms": wms}
    exec(_block("python", "from eventbus.testing import TestBus"), names)
    started = time.monotonic()
    await names["test_ten_retries_then_parked"]()  # type: ignore[operator]
    assert time.monotonic() - started < 10
