"""What became of every event so far: told by the endpoints and by the bus's own log events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from eventbus import telemetry
from eventbus.event import Event
from eventbus.policy import judge
from eventbus.service import Route, Service
from eventbus.status import ConsumerStatus, Outcome


@dataclass(slots=True)
class Row:
    """One event at the service that handles it."""

    event: Event
    service: str
    route: Route
    answers: list[int] = field(default_factory=list)
    verdict: ConsumerStatus | None = None
    words: str = "published"
    settled: bool = False
    """Whether nothing more will happen to it by itself."""


@dataclass(slots=True)
class Board:
    """All events of the demo. `on_change` is called with the row that changed."""

    on_change: Callable[[Row, float], None]
    rows: dict[str, Row] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, event: Event, services: Sequence[Service]) -> None:
        """An event is about to be published."""
        for service in services:
            route = service.route(event.type)
            if route is not None:
                self._put(Row(event, service.name, route))

    def answered(self, id: str, status: int) -> None:
        """An endpoint answered; the route's own policy says what that means."""
        row = self.rows[id]
        row.answers.append(status)
        row.verdict, _ = judge(Outcome(status=status), row.route.policy)
        row.words = _WORDS[row.verdict]
        if row.verdict is ConsumerStatus.DROP and len(row.answers) >= row.route.policy.retry.max_attempts:
            row.words = "DROP: no retry left"
        row.settled = row.verdict is ConsumerStatus.ACK  # what is to be parked is so when the bus says it is
        self._put(row)

    def parked(self, fields: Mapping[str, object]) -> None:
        """The bus has parked one."""
        row = self.rows.get(str(fields.get("event_id")))
        if row is not None:
            row.verdict, row.settled = ConsumerStatus.PARK, True
            row.words = f"PARK: into the dead-letter queue ({fields.get('park_reason')})"
            self._put(row)

    def redriven(self, ids: Sequence[str]) -> None:
        """Letters were put back."""
        for id in ids:
            row = self.rows[id]
            row.verdict, row.settled, row.words = None, False, "re-driven"
            self._put(row)

    async def all_settled(self, limit: float) -> bool:
        """Wait until nothing moves any more; False if that takes too long."""
        try:
            async with asyncio.timeout(limit):
                while not all(row.settled for row in self.rows.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear what the bus logs, and keep it off the screen."""
        logger, handler = telemetry.logger, _Ear(self)
        before = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]

    def _put(self, row: Row) -> None:
        self.rows[row.event.id] = row
        self._changed.set()
        self.on_change(row, self.elapsed)


class _Ear(logging.Handler):
    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", None)
        if getattr(record, "event", "") == "message_parked" and isinstance(fields, Mapping):
            self._board.parked(fields)


_WORDS: Mapping[ConsumerStatus, str] = {
    ConsumerStatus.ACK: "ACK: done",
    ConsumerStatus.DROP: "DROP: into the retry loop",
    ConsumerStatus.REQUEUE: "REQUEUE: not yet, costs no retry",
    ConsumerStatus.PARK: "PARK: not worth a retry",
}
