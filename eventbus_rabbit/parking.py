"""The dead letters of one service: browse, re-drive, purge. Published and confirmed before it is removed."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

from eventbus import headers as reserved
from eventbus.adapter import BodyMapping, Moved, Page, Parked, Parking, Redrive, standing
from eventbus.errors import BrokerError
from eventbus.failpoints import failpoint
from eventbus.wire import with_body
from eventbus_rabbit.messages import FOLDED, PARKED_ID, Message, copy, incoming, new_mark, outgoing, rejects
from eventbus_rabbit.names import Names
from eventbus_rabbit.publisher import Outgoing, Publisher
from eventbus_rabbit.roads import Roads
from eventbus_rabbit.scanning import Scanner, Walk
from eventbus_rabbit.values import decode

Held: TypeAlias = tuple[Message, Parked | None]
"""A letter in our hands, and what was read in it, if it was."""

_COUNTS: Final = (reserved.RETRIES, reserved.FINAL_RETRIES, reserved.REDRIVEN_COUNT)
AHEAD: Final = 5_000
PAGE: Final = 500
AHEAD_BYTES: Final = 16 * 1024 * 1024
FRESH: Final = 5.0
"""Letters read ahead of a page are shown for so long without looking again: a queue has no place to come back to, and
reading it from its beginning for each page would take the square of its length."""


class RabbitParking(Parking):
    """Looks through the queue and gives everything back; an address is the letter's own mark."""

    def __init__(
        self, scanner: Scanner, publisher: Publisher, names: Names, roads: Roads, mapping: BodyMapping, *, rotates: bool
    ) -> None:
        self._scanner = scanner
        self._publisher = publisher
        self._names = names
        self._roads = roads
        self._mapping = mapping
        # What is given back to a quorum queue stands behind what was given back before: its order is that of the last
        # looks, and the oldest letter is known only when all are.
        self._rotates = rotates
        self._ahead: list[Parked] = []
        self._ahead_until = 0.0
        self._ahead_more = False
        self._trail: list[str] = []
        self._walking = False
        self._behind = -1
        self._walk: Walk | None = None
        self._held: dict[str, Held] = {}
        self._before: dict[str, Held] = {}
        self._equals = Counter[str]()
        # What the walks of one operation have shown already, in this order.
        self._seen: dict[str, int] = {}

    @property
    def looks_ahead(self) -> bool:
        """Along a classic queue: gets and acks of one channel do not disturb each other there."""
        return self._walk is not None and not self._rotates

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Keep the place in the queue, and the letters, until the operation is over."""
        # A quorum queue has its own order: a few letters are sorted by age, many are taken as they come.
        self._walking = not self._rotates or await self.depth() > AHEAD
        try:
            yield
        finally:
            walk, self._walk, self._walking = self._walk, None, False
            self._held, self._before, self._equals = {}, {}, Counter()
            if walk is not None:
                await walk.aclose()

    async def depth(self) -> int:
        """How many stand here and are not being looked at."""
        return await self._scanner.depth()

    async def browse(self, cursor: str | None, limit: int) -> Page:
        """The letters after `cursor`, in the order of parking."""
        limit = max(1, limit)
        if self._walks_to(cursor):
            return await self._walk_on(cursor, limit, self._parked)
        if cursor is None:
            self._trail, self._ahead = [], []
        page = self._from_ahead(cursor, limit)
        if page is None:
            await self._read_ahead(cursor, limit)
            page = self._from_ahead(cursor, limit, just_read=True)
        assert page is not None
        self._trail += [letter.address for letter in page.letters]
        return page

    async def skim(self, cursor: str | None, limit: int) -> Page:
        """On a walk, with no more of each letter read than its copy takes."""
        if self._walks_to(cursor):
            return await self._walk_on(cursor, max(1, limit), self._glimpsed)
        return await self.browse(cursor, limit)

    def _walks_to(self, cursor: str | None) -> bool:
        return self._walking and (self._walk is not None or cursor is None or cursor in self._seen)

    async def _walk_on(self, cursor: str | None, limit: int, read: Callable[[str, Message], Parked]) -> Page:
        """The next letters of this walk, in the order of the queue. Their messages are kept for as long as a page."""
        if self._walk is None:
            self._walk = await self._scanner.walk()
            if cursor is None:
                self._seen.clear()
            self._behind = -1 if cursor is None else self._seen[cursor]
        found: list[Parked] = []
        held: dict[str, Held] = {}
        while len(found) < limit and (messages := await self._walk.next(limit - len(found))):
            for address, message in self._named(messages, self._equals):
                if self._seen.setdefault(address, len(self._seen)) > self._behind:
                    letter = read(address, message)
                    held[address] = message, letter
                    found.append(letter)
        self._before, self._held = self._held, held
        return Page(found, (found[-1].address if found else cursor) if self._walk.left else None)

    async def find_all(self, event_ids: Collection[str]) -> list[Parked]:
        """By a walk of its own, which disturbs no other."""
        wanted, found, equals = set(event_ids), list[Parked](), Counter[str]()
        walk = await self._scanner.walk()
        try:
            while messages := await walk.next(PAGE):
                letters = [self._parked(address, message) for address, message in self._named(messages, equals)]
                found += [letter for letter in letters if letter.event.id in wanted]
        finally:
            await walk.aclose()
        return found

    def _from_ahead(self, cursor: str | None, limit: int, *, just_read: bool = False) -> Page | None:
        if not just_read:
            if cursor is None or time.monotonic() > self._ahead_until or not self._trail or self._trail[-1] != cursor:
                return None
            if len(self._ahead) < limit and self._ahead_more:
                return None
        letters, self._ahead = self._ahead[:limit], self._ahead[limit:]
        more = bool(self._ahead) or (self._ahead_more and bool(letters))
        return Page(letters, letters[-1].address if more else None)

    async def _read_ahead(self, cursor: str | None, limit: int) -> None:
        # The first page reads no more than it shows: most who look, look at one page.
        wanted: int | None = limit
        if cursor is not None:
            # Somebody else's cursor may stand anywhere.
            wanted = len(self._trail) + max(limit, AHEAD) if cursor in self._trail else None
        if self._rotates:
            wanted = None
        async with self._scanner.scan(wanted) as (scan, more):
            found = self._addressed(scan.letters)
        start = self._after(cursor, [address for address, _ in found]) if cursor is not None else 0
        letters: list[Parked] = []
        size = 0
        for address, message in found[start:]:
            if letters and (len(letters) >= max(limit, AHEAD) or (size > AHEAD_BYTES and len(letters) >= limit)):
                more = True
                break
            letters.append(self._parked(address, message))
            size += len(message.body)
        self._ahead, self._ahead_more = letters, more
        self._ahead_until = time.monotonic() + FRESH

    def _after(self, cursor: str, addresses: list[str]) -> int:
        """Where the letters after the cursor begin, also when the letter it names has been moved since."""
        places = {address: place for place, address in enumerate(addresses)}
        if cursor in places:
            return places[cursor] + 1
        if cursor in self._trail:
            for seen in reversed(self._trail[: self._trail.index(cursor)]):
                if seen in places:
                    return places[seen] + 1
            return 0
        # Addresses of ours begin with the time of parking.
        return sum(1 for address in addresses if not address.startswith("~") and address <= cursor)

    async def redrive(self, letters: Sequence[Redrive]) -> list[Moved]:
        """Back to the service's own queue (or the retry road): published, confirmed, then removed here."""
        answers: list[Moved] = ["gone"] * len(letters)
        async with self._at_hand() as (here, remove):
            chosen = [(n, letter, *here[letter.address]) for n, letter in enumerate(letters) if letter.address in here]
            if not chosen:
                return answers
            copies = [await self._copy(message, read, order) for _, order, message, read in chosen]
            results = await self._publisher.send(copies)
            failpoint("rabbit.redrive.between-copy-and-ack")
            stored = []
            for (position, _, message, _), result in zip(chosen, results, strict=True):
                answers[position] = "done" if result == "stored" else "failed"
                if result == "stored":
                    stored.append(message)
            if stored:
                await remove(stored)
        return answers

    @asynccontextmanager
    async def _at_hand(self) -> AsyncIterator[tuple[dict[str, Held], Callable[[list[Message]], Awaitable[None]]]]:
        """The letters that can be moved now, by address, and how to remove them."""
        if self._walk is not None:
            yield {**self._before, **self._held}, self._walk.remove
            return
        async with self._scanner.scan(None) as (scan, _):
            yield {address: (message, None) for address, message in self._addressed(scan.letters)}, scan.remove

    async def purge(self, addresses: Sequence[str]) -> list[Moved]:
        """Gone for good."""
        async with self._at_hand() as (here, remove):
            chosen = [here[address][0] for address in dict.fromkeys(addresses) if address in here]
            if chosen:
                await remove(chosen)
            return ["done" if address in here else "gone" for address in addresses]

    async def restore(self, letters: Sequence[Parked]) -> list[Moved]:
        """Published to the dead-letter exchange, and confirmed."""
        names, ready = self._names, list[Outgoing]()
        await self._scanner.depth()  # a service that is not there has no dead letters to come back to
        for letter in letters:
            made = outgoing(
                letter.event,
                names.dead_letter_exchange,
                names.dead_letter_key,
                self._publisher.frame_max,
                letter.headers,
                new_mark(),
            )
            if isinstance(made, str):
                raise BrokerError(made)
            ready.append(made)
        return ["done" if result == "stored" else "failed" for result in await self._publisher.send(ready)]

    async def _copy(self, message: Message, read: Parked | None, order: Redrive) -> Outgoing:
        parked = read or self._parked("", message)
        exchange, key, delta = "", self._names.queue, order.headers
        kind = message.properties.content_type.decode("utf-8", "replace")
        if order.delay > 0:
            due_at = time.time() + order.delay
            exchange = self._names.retry_exchange
            _, key = await self._roads.choose(due_at)
            delta = {**delta, reserved.DUE_AT: round(due_at * 1000)}  # the road may be shorter than the delay
        return copy(
            message,
            parked.event,
            self._retries(message, parked.headers),
            delta,
            exchange=exchange,
            key=key,
            frame_max=self._publisher.frame_max,
            body=None if order.body is None else with_body(message.body, kind, order.body),
        )

    def _retries(self, message: Message, story: object) -> int:
        """The count so far: ours, or what a stranger who parked the letter wrote or left in x-death (seed 4)."""
        assert isinstance(story, dict)
        own = reserved.number(story.get(reserved.RETRIES))
        if FOLDED in message.properties.headers or own:
            return own
        return reserved.number(story.get(reserved.FINAL_RETRIES)) or rejects(message, self._names.queue)

    def _parked(self, address: str, message: Message) -> Parked:
        event, story, _, _ = incoming(message, self._names.queue, self._mapping, back_exchange=None)
        found = dict(story)
        raw = message.properties.headers.get("x-death")
        if raw is not None:
            found["x-death"] = decode(raw)
        return Parked(address, event, found)

    def _glimpsed(self, address: str, message: Message) -> Parked:
        """A letter that we published and parked ourselves says in a few headers what there is to know to move it."""
        given = message.properties
        id = given.headers.get("cloudEvents:id", b"")
        ours = id[:1] == b"S" and PARKED_ID in given.headers and given.message_id and not message.problem
        if not ours or b"cloudevents" in given.content_type.lower():
            return self._parked(address, message)
        story = {name: decode(raw) for name in _COUNTS if (raw := given.headers.get(name)) is not None}
        return Parked(address, standing(address, id[5:].decode("utf-8", "replace"), 0).event, story)

    def _addressed(self, letters: Sequence[Message]) -> list[tuple[str, Message]]:
        """Letters with their addresses: our mark, or for a stranger's a digest and which of its equals it is."""
        found = list(self._named(letters, Counter()))
        return _by_age(found) if self._rotates else found

    @staticmethod
    def _named(letters: Sequence[Message], equals: Counter[str]) -> Iterator[tuple[str, Message]]:
        for letter in letters:
            raw = letter.properties.headers.get(PARKED_ID)
            mark = decode(raw) if raw is not None else None
            address = mark if isinstance(mark, str) and mark else _digest(letter)
            equals[address] += 1
            yield (address if equals[address] == 1 else f"{address}.{equals[address]}"), letter


def _by_age(letters: list[tuple[str, Message]]) -> list[tuple[str, Message]]:
    """Letters by time of parking, which our addresses begin with; a stranger's stays behind the one before it."""
    keyed, age = [], ""
    for address, letter in letters:
        age = age if address.startswith("~") else address
        keyed.append((age, address, letter))
    return [(address, letter) for _, address, letter in sorted(keyed, key=lambda entry: entry[0])]


def _digest(letter: Message) -> str:
    given = letter.properties
    whole = hashlib.sha256(letter.body + given.message_id)
    for name, raw in sorted(given.headers.items()):
        if name not in ("x-delivery-count", "x-acquired-count"):  # these change with every look
            whole.update(name.encode("utf-8", "surrogateescape") + raw)
    return "~" + whole.hexdigest()[:24]
