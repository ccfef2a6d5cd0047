"""Looking through a dead-letter queue without consuming it.

All letters up to the wanted one are taken, looked at and given back in one go; while that lasts nobody else sees them.
So only one operator at a time: the scan consumes exclusively, and who comes second is told who was first.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Final

from eventbus.errors import BrokerError, EventBusError, UnknownService
from eventbus_rabbit import frames
from eventbus_rabbit._errors import NotFound, Refused
from eventbus_rabbit.link import Link, Wire
from eventbus_rabbit.messages import Message
from eventbus_rabbit.publisher import Outgoing, Publisher
from eventbus_rabbit.values import Properties, encode_table, write_properties

PATIENCE: Final = 5.0
"""How long a second operator waits for the first; a scan is short."""
MOMENT: Final = 0.5
IDLE: Final = 1.5
"""A scan that gets nothing for so long has seen all that can be seen."""
MAX_PREFETCH: Final = 65_535
AT_ONCE: Final = 500
HELD_BACK: Final = 16
_LOCK: Final[Mapping[str, str | int]] = {"x-expires": 60_000}
_HOLDER: Final[Mapping[str, str | int]] = {"x-expires": 60_000, "x-max-length": 1}


class Scan:
    """Letters held by one channel, oldest first; what is not removed goes back at the end."""

    def __init__(self) -> None:
        self.letters: list[Message] = []
        self._arrived = asyncio.Event()
        self.unsettled: dict[int, None] = {}
        """Tags of what is held, in order."""
        self.removed = 0
        """How many letters do not go back."""
        self.one_by_one = 0
        """How many of them were acknowledged by a frame of their own."""
        self.wire: Wire | None = None
        self.lock: Wire | None = None
        self.consumer = ""

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        """A letter."""
        message = Message(*frames.read_deliver(method), properties, body)
        self.letters.append(message)
        self.unsettled[message.tag] = None
        self._arrived.set()

    def confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        """Nothing is published on this channel."""

    def returned(self, method: bytes, properties: bytes) -> None:
        """Nothing is published on this channel."""

    async def fill(self, number: int) -> None:
        """Wait until so many letters are here, or no more come."""
        while len(self.letters) < number:
            self._arrived.clear()
            try:
                async with asyncio.timeout(IDLE):
                    await self._arrived.wait()
            except TimeoutError:
                return

    async def remove(self, letters: list[Message]) -> None:
        """Take letters out of the queue for good."""
        assert self.wire is not None
        tags, last, parts = {letter.tag for letter in letters}, 0, list[bytes]()
        for tag in self.unsettled:  # all of the oldest go in one frame
            if tag not in tags:
                break
            last = tag
        if last:
            parts.append(frames.ack(self.wire.number, last, multiple=True))
        single = [tag for tag in tags if tag > last]
        parts += [frames.ack(self.wire.number, tag, multiple=False) for tag in single]
        await self.wire.write(b"".join(parts))
        self.one_by_one += len(single)
        self.removed += len(tags)
        for tag in tags:
            del self.unsettled[tag]


class Scanner:
    """Scans one dead-letter queue."""

    def __init__(self, link: Link, publisher: Publisher, queue: str, *, quorum: bool = False) -> None:
        self._link = link
        self._publisher = publisher
        self._queue = queue
        self._quorum = quorum

    async def depth(self) -> int:
        """How many letters stand here; waits a moment for somebody who is looking at them just now."""
        deadline = asyncio.get_running_loop().time() + MOMENT
        while True:
            standing, consumers = await self._count()
            if not consumers or asyncio.get_running_loop().time() > deadline:
                return standing
            await asyncio.sleep(0.02)

    async def _count(self) -> tuple[int, int]:
        try:
            async with self._link.throwaway() as wire:
                return await wire.count(self._queue)
        except NotFound:
            raise UnknownService(f"{self._queue} is missing on this broker; provision the service first") from None

    @contextlib.asynccontextmanager
    async def scan(self, wanted: int | None) -> AsyncIterator[tuple[Scan, bool]]:
        """The first `wanted` letters (None: all of them), and whether there are more."""
        scan, number, standing = await self._acquire(wanted)
        if scan is None:
            yield Scan(), False
            return
        try:
            await scan.fill(number)
            yield scan, standing > len(scan.letters)
        finally:
            await self.let_go(scan, standing)

    async def walk(self) -> Walk:
        """A walk along the whole queue, a few letters at a time; close it to give back what was not removed."""
        scan, _, standing = await self._acquire(None, prefetch=1)
        if scan is not None:
            await scan.fill(1)
        return Walk(self, scan, standing)

    async def _acquire(self, wanted: int | None, *, prefetch: int | None = None) -> tuple[Scan | None, int, int]:
        """Be alone with the letters, as soon as others let us: the scan, how many it gets, and how many there are."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            standing, consumers = await self._count()
            number = standing if wanted is None else min(standing, wanted)
            if not consumers:
                if not number:
                    return None, 0, standing
                scan = await self._hold(prefetch or number)
                if scan is not None:
                    return scan, number, standing
            if asyncio.get_running_loop().time() > deadline:
                raise BrokerError(f"{self._queue} is being looked at by {await self._holder()}; try again later")
            await asyncio.sleep(0.05)

    async def fetch(self, scan: Scan, number: int) -> None:
        """Take so many more letters; fewer only if there are no more. All of them have come when this returns."""
        assert scan.wire is not None
        if self._quorum:
            # Each basic.get is a consumer of its own to a quorum queue, and its ack a command of its own: too many for
            # a channel that is closed soon (seen: 124 of 300 acknowledged letters came again). So consumers take turns,
            # and each is filled to its limit.
            wanted = len(scan.letters) + number
            await scan.wire.cancel(scan.consumer)
            await scan.wire.qos(number)
            scan.consumer = await scan.wire.consume(self._queue)
            await scan.fill(wanted)
            return
        for start in range(0, number, AT_ONCE):
            asked = frames.get(scan.wire.number, self._queue) * min(AT_ONCE, number - start)
            await scan.wire.write(asked)
            await scan.wire.count(self._queue)  # answered after all the gets before it

    async def _hold(self, number: int) -> Scan | None:
        """Take the letters, alone; None if somebody else was faster."""
        scan = Scan()
        if self._quorum and not await self._lock(scan):
            return None
        scan.wire = await self._link.channel(scan)
        try:
            await scan.wire.qos(0 if number > MAX_PREFETCH else number)
            scan.consumer = await scan.wire.consume(self._queue, exclusive=not self._quorum)
        except Refused:
            return None
        await self._say_who()
        return scan

    async def _lock(self, scan: Scan) -> bool:
        """A quorum queue lets a second consumer in beside an exclusive one: the lock is a classic queue beside it."""
        name = f"{self._queue}.lock"
        try:
            async with self._link.throwaway() as wire:
                await wire.declare_queue(name, _LOCK)
        except EventBusError:
            return True  # without the right to configure there is no lock; letters are still moved by one only
        scan.lock = await self._link.channel()
        try:
            await scan.lock.consume(name, exclusive=True)
        except Refused:
            return False
        return True

    async def let_go(self, scan: Scan, standing: int) -> None:
        """Give back what was not removed.

        By closing the channel: then letters stand where they stood, on classic and on quorum queues. A nack would put
        those of a quorum queue at its end, and the next look would begin in the middle (seen on 3.10.8).
        """
        assert scan.wire is not None
        if self._quorum and scan.one_by_one > HELD_BACK and scan.unsettled:
            # A channel keeps back what a quorum queue has not taken yet, and forgets it when it is closed: letters that
            # were acknowledged would come again. What is given back by a frame comes after them, and can be seen.
            last = next(reversed(scan.unsettled))
            with contextlib.suppress(EventBusError):
                await scan.wire.cancel(scan.consumer)
                await scan.wire.write(frames.nack(scan.wire.number, last, multiple=True, requeue=True))
                await self._given_back(scan, standing)
        await scan.wire.aclose()
        await self._given_back(scan, standing)
        if scan.lock is not None:
            await scan.lock.aclose()

    async def _given_back(self, scan: Scan, standing: int) -> None:
        with contextlib.suppress(EventBusError):
            for _ in range(2000):  # the broker gives back in its own time
                if (await self._count())[0] >= standing - scan.removed:
                    return
                await asyncio.sleep(0.005)

    # --- who holds it ----------------------------------------------------------------------------------------

    @property
    def _note(self) -> str:
        return f"{self._queue}.operator"

    async def _say_who(self) -> None:
        """Leave a note beside the queue: AMQP does not tell a second operator who the first one is."""
        who = f"{_user()} on {socket.gethostname()}, process {os.getpid()}"
        try:
            async with self._link.throwaway() as wire:
                await wire.declare_queue(self._note, _HOLDER)
            properties = write_properties(Properties(), encode_table({}))
            await self._publisher.send([Outgoing("", self._note, properties, who.encode(), b"")])
        except EventBusError:
            return  # without the right to configure there is no note; the lock itself holds

    async def _holder(self) -> str:
        try:
            async with self._link.throwaway() as wire:
                found = await wire.get(self._note)
                return "another consumer" if found is None else found[5].decode("utf-8", "replace")
        except EventBusError:
            return "another consumer"


class Walk:
    """One look at a whole queue with bounded memory: letters are handed out a few at a time and all held meanwhile.

    A consumer of one letter keeps others out; the rest comes by basic.get, exactly as many as are wanted.
    """

    def __init__(self, scanner: Scanner, scan: Scan | None, standing: int) -> None:
        self._scanner = scanner
        self._scan = scan
        self._standing = standing
        self._given = 0

    @property
    def left(self) -> int:
        """How many there are still to see."""
        return 0 if self._scan is None else max(0, self._standing - self._given)

    async def next(self, limit: int) -> list[Message]:
        """The next letters, oldest first; none at the end."""
        scan = self._scan
        wanted = min(limit, self.left)
        if scan is None or not wanted:
            return []
        if len(scan.letters) < wanted:
            await self._scanner.fetch(scan, wanted - len(scan.letters))
        found, scan.letters = scan.letters[:wanted], scan.letters[wanted:]
        self._given = self._given + len(found) if found else self._standing
        return found

    async def remove(self, letters: list[Message]) -> None:
        """Take letters out of the queue for good."""
        assert self._scan is not None
        await self._scan.remove(letters)

    async def aclose(self) -> None:
        """Give back what was not removed."""
        if self._scan is not None:
            await self._scanner.let_go(self._scan, self._standing)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}"
