"""The seam: what a broker must do to carry the bus. Implement Adapter, Consumer and Parking; nothing else.

An adapter knows its broker and nothing of policy: which messages are retried, when and why is decided in the
core, and reaches the adapter as a finished Settlement with a finished header delta. Everything is batch-first.

Three promises an adapter makes:

1. `publish` returns `stored` for an event only once the broker has it durably.
2. `settle` stores the copy (retry, dead letter) durably before it removes the original. A crash in between
   may double a message, never lose it.
3. What is received and not settled, because the process died or lost its lease, is delivered again, to one
   consumer of the service, marked `suspect`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, TypeAlias

from eventbus.errors import BrokerError
from eventbus.event import Event
from eventbus.facets import Facet
from eventbus.settlement import Delivery, HeaderDelta, Settlement
from eventbus.shaping import Fairness
from eventbus.store import Store

if TYPE_CHECKING:
    from eventbus.forward.endpoint import EndpointState

PARKING_MARGIN: Final = 64 * 1024
"""Room that `publish` keeps under the broker's size limit, so that every event can be parked with its story."""
_UNREAD: Final = datetime.fromtimestamp(0, timezone.utc)
_NO_STORY: Final[Mapping[str, object]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What differs between brokers; the table in the docs is made from it."""

    durable: bool
    """Survives a restart of every process."""
    multi_process: bool
    """Several processes share one bus."""
    delay_precision: str
    """How exact a delay is, in words."""
    exact_depth: bool
    """Whether Stats are exact or estimates."""
    fair_receive: bool = False
    """Fairness reaches all that waits; where it does not, the events a worker has fetched."""
    key_order: bool = False
    """Whether `ordering = "key"` can be kept; where it cannot, it is an error at start."""
    max_event_bytes: int = 16 * 1024 * 1024
    """The largest message the broker takes, headers included."""


@dataclass(frozen=True, slots=True)
class BodyMapping:
    """Where to find attributes in the body of a message that has no CloudEvents attributes."""

    id: str = ""
    type: str = ""
    key: str = ""
    tenant: str = ""
    default_type: str = "message"


@dataclass(frozen=True, slots=True)
class Subscription:
    """All an adapter needs to know of one service."""

    service: str
    prefix: str
    patterns: tuple[str, ...] = ("#",)
    delays: tuple[float, ...] = ()
    """The retry delays its policies can ask for, in seconds: brokers with tiers make roads for them."""
    prefetch: int = 256
    dead_letters: bool = False
    """Consume the service's dead-letter queue instead of its work queue."""
    mapping: BodyMapping = field(default_factory=BodyMapping)
    fairness: Fairness | None = None
    """Turns by tenant; an adapter with `fair_receive` applies them to all that waits."""
    ordered: bool = False
    """Events of one key go to one consumer at a time, in order; a released or lost one comes again in its place."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One thing on the broker: a queue, an exchange, a topic, a key, a row."""

    kind: str
    name: str
    arguments: Mapping[str, str | int | bool | None] = field(default_factory=dict)
    feeds: tuple[str, ...] = ()
    """Names of the resources that messages go to from here."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything a configuration needs on the broker, as data: shown, compared, exported, made."""

    resources: tuple[Resource, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """A difference between what is wanted and what is there."""

    resource: str
    argument: str
    found: str
    wanted: str


ProvisionMode: TypeAlias = Literal["create", "verify", "off"]


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What became of one event: stored, refused (will never be taken), or unknown (may or may not be there)."""

    status: Literal["stored", "refused", "unknown"]
    error: str = ""
    subscribed: bool | None = None
    """Whether any service was there to get it; None where the broker does not say."""
    later: bool = False
    """Refused for now, by a broker that is full or not well: the same event may be taken later."""


STORED: Final = PublishResult("stored")

Settled: TypeAlias = Literal["done", "lost", "failed"]
"""done; lost: somebody else owns the message now; failed: nothing happened, try again."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Depths of one service's queues, and the age of its oldest dead letter in seconds."""

    ready: int
    inflight: int
    delayed: int
    parked: int
    oldest_parked: float | None = None
    exact: bool = True
    endpoints: tuple[EndpointState, ...] = ()
    """The breakers of its HTTP endpoints; filled in by a bus that runs the service, not by adapters."""


class Parked(NamedTuple):
    """One message in a dead-letter queue, as it stands there."""

    address: str
    """Where it stands: what redrive and purge take."""
    event: Event
    headers: Mapping[str, object]
    """The reserved headers of spec 5: the story of how it came here."""


def standing(address: str, event_id: str, redriven: int) -> Parked:
    """A letter of which no more is known than moving it takes: where, whose, and how often it was put back."""
    event = Event.from_wire(event_id, "", "", _UNREAD, b"")
    return Parked(address, event, {"x-redriven-count": redriven} if redriven else _NO_STORY)


@dataclass(frozen=True, slots=True)
class Page:
    """A piece of a dead-letter queue; `next` is the cursor of the following piece, None at the end."""

    letters: Sequence[Parked]
    next: str | None = None


class Redrive(NamedTuple):
    """Put the letter at `address` back to its service with these header changes (and another body, if given)."""

    address: str
    headers: HeaderDelta
    body: bytes | None = None
    delay: float = 0.0
    """Wait this long on the retry road first."""


Moved: TypeAlias = Literal["done", "gone", "failed"]
"""done; gone: it no longer stands there (another operator was faster); failed: it still stands there."""


class Parking(ABC):
    """One service's dead-letter queue. Looking consumes nothing."""

    @abstractmethod
    async def browse(self, cursor: str | None, limit: int) -> Page:
        """The letters after `cursor`, oldest first."""

    async def skim(self, cursor: str | None, limit: int) -> Page:
        """As browse, for who moves letters unread: `standing(...)` ones will do, without body and story."""
        return await self.browse(cursor, limit)

    @property
    def looks_ahead(self) -> bool:
        """Whether the next page may be skimmed, and then moved, while letters of this one are being moved."""
        return False

    @abstractmethod
    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        """Publish each to the service's own queue, wait for the confirm, then remove it here."""

    @abstractmethod
    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        """Remove them for good."""

    @property
    def erases(self) -> bool:
        """Whether the broker's log has what was purged until `erase`; where it has not, a purge is for good."""
        return False

    async def erase(self) -> int:
        """Take what was purged or re-driven out of the broker's log too; how many letters that were."""
        raise BrokerError("a purge is for good here: there is nothing to erase")

    @abstractmethod
    async def depth(self) -> int:
        """How many stand here."""

    async def count(self) -> tuple[int, bool]:
        """How many stand here, as well as that can be told at little cost, and whether it is exact."""
        return await self.depth(), True

    async def find(self, event_id: str) -> list[Parked]:
        """Letters of one event id. Adapters with an index do better than this scan."""
        return await self.find_all([event_id])

    async def find_all(self, event_ids: Collection[str]) -> list[Parked]:
        """Letters of several event ids, in one look. Adapters with an index do better than this scan."""
        found, cursor, wanted = [], None, set(event_ids)
        async with self.looking():
            while True:
                page = await self.browse(cursor, 500)
                found += [letter for letter in page.letters if letter.event.id in wanted]
                cursor = page.next
                if cursor is None:
                    return found

    def looking(self) -> AbstractAsyncContextManager[None]:
        """Around an operation of many pages and moves, one after the other: an adapter may keep its place meanwhile."""
        return nullcontext()

    async def restore(self, letters: Sequence[Parked]) -> list[Moved]:
        """Park letters that stand in a file, each with its story as it is; returns once they are durable."""
        raise BrokerError("this broker's adapter cannot import dead letters")

    async def tally(self, by: Facet) -> Mapping[str, int] | None:
        """How many letters have each value of a facet (`facets(event, headers)` says a letter's), from an index.

        None where the broker keeps no index: the core counts by browsing.
        """
        return None


class Consumer(ABC):
    """One consumer of one service's queue: an async context manager. One coroutine calls receive."""

    queue: str
    """The name of what it consumes, for humans and for `x-original-queue`."""

    lost: Callable[[Sequence[Delivery]], Sequence[Delivery]] = staticmethod(lambda deliveries: ())
    """Set by the worker; the adapter calls it when deliveries are taken away (lease gone, rebalance ...).

    It returns those that were not started and never will be: nobody settles them any more.
    """

    async def __aenter__(self) -> Consumer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @abstractmethod
    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """Up to `limit` deliveries, as soon as there is one; an empty list after `timeout` seconds.

        Never cancelled by the worker: it returns within its timeout, or when `wake` is called.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a waiting `receive` return now: the worker is shutting down."""

    @abstractmethod
    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        """Carry out the settlements, copies first. One answer per item."""

    @abstractmethod
    async def note(self, delivery: Delivery, headers: HeaderDelta) -> bool:
        """Write headers durably beside a message that is being held: crash notes, attempts of in-place retry.

        True: written, the delivery is still ours. False: it was sent again instead and will be received anew
        (with `noted` set), or is lost; the worker forgets this one.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Stop receiving and let go of what is unsettled; it will be delivered again."""


class Adapter(ABC):
    """One broker behind the common interface; chosen by the URL's scheme."""

    name: ClassVar[str]
    """The broker's name in log codes and tables: "rabbitmq", "kafka", "redis", "sqlite", "memory"."""
    capabilities: Capabilities
    """The same for all instances, but for what is a setting (such as the largest message)."""

    @classmethod
    @abstractmethod
    def from_url(cls, url: str, settings: Mapping[str, object]) -> Adapter:
        """Make one from a URL and the settings of its own table in bus.toml. No I/O here.

        An unknown or impossible setting is a ConfigError.
        """

    @abstractmethod
    async def open(self) -> None:
        """Connect. Raises BrokerUnavailable, with what to do, when nobody answers."""

    @abstractmethod
    async def aclose(self) -> None:
        """Disconnect; never raises for a broker that is gone."""

    @abstractmethod
    def topology(self, subscriptions: Sequence[Subscription]) -> Topology:
        """Everything these subscriptions need on the broker. Pure."""

    def definitions(self, topology: Topology) -> object | None:
        """The topology as the broker's own tools import it, ready for JSON; None where there is no such thing."""
        return None

    @abstractmethod
    async def provision(self, subscriptions: Sequence[Subscription], mode: ProvisionMode) -> list[Drift]:
        """Make it (`create`), or only compare (`verify`). Never deletes or changes what is there.

        From here on each of these services gets every event that is accepted, and none from before.
        """

    @abstractmethod
    async def publish(self, prefix: str, events: Sequence[Event]) -> list[PublishResult]:
        """Store events for every service subscribed under the prefix; returns once they are durable."""

    @abstractmethod
    def consume(self, subscription: Subscription) -> Consumer:
        """A consumer of the service's queue (or, by the subscription, of its dead letters)."""

    @abstractmethod
    def parking(self, service: str, prefix: str) -> Parking:
        """The service's dead-letter queue."""

    @abstractmethod
    async def stats(self, service: str, prefix: str) -> Stats:
        """How many are ready, in flight, delayed, parked."""

    @abstractmethod
    async def unsubscribe(self, service: str, prefix: str) -> None:
        """Undo provision for one service. Refuses while the service still has messages, so nothing is lost."""

    def store(self) -> Store | None:
        """Where completed events and shared rates can be kept beside the messages; None if not here."""
        return None
