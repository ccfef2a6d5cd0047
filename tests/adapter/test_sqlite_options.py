"""What the URL and the [sqlite] table may say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventbus.adapter import Subscription
from eventbus.embedded.sqlite import SqliteAdapter, options
from eventbus.errors import ConfigError
from eventbus.registry import open_adapter


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///bus.db", os.path.abspath("bus.db")),
        ("sqlite:///data/bus.db", os.path.abspath("data/bus.db")),
        ("sqlite:////var/lib/bus.db", "/var/lib/bus.db"),
        ("sqlite:////tmp/a%20b%23c.db", "/tmp/a b#c.db"),
    ],
)
def test_three_slashes_are_relative_and_four_absolute(url: str, path: str) -> None:
    """The path is taken from the URL, decoded, and made absolute."""
    assert options.read(url, {}).path == path


def test_settings_come_from_the_query_and_from_the_table() -> None:
    """Both places take the same names and the same ways to write a duration."""
    found = options.read("sqlite:///b.db?lease=5s&dlq_max_entries=100", {"dlq_max_age": "7d", "lock_timeout": 2})
    assert found == options.Options(os.path.abspath("b.db"), 5.0, 7 * 86400.0, 100, 2.0)
    assert options.read("sqlite:///b.db?lease=5s", {"lease": "5s"}).lease == 5.0


@pytest.mark.parametrize(
    ("url", "settings", "words"),
    [
        ("sqlite:///", {}, "name the file"),
        ("sqlite:///folder/", {}, "name the file"),
        ("sqlite://bus.db", {}, "sqlite:///bus.db"),
        ("sqlite:///:memory:", {}, "memory://"),
        ("sqlite:///a#b", {}, "%23"),
        ("sqlite:///a%00b", {}, "NUL"),
        ("sqlite:///b", {"leese": 1}, "sqlite.leese = 1: unknown.*lease"),
        ("sqlite:///b?leese=1", {}, "sqlite.leese = '1': unknown"),
        ("sqlite:///b", {"lease": "soon"}, "sqlite.lease = 'soon'.*5s"),
        ("sqlite:///b", {"lease": 0.01}, "sqlite.lease = 0.01.*at least 100ms"),
        ("sqlite:///b", {"lease": None}, "sqlite.lease = None"),
        ("sqlite:///b", {"lease": True}, "sqlite.lease = True"),
        ("sqlite:///b", {"lock_timeout": -1}, "sqlite.lock_timeout = -1"),
        ("sqlite:///b", {"dlq_max_entries": 0}, "sqlite.dlq_max_entries = 0.*from 1"),
        ("sqlite:///b?dlq_max_entries=ten", {}, "sqlite.dlq_max_entries = 'ten'"),
        ("sqlite:///b", {"dlq_max_entries": 1.5}, "sqlite.dlq_max_entries = 1.5"),
        ("sqlite:///b", {"dlq_max_age": [1]}, "sqlite.dlq_max_age"),
        ("sqlite:///b", {"max_event_bytes": 10}, "sqlite.max_event_bytes = 10"),
        ("sqlite:///b?lease=5s", {"lease": "6s"}, "give it once"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(url: str, settings: dict[str, object], words: str) -> None:
    """The error names the key, the value and what is allowed."""
    with pytest.raises(ConfigError, match=words):
        options.read(url, settings)


def test_making_an_adapter_touches_nothing(tmp_path: Path) -> None:
    """from_url opens no file; that is for open()."""
    adapter = open_adapter(f"sqlite:///{tmp_path}/bus.db", {"sqlite": {"lease": "1s"}})
    assert isinstance(adapter, SqliteAdapter)
    assert adapter.options.lease == 1.0
    assert list(tmp_path.iterdir()) == []


def test_the_topology_names_everything(tmp_path: Path) -> None:
    """A log per prefix feeds the queues of its services; each has its dead letters, with their settings."""
    adapter = SqliteAdapter.from_url(f"sqlite:///{tmp_path}/bus.db", {"dlq_max_age": "7d", "dlq_max_entries": 10})
    found = adapter.topology([Subscription("wms-a", "wms"), Subscription("wms-b", "wms"), Subscription("c", "default")])
    by_name = {resource.name: resource for resource in found.resources}
    assert by_name["wms.main"].feeds == ("wms.queue.wms-a", "wms.queue.wms-b")
    assert by_name["default.main"].kind == "log"
    assert by_name["wms.queue.wms-a"].feeds == ("wms.dlq.wms-a",)
    assert by_name["wms.queue.wms-a"].arguments == {"lease": "30s"}
    assert by_name["wms.dlq.wms-b"].arguments == {"max_age": "7d", "max_entries": 10}
    assert len(by_name) == len(found.resources) == 8
