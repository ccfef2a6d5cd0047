"""The state of a service's dead letters: a log cannot forget one, so a compacted topic says which are gone.

Keys are addresses (`partition:offset`). Whoever wants to move a letter first says so; of two who do at the same time
the log itself tells who was first.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias

from eventbus.errors import BrokerError
from eventbus_kafka._client import Client
from eventbus_kafka.records import Outgoing, Record

Fate: TypeAlias = Literal["moving", "redriven", "purged", "read", "erased"]
CLAIM_LASTS: Final = 10.0
"""Seconds after which one who wanted to move a letter is taken for dead. Should it be alive after all, and only slow,
the letter is moved twice."""
LOOK_AGAIN: Final = 0.1


class Letters:
    """What is known of the letters of one dead-letter topic."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._position = 0
        self._gone: dict[str, Fate] = {}
        self._claims: dict[str, tuple[str, float]] = {}
        self._turn = asyncio.Lock()

    async def refresh(self) -> None:
        """Read what was said since the last look."""
        tp = (self._topic, 0)
        async with self._turn:
            ends = await self._client.ends([tp])
            if ends[tp] < self._position:  # the topic was deleted and made again
                self._position = 0
                self._gone.clear()
                self._claims.clear()
            if ends[tp] == self._position:
                return
            begins = await self._client.begins([tp])
            start = max(self._position, begins[tp])
            found = await self._client.read({tp: start}, ends)
            for record in found[tp]:
                self._learn(record)
            self._position = ends[tp]

    def _learn(self, record: Record) -> None:
        address = (record.key or b"").decode("utf-8", "replace")
        if record.value is None:
            self._gone.pop(address, None)
            self._claims.pop(address, None)
            return
        try:
            told = json.loads(record.value)
            fate, by, at = told["state"], str(told.get("by", "")), float(told.get("at", 0.0))
        except (ValueError, TypeError, KeyError, RecursionError):
            return  # a stranger's
        if fate == "moving":
            known = self._claims.get(address)
            if known is None or at > known[1] + CLAIM_LASTS:
                self._claims[address] = (by, at)
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
        """Those of the letters that are ours to move now; the others are gone.

        What somebody else wanted to move is waited for: it goes, or its mover is dead and it is ours after all.
        """
        me = secrets.token_hex(8)
        left = list(addresses)
        mine: set[str] = set()
        patience = time.monotonic() + 3 * CLAIM_LASTS  # a clock that goes wrong elsewhere does not keep us for ever
        while left and time.monotonic() < patience:
            now = time.time()
            wanted = [address for address in left if not self._claimed(address, now)]
            await self._say([(address, "moving", me) for address in wanted])
            if not wanted:
                await asyncio.sleep(LOOK_AGAIN)
            await self.refresh()
            mine |= {address for address in wanted if self._claims.get(address, ("", 0.0))[0] == me}
            left = [address for address in left if address not in mine and not self.is_gone(address)]
        return mine

    def _claimed(self, address: str, now: float) -> bool:
        return address in self._claims and now <= self._claims[address][1] + CLAIM_LASTS

    async def say(self, addresses: Iterable[str], fate: Fate) -> None:
        """These are gone; stands once this returns."""
        await self._say([(address, fate, "") for address in addresses])

    async def unsay(self, addresses: Iterable[str]) -> None:
        """Nothing is said of these any more."""
        await self._write([Outgoing(self._topic, address.encode(), None, (), 0) for address in addresses])

    async def _say(self, words: Sequence[tuple[str, Fate, str]]) -> None:
        now = time.time()
        rows = []
        for address, fate, by in words:
            told = json.dumps({"state": fate, "by": by, "at": now}).encode()
            rows.append(Outgoing(self._topic, address.encode(), told, (), 0))
        await self._write(rows)

    async def _write(self, rows: Sequence[Outgoing]) -> None:
        for error in await self._client.send(rows):
            if isinstance(error, BrokerError):
                raise error
