"""One partition in the hands of a consumer: what is fetched, what is held, what may be given out. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from eventbus import headers
from eventbus.errors import BrokerError
from eventbus.settlement import Delivery, HeaderDelta
from eventbus_kafka import offsets
from eventbus_kafka._unread import Unread, piece_of_each
from eventbus_kafka.offsets import Ledger, Legacy, NoRoom, Note, noted
from eventbus_kafka.records import Record

SMALLEST_LEAD: Final = 16
LARGEST_LEAD: Final = 512
"""All of it is suspect once its consumer is gone, and suspects go one by one. When a quarter of it is used up the next
commit is due: the rest lasts while that one is under way, which takes a broker ten milliseconds.

Measured: 256 costs half of the rate in commits; with 4096 a frozen consumer left more than minutes of suspects."""
AHEAD: Final = 0.25
"""The lead is what is given out in so many seconds: as long as two commits of a broker that is busy take."""
SHORTEST: Final = 0.001
"""Seconds that are long enough for a rate: what a commit lets go is given out at once, and no time has passed."""
ENOUGH: Final = 256
"""Records in hand with which a lane takes no more of what was fetched: enough until the next have come."""
MOST_OPEN: Final = 50_000
"""Offsets between the lowest unfinished one and the newest: what a very slow message may hold in memory."""


class Lane:
    """A partition since it was assigned to us. Once it is another's it is fenced, and takes no word any more.

    Before a message is given out, a commit says that it may have been started: else a message that kills its process
    at once would come again and again without a trace. The lead is how far that word goes ahead, so that nobody waits
    for a commit: it grows while messages come fast, and shrinks again.
    """

    __slots__ = (
        "_bytes", "_given", "_legacy", "_since", "_unread", "buffer", "dirty", "fenced", "full_since", "held", "lead",
        "ledger", "legacy_end", "marked", "notes", "paused", "room", "said", "tier", "tp", "wanting", "words",
    )  # fmt: skip

    def __init__(self, tp: tuple[str, int], start: int, legacy: Legacy, *, tier: int | None) -> None:
        self.tp = tp
        self.tier = tier
        """The delay of a retry topic in ms; None for any other."""
        self.ledger = Ledger(start)
        self._unread: deque[Unread] = deque()
        self.buffer: deque[Record] = deque()
        """Those that were read, or put back: the next ones to be given out."""
        self.held: dict[int, Delivery] = {}
        self.notes: dict[int, Note] = {offset: dict(note) for offset, note in legacy.notes.items()}
        self.words = self.said = 0
        """How many notes were taken, and how many of those stand in a commit."""
        self._legacy, self.legacy_end = legacy, legacy.end
        """What was said of the partition before it was ours, and up to where."""
        self.marked = start
        """Up to here, a commit says, messages may have been started."""
        self.lead = SMALLEST_LEAD
        self._given, self._since = 0, 0.0
        self.wanting = False
        """Somebody waits for the mark to move on."""
        self.paused = self.fenced = False
        self.full_since = 0.0
        self.dirty = True
        self._bytes = 0
        self.room = piece_of_each(1)
        """Bytes with which it takes no more, however few records they are."""

    # --- fetched ---------------------------------------------------------------------------------------------

    def feed(self, unread: Unread) -> None:
        """Records were fetched. They are read when they are wanted."""
        self._unread.append(unread)
        self._bytes += unread.size

    def peek(self, most: int) -> Sequence[Record]:
        """The next records, up to so many if there are as many; they are still to be taken."""
        while self._unread and len(self.buffer) < most:
            first = self._unread[0]
            try:
                records = first.read(most - len(self.buffer))
            except BrokerError:
                if self.buffer:  # first what stands before
                    break
                raise
            if records:
                self._see(records)
            if not first.left or self.ledger.position >= first.end:
                self._unread.popleft()
                self._bytes -= first.size
        return self.buffer

    def _see(self, records: Sequence[Record]) -> None:
        """These are read; those that are finished already are not given out again."""
        self.ledger.see([record.offset for record in records])
        if records[0].offset < self.legacy_end:
            finished = self._legacy.finished
            for record in records:
                if offsets.contains(finished, record.offset):
                    self.ledger.finish(record.offset)
                else:
                    self.buffer.append(record)
            self.dirty = True
        else:
            self.buffer.extend(records)

    @property
    def fetched(self) -> int:
        """The next offset to be fetched."""
        return self._unread[-1].end if self._unread else self.ledger.position

    @property
    def in_hand(self) -> int:
        """How many records there are to be taken, at most: some offsets may have none."""
        return len(self.buffer) + (self._unread[-1].end - self.ledger.position if self._unread else 0)

    @property
    def full(self) -> bool:
        """Whether to take no more for now of what is fetched."""
        return self.in_hand >= ENOUGH or self._bytes >= self.room or self._crowded(MOST_OPEN)

    @property
    def roomy(self) -> bool:
        """Whether to feed it again: a paused one when a good part is used up, or there would be no end of pausing."""
        few = self.in_hand <= ENOUGH // (4 if self.paused else 2) and self._bytes < self.room
        return few and not self._crowded(MOST_OPEN // 2)

    def _crowded(self, most: int) -> bool:
        return self.ledger.open + self.ledger.beyond >= most

    # --- given out -------------------------------------------------------------------------------------------

    def take(self, most: int) -> list[Record]:
        """The next records, as far as the mark goes."""
        buffer, marked = self.buffer, self.marked
        self.peek(min(most, marked - self.next))
        if len(buffer) <= most and buffer and buffer[-1].offset < marked:
            taken = list(buffer)
            buffer.clear()
        else:
            taken = []
            while buffer and len(taken) < most and buffer[0].offset < marked:
                taken.append(buffer.popleft())
        self._given += len(taken)
        if (buffer or self._unread) and self.next >= marked - self.lead * 3 // 4:
            self.wanting = True
        return taken

    def put_back(self, records: Iterable[Record]) -> None:
        """Give these out again, each in its place: the next is always the lowest, or a commit would not know of it."""
        self.buffer = deque(sorted([*records, *self.buffer], key=lambda record: record.offset))
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

    def commit(self, owner: str, now: float, *, held: bool = True, ahead: bool = True) -> tuple[int, str, int]:
        """Offset and metadata to commit, and the mark that holds once it is done. `now` is any clock's.

        `held`: whether what is out now shall be a suspect, should it never be settled; what only moves to another
        consumer is none, and its call is no crash. `ahead`: whether more will be given out under this commit.
        """
        at, upcoming = self.ledger.commit, self.next
        if ahead:
            fast = int(self._given * AHEAD / max(SHORTEST, now - self._since))
            least = self.lead if self.wanting else self.lead // 8
            self.lead = min(LARGEST_LEAD, max(SMALLEST_LEAD, least, fast))
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

    def committed(self, mark: int, now: float) -> None:
        """It stands: so far messages may be given out."""
        self.marked, self._since = mark, now

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
