"""`eventbus dlq redrive / edit / purge / import`: Ctrl-C stops between two pieces and says what was done."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Literal, TypeAlias

from cyclopts import Parameter

from eventbus.canary import Canary
from eventbus.cli.connection import ANYWHERE, AnyConnection
from eventbus.cli.dlq_options import (
    ALL,
    AsJson,
    Chosen,
    DryRun,
    Service,
    letters_of,
    new_file,
)
from eventbus.cli.exits import DONE, FAILED, Failure, UsageError
from eventbus.cli.interrupts import start, stop_signals
from eventbus.cli.output import complain, note, progress, say, say_json
from eventbus.durations import seconds
from eventbus.parking import DeadLetters, Progress, Report

Work: TypeAlias = Callable[[asyncio.Event, Progress], Awaitable[Report]]


def redrive(
    service: Service,
    *,
    chosen: Chosen = ALL,
    rate: Annotated[float | None, Parameter(help="At most so many per second.")] = None,
    canary: Annotated[
        int | None, Parameter(help="Put so many back first, and go on only if they are not parked again.")
    ] = None,
    watch: Annotated[str, Parameter(help="How long to watch the canary at most.")] = "30s",
    tolerate: Annotated[float, Parameter(help="The share of the canary that may be parked again.")] = 0.1,
    reset_attempts: Annotated[bool, Parameter(negative=(), help="Count the retries from zero again.")] = False,
    via: Annotated[
        Literal["queue", "retry"], Parameter(help="Straight to the service's queue, or by its retry road.")
    ] = "queue",
    delay: Annotated[str, Parameter(help="With --via retry: how long they wait there.")] = "5s",
    dry_run: DryRun = False,
    connection: AnyConnection = ANYWHERE,
    json: AsJson = False,
) -> int:
    """Put letters back to this one service, oldest first. Published and confirmed before it is removed here."""
    if rate is not None and not rate > 0:
        raise UsageError(f"--rate {rate:g}: must be above 0")
    first = None if canary is None else Canary(canary, seconds(watch), tolerate)
    wait = seconds(delay)

    async def work() -> int:
        async with letters_of(service, connection) as letters:
            total = await _total(letters, chosen)

            def move(stop: asyncio.Event, tell: Progress) -> Awaitable[Report]:
                return letters.redrive(
                    chosen.ids,
                    where=chosen.filter,
                    limit=chosen.limit,
                    dry_run=dry_run,
                    rate=rate,
                    canary=first,
                    reset_attempts=reset_attempts,
                    via=via,
                    delay=wait,
                    by="cli",
                    stop=stop,
                    progress=tell,
                )

            report = await _watched("re-driving", total, move, quiet=json or dry_run)
        return _tell(report, "re-driven", "would be re-driven", as_json=json)

    return start(work())


def edit(
    service: Service,
    id: Annotated[str, Parameter(help="The event's id.")],
    *,
    body: Annotated[
        str | None, Parameter(help="The new body, or @file, or @- for standard input; without it $EDITOR is opened.")
    ] = None,
    address: Annotated[str | None, Parameter(help="Which letter, where an event was parked more than once.")] = None,
    reset_attempts: Annotated[bool, Parameter(negative=(), help="Count the retries from zero again.")] = False,
    connection: AnyConnection = ANYWHERE,
    json: AsJson = False,
) -> int:
    """Put one letter back with another body. Who did it, and both bodies' digests, travel with the message."""
    given = None if body is None else _read(body)

    async def work() -> int:
        async with letters_of(service, connection) as letters:
            new = given
            if new is None:
                found = [letter for letter in await letters.get(id) if address in (None, letter.address)]
                if not found:
                    raise Failure(f"{service} has no dead letter with the id {id!r}; see: eventbus dlq list {service}")
                new = _edited(found[0].body)
                if new == found[0].body:
                    raise Failure("the body was not changed; nothing was done")
            report = await letters.edit(id, new, address=address, reset_attempts=reset_attempts, by="cli")
        return _tell(report, "edited and re-driven", "", as_json=json)

    return start(work())


def purge(
    service: Service,
    *,
    chosen: Chosen = ALL,
    export: Annotated[
        str | None, Parameter(help="Write each letter to this new file, and to the disk, before it is removed.")
    ] = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, Parameter(negative=(), help="Do not ask.")] = False,
    connection: AnyConnection = ANYWHERE,
    json: AsJson = False,
) -> int:
    """Remove letters for good, oldest first. Asks for their number to be typed."""

    async def work() -> int:
        async with letters_of(service, connection) as letters:
            total = await _total(letters, chosen, exact=True)
            if total and not (yes or dry_run):
                _confirm(total, service)
            with nullcontext() if export is None or dry_run else new_file("--export", export) as file:

                def move(stop: asyncio.Event, tell: Progress) -> Awaitable[Report]:
                    # What is parked from now on was not asked about: the limit is what was counted.
                    return letters.purge(
                        chosen.ids,
                        where=chosen.filter,
                        limit=total,
                        dry_run=dry_run,
                        export=file,
                        by="cli",
                        stop=stop,
                        progress=tell,
                    )

                report = await _watched("purging", total, move, quiet=json or dry_run)
        return _tell(report, "purged", "would be purged", as_json=json)

    return start(work())


def import_(
    service: Service,
    file: Annotated[str, Parameter(help="What `export` wrote, or @- for standard input.")],
    *,
    dry_run: DryRun = False,
    connection: AnyConnection = ANYWHERE,
    json: AsJson = False,
) -> int:
    """Park exported letters again, as they were. Those that stand there already are left alone."""

    async def work() -> int:
        async with letters_of(service, connection) as letters:
            with _opened(file) as lines:

                def move(stop: asyncio.Event, tell: Progress) -> Awaitable[Report]:
                    return letters.import_(lines, dry_run=dry_run, by="cli", stop=stop, progress=tell)

                report = await _watched("importing", None, move, quiet=json or dry_run)
        return _tell(report, "imported", "would be imported", as_json=json, gone="stand there already")

    return start(work())


async def _total(letters: DeadLetters, chosen: Chosen, *, exact: bool = False) -> int | None:
    """How many it is about, for the progress bar; None where only reading them all would tell."""
    limit = chosen.limit
    if chosen.ids is not None:
        number = sum([len(await letters.get(id)) for id in chosen.ids])
    elif chosen.filter and not exact:
        return limit
    else:
        number = await letters.count(chosen.filter)
    return number if limit is None else min(number, limit)


async def _watched(label: str, total: int | None, work: Work, *, quiet: bool) -> Report:
    with stop_signals() as stopped, progress(label, total, quiet=quiet) as tell:
        return await work(stopped, lambda report: tell(report.matched))


def _tell(report: Report, done: str, would: str, *, as_json: bool, gone: str = "were gone already") -> int:
    """Say what was done; returns the exit code."""
    if as_json:
        say_json(asdict(report))
    elif report.dry_run:
        say(f"{report.matched - report.gone} {would} (dry run: nothing was done)")
    else:
        parts = [f"{report.done} {done}"]
        if report.gone:
            parts.append(f"{report.gone} {gone}")
        say(", ".join(parts))
    if report.failed:
        complain(f"{report.failed} could not be moved and still stand there; try again")
    elif report.stopped == "stopped":
        complain(f"stopped; {report.done} were done, the others still stand there")
    elif report.stopped:
        complain(f"{report.stopped}; the others still stand there")
    return FAILED if report.failed or report.stopped else DONE


def _confirm(total: int, service: str) -> None:
    """Ask for the number to be typed; anything else ends the command."""
    note(f"{total} dead letters of {service} will be removed for good. Type {total} to go on:")
    if sys.stdin.readline().strip() != str(total):
        raise Failure("not confirmed; nothing was removed (--yes does not ask)")


def _read(body: str) -> bytes:
    if not body.startswith("@"):
        return body.encode()
    try:
        return sys.stdin.buffer.read() if body == "@-" else Path(body[1:]).read_bytes()
    except OSError as error:
        raise UsageError(f"--body {body}: cannot be read: {error.strerror}") from None


def _edited(body: bytes) -> bytes:
    """What the user's editor makes of it."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor:
        raise UsageError("give the new body: --body '{...}', --body @file, or set EDITOR to edit it")
    with tempfile.TemporaryDirectory(prefix="eventbus-") as folder:
        path = Path(folder) / "body.json"
        path.write_bytes(body)
        if subprocess.run([*shlex.split(editor), str(path)], check=False).returncode != 0:
            raise Failure(f"{editor} failed; nothing was done")
        changed = path.read_bytes()
    # Editors end the last line; the body had no such end.
    return changed[:-1] if changed.endswith(b"\n") and not body.endswith(b"\n") else changed


def _opened(path: str) -> IO[str]:
    if path == "@-":
        return open(sys.stdin.fileno(), encoding="utf-8", closefd=False)
    try:
        return open(path.removeprefix("@"), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
