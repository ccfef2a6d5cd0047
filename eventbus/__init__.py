"""The event bus: publish once, every service gets its own copy, a status decides what happens next.

wms = Service("wms-cincout")

@wms.on("order.created")
async def reserve(order: dict) -> int:
    return 200

async with Bus("sqlite:///bus.db", source="wms-api") as bus:
    await bus.publish("order.created", {"id": 1})
    await bus.run(wms)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventbus.adapter import BodyMapping, PublishResult, Stats
from eventbus.batch import Batch
from eventbus.bus import Bus
from eventbus.canary import Canary
from eventbus.errors import (
    AdapterMissing,
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    EventBusError,
    InvalidEvent,
    InvalidOutcome,
    InvalidPayload,
    PublishError,
    TopologyMismatch,
    Undecodable,
    UnknownLetter,
    UnknownService,
)
from eventbus.event import Event
from eventbus.policy import Policy, RetryPolicy, decide
from eventbus.service import Service
from eventbus.settlement import Delivery
from eventbus.shaping import Fairness, Idempotency, Rate
from eventbus.status import ConsumerStatus, Outcome, StatusMap, park, requeue, retry

if TYPE_CHECKING:
    from eventbus.deadletter import DeadLetter

__all__ = [
    "AdapterMissing",
    "Batch",
    "BodyMapping",
    "BrokerError",
    "BrokerUnavailable",
    "Bus",
    "Canary",
    "ConfigError",
    "ConsumerStatus",
    "DeadLetter",
    "Delivery",
    "Event",
    "EventBusError",
    "Fairness",
    "Idempotency",
    "InvalidEvent",
    "InvalidOutcome",
    "InvalidPayload",
    "Outcome",
    "Policy",
    "PublishError",
    "PublishResult",
    "Rate",
    "RetryPolicy",
    "Service",
    "Stats",
    "StatusMap",
    "TopologyMismatch",
    "Undecodable",
    "UnknownLetter",
    "UnknownService",
    "decide",
    "park",
    "requeue",
    "retry",
]


def __getattr__(name: str) -> object:
    # DeadLetter is a pydantic model; a publisher that never looks at one does not pay for the import.
    if name == "DeadLetter":
        from eventbus.deadletter import DeadLetter

        return DeadLetter
    raise AttributeError(f"module 'eventbus' has no attribute {name!r}")
