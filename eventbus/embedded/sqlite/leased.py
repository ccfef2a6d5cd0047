"""What both consumers share: claiming, waiting, holding rows by leases that are renewed, letting go."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from eventbus import headers, telemetry, wire
from eventbus.adapter import Consumer, Settled, Subscription
from eventbus.embedded.sqlite import letters, rows, subscriptions
from eventbus.embedded.sqlite.leases import Claimed, Extend, Held, Note, Table
from eventbus.embedded.sqlite.watch import Place
from eventbus.embedded.sqlite.writer import Operation
from eventbus.errors import BrokerError
from eventbus.settlement import FRESH, Delivery, HeaderDelta, Release, Settlement

if TYPE_CHECKING:
    from eventbus.embedded.sqlite.adapter import SqliteAdapter

HOUSEKEEPING: Final = 60.0


class Receipt:
    """Which row a delivery is, the token it is held by, and the reserved headers beside it."""

    __slots__ = ("headers", "number", "token")

    def __init__(self, number: int, token: int, headers: dict[str, object]) -> None:
        self.number = number
        self.token = token
        self.headers = headers


class LeasedConsumer(Consumer):
    """A consumer without a table: see consumers.py for those of work and of dead letters."""

    _table: Table

    def __init__(self, adapter: SqliteAdapter, subscription: Subscription) -> None:
        self._adapter = adapter
        self._subscription = subscription
        self._held: dict[int, Delivery] = {}
        self._place: Place | None = None
        self._id = self._log = 0
        self._idle: asyncio.Future[None] | None = None
        self._woken = False
        self._closed = False
        self._housekeeping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.alive_at = 0.0
        """When the loop last showed that it runs."""
        self._retention = adapter.retention(subscription.service)

    async def __aenter__(self) -> LeasedConsumer:
        await self._find()
        return self

    # --- receive ---------------------------------------------------------------------------------------------

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """Claim; where there is nothing, wait until the watch sees something, and claim again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        place = self._place or await self._find()
        watch = self._adapter.watch
        while not self._woken and not self._closed:
            mark = watch.mark(place)
            claimed = await self._claim(limit)
            if claimed.rows:
                self._woken = False
                return self._deliver(claimed)
            if claimed.unknown:
                self._place = None
                raise subscriptions.unknown(self._subscription.service, self._adapter.path)
            if self._woken or self._closed or loop.time() >= until:
                break
            self._idle = loop.create_future()
            try:
                await watch.wait(place, mark, claimed.next_due, until, self._idle)
            finally:
                self._idle = None
        self._woken = False
        return []

    def wake(self) -> None:
        """Make a waiting receive return; if none waits just now, the next one."""
        self._woken = True
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _claim(self, limit: int) -> Claimed:
        claim = asyncio.ensure_future(self._adapter.writer.submit(self._claim_operation(limit)))
        try:
            return await asyncio.shield(claim)
        except asyncio.CancelledError:
            # Nobody will ever see these deliveries: without this they would wait for their lease to end.
            claim.add_done_callback(self._abandon)
            raise

    def _abandon(self, claim: asyncio.Future[Claimed]) -> None:
        if claim.cancelled() or claim.exception() is not None or not claim.result().rows:
            return
        deliveries = self._deliver(claim.result())
        task = asyncio.ensure_future(self.settle([(delivery, Release()) for delivery in deliveries]))
        self._adapter.background.add(task)
        task.add_done_callback(self._adapter.background.discard)

    def _deliver(self, claimed: Claimed) -> list[Delivery]:
        token, held, lost = claimed.token, self._held, []
        deliveries = []
        for row in claimed.rows:
            delivery = self._delivery(row, token)
            number: int = row[0]
            if number in held:
                # Our own lease ran out unnoticed (the process stood still) and we have claimed it once more.
                lost.append(held[number])
            held[number] = delivery
            deliveries.append(delivery)
        if lost:
            self.lost(lost)
        return deliveries

    def _delivery(self, row: rows.Row, token: int) -> Delivery:
        """The delivery in a claimed row: number, stored_at, headers, former token, then the event."""
        story = rows.from_json(row[2]) if row[2] is not None else {}
        event, problem = wire.unwrap(rows.to_event(*row[4:]), self._subscription.mapping)
        return Delivery(
            event,
            self._subscription.service,
            self.queue,
            Receipt(row[0], token, story),
            headers.read_history(story) if story else FRESH,
            row[3] is not None,
            False,
            problem,
            row[1] / 1000,
        )

    # --- settle ----------------------------------------------------------------------------------------------

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """All of them in one transaction."""
        mine: dict[int, tuple[Receipt, Delivery, Settlement]] = {}
        for delivery, settlement in items:
            receipt = receipt_of(delivery)
            if self._held.get(receipt.number) is delivery:
                # Named twice, the first word counts; the second finds it gone.
                mine.setdefault(receipt.number, (receipt, delivery, settlement))
        if not mine:
            return ["lost"] * len(items)
        try:
            done = await self._adapter.writer.submit(self._settle_operation(list(mine.values())))
        except BrokerError as error:
            fields = {"service": self._subscription.service, "queue": self.queue, "error": str(error)}
            telemetry.log(logging.WARNING, "settle_failed", fields | {"messages": len(mine)})
            return [
                "failed" if self._held.get(receipt_of(delivery).number) is delivery else "lost" for delivery, _ in items
            ]
        answers: list[Settled] = []
        for delivery, _ in items:
            number = receipt_of(delivery).number
            if self._held.get(number) is not delivery:
                answers.append("lost")
                continue
            del self._held[number]
            answers.append("done" if number in done else "lost")
        return answers

    async def note(self, delivery: Delivery, headers_: HeaderDelta) -> bool:
        """Written into the row, which stays ours."""
        receipt = receipt_of(delivery)
        if self._held.get(receipt.number) is not delivery:
            return False
        story = headers.merge(receipt.headers, headers_)
        note = Note(self._table, self._id, receipt.number, receipt.token, rows.to_json(story))
        if await self._adapter.writer.submit(note):
            receipt.headers = story
            return True
        if self._held.get(receipt.number) is delivery:  # it may have been claimed again meanwhile
            del self._held[receipt.number]
        return False

    # --- hold ------------------------------------------------------------------------------------------------

    def renew_from_thread(self) -> None:
        """Ask for longer leases of all that is held; called by the renewal's thread, so the loop may be blocked."""
        asked = self._held.copy()
        loop = self._loop
        if loop is None or loop.is_closed() or self._closed:
            return
        future: asyncio.Future[set[int]] = loop.create_future()
        try:
            if asked:
                held = self._leases(map(receipt_of, asked.values()))
                self._adapter.writer.post(Extend(self._table, held, self._adapter.options.lease), future)
            loop.call_soon_threadsafe(self._on_renewal, asked, future)
        except (BrokerError, RuntimeError) as error:
            # Closed in this very moment: whoever closed it has let go of the leases too.
            telemetry.log(logging.DEBUG, "lease_renewal_failed", {"queue": self.queue, "error": str(error)})

    def _on_renewal(self, asked: dict[int, Delivery], future: asyncio.Future[set[int]]) -> None:
        self.alive_at = time.monotonic()
        if asked:
            future.add_done_callback(lambda done: self._renewed(asked, done))

    def _renewed(self, asked: dict[int, Delivery], future: asyncio.Future[set[int]]) -> None:
        error = future.exception()
        if error is not None:
            # The next round may still be in time; if not, others take over and we hear of it then.
            fields = {"service": self._subscription.service, "queue": self.queue, "error": str(error)}
            telemetry.log(logging.WARNING, "lease_renewal_failed", fields)
            return
        still = future.result()
        # What was settled meanwhile is not lost; what was claimed again by us is a new delivery.
        lost = [
            delivery for number, delivery in asked.items() if number not in still and self._held.get(number) is delivery
        ]
        for delivery in lost:
            del self._held[receipt_of(delivery).number]
        if lost:
            self.lost(lost)

    async def _keep_house(self) -> None:
        """Apply the retention now and then, for services that park nothing."""
        while True:
            await asyncio.sleep(HOUSEKEEPING)
            try:
                await self._adapter.writer.submit(letters.Expire(self._id, self._retention))
            except BrokerError as error:
                telemetry.log(logging.WARNING, "retention_failed", {"queue": self.queue, "error": str(error)})

    async def aclose(self) -> None:
        """Stop renewing; what is unsettled can be received by others at once, as suspect."""
        if self._closed:
            return
        self._closed = True
        self.wake()
        self._adapter.renewal.remove(self)
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        if not self._held:
            return
        held = self._leases(map(receipt_of, self._held.values()))
        try:
            await self._adapter.writer.submit(Extend(self._table, held, 0.0))
        except BrokerError as error:
            # Their leases end by themselves.
            telemetry.log(logging.DEBUG, "let_go_failed", {"queue": self.queue, "error": str(error)})

    def _leases(self, receipts: Iterable[Receipt]) -> Held:
        return Held(self._id, [(receipt.number, receipt.token) for receipt in receipts])

    async def _find(self) -> Place:
        sub = self._subscription
        found = await self._adapter.reader.query(lambda c: subscriptions.find(c, sub.service, sub.prefix))
        if found is None:
            raise subscriptions.unknown(sub.service, self._adapter.path)
        self._id, self._log = found
        self._place = Place(self._id, self._log, dead_letters=sub.dead_letters)
        if self._loop is None and not self._closed:
            self._loop, self.alive_at = asyncio.get_running_loop(), time.monotonic()
            self._adapter.renewal.add(self)
            if self._retention.max_age is not None:
                self._housekeeping = self._loop.create_task(self._keep_house(), name=f"eventbus house {self.queue}")
        return self._place

    @abstractmethod
    def _claim_operation(self, limit: int) -> Operation[Claimed]: ...

    @abstractmethod
    def _settle_operation(self, items: Sequence[tuple[Receipt, Delivery, Settlement]]) -> Operation[set[int]]: ...


def receipt_of(delivery: Delivery) -> Receipt:
    """The receipt of a delivery of ours."""
    receipt = delivery.receipt
    assert isinstance(receipt, Receipt)
    return receipt
