"""`eventbus dlq ...`: what stands in a service's dead-letter queue, and putting it back or away."""

from __future__ import annotations

import sys
from typing import IO, Annotated

from cyclopts import Parameter

from eventbus.cli.connection import ANYWHERE, AnyConnection
from eventbus.cli.dlq_options import (
    AsJson,
    Service,
    Where,
    app,
    at_least_one,
    letters_of,
    new_file,
    scan_shown,
)
from eventbus.cli.exits import DONE, Failure
from eventbus.cli.interrupts import start, stop_signals
from eventbus.cli.letters import SPARE, describe, summary
from eventbus.cli.moving import edit, import_, purge, redrive
from eventbus.cli.output import note, say, say_json, say_table
from eventbus.letterlines import dump
from eventbus.parking import StatKey

app.command(redrive)
app.command(edit)
app.command(purge)
app.command(import_, name="import")


@app.command
def count(
    service: Service,
    *,
    where: Where = None,
    connection: AnyConnection = ANYWHERE,
    json: AsJson = False,
) -> int:
    """How many are parked."""

    async def work() -> int:
        async with letters_of(service, connection, where) as letters:
            with scan_shown(letters, quiet=json):
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
    connection: AnyConnection = ANYWHERE,
    json: AsJson = False,
) -> int:
    """What is parked and why, oldest first. Nothing is consumed."""
    at_least_one("--limit", limit)

    async def work() -> int:
        async with letters_of(service, connection, where) as letters:
            page = await letters.browse(where, after, limit)
        if json:
            say_json({"letters": [letter.row() for letter in page.letters], "next": page.next})
            return DONE
        if not page.letters:
            say("nothing is parked" if not where else "nothing parked fits the filter")
            return DONE
        say_table(
            ("id", "type", "tenant", "reason", "status", "retries", "parked", "error"),
            summary(page.letters),
            spare=SPARE,
        )
        if page.next is not None:
            note(f"there are more: --after {page.next}")
        return DONE

    return start(work())


@app.command
def show(
    service: Service,
    id: Annotated[str, Parameter(help="The event's id.")],
    *,
    connection: AnyConnection = ANYWHERE,
    json: AsJson = False,
) -> int:
    """One letter with its whole story: every attempt, every header, the body."""

    async def work() -> int:
        async with letters_of(service, connection) as letters:
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
    by: Annotated[StatKey, Parameter(help="What to count them by.")] = "reason",
    where: Where = None,
    connection: AnyConnection = ANYWHERE,
    json: AsJson = False,
) -> int:
    """How many are parked of each reason, status, type ..."""

    async def work() -> int:
        async with letters_of(service, connection, where) as letters:
            with scan_shown(letters, quiet=json):
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
def export(
    service: Service,
    *,
    where: Where = None,
    output: Annotated[str | None, Parameter(help="Write here instead of to standard output; a new file.")] = None,
    connection: AnyConnection = ANYWHERE,
    json: AsJson = False,
) -> int:
    """Every letter as a JSON line, to the byte; `import` reads it again. Nothing is consumed."""
    if json and output is None:
        json = False  # the lines are JSON as it is

    async def work() -> int:
        done = 0
        async with letters_of(service, connection, where) as letters:
            with _opened(output) as file, stop_signals() as stopped:
                async for letter in letters.all(where):
                    file.write(dump(letter) + "\n")
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


def _opened(output: str | None) -> IO[str]:
    if output is not None:
        return new_file("--output", output)
    return open(sys.stdout.fileno(), "w", encoding="utf-8", errors="backslashreplace", closefd=False)
