"""The dead-letter endpoints: the three paths of the first file pipeline, and beside them all the CLI can do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from eventbus import headers, letterlines
from eventbus.console.answers import Count, Found, Lines, Messages, Outcome, Queue, Queues, Stats, encoded
from eventbus.console.desk import PATIENCE, Call, KnownQueue
from eventbus.console.orders import (
    EditOrder,
    EraseOrder,
    FilterQuery,
    ImportQuery,
    ListQuery,
    PurgeOrder,
    RedriveOrder,
    StatsQuery,
)
from eventbus.console.problems import Problem
from eventbus.console.routing import Route, endpoint
from eventbus.deadletter import DeadLetter
from eventbus.errors import ConfigError, UnknownService
from eventbus.parking import OUT_OF_TIME, Report
from eventbus.redaction import redact

ROUTES: Final[list[Route]] = []
QUEUES: Final = "/admin/dlq/queues"
QUEUE: Final = QUEUES + "/{queue}"


@endpoint(ROUTES, "GET", QUEUES, "viewer")
async def list_queues(call: Call) -> Queues:
    """The dead-letter queues, how many messages stand in each, and how long the oldest has been there."""
    return {"queues": [await _queue(call, queue) for queue in call.desk.queues.values()]}


async def _queue(call: Call, queue: KnownQueue) -> Queue:
    letters = call.letters(queue)
    found: Queue = {
        "queue": queue.name,
        "service": queue.service.name,
        "subscribed": True,
        "messages": 0,
        "oldest_seconds": None,
    }
    try:
        number = found["messages"] = await letters.count()
    except UnknownService:  # in the configuration, but never run
        return found | {"subscribed": False}
    if number and call.caller.tenants is None:
        found["oldest_seconds"] = (await call.desk.bus.stats(queue.service)).oldest_parked
    elif number:
        first = (await letters.browse(limit=1)).letters
        parked = first[0].parked_at if first else None
        found["oldest_seconds"] = None if parked is None else max(0.0, time.time() - parked.timestamp())
    return found


@endpoint(ROUTES, "GET", QUEUE + "/messages", "viewer")
async def list_messages(call: Call, query: ListQuery) -> Messages:
    """A page of messages and why each was parked, oldest first. Nothing is consumed."""
    queue = call.queue
    # One more than asked for: whether there is a next page must not depend on letters the caller cannot see.
    page = await call.letters(queue).browse(query.where, query.after, query.limit + 1)
    letters = page.letters[: query.limit]
    more = len(page.letters) > query.limit
    return {
        "queue": queue.name,
        "service": queue.service.name,
        "messages": [row(letter) for letter in letters],
        "next": letters[-1].address if more else None,
    }


@endpoint(ROUTES, "GET", QUEUE + "/messages/{id}", "viewer")
async def show_message(call: Call) -> Found:
    """Everything about one event's message: every attempt, every header, the body."""
    id = call.request.path_params["id"]
    found = await call.letters().get(id)
    if not found:
        raise Problem(
            404, "unknown-message", f"there is no message with the event id {id!r}", "list the messages to see the ids"
        )
    return {"messages": [row(letter) for letter in found]}


@endpoint(ROUTES, "GET", QUEUE + "/count", "viewer")
async def count_messages(call: Call, query: FilterQuery) -> Count:
    """How many are parked."""
    number, exact = await call.letters().depth(query.where)
    return {"count": number} if exact else {"count": number, "exact": False}


@endpoint(ROUTES, "GET", QUEUE + "/stats", "viewer")
async def count_by(call: Call, query: StatsQuery) -> Stats:
    """How many are parked of each reason, status, code, type, tenant, fingerprint or age."""
    counts = await call.letters().stats(query.by, query.where)
    return {"by": query.by, "counts": {redact(name): number for name, number in counts.items()}}


@endpoint(ROUTES, "GET", QUEUE + "/export", "viewer")
async def export_messages(call: Call, query: FilterQuery) -> Lines:
    """Every message as a JSON line, the body to the byte, sent as they are read. `import` reads them again."""
    letters = call.letters()

    async def lines() -> Lines:
        async for letter in letters.all(query.where):
            yield encoded(row(letter)).decode() + "\n"

    return lines()


@endpoint(ROUTES, "POST", QUEUE + "/re-drive", "operator", changes=True)
async def redrive_messages(call: Call, body: RedriveOrder) -> Outcome:
    """Put messages back to their service, oldest first. Each is published and confirmed before it is removed here.

    A request moves for 20 seconds at most (and as long as a canary is watched); `next` in the answer is then the
    `after` of the request that goes on.
    """
    canary = None if body.canary is None else body.canary.canary()
    async with call.stopping(PATIENCE + (canary.watch if canary else 0)) as stop:
        report = await call.letters().redrive(
            body.ids,
            where=body.where,
            after=body.after,
            limit=body.limit,
            dry_run=body.dry_run,
            rate=body.rate,
            canary=canary,
            reset_attempts=body.reset_attempts,
            via=body.via,
            delay=body.delay,
            by=call.caller.name,
            stop=stop,
        )
    return await _told(call, report, body.where, f"re-drive via {body.via}")


@endpoint(ROUTES, "POST", QUEUE + "/edit", "operator", changes=True, large=True)
async def edit_message(call: Call, body: EditOrder) -> Outcome:
    """Put one message back with another body. Who did it, when, and both bodies' digests travel with it."""
    report = await call.letters().edit(
        body.id, body.content(), address=body.address, reset_attempts=body.reset_attempts, by=call.caller.name
    )
    return await _told(call, report, None, f"edit {body.id}")


@endpoint(ROUTES, "POST", QUEUE + "/purge", "admin", changes=True)
async def purge_messages(call: Call, body: PurgeOrder) -> Outcome:
    """Remove messages for good, oldest first, `limit` of them at most. Export them first."""
    async with call.stopping(PATIENCE) as stop:
        report = await call.letters().purge(
            body.ids,
            addresses=body.addresses,
            where=body.where,
            after=body.after,
            limit=body.limit,
            dry_run=body.dry_run,
            by=call.caller.name,
            stop=stop,
        )
    return await _told(call, report, body.where, "purge")


@endpoint(ROUTES, "POST", QUEUE + "/erase", "admin", changes=True)
async def erase_messages(call: Call, body: EraseOrder) -> Outcome:
    """Where the broker keeps a log (Kafka): take what was purged and re-driven out of that too.

    What still stands between it is written again first, so this takes as long as that; asked again, it goes on.
    """
    report = await call.letters().erase(dry_run=body.dry_run, by=call.caller.name)
    call.audit |= {"what": "erase", "messages": report.erased, "dry_run": body.dry_run or None}
    return report


@endpoint(ROUTES, "POST", QUEUE + "/import", "admin", changes=True, large=True)
async def import_messages(call: Call, query: ImportQuery, body: bytes) -> Outcome:
    """Park exported messages again, as they were. Those that stand there already are left alone."""
    try:
        lines = body.decode().split("\n")
    except UnicodeDecodeError:
        raise Problem(400, "bad-request", "the body is not UTF-8", "send what an export has given") from None
    await asyncio.to_thread(_check_lines, lines, call.caller.tenants)
    async with call.stopping(PATIENCE) as stop:
        report = await call.letters().import_(lines, dry_run=query.dry_run, by=call.caller.name, stop=stop)
    return await _told(call, report, None, "import")


def _check_lines(lines: Sequence[str], tenants: frozenset[str] | None) -> None:
    """All of them before the first is parked: half an import would have nobody to tell of it."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        letter = letterlines.load(line, number)
        if tenants is not None and letter.event.tenant not in tenants:
            raise ConfigError(f"line {number} belongs to a tenant that is not yours")


async def _told(call: Call, report: Report, where: str | None, what: str) -> Report:
    """The report for the caller, and for the audit log."""
    if report.stopped == "stopped":
        report.stopped = OUT_OF_TIME
    if report.next is not None and call.caller.tenants is not None:
        rest = await call.letters().browse(where, report.next, 1)
        if not rest.letters:  # what is left behind that place is not the caller's
            report.next = None
    call.audit |= {
        "what": what,
        "messages": report.matched if report.dry_run else report.done,
        "dry_run": report.dry_run or None,
        "where": where,
        "gone": report.gone or None,
        "failed": report.failed or None,
        "stopped": report.stopped or None,
    }
    return report


_TEXTS: Final = (headers.FINAL_ERROR, headers.ATTEMPTS, headers.RETRY_REASON)


def row(letter: DeadLetter) -> dict[str, object]:
    """A letter for the outside: what others than this bus have parked may have a secret in its error text."""
    found = letter.row()
    for name in ("error", "fingerprint"):
        found[name] = redact(str(found[name]))
    found["attempts"] = [
        {**attempt.model_dump(mode="json"), "reason": redact(attempt.reason)} for attempt in letter.attempts
    ]
    story = found["story"]
    assert isinstance(story, dict)
    for name in _TEXTS:
        if isinstance(story.get(name), str):
            story[name] = redact(story[name])
    return found
