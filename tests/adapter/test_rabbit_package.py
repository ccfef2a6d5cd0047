"""The package itself: what its wheel holds, and that no error of the client leaves it untranslated."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import aiormq.exceptions
import pytest

import eventbus_rabbit
from eventbus.errors import EventBusError
from eventbus.registry import adapter_class
from eventbus_rabbit._errors import CLIENT_ERRORS, translate

SOURCE = Path(eventbus_rabbit.__file__).parent


def test_the_wheel_holds_the_modules_and_nothing_else(tmp_path: Path) -> None:
    """Modules and py.typed; no pyproject.toml, no caches; both schemes are entry points."""
    folder = shutil.copytree(SOURCE, tmp_path / "source", symlinks=False)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {str(Path(name)) for name in wheel.namelist()}
        entry_points = wheel.read("eventbus_rabbit-0.1.0.dist-info/entry_points.txt").decode()
    modules = {name for name in names if not name.startswith("eventbus_rabbit-")}
    assert modules == {f"eventbus_rabbit/{path.name}" for path in (*SOURCE.glob("*.py"), SOURCE / "py.typed")}
    assert "amqp = eventbus_rabbit:RabbitAdapter" in entry_points
    assert "amqps = eventbus_rabbit:RabbitAdapter" in entry_points


def test_a_plain_checkout_finds_the_adapter() -> None:
    """Both schemes lead to the adapter without being installed."""
    assert adapter_class("amqp://localhost") is adapter_class("amqps://localhost") is eventbus_rabbit.RabbitAdapter


@pytest.mark.parametrize(
    "kind",
    [
        found
        for _, found in inspect.getmembers(aiormq.exceptions, inspect.isclass)
        if issubclass(found, Exception) and found.__module__ == "aiormq.exceptions"
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_error_of_the_client_is_translated(kind: type[Exception]) -> None:
    """Each exception class of aiormq is caught, and becomes one of ours with one line of text."""
    assert issubclass(kind, CLIENT_ERRORS)
    error = kind.__new__(kind)
    error.args = (404, "some\nreason")
    found = translate(error, "doing something", "host:5672")
    assert isinstance(found, EventBusError)
    assert "\n" not in str(found)
