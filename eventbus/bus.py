"""The Bus: publish events, run services, look at dead letters. One URL decides the broker."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final

from eventbus import headers, naming, telemetry
from eventbus.adapter import PARKING_MARGIN, Adapter, ProvisionMode, PublishResult, Stats, Topology
from eventbus.clock import Clock, SystemClock
from eventbus.errors import BrokerError, ConfigError, EventBusError, PublishError, TopologyMismatch
from eventbus.event import Event
from eventbus.redaction import redact_url
from eventbus.registry import open_adapter
from eventbus.service import Service

if TYPE_CHECKING:
    from eventbus.forward.endpoint import Endpoint
    from eventbus.forward.port import Sender
    from eventbus.parking import DeadLetters
    from eventbus.scheduling.fairness import TenantTurns
    from eventbus.store import Store
    from eventbus.worker import Health, Observe, Worker
    from eventbus.worker.dead_letters import DeadLetterWorker

MAX_HEADER_BYTES: Final = 64 * 1024
"""What a publisher's own headers may take: every broker, proxy and endpoint on the way has a limit near this."""


class Bus:
    """An open connection to the event bus: `async with Bus("sqlite:///bus.db", source="wms-api") as bus: ...`.

    `source` says who publishes; its prefix (the part before the first hyphen, or `prefix`) says to whom: all
    services of the same prefix get a copy.
    """

    def __init__(
        self,
        url: str,
        *,
        source: str = "",
        prefix: str | None = None,
        provision: ProvisionMode = "create",
        settings: Mapping[str, Mapping[str, object]] | None = None,
        sender: Sender | None = None,
        adapter: Adapter | None = None,
        clock: Clock | None = None,
        observe: Observe | None = None,
    ) -> None:
        if provision not in ("create", "verify", "off"):
            raise ConfigError(f"provision = {provision!r}: must be 'create', 'verify' or 'off'")
        self.url = url
        self.source = source
        self.prefix = naming.prefix_of(source) if prefix is None else naming.check_prefix(prefix)
        self.adapter = adapter or open_adapter(url, settings)
        self._mode = provision
        self._clock = clock or SystemClock()
        self._observe = observe
        self._sender = sender
        self._max_bytes = self.adapter.capabilities.max_event_bytes - PARKING_MARGIN
        self._workers: list[Worker | DeadLetterWorker] = []
        self._stores: dict[str | None, Store] = {}
        self._halt: asyncio.Event | None = None
        self._open = False

    @classmethod
    def from_env(cls, *, url: str | None = None, source: str | None = None, prefix: str | None = None) -> Bus:
        """A bus from EVENTBUS_URL, EVENTBUS_SOURCE and EVENTBUS_PREFIX."""
        found = url or os.environ.get("EVENTBUS_URL")
        if not found:
            raise ConfigError("no bus URL: set EVENTBUS_URL, for example EVENTBUS_URL=sqlite:///bus.db")
        return cls(
            found,
            source=source if source is not None else os.environ.get("EVENTBUS_SOURCE", ""),
            prefix=prefix if prefix is not None else os.environ.get("EVENTBUS_PREFIX") or None,
        )

    async def __aenter__(self) -> Bus:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Connect."""
        await self.adapter.open()
        self._open = True

    async def aclose(self) -> None:
        """Disconnect."""
        self._open = False
        await self.adapter.aclose()

    # --- publishing ------------------------------------------------------------------------------------------

    async def publish(
        self,
        type: str | Event,
        data: object = None,
        *,
        id: str | None = None,
        key: str | None = None,
        tenant: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, object] | None = None,
        process_after: datetime | timedelta | None = None,
        expires_at: datetime | None = None,
        ttl: timedelta | None = None,
        content_type: str | None = None,
    ) -> Event:
        """Publish one event; returns it once the broker has it durably. Raises PublishError otherwise."""
        event = (
            type
            if isinstance(type, Event)
            else Event(
                type,
                data,
                id=id,
                source=self.source,
                key=key,
                tenant=tenant,
                correlation_id=correlation_id,
                headers=headers,
                process_after=process_after,
                expires_at=expires_at,
                ttl=ttl,
                content_type=content_type,
            )
        )
        await self.publish_many([event])
        return event

    async def publish_many(self, events: Sequence[Event]) -> list[PublishResult]:
        """Publish events with one confirm for all. Raises PublishError, with one result each, if any is not."""
        self._check_open()
        context = telemetry.trace_context()
        ready = [self._outgoing(event, context) for event in events]
        sizes = [self.too_large(event) for event in ready]
        fine = [event for event, problem in zip(ready, sizes, strict=True) if problem is None]
        answers = iter(await self._send(fine))
        results = [problem or next(answers) for problem in sizes]
        stored = sum(result.status == "stored" for result in results)
        if stored:
            telemetry.published.add(stored, {"prefix": self.prefix})
            nobody = sum(result.subscribed is False for result in results)
            if nobody:
                telemetry.unrouted.add(nobody, {"prefix": self.prefix})
        if stored < len(results):
            error = PublishError(results)
            telemetry.log(logging.ERROR, "publish_failed", {"prefix": self.prefix, "error": str(error)})
            raise error
        return results

    async def _send(self, events: Sequence[Event]) -> list[PublishResult]:
        if not events:
            return []
        try:
            return await self.adapter.publish(self.prefix, events)
        except EventBusError as error:
            return [PublishResult("unknown", str(error))] * len(events)

    def _outgoing(self, event: Event, context: Mapping[str, str]) -> Event:
        if not event.source and self.source:
            event = event.rewritten(source=self.source)
        if event.headers:
            kept = headers.strip_reserved(event.headers)
            if kept is not event.headers:
                event = event.rewritten(headers=kept)
        if context and "traceparent" not in event.extensions:
            event = event.rewritten(extensions={**event.extensions, **context})
        return event

    def too_large(self, event: Event) -> PublishResult | None:
        """The refusal of an event that could not be parked again later; None if it fits."""
        size = len(event.body)
        if event.headers or event.extensions:
            said = headers.size_of(event.headers.items()) + headers.size_of(event.extensions.items())
            if said > MAX_HEADER_BYTES:
                return PublishResult(
                    "refused",
                    f"{event.type} {event.id} has {said} bytes of headers; at most {MAX_HEADER_BYTES} are allowed, "
                    f"put the rest into data",
                )
            size += said
        if size <= self._max_bytes:
            return None
        return PublishResult(
            "refused", f"{event.type} {event.id} has {size} bytes; at most {self._max_bytes} can be parked again later"
        )

    # --- consuming -------------------------------------------------------------------------------------------

    def check(self, *services: Service) -> None:
        """What this broker cannot keep is an error at start, never ignored. Asks nobody: the bus need not be open."""
        from eventbus.registry import open_store
        from eventbus.worker.shaping import check_store, stores_needed

        broker, can = self.adapter.name, self.adapter.capabilities
        for service in services:
            if service.ordering and not can.key_order:
                raise ConfigError(
                    f"{service.name}.ordering = {service.ordering!r}: {broker} cannot keep the order of keys; "
                    f"leave it out, or use a broker that can"
                )
            for url, setting in stores_needed(service):
                store = self.adapter.store() if url is None else open_store(url)
                check_store(service.name, setting, store, broker, one_process=not can.multi_process)
            if service.idempotency is not None:
                longest = max((route.policy.retry.total() for route in service.routes), default=0.0)
                if service.idempotency.window <= longest:
                    fields = {"service": service.name, "window": service.idempotency.window, "retries": longest}
                    fix = {"fix": "make the window longer than all retries together, or a late copy is handled again"}
                    telemetry.log(logging.WARNING, "idempotency_window_short", fields | fix)

    async def provision(self, *services: Service) -> None:
        """Subscribe services: from here on they get every event that is accepted, and none from before."""
        self._check_open()
        drifts = await self.adapter.provision([service.subscription() for service in services], self._mode)
        if drifts:
            lines = [f"{d.resource}: {d.argument} is {d.found}, wanted {d.wanted}" for d in drifts]
            if any(drift.found == "missing" for drift in drifts):
                lines.append('make what is missing with `eventbus topology apply`, or provision = "create"')
            raise TopologyMismatch("; ".join(lines))

    async def run(self, *services: Service, signals: bool = True) -> int:
        """Consume until SIGTERM or SIGINT; then drain, settle and return how many deliveries were left unsettled."""
        halt = self._halt = asyncio.Event()
        loop = asyncio.get_running_loop()
        caught = [signal.SIGTERM, signal.SIGINT] if signals else []
        for number in caught:
            loop.add_signal_handler(number, halt.set)
        try:
            async with self._consuming(services) as finished:
                finished.add_done_callback(lambda _: halt.set())
                await halt.wait()
                for number in caught:  # a second signal does what signals do
                    loop.remove_signal_handler(number)
                self.stop()
                return await finished
        finally:
            self._halt = None
            for number in caught:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Let `run` or `serving` drain and return, also one that is only about to start."""
        if self._halt is not None:
            self._halt.set()
        for worker in self._workers:
            worker.stop()

    @asynccontextmanager
    async def serving(self, *services: Service) -> AsyncIterator[None]:
        """Consume in the background of an application: `async with bus.serving(wms): yield` in a lifespan."""
        async with self._consuming(services):
            yield

    @asynccontextmanager
    async def _consuming(self, services: Sequence[Service]) -> AsyncIterator[asyncio.Future[int]]:
        # Imported here: a process that only publishes never needs it.
        from eventbus.worker.waits import undisturbed

        if not services:
            raise ConfigError("nothing to run: pass at least one Service")
        self.check(*services)
        if self._workers:
            raise ConfigError("this bus already runs services; pass all of them to one run() or serving()")
        await self.provision(*services)
        stack = AsyncExitStack()
        finished: asyncio.Future[int] | None = None
        try:
            for endpoint in _endpoints(services):
                stack.push_async_callback(endpoint.aclose)
                await endpoint.open(self._sender, now=self._clock.now)
            for service in services:
                await self._open_stores(service, stack)
            for service in services:
                await self._enlist(service, stack)
            finished = asyncio.ensure_future(_together(self._workers))
            yield finished
        finally:
            await undisturbed(self._wind_down(finished, stack))

    async def _enlist(self, service: Service, stack: AsyncExitStack) -> None:
        from eventbus.worker import Worker
        from eventbus.worker.dead_letters import DeadLetterWorker

        consumer = await stack.enter_async_context(self.adapter.consume(service.subscription()))
        broker = self.adapter.name
        self._workers.append(
            Worker(service, consumer, broker=broker, clock=self._clock, observe=self._observe, stores=self._stores)
        )
        if service.dead_letter_route is not None:
            letters = self.adapter.consume(service.subscription(dead_letters=True))
            reader = await stack.enter_async_context(letters)
            self._workers.append(DeadLetterWorker(service, reader, clock=self._clock))

    async def _wind_down(self, finished: asyncio.Future[int] | None, stack: AsyncExitStack) -> None:
        """Let the workers drain, then close their consumers; each worker keeps to its own grace time."""
        self.stop()
        try:
            if finished is not None:
                await finished
        finally:
            self._workers = []
            await stack.aclose()
            self._stores.clear()

    async def _open_stores(self, service: Service, stack: AsyncExitStack) -> None:
        from eventbus.registry import open_store
        from eventbus.worker.shaping import stores_needed

        for url, _ in stores_needed(service):
            if url not in self._stores:
                store = self.adapter.store() if url is None else open_store(url)
                assert store is not None  # checked before
                await store.open()
                stack.push_async_callback(store.aclose)
                self._stores[url] = store

    # --- looking ---------------------------------------------------------------------------------------------

    def dead_letters(self, service: str | Service, *, tenants: Collection[str] | None = None) -> DeadLetters:
        """A service's dead-letter queue; with `tenants`, what there is of theirs in it and nothing else."""
        from eventbus.parking import DeadLetters

        name, prefix = _name_of(service)
        parking = self.adapter.parking(name, prefix)
        return DeadLetters(
            parking, name, now=self._clock.now, stats=lambda: self.adapter.stats(name, prefix), tenants=tenants
        )

    async def stats(self, service: str | Service) -> Stats:
        """How many messages of a service are ready, in flight, delayed, parked; how its endpoints do, if run here."""
        found = await self.adapter.stats(*_name_of(service))
        name = _name_of(service)[0]
        mine = [worker.service for worker in self._workers if worker.service.name == name]
        if not mine:
            return found
        return replace(found, endpoints=tuple(endpoint.state for endpoint in _endpoints(mine[:1])))

    async def unsubscribe(self, service: str | Service) -> None:
        """Undo the subscription of a service; refused while it still has messages."""
        await self.adapter.unsubscribe(*_name_of(service))

    def topology(self, *services: Service) -> Topology:
        """Everything these services need on the broker."""
        return self.adapter.topology([service.subscription() for service in services])

    @property
    def health(self) -> Mapping[str, Health]:
        """How each running service is doing."""
        found = ((worker.service.name, worker.health) for worker in self._workers)
        return {name: health for name, health in found if health is not None}

    def fairness(self, service: str | Service) -> list[TenantTurns]:
        """The turns of each tenant of a running service with fairness, in this process; the most urgent first."""
        from eventbus.worker import Worker

        name, _ = _name_of(service)
        found = [worker for worker in self._workers if isinstance(worker, Worker) and worker.service.name == name]
        return [turns for worker in found for turns in worker.turns]

    @property
    def next_moment(self) -> float | None:
        """When time alone will make something happen in this process."""
        moments = [worker.next_moment for worker in self._workers]
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def busy(self) -> int:
        """How many deliveries are on their way through handlers and settlements now."""
        return sum(worker.busy for worker in self._workers)

    def __repr__(self) -> str:
        return f"Bus({redact_url(self.url)!r}, prefix={self.prefix!r})"

    def _check_open(self) -> None:
        if not self._open:
            raise BrokerError("the bus is not open; use it inside `async with Bus(...) as bus:`")


def _endpoints(services: Sequence[Service]) -> list[Endpoint]:
    return [route.endpoint for service in services for route in service.routes if route.endpoint is not None]


async def _together(workers: Sequence[Worker | DeadLetterWorker]) -> int:
    """Run workers until all are done; when one of them fails, the others drain before the error comes out."""
    tasks = [asyncio.ensure_future(worker.run()) for worker in workers]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for worker in workers:
            worker.stop()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return sum(result for result in results if isinstance(result, int))


def _name_of(service: str | Service) -> tuple[str, str]:
    if isinstance(service, Service):
        return service.name, service.prefix
    return naming.check_service(service), naming.prefix_of(service)
