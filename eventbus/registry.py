"""Adapters and stores by URL scheme. Nothing is imported before it is asked for; a missing one says what to install."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from eventbus.adapter import Adapter
from eventbus.errors import AdapterMissing, ConfigError
from eventbus.redaction import redact_url
from eventbus.store import Store

GROUP: Final = "eventbus.adapters"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """Where an adapter of ours lives, what brings it, and the name of its table in bus.toml."""

    target: str
    install: str
    table: str


# By module name and not by entry point: a plain checkout has no entry points.
_BUILT_IN: Final[Mapping[str, BuiltIn]] = {
    "memory": BuiltIn("eventbus.embedded.memory:MemoryAdapter", "eventbus-core", "memory"),
    "sqlite": BuiltIn("eventbus.embedded.sqlite:SqliteAdapter", "eventbus-core", "sqlite"),
    "amqp": BuiltIn("eventbus_rabbit:RabbitAdapter", "eventbus-rabbit", "rabbit"),
    "amqps": BuiltIn("eventbus_rabbit:RabbitAdapter", "eventbus-rabbit", "rabbit"),
    "kafka": BuiltIn("eventbus_kafka:KafkaAdapter", "eventbus-kafka", "kafka"),
    "redis": BuiltIn("eventbus_redis:RedisAdapter", "eventbus-redis", "redis"),
    "rediss": BuiltIn("eventbus_redis:RedisAdapter", "eventbus-redis", "redis"),
}

_STORES: Final[Mapping[str, BuiltIn]] = {
    "memory": BuiltIn("eventbus.embedded.memory_store:MemoryStore", "eventbus-core", "memory"),
    "sqlite": BuiltIn("eventbus.embedded.sqlite.store:SqliteStore", "eventbus-core", "sqlite"),
    "redis": BuiltIn("eventbus_redis.store:RedisStore", "eventbus-redis", "redis"),
    "rediss": BuiltIn("eventbus_redis.store:RedisStore", "eventbus-redis", "redis"),
}


def adapter_class(url: str) -> type[Adapter]:
    """The adapter for a URL's scheme."""
    scheme = scheme_of(url)
    built_in = _BUILT_IN.get(scheme)
    if built_in is not None:
        found: type[Adapter] = _load_built_in(scheme, built_in)
        return found
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP, name=scheme):
        loaded = entry.load()
        if isinstance(loaded, type) and issubclass(loaded, Adapter):
            return loaded
        raise ConfigError(f"{scheme}: entry point {entry.value} is not an Adapter")
    known = sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})
    raise ConfigError(
        f"{redact_url(url)}: no adapter for {scheme!r}; known are {', '.join(name + '://' for name in known)}"
    )


def open_adapter(url: str, settings: Mapping[str, Mapping[str, object]] | None = None) -> Adapter:
    """An adapter made from a URL and, of all the brokers' settings, its own table."""
    adapter = adapter_class(url)
    return adapter.from_url(url, (settings or {}).get(settings_table(url), {}))


def settings_table(url: str) -> str:
    """The name of the adapter's table in bus.toml."""
    scheme = scheme_of(url)
    return _BUILT_IN[scheme].table if scheme in _BUILT_IN else scheme


def scheme_of(url: str) -> str:
    """The scheme of a bus URL."""
    try:
        scheme = urlsplit(url).scheme if isinstance(url, str) else ""
    except ValueError as error:
        raise ConfigError(f"{redact_url(url)!r} is not a URL: {error}") from None
    if not scheme or "://" not in url:
        raise ConfigError(
            f"{redact_url(str(url))!r} is not a bus URL; write amqp://host, kafka://host:9092, redis://host, "
            f"sqlite:///bus.db or memory://"
        )
    return scheme


def open_store(url: str) -> Store:
    """A store made from its URL; the same databases as a bus, where they can keep one."""
    scheme = scheme_of(url)
    built_in = _STORES.get(scheme)
    if built_in is None:
        raise ConfigError(f"{redact_url(url)}: no store; write redis://host, sqlite:///file or memory://")
    store: Store = _load_built_in(scheme, built_in).from_url(url)
    return store


def _load_built_in(scheme: str, built_in: BuiltIn) -> Any:
    module, _, name = built_in.target.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise AdapterMissing(
            f"{scheme}:// needs the package {built_in.install}: pip install {built_in.install} ({error})"
        ) from error
    return getattr(loaded, name)
