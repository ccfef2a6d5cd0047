"""Exit codes: 0 done, 1 failed, 2 wrong usage, 3 broker not reachable."""

from __future__ import annotations

from typing import Final

from eventbus.errors import BrokerUnavailable, ConfigError, EventBusError, InvalidEvent, UnknownService

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3


class UsageError(EventBusError):
    """The command cannot be carried out as it was typed."""


class Failure(EventBusError):
    """The command was tried and did not succeed; the text says what was done and what was not."""


def code_of(error: EventBusError) -> int:
    """The exit code for an error."""
    if isinstance(error, (UsageError, ConfigError, UnknownService, InvalidEvent)):
        return USAGE
    return UNREACHABLE if isinstance(error, BrokerUnavailable) else FAILED
