"""The state of a service's dead letters: a log cannot forget one, so a compacted topic says which are gone.

Whoever wants to move letters first says so, in one record for all of them; of two who do at the same time the log
itself tells who was first. What became of them is said in place of that, under the same key.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from eventbus.errors import BrokerError
from eventbus_kafka._client import TP, Client
from eventbus_kafka.holes import Holes
from eventbus_kafka.records import Outgoing

Fate: TypeAlias = Literal["redriven", "purged", "read", "erased"]
Places: TypeAlias = Mapping[int, Iterable[int]]
"""Offsets of letters by partition."""
Stretches: TypeAlias = list[tuple[int, int, int]]
"""Letters one behind the other: their partition, the first offset, and the one behind the last."""
CLAIM_LASTS: Final = 10.0
"""Seconds after which one who wanted to move a letter is taken for dead; if he is not, the letter may be doubled."""
LOOK_AGAIN: Final = 0.05
_AT_ONCE: Final = 10_000
"""Letters named in one record at most."""
_STRETCH: Final = re.compile(r"(\d{1,9}):(\d{1,18})(?:-(\d{1,18}))?")


class Claim(NamedTuple):
    """Letters that are ours to move now, and the key under which that is said."""

    key: bytes
    letters: Mapping[int, set[int]]


class Letters:
    """What is known of the letters of one dead-letter topic."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._position = 0
        self._rows: dict[bytes, tuple[bool, Stretches]] = {}  # by key: whether they are only claimed, and which
        self._claims: dict[int, dict[int, tuple[bytes, float]]] = defaultdict(dict)
        self._begins: dict[int, int] = {}
        self._over: list[bytes] = []  # keys of rows about letters that the log does not have any more
        self._turn = asyncio.Lock()
        self.gone: dict[int, set[int]] = defaultdict(set)
        """Offsets of letters that were re-driven, purged or read, by partition."""
        self.holes: dict[TP, Holes] = {}
        """Of the letters' own topic: offsets that none has, as far as anybody here has looked."""

    # --- learning --------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Read what was said since the last look."""
        async with self._turn:
            await self._catch_up()

    async def _catch_up(self) -> None:
        tp = (self._topic, 0)
        ends = await self._client.ends([tp])
        if ends[tp] < self._position:  # the topic was deleted and made again
            self._position = 0
            self._rows.clear()
            self._claims.clear()
            self.gone.clear()
        if ends[tp] == self._position:
            return
        begins = await self._client.begins([tp])
        for record in (await self._client.read({tp: max(self._position, begins[tp])}, ends))[tp]:
            self._learn(record.key or b"", record.value)
        self._position = ends[tp]

    def _learn(self, key: bytes, value: bytes | None) -> None:
        claimed, letters = self._rows.pop(key, (False, []))  # what was said by this key before is over
        for partition, first, after in letters:
            claims = self._claims[partition]
            for offset in range(first, after) if claimed else ():
                if offset in claims and claims[offset][0] == key:
                    del claims[offset]
        if value is None:  # of what is gone nothing needs to be said once the log has it no more; it stays gone
            return
        moving, at, letters = _read(key, value)
        if letters:
            self._rows[key] = moving, letters
        for partition, first, after in letters:
            claims = self._claims[partition]
            if moving:
                for offset in range(first, after):
                    # Of a clock that is far from others' no more is known than of one who is dead.
                    if offset not in claims or not abs(at - claims[offset][1]) <= CLAIM_LASTS:
                        claims[offset] = (key, at)
            else:
                self.gone[partition].update(range(first, after))
                for offset in claims.keys() & range(first, after):
                    del claims[offset]

    def is_gone(self, partition: int, offset: int) -> bool:
        """Whether it was re-driven, purged or read, or the log does not have it any more."""
        return offset in self.gone[partition] or offset < self._begins.get(partition, 0)

    # --- saying ----------------------------------------------------------------------------------------------

    async def claim(self, places: Places) -> Claim:
        """Those of the letters that are ours to move now; of very many the first."""
        now, key, room = time.time(), _key(), _AT_ONCE
        wanted: dict[int, set[int]] = {}
        for partition, offsets in places.items():
            free = [offset for offset in offsets if not self._claimed(partition, offset, now)][:room]
            room -= len(free)
            wanted[partition] = set(free)
        if room < _AT_ONCE:
            await self._write([(key, _row("moving", now, wanted))], sure=True)
        for partition, offsets in wanted.items():
            claims = self._claims[partition]
            mine = {o for o in offsets if o in claims and claims[o][0] == key}
            wanted[partition] = {o for o in mine if not self.is_gone(partition, o)}
        if room < _AT_ONCE and not any(wanted.values()):
            await self._write([(key, None)])  # others were faster
        return Claim(key, wanted)

    async def settled(self, places: Places) -> None:
        """Wait until nobody is about to move these: they are gone, or stand, or their mover is taken for dead."""
        while any(self._claimed(number, at, time.time()) for number, offsets in places.items() for at in offsets):
            await asyncio.sleep(LOOK_AGAIN)
            await self.refresh()

    def _claimed(self, partition: int, offset: int, now: float) -> bool:
        # Either way: a claim from a clock that is ahead of ours must not keep us waiting until that clock is right.
        claim = self._claims[partition].get(offset)
        return claim is not None and abs(now - claim[1]) <= CLAIM_LASTS

    async def say(self, places: Places, fate: Fate, claim: bytes | None = None) -> None:
        """These are gone; stands once this returns. Of what else was claimed with them nothing is said any more."""
        value = _row(fate, time.time(), places) if any(places.values()) else None
        if value is not None or claim is not None:
            await self._write([(claim or _key(), value), *self._past()])

    def begin(self, begins: Mapping[TP, int]) -> None:
        """Where the letters' own topic begins now: nothing needs to be said of what was there before."""
        now = {partition: offset for (_, partition), offset in begins.items()}
        if now != self._begins:
            self._begins = now
            for partition, first in now.items():
                self.gone[partition] = {offset for offset in self.gone[partition] if offset >= first}
            self._over = [
                key
                for key, (_, letters) in self._rows.items()
                if all(after <= now.get(partition, 0) for partition, _, after in letters)
            ]

    async def forget(self) -> None:
        """Say no more of letters that the log does not have any more."""
        await self._write(self._past())

    def _past(self) -> list[tuple[bytes, None]]:
        return [(key, None) for key in self._over if key in self._rows]

    async def _write(self, rows: Sequence[tuple[bytes, bytes | None]], *, sure: bool = False) -> None:
        """Write, and learn what was said up to then; not `sure`: that may fail, for what was written stands."""
        if not rows:
            return
        async with self._turn:  # nobody of this process moves the position meanwhile
            offsets = await self._client.append([Outgoing(self._topic, key, value, [], 0) for key, value in rows])
            if offsets == list(range(self._position, self._position + len(rows))):  # and nobody else wrote
                for key, value in rows:
                    self._learn(key, value)
                self._position += len(rows)
                return
            try:
                await self._catch_up()
            except BrokerError:
                if sure:
                    raise


def _key() -> bytes:
    return f"claim:{secrets.token_hex(8)}".encode()


def _row(state: str, at: float, places: Places) -> bytes:
    letters = []
    for partition, offsets in places.items():
        for first, after in stretches(offsets):
            letters.append(f"{partition}:{first}" if after == first + 1 else f"{partition}:{first}-{after - 1}")
    return json.dumps({"state": state, "at": at, "letters": letters}).encode()


def stretches(offsets: Iterable[int], gap: int = 1) -> list[tuple[int, int]]:
    """Offsets as stretches, each with the first offset and the one behind its last; small gaps are passed over."""
    found: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if found and offset - found[-1][1] < gap:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return found


def _read(key: bytes, value: bytes) -> tuple[bool, float, Stretches]:
    """Whether letters are only claimed, when that was said, and which. One alone may be named by the key."""
    letters: Stretches = []
    try:
        told = json.loads(value)
        for text in told.get("letters") or [key.decode()]:
            match = _STRETCH.fullmatch(text)
            if match is not None:
                first = int(match[2])
                last = int(match[3] or first)
                if first <= last < first + _AT_ONCE:
                    letters.append((int(match[1]), first, last + 1))
        return told["state"] == "moving", float(told.get("at", 0.0)), letters
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False, 0.0, []  # a stranger's
