"""One partition in the hands of a consumer: what is fetched, what is held, what may be given out. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from eventbus import headers
from eventbus.settlement import Delivery, HeaderDelta
from eventbus_kafka import offsets
from eventbus_kafka.offsets import Ledger, Legacy, NoRoom, Note, noted
from eventbus_kafka.records import Record

SMALLEST_LEAD: Final = 16
LARGEST_LEAD: Final = 512
"""All of it is suspect once its consumer is gone, and suspects go one by one; half of it lasts while one commits.

Measured: 256 costs half of the rate in commits; with 4096 a frozen consumer left more than minutes of suspects."""
GROWTH: Final = 16
"""A backlog waits for one commit until the lead is at its largest; smaller steps cost it a tenth of a second."""
LARGEST_BUFFER: Final = 384
SMALLEST_BUFFER: Final = 32
MOST_BUFFERED: Final = 4608
"""Records that all lanes of a consumer keep ready together, as long as none has less than the smallest buffer.

Few: what is not a record yet are bytes, which no garbage collection walks through. Enough to live on until the next
have come: they are fetched when the last of these are taken."""
LEAST_BYTES: Final = 1024 * 1024
MOST_BYTES: Final = 64 * 1024 * 1024
MOST_OPEN: Final = 50_000
"""Offsets between the lowest unfinished one and the newest: what a very slow message may hold in memory."""


class Lane:
    """A partition since it was assigned to us. Once it is another's it is fenced, and takes no word any more.

    Before a message is given out, a commit says that it may have been started: else a message that kills its process
    at once would come again and again without a trace. The lead is how far that word goes ahead, so that nobody waits
    for a commit: it grows while messages come fast, and shrinks again.
    """

    __slots__ = (
        "_bytes", "_given", "_legacy", "buffer", "dirty", "fenced", "full_since", "held", "lead", "ledger",
        "legacy_end", "limit", "marked", "most_bytes", "notes", "paused", "said", "tier", "tp", "wanting", "words",
    )  # fmt: skip

    def __init__(self, tp: tuple[str, int], start: int, legacy: Legacy, *, tier: int | None) -> None:
        self.tp = tp
        self.tier = tier
        """The delay of a retry topic in ms; None for any other."""
        self.ledger = Ledger(start)
        self.buffer: deque[Record] = deque()
        self.held: dict[int, Delivery] = {}
        self.notes: dict[int, Note] = {offset: dict(note) for offset, note in legacy.notes.items()}
        self.words = self.said = 0
        """How many notes were taken, and how many of those stand in a commit."""
        self._legacy, self.legacy_end = legacy, legacy.end
        """What was said of the partition before it was ours, and up to where."""
        self.marked = start
        """Up to here, a commit says, messages may have been started."""
        self.lead = SMALLEST_LEAD
        self._given = 0
        self.wanting = False
        """Somebody waits for the mark to move on."""
        self.share(1)
        self.paused = self.fenced = False
        self.full_since = 0.0
        self.dirty = True
        self._bytes = 0

    def share(self, lanes: int) -> None:
        """Keep ready no more than what is due to one of so many lanes."""
        self.limit = max(SMALLEST_BUFFER, min(LARGEST_BUFFER, MOST_BUFFERED // lanes))
        self.most_bytes = max(LEAST_BYTES, MOST_BYTES // lanes)

    # --- fetched ---------------------------------------------------------------------------------------------

    def feed(self, records: Sequence[Record]) -> None:
        """Records were fetched; those that are finished already are not given out again."""
        self.ledger.see([record.offset for record in records])
        if records[0].offset < self.legacy_end:
            finished = self._legacy.finished
            for record in records:
                if offsets.contains(finished, record.offset):
                    self.ledger.finish(record.offset)
                else:
                    self._keep(record)
            self.dirty = True
        else:
            self.buffer.extend(records)
            self._bytes += sum([len(record.value) for record in records if record.value is not None])

    def _keep(self, record: Record) -> None:
        self.buffer.append(record)
        self._bytes += len(record.value or b"")

    @property
    def full(self) -> bool:
        """Whether to fetch no more for now."""
        return len(self.buffer) >= self.limit or self._bytes >= self.most_bytes or self._crowded(MOST_OPEN)

    @property
    def roomy(self) -> bool:
        """Whether to feed it again: a paused one when a good part is used up, or there would be no end of pausing."""
        part = 4 if self.paused else 2
        few = len(self.buffer) <= self.limit // part and self._bytes <= self.most_bytes // part
        return few and not self._crowded(MOST_OPEN // 2)

    def _crowded(self, most: int) -> bool:
        return self.ledger.open + self.ledger.beyond >= most

    # --- given out -------------------------------------------------------------------------------------------

    def take(self, most: int) -> list[Record]:
        """The next records, as far as the mark goes."""
        buffer, marked = self.buffer, self.marked
        taken: list[Record] = []
        while buffer and len(taken) < most and buffer[0].offset < marked:
            taken.append(buffer.popleft())
        self._given += len(taken)
        self._bytes -= sum([len(record.value) for record in taken if record.value is not None])
        if buffer and buffer[0].offset >= marked - self.lead // 2:
            self.wanting = True
        return taken

    def put_back(self, records: Iterable[Record]) -> None:
        """Give these out again, in their order, before all others."""
        for record in sorted(records, key=lambda record: record.offset, reverse=True):
            self.buffer.appendleft(record)
            self._bytes += len(record.value or b"")
        self.dirty = True

    def is_suspect(self, offset: int) -> bool:
        """Whether the one who had the partition before us may have started it."""
        return offsets.contains(self._legacy.suspects, offset)

    def note(self, offset: int, delta: HeaderDelta) -> None:
        """Say this of a message with every commit from now on. Raises NoRoom, and then nothing has changed."""
        notes = {**self.notes, offset: noted(self.notes.get(offset), delta)}
        if not offsets.fit(notes, self.ledger.commit):
            raise NoRoom(f"{self.tp[0]}/{self.tp[1]}: a commit has no room for {len(notes)} notes")
        self.notes = notes
        self.words += 1

    def finish(self, offset: int) -> None:
        """It is done with: acknowledged, or its copy stands elsewhere."""
        self.held.pop(offset, None)
        if offset in self.notes:
            del self.notes[offset]
            self.words += 1
        self.ledger.finish(offset)
        self.dirty = True

    # --- committed -------------------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        """The next offset to be given out."""
        return self.buffer[0].offset if self.buffer else self.ledger.position

    def commit(self, owner: str, *, held: bool = True, ahead: bool = True) -> tuple[int, str, int]:
        """Offset and metadata to commit, and the mark that holds once it is done.

        `held`: whether what is out now shall be a suspect, should it never be settled; what only moves to another
        consumer is none, and its call is no crash. `ahead`: whether more will be given out under this commit.
        """
        at, upcoming = self.ledger.commit, self.next
        if ahead:
            if self.wanting:
                self.lead = min(LARGEST_LEAD, self.lead * GROWTH)
            elif self._given < self.lead // 4:
                self.lead = max(SMALLEST_LEAD, self.lead // 8, 2 * self._given)
        self._given = 0
        self.wanting = False
        mark = upcoming + self.lead if ahead else upcoming
        suspects = [(upcoming, mark)]
        if held and self.held:
            suspects += [(offset, offset + 1) for offset in self.held]
        if at < self.legacy_end:
            suspects += self._legacy.suspects_from(at)
        finished = self.ledger.finished()
        if self.ledger.position < self.legacy_end:
            finished += self._legacy.finished_from(self.ledger.position)
        notes = self.notes if held else self._notes_of_the_living()
        return at, offsets.encode(at, offsets.merged(suspects), finished, notes, owner), mark

    def _notes_of_the_living(self) -> dict[int, Note]:
        """The notes without the crash that was noted before each call that still runs."""
        notes = dict(self.notes)
        for offset, delivery in self.held.items():
            if delivery.noted and offset in notes:
                before = {name: value for name, value in notes[offset].items() if name != headers.CRASHES}
                crashes = delivery.history.crashes
                notes[offset] = before | {headers.CRASHES: crashes} if crashes else before
        return notes


def receipt_of(delivery: Delivery) -> tuple[Lane, Record]:
    """Where a delivery of ours came from."""
    return delivery.receipt  # type: ignore[return-value]
