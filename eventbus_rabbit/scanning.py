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
_HOLDER: Final[Mapping[str, str | int]] = {"x-expires": 60_000, "x-max-length": 1}


class Scan:
    """Letters held by one channel, oldest first; what is not removed goes back at the end."""

    def __init__(self) -> None:
        self.letters: list[Message] = []
        self._arrived = asyncio.Event()
        self._removed: set[int] = set()
        self.wire: Wire | None = None

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        """A letter."""
        self.letters.append(Message(*frames.read_deliver(method), properties, body))
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
        await self.wire.write(b"".join(frames.ack(self.wire.number, letter.tag, multiple=False) for letter in letters))
        self._removed.update(letter.tag for letter in letters)

    @property
    def removed(self) -> int:
        """How many letters do not go back."""
        return len(self._removed)


class Scanner:
    """Scans one dead-letter queue."""

    def __init__(self, link: Link, publisher: Publisher, queue: str) -> None:
        self._link = link
        self._publisher = publisher
        self._queue = queue

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
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            standing, consumers = await self._count()
            number = standing if wanted is None else min(standing, wanted)
            if not consumers:
                if not number:
                    yield Scan(), False
                    return
                scan = await self._hold(number)
                if scan is not None:
                    break
            if asyncio.get_running_loop().time() > deadline:
                raise BrokerError(f"{self._queue} is being looked at by {await self._holder()}; try again later")
            await asyncio.sleep(0.05)
        try:
            await scan.fill(number)
            yield scan, standing > len(scan.letters)
        finally:
            await self._let_go(scan, standing)

    async def _hold(self, number: int) -> Scan | None:
        """Take the letters, alone; None if somebody else was faster."""
        scan = Scan()
        scan.wire = await self._link.channel(scan)
        try:
            await scan.wire.qos(0 if number > MAX_PREFETCH else number)
            await scan.wire.consume(self._queue, exclusive=True)
        except Refused:
            return None
        await self._say_who()
        return scan

    async def _let_go(self, scan: Scan, standing: int) -> None:
        """Give back what was not removed.

        By closing the channel: then letters stand where they stood, on classic and on quorum queues. A nack would put
        those of a quorum queue at its end, and the next look would begin in the middle (seen on 3.10.8).
        """
        assert scan.wire is not None
        await scan.wire.aclose()
        with contextlib.suppress(EventBusError):
            for _ in range(200):  # the broker gives back in its own time
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


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}"
