"""HTTP/1.1 for one address, `POST /events`: an asyncio protocol on httptools, bounded in every direction.

No task and no timer per request: a request is parsed where it arrives, waits for the broker as a callback, and one
sweep a second looks for connections that take too long. Answers go out in the order of the requests.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final, cast

from eventbus import telemetry
from eventbus.errors import ConfigError
from eventbus.event import Event
from eventbus.ingest.answers import of_refusal
from eventbus.ingest.exchange import Exchange, Office
from eventbus.ingest.requests import Refused, head_of, read

try:
    import httptools
except ImportError as missing:
    raise ConfigError("listening for events needs httptools: pip install 'eventbus-core[http]'") from missing

PATH: Final = "/events"
MAX_BODY: Final = 16 * 1024 * 1024
MAX_HEAD: Final = 64 * 1024
MAX_PIPELINED: Final = 32
IN_A_THREAD: Final = 256 * 1024
"""Bodies above this are decoded in a thread, so that the others need not wait for them."""

# Seconds. A head has to be here within HEAD, from the connection's beginning or its own, and a body within READING,
# however slowly their bytes drip.
HEAD: Final = 10.0
READING: Final = 30.0
KEEP_ALIVE: Final = 75.0
LINGER: Final = 2.0
_NEVER: Final = float("inf")

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_UPGRADING: Final = (b"connection", b"upgrade", b"http2-settings")
_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._ended = False  # no further request is read: refused, said to be the last, or the client is done
        self._linger = False
        self._choked = False
        self._eof = False
        self._read_requests = 0
        self._paused = False
        self.deadline = self._loop.time() + HEAD
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._lines: list[tuple[bytes, bytes]] = []
        self._head: dict[str, str] = {}
        self._head_bytes = 0
        self._reading = False
        self._head_done = False
        self._body: bytes | bytearray = b""
        self._size = 0  # what is held in memory for this request

    # --- the transport's side --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._transport = cast("asyncio.Transport", transport)
        if not self._office.opened(self):
            self._refuse(Refused(503, "too many connections; keep one open and use it again, or come back later"))

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone; what it has sent is published all the same."""
        self._transport = None
        self._ended = True
        self._drop()
        self._exchanges.clear()  # each gives back its memory when it is answered
        self._office.closed(self)

    def eof_received(self) -> bool:
        """The client sends no more; it may still wait for its answers."""
        self._ended = self._eof = True
        return bool(self._exchanges)

    def pause_writing(self) -> None:
        """The client does not read its answers: it is not read either."""
        self._choked = True
        self.deadline = self._loop.time() + READING
        self._throttle()

    def resume_writing(self) -> None:
        """It reads again."""
        self._choked = False
        self._rest()
        self._throttle()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests: a piece of one, or several."""
        if self._ended:
            return
        read = self._read_requests
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(Refused(400, f"this is no HTTP/1.1 request: {error}"))
        if self._reading and not self._head_done and not self._ended:
            # Not counted: the beginning of a head that came with the end of the request before it; one piece at most.
            self._head_bytes += len(data) if read == self._read_requests else 0
            if self._head_bytes > MAX_HEAD:
                self._refuse(Refused(431, f"the headers take more than {MAX_HEAD} bytes; put the rest into the data"))
        self._throttle()

    def _without_upgrade(self, rest: bytes) -> None:
        """Go on as if no upgrade was asked for: httptools stops at the head then, and Java's client always asks."""
        if self._ended:
            return
        head = [self._parser.get_method(), b" ", self._url, b" HTTP/1.1\r\n"]
        for name, value in self._lines:
            if name.lower() not in _UPGRADING:
                head += (name, b": ", value, b"\r\n")
        self._begin()
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join((*head, b"\r\n", rest)))

    # --- the parser's side -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self._ended:
            self._begin()
            self._reading = True
            self.deadline = self._loop.time() + HEAD

    def on_url(self, url: bytes) -> None:
        """Its path, or a piece of it."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; those after the body (trailers) are not read."""
        if not self._head_done:
            self._lines.append((name, value))

    def on_headers_complete(self) -> None:
        """Everything but the body is here: what can be refused is refused before the body comes."""
        self._head_done = True
        if self._ended or self._upgrades():
            return
        try:
            self._head = head_of(self._lines)
            self._admit()
            self._hold(sum(len(name) + len(value) for name, value in self._lines))
        except Refused as refused:
            self._refuse(refused)
            return
        self.deadline = self._loop.time() + READING
        if "expect" in self._head and not self._exchanges:
            self._write(_CONTINUE)

    def _admit(self) -> None:
        path = self._url.partition(b"?")[0].decode("latin-1")
        if "host" not in self._head and self._parser.get_http_version() == "1.1":
            raise Refused(400, "a request says whom it is for: add a host header")
        if path != PATH:
            raise Refused(404, f"there is nothing at {path[:100]!r}; events are sent by POST {PATH}")
        if self._parser.get_method() != b"POST":
            raise Refused(405, f"events are sent by POST {PATH}")
        if self._office.token:
            scheme, _, token = self._head.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._office.token):
                raise Refused(401, "send the token of this bus: 'authorization: Bearer ...'")
        elif "origin" in self._head:  # of a browser, on behalf of a web page that may be anybody's
            raise Refused(403, "a web page may publish only where a token is asked for; set one")
        if self._head.get("expect", "100-continue").lower() != "100-continue":
            raise Refused(417, f"expect {self._head['expect']!r} is not known; leave it away")
        length = self._head.get("content-length", "0")
        if len(length) > 15 or int(length) > MAX_BODY:
            raise Refused(413, f"{length} bytes in one request; at most {MAX_BODY} are taken")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._ended:
            return
        try:
            if len(self._body) + len(data) > MAX_BODY:
                raise Refused(413, f"more than {MAX_BODY} bytes in one request; send less")
            self._hold(len(data))
        except Refused as refused:
            self._refuse(refused)
            return
        if not self._body:
            self._body = data
            return
        if not isinstance(self._body, bytearray):  # and not a list: pieces of one byte each would take 30 times as much
            self._body = bytearray(self._body)
        self._body += data

    def on_message_complete(self) -> None:
        """The request is here."""
        if self._ended or self._upgrades():
            return
        self._reading = False
        body, size = self._body, self._size
        self._body, self._size = b"", 0
        exchange = Exchange(self, size, keep_alive=self._parser.should_keep_alive())
        self._ended = not exchange.keep_alive
        self._exchanges.append(exchange)
        self._read_requests += 1
        self._rest()
        if len(body) <= IN_A_THREAD:
            self._take(exchange, self._read(self._head, bytes(body)))
        else:
            reading = self._loop.run_in_executor(None, self._read, self._head, bytes(body))
            reading.add_done_callback(lambda found: self._take(exchange, found.result()))

    def _read(self, head: dict[str, str], body: bytes) -> tuple[Sequence[Event], bool] | Refused:
        try:
            events, batched = read(head, body)
            self._office.check(events)
        except Refused as refused:
            return refused
        except Exception as error:  # noqa: BLE001 - a bug of ours must not leave a publisher without an answer
            telemetry.log(logging.ERROR, "request_failed", {"error": repr(error)}, exc_info=error)
            return Refused(500, "the request could not be read, by a fault of this bus; nothing of it is taken")
        return events, batched

    def _take(self, exchange: Exchange, found: tuple[Sequence[Event], bool] | Refused) -> None:
        if isinstance(found, Refused):
            exchange.finish(of_refusal(found))
            return
        exchange.events, exchange.batched = found
        if exchange.events:
            self._office.publish(exchange.events, exchange.size, exchange)
        else:
            exchange.published(())

    # --- answering -------------------------------------------------------------------------------------------

    def finished(self, exchange: Exchange) -> None:
        """There is an answer: send those that are next in turn."""
        self._office.let_go(exchange.size)
        while self._exchanges and self._exchanges[0].answer is not None:
            self._answer(self._exchanges.popleft())
        self._rest()
        self._throttle()

    def _answer(self, exchange: Exchange) -> None:
        answer = exchange.answer
        assert answer is not None
        last = not exchange.keep_alive or (self._office.stopping and not self._exchanges and not self._reading)
        lines = [_LINES[answer.status], self._office.date(), b"content-type: application/json\r\n"]
        lines += [f"{name}: {value}\r\n".encode() for name, value in answer.headers]
        if last:
            lines.append(b"connection: close\r\n")
        lines.append(b"content-length: %d\r\n\r\n" % len(answer.body))
        if not exchange.bodyless:
            lines.append(answer.body)
        self._office.count(answer.status)
        self._write(b"".join(lines))
        if last:
            self._leave()

    def _refuse(self, refused: Refused) -> None:
        """Answer before the request was read to its end; what still comes of it is thrown away."""
        self._ended = True
        self._reading = False
        self._drop()
        bodyless = self._head_done and self._parser.get_method() == b"HEAD"
        exchange = Exchange(self, 0, keep_alive=False, bodyless=bodyless)
        self._exchanges.append(exchange)
        exchange.finish(of_refusal(refused))

    def _leave(self) -> None:
        """Close; but not at once, while the client may still be sending: it would lose the answer to a reset."""
        self._ended = True
        if self._transport is not None:
            self._linger = True
            self.deadline = self._loop.time() + LINGER
            if not self._eof and self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()

    def wind_up(self) -> None:
        """Let go of a client that is not in the middle of something."""
        if self.idle:
            self._leave()

    @property
    def idle(self) -> bool:
        """Whether nothing is going on: no request, no answer."""
        return not (self._exchanges or self._reading or self._linger)

    def expire(self) -> None:
        """The deadline is over."""
        if self._transport is None:
            return
        if self._reading and not self._linger and not self._choked and not self._exchanges:
            within = READING if self._head_done else HEAD
            self._refuse(Refused(408, f"it was not here within {within:g} s; send it faster, or less of it"))
        else:
            self._transport.abort()

    # --- inside ----------------------------------------------------------------------------------------------

    def _upgrades(self) -> bool:
        """Whether httptools stops here for another protocol; see `_without_upgrade`."""
        if self._parser.get_method() == b"CONNECT":
            self._refuse(Refused(405, "this is no proxy; events are sent by POST /events"))
        return bool(self._parser.should_upgrade())

    def _hold(self, size: int) -> None:
        if not self._office.hold(size):
            raise Refused(503, "too much is being published at once; send it again later")
        self._size += size

    def _drop(self) -> None:
        """Forget the request that is being read."""
        self._office.let_go(self._size)
        self._body, self._size = b"", 0

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _rest(self) -> None:
        """Set the deadline that fits what the connection is doing now."""
        if self._linger or self._reading or self._choked:
            return
        if self._exchanges:
            self.deadline = _NEVER  # it waits for us
        elif self._ended:  # the client has sent all it wanted, and has its answers
            self._leave()
        else:
            self.deadline = self._loop.time() + KEEP_ALIVE

    def _throttle(self) -> None:
        full = self._choked or len(self._exchanges) >= MAX_PIPELINED
        if full is self._paused or self._transport is None or self._transport.is_closing() or self._eof:
            return
        self._paused = full
        if full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
