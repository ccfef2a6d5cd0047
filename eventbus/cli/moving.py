"""Re-drive and purge piece by piece, so that Ctrl-C stops between two pieces and not inside one."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from eventbus.cli.exits import DONE, FAILED, Failure
from eventbus.cli.interrupts import pause, stop_signals
from eventbus.cli.output import complain, note, progress, say, say_json
from eventbus.parking import DeadLetters, Report

PIECE: Final = 100

Move: TypeAlias = Callable[[list[str] | None, int | None], Awaitable[Report]]


@dataclass(slots=True)
class Order:
    """Which letters are meant."""

    service: str
    where: str | None
    ids: list[str] | None
    limit: int | None
    dry_run: bool

    async def total(self, letters: DeadLetters) -> int:
        """How many letters it is about, now."""
        if self.ids is not None:
            number = sum([len(await letters.get(id)) for id in self.ids])
        else:
            number = await letters.count(self.where)
        return number if self.limit is None else min(number, self.limit)

    def tell(self, report: Report, stopped: bool, done: str, would: str) -> int:
        """Say what was done; returns the exit code."""
        if self.dry_run:
            say(f"{report.matched} {would} (dry run: nothing was done)")
            return DONE
        parts = [f"{report.done} {done}"]
        if report.gone:
            parts.append(f"{report.gone} were gone already")
        say(", ".join(parts))
        return _code(report, stopped)


async def carry_out(
    letters: DeadLetters, order: Order, move: Move, label: str, *, rate: float | None = None, quiet: bool = False
) -> tuple[Report, bool]:
    """Move the letters, and say whether it was stopped before the end.

    Letters come oldest first, and what is parked again meanwhile goes to the end: as many as there were at the
    start are exactly those that stood there.
    """
    if order.dry_run:
        return await move(order.ids, order.limit), False
    total = await order.total(letters)
    report = Report()
    piece = PIECE if rate is None else max(1, min(PIECE, int(rate / 4)))
    with stop_signals() as stopped, progress(label, total, quiet=quiet) as tell:
        while report.matched < total and not stopped.is_set():
            if order.ids is not None:
                now = await move(order.ids[:piece], None)
                order.ids = order.ids[piece:]
            else:
                now = await move(None, min(piece, total - report.matched))
            _add(report, now)
            tell(report.matched)
            if now.failed or not now.matched:
                break
            if rate is not None and report.matched < total:
                await pause(stopped, now.matched / rate)
        return report, stopped.is_set() and report.matched < total


def _add(report: Report, more: Report) -> None:
    report.matched += more.matched
    report.done += more.done
    report.gone += more.gone
    report.failed += more.failed
    report.ids += more.ids[: 1000 - len(report.ids)]


def report_json(report: Report, stopped: bool) -> int:
    """The report as JSON; returns the exit code."""
    say_json(
        {
            "matched": report.matched,
            "done": report.done,
            "gone": report.gone,
            "failed": report.failed,
            "dry_run": report.dry_run,
            "ids": report.ids,
        }
    )
    return _code(report, stopped)


def _code(report: Report, stopped: bool) -> int:
    if report.failed:
        complain(f"{report.failed} could not be moved and still stand there; try again")
    if stopped:
        complain(f"stopped; {report.done} were done, the others still stand there")
    return FAILED if report.failed or stopped else DONE


def confirmed(total: int, service: str) -> None:
    """Ask for the number to be typed; anything else ends the command."""
    note(f"{total} dead letters of {service} will be removed for good. Type {total} to go on:")
    answer = sys.stdin.readline().strip()
    if answer != str(total):
        raise Failure("not confirmed; nothing was removed (--yes does not ask)")
