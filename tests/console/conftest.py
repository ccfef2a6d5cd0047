"""The admin API in this process, on a bus with dead letters of two tenants; every answer is held to the document."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from eventbus import Bus, Event, RetryPolicy, Service
from eventbus.console import openapi
from eventbus.console.app import ADMIN_ROUTES, make_app
from eventbus.console.desk import Desk
from eventbus.console.problems import MEDIA_TYPE
from eventbus.console.routing import Route
from eventbus.console.tokens import Keyring, Token, hash_of
from eventbus.testing.contract.harness import eventually

DOCUMENT = openapi.document(ADMIN_ROUTES)
NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)
SECRET = "RuntimeError: no amqp://wms:hunter2@rabbit, Bearer c2VjcmV0LXRva2Vu1, https://s3/x?X-Amz-Signature=5ecdead"
PARTS_OF_SECRETS = ("hunter2", "c2VjcmV0LXRva2Vu1", "5ecdead")

LETTERS = (
    ("a1", "order.created", "acme"),
    ("g1", "order.created", "globex"),
    ("a2", "price.changed", "acme"),
    ("g2", "price.changed", "globex"),
    ("a3", "order.created", "acme"),
    ("n1", "order.created", None),
)

TOKENS = {
    "vera": Token("vera", "viewer", hash_of("t-vera")),
    "otto": Token("otto", "operator", hash_of("t-otto")),
    "anna": Token("anna", "admin", hash_of("t-anna")),
    "acme": Token("acme", "admin", hash_of("t-acme"), frozenset({"acme"})),
    "late": Token("late", "admin", hash_of("t-late"), expires=datetime(2029, 12, 31, tzinfo=timezone.utc)),
    "soon": Token("soon", "admin", hash_of("t-soon"), expires=datetime(2030, 1, 2, tzinfo=timezone.utc)),
}


def failing(name: str = "wms-cincout", **options: Any) -> Service:
    """A service that parks everything, with an error text that is full of secrets."""
    service = Service(name, concurrency=1, retry=RetryPolicy(max_retries=0), **options)

    @service.on("#")
    async def fail(event: Event) -> None:
        raise RuntimeError(SECRET.removeprefix("RuntimeError: "))

    return service


async def park(bus: Bus, service: Service, letters: Any = LETTERS) -> None:
    """Let the service park these, in this order."""
    async with bus.serving(service):
        before = await bus.dead_letters(service).count()
        events = [
            Event(type, {"of": tenant, "mark": f"{tenant}-mark"}, id=id, tenant=tenant) for id, type, tenant in letters
        ]
        await bus.publish_many(events)

        async def parked() -> bool:
            return await bus.dead_letters(service).count() >= before + len(letters)

        await eventually(parked, "all of them are parked")


@dataclass
class Api:
    """A client that believes nothing: status, content type and body must be what the document says."""

    client: httpx.AsyncClient
    bus: Bus
    service: Service
    document: dict[str, Any] = field(default_factory=lambda: DOCUMENT)

    async def __call__(self, method: str, path: str, *, token: str | None = None, **options: Any) -> httpx.Response:
        headers = dict(options.pop("headers", {}))
        if token is not None:
            headers["authorization"] = f"Bearer t-{token}"
        answer = await self.client.request(method, path, headers=headers, **options)
        self._hold(method, httpx.URL(path).path, answer)
        return answer

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self("GET", path, **options)

    async def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        return await self("POST", path, **({"json": body} if body is not None else {}), **options)

    def _hold(self, method: str, path: str, answer: httpx.Response) -> None:
        operation = next(
            (o for o in ADMIN_ROUTES if o.method == method and _matches(o.path, path)),
            None,
        )
        if operation is None:
            assert answer.status_code in (404, 405, 200)
            return
        described = self.document["paths"][operation.path][method.lower()]["responses"]
        assert str(answer.status_code) in described, (answer.status_code, answer.text)
        kind = answer.headers["content-type"].partition(";")[0]
        content = described[str(answer.status_code)]["content"]
        assert kind in content, kind
        if kind in ("application/json", MEDIA_TYPE):
            schema = content[kind]["schema"] | {"components": self.document["components"]}
            errors = [error.message for error in jsonschema_rs.validator_for(schema).iter_errors(answer.json())]
            assert not errors, errors
        if kind == MEDIA_TYPE:
            assert answer.json()["status"] == answer.status_code
            assert answer.json()["detail"]


def _matches(pattern: str, path: str) -> bool:
    parts, found = pattern.split("/"), path.split("/")
    if parts[-1] == "{id}":
        found = [*found[: len(parts) - 1], "/".join(found[len(parts) - 1 :])]
    return len(parts) == len(found) and all(
        bool(two) if one.startswith("{") else one == two for one, two in zip(parts, found, strict=True)
    )


QUEUE = "/admin/dlq/queues/wms-cincout"


def example(route: Route) -> dict[str, Any]:
    """A request to each endpoint that is fine and changes nothing; a new endpoint needs one here."""
    bodies: dict[str, Any] = {
        "redrive_messages": {"json": {"limit": 1, "dry_run": True}},
        "purge_messages": {"json": {"limit": 1, "dry_run": True}},
        "erase_messages": {"json": {"dry_run": True}},
        "edit_message": {"json": {"id": "nobody", "body": "{}"}},
        "import_messages": {"content": b"", "headers": {"content-type": "application/x-ndjson"}},
    }
    path = route.path.replace("{queue}", "wms-cincout").replace("{id}", "a1")
    if route.method == "POST":
        return {"method": "POST", "path": path} | bodies[route.name]
    return {"method": "GET", "path": path}


ApiMaker = Callable[..., Api]


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/bus.db"


@pytest.fixture
async def bus(url: str) -> AsyncIterator[Bus]:
    async with Bus(url, source="wms-api") as bus:
        yield bus


@pytest.fixture
async def make_api(bus: Bus) -> AsyncIterator[ApiMaker]:
    """An API over wms-cincout, whose letters are parked, and wms-empty."""
    clients = []
    service, empty = failing(), Service("wms-empty")
    await bus.provision(empty)
    await park(bus, service)

    def make(**options: Any) -> Api:
        options = {"now": NOW.timestamp, "rate": 1e6} | options
        app = make_app(Desk(bus, [service, empty]), **options)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        clients.append(client)
        return Api(client, bus, service)

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def api(make_api: ApiMaker) -> Api:
    """Without tokens: everybody is an admin."""
    return make_api()


@pytest.fixture
def guarded(make_api: ApiMaker) -> Api:
    """With the tokens above."""
    return make_api(keyring=Keyring(list(TOKENS.values())))


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.split("\n") if line]
