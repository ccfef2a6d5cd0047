"""The endpoints for machines: alive, ready, metrics; and who the caller is."""

from __future__ import annotations

from typing import Final, cast

from eventbus.console.answers import Alive, Ready, Standings, Turn, Turns, WhoAmI
from eventbus.console.desk import Call
from eventbus.console.problems import Problem
from eventbus.console.routing import Route, endpoint
from eventbus.standing import standing

ROUTES: Final[list[Route]] = []
"""What `eventbus run --health` serves, too."""
ADMIN: Final[list[Route]] = []

METRICS_TYPE: Final = "text/plain"


@endpoint(ROUTES, "GET", "/healthz", None)
async def alive(call: Call) -> Alive:
    """Whether the process lives: it has answered. Restart it when it does not."""
    return {"status": "ok"}


@endpoint(ROUTES, "GET", "/readyz", None)
async def ready(call: Call) -> Ready:
    """Whether every service makes progress: it receives, settles, and what is ready is being taken. 503 if not."""
    if call.desk.readiness is None:
        return {"ready": True, "services": {}}
    found = await call.desk.readiness.look()
    waiting = {name: why for name, why in found.items() if why}
    if waiting:
        detail = "; ".join(f"{name}: {why}" for name, why in waiting.items())
        raise Problem(503, "not-ready", detail, "see the logs of the service and the broker")
    return {"ready": True, "services": dict.fromkeys(found, "ready")}


@endpoint(ROUTES, "GET", "/metrics", "viewer", all_tenants=True, media=METRICS_TYPE)
async def metrics(call: Call) -> str:
    """Counters, histograms and depths of the queues, as Prometheus reads them."""
    if call.desk.metrics is None:
        raise Problem(404, "no-metrics", "metrics are not collected here", "pip install 'eventbus-core[otel]'")
    return await call.desk.metrics.text()


@endpoint(ROUTES, "GET", "/admin/stats", "viewer", all_tenants=True)
async def services_stats(call: Call) -> Standings:
    """Depths of every service; of those this process runs, also the consumer, the endpoints and their breakers."""
    desk = call.desk
    return {"services": [await standing(desk.bus, known.service) for known in desk.queues.values()]}


@endpoint(ROUTES, "GET", "/admin/fairness/{queue}", "viewer")
async def tenants_turns(call: Call) -> Turns:
    """How each tenant of a service with fairness is doing, in this process; the most urgent first."""
    service, mine = call.queue.service, call.caller.tenants
    turns = call.desk.bus.fairness(service)
    shown = [turn.as_dict() for turn in turns if mine is None or turn.tenant in mine]
    return {"service": service.name, "tenants": cast("list[Turn]", shown)}


@endpoint(ADMIN, "GET", "/admin/whoami", "viewer")
async def who_am_i(call: Call) -> WhoAmI:
    """The name and the role of the token, and the tenants it is for."""
    tenants = call.caller.tenants
    return {
        "name": call.caller.name,
        "role": call.caller.role,
        "tenants": None if tenants is None else sorted(tenants),
    }
