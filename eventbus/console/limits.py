"""How often somebody may ask: a bucket of tokens for each caller. Pure, no clock."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

MOST_CALLERS: Final = 10_000
"""Those who asked longest ago are forgotten: addresses cost an attacker nothing, our memory does."""


class RateLimit:
    """So many requests a second for each caller, twice as many at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._burst = max(1.0, 2 * rate)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str, now: float) -> int:
        """0 if the caller may ask now, else the whole seconds to wait."""
        left, since = self._buckets.pop(caller, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, now)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        return 0 if allowed else math.ceil((1 - left) / self._rate)
