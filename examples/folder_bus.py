"""A third-party adapter in one file: `folder:///some/path`, one file per message. It passes the contract suite.

Renaming a file is atomic, so a rename is a claim. A message's due time is the beginning of its file name.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from eventbus import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    Delivery,
    Event,
    Stats,
    UnknownService,
    wire,
)
from eventbus import headers as reserved
from eventbus.adapter import (
    STORED,
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
    Subscription,
    Topology,
)  # fmt: skip
from eventbus.settlement import Ack, HeaderDelta, Park, Release, Settlement

LEASE = 2.0
_order = itertools.count(time.time_ns())


def put(folder: Path, event: Event, story: Mapping[str, object], due: float = 0.0, *, suspect: bool = False) -> Path:
    """Write a message so that it appears whole or not at all."""
    path = folder / f"{round(due * 1000):015d}-{next(_order):020d}-{uuid.uuid4().hex}{'.suspect' if suspect else ''}"
    draft = folder.parent / "drafts" / path.name
    with draft.open("wb") as file:
        file.write(pickle.dumps((event, dict(story))))
        os.fsync(file.fileno())
    draft.rename(path)
    return path


def due_of(path: Path) -> float:
    """When a message is due: the beginning of its name."""
    return int(path.name[:15]) / 1000


class FolderConsumer(Consumer):
    """Claims by renaming into `held`; what is held longer than a lease without a sign of life comes back."""

    def __init__(self, home: Path, subscription: Subscription) -> None:
        self._source = home / ("dead" if subscription.dead_letters else "ready")
        self._held = home / "held"
        self._mine: set[Path] = set()
        self._subscription = subscription
        self._woken = asyncio.Event()
        self.queue = f"{subscription.prefix}.{self._source.name}.{subscription.service}"

    async def receive(self, limit: int, timeout: float) -> list[Delivery]:
        deadline = time.monotonic() + timeout
        while True:
            found = self._claim(limit)
            if found or time.monotonic() > deadline or self._woken.is_set():
                self._woken.clear()
                return found
            await asyncio.sleep(0.01)

    def _claim(self, limit: int) -> list[Delivery]:
        now, found = time.time(), list[Delivery]()
        for path in self._mine:
            os.utime(path)  # the lease of what we hold
        for path in self._held.iterdir():
            if path not in self._mine and now - path.stat().st_mtime > LEASE:
                path.rename(self._source / f"{path.name.removesuffix('.suspect')}.suspect")
        for path in sorted(self._source.iterdir())[:limit]:
            if due_of(path) > now:
                break
            os.utime(path)
            held = path.rename(self._held / path.name)
            self._mine.add(held)
            found.append(self._delivery(held))
        return found

    def _delivery(self, path: Path) -> Delivery:
        event, story = pickle.loads(path.read_bytes())
        history, problem = reserved.read_history(story), ""
        if self._subscription.dead_letters:
            event = event.rewritten(headers={**event.headers, **story})
        else:
            event, problem = wire.unwrap(event, self._subscription.mapping)
        suspect = path.name.endswith(".suspect")
        return Delivery(event, self._subscription.service, self.queue, path, history, suspect, problem=problem)

    async def settle(self, items: Sequence[tuple[Delivery, Settlement]]) -> list[Settled]:
        return [self._settle(delivery.receipt, settlement) for delivery, settlement in items]

    def _settle(self, path: object, settlement: Settlement) -> Settled:
        if not isinstance(path, Path) or path not in self._mine or not path.exists():
            return "lost"
        if not isinstance(settlement, Ack):  # the copy first, then the original
            event, story = pickle.loads(path.read_bytes())
            parks = isinstance(settlement, Park) and self._source.name != "dead"
            due = 0.0 if isinstance(settlement, (Park, Release)) else settlement.due_at
            target = path.parents[1] / "dead" if parks else self._source
            put(target, event, reserved.merge(story, settlement.headers), due)
        path.unlink()
        self._mine.discard(path)
        return "done"

    async def note(self, delivery: Delivery, headers: HeaderDelta) -> bool:
        path = delivery.receipt
        if not isinstance(path, Path) or path not in self._mine or not path.exists():
            return False
        event, story = pickle.loads(path.read_bytes())
        noted = put(path.parent, event, reserved.merge(story, headers), suspect=True)
        noted.rename(path)
        return True

    def wake(self) -> None:
        self._woken.set()

    async def aclose(self) -> None:
        for path in self._mine:
            if path.exists():
                path.rename(self._source / f"{path.name.removesuffix('.suspect')}.suspect")
        self._mine.clear()


class FolderParking(Parking):
    """The files in `dead`; an address is a file's name."""

    def __init__(self, home: Path) -> None:
        self._home = home

    async def browse(self, cursor: str | None, limit: int) -> Page:
        names = [path for path in sorted((self._home / "dead").iterdir()) if path.name > (cursor or "")]
        letters = [Parked(path.name, *pickle.loads(path.read_bytes())) for path in names[:limit]]
        return Page(letters, letters[-1].address if len(names) > limit else None)

    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        return [self._redrive(letter) for letter in letters]

    def _redrive(self, letter: Redrive) -> Moved:
        path = self._home / "dead" / letter.address
        if not path.exists():
            return "gone"
        event, story = pickle.loads(path.read_bytes())
        event = event if letter.body is None else event.rewritten(body=letter.body)
        put(self._home / "ready", event, reserved.merge(story, letter.headers), time.time() + letter.delay)
        path.unlink()
        return "done"

    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        answers = list[Moved]()
        for path in (self._home / "dead" / address for address in addresses):
            answers.append("done" if path.exists() else "gone")
            path.unlink(missing_ok=True)
        return answers

    async def depth(self) -> int:
        return len(list((self._home / "dead").iterdir()))


class FolderAdapter(Adapter):
    """One folder per service: ready, held, dead."""

    name = "folder"
    capabilities = Capabilities(
        durable=True, multi_process=True, delay_precision="10 ms", exact_depth=True, max_event_bytes=4 * 1024 * 1024
    )

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def from_url(cls, url: str, settings: Mapping[str, object]) -> FolderAdapter:
        if settings:
            raise ConfigError(f"folder: unknown setting {next(iter(settings))!r}; there are none")
        return cls(Path(url.removeprefix("folder://")))

    async def open(self) -> None:
        if not self._root.is_dir():
            raise BrokerUnavailable(f"{self._root} is not a folder; make it first")

    async def aclose(self) -> None:
        return

    def topology(self, subscriptions: Sequence[Subscription]) -> Topology:
        return Topology(tuple(Resource("folder", f"{sub.prefix}/{sub.service}") for sub in subscriptions))

    async def provision(self, subscriptions: Sequence[Subscription], mode: ProvisionMode) -> list[Drift]:
        drifts = []
        for sub in subscriptions:
            home = self._root / sub.prefix / sub.service
            if mode == "verify" and not home.exists():
                drifts.append(Drift(str(home), "folder", "missing", "present"))
            elif mode == "create":
                for name in ("drafts", "held", "dead", "ready"):
                    (home / name).mkdir(parents=True, exist_ok=True)
        return drifts

    async def publish(self, prefix: str, events: Sequence[Event]) -> list[PublishResult]:
        homes = list((self._root / prefix).glob("*/ready"))
        for event in events:
            for folder in homes:
                put(folder, event, {})
        return [STORED if homes else PublishResult("stored", subscribed=False)] * len(events)

    def consume(self, subscription: Subscription) -> Consumer:
        return FolderConsumer(self._home(subscription.service, subscription.prefix), subscription)

    def parking(self, service: str, prefix: str) -> Parking:
        return FolderParking(self._home(service, prefix))

    async def stats(self, service: str, prefix: str) -> Stats:
        home, now = self._home(service, prefix), time.time()
        ready = [due_of(path) <= now for path in (home / "ready").iterdir()]
        held, dead = len(list((home / "held").iterdir())), len(list((home / "dead").iterdir()))
        return Stats(ready=sum(ready), inflight=held, delayed=len(ready) - sum(ready), parked=dead)

    async def unsubscribe(self, service: str, prefix: str) -> None:
        home = self._home(service, prefix)
        left = sum(len(list((home / name).iterdir())) for name in ("ready", "held", "dead"))
        if left:
            raise BrokerError(f"{service} still has {left} messages")
        for name in ("ready", "held", "dead", "drafts"):
            (home / name).rmdir()
        home.rmdir()

    def _home(self, service: str, prefix: str) -> Path:
        home = self._root / prefix / service
        if not home.is_dir():
            raise UnknownService(f"{service} is not subscribed here; provision it first")
        return home
