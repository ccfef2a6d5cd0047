"""What every request must pass: its size, its pace, its host, its origin, its kind; and what every answer carries."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from eventbus import ConfigError
from eventbus.console import openapi
from eventbus.console.app import ADMIN_ROUTES
from eventbus.console.guard import HEADERS, host_name
from eventbus.console.limits import MOST_CALLERS, RateLimit
from eventbus.console.server import check, names_of, serving
from eventbus.console.tokens import Keyring
from eventbus.listening import Address

from .conftest import QUEUE, TOKENS, Api, ApiMaker, example

LOCAL = Address("127.0.0.1", 0)


@pytest.fixture
def url() -> str:
    """Nothing here depends on the broker."""
    return "memory://"


@pytest.mark.parametrize(
    "path", ["/healthz", "/admin/dlq/queues", "/nope", f"{QUEUE}/messages?limit=0", f"{QUEUE}/export"]
)
async def test_every_answer_has_the_security_headers(api: Api, path: str) -> None:
    """Also errors, also what is not there; nothing allows another origin."""
    answer = await api.client.get(path, headers={"origin": "http://localhost"})
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.evil.example"]
)
async def test_on_loopback_without_tokens_only_its_own_names_are_answered(make_api: ApiMaker, host: str) -> None:
    """A page under a name that leads to 127.0.0.1 is not of this origin (DNS rebinding)."""
    api = make_api(hosts=names_of(LOCAL))
    for name in ("localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"):
        assert (await api.get("/admin/dlq/queues", headers={"host": name})).status_code == 200
    answer = await api.get("/admin/dlq/queues", headers={"host": host})
    assert answer.status_code == 421
    assert "localhost" in answer.json()["help"]


async def test_a_page_of_another_origin_is_refused(api: Api) -> None:
    """Also before its request would be one that a browser asks about first."""
    for origin in ("http://evil.example", "null", "https://localhost.evil.example", "http://localhost:9999"):
        answer = await api.post(f"{QUEUE}/re-drive", {"limit": 1}, headers={"origin": origin})
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:eventbus:problem:wrong-origin")
    same = await api.post(f"{QUEUE}/re-drive", {"limit": 1}, headers={"origin": "http://localhost"})
    assert same.status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_what_a_form_could_send_is_refused(api: Api, kind: str) -> None:
    """A form on any page can post these three kinds to loopback without asking."""
    headers = {"content-type": kind} if kind else {}
    for path in ("re-drive", "purge", "erase", "edit", "import"):
        answer = await api("POST", f"{QUEUE}/{path}", content=b'{"limit": 10}', headers=headers)
        assert answer.status_code == 415
    assert (await api.get(f"{QUEUE}/count")).json() == {"count": 6}


async def test_a_body_that_is_too_large(make_api: ApiMaker) -> None:
    """Refused by what it says of itself, and by what it is."""
    api = make_api(max_body=1000)

    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(100):
            yield b" " * 100

    for path, kind in (("re-drive", "application/json"), ("import", "application/x-ndjson")):
        for content in (b" " * 1001, pieces()):
            answer = await api("POST", f"{QUEUE}/{path}", content=content, headers={"content-type": kind})
            assert answer.status_code == 413
            assert "1000 bytes" in answer.json()["detail"]


async def test_only_a_messages_own_body_may_be_large(make_api: ApiMaker) -> None:
    """An order of re-drive has a megabyte at most, whatever a message may have."""
    api = make_api()
    large = {"id": "nobody", "body": "x" * 1_100_000}
    assert (await api.post(f"{QUEUE}/edit", large)).status_code == 404
    answer = await api(
        "POST", f"{QUEUE}/re-drive", content=b" " * 1_100_000, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


async def test_nobodys_body_is_read(make_api: ApiMaker) -> None:
    """Without a token nothing is read: a stranger cannot fill the memory."""
    api = make_api(keyring=Keyring(list(TOKENS.values())))
    read = 0

    async def pieces():  # type: ignore[no-untyped-def]
        nonlocal read
        for _ in range(100):
            read += 1
            yield b" " * 1000

    answer = await api("POST", f"{QUEUE}/edit", content=pieces(), headers={"content-type": "application/json"})
    assert answer.status_code == 401
    assert read <= 1


async def test_too_many_requests(make_api: ApiMaker) -> None:
    """Each token has its own bucket, and strangers of one address share one."""
    api = make_api(keyring=Keyring(list(TOKENS.values())), rate=2)
    answers = [(await api.get("/admin/whoami", token="vera")).status_code for _ in range(5)]
    assert answers == [200, 200, 200, 200, 429]
    limited = await api.get("/admin/whoami", token="vera")
    assert int(limited.headers["retry-after"]) >= 1
    assert (await api.get("/admin/whoami", token="otto")).status_code == 200
    strangers = [(await api.get("/admin/whoami", token="nobody")).status_code for _ in range(6)]
    assert strangers[:4] == [401] * 4
    assert strangers[4:] == [429] * 2


def test_a_bucket_fills_again() -> None:
    """At its rate, up to twice as much; who asked longest ago is forgotten."""
    limit = RateLimit(2)
    assert [limit.take("a", 0.0) for _ in range(5)] == [0, 0, 0, 0, 1]
    assert limit.take("a", 0.5) == 0
    assert limit.take("a", 0.5) > 0
    assert [limit.take("a", 1000.0) for _ in range(5)] == [0, 0, 0, 0, 1]
    for number in range(MOST_CALLERS + 10):
        limit.take(f"address {number}", 1000.0)
    assert len(limit._buckets) == MOST_CALLERS


@pytest.mark.parametrize(
    ("host", "name"),
    [("localhost", "localhost"), ("A:1", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("", ""), ("[", "[")],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    """Without its port, in lower case."""
    assert host_name(host) == name


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.168.1.1", "example.org"])
def test_another_address_needs_a_token(host: str) -> None:
    """Loopback does not, and says what to do otherwise."""
    address = Address.parse(f"{host}:80")
    with pytest.raises(ConfigError, match="eventbus token"):
        check(address, tokens=False)
    check(address, tokens=True)
    for loopback in ("127.0.0.1", "[::1]", "localhost", "127.8.8.8"):
        check(Address.parse(f"{loopback}:80"), tokens=False)


async def test_on_a_socket(api: Api, make_api: ApiMaker) -> None:
    """Over a real connection: it names no server, streams an export, and ends with its last answer."""
    from eventbus.console.app import make_app
    from eventbus.console.desk import Desk

    app = make_app(Desk(api.bus, [api.service]), hosts=names_of(LOCAL))
    with LOCAL.bind() as listening:
        async with serving(app, listening) as url, httpx.AsyncClient(base_url=url) as client:
            answer = await client.get("/admin/dlq/queues")
            assert answer.status_code == 200
            assert "server" not in answer.headers
            exported = await client.get(f"{QUEUE}/export")
            assert exported.headers["transfer-encoding"] == "chunked"
            assert len(exported.text.splitlines()) == 6
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(base_url=url) as client:
                await client.get("/healthz")


async def test_a_client_that_leaves_stops_its_re_drive(api: Api) -> None:
    """At one a second for hours, with nobody left to tell: what is not done yet stays where it is."""
    from eventbus.console.app import make_app
    from eventbus.console.desk import Desk
    from eventbus.testing.contract.harness import eventually

    app = make_app(Desk(api.bus, [api.service]))
    with LOCAL.bind() as listening:
        async with serving(app, listening) as url, httpx.AsyncClient(base_url=url) as client:
            asking = asyncio.ensure_future(client.post(f"{QUEUE}/re-drive", json={"rate": 0.2}))

            async def one_is_gone() -> bool:
                return await api.bus.dead_letters(api.service).count() == 5

            await eventually(one_is_gone, "the first one was put back")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        # The server ends only after its requests: this one has ended long before its time.
    assert await api.bus.dead_letters(api.service).count() == 5


async def test_other_methods_are_named(api: Api) -> None:
    """405, and what is allowed."""
    for route in ADMIN_ROUTES:
        path = example(route)["path"]
        answer = await api.client.request("DELETE", path)
        assert answer.status_code == 405
        assert route.method in answer.headers["allow"]
        assert answer.headers["content-type"] == "application/problem+json"


async def test_the_document_is_served_as_it_is_made(api: Api) -> None:
    """Open to all: it holds no secret, and tools ask for it first."""
    served = (await api.client.get("/openapi.json")).json()
    assert served == openapi.document(ADMIN_ROUTES)
    assert served["openapi"] == "3.1.0"
    operations = [(method.upper(), path) for path, methods in served["paths"].items() for method in methods]
    assert operations == [(route.method, route.path) for route in ADMIN_ROUTES]
    for seed in ("/admin/dlq/queues", "/admin/dlq/queues/{queue}/messages", "/admin/dlq/queues/{queue}/re-drive"):
        assert seed in served["paths"]
