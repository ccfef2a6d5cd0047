"""What the URL and the [redis] table may say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from eventbus import settings as reading
from eventbus.adapter import PARKING_MARGIN
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
    values = reading.read("redis", parts.query, settings, _READERS)
    if values.get("sentinel") and values.get("cluster"):
        raise ConfigError("redis.sentinel and redis.cluster: give one of them, not both")
    login, at, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":") if at else ("", "", "")
    database = _database(parts.path, shown)
    if database and values.get("cluster"):
        raise ConfigError(f"{shown}: Redis Cluster has only database 0")
    return Options(
        hosts=reading.hosts(hosts, SENTINEL_PORT if values.get("sentinel") else DEFAULT_PORT, shown),
        username=unquote(username) or None,
        password=unquote(password) or None,
        db=database,
        tls=parts.scheme == "rediss",
        **values,  # type: ignore[arg-type]
    )


def _database(path: str, shown: str) -> int:
    text = path.strip("/")
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 5:
        raise ConfigError(f"{shown}: {text!r} is not the number of a database; write redis://host:6379/0")
    return int(text)


def _secret(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}: must be a text")
    return value


def _names(name: str, value: object) -> Names:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r}: must be a table of templates, such as queue = {names.DEFAULT.queue!r}")
    return names.read(value)


_READERS: Final[Mapping[str, reading.Reader[object]]] = {
    "lease": reading.duration(SHORTEST_LEASE, 86_400.0),
    "timeout": reading.duration(0.5, LONGEST_TIMEOUT),
    "dlq_max_age": reading.or_none(reading.duration()),
    "dlq_max_entries": reading.or_none(reading.whole(1, 2**53)),
    "lag_warning": reading.whole(1, 2**53),
    "max_event_bytes": reading.whole(2 * PARKING_MARGIN, LARGEST_EVENT),
    "sentinel": reading.text,
    "sentinel_password": _secret,
    "cluster": reading.switch,
    "ssl_ca_certs": reading.text,
    "ssl_certfile": reading.text,
    "ssl_keyfile": reading.text,
    "ssl_cert_reqs": reading.choice("required", "none"),
    "ssl_check_hostname": reading.switch,
    "client_name": reading.text,
    "names": _names,
}
