"""Settings of an adapter, from the query of its URL and its own table in bus.toml. Pure, but for files of TLS.

A reader takes a setting's full name (`kafka.timeout`) and what was given, a text from a URL or a value from TOML, and
gives what is meant. A ConfigError names the setting, the value and what is allowed.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from eventbus.durations import human, seconds
from eventbus.errors import ConfigError

T = TypeVar("T")
Reader: TypeAlias = Callable[[str, object], T]

_NONE: Final = ("none", "false", "off", "-1")


def read(
    table: str, query: str, settings: Mapping[str, object], readers: Mapping[str, Reader[object]]
) -> dict[str, object]:
    """Every setting that was given, each once, in the URL or in the table."""
    given: dict[str, object] = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in settings.items():
        if name in given and str(given[name]) != str(value):
            raise ConfigError(f"{table}.{name} is in the settings and, with another value, in the URL: give it once")
        given[name] = value
    for name, value in given.items():
        if name not in readers:
            raise ConfigError(f"{table}.{name} = {value!r}: unknown setting; known are {', '.join(readers)}")
    return {name: readers[name](f"{table}.{name}", value) for name, value in given.items()}


def hosts(text: str, default_port: int, shown: str) -> tuple[tuple[str, int], ...]:
    """Hosts and ports of `one:9092,two`, of which there may be several; none at all is this machine."""
    found = []
    for piece in text.split(",") if text else ["localhost"]:
        host, port = piece, str(default_port)
        if piece.startswith("["):  # an IPv6 address
            host, _, rest = piece[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif ":" in piece:
            host, _, port = piece.partition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"{shown}: {piece!r} is not host:port")
        found.append((host, int(port)))
    return tuple(found)


def duration(low: float = 0.0, high: float = float("inf")) -> Reader[float]:
    """A time such as '30s', within bounds."""

    def reader(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str, timedelta)):
            raise ConfigError(f"{name} = {value!r}: must be a duration such as '30s' or a number of seconds")
        try:
            found = seconds(value)
        except ConfigError as error:
            raise ConfigError(f"{name} = {value!r}: {error}") from None
        if not low <= found <= high:
            raise ConfigError(f"{name} = {value!r}: must be from {human(low)} to {human(high)}")
        return found

    return reader


def whole(low: int, high: int) -> Reader[int]:
    """A whole number within bounds."""

    def reader(name: str, value: object) -> int:
        text = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20
        number = int(value) if text else value  # type: ignore[call-overload]
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise ConfigError(f"{name} = {value!r}: must be a whole number from {low} to {high}")
        return number

    return reader


def choice(*allowed: str) -> Reader[str]:
    """One of a few words."""

    def reader(name: str, value: object) -> str:
        if value not in allowed:
            raise ConfigError(f"{name} = {value!r}: must be {' or '.join(map(repr, allowed))}")
        return str(value)

    return reader


def or_none(reader: Reader[T]) -> Reader[T | None]:
    """A setting that can be turned off: 'none', 'off', false."""
    return lambda name, value: (
        None if value is None or value is False or str(value).lower() in _NONE else reader(name, value)
    )


def text(name: str, value: object) -> str:
    """Any text but an empty one."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} = {value!r}: must be a text")
    return value


def switch(name: str, value: object) -> bool:
    """True or false."""
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if found is None:
        raise ConfigError(f"{name} = {value!r}: must be true or false")
    return found


def tls(table: str, cafile: str | None, certfile: str | None, keyfile: str | None) -> ssl.SSLContext:
    """The context of a client that always verifies; ConfigError names the file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=cafile)
    except OSError as error:
        raise ConfigError(f"{table}.cafile = {cafile!r}: cannot be used: {error}") from None
    if certfile:
        try:
            context.load_cert_chain(certfile, keyfile, "")  # never ask for a password on a terminal
        except OSError as error:
            shown = f"{table}.certfile = {certfile!r}" + (f", keyfile = {keyfile!r}" if keyfile else "")
            raise ConfigError(f"{shown}: cannot be used: {error}") from None
    return context
