"""The consumer of a service's work: its group on the shared stream, and its own stream of what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from eventbus import headers, telemetry
from eventbus.adapter import Settled, Subscription
from eventbus.errors import BrokerError, UnknownService
from eventbus.failpoints import failpoint
from eventbus.settlement import FRESH, Ack, Delivery, HeaderDelta, Park, Release, Settlement
from eventbus_redis import _scripts, fields
from eventbus_redis._client import Argument, Entry, Reading
from eventbus_redis._errors import MemoryFull, NoGroup
from eventbus_redis.leased import LeasedConsumer, Receipt, receipt_of

if TYPE_CHECKING:
    from eventbus_redis.adapter import RedisAdapter

BLOCK: Final = 0.1
"""How long one reading call waits: short, because a call that reads is never cancelled, and `wake` must be heard."""
MOVE_INTERVAL: Final = 0.1
MOVED_AT_ONCE: Final = 256
CLAIMED_AT_ONCE: Final = 32
"""Suspects are handled one after the other: a few at a time, so that replicas share them."""
READ_AT_ONCE: Final = 256
"""More at once would be lockstep: so the next are read while these are handled."""
MAIN: Final = b"m"
QUEUE: Final = b"q"
_QUEUE: Final = QUEUE[0]

Held: TypeAlias = tuple[Receipt, Delivery, Settlement]


class WorkConsumer(LeasedConsumer):
    """Reads both streams in one call; moves what is due before it; claims what vanished consumers held."""

    _released = "l"
    """How the settling script is told to hand something back."""
    _ahead = True
    """Whether the next entries are read while those before them are handled."""

    def __init__(self, adapter: RedisAdapter, subscription: Subscription) -> None:
        super().__init__(adapter, subscription)
        self.queue = self._keys.queue
        self._streams = {self._keys.queue: ">", self._keys.main: ">"}
        self._buffer: deque[Delivery] = deque()
        self._reading: Reading | None = None
        self._forgotten = False
        self._next_move = self._next_claim = 0.0
        self._cursors = {MAIN: b"0-0", QUEUE: b"0-0"}
        self._settled = True
        self._parked = False
        self._cleaned = self._swept = 0.0

    async def __aenter__(self) -> WorkConsumer:
        await super().__aenter__()
        if self._keys.main in self._streams:
            await self._end_turns()
        return self

    async def _end_turns(self) -> None:
        """What still waits for its tenant's turn, from when this service had fairness, goes to its stream at once."""
        keys = (self._keys.main, self._keys.queue, self._keys.turns)
        for window in itertools.count(1000, 1000):
            left = (await self._client.run(_scripts.TURNS, keys, (self._subscription.service, 0, window, window)))[1]
            if not left:
                return

    # --- receive ---------------------------------------------------------------------------------------------

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """What was left over, what vanished consumers held, then what both streams have."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        healed = 0
        while True:
            try:
                found = await self._take(limit, until)
            except NoGroup:
                healed += 1
                if healed > 3:
                    raise
                await self._heal()
                continue
            if found or self._woken or self._closed or loop.time() >= until:
                self._woken = False
                return found

    async def _take(self, limit: int, until: float) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        if self._buffer:
            return self._left_over(limit)
        if self._woken or self._closed:
            return []
        now = loop.time()
        if self._forgotten:
            await self._find_forgotten()
        if not self._buffer and now >= self._next_claim:
            await self._claim(min(limit, CLAIMED_AT_ONCE))
        if self._buffer:
            return self._left_over(limit)
        if now >= self._next_move:
            await self._move()
        return await self._take_new(limit, until)

    async def _take_new(self, limit: int, until: float) -> list[Delivery]:
        if self._reading is None:
            now = asyncio.get_running_loop().time()
            wait = min(until, now + BLOCK, self._next_move, self._next_claim) - now
            self._read(min(limit, READ_AT_ONCE), max(1, math.ceil(wait * 1000)))
        found = self._admit(await self._entries(), limit)
        room = self._subscription.prefetch - len(self._held)
        if self._ahead and len(found) >= READ_AT_ONCE and room >= 2 * READ_AT_ONCE:
            # There is more, and room for it from both streams: the server gets it ready while these are handled.
            self._read(READ_AT_ONCE, None)
        return found

    def _read(self, count: int, block: int | None) -> None:
        sub = self._subscription
        self._reading = self._client.start_reading(sub.service, self._name, count, block, self._streams)

    async def _entries(self) -> dict[str, list[Entry]]:
        """What was read. Whoever cancels us does not cancel the call: its entries are for the next receive."""
        reading = self._reading
        assert reading is not None
        try:
            found = await self._client.entries_of(reading)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError) or reading.cancelled():
                self._reading = None
                self._forgotten = True  # the server may have sent entries that never arrived here
            raise
        self._reading = None
        return found

    def _admit(self, found: dict[str, list[Entry]], limit: int) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for stream, source in ((self._keys.queue, QUEUE), (self._keys.main, MAIN)):
            if stream in found:
                deliveries += self._deliveries(source, found[stream])
        if len(deliveries) > limit:  # the limit of the call goes for each of the streams
            self._buffer.extend(deliveries[limit:])
            del deliveries[limit:]
        return deliveries

    def _left_over(self, limit: int) -> list[Delivery]:
        return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]

    def _deliveries(self, source: bytes, entries: Sequence[Entry]) -> list[Delivery]:
        """Entries as deliveries, which are held from here on."""
        service, queue, mapping, held = self._subscription.service, self.queue, self._subscription.mapping, self._held
        deliveries = []
        for id, entry in entries:
            event, story, problem, taken = fields.decode(id, entry, mapping)
            key = source + id
            receipt = Receipt(key, id, entry, story, False)
            history = FRESH if story is fields.NO_STORY else headers.read_history(story)
            held[key] = delivery = Delivery(event, service, queue, receipt, history, False, False, problem, taken)
            deliveries.append(delivery)
        return deliveries

    def _inherited(self, source: bytes, entry: Entry, note: bytes | None, *, suspect: bool) -> Delivery:
        """An entry that another consumer held, with the story that was written beside it."""
        (delivery,) = self._deliveries(source, [entry])
        delivery.suspect = suspect
        if note is not None:
            receipt = receipt_of(delivery)
            receipt.story, receipt.noted = fields.from_json(note), True
            delivery.history = headers.read_history(receipt.story)
        return delivery

    async def _move(self) -> None:
        """Take what is due to the service's own stream; every worker does, and each message is moved once."""
        keys = (self._keys.retry, self._keys.payload, self._keys.queue)
        moved, wait = await self._client.run(_scripts.MOVE, keys, (MOVED_AT_ONCE,))
        pause = MOVE_INTERVAL if wait < 0 else min(MOVE_INTERVAL, wait / 1000 + 0.001)
        self._next_move = asyncio.get_running_loop().time() + (0.0 if moved >= MOVED_AT_ONCE else pause)

    async def _claim(self, limit: int) -> None:
        """Take over what has not been renewed for a lease: its consumer is gone, or stands still."""
        lease = self._adapter.options.lease
        found = 0
        for source, stream in ((QUEUE, self._keys.queue), (MAIN, self._keys.main)):
            arguments = (
                self._subscription.service, self._name, round(lease * 1000), self._cursors[source], limit, source
            )  # fmt: skip
            cursor, entries, deleted, notes = await self._client.run(
                _scripts.CLAIM, (stream, self._keys.notes), arguments
            )
            self._cursors[source] = cursor
            if deleted:
                ids = [id.decode() for id in deleted[:10]]
                fields_ = {"stream": stream, "messages": len(deleted), "ids": ids}
                telemetry.log(logging.ERROR, "entries_deleted", self._fields() | fields_)
            for (id, entry), note in zip(entries, notes, strict=False):
                # One that we hold was only renewed: our own process stood still, and nobody else has taken it.
                if source + id not in self._held:
                    self._buffer.append(self._inherited(source, (id, entry), note, suspect=True))
                    found += 1
        self._next_claim = asyncio.get_running_loop().time() + (0.0 if found >= limit else min(lease / 4, 5.0))

    async def _find_forgotten(self) -> None:
        """After a broken call: entries that the server gave us and that never arrived. Nobody started them."""
        for stream, source in ((self._keys.queue, QUEUE), (self._keys.main, MAIN)):
            after = "0"
            while True:
                sub = self._subscription
                reading = self._client.start_reading(sub.service, self._name, 500, None, {stream: after})
                entries = (await self._client.entries_of(reading)).get(stream, [])
                new = [(id, entry) for id, entry in entries if entry and source + id not in self._held]
                self._buffer.extend(self._deliveries(source, new))
                if len(entries) < 500:
                    break
                after = entries[-1][0].decode()
        self._forgotten = False

    async def _heal(self) -> None:
        """Make the group again, from where the service had finished: after FLUSHALL, failover, XGROUP DESTROY."""
        sub = self._subscription
        keys = (self._keys.main, self._keys.services, self._keys.queue)
        answer = await self._client.run(_scripts.SUBSCRIBE, keys, (sub.service, "heal"))
        if answer == b"unknown":
            raise UnknownService(f"{sub.service} is no longer subscribed at {self._client.address}")
        if answer == b"healed":
            telemetry.log(logging.ERROR, "group_recreated", self._fields() | {"stream": self._keys.main})
        # What we held is in no pending list any more: it is delivered anew.
        self._drop(list(self._held.values()))
        self._buffer.clear()
        await asyncio.sleep(0.05)

    # --- settle ----------------------------------------------------------------------------------------------

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """All of them in one script: whose owner we still are is acknowledged, copied, or parked."""
        held = self._held
        mine: list[Held] = []
        for delivery, settlement in items:
            receipt: Receipt = delivery.receipt  # type: ignore[assignment]
            if held.get(receipt.key) is delivery:
                mine.append((receipt, delivery, settlement))
        failed: set[bytes] = set()
        gone: set[bytes] = set()
        if mine:
            try:
                gone = await self._settle(mine)
            except MemoryFull as error:
                # Acknowledging frees memory, copying needs some: do the one, keep the other.
                acks = [item for item in mine if isinstance(item[2], Ack)]
                failed = {receipt.key for receipt, _, settlement in mine if not isinstance(settlement, Ack)}
                telemetry.log(logging.ERROR, "memory_full", self._fields() | {"error": str(error), "kept": len(failed)})
                gone = await self._settle(acks) if acks else set()
            except NoGroup:
                self._forgotten = True  # receive makes the group again; all of these are delivered anew
                gone = {receipt.key for receipt, _, _ in mine}
        answers: list[Settled] = []
        for delivery, _ in items:
            key = delivery.receipt.key  # type: ignore[attr-defined]
            if held.get(key) is not delivery:
                answers.append("lost")
            elif key in failed:
                answers.append("failed")
            else:
                del held[key]
                answers.append("lost" if key in gone else "done")
        return answers

    async def _settle(self, items: Sequence[Held]) -> set[bytes]:
        """Carry them out; the keys of those that are no longer ours."""
        gone, missing = await self._run_settle(items)
        if missing:
            # Somebody trimmed the stream under us: what we have in memory is the message now.
            again = [item for item in items if item[0].key in missing]
            gone |= (await self._run_settle(again, whole=True))[0]
        self._settled = True
        notes = [receipt.key for receipt, _, settlement in items if receipt.noted and isinstance(settlement, Ack)]
        if notes:
            # Nobody reads a note without its entry: losing this call would leave a few bytes behind, no more.
            await self._client.run(_scripts.FORGET_NOTES, (self._keys.notes,), notes)
        return gone

    async def _run_settle(self, items: Sequence[Held], *, whole: bool = False) -> tuple[set[bytes], set[bytes]]:
        """Run the script; which were no longer ours, and which have vanished from their stream (see settle.lua)."""
        acks: tuple[list[bytes], list[bytes]] = ([], [])
        copies: list[Argument] = []
        copied: list[bytes] = []
        for receipt, delivery, settlement in items:
            if isinstance(settlement, Ack):
                acks[receipt.key[0] == _QUEUE].append(receipt.id)
            else:
                copies += self._copy(receipt, delivery, settlement, receipt.fields if whole else [])
                copied.append(receipt.key)
        k = self._keys
        keys = (k.main, k.queue, k.retry, k.payload, k.notes, k.dlq, k.ids, *k.tallies)
        arguments = (self._subscription.service, self._name, b" ".join(acks[0]), b" ".join(acks[1]), *copies)
        failpoint("redis.settle.before")
        lost, bare = await self._client.run(_scripts.SETTLE, keys, arguments)
        failpoint("redis.settle.after")
        if not lost and not bare:
            return set(), set()
        order = [MAIN + id for id in acks[0]] + [QUEUE + id for id in acks[1]] + copied
        return {order[position - 1] for position in lost}, {order[position - 1] for position in bare}

    def _copy(
        self, receipt: Receipt, delivery: Delivery, settlement: Settlement, whole: list[bytes]
    ) -> tuple[Argument, ...]:
        """What the script needs to make a copy."""
        assert not isinstance(settlement, Ack)
        op, wait = self._released, 0
        if isinstance(settlement, Park):
            op, self._parked = "p", True
        elif not isinstance(settlement, Release):
            # As a delay, not as a time: the server's clock may differ from ours. Upwards: never early.
            op, wait = "r", max(0, math.ceil((settlement.due_at - time.time()) * 1000))
            self._expect(wait)
        story = headers.merge(receipt.story, settlement.headers)
        facets = fields.facets_of(receipt.id, receipt.fields, story) if op == "p" else b""
        event_id = delivery.event.id.encode("utf-8", "replace")
        return (op, receipt.key[:1], receipt.id, fields.to_json(story), wait, event_id, facets, len(whole), *whole)

    def _expect(self, wait: int) -> None:
        """Look again when this is due."""
        self._next_move = min(self._next_move, asyncio.get_running_loop().time() + wait / 1000 + 0.005)

    async def note(self, delivery: Delivery, headers_: HeaderDelta) -> bool:
        """Written beside the pending entry, which stays ours."""
        receipt = receipt_of(delivery)
        if self._held.get(receipt.key) is not delivery:
            return False
        story = headers.merge(receipt.story, headers_)
        stream = self._keys.main if receipt.key[:1] == MAIN else self._keys.queue
        arguments = (self._subscription.service, self._name, receipt.id, receipt.key, fields.to_json(story) or b"{}")
        try:
            written = await self._client.run(_scripts.NOTE, (stream, self._keys.notes), arguments)
        except NoGroup:
            written = 0
        if written:
            receipt.story, receipt.noted = story, True
            return True
        self._held.pop(receipt.key, None)
        return False

    # --- hold ------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        held = list(self._held.items())
        if not held:
            return
        arguments: list[Argument] = [self._subscription.service, self._name]
        order: list[Delivery] = []
        for source in (MAIN, QUEUE):
            some = [(key, delivery) for key, delivery in held if key[:1] == source]
            arguments.append(len(some))
            arguments += [key[1:] for key, _ in some]
            order += [delivery for _, delivery in some]
        try:
            lost = await self._client.run(_scripts.RENEW, (self._keys.main, self._keys.queue), arguments)
        except NoGroup:
            return  # receive makes it again
        # What was settled while the call was under way is not lost, and no longer held.
        self._drop([order[position - 1] for position in lost])

    async def _clean(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._settled or now - self._cleaned > 5.0:
            self._settled, self._cleaned = False, now
            await self._adapter.trim(self._subscription.prefix)
        if self._parked:
            self._parked = False
            await self._adapter.expire(self._subscription.service, self._subscription.prefix)
        if now - self._swept > 600.0:
            self._swept = now
            keys = (self._keys.main, self._keys.queue)
            idle = round(max(3600.0, self._adapter.options.lease * 10) * 1000)
            await self._client.run(_scripts.SWEEP, keys, (self._subscription.service, idle))

    async def _let_go(self) -> None:
        if self._reading is not None:
            with contextlib.suppress(BrokerError):  # what it would have brought is let go with the rest
                self._admit(await self._entries(), 0)
        unstarted = [(delivery, Release()) for delivery in self._buffer]
        self._buffer.clear()
        if unstarted:
            await self.settle([item for item in unstarted if not item[0].suspect])
        keys = (self._keys.main, self._keys.queue)
        await self._client.run(_scripts.LET_GO, keys, (self._subscription.service, self._name))
