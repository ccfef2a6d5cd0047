"""What the URL and the [kafka] table may say. Pure.

`kafka://user:password@host:9092,other:9092?tls=true&sasl_mechanism=SCRAM-SHA-512`: the hosts are those to begin with,
the cluster tells the rest. Settings stand in the query or in the table.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from eventbus import settings as reading
from eventbus.adapter import PARKING_MARGIN
from eventbus.errors import ConfigError
from eventbus.redaction import redact_url
from eventbus_kafka.names import Templates, templates

DEFAULT_PORT: Final = 9092
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
"""Those that a URL can say all of; the others need a library or a token provider, and `KafkaAdapter.from_client`."""
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
        return reading.tls("kafka", self.cafile, self.certfile, self.keyfile) if self.tls else None


def read(url: str, settings: Mapping[str, object]) -> Options:
    """The options in a URL and its settings; ConfigError names the key, the value and what is allowed."""
    parts = urlsplit(url)
    shown = redact_url(url)
    if parts.scheme != "kafka" or parts.fragment or parts.path.strip("/"):
        raise ConfigError(f"{shown}: write kafka://host:9092,other:9092?setting=value")
    values = reading.read("kafka", parts.query, settings, _READERS)
    login, at, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":") if at else ("", "", "")
    options = Options(
        hosts=reading.hosts(hosts, DEFAULT_PORT, shown),
        username=unquote(username) or None,
        password=unquote(password) or None,
        **values,  # type: ignore[arg-type]
    )
    _check(options)
    if "sasl_mechanism" in values and options.username is None:
        raise ConfigError("kafka.sasl_mechanism: only with a login: kafka://user:password@host")
    return options


def _check(options: Options) -> None:
    if options.username is not None and options.password is None:
        raise ConfigError(f"kafka: user {options.username!r} has no password: write kafka://user:password@host")
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


def _names(name: str, value: object) -> Templates:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise ConfigError(f"{name} = {value!r}: must be a table of templates, such as main = '{{prefix}}.main'")
    return templates({str(key): str(text) for key, text in value.items()})


_AGE: Final = reading.or_none(reading.duration(60.0, 3650 * DAY))

_READERS: Final[Mapping[str, reading.Reader[object]]] = {
    "sasl_mechanism": reading.choice(*MECHANISMS),
    "tls": reading.switch,
    "cafile": reading.text,
    "certfile": reading.text,
    "keyfile": reading.text,
    "client_id": reading.text,
    "timeout": reading.duration(1.0, 300.0),
    "connect_timeout": reading.duration(0.1, 300.0),
    "session_timeout": reading.duration(0.5, 1800.0),
    "drain": reading.duration(0.0, 300.0),
    "commit_interval": reading.duration(0.01, 60.0),
    "partitions": reading.whole(1, 10_000),
    "retry_partitions": reading.whole(1, 10_000),
    "dlq_partitions": reading.whole(1, 10_000),
    "replication": reading.whole(1, 15),
    "retention": _AGE,
    "retry_retention": _AGE,
    "dlq_retention": _AGE,
    "compression": reading.choice(*COMPRESSIONS),
    "dlq_compression": reading.choice("producer", *COMPRESSIONS),
    "max_event_bytes": reading.whole(2 * PARKING_MARGIN, 256 * 1024 * 1024),
    "dlq_max_bytes": reading.whole(2 * PARKING_MARGIN, 512 * 1024 * 1024),
    "dlq_format": reading.choice("headers", "embedded"),
    "names": _names,
}
