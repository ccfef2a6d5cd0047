"""The answer to a request: a status, and a body that says what became of every event. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from eventbus.adapter import PublishResult
from eventbus.event import Event
from eventbus.ingest.requests import Refused
from eventbus.redaction import redact

RETRY_AFTER: Final = 2
"""Seconds that a publisher shall wait: a broker that restarts is back in about that."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back to the publisher."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def of_results(events: Sequence[Event], results: Sequence[PublishResult], batched: bool) -> Answer:
    """202 only if the broker has confirmed them all; else one result for every event.

    503: not stored, or nobody knows; sent again with the same ids, an event that was stored is at most doubled.
    400: at least one will never be taken as it is, and none is in doubt.
    """
    if all(result.status == "stored" for result in results):
        ids = [event.id for event in events]
        return Answer(202, _json({"ids": ids} if batched else {"id": ids[0]}))
    later = any(result.status == "unknown" or result.later for result in results)
    first = next(result.error for result in results if result.status != "stored")
    rows = [_row(event, result) for event, result in zip(events, results, strict=True)]
    what = "not every event is stored" if batched else "the event is not stored, as far as is known"
    advice = "send it again later, with the same id" if later else "it will never be taken as it is"
    body = {"error": f"{what}: {redact(first)}; {advice}", "results": rows}
    return Answer(503 if later else 400, _json(body), _LATER if later else ())


def of_refusal(refused: Refused) -> Answer:
    """What is wrong with the request, and what to do."""
    headers = _HEADERS.get(refused.status, ())
    return Answer(refused.status, _json({"error": redact(str(refused))}), headers)


_LATER: Final = (("retry-after", str(RETRY_AFTER)),)
_HEADERS: Final[Mapping[int, tuple[tuple[str, str], ...]]] = {
    401: (("www-authenticate", "Bearer"),),
    405: (("allow", "POST"),),
    503: _LATER,
}


def _row(event: Event, result: PublishResult) -> dict[str, str]:
    row = {"id": event.id, "status": result.status}
    return row | {"error": redact(result.error)} if result.error else row


def _json(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
