"""What the commands print: tables for people, JSON for programs, errors on stderr. No control codes in a pipe."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

# What others wrote (event ids, error texts) must not move the cursor or colour the terminal.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def clean(value: object) -> str:
    """A text that can be printed on one line of a terminal, whoever wrote it."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], str(value))


def say(text: str) -> None:
    """A line for the user on stdout."""
    print(text, flush=True)


def note(text: str) -> None:
    """A line for the user that is not the result: on stderr, so that stdout can be piped on."""
    print(text, file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Errors, one line each."""
    for line in text.splitlines() or [""]:
        note(f"error: {clean(line)}")


def say_json(value: object) -> None:
    """One JSON value on one line."""
    say(json.dumps(value, ensure_ascii=False, default=str))


def say_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "", spare: Sequence[str] = ()
) -> None:
    """A table: drawn to fit a terminal, plain columns elsewhere; nothing is cut off in a pipe.

    A narrow terminal goes without the `spare` columns, in this order, as far as needed; the last column is cut.
    """
    cells = [["" if value is None else clean(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        if title:
            say(title)
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in (columns, *cells):
            say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    shown = fitting(columns, cells, spare, console.width)
    table = Table(title=title or None, title_justify="left")
    for number in shown:
        last = number == shown[-1]
        table.add_column(columns[number], overflow="ellipsis" if last and spare else "fold", no_wrap=bool(spare))
    for row in cells:
        table.add_row(*(Text(row[number]) for number in shown))
    console.print(table)


def fitting(columns: Sequence[str], cells: Sequence[Sequence[str]], spare: Sequence[str], width: int) -> list[int]:
    """Which columns fit into so many characters, the last one in at least 20 of them. Pure."""
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    widths[-1] = min(widths[-1], 20)
    shown = list(range(len(columns)))
    for name in spare:
        if sum(widths[number] + 3 for number in shown) + 1 <= width:
            break
        shown.remove(columns.index(name))
    return shown


class Progress(Protocol):
    """Told how far the work is."""

    def __call__(self, done: int) -> None:
        """`done` in all so far."""


@contextlib.contextmanager
def progress(label: str, total: int | None, *, quiet: bool = False) -> Iterator[Progress]:
    """A progress bar on stderr, if that is a terminal; nothing otherwise."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
