"""The consumer of a service's dead letters: anything but success leaves them parked, to be tried again later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from anyio import to_thread

from eventbus import headers, telemetry
from eventbus.adapter import Consumer, Parked, Settled
from eventbus.clock import Clock
from eventbus.deadletter import DeadLetter
from eventbus.errors import EventBusError
from eventbus.policy import judge
from eventbus.service import Service
from eventbus.settlement import ACK, RELEASE, Delivery, Requeue, Settlement
from eventbus.status import ConsumerStatus, Outcome, outcome_of
from eventbus.worker.calling import Aborted, failure
from eventbus.worker.settling import BACKOFF, SAY_AGAIN, Item, Settler
from eventbus.worker.solitude import Solitude
from eventbus.worker.waits import wait_for

RETRY_DELAYS: Final = (5.0, 15.0, 60.0, 300.0)
MAX_PAUSE: Final = 86_400.0
FLUSH_TIMEOUT: Final = 10.0


class DeadLetterWorker:
    """Hands dead letters to the service's own function, batch by batch. They are never parked again."""

    def __init__(self, service: Service, consumer: Consumer, *, clock: Clock) -> None:
        route = service.dead_letter_route
        assert route is not None
        self.service = service
        self._route = route
        self._consumer = consumer
        self._clock = clock
        self._solitude = Solitude.here()
        self._settler = Settler(consumer, self._settled)
        self._stopping = asyncio.Event()
        self._failures = 0
        self.busy = 0
        self.next_moment: float | None = None
        self.health: None = None  # readiness is about the service's own queue

    def stop(self) -> None:
        """Finish the batch in hand, then return."""
        self._stopping.set()
        self._consumer.wake()

    async def run(self) -> int:
        """Consume until stopped; returns how many letters were left unsettled."""
        fields: dict[str, object] = {"service": self.service.name, "queue": self._consumer.queue}
        telemetry.log(logging.INFO, "dlq_consumer_started", fields)
        settling = asyncio.create_task(self._settler.run(), name=f"eventbus settle letters {self.service.name}")
        working = asyncio.create_task(self._work(), name=f"eventbus letters {self.service.name}")
        try:
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait({working, settling, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not settling.done():
                await asyncio.wait({working}, timeout=self.service.grace)
                working.cancel()
                await asyncio.wait({working}, timeout=1.0)
                await wait_for(self._settler.empty, FLUSH_TIMEOUT)
            for task in (settling, working):
                if task.done() and not task.cancelled() and task.exception() is not None:
                    telemetry.log(logging.CRITICAL, "worker_failed", fields, exc_info=task.exception())
                    await task
            return self.busy
        finally:
            for task in (settling, working):
                task.cancel()
            await asyncio.wait({settling, working}, timeout=1.0)

    async def _work(self) -> None:
        broken = 0
        while not self._stopping.is_set():
            try:
                deliveries = await self._consumer.receive(self._route.batch, 1.0)
            except EventBusError as error:
                if broken % SAY_AGAIN == 0:
                    fields = {"service": self.service.name, "queue": self._consumer.queue, "error": str(error)}
                    telemetry.log(logging.WARNING, "connection_lost", fields)
                await wait_for(self._stopping, BACKOFF[min(broken, len(BACKOFF) - 1)])
                broken += 1
                continue
            broken = 0
            self.busy += len(deliveries)
            suspects = [delivery for delivery in deliveries if delivery.suspect]
            await self._handle([delivery for delivery in deliveries if not delivery.suspect])
            for delivery in suspects:
                await self._handle_alone(delivery)
            await self._settler.empty.wait()

    async def _handle_alone(self, delivery: Delivery) -> None:
        """A letter that was being read when its process died: by itself, after a note, and ever more seldom."""
        crashes = delivery.history.crashes
        if crashes >= self.service.max_crashes and not delivery.noted:
            delivery.suspect = False
            pause = min(MAX_PAUSE, 300.0 * 2.0 ** min(crashes - self.service.max_crashes, 16))
            telemetry.log(logging.ERROR, "dlq_letter_crashes", telemetry.about(delivery) | {"next_delay": pause})
            self._settler.add(delivery, self._later(pause))
            return
        async with self._solitude:
            if self._stopping.is_set() or not (
                delivery.noted or await self._consumer.note(delivery, {headers.CRASHES: crashes + 1})
            ):
                self._settler.add(delivery, RELEASE)
                return
            await self._handle([delivery], alone=True)

    async def _handle(self, deliveries: Sequence[Delivery], *, alone: bool = False) -> None:
        if not deliveries:
            return
        if self._stopping.is_set():
            self._settle(deliveries, RELEASE)
            return
        if alone:
            self._solitude.enter()
        else:
            await self._solitude.enter_when_open()
        try:
            outcome = await self._call([self._letter(delivery) for delivery in deliveries])
        except asyncio.CancelledError:
            self._settle(deliveries, RELEASE)
            raise
        finally:
            self._solitude.leave()
        if judge(outcome)[0] is ConsumerStatus.ACK:
            self._failures = 0
            self._settle(deliveries, ACK)
            return
        wait = RETRY_DELAYS[min(self._failures, len(RETRY_DELAYS) - 1)]
        self._failures += 1
        fields = {
            "service": self.service.name,
            "queue": self._consumer.queue,
            "letters": len(deliveries),
            "reason": headers.describe(outcome),
            "next_delay": wait,
        }
        telemetry.log(logging.WARNING, "dlq_consumer_failed", fields, exc_info=outcome.error)
        self._settle(deliveries, self._later(wait))

    async def _call(self, letters: list[DeadLetter]) -> Outcome:
        try:
            async with asyncio.timeout(self._route.timeout):
                if self._route.is_async:
                    result = await self._route.call(letters)  # type: ignore[misc]
                else:
                    result = await to_thread.run_sync(self._route.call, letters, abandon_on_cancel=True)
            return outcome_of(result)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            return failure(error)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return failure(Aborted(error))

    def _later(self, seconds: float) -> Requeue:
        return Requeue(self._clock.now() + seconds, seconds, {headers.CRASHES: None})

    def _settle(self, deliveries: Sequence[Delivery], settlement: Settlement) -> None:
        for delivery in deliveries:
            self._settler.add(delivery, settlement)

    def _settled(self, items: Sequence[Item], answers: Sequence[Settled]) -> None:
        self.busy -= len(items)

    def _letter(self, delivery: Delivery) -> DeadLetter:
        story = {name: value for name, value in delivery.event.headers.items() if headers.is_reserved(name)}
        event = delivery.event.rewritten(headers=headers.strip_reserved(delivery.event.headers))
        return DeadLetter.read(Parked("", event, story), self.service.name)
