"""What SQLite's errors mean for us, in one place, each with what to do about it."""

from __future__ import annotations

import sqlite3
from typing import Final

from eventbus.durations import human
from eventbus.errors import BrokerError, BrokerUnavailable, ConfigError

_IO_WRITE: Final = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_NOMEM})


class NotStored(BrokerError):
    """The transaction was rolled back: nothing of it is in the file."""


class FateUnknown(BrokerError):
    """The commit failed so late that the transaction may or may not be in the file after a crash."""


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody else holds the lock."""
    return _primary(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def locked(path: str, waited: float) -> BrokerUnavailable:
    """Another process has kept the write lock for too long."""
    return BrokerUnavailable(
        f"{path} was locked by another process for {human(waited)}; find it with `fuser {path}`, end its "
        f"transaction, or raise sqlite.lock_timeout"
    )


def translate(error: sqlite3.Error, path: str, *, committing: bool = False) -> BrokerError:
    """The error to show for a failed transaction. `committing`: it was COMMIT itself that failed."""
    code, text = _primary(error), f"{path}: {error}"
    if code == sqlite3.SQLITE_FULL:
        return NotStored(f"{path}: the disk is full (or its quota is used up); free some space, nothing was lost")
    if code == sqlite3.SQLITE_READONLY:
        return NotStored(f"{path} cannot be written; give this user write access to the file and its folder")
    if code == sqlite3.SQLITE_IOERR and _extended(error) not in _IO_WRITE and committing:
        return FateUnknown(f"{text}; whether the last transaction is on the disk is not known")
    if code == sqlite3.SQLITE_IOERR:
        return NotStored(f"{text}; the disk cannot be written (full, over a limit, or failing), nothing was stored")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return NotStored(f"{text}; stop all processes, keep a copy, and mend it with `sqlite3 FILE .recover`")
    return NotStored(text)


def opening(error: sqlite3.Error, path: str) -> Exception:
    """The error to show when the file could not be opened."""
    code = _primary(error)
    if code == sqlite3.SQLITE_NOTADB:
        return ConfigError(f"{path} is not an SQLite database; name another file, or move this one away")
    if code == sqlite3.SQLITE_CANTOPEN:
        return BrokerUnavailable(f"{path} cannot be opened; give this user read and write access to it and its folder")
    if code == sqlite3.SQLITE_READONLY:
        return BrokerUnavailable(f"{path} is read-only; give this user write access to the file and its folder")
    return translate(error, path)


def _primary(error: sqlite3.Error) -> int:
    return _extended(error) & 0xFF


def _extended(error: sqlite3.Error) -> int:
    # Errors that the Python module raises by itself (a closed connection, a wrong binding) carry no code.
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code
