"""What the URL and the [kafka] table may say. Pure.

`kafka://user:password@host:9092,other:9092?tls=true&sasl_mechanism=SCRAM-SHA-512`: the hosts are those to begin with,
the cluster tells the rest. Settings stand in the query or in the table.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from eventbus.adapter import PARKING_MARGIN
from eventbus.durations import human, seconds
from eventbus.errors import ConfigError
from eventbus.redaction import redact_url
from eventbus_kafka.names import Templates, templates

DEFAULT_PORT: Final = 9092
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "OAUTHBEARER")
COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
DAY: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one Kafka bus."""

    hosts: tuple[tuple[str, int], ...] = (("localhost", DEFAULT_PORT),)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sasl_mechanism: str = "PLAIN"
    tls: bool = False
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    client_id: str = "eventbus"
    timeout: float = 30.0
    """The deadline of every call."""
    connect_timeout: float = 10.0
    session_timeout: float = 15.0
    """A consumer that is not heard of for so long is taken for dead."""
    drain: float = 5.0
    """How long a rebalance waits for handlers that run; what they say later is lost, and handled again."""
    commit_interval: float = 0.2
    partitions: int = 6
    retry_partitions: int = 3
    dlq_partitions: int = 3
    replication: int | None = None
    """Copies of every topic; None: three, or as many as there are brokers."""
    retention: float | None = 7 * DAY
    retry_retention: float | None = 30 * DAY
    dlq_retention: float | None = 30 * DAY
    compression: str = "none"
    """What our own producer does."""
    dlq_compression: str = "producer"
    max_event_bytes: int = 1024 * 1024
    dlq_max_bytes: int | None = None
    dlq_format: str = "headers"
    names: Templates = field(default_factory=Templates)

    @property
    def servers(self) -> list[str]:
        """The brokers to begin with."""
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts]

    @property
    def where(self) -> str:
        """Hosts and ports, for error texts; never the password."""
        return ", ".join(self.servers)

    @property
    def copy_bytes(self) -> int:
        """What retry and dead-letter topics take: a message with its story."""
        return max(self.dlq_max_bytes or 0, self.max_event_bytes + PARKING_MARGIN)

    def context(self) -> ssl.SSLContext | None:
        """The TLS context; verification is always on."""
        if not self.tls:
            return None
        try:
            made = ssl.create_default_context(cafile=self.cafile)
            if self.certfile:
                made.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"kafka: cafile, certfile or keyfile cannot be used: {error}") from error
        return made


def read(url: str, settings: Mapping[str, object]) -> Options:
    """The options in a URL and its settings; ConfigError names the key, the value and what is allowed."""
    parts = urlsplit(url)
    shown = redact_url(url)
    if parts.scheme != "kafka" or parts.fragment or parts.path.strip("/"):
        raise ConfigError(f"{shown}: write kafka://host:9092,other:9092?setting=value")
    given: dict[str, object] = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in settings.items():
        if name in given and str(given[name]) != str(value):
            raise ConfigError(f"kafka.{name} is in the settings and, with another value, in the URL: give it once")
        given[name] = value
    for name, value in given.items():
        if name not in _READERS:
            raise ConfigError(f"kafka.{name} = {value!r}: unknown setting; known are {', '.join(_READERS)}")
    values = {name: _READERS[name](name, value) for name, value in given.items()}
    login, at, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":") if at else ("", "", "")
    options = Options(
        hosts=_hosts(hosts, shown),
        username=unquote(username) or None,
        password=unquote(password) or None,
        **values,  # type: ignore[arg-type]
    )
    _check(options)
    return options


def _check(options: Options) -> None:
    if options.keyfile and not options.certfile:
        raise ConfigError("kafka.keyfile: give certfile too")
    if (options.cafile or options.certfile) and not options.tls:
        raise ConfigError("kafka.cafile, certfile: only with tls = true")
    most = options.max_event_bytes + PARKING_MARGIN
    if options.dlq_max_bytes is not None and options.dlq_max_bytes < most:
        raise ConfigError(
            f"kafka.dlq_max_bytes = {options.dlq_max_bytes}: at least {most}, or an event of max_event_bytes could not "
            "be parked with its story"
        )
    if options.replication == 2:
        raise ConfigError(
            "kafka.replication = 2: with one broker down nothing could be written; use 3 (or 1 for tests)"
        )


def _hosts(text: str, shown: str) -> tuple[tuple[str, int], ...]:
    hosts = []
    for piece in text.split(",") if text else ["localhost"]:
        host, port = piece, str(DEFAULT_PORT)
        if piece.startswith("["):  # an IPv6 address
            host, _, rest = piece[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif ":" in piece:
            host, _, port = piece.partition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"{shown}: {piece!r} is not host:port")
        hosts.append((host, int(port)))
    return tuple(hosts)


def _duration(low: float, high: float) -> Callable[[str, object], float]:
    def read_duration(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str, timedelta)):
            raise ConfigError(f"kafka.{name} = {value!r}: must be a duration such as '30s' or a number of seconds")
        try:
            found = seconds(value)
        except ConfigError as error:
            raise ConfigError(f"kafka.{name} = {value!r}: {error}") from None
        if not low <= found <= high:
            raise ConfigError(f"kafka.{name} = {value!r}: must be from {human(low)} to {human(high)}")
        return found

    return read_duration


def _age(name: str, value: object) -> float | None:
    if value is None or value is False or str(value).lower() in ("none", "false", "off", "-1"):
        return None
    return _duration(60.0, 3650 * DAY)(name, value)


def _whole(low: int, high: int) -> Callable[[str, object], int]:
    def read_whole(name: str, value: object) -> int:
        text = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16
        number = int(value) if text else value  # type: ignore[call-overload]
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise ConfigError(f"kafka.{name} = {value!r}: must be a whole number from {low} to {high}")
        return number

    return read_whole


def _choice(*allowed: str) -> Callable[[str, object], str]:
    def choose(name: str, value: object) -> str:
        if value not in allowed:
            raise ConfigError(f"kafka.{name} = {value!r}: must be one of {', '.join(allowed)}")
        return str(value)

    return choose


def _switch(name: str, value: object) -> bool:
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if found is None:
        raise ConfigError(f"kafka.{name} = {value!r}: must be true or false")
    return found


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"kafka.{name} = {value!r}: must be a text")
    return value


def _names(name: str, value: object) -> Templates:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise ConfigError(f"kafka.names = {value!r}: must be a table of templates, such as main = '{{prefix}}.main'")
    return templates({str(key): str(text) for key, text in value.items()})


_READERS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "sasl_mechanism": _choice(*MECHANISMS),
    "tls": _switch,
    "cafile": _text,
    "certfile": _text,
    "keyfile": _text,
    "client_id": _text,
    "timeout": _duration(1.0, 300.0),
    "connect_timeout": _duration(0.1, 300.0),
    "session_timeout": _duration(0.5, 1800.0),
    "drain": _duration(0.0, 300.0),
    "commit_interval": _duration(0.01, 60.0),
    "partitions": _whole(1, 10_000),
    "retry_partitions": _whole(1, 10_000),
    "dlq_partitions": _whole(1, 10_000),
    "replication": _whole(1, 15),
    "retention": _age,
    "retry_retention": _age,
    "dlq_retention": _age,
    "compression": _choice(*COMPRESSIONS),
    "dlq_compression": _choice("producer", *COMPRESSIONS),
    "max_event_bytes": _whole(2 * PARKING_MARGIN, 256 * 1024 * 1024),
    "dlq_max_bytes": _whole(2 * PARKING_MARGIN, 512 * 1024 * 1024),
    "dlq_format": _choice("headers", "embedded"),
    "names": _names,
}
