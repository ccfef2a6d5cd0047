"""What is loaded, and who may know whom."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import eventbus

ROOT = Path(eventbus.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
CLIENTS = {"aio_pika", "aiormq", "pamqp", "aiokafka", "kafka", "redis", "hiredis"}
ADAPTERS = {"eventbus_rabbit", "eventbus_kafka", "eventbus_redis"}
HEAVY = {"aiohttp", "httpx", "rich", "starlette", "uvicorn", "cyclopts", "pydantic_settings", "uvloop", "sqlite3"}


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, at the top or inside a function, in full."""
    package = [ROOT.name, *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_eventbus_is_light():
    """No broker client, no HTTP client, no terminal, no settings: who only publishes pays only for that."""
    assert loaded_after("import eventbus") & (CLIENTS | ADAPTERS | HEAVY) == set()


def test_declaring_a_service_is_light():
    """A service with a handler needs no HTTP client either."""
    code = (
        "from eventbus import Service, Event\nwms = Service('wms')\n"
        "@wms.on('a')\nasync def handle(event: Event) -> None: ..."
    )
    assert loaded_after(code) & (CLIENTS | ADAPTERS | HEAVY) == set()


def test_there_are_files_to_look_at():
    """The tests below would pass on an empty folder."""
    assert len(FILES) > 30
    assert "eventbus.errors" in set(imported(ROOT / "event.py"))
    assert "asyncio" in set(imported(ROOT / "service.py")), "imports inside functions are seen too"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_no_adapter_and_no_broker_client(path):
    """Not even inside a function: adapters are found by name, in the registry."""
    tops = {name.partition(".")[0] for name in imported(path)}
    assert tops & (CLIENTS | ADAPTERS) == set()


# Whoever opens a bus in memory by hand on purpose, or belongs to the embedded adapters.
MAY_KNOW_EMBEDDED = ("embedded/", "testing/", "cli/", "console/")


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if not str(path.relative_to(ROOT)).startswith(MAY_KNOW_EMBEDDED)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_core_does_not_import_the_embedded_adapters_either(path):
    """They are adapters like any other."""
    assert not any(name.startswith("eventbus.embedded") for name in imported(path))


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.relative_to(ROOT).parts[0] in ("scheduling",)]
    + [ROOT / f"{name}.py" for name in ("policy", "headers", "naming", "wire", "redaction", "durations", "status")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_pure_parts_do_no_io(path):
    """Deciding, naming, reading headers: no loop, no socket, no file."""
    tops = {name.partition(".")[0] for name in imported(path)}
    assert tops & {"asyncio", "anyio", "socket", "os", "pathlib", "subprocess", "threading", "logging"} == set()
