"""The file's versions: made, migrated forward, never backward, and never somebody else's."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from eventbus.embedded.sqlite import schema
from eventbus.errors import BrokerError, ConfigError
from eventbus.event import Event
from tests.adapter.sqlite_support import SUB, opened, receive, sql


async def test_a_new_file_has_the_current_version(tmp_path: Path) -> None:
    """The file says whose it is and which version it has, and is in WAL mode."""
    async with opened(tmp_path, SUB):
        assert sql(tmp_path, "PRAGMA user_version") == [(len(schema.MIGRATIONS),)]
        assert sql(tmp_path, "PRAGMA application_id") == [(schema.APPLICATION,)]
        assert sql(tmp_path, "PRAGMA journal_mode") == [("wal",)]


async def test_an_empty_file_becomes_a_bus(tmp_path: Path) -> None:
    """A file of version 0 without tables, as touch(1) or sqlite3 leaves it, is taken."""
    (tmp_path / "bus.db").touch()
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("a")])
        assert (await adapter.stats("wms-stock", "wms")).ready == 1


async def test_an_older_file_is_brought_forward_with_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a file of an older version runs the missing migrations; nothing in it is lost."""
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("kept")])
    newer = (
        *schema.MIGRATIONS,
        ("ALTER TABLE subscriptions ADD COLUMN paused INTEGER NOT NULL DEFAULT 0",),
        ("CREATE TABLE extra (a)", "INSERT INTO extra VALUES (42)"),
    )
    monkeypatch.setattr(schema, "MIGRATIONS", newer)
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        assert (await receive(consumer))[0].event.type == "kept"
        assert sql(tmp_path, "PRAGMA user_version") == [(len(newer),)]
        assert sql(tmp_path, "SELECT a, (SELECT paused FROM subscriptions) FROM extra") == [(42, 0)]
    async with opened(tmp_path, SUB):
        assert sql(tmp_path, "SELECT count(*) FROM extra") == [(1,)]


async def test_letters_of_a_file_without_an_index_are_counted_by_its_migration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of version 1 with dead letters has, once opened, the index a new file would have."""
    first = sqlite3.connect(tmp_path / "bus.db", isolation_level=None)
    with closing(first), monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        schema.migrate(first, "bus.db", 1.0)
        for subscription in (1, 1, 2):
            story = json.dumps(
                {"x-park-reason": "permanent", "x-final-error": "no order 7", "x-final-status-code": 404}
            )
            first.execute(
                "INSERT INTO dlq (subscription, event_id, parked_at, due, headers, stored_at, id, type, source, "
                "time, body, tenant) VALUES (?, 'a', 0, 0, ?, 0, 'a', 'order.created', '', '2026-03-01', x'', 'acme')",
                (subscription, story),
            )
        first.execute("INSERT INTO logs VALUES (1, 'wms', 1)")
        first.execute("INSERT INTO subscriptions VALUES (1, 'wms', 'wms-stock', 1, 1, 0)")
    async with opened(tmp_path) as adapter:
        box = adapter.parking("wms-stock", "wms")
        assert await box.depth() == 2
        assert await box.tally("reason") == {"permanent": 2}
        assert await box.tally("tenant") == {"acme": 2}
        assert await box.tally("status") == {"404": 2}
        assert list((await box.tally("fingerprint")).values()) == [2]
        await box.purge(["1"])
        assert (await box.tally("type"), await box.depth()) == ({"order.created": 1}, 1)


async def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is one transaction: half of one is none."""
    async with opened(tmp_path, SUB):
        pass
    with monkeypatch.context() as patch:
        broken = (*schema.MIGRATIONS, ("CREATE TABLE extra (a)", "INSERT INTO nowhere VALUES (1)"))
        patch.setattr(schema, "MIGRATIONS", broken)
        with pytest.raises(BrokerError, match="nowhere"):
            async with opened(tmp_path, SUB):
                pass
    assert sql(tmp_path, "PRAGMA user_version") == [(len(schema.MIGRATIONS),)]
    assert sql(tmp_path, "SELECT count(*) FROM sqlite_schema WHERE name = 'extra'") == [(0,)]
    async with opened(tmp_path, SUB):
        pass


async def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    """A file made by a newer release is not touched; the error says what to install."""
    async with opened(tmp_path, SUB):
        pass
    sql(tmp_path, "PRAGMA user_version = 99")
    with pytest.raises(BrokerError, match=r"version 99.*newer"):
        async with opened(tmp_path, SUB):
            pass
    assert sql(tmp_path, "PRAGMA user_version") == [(99,)]


async def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    """Tables that are not ours mean that the URL names the wrong file; nothing is changed in it."""
    with closing(sqlite3.connect(tmp_path / "bus.db")) as connection, connection:
        connection.execute("CREATE TABLE users (name TEXT)")
    before = (tmp_path / "bus.db").read_bytes()
    with pytest.raises(ConfigError, match="another program"):
        async with opened(tmp_path, SUB):
            pass
    assert (tmp_path / "bus.db").read_bytes() == before
