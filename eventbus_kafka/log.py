"""A member of a consumer group on some topics: one coroutine fetches, one commits, and nobody else touches it.

    fetch -> buffer of the partition -> receive -> worker -> settle -> finished -> committed every 200 ms

Rebalance: stop giving out, let the worker drop what it has not started, wait for what runs (`drain`), commit. A
partition that comes back without anybody having had it meanwhile goes on where it was; one that does not is fenced, and
whatever is said about it later is `lost`. Nobody gives out a message before a commit of its own: that is how one knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from eventbus import telemetry
from eventbus.adapter import Consumer, Subscription
from eventbus.errors import BrokerError, BrokerUnavailable
from eventbus.failpoints import failpoint
from eventbus.settlement import Delivery, HeaderDelta
from eventbus_kafka import records
from eventbus_kafka._client import TP, GroupConsumer, Moving
from eventbus_kafka._errors import Fenced
from eventbus_kafka._unread import Unread, piece_of_each
from eventbus_kafka.lanes import Lane, receipt_of
from eventbus_kafka.names import Names
from eventbus_kafka.offsets import NOTHING, NoRoom, decode
from eventbus_kafka.records import Record

if TYPE_CHECKING:
    from eventbus_kafka.adapter import KafkaAdapter

PATIENCE: Final = 0.5
"""Seconds that a partition may stay full before it is paused."""
POLL: Final = 0.1
"""How long one poll waits; a poll is never cancelled, so it is short."""
SHORTLY: Final = 0.01
"""How long to wait for a full lane to have room while others could be fed."""
AT_ONCE: Final = 96
"""Messages that are given out together: their objects are gone again before the garbage collector looks at them."""
FEW: Final = 32
"""Of those so many of one partition, before the next has its turn."""
LOOK_AGAIN: Final = 30.0
"""Seconds between two looks at which topics there are."""
COUNT_AGAIN: Final = 1.0
"""Seconds between two looks at whether retention was faster than we."""
SETTLE_DOWN: Final = 5.0
MOVING: Final = 2.0
BACKOFF: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
CALM: Final = 2.0
"""Seconds without an error after which a consumer receives again; at once if something comes."""


class LogConsumer(Consumer, Moving):
    """What consumers of work and of dead letters have in common."""

    def __init__(self, adapter: KafkaAdapter, subscription: Subscription, names: Names, group: str) -> None:
        self._adapter = adapter
        self._client = adapter.client
        self._subscription = subscription
        self._names = names
        self._group = group
        self._owner = secrets.token_hex(4)
        self._member: GroupConsumer | None = None
        self._topics: list[str] = []
        self.lanes: dict[TP, Lane] = {}
        self._order: list[Lane] = []
        self._todo: Sequence[TP] | None = None
        self._moving = True
        self._entitled = False
        """Whether to commit: not from the end of `revoked` until the partitions are taken over."""
        self._epoch = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived = asyncio.Event()
        self._settled = asyncio.Event()
        self._commit_soon = asyncio.Event()
        self._settled_down = asyncio.Event()
        self._roomy = asyncio.Event()
        self._told = asyncio.Event()
        self._committing = asyncio.Lock()
        self._leaving = asyncio.Lock()
        self._failure: BrokerError | None = None
        self._unreadable: BrokerError | None = None
        self._uncommitted: BrokerUnavailable | None = None
        self._bug: BaseException | None = None
        self._woken = self._closed = False
        self._skipped: dict[TP, tuple[int, int]] = {}
        """Offsets that did not come: from where on, and where what came begins."""
        self._next_look = self._next_pass = self._next_count = 0.0

    # --- life ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> LogConsumer:
        loop = asyncio.get_running_loop()
        self._topics = await self._wanted_topics()
        self._next_look = loop.time() + LOOK_AGAIN
        await self._join()
        self._tasks = [
            loop.create_task(self._fetch(), name=f"eventbus kafka fetch {self._group}"),
            loop.create_task(self._commit_regularly(), name=f"eventbus kafka commit {self._group}"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_end)
        self._adapter.opened(self)
        return self

    async def aclose(self) -> None:
        """Commit what is finished, leave the group. What is held and unsettled will come again as suspect."""
        if self._closed:
            return
        if self._moving and any(lane.dirty for lane in self.lanes.values()):
            # Nobody can commit while the group moves, and what is finished would be handled again.
            await _wait(self._settled_down, SETTLE_DOWN)
        self._closed = True
        self._told.set()
        self._settled.set()
        self.wake()
        self._adapter.closed(self)
        for task in self._tasks:
            task.cancel()  # a poll may be cancelled now: there is none after it
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        try:
            async with self._committing:
                await self._commit(list(self.lanes.values()), ahead=False)
        except BrokerError as error:
            telemetry.log(logging.WARNING, "commit_failed", self._fields() | {"error": str(error)})
        for lane in self.lanes.values():
            lane.fenced = True
        self.lanes.clear()
        if self._member is not None:
            await self._member.stop()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Without one of its coroutines a consumer would look well and give out nothing: say so."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bug = error
            self._arrived.set()

    def wake(self) -> None:
        """Make a waiting receive return."""
        self._woken = True
        self._arrived.set()

    @abstractmethod
    async def _wanted_topics(self) -> list[str]:
        """The topics to read."""

    async def _join(self) -> None:
        member = self._client.consumer(self._group, self)
        await member.start(self._topics)
        self._member = member

    # --- fetch -----------------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        """Poll for ever: a member that does not poll is put out of its group."""
        failures, calm_since = 0, 0.0
        while not self._closed:
            try:
                if self._moving and self._todo is None:
                    # There is nothing to fetch before the lanes are there. But not to poll at all for long would put
                    # us out of the group.
                    await _wait(self._told, MOVING)
                if self._todo is not None:
                    await self._take_over(self._todo)
                assert self._member is not None
                came = await self._poll()
                if not came:
                    self._member.check()
                if not self._moving:
                    await self._pass_gaps()
                await self._tell_losses()
                await self._look_for_topics()
                if self._failure is not None and not self._moving:
                    now = asyncio.get_running_loop().time()
                    calm_since = calm_since or now
                    if came or now - calm_since > CALM:
                        self._failure, failures = None, 0
            except Fenced:
                await asyncio.sleep(BACKOFF[0])  # the group moves on: there is news soon
            except BrokerError as error:
                if self._closed:
                    return
                self._failure, calm_since = error, 0.0
                self._arrived.set()
                gone = isinstance(error, BrokerUnavailable)
                # One who is refused asks for much each time; of one who is gone we only look whether he is back.
                await asyncio.sleep(BACKOFF[min(failures, 3 if gone else len(BACKOFF) - 1)])
                failures += 1
                if not gone:
                    await self._rejoin()
            except Exception as error:  # noqa: BLE001 - if this ended without a word, nobody would ever fetch again
                telemetry.log(logging.ERROR, "fetch_failed", self._fields(), exc_info=error)
                self._failure, calm_since = BrokerError(f"{self._group}: {error!r}"), 0.0
                self._arrived.set()
                await asyncio.sleep(BACKOFF[min(failures, len(BACKOFF) - 1)])
                failures += 1
                await self._rejoin()

    async def _poll(self) -> bool:
        """Feed the lanes that have room, a slice each; whether anything came.

        What they do not take stays with the fetcher, as bytes, at no cost, but there it holds up the other partitions
        of its node; so a lane that stays full is paused, which throws away what was fetched ahead.
        """
        member = self._member
        assert member is not None
        for lane in self._order:  # also one of which nothing is left to take: it waited for a message to be finished
            if lane.full_since and lane.roomy:
                self._make_room(lane)
        full = [lane for lane in self._order if lane.full]
        hungry = [lane.tp for lane in self._order if not lane.full]
        now = asyncio.get_running_loop().time()
        for lane in full:
            lane.full_since = lane.full_since or now
            if not lane.paused and (lane.tier or now - lane.full_since > PATIENCE):
                lane.paused = True
                member.pause(lane.tp)
        came = False
        if hungry or not self._order:
            fetched = await member.poll(POLL if all(lane.paused for lane in full) else 0.0, hungry)
            self._feed(fetched)
            came = bool(fetched)
        elif resting := [lane.tp for lane in full if lane.paused]:
            # Nothing comes of these. But whoever does not poll for long is put out of the group, and would stay out.
            self._feed(await member.poll(0.0, resting))
        if full and not came:
            self._roomy.clear()
            await _wait(self._roomy, SHORTLY if hungry else POLL)
        return came

    def _feed(self, fetched: Mapping[TP, Unread]) -> None:
        """Give the lanes what was fetched. While the group moves nobody knows yet whose it is: it is fetched again."""
        if self._moving:
            return
        for tp, unread in fetched.items():
            lane = self.lanes.get(tp)
            if lane is None:
                continue
            if unread.start < lane.fetched:
                lane = self._begin_again(lane, unread.start)
            elif unread.start > lane.fetched:
                self._skipped.setdefault(tp, (lane.fetched, unread.start))
            lane.feed(unread)
        if fetched:
            self._arrived.set()

    def _begin_again(self, lane: Lane, start: int) -> Lane:
        """The log ends before what was read of it: it was cut, or made anew. What it has now is news."""
        fields = {"topic": lane.tp[0], "partition": lane.tp[1], "was_at": lane.ledger.position, "goes_on_at": start}
        telemetry.log(logging.ERROR, "log_was_cut", self._fields() | fields)
        self._fence([lane])
        fresh = self.lanes[lane.tp] = Lane(lane.tp, start, NOTHING, tier=lane.tier)
        fresh.room = lane.room
        self._order = list(self.lanes.values())
        return fresh

    async def _pass_gaps(self) -> None:
        """Go past offsets at the end of a partition that no message has: markers, compacted ones.

        Only here, between two polls, does the fetcher's position stand for what the lanes have seen.
        """
        now = asyncio.get_running_loop().time()
        if now < self._next_pass:
            return
        self._next_pass = now + POLL
        epoch, member = self._epoch, self._member
        for lane in self._order:
            if lane.ledger.open or lane.in_hand or member is None:
                continue
            position = await member.position(lane.tp)
            if epoch != self._epoch or self._moving or lane.fenced:
                return
            if position > lane.ledger.position:
                self._skipped.setdefault(lane.tp, (lane.ledger.position, position))
                lane.ledger.advance(position)
                lane.dirty = True

    async def _tell_losses(self) -> None:
        """Of offsets that did not come most never were messages; those before the log's begin retention took."""
        now = asyncio.get_running_loop().time()
        if not self._skipped or now < self._next_count:
            return
        self._next_count = now + COUNT_AGAIN
        skipped, self._skipped = self._skipped, {}
        try:
            begins = await self._client.begins([tp for tp in skipped if tp in self.lanes], within=COUNT_AGAIN)
        except BrokerError:  # one partition has no leader just now: it is told later, and nobody waits for it
            self._skipped = skipped | self._skipped
            self._next_count += LOOK_AGAIN
            return
        for tp, begin in begins.items():
            at, goes_on = skipped[tp]
            if at < min(begin, goes_on):
                fields = {"topic": tp[0], "partition": tp[1], "was_at": at, "goes_on_at": goes_on}
                fix = "raise kafka.retention (retention.ms of the topic), or consume faster"
                telemetry.log(logging.ERROR, "messages_expired", self._fields() | fields | {"fix": fix})

    async def _rejoin(self) -> None:
        """The member is of no use any more: begin anew."""
        self._moving, self._entitled = True, False
        self._call_back()
        old, self._member = self._member, None
        if old is not None:
            await old.stop()
        while self._member is None and not self._closed:
            try:
                await self._join()
            except BrokerError as error:
                self._failure = error
                self._arrived.set()
                await asyncio.sleep(BACKOFF[-1])

    async def _look_for_topics(self) -> None:
        """Tiers are made when they are first needed, by whoever needs them; everybody reads all of them."""
        now = asyncio.get_running_loop().time()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_AGAIN
        wanted = await self._wanted_topics()
        if wanted != self._topics and self._member is not None:
            self._topics = wanted
            await self._stand_still(0.0)
            self._member.subscribe(wanted)

    def look_for_topics(self) -> None:
        """A topic was made just now."""
        self._next_look = 0.0

    # --- partitions come and go ------------------------------------------------------------------------------

    async def assigned(self, partitions: Sequence[TP]) -> None:
        """Taken over by the fetching coroutine, which can try again where asking for their commits fails."""
        self._epoch += 1
        if self._member is not None:
            self._member.hold(partitions)
        self._todo = list(partitions)
        self._told.set()

    async def _take_over(self, partitions: Sequence[TP]) -> None:
        """Begin with the partitions that are ours now, or go on where nobody else had them meanwhile."""
        epoch, member = self._epoch, self._member
        assert member is not None
        known = await self._client.committed(self._group, partitions)
        fresh = [tp for tp in partitions if tp not in known]
        begins = await self._client.begins(fresh) if fresh else {}
        if epoch != self._epoch:
            return  # they moved on while we asked
        lanes: dict[TP, Lane] = {}
        for tp in partitions:
            at, metadata = known.get(tp) or (begins[tp], "")
            legacy, old = decode(at, metadata), self.lanes.get(tp)
            if old is not None and legacy.owner == self._owner:
                lanes[tp] = old
            else:
                lanes[tp] = Lane(tp, at, legacy, tier=self._names.delay_of(tp[0]))
        member.begin({tp: lane.fetched for tp, lane in lanes.items()})
        self._fence(lane for tp, lane in self.lanes.items() if lanes.get(tp) is not lane)
        self.lanes, self._order = lanes, list(lanes.values())
        for lane in self._order:
            lane.paused, lane.dirty, lane.room = False, True, piece_of_each(len(lanes))
        self._moving, self._todo = False, None
        self._entitled = True
        self._settled_down.set()
        self._commit_soon.set()
        fields = {"partitions": len(lanes), "topics": len({tp[0] for tp in lanes})}
        telemetry.log(logging.INFO, "partitions_assigned", self._fields() | fields)

    async def revoked(self) -> None:
        """All partitions may go to others: let what runs come to its end, and commit."""
        self._epoch += 1
        self._moving, self._todo = True, None
        self._told.clear()
        await self._stand_still(self._adapter.options.drain)
        # From here on a commit would queue behind the request to join, be judged by the generation after it, and make
        # the group move again. And what others said of these partitions meanwhile must not be written over.
        self._entitled = False

    async def _stand_still(self, drain: float) -> None:
        """Give out no more, let the worker drop what it has not started, wait for what runs, commit.

        Whether the partitions come back to us is seen when they are assigned again. Until then they are kept, and
        what is said of them counts.
        """
        self._moving = True
        self._settled_down.clear()
        async with self._leaving:
            self._call_back()
            loop = asyncio.get_running_loop()
            until = loop.time() + drain
            while any(lane.held for lane in self.lanes.values()) and loop.time() < until and not self._closed:
                self._settled.clear()
                await _wait(self._settled, until - loop.time())
            if not self._entitled:
                return
            try:
                async with self._committing:
                    await self._commit(list(self.lanes.values()), held=False, ahead=False)
            except BrokerError as error:
                telemetry.log(logging.WARNING, "commit_failed", self._fields() | {"error": str(error)})

    def _call_back(self) -> None:
        """What the worker has not started goes back to its lane."""
        held = [delivery for lane in self.lanes.values() for delivery in lane.held.values()]
        unstarted: dict[Lane, list[Record]] = {}
        for delivery in self.lost(held) if held else ():
            lane, record = receipt_of(delivery)
            del lane.held[record.offset]
            unstarted.setdefault(lane, []).append(record)
        for lane, some in unstarted.items():
            lane.put_back(some)

    def _fence(self, lanes: Iterable[Lane]) -> None:
        """These are another's now: what is said of them is lost."""
        gone = list(lanes)
        for lane in gone:
            lane.fenced = True
        held = [delivery for lane in gone for delivery in lane.held.values()]
        if held:
            self.lost(held)
        self._settled.set()

    # --- give out --------------------------------------------------------------------------------------------

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """What the partitions have, each in turn. Raises as long as something keeps us from getting more.

        A partition that cannot be read raises only if meanwhile nothing came of the others: they shall not wait for it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            if self._bug is not None:
                raise self._bug
            self._arrived.clear()
            gone = self._failure if isinstance(self._failure, BrokerUnavailable) else self._uncommitted
            if gone is not None:
                # What is here could be handled. But whether it was cannot be said, and others may have it by now.
                raise gone.with_traceback(None)
            found = await self._take(min(limit, AT_ONCE))
            if self._failure is not None and not found:
                raise self._failure.with_traceback(None)
            now = loop.time()
            if self._unreadable is not None and not found and now >= until:
                raise self._unreadable.with_traceback(None)
            if found or self._woken or self._closed or now >= until:
                self._woken = False
                return found
            await _wait(self._arrived, min(until - now, self._next_due()))

    async def _take(self, limit: int) -> list[Delivery]:
        if self._moving or self._closed:
            return []
        found: list[Delivery] = []
        self._unreadable = None
        lanes = self._order
        share = max(FEW, limit // len(lanes)) if lanes else 0
        for most in (share, limit):
            for lane in lanes:
                if len(found) < limit and lane.in_hand:
                    room = min(most, limit - len(found))
                    try:
                        taken = lane.take(self._due(lane, room) if lane.tier else room)
                    except BrokerError as error:  # what was taken of the others must not be lost on the way
                        self._unreadable = error
                        continue
                    found += [self._deliver(lane, record) for record in taken]
                    if lane.wanting:
                        self._commit_soon.set()
                    if lane.full_since and lane.roomy:
                        self._make_room(lane)
        if lanes:
            self._order = [*lanes[1:], lanes[0]]
        return found

    def _make_room(self, lane: Lane) -> None:
        lane.full_since = 0.0
        if lane.paused and self._member is not None:
            lane.paused = False
            self._member.resume(lane.tp)
        self._roomy.set()

    def _due(self, lane: Lane, most: int) -> int:
        """How many records at the head of a lane may be given out now."""
        number, now = 0, time.time()
        for record in lane.peek(most):
            if number >= most or self._available(record, lane.tier or 0) > now:
                break
            number += 1
        return number

    def _next_due(self) -> float:
        """Seconds until time alone makes something available."""
        now = time.time()
        times = [self._available(lane.buffer[0], lane.tier) - now for lane in self._order if lane.tier and lane.buffer]
        return min((wait for wait in times if wait > 0), default=3600.0)

    def _available(self, record: Record, tier: int) -> float:
        """When a retry has been on its road for long enough: then it is due, or nearly, and the worker waits."""
        return records.written_at(record) + tier / 1000

    @abstractmethod
    def _deliver(self, lane: Lane, record: Record) -> Delivery:
        """The delivery of a record, held from now on."""

    def _mine(self, delivery: Delivery) -> bool:
        lane, record = receipt_of(delivery)
        return not lane.fenced and lane.held.get(record.offset) is delivery

    def _finish(self, delivery: Delivery) -> None:
        lane, record = receipt_of(delivery)
        lane.finish(record.offset)

    # --- commit ----------------------------------------------------------------------------------------------

    async def _commit_regularly(self) -> None:
        interval, failures = self._adapter.options.commit_interval, 0
        while True:
            await _wait(self._commit_soon, interval)
            self._commit_soon.clear()
            if self._moving:
                continue
            lanes = [lane for lane in self.lanes.values() if lane.dirty or lane.wanting]
            if not lanes:
                continue
            epoch = self._epoch
            try:
                async with self._committing:
                    await self._commit(lanes)
                failures, self._uncommitted = 0, None
            except Fenced as error:
                if epoch != self._epoch:
                    continue  # it was the last word of a membership that is over; another has begun since
                telemetry.log(logging.WARNING, "partitions_lost", self._fields() | {"error": str(error)})
                self._moving, self._entitled = True, False
                self._call_back()
            except BrokerError as error:
                telemetry.log(logging.WARNING, "commit_failed", self._fields() | {"error": str(error)})
                if isinstance(error, BrokerUnavailable) and not self._moving:
                    self._uncommitted = error
                    self._arrived.set()
                await asyncio.sleep(max(interval, BACKOFF[min(failures, 3)]))
                failures += 1

    async def _commit(self, lanes: Sequence[Lane], *, held: bool = True, ahead: bool = True) -> None:
        member = self._member
        lanes = [lane for lane in lanes if not lane.fenced]
        if not lanes:
            return
        if member is None or not self._entitled:
            raise BrokerUnavailable(f"{self._group} is rebalancing")
        loop = asyncio.get_running_loop()
        marks: dict[Lane, int] = {}
        words = [lane.words for lane in lanes]
        offsets: dict[TP, tuple[int, str]] = {}
        for lane in lanes:
            lane.dirty = False
            at, metadata, marks[lane] = lane.commit(self._owner, loop.time(), held=held, ahead=ahead)
            offsets[lane.tp] = at, metadata
        failpoint("kafka.commit.before")
        try:
            gone = await member.commit(offsets)
        except BrokerError:
            for lane in lanes:
                lane.dirty = True
            raise
        failpoint("kafka.commit.after")
        for lane, word in zip(lanes, words, strict=True):
            if lane.tp in gone:  # it is taken away from us as soon as the group knows
                lane.dirty = True
            else:
                lane.committed(marks[lane], loop.time())
                lane.said = word
        self._arrived.set()

    async def note(self, delivery: Delivery, delta: HeaderDelta) -> bool:
        """Written into the metadata of the partition's commit, which stands before this returns.

        So does what became of messages that had notes before: this one may kill the process, and is to blame alone.
        """
        lane, record = receipt_of(delivery)
        if not self._mine(delivery):
            return False
        try:
            lane.note(record.offset, delta)
            words = lane.words
            await self._adapter.say_all(self)
            await self.say()
            if lane.said < words and not lane.fenced:
                raise BrokerUnavailable(f"{lane.tp[0]}/{lane.tp[1]} is gone; nothing can be noted there")
        except Fenced as error:
            raise BrokerUnavailable(str(error)) from error  # it is seen later whether the message is still ours
        except NoRoom as error:
            raise BrokerError(str(error)) from error
        return self._mine(delivery)

    async def say(self) -> None:
        """Commit what was noted, and what took notes back, as far as it does not stand yet."""
        if any(lane.said < lane.words for lane in self.lanes.values()):
            async with self._committing:  # who comes while another commits goes with the next commit, with all others
                await self._commit([lane for lane in self.lanes.values() if lane.said < lane.words])

    def _fields(self) -> dict[str, object]:
        return {"service": self._subscription.service, "queue": self.queue, "group": self._group}


async def _wait(event: asyncio.Event, timeout: float) -> None:
    """Until it is set, or the time is over. Not by `wait_for`: in Python 3.11 it loses cancellations."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
