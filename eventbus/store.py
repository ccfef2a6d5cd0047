"""The seam of stores: what replicas share beside the broker, that is completed events and rates.

A store answers many questions in one round trip. It may forget (a lost store costs a duplicate, never a message),
but it must not make things up: `done` is said only of what was told to be done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

Seen: TypeAlias = Literal["new", "done", "claimed"]
"""new; done: completed within the window; claimed: another copy is being handled right now."""


@dataclass(slots=True)
class Words:
    """What a worker says in one round trip: names of events are digests of source and id."""

    asks: list[str] = field(default_factory=list)
    """Which of these are completed? With a claim those that are new are claimed for us."""
    done: list[str] = field(default_factory=list)
    """These are completed now; their claims end."""
    let_go: list[str] = field(default_factory=list)
    """These are not completed, and claimed no longer."""

    def __bool__(self) -> bool:
        return bool(self.asks or self.done or self.let_go)


@dataclass(frozen=True, slots=True)
class Ask:
    """A wish for permits of one rate, shared under its name, which begins with "prefix/service/"."""

    name: str
    limit: int
    period: float
    wanted: int


@dataclass(frozen=True, slots=True)
class Granted:
    """How many permits were given, and in how many seconds to ask again if that was not enough."""

    number: int
    opens_in: float = 0.0


class Store(ABC):
    """Completed events and rates, shared by everybody who names the same store."""

    shared: ClassVar[bool] = True
    """Whether other processes see it."""

    @abstractmethod
    async def open(self) -> None:
        """Connect; nothing happens if it is open."""

    @abstractmethod
    async def aclose(self) -> None:
        """Disconnect."""

    @abstractmethod
    async def tell(self, service: str, words: Words, *, window: float, claim: float | None, owner: str) -> list[Seen]:
        """Write down what is done and let go, then answer for each of the asks. One round trip.

        `service` is "prefix/service"; events of other services are other events.
        """

    @abstractmethod
    async def permits(self, asks: Sequence[Ask]) -> list[Granted]:
        """Permits as far as there are any: never more than the limit in any period. One round trip."""
