"""A request that waits for its answer, and what a connection needs of its listener."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from eventbus.adapter import PublishResult
from eventbus.event import Event
from eventbus.ingest.answers import Answer, of_results

if TYPE_CHECKING:
    from eventbus.ingest.protocol import Connection


class Office(Protocol):
    """What a connection needs of the listener it belongs to."""

    token: bytes
    """Who sends it may publish; empty: everybody on this machine may."""
    stopping: bool

    def opened(self, connection: Connection) -> bool:
        """There is one more; False if it is one too many."""

    def closed(self, connection: Connection) -> None:
        """There is one less."""

    def hold(self, size: int) -> bool:
        """Take memory for this many bytes of bodies; False if it is used up."""

    def let_go(self, size: int) -> None:
        """Give it back."""

    def check(self, events: Sequence[Event]) -> None:
        """Raises Refused for events that the broker could never take."""

    def publish(self, events: Sequence[Event], size: int, exchange: Exchange) -> None:
        """Publish them, and tell the exchange what became of each."""

    def date(self) -> bytes:
        """The `date:` line of an answer."""

    def count(self, status: int) -> None:
        """A request was answered."""


class Exchange:
    """A request that is here, and the answer to it that is not yet."""

    __slots__ = ("answer", "batched", "bodyless", "connection", "events", "keep_alive", "size")

    def __init__(self, connection: Connection, size: int, *, keep_alive: bool, bodyless: bool = False) -> None:
        self.connection = connection
        self.size = size
        self.keep_alive = keep_alive
        self.bodyless = bodyless
        self.batched = False
        self.events: Sequence[Event] = ()
        self.answer: Answer | None = None

    def published(self, results: Sequence[PublishResult]) -> None:
        """The broker has answered."""
        self.finish(of_results(self.events, results, self.batched))

    def finish(self, answer: Answer) -> None:
        """This goes back."""
        self.answer = answer
        self.events = ()
        self.connection.finished(self)
