"""The state of a service's dead letters: a log cannot forget one, so a compacted topic says which are gone.

Keys are addresses (`partition:offset`). Whoever wants to move letters first says so, in one record for all of them; of
two who do at the same time the log itself tells who was first.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias

from eventbus.errors import BrokerError
from eventbus_kafka._client import TP, Client
from eventbus_kafka.holes import Holes
from eventbus_kafka.records import Outgoing, Record

Fate: TypeAlias = Literal["moving", "redriven", "purged", "read", "erased"]
Told: TypeAlias = tuple[Fate, str, float, list[str]]
"""What became of a letter, who says so, when; and of which letters, if somebody wants to move them."""
CLAIM_LASTS: Final = 10.0
"""Seconds after which one who wanted to move a letter is taken for dead; if he is not, the letter may be doubled."""
LOOK_AGAIN: Final = 0.05
_AT_ONCE: Final = 10_000
"""Letters named in one record at most."""


class Letters:
    """What is known of the letters of one dead-letter topic."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._position = 0
        self._gone: dict[str, Fate] = {}
        self._claims: dict[str, tuple[str, float]] = {}
        self._last: tuple[bytes, Told | None] = (b"", None)
        self._turn = asyncio.Lock()
        self.holes: dict[TP, Holes] = {}
        """Of the letters' own topic: offsets that none has, as far as anybody here has looked."""

    async def refresh(self) -> None:
        """Read what was said since the last look."""
        async with self._turn:
            await self._catch_up()

    async def _catch_up(self, written: Sequence[Outgoing] = ()) -> None:
        """Learn what is new; where that is as much as we have just `written`, it is that, and need not be read."""
        tp = (self._topic, 0)
        ends = await self._client.ends([tp])
        if ends[tp] < self._position:  # the topic was deleted and made again
            self._position = 0
            self._gone.clear()
            self._claims.clear()
        if ends[tp] == self._position:
            return
        news: Sequence[Record | Outgoing] = written
        if ends[tp] != self._position + len(written):
            begins = await self._client.begins([tp])
            news = (await self._client.read({tp: max(self._position, begins[tp])}, ends))[tp]
        for record in news:
            self._learn(record.key or b"", record.value)
        self._position = ends[tp]

    def _learn(self, key: bytes, value: bytes | None) -> None:
        address = key.decode("utf-8", "replace")
        if value is None:
            self._gone.pop(address, None)
            self._claims.pop(address, None)
            return
        if value != self._last[0]:
            self._last = value, _read(value)  # whoever moves letters says the same of many
        told = self._last[1]
        if told is None:
            return
        fate, by, at, claimed = told
        if fate == "moving":
            for one in claimed:
                known = self._claims.get(one)
                if known is None or at > known[1] + CLAIM_LASTS:
                    self._claims[one] = (by, at)
        else:
            self._gone[address] = fate
            self._claims.pop(address, None)

    def is_gone(self, address: str) -> bool:
        """Whether it was re-driven, purged or read."""
        return address in self._gone

    def gone(self) -> Iterable[str]:
        """The addresses of all that are gone."""
        return self._gone

    async def claim(self, addresses: Sequence[str]) -> set[str]:
        """Those of the letters that are ours to move now."""
        pieces = [addresses[start : start + _AT_ONCE] for start in range(0, len(addresses), _AT_ONCE)]
        return {address for piece in pieces for address in await self._claim(piece)}

    async def _claim(self, addresses: Sequence[str]) -> list[str]:
        me = secrets.token_hex(8)
        now = time.time()
        wanted = [address for address in addresses if not self._claimed(address, now)]
        if wanted:
            told = json.dumps({"state": "moving", "by": me, "at": now, "letters": wanted}).encode()
            await self._write([Outgoing(self._topic, _claim_key(me), told, (), 0)], sure=True)
        return [
            address for address in wanted if not self.is_gone(address) and self._claims.get(address, ("", 0.0))[0] == me
        ]

    async def settled(self, addresses: Sequence[str]) -> None:
        """Wait until nobody is about to move these: they are gone, or stand, or their mover is taken for dead."""
        while any(self._claimed(address, time.time()) for address in addresses):
            await asyncio.sleep(LOOK_AGAIN)
            await self.refresh()

    def _claimed(self, address: str, now: float) -> bool:
        # Either way: a claim from a clock that is ahead of ours must not keep us waiting until that clock is right.
        return address in self._claims and abs(now - self._claims[address][1]) <= CLAIM_LASTS

    async def say(self, addresses: Iterable[str], fate: Fate) -> None:
        """These are gone; stands once this returns. Whoever claimed them has no more to say."""
        told = json.dumps({"state": fate, "at": time.time()}).encode()
        rows, claims = list[Outgoing](), set[str]()
        for address in addresses:
            rows.append(Outgoing(self._topic, address.encode(), told, (), 0))
            if address in self._claims:
                claims.add(self._claims[address][0])
        await self._write(rows + [Outgoing(self._topic, _claim_key(by), None, (), 0) for by in claims])

    async def unsay(self, addresses: Iterable[str]) -> None:
        """Nothing is said of these any more."""
        await self._write([Outgoing(self._topic, address.encode(), None, (), 0) for address in addresses])

    async def _write(self, rows: Sequence[Outgoing], *, sure: bool = False) -> None:
        """Write, and learn what was said up to then; not `sure`: that may fail, for what was written stands."""
        if not rows:
            return
        async with self._turn:  # nobody of this process moves the position meanwhile
            for error in await self._client.send(rows):
                if isinstance(error, BrokerError):
                    raise error
            try:
                await self._catch_up(rows)
            except BrokerError:
                if sure:
                    raise


def _claim_key(by: str) -> bytes:
    return f"claim:{by}".encode()


def _read(value: bytes) -> Told | None:
    try:
        told = json.loads(value)
        claimed = [str(address) for address in told.get("letters", ())]
        return told["state"], str(told.get("by", "")), float(told.get("at", 0.0)), claimed
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # a stranger's
