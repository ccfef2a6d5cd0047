"""What the URL and the [sqlite] table may say. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from eventbus.adapter import PARKING_MARGIN
from eventbus.durations import human, seconds
from eventbus.errors import ConfigError

SHORTEST_LEASE: Final = 0.1
LARGEST_EVENT: Final = 512 * 1024 * 1024
"""SQLite itself takes a little less than 1 GB per row; a dead letter is one row with its story beside it."""


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one SQLite bus."""

    path: str
    lease: float = 30.0
    dlq_max_age: float | None = None
    dlq_max_entries: int | None = None
    lock_timeout: float = 30.0
    max_event_bytes: int = 16 * 1024 * 1024


def read(url: str, settings: Mapping[str, object]) -> Options:
    """The options in a URL and its settings; ConfigError names the key, the value and what is allowed."""
    parts = urlsplit(url)
    given: dict[str, object] = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in settings.items():
        if name in given and str(given[name]) != str(value):
            raise ConfigError(f"sqlite.{name} = {value!r} in the settings, {given[name]!r} in the URL: give it once")
        given[name] = value
    for name in given:
        if name not in _READERS:
            raise ConfigError(f"sqlite.{name} = {given[name]!r}: unknown setting; known are {', '.join(_READERS)}")
    values = {name: _READERS[name](name, value) for name, value in given.items()}
    return Options(_path(url), **values)  # type: ignore[arg-type]


def _path(url: str) -> str:
    parts = urlsplit(url)
    if parts.fragment:
        raise ConfigError(f"{url}: write '#' in a file name as %23")
    if parts.netloc:
        raise ConfigError(f"{url}: write sqlite:///{parts.netloc}{parts.path} (relative) or sqlite:////absolute/file")
    path = unquote(parts.path).removeprefix("/")
    if not path or path.endswith("/"):
        raise ConfigError(f"{url}: name the file, such as sqlite:///bus.db or sqlite:////var/lib/app/bus.db")
    if path == ":memory:":
        raise ConfigError(f"{url}: a bus in memory is memory:// or memory://name")
    if "\0" in path:
        raise ConfigError(f"{url}: a file name has no NUL character")
    # Absolute from here on: a later chdir must not lead the other connections to another file.
    return os.path.abspath(path)


def _lease(name: str, value: object) -> float:
    lease = _duration(name, value)
    if lease < SHORTEST_LEASE:
        raise ConfigError(f"sqlite.{name} = {value!r}: must be at least {human(SHORTEST_LEASE)}")
    return lease


def _duration(name: str, value: object) -> float:
    if not isinstance(value, (int, float, str, timedelta)):
        raise ConfigError(f"sqlite.{name} = {value!r}: must be a duration such as '30s' or a number of seconds")
    try:
        return seconds(value)
    except ConfigError as error:
        raise ConfigError(f"sqlite.{name} = {value!r}: {error}") from None


def _entries(name: str, value: object) -> int:
    return _whole(name, value, 1, 2**53)


def _event_bytes(name: str, value: object) -> int:
    return _whole(name, value, 2 * PARKING_MARGIN, LARGEST_EVENT)


def _whole(name: str, value: object, low: int, high: int) -> int:
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise ConfigError(f"sqlite.{name} = {value!r}: must be a whole number from {low} to {high}")
    return number


_READERS: Final[Mapping[str, Callable[[str, object], float | int]]] = {
    "lease": _lease,
    "dlq_max_age": _duration,
    "dlq_max_entries": _entries,
    "lock_timeout": _duration,
    "max_event_bytes": _event_bytes,
}
