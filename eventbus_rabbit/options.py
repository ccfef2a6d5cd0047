"""What the URL and the [rabbit] table may say. Pure.

`amqp://user:password@host:5672,other:5672/vhost?heartbeat=30`: several hosts are tried in turn. Options of the bus
stand in the query or in the table; the client's own parameters are not mirrored: pass a ready-made connection.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from yarl import URL

from eventbus import settings as reading
from eventbus.errors import ConfigError
from eventbus.redaction import redact_url
from eventbus_rabbit.names import Layout, layout

DEFAULT_PORTS: Final = {"amqp": 5672, "amqps": 5671}


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one RabbitMQ bus."""

    urls: tuple[URL, ...]
    layout: Layout
    queue_type: Literal["classic", "quorum"] = "classic"
    retry: Literal["copy", "dead-letter"] = "copy"
    heartbeat: int = 60
    prefetch: int | None = None
    timeout: float = 30.0
    connect_timeout: float = 10.0
    settling: float = 1.5
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None

    @property
    def where(self) -> str:
        """Host and port, for error texts; never the password."""
        return ", ".join(f"{url.host}:{url.port}" for url in self.urls)

    @property
    def vhost(self) -> str:
        """The vhost of the URL."""
        return (unquote(self.urls[0].raw_path[1:]) if self.urls else "") or "/"

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of an amqps:// URL; verification is always on."""
        if not self.urls or self.urls[0].scheme != "amqps":
            return None
        return reading.tls("rabbit", self.cafile, self.certfile, self.keyfile)


def read(url: str, settings: Mapping[str, object]) -> Options:
    """The options in a URL and its settings; ConfigError names the key, the value and what is allowed."""
    values = reading.read("rabbit", urlsplit(url).query, settings, _READERS)
    ttl = values.pop("retry_ttl", None)
    chosen = layout(
        str(values.pop("layout", "event-bus")),
        values.pop("names", {}),  # type: ignore[arg-type]
        None if ttl is None else round(ttl * 1000),  # type: ignore[operator]
    )
    options = Options(_urls(url), chosen, **values)  # type: ignore[arg-type]
    if options.retry == "dead-letter" and chosen.reject_exchange != chosen.retry_exchange:
        raise ConfigError(
            "rabbit.retry = 'dead-letter': in this layout a reject goes to the dead letters, not to a retry"
        )
    if options.keyfile and not options.certfile:
        raise ConfigError("rabbit.keyfile: give certfile too")
    if (options.cafile or options.certfile) and options.urls[0].scheme != "amqps":
        raise ConfigError("rabbit.cafile, certfile: only amqps:// uses TLS")
    return options


def plain() -> Options:
    """The options of a ready-made connection without settings."""
    return Options((), layout("event-bus", {}))


def with_settings(settings: Mapping[str, object]) -> Options:
    """The options of a ready-made connection."""
    return read("amqp://ready-made", settings)


def _urls(url: str) -> tuple[URL, ...]:
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    if parts.fragment:
        raise ConfigError(f"{redact_url(url)}: write '#' in a URL as %23")
    vhost = parts.path[1:] if len(parts.path) > 1 else ""
    if "/" in vhost.rstrip("/") or vhost.endswith("/"):
        raise ConfigError(f"{redact_url(url)}: write a '/' inside the vhost as %2F")
    user, _, password = credentials.partition(":")
    found = []
    for host in hosts.split(",") if hosts else ["localhost"]:
        name, port = _host(host, url)
        found.append(
            URL.build(
                scheme=parts.scheme,
                user=unquote(user) if at else "guest",
                password=unquote(password) if at else "guest",
                host=name,
                port=port or DEFAULT_PORTS[parts.scheme],
                path="/" + vhost if vhost else "/",
                encoded=False,
            )
        )
    if vhost:
        found = [entry.with_path("/" + unquote(vhost).replace("/", "%2F"), encoded=True) for entry in found]
    return tuple(found)


def _host(text: str, url: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, ""
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{redact_url(url)}: {port!r} is not a port")
    if not host:
        raise ConfigError(f"{redact_url(url)}: a host is empty")
    return host.strip("[]"), int(port) if port else None


def _names(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise ConfigError(f"{name} = {value!r}: must be a table of templates, such as queue = 'q.{{service}}'")
    return {str(key): text for key, text in value.items()}


def _or_zero(reader: reading.Reader[float]) -> reading.Reader[float]:
    return lambda name, value: 0.0 if str(value) in ("0", "0s", "0.0") else reader(name, value)


_TIME: Final = reading.duration(0.001, 86_400.0)
_HEARTBEAT: Final = _or_zero(reading.duration(1.0, 3600.0))

_READERS: Final[Mapping[str, reading.Reader[object]]] = {
    "queue_type": reading.choice("classic", "quorum"),
    "retry": reading.choice("copy", "dead-letter"),
    "heartbeat": lambda name, value: round(_HEARTBEAT(name, value)),
    "prefetch": reading.whole(1, 65535),
    "timeout": _TIME,
    "connect_timeout": _TIME,
    "settling": _or_zero(_TIME),
    "cafile": reading.text,
    "certfile": reading.text,
    "keyfile": reading.text,
    "layout": reading.text,
    "names": _names,
    "retry_ttl": _TIME,
}
