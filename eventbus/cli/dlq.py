"""`eventbus dlq ...`: what stands in a service's dead-letter queue, and putting it back or away."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Annotated, Literal

from cyclopts import App, Parameter

from eventbus.cli.connection import NOT_GIVEN, Connection, find, must_exist
from eventbus.cli.exits import DONE, Failure, UsageError
from eventbus.cli.interrupts import start, stop_signals
from eventbus.cli.letters import describe, summary
from eventbus.cli.moving import Order, carry_out, confirmed, report_json
from eventbus.cli.output import note, say, say_json, say_table
from eventbus.filters import Filter
from eventbus.parking import DeadLetters, Report

app = App(name="dlq", help="Dead letters: what was parked, why, and putting it back or away.")

Service = Annotated[str, Parameter(help="The service whose dead letters are meant, such as wms-cincout.")]
Where = Annotated[str | None, Parameter(help="Only these: 'status=500 age>1h type=order.* tenant=acme error~timeout'.")]
Prefix = Annotated[str | None, Parameter(help="The service's prefix, where it was set by hand.")]
Ids = Annotated[
    list[str] | None,
    Parameter(name="--id", negative=(), consume_multiple=False, help="Only this event; may be given more than once."),
]
Limit = Annotated[int | None, Parameter(help="At most so many, the oldest first.")]
DryRun = Annotated[bool, Parameter(negative=(), help="Only say what would be done.")]
AsJson = Annotated[bool, Parameter(negative=(), help="Print the result as JSON.")]


@app.command
def count(
    service: Service,
    *,
    where: Where = None,
    prefix: Prefix = None,
    connection: Connection = NOT_GIVEN,
    json: AsJson = False,
) -> int:
    """How many are parked."""

    async def work() -> int:
        async with _letters(service, prefix, connection, where) as letters:
            number = await letters.count(where)
        if json:
            say_json({"count": number})
        else:
            say(str(number))
        return DONE

    return start(work())


@app.command(name="list")
def list_(
    service: Service,
    *,
    where: Where = None,
    limit: Annotated[int, Parameter(help="At most so many, the oldest first.")] = 20,
    after: Annotated[str | None, Parameter(help="Go on behind this place: `next` of the page before.")] = None,
    prefix: Prefix = None,
    connection: Connection = NOT_GIVEN,
    json: AsJson = False,
) -> int:
    """What is parked and why, oldest first. Nothing is consumed."""
    _at_least_one("--limit", limit)

    async def work() -> int:
        async with _letters(service, prefix, connection, where) as letters:
            page = await letters.browse(where, after, limit)
        if json:
            say_json({"letters": [letter.row() for letter in page.letters], "next": page.next})
            return DONE
        if not page.letters:
            say("nothing is parked" if not where else "nothing parked fits the filter")
            return DONE
        say_table(("id", "type", "tenant", "reason", "status", "retries", "parked", "error"), summary(page.letters))
        if page.next is not None:
            note(f"there are more: --after {page.next}")
        return DONE

    return start(work())


@app.command
def show(
    service: Service,
    id: Annotated[str, Parameter(help="The event's id.")],
    *,
    prefix: Prefix = None,
    connection: Connection = NOT_GIVEN,
    json: AsJson = False,
) -> int:
    """One letter with its whole story: every attempt, every header, the body."""

    async def work() -> int:
        async with _letters(service, prefix, connection) as letters:
            found = await letters.get(id)
        if not found:
            raise Failure(f"{service} has no dead letter with the id {id!r}; see: eventbus dlq list {service}")
        if json:
            say_json([letter.row() for letter in found] if len(found) > 1 else found[0].row())
            return DONE
        for letter in found:
            for line in describe(letter):
                say(line)
        return DONE

    return start(work())


@app.command
def stats(
    service: Service,
    *,
    by: Annotated[
        Literal["reason", "status", "code", "type", "tenant", "fingerprint", "age"],
        Parameter(help="What to count them by."),
    ] = "reason",
    where: Where = None,
    prefix: Prefix = None,
    connection: Connection = NOT_GIVEN,
    json: AsJson = False,
) -> int:
    """How many are parked of each reason, status, type ..."""

    async def work() -> int:
        async with _letters(service, prefix, connection, where) as letters:
            counts = await letters.stats(by, where)
        if json:
            say_json(counts)
        elif counts:
            say_table((by, "letters"), list(counts.items()))
        else:
            say("nothing is parked")
        return DONE

    return start(work())


@app.command
def redrive(
    service: Service,
    *,
    where: Where = None,
    id: Ids = None,
    limit: Limit = None,
    rate: Annotated[float | None, Parameter(help="At most so many per second.")] = None,
    reset_attempts: Annotated[bool, Parameter(negative=(), help="Count the retries from zero again.")] = False,
    dry_run: DryRun = False,
    prefix: Prefix = None,
    connection: Connection = NOT_GIVEN,
    json: AsJson = False,
) -> int:
    """Put letters back to this one service, oldest first. Published and confirmed before it is removed here."""
    order = Order(service, where, _ids(id, where), _limit(limit), dry_run)
    if rate is not None and not rate > 0:
        raise UsageError(f"--rate {rate:g}: must be above 0")

    async def work() -> int:
        async with _letters(service, prefix, connection, where) as letters:

            async def move(ids: list[str] | None, most: int | None) -> Report:
                return await letters.redrive(
                    ids, where=where, limit=most, dry_run=dry_run, reset_attempts=reset_attempts, by="cli"
                )

            report, stopped = await carry_out(letters, order, move, "re-driving", rate=rate, quiet=json)
        return report_json(report, stopped) if json else order.tell(report, stopped, "re-driven", "would be re-driven")

    return start(work())


@app.command
def purge(
    service: Service,
    *,
    where: Where = None,
    id: Ids = None,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, Parameter(negative=(), help="Do not ask.")] = False,
    prefix: Prefix = None,
    connection: Connection = NOT_GIVEN,
    json: AsJson = False,
) -> int:
    """Remove letters for good, oldest first. Asks for their number to be typed."""
    order = Order(service, where, _ids(id, where), _limit(limit), dry_run)

    async def work() -> int:
        async with _letters(service, prefix, connection, where) as letters:

            async def move(ids: list[str] | None, most: int | None) -> Report:
                return await letters.purge(ids, where=where, limit=most, dry_run=dry_run, by="cli")

            total = await order.total(letters)
            if total and not (yes or dry_run):
                confirmed(total, service)
            order.limit = total  # what is parked from now on was not asked about
            report, stopped = await carry_out(letters, order, move, "purging", quiet=json)
        return report_json(report, stopped) if json else order.tell(report, stopped, "purged", "would be purged")

    return start(work())


@app.command
def export(
    service: Service,
    *,
    where: Where = None,
    output: Annotated[str | None, Parameter(help="Write here instead of to standard output; a new file.")] = None,
    prefix: Prefix = None,
    connection: Connection = NOT_GIVEN,
    json: AsJson = False,
) -> int:
    """Every letter as a JSON line, the body in base64. Nothing is consumed."""
    if json and output is None:
        json = False  # the lines are JSON as it is

    async def work() -> int:
        done = 0
        async with _letters(service, prefix, connection, where) as letters:
            with _opened(output) as file, stop_signals() as stopped:
                async for row in letters.export(where):
                    file.write(jsonlib.dumps(row, ensure_ascii=False, default=str) + "\n")
                    done += 1
                    if stopped.is_set():
                        break
                file.flush()
                interrupted = stopped.is_set()
        if interrupted:
            raise Failure(f"stopped; {done} were exported")
        if json:
            say_json({"exported": done})
        elif output is not None:
            note(f"{done} exported to {output}")
        return DONE

    return start(work())


@asynccontextmanager
async def _letters(
    service: str, prefix: str | None, connection: Connection, where: str | None = None
) -> AsyncIterator[DeadLetters]:
    """The open queue of a service; what was typed wrong is told before anything is opened."""
    Filter.of(where)
    place = find(connection)
    target = place.service(service, prefix)
    bus = place.bus()
    must_exist(bus)
    async with bus:
        yield bus.dead_letters(target)


def _at_least_one(option: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"{option} {value}: must be a whole number from 1")
    return value


def _limit(limit: int | None) -> int | None:
    return None if limit is None else _at_least_one("--limit", limit)


def _ids(ids: list[str] | None, where: str | None) -> list[str] | None:
    if ids and where:
        raise UsageError("give --id or --where, not both")
    return ids or None


def _opened(output: str | None) -> IO[str]:
    if output is None:
        return open(sys.stdout.fileno(), "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    try:
        return open(output, "x", encoding="utf-8", errors="backslashreplace")
    except FileExistsError:
        raise UsageError(f"--output {output}: exists already; name a new file") from None
    except OSError as error:
        raise UsageError(f"--output {output}: cannot be written: {error.strerror}") from None
