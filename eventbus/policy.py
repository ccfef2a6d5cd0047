"""Policy: how often, how long, and the one place where an outcome becomes a settlement. Pure."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from eventbus import headers
from eventbus.durations import seconds
from eventbus.errors import ConfigError, InvalidPayload, Undecodable
from eventbus.settlement import ACK, Ack, Delivery, Park, ParkReason, Requeue, Retry, Settlement
from eventbus.status import ConsumerStatus, Outcome, StatusMap

MAX_RETRY_AFTER: Final = 3600.0
REQUEUE_FLOOR: Final = 0.1
REQUEUE_SPREAD: Final = 0.25
REQUEUE_LIMIT: Final = 24 * 3600.0
_RETRY_AFTER_STATUSES: Final = frozenset({409, 425, 429, 503})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1_000_000


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class RetryPolicy:
    """How often and how long to wait. `max_retries=N` means N+1 calls; `max_attempts=N+1` is the same setting.

    `RetryPolicy(max_retries=10, delay=5.0)` waits a fixed time; `RetryPolicy.exponential(...)` doubles it.
    `mode="in-place"` holds the message and calls again, blocking its slot, instead of sending it round.
    """

    __slots__ = ("base", "cap", "factor", "jitter", "max_retries", "mode")

    def __init__(
        self,
        *,
        max_retries: int | None = None,
        max_attempts: int | None = None,
        delay: float | str | timedelta = 5.0,
        mode: Literal["delayed", "in-place"] = "delayed",
    ) -> None:
        self._set(max_retries, max_attempts, delay, 1.0, delay, 0.0, mode)

    @classmethod
    def exponential(
        cls,
        *,
        base: float | str | timedelta = 1.0,
        factor: float = 2.0,
        cap: float | str | timedelta = 60.0,
        jitter: float = 0.25,
        max_retries: int | None = None,
        max_attempts: int | None = None,
        mode: Literal["delayed", "in-place"] = "delayed",
    ) -> RetryPolicy:
        """min(cap, base * factor^(n-1)) before retry n, plus or minus the jitter's share of it."""
        self = cls.__new__(cls)
        self._set(max_retries, max_attempts, base, factor, cap, jitter, mode)
        return self

    def _set(
        self,
        max_retries: int | None,
        max_attempts: int | None,
        base: float | str | timedelta,
        factor: float,
        cap: float | str | timedelta,
        jitter: float,
        mode: str,
    ) -> None:
        if max_retries is not None and max_attempts is not None:
            raise ConfigError("retry: give max_retries or max_attempts, not both (max_attempts = max_retries + 1)")
        if max_attempts is not None:
            if not _is_count(max_attempts) or max_attempts < 1:
                raise ConfigError(f"retry.max_attempts = {max_attempts!r}: must be a whole number from 1")
            max_retries = max_attempts - 1
        elif max_retries is None:
            max_retries = 10
        if not _is_count(max_retries):
            raise ConfigError(f"retry.max_retries = {max_retries!r}: must be a whole number from 0")
        if not _is_number(factor) or not 1.0 <= factor <= 100.0:
            raise ConfigError(f"retry.factor = {factor!r}: must be from 1 to 100")
        if not _is_number(jitter) or not 0.0 <= jitter < 1.0:
            raise ConfigError(f"retry.jitter = {jitter!r}: must be from 0 to below 1")
        if mode not in ("delayed", "in-place"):
            raise ConfigError(f"retry.mode = {mode!r}: must be 'delayed' or 'in-place'")
        self.max_retries: int = max_retries
        self.base, self.factor, self.cap = seconds(base), float(factor), seconds(cap)
        self.jitter, self.mode = float(jitter), mode
        if self.cap < self.base:
            raise ConfigError(f"retry.cap = {cap!r}: must not be below base = {base!r}")

    @property
    def max_attempts(self) -> int:
        """Calls in all: the first one and the retries."""
        return self.max_retries + 1

    def delay(self, retry: int, spread: float = 0.5) -> float:
        """Seconds to wait before retry number `retry` (from 1); `spread` 0..1 is the place within the jitter."""
        try:
            delay = min(self.cap, self.base * self.factor ** (retry - 1))
        except OverflowError:
            delay = self.cap if self.base else 0.0
        return max(0.0, delay * (1.0 + self.jitter * (2.0 * spread - 1.0)))

    def delays(self) -> tuple[float, ...]:
        """Every delay without jitter it can ask for, each once: brokers with tiers make roads for them."""
        found: dict[float, None] = {}
        for retry in range(1, min(self.max_retries, 64) + 1):
            found[self.delay(retry)] = None
        return tuple(found)

    def total(self) -> float:
        """The longest time all retries together can wait."""
        total = 0.0
        for retry in range(1, self.max_retries + 1):
            delay = self.delay(retry, 1.0)
            total += delay
            if self.factor == 1.0 or delay >= self.cap * (1.0 + self.jitter):  # from here on they are all alike
                return total + delay * (self.max_retries - retry)
        return total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetryPolicy) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__slots__))

    def __repr__(self) -> str:
        if self.factor == 1.0 and not self.jitter:
            return f"RetryPolicy(max_retries={self.max_retries}, delay={self.base})"
        return (
            f"RetryPolicy.exponential(base={self.base}, factor={self.factor}, cap={self.cap}, "
            f"jitter={self.jitter}, max_attempts={self.max_attempts})"
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """All that `decide` needs to know about a route."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    statuses: StatusMap = field(default_factory=StatusMap)
    permanent: tuple[type[BaseException], ...] = ()
    permanent_codes: Collection[str] = frozenset()
    retryable_codes: Collection[str] = frozenset()
    unknown_code: Literal["retry", "park"] = "retry"
    on_exhausted: Literal["park", "retry-forever", "discard"] = "park"
    dlq: bool = True
    """Without a dead-letter queue `on_exhausted` decides about everything that would be parked."""

    @property
    def max_attempts(self) -> int:
        """Calls a message gets at most; 0 for no limit."""
        return 0 if self.on_exhausted == "retry-forever" else self.retry.max_attempts


DEFAULT_POLICY: Final = Policy()


def decide(outcome: Outcome, delivery: Delivery, policy: Policy, *, now: float | None = None) -> Settlement:
    """What to do with a delivery after this outcome. Total: every outcome has exactly one answer.

    Jitter comes from the message's id and attempt, so the same question has the same answer.
    """
    verdict, reason = judge(outcome, policy)
    if verdict is ConsumerStatus.ACK:
        return ACK
    if now is None:
        now = time.time()
    if verdict is ConsumerStatus.REQUEUE:
        return _requeue(outcome, delivery, policy, now)
    if verdict is ConsumerStatus.PARK:
        return park_now(delivery, outcome, reason, policy, now=now)
    retries = delivery.history.retries
    if retries >= policy.retry.max_retries:
        if policy.on_exhausted == "park":
            return park_now(delivery, outcome, "max-retries", policy, now=now)
        if policy.on_exhausted == "discard":
            return Ack(discarded=headers.describe(outcome))
    return _retry(delivery, outcome, policy, now)


def _retry(delivery: Delivery, outcome: Outcome, policy: Policy, now: float) -> Retry:
    retries = delivery.history.retries
    delay = policy.retry.delay(retries + 1, spread(delivery, retries + 1))
    if outcome.retry_after is not None and (outcome.status is None or outcome.status in _RETRY_AFTER_STATUSES):
        delay = max(delay, min(outcome.retry_after, MAX_RETRY_AFTER))
    due_at = now + delay
    return Retry(due_at, delay, headers.for_retry(delivery, outcome, now, due_at), headers.describe(outcome))


def judge(outcome: Outcome, policy: Policy = DEFAULT_POLICY) -> tuple[ConsumerStatus, ParkReason]:
    """The verdict on an outcome, and the reason should it be PARK."""
    if outcome.verdict is not None:
        return outcome.verdict, "permanent"
    error = outcome.error
    if error is not None:
        if isinstance(error, Undecodable):
            return ConsumerStatus.PARK, "undecodable"
        if isinstance(error, InvalidPayload):
            return ConsumerStatus.PARK, "invalid"
        if isinstance(error, policy.permanent):
            return ConsumerStatus.PARK, "permanent"
    if outcome.code is not None:
        if outcome.code in policy.permanent_codes:
            return ConsumerStatus.PARK, "permanent"
        if outcome.code in policy.retryable_codes:
            return ConsumerStatus.DROP, "permanent"
        if outcome.status is None:
            return (ConsumerStatus.PARK if policy.unknown_code == "park" else ConsumerStatus.DROP), "permanent"
    if error is not None:
        return ConsumerStatus.DROP, "permanent"
    if outcome.status is not None:
        return policy.statuses[outcome.status], "permanent"
    return ConsumerStatus.ACK, "permanent"


def park_now(
    delivery: Delivery, outcome: Outcome, reason: ParkReason, policy: Policy = DEFAULT_POLICY, *, now: float
) -> Settlement:
    """Parking for a reason that stands already: exhausted, expired, undecodable, crash loop ..."""
    if not policy.dlq:
        if policy.on_exhausted == "retry-forever":
            return _retry(delivery, outcome, policy, now)
        return Ack(discarded=headers.describe(outcome))
    error = headers.describe(outcome)
    return Park(reason, headers.for_parking(delivery, outcome, reason, error, now), error)


def requeue_until(delivery: Delivery, due_at: float, *, now: float, told_not_yet: bool = False) -> Requeue:
    """The delayed road at no cost, for a message that is not due yet or finds no room."""
    delta = headers.for_requeue(delivery, now, due_at, told_not_yet=told_not_yet)
    return Requeue(due_at, max(0.0, due_at - now), delta)


def spread(delivery: Delivery, turn: int) -> float:
    """A number in 0..1 that differs between messages and turns, and is the same when asked again."""
    return zlib.crc32(f"{delivery.event.id}/{turn}".encode("utf-8", "replace")) / 0xFFFFFFFF


def _requeue(outcome: Outcome, delivery: Delivery, policy: Policy, now: float) -> Settlement:
    history = delivery.history
    began = history.first_received_at or now
    process_after = delivery.event.process_after
    if process_after is not None:
        began = max(began, process_after.timestamp())
    if now - began > REQUEUE_LIMIT and not outcome.waiting:
        hours = round((now - began) / 3600)
        late = Outcome(status=outcome.status, reason=f"told 'not yet' for {hours} h; {outcome.reason}".rstrip("; "))
        return park_now(delivery, late, "requeue-limit", policy, now=now)
    # An answer of 425 waits at least as long as the policy's first retry would; requeue(after=...) is taken
    # at its word.
    asked = min(outcome.retry_after or 0.0, MAX_RETRY_AFTER)
    by_word = outcome.verdict is not None and outcome.retry_after is not None
    wait = asked if by_word else max(asked, policy.retry.delay(1))
    wait = max(REQUEUE_FLOOR, wait * (1.0 + REQUEUE_SPREAD * spread(delivery, history.requeues + 1)))
    return requeue_until(delivery, now + wait, now=now, told_not_yet=not outcome.waiting)
