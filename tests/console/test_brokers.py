"""Seed 1's three paths on the real brokers: the same as on SQLite."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx
import pytest

from eventbus import Bus, Service
from eventbus.cli.api import Api as Asking
from eventbus.cli.remote import RemoteLetters
from eventbus.console.app import make_app
from eventbus.console.desk import Desk
from eventbus.console.tokens import Keyring
from eventbus.errors import ConfigError
from eventbus.testing.contract.harness import eventually
from tests.brokers import kafka, rabbit, redis

from .conftest import LETTERS, PARTS_OF_SECRETS, TOKENS, Api, failing, park

IDS = [id for id, _, _ in LETTERS]


@pytest.fixture(params=["rabbit", "redis", "kafka"])
async def api(request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    """An API with tokens over a service on the broker."""
    prefix = f"t{secrets.token_hex(4)}"
    url = {"rabbit": rabbit, "redis": redis, "kafka": kafka}[request.param].shared_url()
    service = failing(f"{prefix}-cincout")
    one = {"partitions": 1, "retry_partitions": 1, "dlq_partitions": 1}  # so that order can be told
    async with Bus(url, source=f"{prefix}-api", settings={"kafka": one}) as bus:
        await park(bus, service)
        app = make_app(Desk(bus, [service]), keyring=Keyring(list(TOKENS.values())))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            yield Api(client, bus, service)


async def test_the_three_paths(api: Api) -> None:
    """Queues, messages and re-drive, by the queue's own name; nothing but the re-drive moves anything."""
    [queue] = (await api.get("/admin/dlq/queues", token="vera")).json()["queues"]
    assert (queue["service"], queue["messages"]) == (api.service.name, 6)
    path = f"/admin/dlq/queues/{quote(queue['queue'], safe='')}"
    for _ in range(2):
        page = (await api.get(f"{path}/messages?limit=20", token="vera")).json()
        assert (page["queue"], [message["id"] for message in page["messages"]]) == (queue["queue"], IDS)
        assert not [part for part in PARTS_OF_SECRETS if part in json.dumps(page)]
    first = (await api.get(f"{path}/messages?limit=4", token="vera")).json()
    rest = (await api.get(f"{path}/messages", params={"after": first["next"]}, token="vera")).json()
    assert [m["id"] for m in first["messages"] + rest["messages"]] == IDS
    report = (await api.post(f"{path}/re-drive", {"limit": 4}, token="otto")).json()
    assert (report["done"], report["ids"]) == (4, IDS[:4])

    async def came_back() -> bool:
        return (await api.bus.stats(api.service)).ready == 4

    await eventually(came_back, "four are ready again")
    left = (await api.get("/admin/dlq/queues", token="vera")).json()["queues"]
    assert [queue["messages"] for queue in left] == [2]


async def test_what_stands_beside_them(api: Api) -> None:
    """Count, filter, stats, show, edit, purge, erase, export and import."""
    path = f"/admin/dlq/queues/{api.service.name}"
    assert (await api.get(f"{path}/count?where=tenant=acme", token="vera")).json() == {"count": 3}
    assert (await api.get(f"{path}/stats?by=tenant", token="vera")).json()["counts"] == {"acme": 3, "globex": 2, "-": 1}
    assert (await api.get(f"{path}/messages/g1", token="vera")).json()["messages"][0]["tenant"] == "globex"
    exported = await api.get(f"{path}/export", token="vera")
    assert len(exported.text.splitlines()) == 6
    assert (await api.post(f"{path}/edit", {"id": "a1", "body": "{}"}, token="otto")).json()["done"] == 1
    assert (await api.post(f"{path}/purge", {"limit": 9}, token="anna")).json()["done"] == 5
    erased = await api.post(f"{path}/erase", {}, token="anna")
    if "kafka" in api.bus.url:
        assert (erased.status_code, erased.json()["erased"]) == (200, 6)
    else:
        assert (erased.status_code, "is for good" in erased.json()["detail"]) == (422, True)
    lines = {"content-type": "application/x-ndjson"}
    answer = await api("POST", f"{path}/import", content=exported.content, headers=lines, token="anna")
    assert (answer.status_code, answer.json()["done"]) == (200, 6)
    assert (await api.get(f"{path}/count", token="vera")).json() == {"count": 6}


async def test_a_purge_through_the_api_erases_or_says_before_that_it_cannot(api: Api) -> None:
    """As straight on the broker: where a purge is for good anyway, nothing is purged by an order that is wrong."""
    api.client.headers["authorization"] = "Bearer t-anna"
    letters = RemoteLetters(Asking(api.client), api.service.name)
    if "kafka" in api.bus.url:
        report = await letters.purge(["a1", "a2"], erase=True)
        assert (report.done, report.erased, await letters.count()) == (2, 2, 4)
        return
    with pytest.raises(ConfigError, match="is for good"):
        await letters.purge(["a1", "a2"], erase=True)
    assert await letters.count() == 6


async def test_a_token_for_one_tenant(api: Api) -> None:
    """Its own figures, its own letters, and nothing behind them."""
    path = f"/admin/dlq/queues/{api.service.name}"
    assert (await api.get(f"{path}/count", token="acme")).json() == {"count": 3}
    page = (await api.get(f"{path}/messages?limit=3", token="acme")).json()
    assert ([message["id"] for message in page["messages"]], page["next"]) == (["a1", "a2", "a3"], None)
    assert (await api.get(f"{path}/messages/g1", token="acme")).status_code == 404
    report = (await api.post(f"{path}/re-drive", {"limit": 100}, token="acme")).json()
    assert (report["done"], report["next"]) == (3, None)
    erased = await api.post(f"{path}/erase", {}, token="acme")
    reason = "letters of all tenants" if "kafka" in api.bus.url else "is for good"
    assert (erased.status_code, reason in erased.json()["detail"]) == (422, True)
    assert (await api.get(f"{path}/count", token="vera")).json() == {"count": 3}


@pytest.mark.parametrize(
    "after", ["nowhere", "-1", "9" * 30, "0-0", "\x00", "\udcff".encode("utf-8", "replace").decode()]
)
async def test_a_place_that_never_was(api: Api, after: str) -> None:
    """A cursor that somebody made up is refused, or leads to a page; it is never a bug of the server."""
    path = f"/admin/dlq/queues/{api.service.name}"
    answer = await api.get(f"{path}/messages", params={"after": after}, token="vera")
    assert answer.status_code in (200, 422)


async def test_a_service_that_nobody_subscribed_is_404(api: Api) -> None:
    """Known to the configuration, but not to the broker."""
    app = make_app(Desk(api.bus, [Service(f"{api.service.prefix}-nobody")]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.get(f"/admin/dlq/queues/{api.service.prefix}-nobody/count")
        [queue] = (await client.get("/admin/dlq/queues")).json()["queues"]
    assert answer.status_code == 404
    assert (queue["subscribed"], queue["messages"]) == (False, 0)
