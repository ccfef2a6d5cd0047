"""Every error a user can meet, in one tree.

EventBusError
├── ConfigError              bad setting, in code or in bus.toml
│   └── AdapterMissing       the URL's scheme has no adapter installed
├── InvalidEvent             the event cannot be put on the wire
├── InvalidOutcome           a handler answered with something that is not a verdict
├── Undecodable              the body is not what its content type says
├── InvalidPayload           the body does not fit the handler's payload type
├── PublishError             at least one event was not stored; carries one result per event
├── TopologyMismatch         something on the broker differs from what the config needs
├── UnknownService           no such subscription on this broker
├── UnknownLetter            no such dead letter
├── SendFailed               an HTTP endpoint gave no usable answer (eventbus.forward)
└── BrokerError              the broker said no
    └── BrokerUnavailable    the broker did not answer
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eventbus.adapter import PublishResult


class EventBusError(Exception):
    """Base of all errors raised by the event bus."""


class ConfigError(EventBusError):
    """A setting is wrong; the message names the key, the value and what is allowed."""


class AdapterMissing(ConfigError):
    """The URL names a broker whose adapter is not installed."""


class InvalidEvent(EventBusError, ValueError):
    """The event cannot be put on the wire as it is."""


class InvalidOutcome(EventBusError, TypeError):
    """A handler returned something that is not a verdict."""


class Undecodable(EventBusError, ValueError):
    """The body is not what its content type says."""


class InvalidPayload(EventBusError, ValueError):
    """The body was decoded, but does not fit the handler's payload type."""


class PublishError(EventBusError):
    """At least one event was not stored. `results` has one entry per event, in order."""

    def __init__(self, results: Sequence[PublishResult]) -> None:
        self.results = list(results)
        bad = [result for result in self.results if result.status != "stored"]
        counts = {s: sum(r.status == s for r in bad) for s in ("refused", "unknown")}
        parts = [f"{number} {status}" for status, number in counts.items() if number]
        first = bad[0].error if bad else ""
        super().__init__(f"{' and '.join(parts)} of {len(self.results)} events: {first}")


class TopologyMismatch(EventBusError):
    """Something on the broker differs from what the configuration needs."""


class UnknownService(EventBusError):
    """The broker has no subscription of that name."""


class UnknownLetter(EventBusError):
    """The service has no such dead letter."""


class BrokerError(EventBusError):
    """The broker refused an operation."""


class BrokerUnavailable(BrokerError):
    """The broker cannot be reached, or did not answer within the deadline."""
