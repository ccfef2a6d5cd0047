"""Delayed roads of brokers without a clock: which delays have one, and which road a delay takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

TIERS: Final = (
    *(25, 50, 100, 200, 500, 1_000, 2_000, 4_000, 8_000, 15_000, 30_000, 60_000, 120_000),
    *(300_000, 1_800_000, 10_800_000, 43_200_000),
)
"""Delays that may have a road of their own, in ms."""


def tier_for(tiers: Sequence[int], delay: float) -> int:
    """The road for a delay: the longest that is not longer than it, else the shortest there is.

    What is left after the road is waited for by the worker, or is one more, shorter road: the due time is in the
    message. So a message is never early, and never late by more than its own delay (or the shortest road). A road that
    is longer by a little counts as fitting: the time since the verdict must not send a retry of 5 s by way of 4 s.
    """
    ms = int(delay * 1000 + 0.5)
    ms += max(min(50, ms // 10), ms // 50)
    fitting = [tier for tier in tiers if tier <= ms]
    return fitting[-1] if fitting else tiers[0]
