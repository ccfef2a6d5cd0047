"""DeadLetter: one parked message with its whole story, the same from every broker."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from eventbus import headers, letterlines
from eventbus.adapter import Parked
from eventbus.errors import Undecodable
from eventbus.event import Event, decode
from eventbus.facets import Facet, facets


class Attempt(BaseModel):
    """One failed attempt."""

    model_config = ConfigDict(frozen=True)

    number: int
    at: datetime
    reason: str


class DeadLetter(BaseModel):
    """A message in a service's dead-letter queue: what it is, why it is there, what was tried."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    address: str
    """Where it stands; unique within the queue."""
    id: str
    type: str
    source: str = ""
    key: str | None = None
    tenant: str | None = None
    correlation_id: str | None = None
    time: datetime
    content_type: str | None = None
    service: str
    original_queue: str = ""
    reason: str = "unknown"
    """Why it was parked: max-retries, permanent, undecodable, invalid, expired, crash-loop ..."""
    error: Annotated[str, Field(min_length=1)]
    """The last error, never empty."""
    error_type: str | None = None
    error_code: str | None = None
    status: int | None = None
    retries: int = 0
    attempts: tuple[Attempt, ...] = ()
    enqueued_at: datetime | None = None
    first_failed_at: datetime | None = None
    last_failed_at: datetime | None = None
    parked_at: datetime | None = None
    redriven: int = 0
    redriven_by: str | None = None
    redriven_at: datetime | None = None
    edited: str | None = None
    """Who changed its body when it was last put back, when, and the digests of both."""
    fingerprint: str = ""
    """What letters of the same error have in common: a digest, and the text without its numbers and ids."""
    headers: dict[str, object] = Field(default_factory=dict)
    """The publisher's own headers, as they were."""
    event: Event = Field(exclude=True, repr=False)
    story: Mapping[str, object] = Field(exclude=True, repr=False, default_factory=dict)
    """The reserved headers as they stand there."""
    facets: Mapping[Facet, str] = Field(exclude=True, repr=False, default_factory=dict)
    """What it is counted by."""

    @field_serializer("headers", when_used="json")
    def _headers_as_json(self, headers: dict[str, object]) -> dict[str, object]:
        return letterlines.packed(headers)

    @classmethod
    def read(cls, parked: Parked, service: str) -> DeadLetter:
        """The letter in a parked message; headers that a stranger left out or spoiled count as absent."""
        story, event = parked.headers, parked.event
        found = facets(event, story)
        reason = headers.text(story.get(headers.PARK_REASON)) or "unknown"
        return cls(
            address=parked.address,
            id=event.id,
            type=event.type,
            source=event.source,
            key=event.key,
            tenant=event.tenant,
            correlation_id=event.correlation_id,
            time=event.time,
            content_type=event.content_type,
            service=service,
            original_queue=headers.text(story.get(headers.ORIGINAL_QUEUE)) or "",
            reason=reason,
            error=headers.text(story.get(headers.FINAL_ERROR)) or reason,
            error_type=headers.text(story.get(headers.ERROR_TYPE)),
            error_code=headers.text(story.get(headers.ERROR_CODE)),
            status=headers.number(story.get(headers.FINAL_STATUS)) or None,
            retries=headers.number(story.get(headers.FINAL_RETRIES)),
            attempts=tuple(
                Attempt(number=number, at=_moment(at), reason=why)
                for number, at, why in headers.parse_attempts(story.get(headers.ATTEMPTS))
            ),
            enqueued_at=_time(story, headers.ENQUEUED_AT),
            first_failed_at=_time(story, headers.FIRST_FAILED_AT),
            last_failed_at=_time(story, headers.LAST_FAILED_AT),
            parked_at=_time(story, headers.PARKED_AT),
            redriven=headers.number(story.get(headers.REDRIVEN_COUNT)),
            redriven_by=headers.text(story.get(headers.REDRIVEN_BY)),
            redriven_at=_time(story, headers.REDRIVEN_AT),
            edited=headers.text(story.get(headers.REDRIVEN_EDITED)),
            fingerprint=found["fingerprint"],
            headers=dict(event.headers),
            event=event,
            story=story,
            facets=found,
        )

    @property
    def body(self) -> bytes:
        """The body, as it was published."""
        return self.event.body

    @property
    def data(self) -> object:
        """The body decoded, or the bytes where it cannot be."""
        try:
            return decode(self.event.body, self.event.content_type)
        except Undecodable:
            return self.event.body

    def row(self) -> dict[str, object]:
        """Everything about the letter, ready for JSON and enough to import it again: the body to the byte."""
        event, row = self.event, self.model_dump(mode="json")
        row["time"] = event.time.isoformat()
        for name in ("process_after", "expires_at"):
            moment: datetime | None = getattr(event, name)
            if moment is not None:
                row[name] = moment.isoformat()
        if event.extensions:
            row["extensions"] = dict(event.extensions)
        row["story"] = letterlines.packed(self.story)
        row |= letterlines.body_fields(self.body)
        if not isinstance(self.data, bytes):
            row["data"] = self.data
        return row

    def dlq_metadata(self) -> dict[str, object]:
        """Seed 3's `dlq_metadata` object."""
        return {
            "original_error": self.error,
            "error_type": self.error_type or self.reason,
            "retry_count": self.retries,
            "last_failure_timestamp": _millis(self.last_failed_at),
            "dlq_published_at": _millis(self.parked_at),
        }

    def entry(self, *, ttl_ms: int = 604_800_000) -> dict[str, object]:
        """Seed 2's dead-letter entry."""
        return {
            "jobId": self.id,
            "outboxId": self.id,
            "companyId": self.tenant,
            "originalData": plain(self.data),
            "failedAttempts": self.retries + 1,
            "lastFailureReason": self.error,
            "lastFailureCode": self.error_code or (str(self.status) if self.status else None),
            "lastFailureTimestamp": _iso(self.last_failed_at),
            "enqueuedAt": _iso(self.enqueued_at),
            "movedToDLQAt": _iso(self.parked_at),
            "ttl": ttl_ms,
        }


def plain(value: object) -> object:
    """A value as JSON can say it: bytes that are no text as base64."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)


def _time(story: Mapping[str, object], name: str) -> datetime | None:
    seconds = headers.moment(story.get(name))
    return _moment(seconds) if seconds else None


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _millis(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else headers.iso(moment.timestamp())
