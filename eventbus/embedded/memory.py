"""memory://: the whole contract inside one process. For tests, for the price of the core, for small things.

`memory://` is a bus of its own; `memory://name` is shared by everybody in the process who says that name.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from urllib.parse import urlsplit

from eventbus import headers, wire
from eventbus.adapter import (
    Adapter,
    Capabilities,
    Consumer,
    Drift,
    Moved,
    Page,
    Parked,
    Parking,
    ProvisionMode,
    PublishResult,
    Redrive,
    Resource,
    Settled,
    Stats,
    Subscription,
    Topology,
)
from eventbus.clock import Clock, SystemClock
from eventbus.embedded.memory_store import MemoryStore
from eventbus.errors import BrokerError, ConfigError, UnknownService
from eventbus.event import Event
from eventbus.settlement import FRESH, Ack, Delivery, HeaderDelta, Park, Release, Requeue, Retry, Settlement

_STORED_FOR_SOMEBODY = PublishResult("stored", subscribed=True)
_STORED_FOR_NOBODY = PublishResult("stored", subscribed=False)


class Message:
    """One service's copy of an event. `owner` is the consumer that holds it."""

    __slots__ = ("enqueued_at", "event", "number", "owner", "story", "suspect")

    def __init__(self, event: Event, story: Mapping[str, object], enqueued_at: float) -> None:
        self.event = event
        self.story = story
        self.enqueued_at = enqueued_at
        self.owner: object = None
        self.suspect = False
        self.number = 0
        """Its place in the order of a service that keeps it; given when it is first taken."""


@dataclass(frozen=True, slots=True)
class Letter:
    """The receipt of a dead letter that is being read."""

    number: int
    message: Message


@dataclass(slots=True)
class Queue:
    """The queues of one service: ready, delayed, in flight, parked."""

    ready: deque[Message] = field(default_factory=deque)
    delayed: list[tuple[float, int, Message]] = field(default_factory=list)
    inflight: dict[Message, None] = field(default_factory=dict)
    parked: dict[int, Message] = field(default_factory=dict)
    parked_waiting: dict[int, float] = field(default_factory=dict)
    listeners: set[asyncio.Event] = field(default_factory=set)
    readers: list[object] = field(default_factory=list)
    """Consumers of a service that keeps the order of keys: only the first of them receives."""

    def readable(self, now: float) -> list[int]:
        """Numbers of the dead letters that nobody reads and that do not wait for another try."""
        return [
            number
            for number, message in self.parked.items()
            if message.owner is None and self.parked_waiting.get(number, 0.0) <= now
        ]

    def put_back(self, message: Message) -> None:
        """To the front; what is numbered to its own place there, before all that was never taken."""
        position = 0
        if message.number:
            for other in self.ready:
                if not other.number or other.number > message.number:
                    break
                position += 1
        self.ready.insert(position, message)

    def wake(self) -> None:
        """Somebody may find something to do."""
        for listener in self.listeners:
            listener.set()


class Store:
    """What a named memory bus holds: queues by prefix and service."""

    named: ClassVar[dict[str, Store]] = {}

    def __init__(self) -> None:
        self.queues: dict[tuple[str, str], Queue] = {}
        self.by_prefix: dict[str, list[Queue]] = {}
        self.order = itertools.count(1)
        self.beside: MemoryStore | None = None

    def queue(self, service: str, prefix: str) -> Queue:
        """A service's queues, if it is subscribed."""
        try:
            return self.queues[prefix, service]
        except KeyError:
            raise UnknownService(f"{service} is not subscribed on this bus; provision it first") from None


class MemoryAdapter(Adapter):
    """The bus of one process. Nothing survives the process; everything else holds."""

    name = "memory"
    capabilities = Capabilities(
        durable=False,
        multi_process=False,
        delay_precision="exact",
        exact_depth=True,
        key_order=True,
        max_event_bytes=16 * 1024 * 1024,
    )

    def __init__(self, store: Store | None = None, clock: Clock | None = None) -> None:
        self._store = store or Store()
        self._clock = clock or SystemClock()

    @classmethod
    def from_url(cls, url: str, settings: Mapping[str, object]) -> MemoryAdapter:
        """`memory://` or `memory://name`; it has no settings."""
        if settings:
            raise ConfigError(f"memory: unknown setting {next(iter(settings))!r}; the memory bus has none")
        parts = urlsplit(url)
        if parts.query or parts.path.strip("/"):
            raise ConfigError(f"{url}: write memory:// or memory://name")
        name = parts.netloc
        return cls(Store.named.setdefault(name, Store()) if name else None)

    async def open(self) -> None:
        """Nothing to connect to."""

    async def aclose(self) -> None:
        """Nothing to disconnect from."""

    def topology(self, subscriptions: Sequence[Subscription]) -> Topology:
        """One queue and one dead-letter queue per service."""
        resources = []
        for sub in subscriptions:
            queue, dlq = _queue_name(sub), _dlq_name(sub)
            resources += [Resource("queue", queue, feeds=(dlq,)), Resource("dead-letter queue", dlq)]
        mains: dict[str, list[str]] = {}
        for sub in subscriptions:
            mains.setdefault(f"{sub.prefix}.main", []).append(_queue_name(sub))
        resources = [Resource("fan-out", name, feeds=tuple(queues)) for name, queues in mains.items()] + resources
        return Topology(tuple(resources))

    async def provision(self, subscriptions: Sequence[Subscription], mode: ProvisionMode) -> list[Drift]:
        """Subscribe the services."""
        drifts = []
        for sub in subscriptions:
            if (sub.prefix, sub.service) in self._store.queues or mode == "off":
                continue
            if mode == "verify":
                drifts.append(Drift(_queue_name(sub), "subscription", "missing", "present"))
                continue
            queue = Queue()
            self._store.queues[sub.prefix, sub.service] = queue
            self._store.by_prefix.setdefault(sub.prefix, []).append(queue)
        return drifts

    async def publish(self, prefix: str, events: Sequence[Event]) -> list[PublishResult]:
        """A copy for every subscribed service."""
        queues = self._store.by_prefix.get(prefix)
        if not queues:
            return [_STORED_FOR_NOBODY] * len(events)
        now = self._clock.now()
        for queue in queues:
            queue.ready.extend([Message(event, {}, now) for event in events])
            queue.wake()
        return [_STORED_FOR_SOMEBODY] * len(events)

    def consume(self, subscription: Subscription) -> Consumer:
        """A consumer of the service's queue or dead letters."""
        if subscription.dead_letters:
            return MemoryDeadLetterConsumer(self._store, self._clock, subscription)
        return MemoryConsumer(self._store, self._clock, subscription)

    def parking(self, service: str, prefix: str) -> MemoryParking:
        """The service's dead letters."""
        return MemoryParking(self._store, self._clock, service, prefix)

    async def stats(self, service: str, prefix: str) -> Stats:
        """Exact depths."""
        queue, now = self._store.queue(service, prefix), self._clock.now()
        due = sum(entry[0] <= now for entry in queue.delayed)
        oldest = next(iter(queue.parked.values()), None)
        return Stats(
            ready=len(queue.ready) + due,
            inflight=len(queue.inflight),
            delayed=len(queue.delayed) - due,
            parked=len(queue.parked),
            oldest_parked=None if oldest is None else max(0.0, now - oldest.enqueued_at),
        )

    def store(self) -> MemoryStore:
        """Beside the queues; shared by everybody on this bus."""
        if self._store.beside is None:
            self._store.beside = MemoryStore(self._clock.now)
        return self._store.beside

    async def unsubscribe(self, service: str, prefix: str) -> None:
        """Undo provision; refuses while messages are left."""
        queue = self._store.queue(service, prefix)
        left = len(queue.ready) + len(queue.delayed) + len(queue.inflight) + len(queue.parked)
        if left:
            raise BrokerError(f"{service} still has {left} messages; consume, re-drive or purge them first")
        del self._store.queues[prefix, service]
        self._store.by_prefix[prefix].remove(queue)


class MemoryConsumer(Consumer):
    """Takes from the ready queue and the delayed heap; what it holds when it closes goes back as suspect."""

    def __init__(self, store: Store, clock: Clock, subscription: Subscription) -> None:
        self.queue = _queue_name(subscription)
        self._store = store
        self._clock = clock
        self._subscription = subscription
        self._signal = asyncio.Event()
        self._woken = False

    async def __aenter__(self) -> MemoryConsumer:
        self._queue.listeners.add(self._signal)
        if self._subscription.ordered:
            self._queue.readers.append(self)
        return self

    @property
    def _queue(self) -> Queue:
        return self._store.queue(self._subscription.service, self._subscription.prefix)

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """What is due, as soon as there is something."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout, self._expire)
        try:
            while True:
                self._signal.clear()
                deliveries = self._take(limit)
                if deliveries or self._woken:
                    return deliveries
                await self._clock.wait(self._signal, self._next_due())
        finally:
            timer.cancel()
            self._woken = False

    def _next_due(self) -> float | None:
        delayed = self._queue.delayed
        return delayed[0][0] if delayed else None

    def _expire(self) -> None:
        self._woken = True
        self._signal.set()

    def wake(self) -> None:
        """Make a waiting receive return."""
        self._expire()

    def _take(self, limit: int) -> list[Delivery]:
        queue, now = self._queue, self._clock.now()
        messages: list[Message] = []
        if queue.readers and queue.readers[0] is not self:
            return []
        while queue.delayed and queue.delayed[0][0] <= now and len(messages) < limit:
            messages.append(heapq.heappop(queue.delayed)[2])
        ready = queue.ready
        while ready and len(messages) < limit:
            messages.append(ready.popleft())
        for message in messages:
            message.owner = self
        if self._subscription.ordered:
            for message in messages:
                message.number = message.number or next(self._store.order)
        queue.inflight.update(dict.fromkeys(messages))
        return [self._deliver(message) for message in messages]

    def _deliver(self, message: Message) -> Delivery:
        event, problem = wire.unwrap(message.event, self._subscription.mapping)
        history = headers.read_history(message.story) if message.story else FRESH
        service = self._subscription.service
        return Delivery(
            event, service, self.queue, message, history, message.suspect, False, problem, message.enqueued_at
        )

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """Everything happens at once; there is no in-between to crash in."""
        queue, answers = self._queue, list[Settled]()
        for delivery, settlement in items:
            message = delivery.receipt
            assert isinstance(message, Message)
            if message.owner is not self:
                answers.append("lost")
                continue
            del queue.inflight[message]
            message.owner = None
            message.suspect = False
            if not isinstance(settlement, Ack):
                self._put(queue, message, settlement)
            answers.append("done")
        return answers

    def _put(self, queue: Queue, message: Message, settlement: Retry | Requeue | Park | Release) -> None:
        message.story = headers.merge(message.story, settlement.headers)
        if isinstance(settlement, Release):
            queue.put_back(message)
        elif isinstance(settlement, Park):
            message.enqueued_at = self._clock.now()
            queue.parked[next(self._store.order)] = message
        else:
            heapq.heappush(queue.delayed, (settlement.due_at, next(self._store.order), message))
        queue.wake()

    async def note(self, delivery: Delivery, headers_: HeaderDelta) -> bool:
        """Written beside the message at once."""
        message = delivery.receipt
        assert isinstance(message, Message)
        if message.owner is not self:
            return False
        message.story = headers.merge(message.story, headers_)
        return True

    async def aclose(self) -> None:
        """What is unsettled goes back, as suspect: nobody knows what became of it."""
        queue = self._store.queues.get((self._subscription.prefix, self._subscription.service))
        if queue is None:
            return
        queue.listeners.discard(self._signal)
        for message in [message for message in queue.inflight if message.owner is self]:
            del queue.inflight[message]
            message.owner = None
            message.suspect = True
            queue.put_back(message)
        if self in queue.readers:
            queue.readers.remove(self)
        queue.wake()


class MemoryDeadLetterConsumer(MemoryConsumer):
    """Reads the dead letters in place; one stays parked until it is acknowledged."""

    def __init__(self, store: Store, clock: Clock, subscription: Subscription) -> None:
        super().__init__(store, clock, subscription)
        self.queue = _dlq_name(subscription)

    def _take(self, limit: int) -> list[Delivery]:
        queue, now = self._queue, self._clock.now()
        deliveries: list[Delivery] = []
        for number in queue.readable(now)[:limit]:
            message = queue.parked[number]
            message.owner = self
            event = message.event.rewritten(headers={**message.event.headers, **message.story})
            history = headers.read_history(message.story)
            service = self._subscription.service
            deliveries.append(Delivery(event, service, self.queue, Letter(number, message), history))
        return deliveries

    def _next_due(self) -> float | None:
        queue, now = self._queue, self._clock.now()
        later = [due for number, due in queue.parked_waiting.items() if due > now and number in queue.parked]
        return min(later, default=None)

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """Ack removes; anything else leaves the letter where it is, for later."""
        queue, answers = self._queue, list[Settled]()
        for delivery, settlement in items:
            assert isinstance(delivery.receipt, Letter)
            number, message = delivery.receipt.number, delivery.receipt.message
            if message.owner is not self or number not in queue.parked:
                answers.append("lost")
                continue
            message.owner = None
            if isinstance(settlement, Ack):
                del queue.parked[number]
                queue.parked_waiting.pop(number, None)
            else:
                due_at = settlement.due_at if isinstance(settlement, (Retry, Requeue)) else self._clock.now()
                queue.parked_waiting[number] = due_at
                queue.wake()
            answers.append("done")
        return answers

    async def note(self, delivery: Delivery, headers_: HeaderDelta) -> bool:
        """Written into the letter's story."""
        assert isinstance(delivery.receipt, Letter)
        message = delivery.receipt.message
        if message.owner is not self:
            return False
        message.story = headers.merge(message.story, headers_)
        return True

    async def aclose(self) -> None:
        """Letters being read can be read by others again."""
        queue = self._store.queues.get((self._subscription.prefix, self._subscription.service))
        if queue is None:
            return
        queue.listeners.discard(self._signal)
        for message in queue.parked.values():
            if message.owner is self:
                message.owner = None
        queue.wake()


class MemoryParking(Parking):
    """The dead letters of one service."""

    def __init__(self, store: Store, clock: Clock, service: str, prefix: str) -> None:
        self._store = store
        self._clock = clock
        self._name = (service, prefix)

    @property
    def _queue(self) -> Queue:
        return self._store.queue(*self._name)

    async def browse(self, cursor: str | None, limit: int) -> Page:
        """In the order of parking."""
        if cursor and not (cursor.isascii() and cursor.isdigit()):
            raise ConfigError(f"{cursor!r} is not a cursor of this queue; pass the `next` of the page before")
        after = int(cursor[:20]) if cursor else 0
        numbers = [number for number in self._queue.parked if number > after]
        parked = self._queue.parked
        letters = [Parked(str(n), parked[n].event, parked[n].story) for n in numbers[:limit]]
        return Page(letters, letters[-1].address if len(numbers) > limit else None)

    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        """Back to the service's own queue."""
        queue, answers = self._queue, list[Moved]()
        for letter in letters:
            message = queue.parked.pop(int(letter.address), None)
            if message is None:
                answers.append("gone")
                continue
            event = message.event
            if letter.body is not None:
                event = event.rewritten(body=wire.with_body(event.body, event.content_type, letter.body))
            now = self._clock.now()
            copy = Message(event, headers.merge(message.story, letter.headers), now)
            if letter.delay > 0:
                heapq.heappush(queue.delayed, (now + letter.delay, next(self._store.order), copy))
            else:
                queue.ready.append(copy)
            answers.append("done")
        queue.wake()
        return answers

    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        """Gone for good."""
        parked = self._queue.parked
        return ["gone" if parked.pop(int(address), None) is None else "done" for address in addresses]

    async def restore(self, letters: Sequence[Parked]) -> list[Moved]:
        """Parked now, with the story they have."""
        queue = self._queue
        for letter in letters:
            queue.parked[next(self._store.order)] = Message(letter.event, dict(letter.headers), self._clock.now())
        queue.wake()
        return ["done"] * len(letters)

    async def depth(self) -> int:
        """How many stand here."""
        return len(self._queue.parked)


def _queue_name(subscription: Subscription) -> str:
    return f"{subscription.prefix}.queue.{subscription.service}"


def _dlq_name(subscription: Subscription) -> str:
    return f"{subscription.prefix}.dlq.{subscription.service}"
