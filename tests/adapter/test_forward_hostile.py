"""Hostile endpoints through the whole bus, over real sockets: verdict, attempts, dead letter, and no socket left."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import json
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from http_support import KINDS, Play, Server, a_sender, answer, goes_silent, open_sockets, repeats, resets, says

from eventbus import Bus, DeadLetter, Event, Outcome, RetryPolicy, Service
from eventbus.forward import Auth, Breaker, Sender, SendFailed
from eventbus.settlement import ACK, Delivery, Park, Requeue, Retry, Settlement


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running = Server()
    listener = await running.start()
    yield running
    listener.close()
    await running.idle()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Ran:
    """What became of the events of one run."""

    calls: dict[str, list[Settlement]]
    letters: dict[str, DeadLetter]


async def run(sender: Sender | None, url: str, events: list[Event], *, timeout: float, parked: int) -> Ran:
    """Forward the events on a bus of real time until each has been settled and so many are parked."""
    service = Service("wms-cincout", retry=RetryPolicy(max_retries=1, delay=0.02))
    service.forward("#", to=url, timeout=timeout, breaker=False)
    calls: dict[str, list[Settlement]] = {}

    def observe(delivery: Delivery, outcome: Outcome, settlement: Settlement) -> None:
        calls.setdefault(delivery.event.id, []).append(settlement)

    async with Bus(f"memory://{secrets.token_hex(4)}", source="wms-api", sender=sender, observe=observe) as bus:
        async with bus.serving(service):
            await bus.publish_many(events)
            async with asyncio.timeout(60):
                while len(calls) < len(events) or await bus.dead_letters(service).count() < parked:
                    await asyncio.sleep(0.01)
        letters = {letter.id: letter async for letter in bus.dead_letters(service).all()}
    return Ran(calls, letters)


# --- every status --------------------------------------------------------------------------------------------------


def by_status(server: Server) -> Play:
    """Answers with the status that the event asks for; an interim one is followed by silence."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = server.requests[-1][2]
        status = json.loads(body)["status"]
        if status < 200 or status in (204, 304):
            await says(b"HTTP/1.1 %d X\r\n\r\n" % status)(reader, writer)
        else:
            await says(answer(status, b"no thanks", b"content-type: text/plain\r\n"))(reader, writer)
        if status < 200:
            await reader.read()

    return play


async def test_every_status_from_100_to_599(server: Server, kind: str) -> None:
    """2xx is done, 425 waits at no cost, the rest is called twice and parked with its status; 1xx is no answer."""
    server.play = by_status(server)
    events = [Event("s", {"status": status}, id=str(status)) for status in range(100, 600)]
    async with a_sender(kind) as sender:
        # Interim answers end by their timeout alone; all the others have as long as a busy machine takes.
        interim = await run(sender, server.url, events[:100], timeout=0.5, parked=100)
        ran = await run(sender, server.url, events[100:], timeout=30.0, parked=299)
    calls_of, letters = interim.calls | ran.calls, interim.letters | ran.letters
    for status in range(100, 600):
        calls, letter = calls_of[str(status)], letters.get(str(status))
        if 200 <= status <= 299:
            assert (calls, letter) == ([ACK], None)
        elif status == 425:
            assert letter is None
            assert {type(call) for call in calls} == {Requeue}
        else:
            assert letter is not None
            assert [type(call) for call in calls] == [Retry, Park]
            assert (letter.reason, letter.retries) == ("max-retries", 1)
            assert [attempt.number for attempt in letter.attempts] == [1, 2]
            if status < 200 and status != 101:
                late = "SendFailed: timeout: no complete answer within 0.5 s"
                assert (letter.status, letter.error) == (None, late)
            else:
                assert letter.status == status or (status == 101 and letter.status is None)
                assert letter.error
                if status not in (101, 304):
                    assert letter.error == f"{status}: no thanks"


# --- every way not to answer ---------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
HINT = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
BROKEN = ("protocol: ", "reset: ")
BOMB = gzip.compress(b"\x00" * 50_000_000)


def gigabyte() -> Play:
    """A billion bytes, as fast as they are taken."""
    return repeats(HEAD + b"content-length: 1000000000\r\n\r\n", b"x" * 65536, 0)


@dataclass(frozen=True)
class Case:
    """What an endpoint does, and what `x-final-error` begins with; none of them is an answer."""

    name: str
    play: Play
    error: tuple[str, ...]
    timeout: float = 5.0


FAILURES = (
    Case("closed", says(b"", then_close=True), ("reset: ",)),
    Case("reset", resets(), ("reset: ",)),
    Case("reset in headers", resets(HEAD + b"content-le"), ("reset: ",)),
    Case("reset in body", resets(HEAD + b"content-length: 100\r\n\r\nhalf"), ("reset: ",)),
    Case("content length too long", says(HEAD + b"content-length: 9\r\n\r\nhalf", then_close=True), ("reset: ",)),
    Case("short chunk", says(HEAD + b"transfer-encoding: chunked\r\n\r\nff\r\nha", then_close=True), ("reset: ",)),
    Case("no answer", goes_silent(), ("timeout: ",), 0.3),
    Case("timeout in headers", goes_silent(HEAD + b"content-"), ("timeout: ",), 0.3),
    Case("timeout after headers", goes_silent(HEAD + b"content-length: 100\r\n\r\n"), ("timeout: ",), 0.3),
    Case("endless slow body", repeats(HEAD + b"content-length: 60000\r\n\r\n", b"x", 0.01), ("timeout: ",), 0.3),
    Case("endless slow headers", repeats(HEAD, b"x-a: b\r\n", 0.01), ("timeout: ",), 0.3),
    Case("garbage", says(b"\x16\x03\x01\x02" * 200, then_close=True), BROKEN),
    Case("another protocol", says(b"SSH-2.0-OpenSSH_9.2\r\n", then_close=True), BROKEN),
    Case("two lengths", says(HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab"), BROKEN),
    Case("bad length", says(HEAD + b"content-length: many\r\n\r\n", then_close=True), BROKEN),
    Case(
        "bad chunk",
        says(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", then_close=True),
        ("protocol: ", "reset: "),
    ),
    Case("one long header", repeats(HEAD + b"x-long: ", b"x" * 65536, 0), ("protocol: ",)),
    Case("many headers", repeats(HEAD, b"x-many: 1\r\n" * 1000, 0), ("protocol: ",)),
)
# aiohttp and httpx go on reading interim answers until the time is up; bounded in time is good enough.
FLOOD = Case("interim flood", repeats(b"", HINT, 0.0), ("protocol: ", "timeout: "), 0.5)


@pytest.mark.parametrize("case", [*FAILURES, FLOOD], ids=lambda case: case.name)
async def test_what_is_no_answer_is_tried_again_and_parked_with_its_reason(
    server: Server, kind: str, case: Case
) -> None:
    """Two calls, then a dead letter that says what was wrong with the endpoint; the connection is closed."""
    server.play = case.play
    async with a_sender(kind) as sender:
        ran = await run(sender, server.url, [Event("t", {}, id="1")], timeout=case.timeout, parked=1)
        await server.idle()
    assert [type(call) for call in ran.calls["1"]] == [Retry, Park]
    assert len(server.requests) == 2
    letter = ran.letters["1"]
    assert (letter.reason, letter.retries, letter.status) == ("max-retries", 1, None)
    assert letter.error.startswith(tuple(f"SendFailed: {error}" for error in case.error))
    assert letter.error_type == "SendFailed"


async def test_nobody_listening_is_tried_again_and_parked(kind: str) -> None:
    """The same for a refused connection, and for TLS that is none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # taken, and not listening
        refused = f"http://127.0.0.1:{probe.getsockname()[1]}/"
        async with a_sender(kind) as sender:
            ran = await run(sender, refused, [Event("t", {}, id="1")], timeout=5.0, parked=1)
    assert ran.letters["1"].error.startswith("SendFailed: refused: ")

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer(400, b"this is not TLS"))
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as listener, a_sender(kind) as sender:
        url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        ran = await run(sender, url, [Event("t", {}, id="1")], timeout=5.0, parked=1)
    assert ran.letters["1"].error.startswith("SendFailed: tls: ")


ANSWERS = (
    Case("a gigabyte", gigabyte(), ()),
    Case("gzip bomb", says(answer(200, BOMB, b"content-encoding: gzip\r\n")), ()),
    Case(
        "chunked bomb",
        repeats(CHUNKED, b"1000\r\n" + b"x" * 4096 + b"\r\n", 0),
        (),
    ),
    Case("until closed", says(HEAD + b"\r\nok", then_close=True), ()),
    Case("interim first", says(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\n\r\n" + answer(200)), ()),
)


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: case.name)
async def test_an_odd_answer_is_an_answer(server: Server, kind: str, case: Case) -> None:
    """However long or packed its body is, the status stands, and not more than 64 KiB of it are held."""
    server.play = case.play
    async with a_sender(kind) as sender:
        ran = await run(sender, server.url, [Event("t", {}, id="1")], timeout=5.0, parked=0)
        assert ran.calls["1"] == [ACK]
        if case.name in ("a gigabyte", "chunked bomb"):
            await server.idle()


@pytest.mark.parametrize(
    "junk",
    [b"junk", answer(500, b"not yours"), b"HTTP/1.1 500 X\r\n", b"\r\n\r\n\r\n", b"\x00" * 100],
    ids=["text", "an answer", "half an answer", "line breaks", "zeros"],
)
async def test_what_follows_an_answer_is_never_the_next_answer(server: Server, kind: str, junk: bytes) -> None:
    """Neither in the same packet nor after it: each request gets the answer to itself."""
    if kind == "httpx":
        pytest.skip("httpx takes a second answer in the packet of the first for the answer to the next request")
    asked = 0

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(answer(200, b"%d" % asked) + junk)
        await writer.drain()

    server.play = play
    async with a_sender(kind) as sender:
        for _ in range(20):
            before = asked
            try:
                found = await sender.post(server.url, [], b"", timeout=5)
            except SendFailed:
                continue  # a connection that broke is safe too
            assert found.status == 200
            assert int(found.body) > before
            await asyncio.sleep(0)


# --- secrets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auth", [Auth.bearer("hunter2-t0ken"), Auth.basic("bob", "hunter2-pass")], ids=repr)
async def test_an_endpoint_that_tells_everything_tells_no_secret(
    server: Server, auth: Auth, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers with the whole request; neither logs nor the dead letter hold a credential of ours."""

    async def tells(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, headers, _ = server.requests[-1]
        text = "\n".join([line, *(f"{name}: {value}" for name, value in headers)]).encode()
        await says(answer(400, text, b"content-type: text/plain\r\n"))(reader, writer)

    server.play = tells
    service = Service("wms-cincout", retry=RetryPolicy(max_retries=1, delay=0.02))
    url = f"{server.url}&token=hunter2-query"
    service.forward("#", to=url, auth=auth, sign="whsec_aHVudGVyMi1zaWdu", breaker=Breaker(failures=1))
    with caplog.at_level("DEBUG"):
        async with Bus(f"memory://{secrets.token_hex(4)}", source="wms-api") as bus, bus.serving(service):
            await bus.publish("t", {}, id="1")
            async with asyncio.timeout(10):
                while not await bus.dead_letters(service).count():
                    await asyncio.sleep(0.01)
            (letter,) = [letter async for letter in bus.dead_letters(service).all()]
            state = repr((await bus.stats(service)).endpoints)
    assert "POST /events?a=b&token=***" in letter.error
    everything = (
        f"{letter.model_dump_json()} {state} {service.routes} {caplog.text} {[vars(r) for r in caplog.records]}"
    )
    for secret in ("hunter2", "aHVudGVyMi1zaWdu", base64.b64encode(b"bob:hunter2-pass").decode()):
        assert secret not in everything


# --- nothing is left behind ----------------------------------------------------------------------------------------


async def test_no_connection_is_left_after_thousands_of_bad_answers(server: Server, kind: str) -> None:
    """Good and bad endpoints in turn, some requests cancelled: in the end as many sockets as in the beginning."""
    requests = {"lean": 10_000, "aiohttp": 3_000, "httpx": 400}[kind]
    plays = [case.play for case in FAILURES if case.timeout > 1.0]
    plays += [case.play for case in ANSWERS if case.name not in ("gzip bomb", "a gigabyte", "chunked bomb")]
    plays += [says(answer(200, b"ok"))] * 5 + [says(answer(500, b"x" * 70_000))]
    slow = [case.play for case in FAILURES if case.timeout < 1.0]
    turn = 0

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal turn
        turn += 1
        await (slow[turn // 50 % len(slow)] if turn % 50 == 0 else plays[turn % len(plays)])(reader, writer)

    server.play = play
    gc.collect()
    sockets = open_sockets()
    ends: dict[str, int] = {}
    async with a_sender(kind, max_connections=64) as sender:

        async def worker(number: int) -> None:
            for count in range(requests // 64):
                try:
                    if (number + count) % 40 == 0:
                        async with asyncio.timeout(0.002 * (count % 5)):
                            await sender.post(server.url, [], b"body", timeout=2.0)
                    else:
                        await sender.post(server.url, [], b"body", timeout=0.2)
                    end = "answer"
                except SendFailed as error:
                    end = error.kind
                except TimeoutError:
                    end = "called off"
                ends[end] = ends.get(end, 0) + 1

        await asyncio.gather(*(worker(number) for number in range(64)))
        assert min(ends[end] for end in ("answer", "reset", "timeout", "protocol", "called off")) > 0
        assert server.open_connections <= 64
    await server.idle()
    async with asyncio.timeout(5):
        while open_sockets() > sockets:  # a connection that was called off while it was made ends with the next turn
            gc.collect()
            await asyncio.sleep(0.01)
