"""`/metrics`: the bus's own instruments through OpenTelemetry's SDK, and the depths of its queues, in Prometheus' text.

Whatever else this process registers with prometheus_client stands beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from eventbus import telemetry
from eventbus.adapter import Stats
from eventbus.bus import Bus
from eventbus.errors import ConfigError, EventBusError
from eventbus.service import Service

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)
"""Bounds of the histograms: the SDK's own are made for milliseconds."""

_BREAKER: Final[Mapping[str, int]] = {"closed": 0, "half-open": 1, "open": 2}


def collect() -> None:
    """Start to count: before the workers are made, because each asks once whether anybody listens.

    Where the process has an SDK already (opentelemetry-instrument), it keeps it, and the counters go there.
    """
    try:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from opentelemetry.sdk.metrics import Histogram, MeterProvider
        from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
    except ImportError as error:
        raise ConfigError(f"metrics need {error.name}: pip install 'eventbus-core[otel]'") from None
    if telemetry.measuring():
        telemetry.log(logging.WARNING, "metrics_elsewhere", {"reason": "this process has a meter provider already"})
        return
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False)
    bounds = View(instrument_type=Histogram, aggregation=ExplicitBucketHistogramAggregation(SECONDS))
    metrics.set_meter_provider(MeterProvider([reader], views=[bounds]))


class Metrics:
    """Everything there is to tell, asked for by a scrape."""

    def __init__(self, bus: Bus, services: Sequence[Service]) -> None:
        self._bus, self._services = bus, services
        self._depths: dict[str, Stats] = {}
        meter = metrics.get_meter("eventbus")
        meter.create_observable_gauge(
            "eventbus.queue_depth", [self._queue_depth], description="messages of a service, by state"
        )
        meter.create_observable_gauge(
            "eventbus.dlq_oldest", [self._dlq_oldest], unit="s", description="age of the oldest dead letter"
        )
        meter.create_observable_gauge(
            "eventbus.breaker_state", [self._breakers], description="0 closed, 1 half-open, 2 open"
        )

    async def text(self) -> str:
        """What Prometheus reads. A service the broker does not answer for is left out, not shown as empty."""
        from prometheus_client import REGISTRY, generate_latest

        found: dict[str, Stats] = {}
        for service in self._services:
            try:
                found[service.name] = await self._bus.stats(service)
            except EventBusError as error:
                telemetry.log(logging.WARNING, "depth_unknown", {"service": service.name, "error": str(error)})
        self._depths = found
        return generate_latest(REGISTRY).decode()

    def _queue_depth(self, _: CallbackOptions) -> Iterable[Observation]:
        for service, stats in self._depths.items():
            for state in ("ready", "inflight", "delayed", "parked"):
                yield Observation(getattr(stats, state), {"service": service, "state": state})

    def _dlq_oldest(self, _: CallbackOptions) -> Iterable[Observation]:
        for service, stats in self._depths.items():
            yield Observation(stats.oldest_parked or 0.0, {"service": service})

    def _breakers(self, _: CallbackOptions) -> Iterable[Observation]:
        for service in self._services:
            for route in service.routes:
                if route.endpoint is not None and route.endpoint.breaker is not None:
                    yield Observation(
                        _BREAKER[route.endpoint.breaker.state], {"service": service.name, "type": route.pattern}
                    )
