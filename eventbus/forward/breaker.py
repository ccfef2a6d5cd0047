"""The breaker: leaves an endpoint alone that fails again and again, and probes it now and then. Pure, no clock.

closed --(10 failures in a row)--> open --(5 s, doubling to 60 s)--> half-open: one probe
   ^------------------------(probe succeeds)-------------------------------|
                                      open <--------(probe fails)----------|

One failure opens it where the event would be parked because nobody was there to take it.
An endpoint that has just come back is not overrun by all that waited: one call at a time first, one more for every
four that succeed, half as many after a failure, and no limit any more once it has reached 64.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final, Literal, TypeAlias

from eventbus.durations import seconds
from eventbus.errors import ConfigError

BreakerState: TypeAlias = Literal["closed", "open", "half-open"]

_LOOK_AGAIN: Final = 1.0
"""How long the others wait while a probe is on its way; its answer may come at any moment."""
_ROUNDING: Final = 0.001
"""Less than this is no wait: who waits exactly as long as he was told may be early by the last digit of a float."""
_STEP: Final = 4
"""Successes that make room for one more call at a time, after it has closed again."""
_RAMP_END: Final = 64
"""From here on nobody is held back."""


class Breaker:
    """Ask `allow` before every call; after each allowed one say `record` or `forget`, exactly once.

    Calls overlap: an answer may come long after the state it was asked in. So a caller remembers `epoch` after
    `allow` and hands it to `record`; the result of another epoch says nothing about this one and is ignored.
    """

    def __init__(
        self,
        *,
        failures: int = 10,
        open: float | str | timedelta = 5.0,
        max: float | str | timedelta = 60.0,
    ) -> None:
        if isinstance(failures, bool) or not isinstance(failures, int) or failures < 1:
            raise ConfigError(f"breaker.failures = {failures!r}: must be a whole number from 1")
        self.failures: Final = failures
        self.open: Final = seconds(open)
        self.max: Final = seconds(max)
        if not 0 < self.open <= self.max:
            raise ConfigError(f"breaker.open = {open!r}: must be above 0 and not above max = {max!r}")
        self._state: BreakerState = "closed"
        self._epoch = 0
        self._failed = 0  # in a row, while closed
        self._period = self.open  # how long it stays open this time
        self._until = 0.0
        self._probing = False
        self._successes: int | None = None  # since it closed again; None while there is no limit
        self._calls = 0  # under way, counted only while there is a limit

    @property
    def state(self) -> BreakerState:
        """Where it stands after the last `allow` or `record`."""
        return self._state

    @property
    def epoch(self) -> int:
        """Grows with every change of state."""
        return self._epoch

    @property
    def opens_at(self) -> float | None:
        """When the endpoint may be probed; None unless the breaker is open."""
        return self._until if self._state == "open" else None

    @property
    def failed(self) -> int:
        """Failures in a row so far, while it is closed."""
        return self._failed

    @property
    def limit(self) -> int | None:
        """Calls at a time that the endpoint gets while it comes back; None for no limit."""
        return None if self._successes is None else 1 + self._successes // _STEP

    @property
    def room(self) -> int | None:
        """How many more calls may start now while the endpoint comes back; None for any number."""
        return None if self.limit is None else max(0, self.limit - self._calls)

    def allow(self, now: float) -> bool:
        """Whether to call the endpoint now."""
        if self._state == "closed":
            if self._successes is None:
                return True
            if not self.room:
                return False
            self._calls += 1
            return True
        if self._state == "open":
            if self.wait(now) > 0:
                return False
            self._turn("half-open")
        if self._probing:
            return False
        self._probing = True
        return True

    def record(self, ok: bool, now: float, epoch: int | None = None, *, trip: bool = False) -> None:
        """How an allowed call ended. `trip`: this failure opens it by itself."""
        if self._state == "open" or (epoch is not None and epoch != self._epoch):
            return  # asked in another state; nothing was allowed in this one
        if self._state == "half-open":
            if ok:
                self._turn("closed")
                self._period = self.open
                self._successes = 0
            else:
                self._period = min(self.max, self._period * 2)
                self._trip(now)
            return
        if self._successes is not None:
            self._ramp(ok, self._successes)
        if ok:
            self._failed = 0
        else:
            self._failed += 1
            if trip or self._failed >= self.failures:
                self._trip(now)

    def forget(self, epoch: int | None = None) -> None:
        """An allowed call was called off and tells nothing; if it was the probe, another may go."""
        if epoch is None or epoch == self._epoch:
            self._probing = False
            self._calls = max(0, self._calls - 1)

    def wait(self, now: float) -> float:
        """Seconds until it is worth asking again; 0 when it is now."""
        if self._state == "closed":
            return 0.0
        if self._state == "half-open":
            return min(_LOOK_AGAIN, self.open) if self._probing else 0.0
        if self._until - now > self._period:
            self._until = now + self._period  # the clock was set back; do not wait for it to catch up
        left = self._until - now
        return left if left > _ROUNDING else 0.0

    def __repr__(self) -> str:
        return f"Breaker({self._state}, failures={self.failures}, open={self.open:g}, max={self.max:g})"

    def _ramp(self, ok: bool, successes: int) -> None:
        self._calls = max(0, self._calls - 1)
        self._successes = successes + 1 if ok else successes // 2
        if (self.limit or 0) >= _RAMP_END:
            self._successes = None

    def _trip(self, now: float) -> None:
        self._turn("open")
        self._until = now + self._period

    def _turn(self, state: BreakerState) -> None:
        self._state = state
        self._epoch += 1
        self._failed = 0
        self._probing = False
        self._successes, self._calls = None, 0
