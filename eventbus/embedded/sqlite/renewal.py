"""Renewing leases: one thread for all consumers of an adapter, whatever their event loop is doing.

A handler that blocks the loop must not lose what its worker holds: another process would take it, call it again, and
count a crash that never was. A loop that gives no sign of life for minutes does lose it: it is not coming back.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from eventbus.embedded.sqlite.leased import LeasedConsumer

MAX_SILENCE: Final = 300.0
"""Leases are kept so long for a loop that does not answer."""


class Renewal:
    """Renews well before the leases end, until it is closed."""

    def __init__(self, lease: float) -> None:
        self._interval = lease / 3
        self._consumers: set[LeasedConsumer] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, consumer: LeasedConsumer) -> None:
        """Keep this consumer's leases."""
        self._consumers.add(consumer)
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="eventbus sqlite leases", daemon=True)
            self._thread.start()

    def remove(self, consumer: LeasedConsumer) -> None:
        """It no longer holds anything."""
        self._consumers.discard(consumer)

    def close(self) -> None:
        """End the thread, at its next look."""
        self._closed.set()

    def _main(self) -> None:
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            for consumer in self._consumers.copy():
                if now - consumer.alive_at < MAX_SILENCE:
                    consumer.renew_from_thread()
