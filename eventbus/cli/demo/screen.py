"""The board on a terminal as a live table; in a pipe as plain lines, without control codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from eventbus.cli.demo.board import Board, Row
from eventbus.cli.output import say, say_table
from eventbus.status import ConsumerStatus

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_STYLES: Final = {
    ConsumerStatus.ACK: "green",
    ConsumerStatus.DROP: "yellow",
    ConsumerStatus.REQUEUE: "cyan",
    ConsumerStatus.PARK: "bold red",
    None: "dim",
}


class Screen(Protocol):
    """How the demo shows itself."""

    def heading(self, text: str, *more: str) -> None:
        """The beginning of an act."""

    def changed(self, row: Row, elapsed: float) -> None:
        """Something happened to an event."""

    def watching(self, board: Board) -> AbstractContextManager[None]:
        """Show the board for as long as the context lasts."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table that stays."""


def best() -> Screen:
    """The live one on a terminal that can do it, else plain lines."""
    from rich.console import Console

    console = Console(highlight=False)
    if sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return LiveScreen(console)
    return PlainScreen()


class PlainScreen:
    """Lines, for pipes and logs."""

    def heading(self, text: str, *more: str) -> None:
        """A line with a rule under it."""
        say(f"\n{text}\n{'-' * len(text)}")
        for line in more:
            say(line)

    def changed(self, row: Row, elapsed: float) -> None:
        """One line per change."""
        answer = f"{row.answers[-1]}" if row.answers and row.words not in ("published", "re-driven") else ""
        event = f"{row.event.type} {row.event.key}"
        say(f"{elapsed:5.1f}s  {event:28} {row.service:12} call {len(row.answers)}  {answer:4} {row.words}")

    @contextmanager
    def watching(self, board: Board) -> Iterator[None]:
        """Nothing to do: every change is a line."""
        yield

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Plain columns."""
        say_table(columns, rows)


class LiveScreen:
    """A table that changes in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._board: Board | None = None

    def heading(self, text: str, *more: str) -> None:
        """Bold."""
        self._console.print(f"\n{text}", style="bold", markup=False)
        for line in more:
            self._console.print(line, markup=False)

    def changed(self, row: Row, elapsed: float) -> None:
        """Draw the table anew."""
        if self._live is not None and self._board is not None:
            self._live.update(_drawn(self._board))

    @contextmanager
    def watching(self, board: Board) -> Iterator[None]:
        """The live table; its last state stays on the screen."""
        from rich.live import Live

        self._board = board
        with Live(_drawn(board), console=self._console, refresh_per_second=12) as self._live:
            try:
                yield
            finally:
                self._live.update(_drawn(board))
        self._live = None

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Drawn."""
        say_table(columns, rows)


def _drawn(board: Board) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ("event", "key", "service", "calls", "answers", "verdict"):
        table.add_column(name, justify="right" if name == "calls" else "left")
    for row in board.rows.values():
        answers = " ".join(map(str, row.answers))
        verdict = Text(row.words, style=_STYLES[row.verdict])
        table.add_row(row.event.type, row.event.key, row.service, str(len(row.answers)), answers, verdict)
    return table
