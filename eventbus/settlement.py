"""What is in flight and how it ends: Delivery, and the five settlements an adapter carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from eventbus.event import Event

HeaderDelta: TypeAlias = Mapping[str, str | int | None]
"""Headers to set on the copy (or the held message); None takes one away. Built by the core, finished."""

NO_CHANGE: Final[HeaderDelta] = {}


@dataclass(frozen=True, slots=True)
class History:
    """What the reserved headers of a message say about its past. A fresh message has none."""

    retries: int = 0
    requeues: int = 0
    crashes: int = 0
    due_at: float = 0.0
    redriven: int = 0
    first_received_at: float = 0.0
    enqueued_at: float = 0.0
    first_failed_at: float = 0.0
    last_failed_at: float = 0.0
    attempts: str = ""


FRESH: Final = History()


@dataclass(slots=True, eq=False)
class Delivery:
    """An event in flight to one service. Handlers may ask for it; adapters make it."""

    event: Event
    service: str
    queue: str
    receipt: object = None
    """The adapter's own handle; nobody else looks inside."""
    history: History = FRESH
    suspect: bool = False
    """The broker says it was delivered before and never settled: it may have killed its process."""
    noted: bool = False
    """A crash note for the call to come is already written (see Consumer.note)."""
    problem: str = ""
    """Why it could not be decoded; such a delivery is parked without a call."""
    enqueued_at: float = 0.0
    """When the broker took it, as far as it knows (seconds since the epoch); 0 where it does not."""
    max_attempts: int = 0

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.history.retries + 1

    @property
    def is_last_attempt(self) -> bool:
        """Whether a failure now would park it."""
        return self.max_attempts > 0 and self.attempt >= self.max_attempts


@dataclass(frozen=True, slots=True)
class Ack:
    """Done: remove it. `discarded` says why, where it failed for good and the service keeps no dead letters."""

    discarded: str = ""


@dataclass(frozen=True, slots=True)
class Retry:
    """Bring a copy back to this service alone, not before `due_at`; then remove the original."""

    due_at: float
    delay: float
    headers: HeaderDelta
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Requeue:
    """The same road as Retry, for a message that is not due yet or finds no room: its attempts are unchanged."""

    due_at: float
    delay: float
    headers: HeaderDelta


ParkReason: TypeAlias = Literal[
    "max-retries",
    "permanent",
    "undecodable",
    "invalid",
    "expired",
    "crash-loop",
    "requeue-limit",
    "no-route",
]


@dataclass(frozen=True, slots=True)
class Park:
    """Put a copy with these headers into the service's dead-letter queue; then remove the original."""

    reason: ParkReason
    headers: HeaderDelta
    error: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Hand it back unstarted, at no cost; somebody receives it again soon."""

    headers: HeaderDelta = field(default_factory=dict)


Settlement: TypeAlias = Ack | Retry | Requeue | Park | Release

ACK: Final = Ack()
RELEASE: Final = Release()
