"""Publishing over HTTP on real sockets and real brokers: what is answered, and what hostile clients cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from cloudevents.core.bindings.http import to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent

from eventbus import Bus, Event, PublishError, PublishResult, Service
from eventbus.ingest import intake, listener, protocol
from eventbus.ingest.listener import Listener
from eventbus.listening import Address
from tests.brokers import rabbit, redis

DEADLINE = 20.0
JSON = {"datacontenttype": "application/json"}
BATCH = {"content-type": "application/cloudevents-batch+json"}


@dataclass
class Answer:
    status: int
    head: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        return json.loads(self.body)


class Client:
    """A raw connection: what is sent is sent to the byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        async with asyncio.timeout(DEADLINE):
            line = await self.reader.readline()
            status = int(line.split()[1])
            head = {}
            while (entry := await self.reader.readline()) not in (b"\r\n", b""):
                name, _, value = entry.decode().partition(":")
                head[name.lower()] = value.strip()
            return Answer(status, head, await self.reader.readexactly(int(head.get("content-length", 0))))

    async def closed(self) -> bool:
        """Whether the other side has closed, and said nothing more."""
        async with asyncio.timeout(DEADLINE):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True

    def close(self) -> None:
        self.writer.close()


def post(body: bytes = b"{}", *, path: str = "/events", method: str = "POST", **headers: str) -> bytes:
    head = {"host": "bus", "content-type": "application/json", "content-length": str(len(body)), "ce-type": "a.b"}
    head |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items() if value), "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def listening(bus: Bus, token: str = "") -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    """A listener on a free port; gives a function that connects to it."""
    clients: list[Client] = []
    async with Listener(bus, Address("127.0.0.1", 0).bind(), token) as found:
        host, _, port = found.address.rpartition(":")

        async def connect() -> Client:
            client = Client(*await asyncio.open_connection(host, int(port)))
            clients.append(client)
            return client

        connect.url = f"http://{found.address}/events"  # type: ignore[attr-defined]
        connect.listener = found  # type: ignore[attr-defined]
        try:
            yield connect
        finally:
            for client in clients:
                client.close()


@asynccontextmanager
async def ask(bus: Bus, token: str = "") -> AsyncIterator[Callable[[bytes], Awaitable[Answer]]]:
    """A listener, and one question per connection to it."""
    async with listening(bus, token) as connect:

        async def one(data: bytes) -> Answer:
            client = await connect()
            await client.send(data)
            return await client.answer()

        yield one


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with Bus("memory://", source="ingest-api") as found:
        yield found


@pytest.fixture(params=["sqlite", "rabbit", "redis"])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    """A real broker with a service of this test's own."""
    urls = {
        "sqlite": lambda: f"sqlite:///{tmp_path}/bus.db",
        "rabbit": rabbit.shared_url,
        "redis": redis.shared_url,
    }
    async with Bus(urls[request.param](), source="ingest-api") as found:
        yield found


def held_back(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let no publish through until the event is set."""
    go = asyncio.Event()
    publish_many = bus.publish_many

    async def held(events: Sequence[Event]) -> list[PublishResult]:
        await go.wait()
        return await publish_many(events)

    monkeypatch.setattr(bus, "publish_many", held)
    return go


async def received(bus: Bus, number: int, act: Callable[[], Awaitable[None]]) -> list[Event]:
    """What a new service receives of what `act` publishes."""
    service = Service(f"ingest-{time.time_ns():x}")
    events: list[Event] = []
    done = asyncio.Event()

    @service.on("#")
    async def keep(event: Event) -> None:
        events.append(event)
        if len(events) >= number:
            done.set()

    async with bus.serving(service):
        await act()
        async with asyncio.timeout(DEADLINE):
            await done.wait()
    return events


async def test_what_is_answered_with_202_is_delivered(broker: Bus) -> None:
    """Binary, structured and batch mode, written by the official package, on every broker; the ids come back."""
    made = [
        CloudEvent(
            {"id": f"o-{n}", "type": "order.created", "source": "/shop", **JSON}, data={"n": n, "name": "Müller"}
        )
        for n in range(4)
    ]
    answers: list[dict[str, object]] = []

    async def publish() -> None:
        async with listening(broker) as connect, aiohttp.ClientSession() as session:
            url = connect.url  # type: ignore[attr-defined]
            binary, structured = to_binary_event(made[0]), to_structured_event(made[1])
            batch = b"[" + b",".join(to_structured_event(event).body for event in made[2:]) + b"]"
            requests = [(binary.headers, binary.body), (structured.headers, structured.body), (BATCH, batch)]
            for headers, body in requests:
                extra = {"x-shop": "7", "x-retries": "9", "x-park-reason": "forged"}
                async with session.post(url, headers={**headers, **extra}, data=body) as response:
                    assert response.status == 202, await response.text()
                    answers.append(await response.json())

    events = await received(broker, 4, publish)
    assert answers == [{"id": "o-0"}, {"id": "o-1"}, {"ids": ["o-2", "o-3"]}]
    assert sorted((event.id, event.type, event.source) for event in events) == [
        (f"o-{n}", "order.created", "/shop") for n in range(4)
    ]
    assert all(event.data == {"n": int(event.id[2:]), "name": "Müller"} for event in events)
    assert all("x-retries" not in event.headers and "x-park-reason" not in event.headers for event in events)
    assert {event.headers["x-shop"] for event in events} == {"7"}


async def test_many_small_requests_become_few_publishes(broker: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 clients at once: far fewer publishes than events, every event once."""
    calls: list[int] = []
    publish_many = broker.publish_many

    async def counted(events: Sequence[Event]) -> list[PublishResult]:
        calls.append(len(events))
        return await publish_many(events)

    monkeypatch.setattr(broker, "publish_many", counted)

    async def publish() -> None:
        async with listening(broker) as connect:

            async def client(name: int) -> None:
                connection = await connect()
                for number in range(10):
                    await connection.send(post(ce_id=f"{name}-{number}"))
                    assert (await connection.answer()).json == {"id": f"{name}-{number}"}

            await asyncio.gather(*(client(name) for name in range(64)))

    events = await received(broker, 640, publish)
    assert sorted(event.id for event in events) == sorted(f"{a}-{b}" for a in range(64) for b in range(10))
    assert sum(calls) == 640
    assert len(calls) < 320


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (post(path="/"), 404, "POST /events"),
        (post(path="/events/1"), 404, "there is nothing at '/events/1'"),
        (post(method="GET"), 405, "POST /events"),
        (post(method="OPTIONS"), 405, "POST /events"),
        (post(ce_type=""), 400, "add a 'ce-type: order.created' header"),
        (post(host=""), 400, "host header"),
        (post(origin="https://evil.example"), 403, "web page"),
        (post(expect="the-unexpected"), 417, "leave it away"),
        (post(content_length=str(protocol.MAX_BODY + 1)), 413, "at most 16777216"),
        (post(content_length="9" * 19), 413, "at most 16777216"),
        (post(content_length="-1"), 400, "no HTTP/1.1 request"),
        (post(transfer_encoding="chunked"), 400, "Transfer-Encoding can't be present with Content-Length"),
        (post(b"a=b", content_type="application/x-www-form-urlencoded"), 415, "content-type: application/json"),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", 405, "no proxy"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "no HTTP/1.1 request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "no HTTP/1.1 request"),
        (b"POST /events HTTP/1.1\r\nx: " + b"a" * 200_000, 431, "headers take more than"),
        (post(ce_id="1").replace(b"ce-id", b"ce-id: 0\r\nce-id"), 400, "two ce-id headers"),
    ],
)
async def test_what_is_refused(bus: Bus, request_: bytes, status: int, words: str) -> None:
    """The status says what kind of mistake, the body what to do; nothing is published."""
    async with ask(bus) as question:
        answer = await question(request_)
    assert answer.status == status
    assert words in str(answer.json["error"])


async def test_head_has_no_body(bus: Bus) -> None:
    """405 to HEAD ends with its headers."""
    async with listening(bus) as connect:
        client = await connect()
        await client.send(post(method="HEAD"))
        data = await client.reader.read()
    assert data.startswith(b"HTTP/1.1 405")
    assert data.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("given", ["", "Bearer wrong", "Bearer", "Basic right", "Bearer right2", "right"])
async def test_a_wrong_token_is_401(bus: Bus, given: str) -> None:
    """Before the body is read, and without saying what is wrong about it."""
    async with ask(bus, "right") as question:
        answer = await question(post(authorization=given))
        assert (answer.status, answer.head["www-authenticate"]) == (401, "Bearer")
        assert "right" not in answer.body.decode()
        assert (await question(post(authorization="bearer right"))).status == 202
        assert (await question(post(authorization="Bearer right", origin="https://shop"))).status == 202


async def test_an_event_that_the_broker_cannot_take_is_413(bus: Bus) -> None:
    """The broker's own limit, also for one event among many: nothing of that request is taken."""
    bus._max_bytes = 1000
    async with ask(bus) as question:
        answer = await question(post(b'"' + b"x" * 2000 + b'"'))
        assert answer.status == 413
        assert "at most 1000 can be parked" in str(answer.json["error"])
        envelopes = [{"id": str(n), "type": "a", "source": "/", "data": "x" * 1500 * n} for n in range(2)]
        answer = await question(
            post(json.dumps(envelopes).encode(), **{k.replace("-", "_"): v for k, v in BATCH.items()})
        )
        assert answer.status == 413
        assert "nothing of this request is taken" in str(answer.json["error"])


async def test_mixed_results_are_told_one_by_one(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the broker said of each event of a batch; another request beside it is not touched."""
    kinds = {
        "s": PublishResult("stored"),
        "r": PublishResult("refused", "no"),
        "u": PublishResult("unknown", "perhaps"),
    }

    async def publish(events: Sequence[Event]) -> list[PublishResult]:
        results = [kinds[event.id[0]] for event in events]
        if any(result.status != "stored" for result in results):
            raise PublishError(results)
        return results

    monkeypatch.setattr(bus, "publish_many", publish)

    def batch(*ids: str) -> bytes:
        body = json.dumps([{"id": id, "type": "a", "source": "/"} for id in ids]).encode()
        return post(body, content_type=BATCH["content-type"])

    async with ask(bus) as question:
        mixed, refused, fine = await asyncio.gather(
            question(batch("s1", "r1", "u1")), question(batch("s2", "r2")), question(batch("s3", "s4"))
        )
    rows = [(row["id"], row["status"]) for row in mixed.json["results"]]  # type: ignore[attr-defined]
    assert (mixed.status, rows) == (503, [("s1", "stored"), ("r1", "refused"), ("u1", "unknown")])
    assert mixed.head["retry-after"] == "2"
    assert (refused.status, fine.status, fine.json) == (400, 202, {"ids": ["s3", "s4"]})


async def test_a_broker_that_is_gone_is_503(tmp_path: Path) -> None:
    """With Retry-After; and 202 again once it is back."""
    with redis.server() as server:
        settings = {"redis": {"timeout": "1s"}}
        async with Bus(server.url, source="wms-api", settings=settings) as bus, ask(bus) as question:
            assert (await question(post())).status == 202
            server.kill()
            answer = await question(post(ce_id="7"))
            assert (answer.status, answer.head["retry-after"]) == (503, "2")
            assert answer.json["results"][0]["id"] == "7"  # type: ignore[index]
            server.start()
            async with asyncio.timeout(DEADLINE):
                while (await question(post())).status != 202:
                    await asyncio.sleep(0.05)


async def test_requests_in_a_row_are_answered_in_order(bus: Bus) -> None:
    """Pipelined, and byte by byte: the same answers, on one connection."""
    requests = b"".join(post(json.dumps({"n": n}).encode(), ce_id=str(n)) for n in range(100))
    async with listening(bus) as connect:
        client = await connect()
        await client.send(requests)
        assert [(await client.answer()).json["id"] for _ in range(100)] == [str(n) for n in range(100)]
        for place in range(400):
            await client.send(requests[place : place + 1])
        await client.send(requests[400:])
        assert [(await client.answer()).json["id"] for _ in range(100)] == [str(n) for n in range(100)]
        # A mistake inside a request does not end the connection; one about requests as such does.
        await client.send(post(b"{broken") + post(ce_id="fine") + post(path="/nowhere") + post(ce_id="unread"))
        assert [(await client.answer()).status for _ in range(3)] == [400, 202, 404]
        assert await client.closed()


async def test_chunks_and_expectations(bus: Bus) -> None:
    """Chunked bodies, and clients that ask first (curl, for large ones)."""
    async with listening(bus) as connect:
        client = await connect()
        head = b"POST /events HTTP/1.1\r\nhost: a\r\nce-type: a\r\nce-id: c\r\ntransfer-encoding: chunked\r\n\r\n"
        await client.send(head + b"1\r\n{\r\n1;x=y\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n")
        assert (await client.answer()).json == {"id": "c"}
        await client.send(post(b"{}", expect="100-continue", ce_id="e")[:-2])
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 Continue")
        await client.send(b"{}")
        assert (await client.answer()).json == {"id": "e"}
        await client.send(head + b"100000\r\n" + b"x" * 0x100000)
        chunks = (b"\r\n100000\r\n" + b"x" * 0x100000) * 16
        await client.send(chunks)
        assert (await client.answer()).status == 413


async def test_an_offer_of_http_2_is_not_taken_up(bus: Bus) -> None:
    """Java's client offers it with every request; the body must not be taken for another protocol."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAEAAEAAAAIAAAAB"}
    async with listening(bus) as connect:
        client = await connect()
        for id in ("1", "2"):
            request = post(b'{"n": 1}', ce_id=id, **offer)
            await client.send(request[:-3])
            await client.send(request[-3:])
            assert (await client.answer()).json == {"id": id}
        await client.send(post(ce_id="3", **offer) + post(ce_id="4"))
        assert [(await client.answer()).json["id"] for _ in range(2)] == ["3", "4"]


async def test_a_large_body(bus: Bus) -> None:
    """Read in a thread, answered like any other, in its turn."""
    body = json.dumps("x" * (protocol.IN_A_THREAD * 4)).encode()
    async with listening(bus) as connect:
        client = await connect()
        await client.send(post(body, ce_id="large") + post(ce_id="small"))
        assert [(await client.answer()).json["id"] for _ in range(2)] == ["large", "small"]
        await client.send(post(body[:-1]))
        assert (await client.answer()).status == 400
        assert connect.listener._held == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("piece", [b"", b"POST /ev", post()[:60], post()[:-1]])
async def test_a_slow_client_is_let_go(bus: Bus, monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    """However its bytes drip, a request is here in time or its connection ends; others are served meanwhile."""
    monkeypatch.setattr(protocol, "HEAD", 0.3)
    monkeypatch.setattr(protocol, "READING", 0.3)
    monkeypatch.setattr(protocol, "LINGER", 0.1)
    monkeypatch.setattr(listener, "_SWEEP", 0.05)
    async with listening(bus) as connect:
        slow, quick = await connect(), await connect()
        await slow.send(piece)
        await quick.send(post())
        assert (await quick.answer()).status == 202
        if piece:
            assert (await slow.answer()).status == 408
        assert await slow.closed()


async def test_one_connection_too_many(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle one makes room; if all are busy, the new one is told to come back."""
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 2)
    async with listening(bus) as connect:
        idle, busy = await connect(), await connect()
        for client in (idle, busy):
            await client.send(post())
            assert (await client.answer()).status == 202
        await busy.send(post()[:20])
        third = await connect()
        await third.send(post()[:20])
        assert await idle.closed()
        fourth = await connect()
        assert (await fourth.answer()).status == 503
        await third.send(post()[20:])
        assert (await third.answer()).status == 202


async def test_memory_is_bounded(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of all connections together; what was held is given back, also by clients that go away."""
    monkeypatch.setattr(listener, "MAX_HELD", 100_000)
    body = json.dumps("x" * 60_000).encode()
    async with listening(bus) as connect:
        first = await connect()
        await first.send(post(body)[:-10])
        held = connect.listener  # type: ignore[attr-defined]
        async with asyncio.timeout(DEADLINE):
            while held._held < 59_000:
                await asyncio.sleep(0.01)
        second = await connect()
        await second.send(post(body))
        assert (await second.answer()).status == 503
        first.close()
        async with asyncio.timeout(DEADLINE):
            while held._held:
                await asyncio.sleep(0.01)
        third = await connect()
        await third.send(post(body))
        assert (await third.answer()).status == 202


async def test_who_does_not_read_is_not_read(bus: Bus) -> None:
    """A client that sends for ever and never reads its answers fills no memory of ours."""
    async with listening(bus) as connect:
        host, _, port = connect.listener.address.rpartition(":")  # type: ignore[attr-defined]
        with socket.create_connection((host, int(port))) as raw:
            raw.setblocking(False)
            sent = 0
            data = post() * 100
            loop = asyncio.get_running_loop()
            with contextlib.suppress(TimeoutError):
                while sent < 200_000_000:
                    async with asyncio.timeout(2.0):
                        await loop.sock_sendall(raw, data)
                    sent += len(data)
        assert sent < 100_000_000


async def test_a_publisher_that_hangs_up_is_still_heard(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half closed: the answer still comes. Gone: what was read is published all the same."""
    go = held_back(bus, monkeypatch)

    async def publish() -> None:
        async with listening(bus) as connect:
            found: Listener = connect.listener  # type: ignore[attr-defined]
            half, gone = await connect(), await connect()
            await half.send(post(ce_id="half"))
            half.writer.write_eof()
            await gone.send(post(ce_id="gone"))
            async with asyncio.timeout(DEADLINE):
                while len([c for c in found._connections if not c.idle]) < 2:
                    await asyncio.sleep(0.01)
            gone.writer.transport.abort()
            go.set()
            assert (await half.answer()).json == {"id": "half"}
            assert await half.closed()

    assert {event.id for event in await received(bus, 2, publish)} == {"half", "gone"}


async def test_stopping_answers_what_is_under_way(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle clients are let go, a request that is being published or read is finished, new ones find nobody."""
    go = held_back(bus, monkeypatch)
    async with listening(bus) as connect:
        idle, waiting, reading = await connect(), await connect(), await connect()
        await waiting.send(post(ce_id="waiting"))
        await reading.send(post(ce_id="reading")[:-1])
        found: Listener = connect.listener  # type: ignore[attr-defined]
        async with asyncio.timeout(DEADLINE):
            while len([c for c in found._connections if not c.idle]) < 2:
                await asyncio.sleep(0.01)
        stopping = asyncio.create_task(found.aclose())
        assert await idle.closed()
        with pytest.raises(ConnectionRefusedError):
            await connect()
        go.set()
        await reading.send(b"}")
        for client, id in ((waiting, "waiting"), (reading, "reading")):
            answer = await client.answer()
            assert (answer.json, answer.head["connection"]) == ({"id": id}, "close")
            assert await client.closed()
        await stopping


async def test_who_waits_too_long_for_a_turn_was_not_sent(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 and a word that is sure: refused, not unknown."""
    monkeypatch.setattr(intake, "PATIENCE", 0.2)
    monkeypatch.setattr(listener, "_SWEEP", 0.05)
    go = asyncio.Event()
    seen: list[str] = []

    async def held(events: Sequence[Event]) -> list[PublishResult]:
        seen.extend(event.id for event in events)
        await go.wait()
        return [PublishResult("stored")] * len(events)

    monkeypatch.setattr(bus, "publish_many", held)
    async with listening(bus) as connect:
        first, second = await connect(), await connect()
        await first.send(post(ce_id="first"))
        async with asyncio.timeout(DEADLINE):
            while not seen:
                await asyncio.sleep(0.01)
        await second.send(post(ce_id="second"))
        answer = await second.answer()
        assert answer.status == 503
        assert answer.json["results"][0]["status"] == "refused"  # type: ignore[index]
        go.set()
        assert (await first.answer()).status == 202
        assert seen == ["first"]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("another")])
async def test_a_bug_in_an_adapter_is_an_answer(bus: Bus, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Unknown, 503; and the next request is served."""
    publish_many = bus.publish_many

    async def broken(events: Sequence[Event]) -> list[PublishResult]:
        if events[0].id == "bad":
            raise error
        return await publish_many(events)

    monkeypatch.setattr(bus, "publish_many", broken)
    async with ask(bus) as question:
        assert (await question(post(ce_id="bad"))).status == 503
        assert (await question(post(ce_id="good"))).status == 202
