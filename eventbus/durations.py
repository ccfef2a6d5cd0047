"""Durations as people write them: `5`, `"5s"`, `"250ms"`, `"2h"`, `timedelta`."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

from eventbus.errors import ConfigError

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)?")


def seconds(value: float | str | timedelta) -> float:
    """The duration in seconds. Raises ConfigError with what is allowed."""
    if isinstance(value, timedelta):
        result = value.total_seconds()
    elif isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a duration; write '5s', '250ms', '2h' or a number of seconds")
    elif isinstance(value, int) and abs(value) > 10**10:
        raise ConfigError("that many seconds are not a usable duration")
    elif isinstance(value, (int, float)):
        result = float(value)
    elif isinstance(value, str):
        result = _parse(value)
    else:
        raise ConfigError(f"{value!r} is not a duration; write '5s', '250ms', '1h30m' or a number of seconds")
    if not 0 <= result < 10**10:
        raise ConfigError(f"{value!r} is not a usable duration; it must be zero or more")
    return result


def _parse(text: str) -> float:
    rest = text.strip().lower()
    total, position, units = 0.0, 0, 0
    while position < len(rest):
        match = _PART.match(rest, position)
        if match is None or (match[2] is None and (units or match.end() < len(rest))):
            break
        total += float(match[1]) * _UNITS[match[2] or ""]
        units += 1
        position = match.end()
    if not rest or position < len(rest):
        raise ConfigError(f"{text!r} is not a duration; write '5s', '250ms', '1h30m' or a number of seconds")
    return total


def human(value: float) -> str:
    """A short text for people: 250ms, 5s, 3m, 2h, 4d."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0)):
        if value >= size:
            number = value / size
            return f"{number:.0f}{unit}" if number >= 10 or number == int(number) else f"{number:.1f}{unit}"
    return f"{value * 1000:.0f}ms"
