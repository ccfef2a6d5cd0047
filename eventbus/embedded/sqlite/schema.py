"""The file: its tables, its versions, and how a connection to it is opened."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar
from urllib.parse import quote

from eventbus.embedded.sqlite import failures, tallies
from eventbus.errors import BrokerError, ConfigError

T = TypeVar("T")

APPLICATION: Final = 0x65627573
"""`ebus`: says to file(1) and to us whose file it is."""

LOG_BITS: Final = 40
"""An event's number is its log's number and its place there: one table, a contiguous range for each log."""

RETRY_PAUSE: Final = 0.0005
"""SQLite's own busy handler sleeps ever longer and starves one of two processes; a short fixed pause is fair."""

_EVENT: Final = """
    id TEXT NOT NULL, type TEXT NOT NULL, source TEXT NOT NULL, time TEXT NOT NULL, body BLOB NOT NULL,
    content_type TEXT, key TEXT, tenant TEXT, correlation_id TEXT, process_after TEXT, expires_at TEXT, extra TEXT
"""

Step: TypeAlias = "str | Callable[[sqlite3.Connection], None]"

MIGRATIONS: Final[tuple[tuple[Step, ...], ...]] = (
    (
        # head: the number of the newest event; it only grows, so head - cursor is an exact depth.
        "CREATE TABLE logs (no INTEGER PRIMARY KEY, prefix TEXT NOT NULL UNIQUE, head INTEGER NOT NULL)",
        "CREATE TABLE subscriptions (id INTEGER PRIMARY KEY AUTOINCREMENT, prefix TEXT NOT NULL, "
        "service TEXT NOT NULL, log INTEGER NOT NULL, cursor INTEGER NOT NULL, created_at INTEGER NOT NULL, "
        "UNIQUE (prefix, service))",
        "CREATE INDEX subscriptions_log ON subscriptions (log, cursor)",
        # Re-driven events have negative numbers: behind every cursor, so that only their own service sees them.
        f"CREATE TABLE events (seq INTEGER PRIMARY KEY, stored_at INTEGER NOT NULL, {_EVENT})",
        # Leased: token is set and due is the lease's end. Waiting (retry, requeue, release): token is NULL.
        "CREATE TABLE inflight (seq INTEGER NOT NULL, subscription INTEGER NOT NULL, due INTEGER NOT NULL, "
        "token INTEGER, headers TEXT, PRIMARY KEY (seq, subscription)) WITHOUT ROWID",
        "CREATE INDEX inflight_due ON inflight (subscription, due, token)",
        # AUTOINCREMENT: an address is never given twice, or a late purge would hit another letter.
        "CREATE TABLE dlq (no INTEGER PRIMARY KEY AUTOINCREMENT, subscription INTEGER NOT NULL, "
        "event_id TEXT NOT NULL, parked_at INTEGER NOT NULL, reason TEXT, status INTEGER, code TEXT, "
        f"due INTEGER NOT NULL, token INTEGER, headers TEXT NOT NULL, stored_at INTEGER NOT NULL, {_EVENT})",
        "CREATE INDEX dlq_order ON dlq (subscription)",
        "CREATE INDEX dlq_due ON dlq (subscription, due)",
        "CREATE INDEX dlq_event ON dlq (event_id, subscription)",
    ),
    (
        # facets: a JSON object with the letter's value of every facet. The triggers keep the tally, whoever parks,
        # re-drives, purges or expires, in the same transaction.
        "ALTER TABLE dlq ADD COLUMN facets TEXT NOT NULL DEFAULT '{}'",
        "CREATE TABLE tally (subscription INTEGER NOT NULL, facet TEXT NOT NULL, value TEXT NOT NULL, "
        "letters INTEGER NOT NULL, PRIMARY KEY (subscription, facet, value)) WITHOUT ROWID",
        tallies.fill,
        "INSERT INTO tally SELECT subscription, j.key, j.value, count(*) FROM dlq, json_each(dlq.facets) j "
        "GROUP BY 1, 2, 3",
        "CREATE TRIGGER dlq_counted AFTER INSERT ON dlq BEGIN INSERT INTO tally "
        "SELECT new.subscription, key, value, 1 FROM json_each(new.facets) WHERE true "
        "ON CONFLICT DO UPDATE SET letters = letters + 1; END",
        "CREATE TRIGGER dlq_discounted AFTER DELETE ON dlq BEGIN INSERT INTO tally "
        "SELECT old.subscription, key, value, -1 FROM json_each(old.facets) WHERE true "
        "ON CONFLICT DO UPDATE SET letters = letters - 1; "
        "DELETE FROM tally WHERE subscription = old.subscription AND letters = 0 "
        "AND (facet, value) IN (SELECT key, value FROM json_each(old.facets)); END",
    ),
    (
        # What stands behind the cursor and waits for its tenant's turn, or for its key to be free. Only services with
        # fairness or order fill these columns: the indexes are empty for the others.
        "ALTER TABLE inflight ADD COLUMN tenant TEXT",
        "ALTER TABLE inflight ADD COLUMN key TEXT",
        "CREATE INDEX inflight_tenant ON inflight (subscription, tenant, seq) WHERE tenant IS NOT NULL",
        "CREATE INDEX inflight_key ON inflight (subscription, key, seq) WHERE key IS NOT NULL",
        # The store: owner is NULL for what is completed, and set while somebody has claimed it.
        "CREATE TABLE completed (service TEXT NOT NULL, name TEXT NOT NULL, owner TEXT, until INTEGER NOT NULL, "
        "PRIMARY KEY (service, name)) WITHOUT ROWID",
        "CREATE INDEX completed_until ON completed (until)",
        "CREATE TABLE rates (name TEXT NOT NULL, slot INTEGER NOT NULL, used INTEGER NOT NULL, "
        "PRIMARY KEY (name, slot)) WITHOUT ROWID",
    ),
    (
        # Who removes many letters at once counts them out at once: while a row stands in this table, which nobody else
        # ever sees, the trigger leaves the tally alone. It stays for everybody else, and for older versions of us.
        "CREATE TABLE counted_out (no INTEGER PRIMARY KEY)",
        "CREATE INDEX tally_none ON tally (subscription) WHERE letters = 0",
        "DROP TRIGGER dlq_discounted",
        "CREATE TRIGGER dlq_discounted AFTER DELETE ON dlq WHEN NOT EXISTS (SELECT 1 FROM counted_out) "
        "BEGIN INSERT INTO tally SELECT old.subscription, key, value, -1 FROM json_each(old.facets) WHERE true "
        "ON CONFLICT DO UPDATE SET letters = letters - 1; "
        "DELETE FROM tally WHERE subscription = old.subscription AND letters = 0; END",
    ),
)
"""One entry per version, in order; a released one is never changed. To change the schema, add one."""


def connect(path: str, *, write: bool) -> sqlite3.Connection:
    """A connection in autocommit mode; transactions are begun by hand."""
    mode = "rwc" if write else "ro"
    # Readers never wait for writers in WAL mode, but may for a recovery or the last writer's goodbye.
    connection = sqlite3.connect(
        f"file:{quote(path)}?mode={mode}", uri=True, isolation_level=None, timeout=0.0 if write else 5.0
    )
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def prepare(path: str, lock_timeout: float) -> sqlite3.Connection:
    """The writer's connection to a file of our current version, made or migrated where needed."""
    connection = connect(path, write=True)
    try:
        _claim_file(connection, path, lock_timeout)
        migrate(connection, path, lock_timeout)
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: sqlite3.Connection, path: str, lock_timeout: float) -> None:
    """Bring the file to the current version, each step in its own transaction."""
    while version(connection) < len(MIGRATIONS):
        begin(connection, path, lock_timeout)
        try:
            # Asked again inside the transaction: another process may have been faster.
            step = version(connection)
            if step < len(MIGRATIONS):
                for statement in MIGRATIONS[step]:
                    if callable(statement):
                        statement(connection)
                    else:
                        connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {step + 1}")
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    if version(connection) > len(MIGRATIONS):
        raise BrokerError(
            f"{path} has version {version(connection)}, made by a newer eventbus; this one knows {len(MIGRATIONS)}: "
            f"install the newer one (files are never brought back)"
        )


def version(connection: sqlite3.Connection) -> int:
    """The file's schema version; 0 for an empty one."""
    number: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return number


def begin(connection: sqlite3.Connection, path: str, lock_timeout: float) -> None:
    """Take the write lock, with patience and a deadline."""
    patiently(lambda: connection.execute("BEGIN IMMEDIATE"), path, lock_timeout)


def patiently(action: Callable[[], T], path: str, lock_timeout: float) -> T:
    """Do it again while another process holds the lock; BrokerUnavailable after the deadline."""
    started = 0.0
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if not failures.is_busy(error):
                raise
        now = time.monotonic()
        started = started or now
        if now - started >= lock_timeout:
            raise failures.locked(path, lock_timeout)
        # A lock held for over a second is not the usual coming and going: no need to ask 2,000 times a second.
        time.sleep(RETRY_PAUSE if now - started < 1.0 else 0.01)


def _claim_file(connection: sqlite3.Connection, path: str, lock_timeout: float) -> None:
    """See that the file is ours or empty, and put it into WAL mode."""

    def whose() -> tuple[int, int]:
        # In one transaction: another process may be making the file just now.
        connection.execute("BEGIN")
        try:
            tables: int = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            application: int = connection.execute("PRAGMA application_id").fetchone()[0]
        finally:
            connection.execute("ROLLBACK")
        return application, tables

    application, tables = patiently(whose, path, lock_timeout)
    if tables and application != APPLICATION:
        raise ConfigError(f"{path} is the database of another program; name another file")

    def settings() -> None:
        # Works only before the first table is made; lets the file shrink again after a burst.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise BrokerError(f"{path}: this file system or SQLite build has no WAL mode (it offers {mode!r})")

    patiently(settings, path, lock_timeout)
    # After a burst the WAL file is cut back to this size.
    connection.execute(f"PRAGMA journal_size_limit = {64 * 1024 * 1024}")
