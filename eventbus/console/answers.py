"""What an answer says, as types; they are the schemas in the document."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ConfigDict, create_model
from typing_extensions import TypedDict

from eventbus.console.tokens import Role
from eventbus.deadletter import DeadLetter
from eventbus.parking import Report, StatKey
from eventbus.standing import Standing

Lines: TypeAlias = AsyncIterator[str]
"""An answer of JSON lines, sent as they come."""


Message = create_model(
    "Message",
    __config__=ConfigDict(extra="forbid"),
    __doc__="A dead letter with its story, its reserved headers, and its body to the byte: `body`, or `body_base64`.",
    **{name: (field.annotation, field) for name, field in DeadLetter.model_fields.items() if not field.exclude},  # type: ignore[call-overload]
    story=(dict[str, Any], ...),
    body=(str, ""),
    body_base64=(str, ""),
    data=(Any, None),
    extensions=(dict[str, str], {}),
    process_after=(datetime, None),
    expires_at=(datetime, None),
)
if TYPE_CHECKING:
    Row: TypeAlias = dict[str, object]
else:
    Row = Message
"""`DeadLetter.row()`, and in the document what it says."""


class Queue(TypedDict):
    """A dead-letter queue, whose it is, and what stands there."""

    queue: str
    service: str
    subscribed: bool
    """Whether the broker knows the service: one that never ran has no queue yet."""
    messages: int
    oldest_seconds: float | None


class Queues(TypedDict):
    """The queues there are."""

    queues: list[Queue]


class Messages(TypedDict):
    """A page of messages; `next` is the `after` of the next page, null at the end."""

    queue: str
    service: str
    messages: list[Row]
    next: str | None


class Found(TypedDict):
    """The messages of one event: more than one if a duplicate was parked too."""

    messages: list[Row]


class Count(TypedDict):
    """How many."""

    count: int


class Stats(TypedDict):
    """How many of each, most first."""

    by: StatKey
    counts: dict[str, int]


Outcome: TypeAlias = Report


class Turn(TypedDict):
    """How one tenant of a service with fairness is doing."""

    companyId: str
    lastProcessedAt: str | None
    roundsWithoutProcessing: int
    currentPriority: int
    totalProcessed: int
    consecutiveBatchCount: int


class Turns(TypedDict):
    """The tenants of a service, the most urgent first; none where it does not run in this process, or has no turns."""

    service: str
    tenants: list[Turn]


class Standings(TypedDict):
    """The services that are known here."""

    services: list[Standing]


class WhoAmI(TypedDict):
    """The token's name, role and tenants (null: all)."""

    name: str
    role: Role
    tenants: list[str] | None


class Alive(TypedDict):
    """The process answers."""

    status: str


class Ready(TypedDict):
    """Whether everything can do its work, and what each service that cannot is waiting for."""

    ready: bool
    services: dict[str, str]


def encoded(answer: Any) -> bytes:
    """An answer as JSON. In ASCII: a text from a stranger's body may hold what no UTF-8 can say."""
    try:
        return json.dumps(answer, allow_nan=False, default=asdict).encode()
    except ValueError:
        return json.dumps(_finite(answer), allow_nan=False).encode()


def _finite(value: object) -> object:
    """The same without numbers that JSON does not have: a broker's header may hold one."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
