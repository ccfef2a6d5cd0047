"""What the bus tells about itself: log events, counters, trace context.

Counters are OpenTelemetry instruments: free without an SDK, and added per batch with one. Logs are standard
logging, one logger (`eventbus`); every record has `event` and `fields` attributes for structured handlers.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from opentelemetry import metrics, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from eventbus.redaction import redact
from eventbus.settlement import Delivery

logger: Final = logging.getLogger("eventbus")
logger.addHandler(logging.NullHandler())


def _without_secrets(record: logging.LogRecord) -> bool:
    """Render a traceback before any formatter does: the text of a handler's exception may quote a password."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and not record.exc_text:
        text = "".join(map(redact, traceback.format_exception(error))).rstrip("\n")
        record.exc_text = text.encode("utf-8", "backslashreplace").decode()
    return True


logger.addFilter(_without_secrets)

TRACE_FIELDS: Final = ("traceparent", "tracestate")

_meter = metrics.get_meter("eventbus")
_tracer = trace.get_tracer("eventbus")

published: Final = _meter.create_counter("eventbus.published", description="events accepted by the broker")
requests: Final = _meter.create_counter("eventbus.requests", description="requests to publish over HTTP, by status")
received: Final = _meter.create_counter("eventbus.received", description="deliveries received")
handled: Final = _meter.create_counter("eventbus.handled", description="deliveries handled, by verdict and status")
handler_seconds: Final = _meter.create_histogram("eventbus.handler", unit="s", description="time a handler took")
retries: Final = _meter.create_counter("eventbus.retries", description="retries scheduled, by attempt")
retry_delay: Final = _meter.create_histogram("eventbus.retry_delay", unit="s", description="delays of retries")
parked: Final = _meter.create_counter("eventbus.parked", description="messages parked, by reason and error code")
park_errors: Final = _meter.create_counter(
    "eventbus.park_errors", description="parkings that failed and are tried again"
)
redriven: Final = _meter.create_counter("eventbus.redriven", description="dead letters put back")
purged: Final = _meter.create_counter("eventbus.purged", description="dead letters removed for good")
unrouted: Final = _meter.create_counter("eventbus.unrouted", description="events without a route, or without a service")
duplicates: Final = _meter.create_counter("eventbus.duplicates", description="completed events that came once more")
lost: Final = _meter.create_counter("eventbus.lost", description="settlements refused: another consumer owns it now")
stuck: Final = _meter.create_up_down_counter("eventbus.stuck", description="threads past their deadline")


class Gauged(Protocol):
    """An endpoint with a breaker, as the gauge below sees it."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Service, type and endpoint."""

    @property
    def breaker_number(self) -> int:
        """0 closed, 1 half-open, 2 open."""


breakers: Final[set[Gauged]] = set()
"""Endpoints that are open in this process; each enters itself."""
# Asked for by every collection: a gauge that is set would be told once, and then no more until it changes.
_meter.create_observable_gauge(
    "eventbus.breaker_state",
    [lambda _: [metrics.Observation(one.breaker_number, one.labels) for one in breakers]],
    description="breaker of an endpoint: 0 closed, 1 half-open, 2 open",
)


def log(level: int, event: str, fields: Mapping[str, object], *, exc_info: BaseException | None = None) -> None:
    """One log event. The text is built only if somebody listens."""
    if logger.isEnabledFor(level):
        try:
            logger.log(level, "%s", _Text(event, fields), extra={"event": event, "fields": fields}, exc_info=exc_info)
        except Exception as error:  # noqa: BLE001 - a filter of the user's; a message must not hang because of it
            print(f"eventbus: {event} could not be logged: {error!r}", file=sys.stderr)


class _Text:
    __slots__ = ("event", "fields")

    def __init__(self, event: str, fields: Mapping[str, object]) -> None:
        self.event, self.fields = event, fields

    def __str__(self) -> str:
        shown = (f"{name}={value}" for name, value in self.fields.items() if value not in (None, ""))
        return _one_line(" ".join((self.event, *shown)))


def _one_line(text: str) -> str:
    """Whatever an exception says: it cannot forge a second line, and every stream can encode it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def about(delivery: Delivery) -> dict[str, object]:
    """The fields that every log event about a delivery has."""
    event = delivery.event
    return {
        "service": delivery.service,
        "queue": delivery.queue,
        "event_id": event.id,
        "type": event.type,
        "correlation_id": event.correlation_id,
        "tenant": event.tenant,
        "attempt": delivery.attempt,
        "max_attempts": delivery.max_attempts,
    }


def measuring() -> bool:
    """Whether an SDK is there to take histogram values; asked once per worker."""
    return hasattr(metrics.get_meter_provider(), "shutdown")


def tracing() -> bool:
    """Whether an SDK is there to take spans."""
    return hasattr(trace.get_tracer_provider(), "add_span_processor")


def trace_context() -> Mapping[str, str]:
    """The current trace context as attributes of an event; empty where there is none."""
    if not trace.get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    from opentelemetry import propagate

    propagate.inject(carrier)
    return {name: carrier[name] for name in TRACE_FIELDS if name in carrier}


@contextmanager
def consumer_span(delivery: Delivery) -> Iterator[trace.Span]:
    """A span around the handling of one delivery, continuing the publisher's trace."""
    event = delivery.event
    carrier = {name: text for name, text in event.extensions.items() if name in TRACE_FIELDS}
    from opentelemetry import propagate

    parent = propagate.extract(carrier)
    attributes: dict[str, str | int] = {
        "messaging.system": "eventbus",
        "messaging.operation.type": "process",
        "messaging.destination.name": delivery.queue,
        "messaging.consumer.group.name": delivery.service,
        "messaging.message.id": event.id,
        "eventbus.type": event.type,
        "eventbus.attempt": delivery.attempt,
    }
    with _tracer.start_as_current_span(
        f"process {delivery.queue}", context=parent, kind=SpanKind.CONSUMER, attributes=attributes
    ) as span:
        yield span


def failed(span: trace.Span, text: str) -> None:
    """Mark a span as failed."""
    span.set_status(Status(StatusCode.ERROR, text[:200]))
