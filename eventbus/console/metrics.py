"""`/metrics`: the bus's own instruments through OpenTelemetry's SDK, and the depths of its queues, in Prometheus' text.

Whatever else this process registers with prometheus_client stands beside them.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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

_TURNS: Final = (
    ("priority", "current_priority", "priority of a tenant's next turn; 1 is the most urgent"),
    ("consecutive", "consecutive_batch_count", "events of a tenant in a row, so far"),
    ("rounds_waited", "rounds_without_processing", "turns of others since a tenant's last one"),
)


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
    """Everything there is to tell, asked for by a scrape.

    `tenants`: how many of them are told apart, 0 for none. Each is a label of its own, and there may be any number:
    those with the most dead letters, those served most, and those that have waited longest for their turn are shown.
    """

    def __init__(self, bus: Bus, services: Sequence[Service], *, tenants: int = 0) -> None:
        self._bus, self._services, self._tenants = bus, services, tenants
        self._depths: dict[str, Stats] = {}
        self._parked: dict[str, Mapping[str, int]] = {}
        meter = metrics.get_meter("eventbus")
        meter.create_observable_gauge(
            "eventbus.queue_depth", [self._queue_depth], description="messages of a service, by state"
        )
        meter.create_observable_gauge(
            "eventbus.dlq_oldest", [self._dlq_oldest], unit="s", description="age of the oldest dead letter"
        )
        if tenants:
            self._gauge_tenants(meter)

    def _gauge_tenants(self, meter: metrics.Meter) -> None:
        meter.create_observable_gauge(
            "eventbus.tenant_parked", [self._tenant_parked], description="dead letters of a tenant"
        )
        meter.create_observable_counter(
            "eventbus.tenant_processed", [self._tenant_processed], description="events of a tenant that were started"
        )
        for name, field, about in _TURNS:
            meter.create_observable_gauge(f"eventbus.tenant_{name}", [self._turns(field)], description=about)

    async def text(self) -> str:
        """What Prometheus reads. A service the broker does not answer for is left out, not shown as empty."""
        from prometheus_client import REGISTRY, generate_latest

        found: dict[str, Stats] = {}
        parked: dict[str, Mapping[str, int]] = {}
        for service in self._services:
            try:
                found[service.name] = await self._bus.stats(service)
                if self._tenants:
                    # Only where the broker has an index: a scrape must not walk along the whole queue.
                    parking = self._bus.adapter.parking(service.name, service.prefix)
                    parked[service.name] = await parking.tally("tenant") or {}
            except EventBusError as error:
                telemetry.log(logging.WARNING, "depth_unknown", {"service": service.name, "error": str(error)})
        self._depths, self._parked = found, parked
        return generate_latest(REGISTRY).decode()

    def _queue_depth(self, _: CallbackOptions) -> Iterable[Observation]:
        for service, stats in self._depths.items():
            for state in ("ready", "inflight", "delayed", "parked"):
                yield Observation(getattr(stats, state), {"service": service, "state": state})

    def _dlq_oldest(self, _: CallbackOptions) -> Iterable[Observation]:
        for service, stats in self._depths.items():
            yield Observation(stats.oldest_parked or 0.0, {"service": service})

    def _tenant_parked(self, _: CallbackOptions) -> Iterable[Observation]:
        for service, counts in self._parked.items():
            most = heapq.nlargest(self._tenants, counts, key=lambda tenant: (counts[tenant], tenant))
            yield from (Observation(counts[tenant], {"service": service, "tenant": tenant}) for tenant in most)

    def _tenant_processed(self, _: CallbackOptions) -> Iterable[Observation]:
        for service in self._services:
            turns = self._bus.fairness(service)
            for turn in heapq.nlargest(self._tenants, turns, key=lambda turn: (turn.total_processed, turn.tenant)):
                yield Observation(turn.total_processed, {"service": service.name, "tenant": turn.tenant})

    def _turns(self, field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for service in self._services:
                for turn in self._bus.fairness(service)[: self._tenants]:  # the most urgent first
                    yield Observation(getattr(turn, field), {"service": service.name, "tenant": turn.tenant})

        return observe
