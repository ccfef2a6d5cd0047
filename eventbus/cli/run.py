"""`eventbus run bus.toml` or `eventbus run app:wms`: consume until stopped, and take events over HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Annotated, Final

from cyclopts import Parameter

from eventbus import telemetry
from eventbus.cli import logs
from eventbus.cli.connection import NOT_GIVEN, Connection
from eventbus.cli.exits import DONE, FAILED, UsageError
from eventbus.cli.interrupts import hard_exit, start, stop_signals
from eventbus.cli.output import say, say_json, say_table
from eventbus.cli.plan import Plan, describe_route, make
from eventbus.durations import human
from eventbus.listening import Address
from eventbus.redaction import redact_url

COLLECT_AFTER: Final = 20_000
"""Objects more than before that set the collector to work. Python's 700 are a hundred deliveries in flight, which it
would look through again and again; they go without it."""

Flag = Annotated[bool, Parameter(negative=())]


def run(
    target: str | None = None,
    *,
    connection: Connection = NOT_GIVEN,
    listen: str | None = None,
    workers: int = 1,
    check: Flag = False,
    health: str | None = None,
    log: logs.LogFormat = "text",
    log_level: logs.LogLevel = "info",
    json: Flag = False,
    worker: Annotated[int | None, Parameter(show=False)] = None,
    ready_fd: Annotated[int | None, Parameter(show=False)] = None,
    listen_fd: Annotated[int | None, Parameter(show=False)] = None,
) -> int:
    """Consume until SIGTERM or Ctrl-C; then finish what runs, settle it, and leave. Exit code 1: something was left.

    Parameters
    ----------
    target
        A bus.toml (the default), or a service as module:name.
    listen
        Take events by POST /events on this HOST:PORT; a token is needed where it is not loopback.
    workers
        Processes to start; one that dies is started again.
    check
        Only check everything, and say what would be run.
    health
        Serve /healthz, /readyz and /metrics here: 8000, or 0.0.0.0:8000. With --workers, each on the next port.
    log
        Lines for people, or JSON objects.
    log_level
        The least that is logged.
    connection
        Which bus.
    json
        With --check: say it as JSON.
    worker
        Its number, if a supervisor started this process.
    ready_fd
        Where to say that it is up.
    listen_fd
        The socket to listen on, which all workers share.
    """
    if not 1 <= workers <= 1000:
        raise UsageError(f"--workers {workers}: must be from 1 to 1000")
    plan = make(target, connection, listen=listen)
    if check:
        plan.bus.check(*plan.services)
        _report(plan, json)
        return DONE
    logs.configure(log, log_level)
    if health is not None:
        health = _health_address(health, workers, worker)
    if workers > 1:
        if not plan.bus.adapter.capabilities.multi_process:
            raise UsageError(
                f"--workers {workers}: {redact_url(plan.bus.url)} lives in one process; use sqlite:///file"
            )
        command = ["run", *([plan.target] if plan.target else ()), "--log", log, "--log-level", log_level]
        if connection.config and connection.config != plan.target:
            command += ["--config", connection.config]
        if listen is not None:
            command += ["--listen", listen]
        if health is not None:
            command += ["--health", health]
        return start(_supervise(plan, command, workers, connection.url))
    if worker is not None:
        _end_with_parent()
    if health is not None:
        from eventbus.cli.serve import collect_metrics

        collect_metrics()
    code = start(_consume(plan, health, ready_fd, listen_fd))
    if any(thread is not threading.current_thread() and not thread.daemon for thread in threading.enumerate()):
        hard_exit(code)  # a handler hangs in a thread past its deadline and the grace; nobody can stop it
    return code


async def _supervise(plan: Plan, command: list[str], workers: int, url: str | None) -> int:
    from eventbus.cli.supervisor import supervise

    grace = max((service.grace for service in plan.services), default=0.0)
    # Bound once, here, and shared: who waits in its queue survives the death of a worker.
    listening = plan.listening.address.bind() if plan.listening is not None else None
    try:
        return await supervise(command, workers, url=url, patience=grace + 35.0, listening=listening)
    finally:
        if listening is not None:
            listening.close()


def _health_address(listen: str, workers: int, worker: int | None) -> str:
    """Where to listen; a worker of several takes the port of its number."""
    from eventbus.cli.serve import need_console

    need_console()
    first = Address.parse(listen)
    if first.port and first.port + workers - 1 > 65535:
        raise UsageError(f"--health {listen}: {workers} workers need as many ports")
    return str(replace(first, port=first.port + worker - 1) if worker and first.port else first)


async def _consume(plan: Plan, health: str | None, ready_fd: int | None, listen_fd: int | None) -> int:
    names = ", ".join(service.name for service in plan.services)
    # From the very beginning: a signal while we connect must not leave anything half done.
    with stop_signals() as stopped:
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(plan.bus)
            if health is not None:
                from eventbus.cli.serve import health_served

                at = await stack.enter_async_context(health_served(health, plan))
                telemetry.log(logging.INFO, "health", {"address": at})
            await bus.provision(*plan.services)
            gc.collect()
            gc.freeze()  # what was loaded stays: the collector need not walk through all of it again and again
            gc.set_threshold(COLLECT_AFTER)
            async with _listening(plan, listen_fd) as address:
                fields = {"services": names, "url": redact_url(bus.url), "listen": address}
                telemetry.log(logging.INFO, "started", fields)
                if ready_fd is not None:
                    os.write(ready_fd, b"1")
                running = asyncio.ensure_future(_run(plan, stopped))
                halt = asyncio.ensure_future(stopped.wait())
                await asyncio.wait({running, halt}, return_when=asyncio.FIRST_COMPLETED)
                halt.cancel()
                if not running.done():
                    telemetry.log(logging.INFO, "stopping", {"services": names})
            # Whoever wanted to publish has been answered: now the consumers.
            bus.stop()
            left = await running
    telemetry.log(logging.WARNING if left else logging.INFO, "stopped", {"services": names, "left": left})
    return FAILED if left else DONE


async def _run(plan: Plan, stopped: asyncio.Event) -> int:
    if plan.services:
        return await plan.bus.run(*plan.services, signals=False)
    await stopped.wait()
    return 0


@asynccontextmanager
async def _listening(plan: Plan, listen_fd: int | None) -> AsyncIterator[str | None]:
    """Take events over HTTP, if that is wanted; at the end those under way are answered first."""
    if plan.listening is None:
        yield None
        return
    from eventbus.ingest.listener import Listener

    place = plan.listening.address.bind() if listen_fd is None else socket.socket(fileno=listen_fd)
    async with Listener(plan.bus, place, plan.listening.token) as listener:
        yield listener.address


def _end_with_parent() -> None:
    """Stop when the supervisor is gone, however it went: its end of our standard input is then closed."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="eventbus parent watch", daemon=True).start()


def _report(plan: Plan, as_json: bool) -> None:
    bus, services = plan.bus, plan.services
    if as_json:
        say_json(
            {
                "target": plan.target,
                "url": redact_url(bus.url),
                "broker": bus.adapter.name,
                "prefix": bus.prefix,
                "listen": str(plan.listening.address) if plan.listening else None,
                "services": [
                    {
                        "name": service.name,
                        "prefix": service.prefix,
                        "prefetch": service.prefetch,
                        "routes": [describe_route(route) for route in service.routes],
                    }
                    for service in services
                ],
            }
        )
        return
    what = f"run {len(services)} service{'' if len(services) == 1 else 's'} on {redact_url(bus.url)}"
    if plan.listening is not None:
        what += f", listen for events on {plan.listening.address}"
    say(f"{plan.target or 'this'} is fine: would {what} and publish to the prefix {bus.prefix}")
    rows = []
    for service in services:
        for route in service.routes:
            facts = describe_route(route)
            timeout = human(float(str(facts["timeout"])))
            rows.append((service.name, facts["on"], facts["to"], facts["concurrency"], timeout, facts["retry"]))
        if not service.routes:
            rows.append((service.name, "-", "no route: every event is acknowledged", "", "", ""))
    say_table(("service", "on", "to", "concurrency", "timeout", "retries"), rows)
