"""What a handler can say, and what it means: ConsumerStatus, Outcome, StatusMap.

DROP never means "throw away": it is the event-bus word for "dead-letter into the retry loop".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from http import HTTPStatus
from typing import Final

from eventbus.errors import ConfigError, InvalidOutcome


class ConsumerStatus(Enum):
    """The verdict on an outcome."""

    ACK = "ack"  # done, removed
    DROP = "drop"  # into the retry loop (never: thrown away)
    REQUEUE = "requeue"  # not yet: wait, then again, at no cost
    PARK = "park"  # into the dead-letter queue, now


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of handling one delivery. An empty one means success.

    `status` is an HTTP status; `code` is an error code of another world (SMTP `550`, SES `Throttling`) with
    its own lists and never goes through the HTTP map. `verdict`, when given, overrides both.
    """

    status: int | None = None
    verdict: ConsumerStatus | None = None
    reason: str = ""
    code: str | None = None
    retry_after: float | None = None
    error: BaseException | None = None
    waiting: bool = False
    """Nobody was asked (a breaker is open): the message waits as long as it takes, and no limit counts it."""


ACKED: Final = Outcome()


def retry(reason: str = "", *, after: float | timedelta | None = None, code: str | None = None) -> Outcome:
    """Into the retry loop; `after` asks for a longer wait than the policy's."""
    return Outcome(verdict=ConsumerStatus.DROP, reason=reason, code=code, retry_after=_seconds(after))


def requeue(after: float | timedelta | None = None, *, reason: str = "") -> Outcome:
    """Not yet: offer it again in `after` seconds; costs no retry. The same as answering 425."""
    return Outcome(status=425, verdict=ConsumerStatus.REQUEUE, reason=reason, retry_after=_seconds(after))


def park(reason: str, *, code: str | None = None) -> Outcome:
    """Into the dead-letter queue at once, for this reason."""
    return Outcome(verdict=ConsumerStatus.PARK, reason=reason, code=code)


def outcome_of(result: object) -> Outcome:
    """The outcome a handler's return value stands for. Raises InvalidOutcome for a bool, str, dict ..."""
    if result is None:
        return ACKED
    if isinstance(result, Outcome):
        return _checked(result)
    if isinstance(result, ConsumerStatus):
        return Outcome(verdict=result)
    status = result if isinstance(result, int) else _status_code(result)
    if isinstance(status, int) and not isinstance(status, bool):
        if 100 <= status <= 599:
            return Outcome(status=int(status))
        raise InvalidOutcome(f"a handler returned {status}; an HTTP status is 100 to 599")
    raise InvalidOutcome(
        f"a handler returned {type(result).__name__}; return None, an HTTP status, a ConsumerStatus, an Outcome "
        f"(retry(), requeue(), park()) or an object with status_code"
    )


def _status_code(result: object) -> object:
    try:
        return getattr(result, "status_code", None)
    except Exception as error:  # noqa: BLE001 - a property of somebody's response class
        raise InvalidOutcome(
            f"a handler returned {type(result).__name__}, whose status_code cannot be read: {error!r}"
        ) from error


def _checked(outcome: Outcome) -> Outcome:
    """An Outcome built by hand whose fields are what they should be; a wrong one must not pass for another verdict."""
    status, after = outcome.status, outcome.retry_after
    if status is not None and (not isinstance(status, int) or isinstance(status, bool) or not 100 <= status <= 599):
        raise InvalidOutcome(f"Outcome(status={status!r}): must be a number from 100 to 599")
    if outcome.verdict is not None and not isinstance(outcome.verdict, ConsumerStatus):
        raise InvalidOutcome(f"Outcome(verdict={outcome.verdict!r}): must be a ConsumerStatus, or use park(), retry()")
    if after is not None and (isinstance(after, bool) or not isinstance(after, (int, float)) or not 0 <= after < 1e10):
        raise InvalidOutcome(f"Outcome(retry_after={after!r}): must be a number of seconds, zero or more")
    if outcome.code is not None and not isinstance(outcome.code, str):
        raise InvalidOutcome(f"Outcome(code={outcome.code!r}): must be text, such as '550'")
    if not isinstance(outcome.reason, str):
        raise InvalidOutcome(f"Outcome(reason={outcome.reason!r}): must be text")
    if outcome.error is not None and not isinstance(outcome.error, BaseException):
        raise InvalidOutcome(f"Outcome(error={outcome.error!r}): must be an exception")
    return outcome


DEFAULT_STATUSES: Final[Mapping[str, ConsumerStatus]] = {
    "1xx": ConsumerStatus.DROP,
    "2xx": ConsumerStatus.ACK,
    "3xx": ConsumerStatus.DROP,
    "4xx": ConsumerStatus.DROP,
    "425": ConsumerStatus.REQUEUE,
    "5xx": ConsumerStatus.DROP,
}


class StatusMap:
    """HTTP status -> verdict, as data: `StatusMap({404: "park", "4xx": "drop"})` over the defaults.

    An exact status goes before its class.
    """

    __slots__ = ("_rules", "_table")

    def __init__(self, rules: Mapping[int | str, ConsumerStatus | str] | None = None) -> None:
        self._rules = dict(DEFAULT_STATUSES)
        for key, verdict in (rules or {}).items():
            self._rules[_status_key(key)] = _verdict(key, verdict)
        self._table = tuple(
            self._rules.get(str(status), self._rules[f"{status // 100}xx"]) for status in range(100, 600)
        )

    def __getitem__(self, status: int) -> ConsumerStatus:
        if 100 <= status <= 599:
            return self._table[status - 100]
        return ConsumerStatus.DROP  # no status at all is a broken answer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StatusMap) and self._table == other._table

    def __hash__(self) -> int:
        return hash(self._table)

    def __repr__(self) -> str:
        changed = {k: v.value for k, v in self._rules.items() if DEFAULT_STATUSES.get(k) is not v}
        return f"StatusMap({changed})"


def _status_key(key: int | str) -> str:
    text = str(int(key)) if isinstance(key, (int, HTTPStatus)) else str(key).strip().lower()
    if text in {"1xx", "2xx", "3xx", "4xx", "5xx"}:
        return text
    if len(text) == 3 and text.isascii() and text.isdigit() and 100 <= int(text) <= 599:
        return text
    raise ConfigError(f"status {key!r}: use a status from 100 to 599, or a class such as '4xx'")


def _verdict(key: int | str, verdict: ConsumerStatus | str) -> ConsumerStatus:
    if isinstance(verdict, ConsumerStatus):
        return verdict
    try:
        return ConsumerStatus(verdict.lower() if verdict.lower() != "retry" else "drop")
    except (ValueError, AttributeError):
        raise ConfigError(f"status {key} = {verdict!r}: use 'ack', 'drop', 'requeue' or 'park'") from None


def _seconds(value: float | timedelta | None) -> float | None:
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"after={value!r}: must be a number of seconds, zero or more")
    return seconds
