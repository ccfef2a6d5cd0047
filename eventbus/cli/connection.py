"""Which bus: --url, else EVENTBUS_URL, else --config, else bus.toml where we stand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from cyclopts import Parameter

from eventbus import registry
from eventbus.adapter import ProvisionMode
from eventbus.bus import Bus
from eventbus.cli.exits import UsageError
from eventbus.errors import BrokerUnavailable, ConfigError
from eventbus.service import Service

if TYPE_CHECKING:
    from eventbus.config import BusConfig

DEFAULT_CONFIG = "bus.toml"


@Parameter(name="*")
@dataclass(frozen=True)
class Connection:
    """The options that say which bus is meant."""

    url: Annotated[str | None, Parameter(env_var="EVENTBUS_URL")] = None
    """The bus: sqlite:///bus.db, amqp://host, kafka://host:9092, redis://host."""
    config: str | None = None
    """A bus.toml to take the URL, the prefix and the broker's settings from."""


NOT_GIVEN = Connection()


@Parameter(name="*")
@dataclass(frozen=True)
class AnyConnection(Connection):
    """Which bus, straight or through its admin API."""

    api: str | None = None
    """Through an admin API instead, such as http://127.0.0.1:8000; its token is in EVENTBUS_TOKEN or --token-file."""
    token_file: str | None = None
    """A file that holds the token for --api."""
    prefix: str | None = None
    """The service's prefix, where it was set by hand."""

    def __post_init__(self) -> None:
        if self.api is not None and (given_url(self.url) or self.config or self.prefix):
            raise UsageError("give --api, or --url, --config and --prefix for the broker itself")


ANYWHERE = AnyConnection()


@dataclass(frozen=True, slots=True)
class Place:
    """A bus that is known by its URL or its bus.toml; not open yet."""

    url: str
    config: BusConfig | None = None

    def bus(self, *, source: str | None = None, prefix: str | None = None) -> Bus:
        """The bus; `source` and `prefix` go before the environment and the file."""
        if self.config is not None and source is None and prefix is None:
            return self.config.bus()
        if self.config is not None:
            return Bus(
                self.config.url,
                source=self.config.source if source is None else source,
                prefix=prefix,
                provision=self.config.provision,
                settings=self.config.settings,
            )
        if source is None:
            source = os.environ.get("EVENTBUS_SOURCE", "")
            prefix = prefix or os.environ.get("EVENTBUS_PREFIX") or None  # a source that was typed goes before it
        return bus_at(self.url, source=source, prefix=prefix)

    def service(self, name: str, prefix: str | None) -> Service:
        """A service by its name; its prefix as given, else as the file has it, else from the name."""
        if prefix is None and self.config is not None:
            prefix = self.config.prefixes.get(name)
        return Service(name, prefix=prefix)


def find(connection: Connection) -> Place:
    """The bus that is meant."""
    config = connection.config
    if config is None and not connection.url:
        if not Path(DEFAULT_CONFIG).is_file():
            raise UsageError("no bus: give --url sqlite:///bus.db, set EVENTBUS_URL, or give --config bus.toml")
        config = DEFAULT_CONFIG
    if config is None:
        assert connection.url
        return Place(connection.url)
    from eventbus.config import load

    loaded = load(config, url=given_url(connection.url))
    return Place(loaded.url, loaded)


def given_url(url: str | None) -> str | None:
    """The URL if it was typed: one from the environment is found, and named, by whoever reads the file."""
    return None if not url or url == os.environ.get("EVENTBUS_URL") else url


def bus_at(url: str, *, source: str = "", prefix: str | None = None) -> Bus:
    """A bus by its URL; what is wrong with the URL is told without its password."""
    provision = cast("ProvisionMode", os.environ.get("EVENTBUS_PROVISION") or "create")
    try:
        registry.adapter_class(url)
    except ConfigError as error:
        from eventbus.config import safe_url, why_not

        raise ConfigError(f"{safe_url(url)}: {why_not(url, error)}") from None
    return Bus(url, source=source, prefix=prefix, provision=provision, settings=_settings())


def _settings() -> Mapping[str, Mapping[str, object]] | None:
    """Settings of brokers from the environment, such as EVENTBUS_SQLITE__LEASE; read only if there are any."""
    if not any(name.startswith("EVENTBUS_") and "__" in name for name in os.environ):
        return None
    from eventbus.config.environment import overrides

    found, _ = overrides(os.environ)
    return {name: table for name, table in found.items() if isinstance(table, dict)}


def must_exist(bus: Bus) -> None:
    """Looking must not make a bus: a SQLite file that is not there would be created by opening it."""
    path = getattr(bus.adapter, "path", None)
    if bus.adapter.name == "sqlite" and isinstance(path, str) and not os.path.exists(path):
        raise BrokerUnavailable(f"{bus.url}: there is no file {path}; a bus is made by the first publish or run")
