"""One connection of the lean sender: a request is written, its answer is read by llhttp within strict limits."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from typing import Final, cast

import httptools

from eventbus.forward.port import MAX_ANSWER_BYTES, Answer, SendFailed

MAX_HEAD_BYTES: Final = 64 * 1024
"""Header lines of one answer; common servers send less than one KiB."""
MAX_INTERIM: Final = 16
"""1xx answers before the real one."""
# A body in chunks of one byte is six times its size; what is larger than that is all frame and no picture.
_MAX_WIRE_BYTES: Final = MAX_HEAD_BYTES + 8 * MAX_ANSWER_BYTES


class Connection(asyncio.Protocol):
    """Carries one request at a time. `closed` is called once, when it is gone.

    A request ends in an Answer or in SendFailed; `silent` then says that not one byte of an answer had come, and
    `reusable` that another request may follow.
    """

    def __init__(self, closed: Callable[[Connection], None]) -> None:
        self.kept = False
        """Whether an answer has come by it before: its peer may have closed it while nobody looked."""
        self.silent = True
        self.reusable = False
        self.gone = False
        self.idle_since = 0.0
        self.expires = 0.0
        self.deadline = math.inf
        """When the request under way must be answered; its pool watches the deadlines of all."""
        self._timeout = 0.0
        self._closed = closed
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        # The answer that is being read:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = 0  # of the body
        self._head = 0  # of the headers
        self._wire = 0  # of everything
        self._interim = 0  # 1xx answers before it
        self._headers_done = False
        self._until_close = True  # its length is not told
        self._complete = False
        self._keep = False
        self._trailing = False  # something follows it that is not ours

    async def exchange(self, request: bytes, body: bytes, deadline: float, timeout: float) -> Answer:
        """Send a request and read its answer; whoever calls sees to `expire` at the deadline. Raises SendFailed."""
        transport = self._transport
        assert transport is not None
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self.silent, self.reusable, self._wire, self._interim = True, False, 0, 0
        self.deadline, self._timeout = deadline, timeout
        transport.write(request)
        if body:
            transport.write(body)
        try:
            return await answer
        except asyncio.CancelledError:
            self.reusable = False
            self.abort()
            raise
        finally:
            self.deadline = math.inf
            self._answer = None

    @property
    def closing(self) -> bool:
        """Whether its end has begun, by either side."""
        return self._transport is None or self._transport.is_closing()

    def abort(self) -> None:
        """Close at once; nothing more is read nor written."""
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """The deadline is over."""
        if self._answer is not None and not self._answer.done():
            self.silent = False  # there was time enough; this is no connection that was found closed
            self._fail("timeout", f"no complete answer within {self._timeout:g} s")

    # --- asyncio.Protocol ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses of asyncio's

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer; or of something nobody asked for."""
        answer = self._answer
        if answer is None or answer.done():
            # Nobody asked: whatever it is, the next request must not take it for its answer.
            self.reusable = False
            self.abort()
            return
        self.silent = False
        self._wire += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._fail("protocol", f"the answer is not HTTP: {error}")
                return
            self._trailing = True  # the answer stands; what follows it is not for us
        if self._head > MAX_HEAD_BYTES or (not self._headers_done and self._wire > MAX_HEAD_BYTES):
            self._fail("protocol", f"the answer has more than {MAX_HEAD_BYTES // 1024} KiB of headers")
        elif self._interim > MAX_INTERIM:
            self._fail("protocol", f"more than {MAX_INTERIM} interim answers (1xx) and none that counts")
        elif self._complete:
            self._finish()
        elif self._headers_done and (self._size >= MAX_ANSWER_BYTES or self._wire > _MAX_WIRE_BYTES):
            # The rest is not worth reading: a new connection is cheaper than an unknown number of bytes.
            self._keep = False
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed, by whichever side."""
        self.gone = True
        self._closed(self)
        answer = self._answer
        if answer is None or answer.done():
            return
        if error is None and self._headers_done and self._until_close:
            self._keep = False
            self._finish()
        elif isinstance(error, ssl.SSLError):
            self._fail("tls", str(error))
        elif self.silent:
            self._fail("reset", f"the connection was closed before an answer{_why(error)}")
        else:
            self._fail("reset", f"the answer broke off{_why(error)}")

    # --- llhttp ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins, or something after it."""
        if self._complete:
            self._trailing = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        self._head += len(name) + len(value) + 4
        if self._headers_done:  # those of a trailer, or of junk after the answer, say nothing
            return
        said, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers.setdefault(said, text)
        if said == "content-length" or (said == "transfer-encoding" and "chunked" in text):
            self._until_close = False

    def on_headers_complete(self) -> None:
        """The empty line after the headers."""
        if self._complete:
            return
        self._headers_done = True
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._size < MAX_ANSWER_BYTES and not self._complete:
            self._body.append(data)
            self._size += len(data)

    def on_message_complete(self) -> None:
        """An answer is complete: the one that counts, or an interim one (1xx)."""
        if self._complete:
            return
        if 100 <= self._status <= 199 and self._status != 101:
            interim, head = self._interim + 1, self._head
            self._clear()
            self._interim, self._head = interim, head
            return
        self._complete = True
        self._keep = bool(self._parser.should_keep_alive())

    # --- inside ----------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._status = self._size = self._head = self._wire = self._interim = 0
        self._headers, self._body = {}, []
        self._until_close = True
        self._headers_done = self._complete = self._keep = self._trailing = False

    def _finish(self) -> None:
        assert self._answer is not None
        assert self._transport is not None
        answer = Answer(self._status, self._headers, b"".join(self._body)[:MAX_ANSWER_BYTES])
        # An endpoint that answers before it has read the request will not read a second one in its right place.
        unread = self._transport.get_write_buffer_size() > 0
        self.reusable = self._keep and not self._trailing and not unread and not self.gone
        self.kept = True
        self._clear()
        self._answer.set_result(answer)
        if not self.reusable:
            self.abort()

    def _fail(self, kind: str, text: str) -> None:
        assert self._answer is not None
        self._answer.set_exception(SendFailed(kind, text))  # type: ignore[arg-type]
        self.abort()


def _why(error: Exception | None) -> str:
    return f": {error}" if error is not None and str(error) else ""
