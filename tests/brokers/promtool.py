"""Prometheus' own checker, out of Debian's package: fetched into a cache folder, nothing is installed or started."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.brokers.sharing import cache, missing

CACHE = cache()


def find() -> str | None:
    """Where it is, if it is anywhere."""
    cached = CACHE / "promtool"
    return shutil.which("promtool") or (str(cached) if cached.exists() else None)


def check_metrics(text: str) -> None:
    """Names, units, types and helps of metrics as Prometheus wants them."""
    run("check", "metrics", input=text)


def run(*arguments: str, input: str = "", folder: Path | None = None) -> None:
    """Let it check something; fails with what it says. Where there is none: a skip, under CI a failure."""
    found = find()
    if found is None:
        missing("promtool is missing: make brokers-install fetches it")
    done = subprocess.run([found, *arguments], input=input, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def install() -> None:
    """Fetch it; without apt there is none, and the tests that want it are skipped."""
    if find() is not None or shutil.which("apt-get") is None:
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for command in (["apt-get", "-qq", "download", "prometheus"], ["sh", "-c", "dpkg -x prometheus_*.deb ."]):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                print(f"promtool could not be fetched: {done.stderr.strip()}", file=sys.stderr)
                return
        shutil.copy(Path(folder) / "usr/bin/promtool", CACHE / "promtool")


if __name__ == "__main__":
    install()
