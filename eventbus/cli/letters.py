"""Dead letters for people and for programs. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

from eventbus.cli.output import clean
from eventbus.deadletter import DeadLetter
from eventbus.durations import human

COLUMNS: Final = ("id", "type", "tenant", "reason", "status", "retries", "parked", "error")
SPARE: Final = ("tenant", "retries", "parked", "reason")
"""Columns of the summary that a narrow terminal goes without, in this order."""


def summary(letters: Sequence[DeadLetter]) -> list[tuple[object, ...]]:
    """One row each, for a table."""
    return [
        (
            letter.id,
            letter.type,
            letter.tenant,
            letter.reason,
            letter.status or letter.error_code,
            letter.retries,
            _ago(letter.parked_at),
            letter.error if len(letter.error) <= 100 else letter.error[:97] + "...",
        )
        for letter in letters
    ]


def describe(letter: DeadLetter) -> Iterator[str]:
    """A letter's whole story in lines."""
    facts: dict[str, object] = {
        "id": letter.id,
        "type": letter.type,
        "source": letter.source,
        "key": letter.key,
        "tenant": letter.tenant,
        "correlation id": letter.correlation_id,
        "published": letter.time,
        "parked": f"{letter.parked_at} ({_ago(letter.parked_at)})" if letter.parked_at else None,
        "from": letter.original_queue,
        "reason": letter.reason,
        "status": letter.status,
        "error code": letter.error_code,
        "error type": letter.error_type,
        "error": letter.error,
        "retries": letter.retries,
        "fingerprint": letter.fingerprint,
        "re-driven": f"{letter.redriven} times, last by {letter.redriven_by}" if letter.redriven else None,
        "edited": letter.edited,
        "address": letter.address,
    }
    for name, value in facts.items():
        if value not in (None, ""):
            yield f"{name + ':':16}{clean(value)}"
    for attempt in letter.attempts:
        yield f"{f'attempt {attempt.number}:':16}{attempt.at}  {clean(attempt.reason)}"
    for name, value in letter.headers.items():
        yield f"{'header:':16}{clean(name)} = {clean(value)}"
    yield f"{'body:':16}{len(letter.body)} bytes{f', {clean(letter.content_type)}' if letter.content_type else ''}"
    if letter.body:
        yield from (f"  {clean(line)}" for line in _body(letter).splitlines())


def _body(letter: DeadLetter) -> str:
    data = letter.data
    if isinstance(data, bytes):
        return data.decode("utf-8", "backslashreplace")
    return data if isinstance(data, str) else json.dumps(data, indent=2, ensure_ascii=False)


def _ago(moment: datetime | None) -> str:
    return "" if moment is None else f"{human(max(0.0, time.time() - moment.timestamp()))} ago"
