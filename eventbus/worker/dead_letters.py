"""The consumer of a service's dead letters: anything but success leaves them parked, to be tried again later."""

from __future__ import annotations

import asyncio
import logging

from anyio import to_thread

from eventbus import headers, telemetry
from eventbus.adapter import Consumer, Parked
from eventbus.clock import Clock
from eventbus.deadletter import DeadLetter
from eventbus.errors import EventBusError
from eventbus.policy import judge
from eventbus.service import Service
from eventbus.settlement import ACK, RELEASE, Delivery, Requeue
from eventbus.status import ConsumerStatus, Outcome, outcome_of
from eventbus.worker.settling import BACKOFF
from eventbus.worker.waits import wait_for

RETRY_DELAYS = (5.0, 15.0, 60.0, 300.0)


class DeadLetterWorker:
    """Hands dead letters to the service's own function, batch by batch. They are never parked again."""

    def __init__(self, service: Service, consumer: Consumer, *, clock: Clock) -> None:
        route = service.dead_letter_route
        assert route is not None
        self.service = service
        self._route = route
        self._consumer = consumer
        self._clock = clock
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
        telemetry.log(
            logging.INFO, "dlq_consumer_started", {"service": self.service.name, "queue": self._consumer.queue}
        )
        broken = 0
        while not self._stopping.is_set():
            try:
                deliveries = await self._consumer.receive(self._route.batch, 1.0)
                self.busy = len(deliveries)
                if deliveries:
                    await self._handle(deliveries)
                broken = 0
            except EventBusError as error:
                fields = {"service": self.service.name, "queue": self._consumer.queue, "error": str(error)}
                telemetry.log(logging.WARNING, "connection_lost", fields)
                await wait_for(self._stopping, BACKOFF[min(broken, len(BACKOFF) - 1)])
                broken += 1
            finally:
                self.busy = 0
        return 0

    async def _handle(self, deliveries: list[Delivery]) -> None:
        if self._stopping.is_set():
            await self._consumer.settle([(delivery, RELEASE) for delivery in deliveries])
            return
        outcome = await self._call([self._letter(delivery) for delivery in deliveries])
        if judge(outcome)[0] is ConsumerStatus.ACK:
            self._failures = 0
            await self._consumer.settle([(delivery, ACK) for delivery in deliveries])
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
        later = Requeue(self._clock.now() + wait, wait, {})
        await self._consumer.settle([(delivery, later) for delivery in deliveries])

    async def _call(self, letters: list[DeadLetter]) -> Outcome:
        try:
            async with asyncio.timeout(self._route.timeout):
                if self._route.is_async:
                    result = await self._route.call(letters)  # type: ignore[misc]
                else:
                    result = await to_thread.run_sync(self._route.call, letters, abandon_on_cancel=True)
            return outcome_of(result)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            return Outcome(error=error)

    def _letter(self, delivery: Delivery) -> DeadLetter:
        story = {name: value for name, value in delivery.event.headers.items() if headers.is_reserved(name)}
        event = delivery.event.rewritten(headers=headers.strip_reserved(delivery.event.headers))
        return DeadLetter.read(Parked("", event, story), self.service.name)
