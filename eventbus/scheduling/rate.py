"""At most N in any period: a sliding window that never lets one too many through. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

GRAINS: Final = 64
"""A period is counted in so many parts: what was let through in one part becomes free again together, at its end."""


class Window:
    """Counts what was let through in the last period. Exact for few, and for many late by at most a 64th of it.

    Not a token bucket: a full one lets twice its size through within one period.
    """

    __slots__ = ("_grain", "_parts", "_used", "limit", "period")

    def __init__(self, limit: int, period: float) -> None:
        self.limit = limit
        self.period = period
        self._grain = period / GRAINS
        self._parts: deque[list[float]] = deque()  # [first, last, number]
        self._used = 0

    def free(self, now: float, wanted: int = 1) -> int:
        """How many may pass now, whatever is wanted."""
        parts = self._parts
        while parts and parts[0][1] + self.period <= now:
            self._used -= int(parts.popleft()[2])
        return self.limit - self._used

    def take(self, now: float, number: int = 1) -> None:
        """So many pass now; the caller has seen that they may."""
        parts = self._parts
        if parts:
            part = parts[-1]
            now = max(now, part[1])  # a clock that was set back must not make the window forget
            if now - part[0] < self._grain:
                part[1] = now
                part[2] += number
                self._used += number
                return
        parts.append([now, now, number])
        self._used += number

    def opens_at(self) -> float:
        """When the next one may pass, if none may now."""
        return self._parts[0][1] + self.period if self._parts else 0.0

    def idle(self, now: float) -> bool:
        """Whether it has nothing to remember: the whole limit is free."""
        return not self._parts or self._parts[-1][1] + self.period <= now
