"""All senders against a server of raw sockets that can answer anything. What holds for one holds for the others."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator

import aiohttp
import httpx
import pytest
from http_support import KINDS, Server, a_sender, answer, failure, goes_silent, post, repeats, resets, says

from eventbus.event import Event
from eventbus.forward import Endpoint, Sender, SendFailed
from eventbus.forward.aiohttp_sender import AiohttpSender
from eventbus.forward.httpx_sender import HttpxSender
from eventbus.forward.lean_sender import LeanSender
from eventbus.settlement import Delivery


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running = Server()
    listener = await running.start()
    yield running
    listener.close()
    await running.idle()


@pytest.fixture(params=KINDS)
async def sender(
    request: pytest.FixtureRequest, server: Server, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sender]:
    # It asks for the server so as to be closed before it: the server waits until nobody is connected.
    # A proxy in the environment must not be used; this one would refuse.
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with a_sender(request.param, max_connections=5) as made:
        yield made


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_the_request_is_a_plain_post(sender, server):
    """Method, path, our headers and the body; nothing compressed, nothing of the environment."""
    await post(sender, server.url)
    ((line, headers, body),) = server.requests
    assert (line, body) == ("POST /events?a=b HTTP/1.1", b"body")
    sent = dict(headers)
    assert (sent["content-type"], sent["x-a"], sent["content-length"]) == ("text/plain", "1", "4")
    assert [value for name, value in headers if name == "accept-encoding"] == ["identity"]
    assert [value for name, value in headers if name == "user-agent"] == ["eventbus"]
    assert not {"cookie", "transfer-encoding", "expect", "authorization"} & sent.keys()


async def test_no_content_type_is_invented(sender, server):
    """A body without one is sent without one."""
    await sender.post(server.url, [], b"body", timeout=5)
    assert "content-type" not in dict(server.requests[0][1])


async def test_status_headers_and_body_come_back(sender, server):
    """Names in lower case; the first of a repeated header."""
    server.play = says(answer(503, b"sorry", b"Retry-After: 7\r\nX-Eventbus-Verdict: park\r\nretry-after: 9\r\n"))
    found = await post(sender, server.url)
    assert (found.status, found.body) == (503, b"sorry")
    assert (found.headers["retry-after"], found.headers["x-eventbus-verdict"]) == ("7", "park")


async def test_connections_are_kept_and_used_again(sender, server):
    """Twenty requests one after the other go over one connection."""
    server.play = says(answer(200, b"ok"))
    for _ in range(20):
        await post(sender, server.url)
    assert server.connections == 1


async def test_redirects_are_not_followed(sender, server):
    """An event goes where the config says, or nowhere."""
    server.play = says(answer(307, b"", b"Location: /elsewhere\r\n"))
    assert (await post(sender, server.url)).status == 307
    assert len(server.requests) == 1


async def test_cookies_are_not_kept(sender, server):
    """What one answer sets is not sent with the next request."""
    server.play = says(answer(200, b"", b"Set-Cookie: session=1; Path=/\r\n"))
    await post(sender, server.url)
    await post(sender, server.url)
    assert not any(name == "cookie" for _, headers, _ in server.requests for name, _ in headers)


async def test_at_most_64_kib_of_an_answer_are_read(sender, server):
    """A megabyte is cut, its connection closed, and the status stands."""
    server.play = says(answer(500, b"x" * 1_000_000))
    found = await post(sender, server.url)
    assert (found.status, len(found.body)) == (500, 64 * 1024)
    await server.idle()


async def test_an_endless_answer_is_cut_too(sender, server):
    """One without a length, that never stops."""
    server.play = repeats(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 8192, 0)
    assert len((await post(sender, server.url)).body) == 64 * 1024
    await server.idle()


async def test_an_answer_of_exactly_64_kib_is_whole(sender, server):
    """The limit itself is not over the limit."""
    server.play = says(answer(200, b"x" * 64 * 1024))
    assert len((await post(sender, server.url)).body) == 64 * 1024


async def test_a_compressed_answer_is_not_unpacked(sender, server):
    """Ten megabytes of zeros are ten kilobytes on the wire, and stay that."""
    bomb = gzip.compress(b"\x00" * 10_000_000)
    server.play = says(answer(500, bomb, b"Content-Encoding: gzip\r\nContent-Type: text/plain\r\n"))
    assert (await post(sender, server.url)).body == bomb


async def test_a_chunked_answer_is_put_together(sender, server):
    """Chunks are no part of the body."""
    server.play = says(b"HTTP/1.1 400 X\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert (await post(sender, server.url)).body == b"abcde"


async def test_nobody_listening_is_refused(sender):
    """The request never left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # taken, and not listening
        found = await failure(sender, f"http://127.0.0.1:{probe.getsockname()[1]}/")
    assert (found.kind, found.connected) == ("refused", False)


async def test_an_unknown_host_is_a_dns_failure(sender, monkeypatch):
    """Told apart from a refused connection."""

    async def unknown(self, *args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", unknown)
    found = await failure(sender, "http://nowhere.invalid/")
    assert (found.kind, found.connected) == ("dns", False)


async def test_plain_http_on_a_tls_port_is_a_tls_failure(sender):
    """So is anything else that is no handshake."""

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer(400, b"this is not TLS"))
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as listener:
        found = await failure(sender, f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/")
    assert (found.kind, found.connected) == ("tls", False)


async def test_a_certificate_of_nobody_is_refused(sender, tmp_path):
    """TLS is verified; the request never left."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is needed to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server()
    listener = await server.start(context)
    found = await failure(sender, server.url)
    assert (found.kind, found.connected) == ("tls", False)
    assert not server.requests
    for make in (LeanSender, AiohttpSender):
        trusting = make(ssl_context=ssl.create_default_context(cafile=certificate))
        for _ in range(3):
            assert (await post(trusting, server.url)).status == 200
        await trusting.aclose()
    listener.close()
    await server.idle()


@pytest.mark.parametrize(
    "play",
    [
        resets(),
        says(b"", then_close=True),
        resets(b"HTTP/1.1 200 OK\r\ncontent-le"),
        resets(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"),
        says(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf", then_close=True),
        says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\nhalf", then_close=True),
    ],
    ids=["reset", "closed", "reset-in-headers", "reset-in-body", "short-body", "short-chunk"],
)
async def test_a_connection_that_breaks_is_no_answer(sender, server, play):
    """Even if it broke off after a 200: what the endpoint wanted to say is not known."""
    server.play = play
    found = await failure(sender, server.url)
    assert (found.kind, found.connected) == ("reset", True)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00\x01\x02\x03" * 100,
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-long: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-many: 1\r\n" * 20_000 + b"\r\n",
    ],
    ids=["ssh", "noise", "no-status", "bad-length", "negative-length", "bad-header", "long-header", "many-headers"],
)
async def test_garbage_is_no_answer(sender, server, data):
    """Whatever is not HTTP is a failure of one kind, not an exception of the client."""
    server.play = says(data, then_close=True)
    found = await failure(sender, server.url)
    assert found.kind in ("protocol", "reset")


@pytest.mark.parametrize(
    "play",
    [
        goes_silent(),
        goes_silent(b"HTTP/1.1 200 OK\r\ncontent-"),
        goes_silent(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"),
        repeats(b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n", b"x", 0.02),
    ],
    ids=["no-answer", "half-headers", "half-body", "drip"],
)
async def test_the_timeout_is_for_the_whole(sender, server, play):
    """Silence and dripping bytes end when the time is up, not some time after; the connection is let go."""
    server.play = play
    began = time.monotonic()
    found = await failure(sender, server.url, timeout=0.3)
    assert 0.25 <= time.monotonic() - began < 1.0
    assert (found.kind, found.connected) == ("timeout", True)
    await server.idle()


async def test_a_host_that_does_not_take_the_connection_has_the_connect_timeout(kind):
    """A full backlog stands for a host that is gone: its packets are dropped."""
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):  # fill the backlog; nobody accepts
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        sender = await stack.enter_async_context(a_sender(kind, connect_timeout=0.2))
        found = await failure(sender, f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=5.0)
    assert (found.kind, found.connected) == ("timeout", False)


async def test_a_long_timeout_is_not_rounded_up(server, monkeypatch):
    """The worker's own deadline is close behind; aiohttp rounds what is above its threshold up to a whole second."""
    asked = []
    send = aiohttp.ClientSession._request

    async def spy(self, *args, **kwargs):
        asked.append(kwargs["timeout"])
        return await send(self, *args, **kwargs)

    monkeypatch.setattr(aiohttp.ClientSession, "_request", spy)
    sender = AiohttpSender()
    await post(sender, server.url, timeout=30.5)
    await sender.aclose()
    assert asked[0].total == 30.5
    assert asked[0].ceil_threshold > 30.5


async def test_a_request_that_broke_is_not_sent_again(sender, server):
    """The client never retries: only the bus does."""
    server.play = resets()
    for sent in (1, 2):
        await failure(sender, server.url)
        assert len(server.requests) == sent


async def test_a_kept_connection_that_was_closed_costs_nothing(server):
    """The lean sender opens another one: once, and only if not one byte of an answer had come."""
    async with a_sender("lean") as sender:
        for play in (resets(), says(b"", then_close=True)):
            server.play = says(answer(200))
            await post(sender, server.url)
            before = len(server.requests)
            closes_once = iter([play, says(answer(201))])

            async def plays(reader, writer, closes_once=closes_once):
                await next(closes_once)(reader, writer)

            server.play = plays
            assert (await post(sender, server.url)).status == 201
            assert len(server.requests) == before + 2
            server.play = play
            assert (await failure(sender, server.url)).kind == "reset"
            assert len(server.requests) == before + 4  # the kept one, and one new: never a third
        server.play = says(answer(200))
        await post(sender, server.url)
        before = len(server.requests)
        server.play = resets(b"H")
        assert (await failure(sender, server.url)).kind == "reset"
        assert len(server.requests) == before + 1


async def test_a_server_that_closed_its_idle_connections_is_simply_connected_to_again(server):
    """As servers do after some seconds; twenty kept connections are found gone, and no request notices."""
    barrier = asyncio.Barrier(20)

    async def together(reader, writer):
        await barrier.wait()
        await says(answer(200))(reader, writer)

    async with a_sender("lean") as sender:
        for _ in range(3):
            server.play = together
            await asyncio.gather(*(post(sender, server.url) for _ in range(20)))
            await server.hang_up()
            server.play = says(answer(204))
            assert (await post(sender, server.url)).status == 204
            await server.hang_up()


async def test_failures_leak_no_connection(sender, server):
    """After many resets and timeouts at once the whole pool is there again, and nobody is left connected."""

    async def sometimes_resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (resets() if len(server.requests) % 3 == 0 else goes_silent())(reader, writer)

    # With one deadline for all, those that wait for a place give up in the moment when places become free; with many,
    # the deadline of a request falls into the cleaning up after another's.
    for play, deadlines in (
        (resets(), [0.1] * 20),
        (goes_silent(), [0.1] * 20),
        (sometimes_resets, [0.03 + 0.003 * number for number in range(40)]),
    ):
        server.play = play
        for _ in range(8):
            ends = await asyncio.gather(
                *(post(sender, server.url, timeout=deadline) for deadline in deadlines), return_exceptions=True
            )
            assert all(isinstance(end, SendFailed) for end in ends)
    # Who gave up may still stand in line at the server. It accepts in order: after this one none of them is left.
    server.play = says(answer(200, b"ok", b"connection: close\r\n"))
    assert (await post(sender, server.url)).status == 200
    await server.idle()
    # All five at once: a single lost place of the small pool would keep the last one waiting.
    together = asyncio.Barrier(5)

    async def in_step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await together.wait()
        writer.write(answer(200, b"ok", b"connection: close\r\n"))
        await writer.drain()
        writer.close()

    server.play = in_step
    for _ in range(4):
        found = await asyncio.gather(*(post(sender, server.url) for _ in range(5)))
        assert [end.status for end in found] == [200] * 5
    await server.idle()


async def test_waiting_for_a_free_connection_counts_as_not_sent(server):
    """The endpoint never saw it."""
    server.play = goes_silent()
    async with httpx.AsyncClient(trust_env=False) as client:
        sender = HttpxSender(client, max_in_flight=1)
        first = asyncio.create_task(failure(sender, server.url, timeout=0.4))
        while not server.requests:
            await asyncio.sleep(0)
        second = await failure(sender, server.url, timeout=0.1)
        assert (second.kind, second.connected) == ("timeout", False)
        assert (await first).connected
    assert len(server.requests) == 1


async def test_a_cancelled_request_lets_its_connection_go(sender, server):
    """A shutdown in the middle of a call."""
    server.play = goes_silent()
    call = asyncio.create_task(post(sender, server.url, timeout=30))
    while not server.requests:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await server.idle()


async def test_a_failure_holds_no_secret(sender, server):
    """Neither its text nor its repr shows the token of the URL or the header."""
    server.play = says(b"garbage", then_close=True)
    with pytest.raises(SendFailed) as caught:
        await sender.post(f"{server.url}&token=hunter2", [("authorization", "Bearer hunter2hunter2")], b"", timeout=5)
    assert "hunter2" not in f"{caught.value} {caught.value!r}"


async def test_a_closed_aiohttp_sender_opens_again(server):
    """One service object may be run twice, in two event loops."""
    sender = AiohttpSender()
    for _ in range(2):
        assert (await post(sender, server.url)).status == 200
        await sender.aclose()
        await server.idle()


async def test_cookies_that_the_user_set_on_the_client_are_sent(server):
    """Special auth is what a client of one's own is for."""
    async with httpx.AsyncClient(trust_env=False, cookies={"session": "mine"}) as client:
        await post(HttpxSender(client), server.url)
    assert dict(server.requests[0][1])["cookie"] == "session=mine"


async def test_an_in_process_app_is_an_endpoint():
    """No socket at all: httpx calls the ASGI app."""
    seen = {}

    async def app(scope, receive, send):
        seen.update({name.decode(): value.decode() for name, value in scope["headers"]})
        seen["body"] = (await receive())["body"]
        await send({"type": "http.response.start", "status": 425, "headers": [(b"retry-after", b"3")]})
        await send({"type": "http.response.body", "body": b""})

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        endpoint = Endpoint("http://app/events", sender=HttpxSender(client))
        outcome = await endpoint(Delivery(Event("order.created", {"n": 1}, source="/"), "svc", "q"))
    assert (outcome.status, outcome.retry_after) == (425, 3.0)
    assert (seen["ce-type"], seen["body"]) == ("order.created", b'{"n":1}')


async def test_an_exception_in_an_in_process_app_is_no_answer():
    """It comes out of the client as it is, and is a failure like any other."""

    async def app(scope, receive, send):
        raise LookupError("no such order; password=hunter2")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        found = await failure(HttpxSender(client), "http://app/")
    assert (found.kind, found.text) == ("protocol", "LookupError: no such order; password=***")
