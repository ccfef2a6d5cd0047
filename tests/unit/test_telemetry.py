"""Counters, histograms and trace context, seen through the OpenTelemetry SDK in a process of their own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from eventbus import telemetry

SCRIPT = """
import asyncio, json
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)

from eventbus import Event, RetryPolicy, Service
from eventbus.testing import TestBus

stock = Service("t-stock", retry=RetryPolicy(max_retries=1, delay=1))

@stock.on("good")
async def good(event: Event) -> int:
    return 201

@stock.on("bad")
async def bad(event: Event) -> int:
    return 500

async def main():
    async with TestBus(stock) as bus:
        with trace.get_tracer("test").start_as_current_span("publisher") as span:
            await bus.send("good")
            publisher = format(span.get_span_context().trace_id, "032x")
        await bus.send("good")
        await bus.send("bad")
        await bus.send("unknown")
        await bus.advance("2s")
        await bus.dead_letters("t-stock").redrive()
        await bus.settle()
    return publisher

publisher = asyncio.run(main())
points = {}
for resource in reader.get_metrics_data().resource_metrics:
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            for point in metric.data.data_points:
                labels = ",".join(f"{k}={v}" for k, v in sorted(point.attributes.items()))
                points[f"{metric.name}{{{labels}}}"] = getattr(point, "value", None) or getattr(point, "count", None)
traces = [format(s.context.trace_id, "032x") for s in spans.get_finished_spans() if s.name.startswith("process")]
print(json.dumps({"points": points, "publisher": publisher, "traces": traces}))
"""


def test_an_sdk_sees_every_counter_and_the_trace_goes_on() -> None:
    """With an SDK each counter has its value and labels, and a handler's span is in its publisher's trace."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    points = seen["points"]
    wanted = {
        "eventbus.published{prefix=t}": 4,
        "eventbus.received{service=t-stock}": 6,
        "eventbus.handled{service=t-stock,status=201,type=good,verdict=ack}": 2,
        "eventbus.handled{service=t-stock,status=500,type=bad,verdict=drop}": 1,
        "eventbus.handled{service=t-stock,status=500,type=bad,verdict=park}": 2,
        "eventbus.retries{attempt=1,service=t-stock,type=bad}": 1,
        "eventbus.parked{error_code=,reason=max-retries,service=t-stock,type=bad}": 2,
        "eventbus.redriven{service=t-stock}": 1,
        "eventbus.unrouted{service=t-stock,type=unknown}": 1,
        "eventbus.retry_delay{service=t-stock,type=bad}": 1,
    }
    assert {name: points.get(name) for name in wanted} == wanted
    assert sum(count for name, count in points.items() if name.startswith("eventbus.handler{")) == 5
    assert seen["publisher"] in seen["traces"]
    assert len(set(seen["traces"])) > 1


def test_a_log_event_is_one_line_that_can_be_encoded(caplog: pytest.LogCaptureFixture) -> None:
    """An exception's text can neither forge a line of the log nor break the stream it is written to."""
    error = ValueError("half \ud800")
    with caplog.at_level(logging.WARNING, "eventbus"):
        telemetry.log(
            logging.WARNING, "retry_scheduled", {"reason": "a\nmessage_parked \x1b[31m\ud800 é"}, exc_info=error
        )
    (record,) = caplog.records
    assert record.getMessage() == r"retry_scheduled reason=a\nmessage_parked \x1b[31m\ud800 é"
    assert record.exc_text is not None
    assert record.exc_text.encode().endswith(rb"ValueError: half \ud800")
