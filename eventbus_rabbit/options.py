"""What the URL and the [rabbit] table may say. Pure.

`amqp://user:password@host:5672,other:5672/vhost?heartbeat=30`: several hosts are tried in turn. Options of the bus
stand in the query or in the table; the client's own parameters are not mirrored: pass a ready-made connection.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from yarl import URL

from eventbus.durations import seconds
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
        try:
            context = ssl.create_default_context(cafile=self.cafile)
            if self.certfile:
                context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"rabbit: cafile, certfile or keyfile cannot be used: {error}") from error
        return context


def read(url: str, settings: Mapping[str, object]) -> Options:
    """The options in a URL and its settings; ConfigError names the key, the value and what is allowed."""
    parts = urlsplit(url)
    given: dict[str, object] = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in settings.items():
        if name in given and str(given[name]) != str(value):
            raise ConfigError(f"rabbit.{name} = {value!r} in the settings, {given[name]!r} in the URL: give it once")
        given[name] = value
    for name in given:
        if name not in _READERS and name not in ("layout", "names", "retry_ttl"):
            known = ", ".join([*_READERS, "layout", "names", "retry_ttl"])
            raise ConfigError(f"rabbit.{name} = {given[name]!r}: unknown setting; known are {known}")
    values = {name: read(name, given[name]) for name, read in _READERS.items() if name in given}
    chosen = _layout(given)
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


def _layout(given: Mapping[str, object]) -> Layout:
    names = given.get("names", {})
    if not isinstance(names, Mapping) or not all(isinstance(text, str) for text in names.values()):
        raise ConfigError(f"rabbit.names = {names!r}: must be a table of templates, such as queue = 'q.{{service}}'")
    ttl = given.get("retry_ttl")
    return layout(
        str(given.get("layout", "event-bus")),
        {str(name): text for name, text in names.items()},
        None if ttl is None else round(_duration("retry_ttl", ttl) * 1000),
    )


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


def _choice(*allowed: str) -> Callable[[str, object], str]:
    def choose(name: str, value: object) -> str:
        if value not in allowed:
            raise ConfigError(f"rabbit.{name} = {value!r}: must be {' or '.join(repr(text) for text in allowed)}")
        return str(value)

    return choose


def _duration(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str, timedelta)):
        raise ConfigError(f"rabbit.{name} = {value!r}: must be a duration such as '30s' or a number of seconds")
    try:
        found = seconds(value)
    except ConfigError as error:
        raise ConfigError(f"rabbit.{name} = {value!r}: {error}") from None
    if not 0.001 <= found <= 86_400:
        raise ConfigError(f"rabbit.{name} = {value!r}: must be from 1ms to 1 day")
    return found


def _wait(name: str, value: object) -> float:
    return 0.0 if str(value) in ("0", "0s", "0.0") else _duration(name, value)


def _heartbeat(name: str, value: object) -> int:
    if str(value) in ("0", "0s"):
        return 0
    found = _duration(name, value)
    if not 1 <= found <= 3600:
        raise ConfigError(f"rabbit.{name} = {value!r}: must be 0 (off) or from 1s to 1h")
    return round(found)


def _count(name: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 65535:
        raise ConfigError(f"rabbit.{name} = {value!r}: must be a whole number from 1 to 65535")
    return number


def _file(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"rabbit.{name} = {value!r}: must be the path of a file")
    return value


_READERS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "queue_type": _choice("classic", "quorum"),
    "retry": _choice("copy", "dead-letter"),
    "heartbeat": _heartbeat,
    "prefetch": _count,
    "timeout": _duration,
    "connect_timeout": _duration,
    "settling": _wait,
    "cafile": _file,
    "certfile": _file,
    "keyfile": _file,
}
