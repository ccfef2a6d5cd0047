"""Adapters by URL scheme: found, missing, or not a URL at all."""

from __future__ import annotations

import sys

import pytest

from eventbus import AdapterMissing, Bus, ConfigError, registry
from eventbus.embedded.memory import MemoryAdapter


@pytest.mark.parametrize("url", ["memory://", "memory://name", "MEMORY://"])
def test_memory_is_built_in(url):
    """Scheme names do not care for capital letters."""
    assert registry.adapter_class(url) is MemoryAdapter
    assert isinstance(Bus(url).adapter, MemoryAdapter)


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("amqp://wms:hunter2@localhost", "eventbus-rabbit"),
        ("amqps://wms:hunter2@localhost", "eventbus-rabbit"),
        ("kafka://localhost:9092", "eventbus-kafka"),
        ("redis://:hunter2@localhost", "eventbus-redis"),
        ("rediss://:hunter2@localhost", "eventbus-redis"),
    ],
)
def test_a_missing_adapter_says_what_to_install(url, package, monkeypatch):
    """The error is a command that can be typed, and holds no password."""
    for module in ("eventbus_rabbit", "eventbus_kafka", "eventbus_redis"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(AdapterMissing, match=f"pip install {package}") as caught:
        Bus(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["carrier-pigeon://loft", "http://localhost", "amq://localhost"])
def test_an_unknown_scheme_lists_the_known_ones(url):
    """The error names the scheme and everything that would work."""
    with pytest.raises(ConfigError, match="no adapter for") as caught:
        Bus(url)
    for scheme in ("amqp://", "kafka://", "redis://", "sqlite://", "memory://"):
        assert scheme in str(caught.value)


def test_an_unknown_scheme_shows_no_password():
    """A mistyped URL is printed without its secret."""
    with pytest.raises(ConfigError) as caught:
        Bus("ampq://wms:hunter2@localhost")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["", "memory", "localhost:5672", "sqlite:bus.db", "://x", "//x", "memory:/x", None, 5, b"memory://", "1x://y"],
    ids=repr,
)
def test_what_is_not_a_url_is_a_config_error(url):
    """The error shows how one looks."""
    with pytest.raises(ConfigError, match="is not a bus URL"):
        Bus(url)


@pytest.mark.parametrize("url", ["amqp://[::1", "memory://[", "kafka://[x]:y"])
def test_a_url_that_cannot_be_split_is_a_config_error(url, monkeypatch):
    """A forgotten bracket is a wrong setting, not a ValueError from the library."""
    for module in ("eventbus_rabbit", "eventbus_kafka"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError):
        Bus(url)


@pytest.mark.parametrize("url", ["memory://a/b", "memory://?x=1", "memory:///path"])
def test_memory_takes_only_a_name(url):
    """What it cannot keep is an error at start, never ignored."""
    with pytest.raises(ConfigError, match="memory://name"):
        Bus(url)


def test_an_unknown_setting_of_an_adapter_is_a_config_error():
    """Its own table is checked; the tables of other brokers are not its business."""
    with pytest.raises(ConfigError, match="colour"):
        Bus("memory://", settings={"memory": {"colour": "red"}})
    Bus("memory://", settings={"rabbit": {"queue_type": "quorum"}})


def test_an_entry_point_brings_an_adapter_of_a_stranger(monkeypatch):
    """A scheme we do not know is looked up among the installed packages."""

    class Entry:
        name = value = "pigeon"

        @staticmethod
        def load() -> object:
            return MemoryAdapter

    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group, name=None: [Entry] if name in (None, "pigeon") else []
    )
    assert registry.adapter_class("pigeon://loft") is MemoryAdapter
    assert registry.settings_table("pigeon://loft") == "pigeon"
    assert registry.settings_table("amqps://x") == "rabbit"


def test_an_entry_point_that_is_no_adapter_is_a_config_error(monkeypatch):
    """The error names the package that is wrong."""

    class Entry:
        name, value = "pigeon", "loft:Pigeon"

        @staticmethod
        def load() -> object:
            return dict

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group, name=None: [Entry])
    with pytest.raises(ConfigError, match="loft:Pigeon"):
        registry.adapter_class("pigeon://loft")


def test_no_url_in_the_environment_says_what_to_set(monkeypatch):
    """Bus.from_env without EVENTBUS_URL is a ConfigError with an example."""
    monkeypatch.delenv("EVENTBUS_URL", raising=False)
    with pytest.raises(ConfigError, match="EVENTBUS_URL="):
        Bus.from_env()
