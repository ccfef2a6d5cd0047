"""Facets: what dead letters are counted and grouped by, the same in every index and every scan. Pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Final, Literal, TypeAlias, get_args

from eventbus import headers
from eventbus.event import Event

Facet: TypeAlias = Literal["reason", "status", "code", "type", "tenant", "fingerprint", "hour"]

FACETS: Final[tuple[Facet, ...]] = get_args(Facet)
NONE: Final = "-"
"""The value of a facet that a letter does not have: every letter has a value of every facet, so counts add up."""

AGES: Final = (
    ("<2h", 2 * 3600.0),
    ("2h-6h", 6 * 3600.0),
    ("6h-1d", 86_400.0),
    ("1d-7d", 7 * 86_400.0),
    ("7d-30d", 30 * 86_400.0),
    (">30d", math.inf),
)
"""Groups of age, and what each is below. The first is two hours wide because the index knows only hours."""

_MAX_VALUE: Final = 256
_MAX_TEXT: Final = 512

# What differs between two cases of one error, the longest first. Bounded repeats only: a stranger wrote the text.
_VARIABLE: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s'\"<>)\]]{1,400}"), "<url>"),
    (re.compile(r"\"[^\"]{0,400}\"|(?<!\w)'[^']{0,400}'(?!\w)|`[^`]{0,400}`"), "<value>"),
    (re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64}){1,5}"), "<address>"),
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<time>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b|\[[0-9a-fA-F:]{3,45}\](?::\d{1,5})?"), "<host>"),
    (re.compile(r"\b0x[0-9a-fA-F]{1,64}\b"), "<id>"),
    # An identifier: long enough, letters and digits mixed.
    (re.compile(r"\b(?=[A-Za-z_-]{0,63}\d)(?=[\d_-]{0,63}[A-Za-z])[A-Za-z0-9_-]{12,128}\b"), "<id>"),
    (re.compile(r"(?<![A-Za-z<])\d{1,40}(?:[.,]\d{1,40})*"), "<n>"),
)


def facets(event: Event, story: Mapping[str, object]) -> dict[Facet, str]:
    """A letter's value of every facet, from its event and its reserved headers."""
    return {name: read(event, story) for name, read in _READ.items()}


def facet(name: Facet, event: Event, story: Mapping[str, object]) -> str:
    """A letter's value of one facet; a fingerprint costs more than all the others."""
    return _READ[name](event, story)


def _reason(story: Mapping[str, object]) -> str:
    return headers.text(story.get(headers.PARK_REASON)) or "unknown"


def _fingerprint(story: Mapping[str, object]) -> str:
    return fingerprint(
        headers.text(story.get(headers.ERROR_TYPE)) or "",
        headers.text(story.get(headers.ERROR_CODE)) or "",
        headers.text(story.get(headers.FINAL_ERROR)) or _reason(story),
    )


def _hour(story: Mapping[str, object]) -> str:
    parked = headers.moment(story.get(headers.PARKED_AT))
    return hour_of(parked) if parked else NONE


_READ: Final[Mapping[Facet, Callable[[Event, Mapping[str, object]], str]]] = {
    "reason": lambda event, story: _value(_reason(story)),
    "status": lambda event, story: str(headers.number(story.get(headers.FINAL_STATUS)) or NONE),
    "code": lambda event, story: _value(headers.text(story.get(headers.ERROR_CODE)) or ""),
    "type": lambda event, story: _value(event.type),
    "tenant": lambda event, story: _value(event.tenant or ""),
    "fingerprint": lambda event, story: _fingerprint(story),
    "hour": lambda event, story: _hour(story),
}


def fingerprint(error_type: str, code: str, error: str) -> str:
    """What all cases of one error have in common: a short digest to choose by, and a text to read.

    Type, code and the text without its numbers, ids, quoted values, addresses and times.
    """
    common = normalised(error)
    digest = hashlib.sha256("\0".join((error_type, code, common)).encode("utf-8", "replace")).hexdigest()[:8]
    return headers.cut(f"{digest} {common}", _MAX_VALUE)


def normalised(error: str) -> str:
    """An error's text with everything replaced that differs from case to case."""
    text = headers.cut(error, _MAX_TEXT)
    for pattern, word in _VARIABLE:
        text = pattern.sub(word, text)
    return text


def hour_of(seconds: float) -> str:
    """The hour of a moment, in UTC: `2026-03-01T14`."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H")


def by_age(hours: Mapping[str, int], now: float) -> dict[str, int]:
    """Counts by hour of parking as groups of age, youngest first; an hour counts as old as its beginning is."""
    groups = dict.fromkeys([name for name, _ in AGES] + [NONE], 0)
    for hour, count in hours.items():
        try:
            began = datetime.strptime(f"{hour}+0000", "%Y-%m-%dT%H%z").timestamp()
        except ValueError:
            groups[NONE] += count
            continue
        groups[next(name for name, limit in AGES if now - began < limit)] += count
    return {name: count for name, count in groups.items() if count}


def _value(text: str) -> str:
    return headers.cut(text, _MAX_VALUE) or NONE
