"""`eventbus publish TYPE [JSON | - | @file]`: one event, or many with --lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, BinaryIO, Final

from cyclopts import Parameter

from eventbus.bus import Bus
from eventbus.cli.connection import NOT_GIVEN, Connection, find
from eventbus.cli.exits import DONE, FAILED, USAGE, UsageError
from eventbus.cli.interrupts import hard_exit, start, stop_signals, unless_stopped
from eventbus.cli.output import clean, complain, note, progress, say, say_json
from eventbus.durations import seconds
from eventbus.errors import PublishError, Undecodable
from eventbus.event import JSON, Event, from_json
from eventbus.redaction import redact_url

CHUNK: Final = 500
_STDIN: Final = "@-"

Flag = Annotated[bool, Parameter(negative=())]


def publish(
    type: str,
    data: str | None = None,
    *,
    key: str | None = None,
    tenant: str | None = None,
    id: str | None = None,
    correlation_id: str | None = None,
    header: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)] = None,
    process_after: str | None = None,
    ttl: str | None = None,
    lines: Flag = False,
    source: str | None = None,
    prefix: str | None = None,
    connection: Connection = NOT_GIVEN,
    json: Flag = False,
) -> int:
    """Publish one event, or many with --lines.

    Parameters
    ----------
    type
        The event's type, such as order.created.
    data
        JSON, or - for standard input, or @file.
    key
        The event's key: what belongs together.
    tenant
        Whose event it is.
    id
        The event's id; made where none is given.
    correlation_id
        What it belongs to.
    header
        A header as name=value; may be given more than once.
    process_after
        Not before: a duration such as 2h, or a time such as 2026-01-31T08:00.
    ttl
        Not after: a duration such as 1d.
    lines
        Every line of the file or of standard input is the JSON data of one event.
    source
        Who publishes, such as wms-api; its prefix says to whom.
    prefix
        To whom: all services of this prefix.
    connection
        Which bus.
    json
        Print the result as JSON.
    """
    if lines and id is not None:
        raise UsageError("--id goes with one event; --lines makes an id for each")
    if lines and data is None:
        if Path(type).is_file():
            raise UsageError(f"{type!r} is a file, not a type: eventbus publish TYPE @{type} --lines")
        data = _STDIN
    if lines and data is not None and not data.startswith("@"):
        raise UsageError("--lines reads a file or standard input: eventbus publish TYPE @file --lines")
    attributes: dict[str, object] = {
        "key": key,
        "tenant": tenant,
        "id": id,
        "correlation_id": correlation_id,
        "headers": _headers(header or []),
        "process_after": _moment(process_after),
        "ttl": None if ttl is None else timedelta(seconds=seconds(ttl)),
    }
    bus = find(connection).bus(source=source, prefix=prefix)
    if not lines:
        return start(_publish_one(bus, _event(type, _read(data), attributes), json))
    with _opened(data or _STDIN) as file:
        return start(_publish_lines(bus, file, type, attributes, json))


async def _publish_one(bus: Bus, event: Event, as_json: bool) -> int:
    async with bus:
        [result] = await bus.publish_many([event])
    if as_json:
        say_json({"id": event.id, "prefix": bus.prefix, "status": result.status, "subscribed": result.subscribed})
    else:
        say(f"published {clean(event.type)} {clean(event.id)} to {bus.prefix}")
    if result.subscribed is False:
        _tell_nobody(bus)
    return DONE


async def _publish_lines(bus: Bus, file: BinaryIO, type: str, attributes: dict[str, object], as_json: bool) -> int:
    lines = _Lines(file, type, attributes)
    stored, nobody, failure = 0, 0, ""
    async with bus:
        with stop_signals() as stopped, progress(f"publishing {type}", None, quiet=as_json) as tell:
            while not (stopped.is_set() or lines.ended or failure):
                # In a thread: a pipe may keep us waiting, and Ctrl-C must still be heard.
                events = await unless_stopped(stopped, lines.read)
                try:
                    results = await bus.publish_many(events or [])
                except PublishError as error:
                    results, failure = error.results, str(error)
                stored += sum(result.status == "stored" for result in results)
                nobody += sum(result.subscribed is False for result in results)
                tell(stored)
    if as_json:
        say_json({"published": stored, "prefix": bus.prefix, "unsubscribed": nobody})
    else:
        say(f"published {stored} {clean(type)} to {bus.prefix}")
    if nobody:
        _tell_nobody(bus)
    if lines.problem and not failure:
        complain(f"{lines.problem}; {stored} were published")
        return USAGE
    if failure or not lines.ended:
        complain(f"{failure or 'stopped'}; {stored} were published")
        if not lines.ended:
            hard_exit(FAILED)  # the thread may still wait for standard input
        return FAILED
    return DONE


class _Lines:
    """Events out of lines, as they come in; ends at the end of the file, or at the first line that is none."""

    def __init__(self, file: BinaryIO, type: str, attributes: dict[str, object]) -> None:
        self._file, self._type, self._attributes = file, type, attributes
        self._number, self._rest = 0, b""
        self._waiting: list[bytes] = []
        self.ended = False
        self.problem = ""

    def read(self) -> list[Event]:
        """The next events: not more than CHUNK, and not fewer than are there already."""
        if not self._waiting:
            piece = self._file.read1(1 << 16)  # type: ignore[attr-defined]
            *self._waiting, self._rest = (self._rest + piece).split(b"\n")
            if not piece:
                self._waiting, self._rest = [self._rest], b""
                self.ended = True
        now, self._waiting = self._waiting[:CHUNK], self._waiting[CHUNK:]
        events = []
        for line in now:
            self._number += 1
            if not line.strip():
                continue
            try:
                events.append(_event(self._type, line.strip(), self._attributes))
            except UsageError as error:
                self.problem, self.ended = f"line {self._number}: {error}", True
                break
        return events


def _tell_nobody(bus: Bus) -> None:
    note(
        f"note: nobody gets it: no service is subscribed under the prefix {bus.prefix!r} on {redact_url(bus.url)}; "
        f"start one with `eventbus run`, or choose another prefix with --prefix NAME or --source NAME-..."
    )


def _event(type: str, body: bytes, attributes: dict[str, object]) -> Event:
    if not body:
        return Event(type, **attributes)  # type: ignore[arg-type]
    try:
        from_json(body)
    except Undecodable as error:
        hint = "; a text is written with quotes: '\"text\"'" if not body.startswith((b"{", b"[")) else ""
        raise UsageError(f"{str(error).replace('the body', 'the data')}{hint}") from None
    # The bytes as they are, and not a second rendering of them.
    return Event(type, body, content_type=JSON, **attributes)  # type: ignore[arg-type]


def _read(data: str | None) -> bytes:
    if data is None:
        return b""
    if not data.startswith("@"):
        return data.encode("utf-8", "surrogateescape").strip()
    with _opened(data) as file:
        return file.read().strip()


@contextmanager
def _opened(data: str) -> Iterator[BinaryIO]:
    if data == _STDIN:
        yield sys.stdin.buffer
        return
    try:
        file = open(data[1:], "rb")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"{data[1:]}: cannot be read: {error.strerror}") from None
    with file:
        yield file


def _headers(given: list[str]) -> dict[str, object]:
    headers: dict[str, object] = {}
    for entry in given:
        name, sign, value = entry.partition("=")
        if not sign or not name:
            raise UsageError(f"--header {entry!r}: write name=value")
        headers[name] = value
    return headers


def _moment(text: str | None) -> datetime | timedelta | None:
    if text is None:
        return None
    if "-" in text:
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(f"--process-after {text!r}: write a duration such as 2h, or 2026-01-31T08:00") from None
    return timedelta(seconds=seconds(text))
