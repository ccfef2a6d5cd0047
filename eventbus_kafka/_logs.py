"""aiokafka's own log, made fit to be read: no flood while a broker is down, and no password at DEBUG.

A dead broker makes it write the same few lines about seventy times a second. Each kind of them passes once a minute,
and says how many like it did not. What it tells of a group's daily life, a dozen long lines at every start, does not
pass: what matters of it we say ourselves. Whoever sets a level on the logger `aiokafka`, or on one below it, gets all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

MINUTE: Final = 60.0


class Readable(logging.Filter):
    """What passes of the records of aiokafka's loggers."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record passes; one that stands for others says so."""
        args = record.args if isinstance(record.args, tuple) else ()
        if any(type(arg).__name__.startswith("SaslAuthenticate") for arg in args):
            return False  # user and password, as they go over the wire
        if _chosen(record.name):
            return True
        if record.levelno < logging.WARNING:
            return logging.root.level == logging.DEBUG
        kind, now = (record.name, str(record.msg)), self._now()
        since, left_out = self._kinds.get(kind, (-MINUTE, 0))
        if now - since < MINUTE:
            self._kinds[kind] = since, left_out + 1
            return False
        self._kinds[kind] = now, 0
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like it since the last)", None
        return True


def _chosen(name: str) -> bool:
    """Whether somebody has set a level on this logger, or on one above it up to `aiokafka`."""
    while name:
        if logging.getLogger(name).level != logging.NOTSET:
            return True
        name = name.rpartition(".")[0]
    return False


def install() -> None:
    """For all loggers that aiokafka has made; a filter is not inherited, so each gets it."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "aiokafka":
            found = logging.getLogger(name)
            if not any(isinstance(one, Readable) for one in found.filters):
                found.addFilter(_READABLE)


_READABLE: Final = Readable()
