"""What the URL and the [redis] table may say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from eventbus.adapter import PARKING_MARGIN
from eventbus.durations import human, seconds
from eventbus.errors import ConfigError
from eventbus.redaction import redact_url
from eventbus_redis import names
from eventbus_redis.names import Names

SHORTEST_LEASE: Final = 0.2
LONGEST_TIMEOUT: Final = 60.0
LARGEST_EVENT: Final = 256 * 1024 * 1024
"""Redis itself takes 512 MB per value (proto-max-bulk-len); a copy travels with its story in one call."""
DEFAULT_PORT: Final = 6379
SENTINEL_PORT: Final = 26379


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one Redis bus."""

    hosts: tuple[tuple[str, int], ...] = (("localhost", DEFAULT_PORT),)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: bool = False
    sentinel: str = ""
    """The name of the master that the hosts, which are Sentinels then, know."""
    sentinel_password: str | None = field(default=None, repr=False)
    cluster: bool = False
    lease: float = 30.0
    timeout: float = 5.0
    """The deadline of every call."""
    dlq_max_age: float | None = 7 * 86400.0
    dlq_max_entries: int | None = 10_000
    lag_warning: int = 100_000
    """A service with more unread events than this is reported."""
    max_event_bytes: int = 16 * 1024 * 1024
    ssl_ca_certs: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_cert_reqs: str = "required"
    ssl_check_hostname: bool = True
    client_name: str | None = None
    names: Names = names.DEFAULT


def read(url: str, settings: Mapping[str, object]) -> Options:
    """The options in a URL and its settings; ConfigError names the key, the value and what is allowed."""
    parts = urlsplit(url)
    shown = redact_url(url)
    if parts.scheme not in ("redis", "rediss") or parts.fragment:
        raise ConfigError(f"{shown}: write redis://host:6379/0 or rediss://user:password@host:6379/0")
    given: dict[str, object] = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in settings.items():
        if name in given and str(given[name]) != str(value):
            raise ConfigError(f"redis.{name} is in the settings and, with another value, in the URL: give it once")
        given[name] = value
    for name, value in given.items():
        if name not in _READERS:
            raise ConfigError(f"redis.{name} = {value!r}: unknown setting; known are {', '.join(_READERS)}")
    values = {name: _READERS[name](name, value) for name, value in given.items()}
    if values.get("sentinel") and values.get("cluster"):
        raise ConfigError("redis.sentinel and redis.cluster: give one of them, not both")
    login, at, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":") if at else ("", "", "")
    database = _database(parts.path, shown)
    if database and values.get("cluster"):
        raise ConfigError(f"{shown}: Redis Cluster has only database 0")
    return Options(
        hosts=_hosts(hosts, SENTINEL_PORT if values.get("sentinel") else DEFAULT_PORT, shown),
        username=unquote(username) or None,
        password=unquote(password) or None,
        db=database,
        tls=parts.scheme == "rediss",
        **values,  # type: ignore[arg-type]
    )


def _hosts(text: str, default: int, shown: str) -> tuple[tuple[str, int], ...]:
    hosts = []
    for piece in text.split(",") if text else ["localhost"]:
        host, port = piece, str(default)
        if piece.startswith("["):  # an IPv6 address
            host, _, rest = piece[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif ":" in piece:
            host, _, port = piece.partition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"{shown}: {piece!r} is not host:port")
        hosts.append((host, int(port)))
    return tuple(hosts)


def _database(path: str, shown: str) -> int:
    text = path.strip("/")
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 5:
        raise ConfigError(f"{shown}: {text!r} is not the number of a database; write redis://host:6379/0")
    return int(text)


def _lease(name: str, value: object) -> float:
    lease = _duration(name, value)
    if not SHORTEST_LEASE <= lease <= 86400:
        raise ConfigError(f"redis.{name} = {value!r}: must be from {human(SHORTEST_LEASE)} to 1d")
    return lease


def _timeout(name: str, value: object) -> float:
    timeout = _duration(name, value)
    if not 0.5 <= timeout <= LONGEST_TIMEOUT:
        raise ConfigError(f"redis.{name} = {value!r}: must be from 500ms to {human(LONGEST_TIMEOUT)}")
    return timeout


def _duration(name: str, value: object) -> float:
    if not isinstance(value, (int, float, str, timedelta)):
        raise ConfigError(f"redis.{name} = {value!r}: must be a duration such as '30s' or a number of seconds")
    try:
        return seconds(value)
    except ConfigError as error:
        raise ConfigError(f"redis.{name} = {value!r}: {error}") from None


def _age(name: str, value: object) -> float | None:
    return None if _is_none(value) else _duration(name, value)


def _entries(name: str, value: object) -> int | None:
    return None if _is_none(value) else _whole(name, value, 1, 2**53)


def _is_none(value: object) -> bool:
    return value is None or value is False or (isinstance(value, str) and value.lower() in ("none", "false", "off"))


def _count(name: str, value: object) -> int:
    return _whole(name, value, 1, 2**53)


def _event_bytes(name: str, value: object) -> int:
    return _whole(name, value, 2 * PARKING_MARGIN, LARGEST_EVENT)


def _whole(name: str, value: object, low: int, high: int) -> int:
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else value
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise ConfigError(f"redis.{name} = {value!r}: must be a whole number from {low} to {high}")
    return number


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"redis.{name} = {value!r}: must be a text")
    return value


def _secret(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"redis.{name}: must be a text")
    return value


def _switch(name: str, value: object) -> bool:
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if found is None:
        raise ConfigError(f"redis.{name} = {value!r}: must be true or false")
    return found


def _names(name: str, value: object) -> Names:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"redis.{name} = {value!r}: must be a table of templates, such as queue = {names.DEFAULT.queue!r}"
        )
    return names.read(value)


def _requirement(name: str, value: object) -> str:
    if value not in ("required", "none"):
        raise ConfigError(f"redis.{name} = {value!r}: must be 'required' or 'none'")
    return str(value)


_READERS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "lease": _lease,
    "timeout": _timeout,
    "dlq_max_age": _age,
    "dlq_max_entries": _entries,
    "lag_warning": _count,
    "max_event_bytes": _event_bytes,
    "sentinel": _text,
    "sentinel_password": _secret,
    "cluster": _switch,
    "ssl_ca_certs": _text,
    "ssl_certfile": _text,
    "ssl_keyfile": _text,
    "ssl_cert_reqs": _requirement,
    "ssl_check_hostname": _switch,
    "client_name": _text,
    "names": _names,
}
