"""The reserved headers: what each message carries of its own story, read and written in one place. Pure.

A malformed reserved header counts as absent, never as an exception. All of ours together stay under 8 KiB.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from eventbus.redaction import redact
from eventbus.settlement import FRESH, Delivery, HeaderDelta, History, ParkReason
from eventbus.status import Outcome

RETRIES: Final = "x-retries"
REQUEUES: Final = "x-requeues"
CRASHES: Final = "x-crashes"
DUE_AT: Final = "x-due-at"
RETRY_REASON: Final = "x-retry-reason"
FIRST_RECEIVED_AT: Final = "x-first-received-at"
ENQUEUED_AT: Final = "x-enqueued-at"
FIRST_FAILED_AT: Final = "x-first-failed-at"
LAST_FAILED_AT: Final = "x-last-failed-at"
ATTEMPTS: Final = "x-attempts"
REDRIVEN_AT: Final = "x-redriven-at"
REDRIVEN_BY: Final = "x-redriven-by"
REDRIVEN_COUNT: Final = "x-redriven-count"
REDRIVEN_EDITED: Final = "x-redriven-edited"
ORIGINAL_QUEUE: Final = "x-original-queue"
FINAL_STATUS: Final = "x-final-status-code"
FINAL_ERROR: Final = "x-final-error"
FINAL_RETRIES: Final = "x-final-retry-count"
PARK_REASON: Final = "x-park-reason"
ERROR_TYPE: Final = "x-error-type"
ERROR_CODE: Final = "x-error-code"
PARKED_AT: Final = "x-parked-at"

IN_FLIGHT: Final = (
    RETRIES,
    REQUEUES,
    CRASHES,
    DUE_AT,
    RETRY_REASON,
    FIRST_RECEIVED_AT,
    ENQUEUED_AT,
    FIRST_FAILED_AT,
    LAST_FAILED_AT,
    ATTEMPTS,
    REDRIVEN_AT,
    REDRIVEN_BY,
    REDRIVEN_COUNT,
    REDRIVEN_EDITED,
)
"""Carried by a message on its way; a dead letter carries them too."""

OF_DEAD_LETTERS: Final = (
    ORIGINAL_QUEUE,
    FINAL_STATUS,
    FINAL_ERROR,
    FINAL_RETRIES,
    PARK_REASON,
    ERROR_TYPE,
    ERROR_CODE,
    PARKED_AT,
)
"""Carried only by a dead letter; a re-drive takes them away."""

RESERVED: Final = frozenset(IN_FLIGHT + OF_DEAD_LETTERS)

MAX_ERROR_BYTES: Final = 2048
MAX_ATTEMPTS_BYTES: Final = 2048
# Whatever ends a line somewhere: C0, DEL, C1, and Unicode's own separators.
_BREAKS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_TEXT: Final = 256  # every other text of ours; the sum of all stays below 8 KiB
_MAX_INT: Final = 2**53
_END_OF_TIME: Final = 253_370_764_800.0  # the year 9999, all of which is left out: a time zone may push a time over it


@lru_cache(4096)  # header names are few, and asked for again with every copy
def is_reserved(name: str) -> bool:
    """Whether a header name is ours (or RabbitMQ's own story): publish strips those, so that no past is forged."""
    name = name.lower()
    return name in RESERVED or name.startswith(("x-redriven-", "x-death", "x-first-death-", "x-last-death-"))


def strip_reserved(headers: Mapping[str, object]) -> Mapping[str, object]:
    """The headers without ours; the same object where there is nothing to strip."""
    if not any(is_reserved(name) for name in headers):
        return headers
    return MappingProxyType({name: value for name, value in headers.items() if not is_reserved(name)})


def read_history(headers: Mapping[str, object]) -> History:
    """What the reserved headers say; `FRESH` where there are none."""
    if not headers or not any(name in headers for name in IN_FLIGHT):
        return FRESH
    return History(
        retries=number(headers.get(RETRIES)),
        requeues=number(headers.get(REQUEUES)),
        crashes=number(headers.get(CRASHES)),
        due_at=_instant(number(headers.get(DUE_AT)) / 1000),
        redriven=number(headers.get(REDRIVEN_COUNT)),
        first_received_at=moment(headers.get(FIRST_RECEIVED_AT)),
        enqueued_at=moment(headers.get(ENQUEUED_AT)),
        first_failed_at=moment(headers.get(FIRST_FAILED_AT)),
        last_failed_at=moment(headers.get(LAST_FAILED_AT)),
        attempts=_attempts(headers.get(ATTEMPTS)),
    )


def after_retry(history: History, delta: HeaderDelta) -> History:
    """The history of a message that is retried in place: the delta of its retry on top of what it was."""
    return replace(
        read_history(delta),
        requeues=history.requeues,
        redriven=history.redriven,
        first_received_at=history.first_received_at,
        due_at=0.0,
    )


def merge(headers: Mapping[str, object], delta: HeaderDelta) -> dict[str, object]:
    """Headers with a delta applied."""
    result = dict(headers)
    for name, value in delta.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def for_retry(delivery: Delivery, outcome: Outcome, now: float, due_at: float) -> dict[str, str | int | None]:
    """The delta of a message that failed and comes back."""
    return _failed(delivery, outcome, now) | {
        RETRIES: delivery.history.retries + 1,
        DUE_AT: math.ceil(due_at * 1000),
    }


def for_requeue(
    delivery: Delivery, now: float, due_at: float, *, told_not_yet: bool = False
) -> dict[str, str | int | None]:
    """The delta of a message that comes back at no cost; the limit of 24 h counts from the first 'not yet'."""
    history = delivery.history
    received = history.first_received_at or (now if told_not_yet else 0.0)
    return {
        REQUEUES: history.requeues + 1,
        DUE_AT: math.ceil(due_at * 1000),
        FIRST_RECEIVED_AT: iso(received) if received else None,
        ENQUEUED_AT: iso(history.enqueued_at or delivery.enqueued_at or now),
        CRASHES: None,
    }


def for_parking(
    delivery: Delivery, outcome: Outcome, reason: ParkReason, error: str, now: float
) -> dict[str, str | int | None]:
    """The delta of a message that is parked: its whole story."""
    status = outcome.status
    return _failed(delivery, outcome, now) | {
        ORIGINAL_QUEUE: cut(delivery.queue, _MAX_TEXT),
        FINAL_STATUS: status,
        FINAL_ERROR: cut(redact(error), MAX_ERROR_BYTES) or reason,
        FINAL_RETRIES: delivery.history.retries,
        PARK_REASON: reason,
        ERROR_TYPE: cut(type(outcome.error).__name__, _MAX_TEXT) if outcome.error is not None else None,
        ERROR_CODE: cut(redact(outcome.code), _MAX_TEXT) if outcome.code else None,
        PARKED_AT: iso(now),
        RETRIES: delivery.history.retries or None,
        CRASHES: delivery.history.crashes or None,
        DUE_AT: None,
    }


def for_redrive(
    story: Mapping[str, object], by: str, now: float, *, reset_attempts: bool = False, edited: str = ""
) -> dict[str, str | int | None]:
    """The delta of a dead letter that goes back to its service: the count goes on unless it is reset."""
    delta: dict[str, str | int | None] = dict.fromkeys(OF_DEAD_LETTERS)
    delta |= {
        REDRIVEN_AT: iso(now),
        REDRIVEN_BY: cut(by, _MAX_TEXT),
        REDRIVEN_COUNT: number(story.get(REDRIVEN_COUNT)) + 1,
        CRASHES: None,
        DUE_AT: None,
        FIRST_RECEIVED_AT: None,
    }
    if reset_attempts:
        delta[RETRIES] = None
    if edited:
        delta[REDRIVEN_EDITED] = cut(edited, _MAX_TEXT)
    return delta


def describe(outcome: Outcome) -> str:
    """`code: text` of an outcome, as it stands in x-retry-reason, logs and x-final-error. Never empty."""
    error = outcome.error
    code = str(outcome.code or outcome.status or (type(error).__name__ if error is not None else "") or "failed")
    text = outcome.reason or (_text_of(error) if error is not None else "")
    return redact(f"{code}: {text}" if text else code)


def iso(seconds: float) -> str:
    """A time as ISO 8601 in UTC, to the millisecond; one outside the calendar is its nearest end."""
    seconds = min(max(seconds, 0.0), _END_OF_TIME)
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def cut(text: str, limit: int) -> str:
    """Text that takes at most `limit` bytes of UTF-8, on one line, without control characters."""
    data = _BREAKS.sub(" ", text[: limit * 2]).strip().encode("utf-8", "replace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."


def parse_attempts(text: object) -> list[tuple[int, float, str]]:
    """The attempts in an x-attempts header: number, time, reason. Anything malformed is none."""
    if not isinstance(text, (str, bytes)) or len(text) > 2 * MAX_ATTEMPTS_BYTES:
        return []
    try:
        rows = [(number, at, reason) for number, at, reason in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        return []
    for number, at, reason in rows:
        if type(number) is not int or type(at) not in (int, float) or not isinstance(reason, str):
            return []
        if not (0 <= number <= _MAX_INT and 0 <= at < _END_OF_TIME * 1000):
            return []
    return [(number, at / 1000, cut(reason, _MAX_TEXT)) for number, at, reason in rows]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - an exception that cannot even say what it is must still be told of
        return f"its text cannot be had ({type(second).__name__})"


def _failed(delivery: Delivery, outcome: Outcome, now: float) -> dict[str, str | int | None]:
    history = delivery.history
    reason = describe(outcome)
    return {
        RETRY_REASON: cut(reason, _MAX_TEXT),
        FIRST_FAILED_AT: iso(history.first_failed_at or now),
        LAST_FAILED_AT: iso(now),
        ENQUEUED_AT: iso(history.enqueued_at or delivery.enqueued_at or now),
        ATTEMPTS: _ring(parse_attempts(history.attempts), (delivery.attempt, now, cut(reason, 120))),
        CRASHES: None,
    }


def _ring(rows: list[tuple[int, float, str]], row: tuple[int, float, str]) -> str:
    entries = [[number, round(at * 1000), reason] for number, at, reason in [*rows, row]]
    while True:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
        if len(text.encode("utf-8", "replace")) <= MAX_ATTEMPTS_BYTES or len(entries) == 1:
            return text
        del entries[0]


def number(value: object) -> int:
    """A number from a header, whatever a stranger put there; 0 if it is none."""
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 17 else 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INT:
        return 0
    return value


def text(value: object) -> str | None:
    """A text from a header, whatever a stranger put there; None if there is none."""
    if isinstance(value, str):
        value = value.encode("utf-8", "replace")  # half a character is no text
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return str(value) if value not in (None, "") else None


def moment(value: object) -> float:
    """Seconds since the epoch from a header, whatever a stranger put there; 0 if it is no time."""
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    if not isinstance(value, str) or len(value) > 40:
        return 0.0
    try:
        parsed = datetime.fromisoformat(value)
        return _instant((parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)).timestamp())
    except (ValueError, OverflowError):
        return 0.0


def _instant(seconds: float) -> float:
    """The time, if the calendar has it; 0 otherwise."""
    return seconds if 0.0 <= seconds < _END_OF_TIME else 0.0


def _attempts(value: object) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return value if isinstance(value, str) and len(value) <= 2 * MAX_ATTEMPTS_BYTES else ""


def size_of(headers: Iterable[tuple[str, object]]) -> int:
    """Bytes that headers take, roughly: names, texts and blobs as they are, anything else 16."""
    total = 0
    for name, value in headers:
        total += len(name.encode("utf-8", "replace"))
        if isinstance(value, str):
            value = value.encode("utf-8", "replace")
        total += len(value) if isinstance(value, bytes) else 16
    return total
