"""What a worker tells of its deliveries: counters for metrics, events for the log."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from eventbus import headers, telemetry
from eventbus.settlement import ACK, Ack, Delivery, Park, Requeue, Retry, Settlement
from eventbus.status import Outcome

_VERDICTS: Final = {Ack: "ack", Retry: "drop", Requeue: "requeue", Park: "park"}


class Reports:
    """Counts and tells for one service; what nobody counts costs nothing."""

    def __init__(self, service: str, broker: str) -> None:
        self._service = service
        self._broker = broker.upper()
        self.counting = telemetry.measuring()
        self._acked: Counter[tuple[str, int | None]] = Counter()
        """What was acknowledged since the last settlement."""

    def received(self, number: int) -> None:
        """Deliveries have come."""
        telemetry.received.add(number, {"service": self._service})

    def decided(self, delivery: Delivery, outcome: Outcome, settlement: Settlement) -> None:
        """A handler's outcome, and what was made of it."""
        if settlement is ACK:
            if self.counting:  # added up per batch: an instrument call each would cost more
                self._acked[delivery.event.type, outcome.status] += 1
            return
        if self.counting:
            labels = self._labels(delivery)
            verdict = _VERDICTS.get(type(settlement), "release")
            telemetry.handled.add(1, labels | {"verdict": verdict, "status": str(outcome.status or "")})
            if isinstance(settlement, Retry):
                telemetry.retries.add(1, labels | {"attempt": delivery.attempt})
                telemetry.retry_delay.record(settlement.delay, labels)
        if isinstance(settlement, Retry):
            fields = {"reason": settlement.reason, "next_delay": round(settlement.delay, 3)}
            telemetry.log(logging.WARNING, "retry_scheduled", telemetry.about(delivery) | fields)
        elif isinstance(settlement, Ack) and settlement.discarded:
            fields = {"reason": settlement.discarded}
            telemetry.log(logging.ERROR, "message_discarded", telemetry.about(delivery) | fields)

    def add_up(self) -> None:
        """A batch of settlements has ended: count what was acknowledged since the last one."""
        if self._acked:
            for (type, status), number in self._acked.items():
                labels = {"service": self._service, "type": type, "verdict": "ack", "status": str(status or "")}
                telemetry.handled.add(number, labels)
            self._acked.clear()

    def parked(self, delivery: Delivery, park: Park) -> None:
        """It stands in the dead-letter queue."""
        code = park.headers.get(headers.ERROR_CODE) or ""
        telemetry.parked.add(1, self._labels(delivery) | {"reason": park.reason, "error_code": code})
        fields = telemetry.about(delivery) | {"park_reason": park.reason, "error_code": code, "reason": park.error}
        if park.reason == "max-retries":
            fields["code"] = f"{self._broker}_MESSAGE_MAX_RETRIES_EXCEEDED"
        telemetry.log(logging.ERROR, "message_parked", fields)

    def lost(self, delivery: Delivery) -> None:
        """Another consumer has it by now."""
        telemetry.lost.add(1, self._labels(delivery))
        telemetry.log(logging.WARNING, "delivery_lost", telemetry.about(delivery))

    def duplicate(self, delivery: Delivery) -> None:
        """It was completed before, and is not handled again."""
        telemetry.duplicates.add(1, self._labels(delivery))
        fields = telemetry.about(delivery) | {"redriven": delivery.history.redriven or None}
        telemetry.log(logging.INFO, "duplicate_skipped", fields)

    def unrouted(self, delivery: Delivery) -> None:
        """The service has no route for it."""
        telemetry.unrouted.add(1, self._labels(delivery))

    def _labels(self, delivery: Delivery) -> dict[str, str]:
        return {"service": self._service, "type": delivery.event.type}


def note_failed(delivery: Delivery, error: Exception) -> None:
    """What should stand beside a message could not be written."""
    telemetry.log(logging.WARNING, "note_failed", telemetry.about(delivery) | {"error": str(error)})
