"""The bookkeeping of one partition: what may be committed, and what the commit says about the rest. Pure.

Kafka keeps one number per partition and group. Messages are finished out of order, so what is committed is the lowest
offset that is not finished: everything below it is. Beside the number stands a text of up to 4 KiB, and it says

    s   which offsets from there on may have been started: whoever takes over handles those as suspects
    d   which of them are finished already: they are not handled again
    n   notes: crash counts and attempts of messages that were held
    o   who said so: whoever finds its own name there again knows that nobody else had the partition meanwhile

Offsets that do not exist (compaction, transaction markers) are never seen, and so never waited for.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Range: TypeAlias = tuple[int, int]
"""From, up to and not including."""
Note: TypeAlias = dict[str, str | int]

ROOM: Final = 4000
"""Bytes of metadata; the broker's own limit (offset.metadata.max.bytes) is 4096."""
ROOM_FOR_NOTES: Final = 3000
_LONG: Final = 80
"""Texts of notes longer than this go first where there is no room."""


class NoRoom(Exception):
    """There is no room for one more note in the commit of a partition."""


class Ledger:
    """Which offsets of a partition were seen, and which of those are finished."""

    __slots__ = ("_finished", "_seen", "position")

    def __init__(self, start: int) -> None:
        self.position = start
        """The next offset to be seen."""
        self._seen: deque[int] = deque()  # from the lowest unfinished one on, in order
        self._finished: set[int] = set()  # those of them that are finished; never the first

    def see(self, offsets: Iterable[int]) -> None:
        """Offsets were fetched, in order."""
        seen = self._seen
        for offset in offsets:
            if offset < self.position:
                raise ValueError(f"offset {offset} was seen before; the next is {self.position}")
            seen.append(offset)
            self.position = offset + 1

    def finish(self, offset: int) -> None:
        """One of them is finished."""
        seen, finished = self._seen, self._finished
        if not seen or offset != seen[0]:
            finished.add(offset)
            return
        seen.popleft()
        while finished and seen and seen[0] in finished:
            finished.discard(seen.popleft())

    def advance(self, position: int) -> None:
        """The fetcher is at `position`, past offsets that do not exist."""
        if not self._seen:
            self.position = max(self.position, position)

    @property
    def commit(self) -> int:
        """What may be committed: everything below is finished."""
        return self._seen[0] if self._seen else self.position

    @property
    def open(self) -> int:
        """How many are seen and not finished."""
        return len(self._seen) - len(self._finished)

    @property
    def beyond(self) -> int:
        """How many are finished beyond what may be committed."""
        return len(self._finished)

    def finished(self) -> list[Range]:
        """The finished offsets beyond what may be committed."""
        if not self._finished:
            return []
        ranges: list[Range] = []
        start = end = -1
        for offset in self._seen:
            if offset in self._finished:
                if start < 0:
                    start = offset
                end = offset + 1
            elif start >= 0:
                ranges.append((start, end))
                start = -1
        if start >= 0:
            ranges.append((start, end))
        return ranges


@dataclass(frozen=True, slots=True)
class Legacy:
    """What the last commit of a partition said about the offsets from there on."""

    suspects: Sequence[Range] = ()
    finished: Sequence[Range] = ()
    notes: Mapping[int, Note] = field(default_factory=dict)
    owner: str = ""

    @property
    def end(self) -> int:
        """Beyond here it says nothing."""
        return max((ranges[-1][1] for ranges in (self.suspects, self.finished) if ranges), default=0)

    def suspects_from(self, offset: int) -> list[Range]:
        """The suspects from an offset on."""
        return _from(self.suspects, offset)

    def finished_from(self, offset: int) -> list[Range]:
        """The finished ones from an offset on."""
        return _from(self.finished, offset)


NOTHING: Final = Legacy()


def contains(ranges: Sequence[Range], offset: int) -> bool:
    """Whether an offset is in one of the ranges, which are in order."""
    place = bisect_right(ranges, offset, key=lambda found: found[0])
    return place > 0 and offset < ranges[place - 1][1]


def ranges_of(offsets: Iterable[int]) -> list[Range]:
    """Offsets as ranges, in order."""
    return merged((offset, offset + 1) for offset in offsets)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, without overlap."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def noted(note: Mapping[str, str | int] | None, delta: Mapping[str, str | int | None]) -> Note:
    """A note with changes to it."""
    return {name: value for name, value in {**(note or {}), **delta}.items() if value is not None}


def encode(
    commit: int,
    suspects: Sequence[Range] = (),
    finished: Sequence[Range] = (),
    notes: Mapping[int, Note] | None = None,
    owner: str = "",
) -> str:
    """The metadata of a commit. What does not fit is left out on the safe side: more suspects, fewer finished.

    Of notes first the long texts go, then all texts, then those farthest ahead: `fit` tells before it comes to that.
    """
    told: dict[str, object] = {"o": owner} if owner else {}
    room = ROOM - 40 - len(owner)
    if notes:
        for shorten in (dict, _brief, _numbers):
            told["n"] = kept = _kept(notes, commit, shorten)
            if (size := len(_dumps(kept))) <= ROOM_FOR_NOTES:
                break
        while size > ROOM_FOR_NOTES:
            kept.popitem()
            size = len(_dumps(kept))
        room -= size
    if suspects:
        text = _write(suspects, commit)
        if len(text) > room:
            text = _write([(suspects[0][0], suspects[-1][1])], commit)
        told["s"] = text
        room -= len(text)
    if finished:
        text = _write(finished, commit)
        if len(text) > room:
            text = text[: text.rfind(",", 0, max(0, room))] if "," in text[: max(0, room)] else ""
        if text:
            told["d"] = text
    return _dumps(told) if told else ""


def fit(notes: Mapping[int, Note], commit: int) -> bool:
    """Whether notes can stand in one commit, all of them, if only by their numbers."""
    return len(_dumps(_kept(notes, commit, _numbers))) <= ROOM_FOR_NOTES


def decode(commit: int, metadata: str) -> Legacy:
    """What a commit says; a stranger's metadata says nothing."""
    if not metadata.startswith("{") or len(metadata) > 2 * ROOM:
        return NOTHING
    try:
        told = json.loads(metadata)
        notes = {
            commit + int(key): {str(name): value for name, value in note.items() if isinstance(value, (str, int))}
            for key, note in told.get("n", {}).items()
        }
        owner = str(told.get("o", ""))
        return Legacy(_read(told.get("s", ""), commit), _read(told.get("d", ""), commit), notes, owner)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return NOTHING


def _from(ranges: Sequence[Range], offset: int) -> list[Range]:
    return [(max(start, offset), end) for start, end in ranges if end > offset]


def _write(ranges: Sequence[Range], commit: int) -> str:
    return ",".join(
        f"{start - commit}" if end == start + 1 else f"{start - commit}-{end - commit - 1}" for start, end in ranges
    )


def _read(text: str, commit: int) -> list[Range]:
    found = []
    for piece in text.split(",") if text else ():
        first, dash, last = piece.partition("-")
        start = int(first)
        end = int(last) if dash else start
        if start < 0 or end < start:
            raise ValueError(piece)
        found.append((commit + start, commit + end + 1))
    return merged(found)


def _kept(notes: Mapping[int, Note], commit: int, shorten: Callable[[Note], Note]) -> dict[str, Note]:
    return {
        str(offset - commit): shorten(notes[offset]) for offset in sorted(notes) if offset >= commit and notes[offset]
    }


def _brief(note: Note) -> Note:
    return {name: value for name, value in note.items() if not isinstance(value, str) or len(value) <= _LONG}


def _numbers(note: Note) -> Note:
    return {name: value for name, value in note.items() if not isinstance(value, str)}


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
