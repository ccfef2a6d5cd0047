"""What is in the wheels: the package, its types and its scripts, and nothing of the workshop."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"eventbus": ROOT, "eventbus_kafka": ROOT / "eventbus_kafka", "eventbus_redis": ROOT / "eventbus_redis"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_the_package_and_nothing_else(package: str, tmp_path: Path) -> None:
    """Every module, py.typed and data file is there; no pyproject.toml, cache, test or benchmark is."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=PACKAGES[package], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", package], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert files == {name for name in tracked.split() if not name.endswith("pyproject.toml")}
    assert f"{package}/py.typed" in files
