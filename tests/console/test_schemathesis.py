"""Thousands of requests made from the OpenAPI document: no 500, and no answer that the document does not describe."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from eventbus import Bus
from eventbus.console import openapi
from eventbus.console.app import ADMIN_ROUTES
from eventbus.console.tokens import hash_of
from tests.e2e.conftest import Cli, Running

from .conftest import LETTERS, failing, park

AUTH = {"authorization": "Bearer t-anna"}
EXAMPLES = int(os.environ.get("EVENTBUS_SCHEMA_EXAMPLES", "25"))

CONFIG = f"""
url = "sqlite:///bus.db"
[admin]
rate = 1000000
[[admin.tokens]]
name = "anna"
role = "admin"
hash = "{hash_of("t-anna")}"
[services.wms-cincout]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`eventbus serve` as a user has it, on a file with dead letters; gives its address."""
    import asyncio

    folder: Path = tmp_path_factory.mktemp("served")

    async def fill() -> None:
        async with Bus(f"sqlite:///{folder}/bus.db", source="wms-api") as bus:
            await park(bus, failing(), [*LETTERS, *((f"m{n}", "order.created", "acme") for n in range(30))])

    asyncio.run(fill())
    cli = Cli(folder)
    cli.write("bus.toml", CONFIG)
    running: Running = cli.start("serve", "bus.toml", "--listen", "127.0.0.1:0", "--log", "json")
    try:
        [row] = running.wait_for("serving")
        yield str(row["address"])
        assert not running.logged("admin_failed")
        assert running.end() == 0
    finally:
        running.close()


@pytest.fixture(scope="module")
def exported(server: str) -> bytes:
    return _ask(server, "/admin/dlq/queues/wms-cincout/export")


@pytest.fixture
def filled(server: str, exported: bytes) -> str:
    """The server, with something in the queue for the next operation to be tried on."""
    _ask(server, "/admin/dlq/queues/wms-cincout/import", exported, {"content-type": "application/x-ndjson"})
    return server


def _ask(server: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    request = urllib.request.Request(server + path, data, AUTH | (headers or {}))
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: bytes = answer.read()
    return found


# A filter or a place that is a text but says nothing is refused with 422, which no schema can tell.
ACCEPTED = ["2xx", "401", "403", "404", "409", "422"]
SETTINGS = {"seed": 7, "checks": {"positive_data_acceptance": {"expected-statuses": ACCEPTED}}}

schema = schemathesis.openapi.from_dict(  # that this is what is served: test_guard
    openapi.document(ADMIN_ROUTES), config=schemathesis.Config.from_dict(SETTINGS)
)


@schemathesis.serializer("application/x-ndjson")
def as_lines(context: Any, value: Any) -> Any:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


@schema.auth()
class WithToken:
    """Known to schemathesis as what it is: it tries without, too."""

    def get(self, case: Any, context: Any) -> str:
        return AUTH["authorization"]

    def set(self, case: Any, data: str, context: Any) -> None:
        case.headers = {**(case.headers or {}), "Authorization": data}


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize="EVENTBUS_SCHEMA_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_what_the_document_says(case: Any, filled: str) -> None:
    """Right and wrong input to every operation; a queue that is known more often than not."""
    if case.path_parameters and "queue" in case.path_parameters and case.meta is not None and len(str(case.query)) % 4:
        case.path_parameters["queue"] = "wms-cincout"
    case.call_and_validate(base_url=filled)


def test_the_export_is_lines_of_messages(exported: bytes) -> None:
    """What schemathesis cannot look into."""
    assert len([json.loads(line) for line in exported.splitlines()]) == len(LETTERS) + 30
