"""What may be committed, and what the commit says about the rest: pure bookkeeping, with gaps and out of order."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import Event
from eventbus.errors import BrokerError
from eventbus.settlement import Delivery, History
from eventbus_kafka._unread import Unread, piece_of_each
from eventbus_kafka.holes import Holes
from eventbus_kafka.lanes import ENOUGH, LARGEST_LEAD, SMALLEST_LEAD, Lane
from eventbus_kafka.offsets import NOTHING, Ledger, Legacy, NoRoom, Note, contains, decode, encode, merged, ranges_of
from eventbus_kafka.records import Record

OFFSETS = st.lists(st.integers(0, 400), unique=True, max_size=60).map(sorted)


@pytest.mark.parametrize(
    ("seen", "finished", "commit", "beyond"),
    [
        ([], [], 5, []),
        ([5, 6, 7], [], 5, []),
        ([5, 6, 7], [5], 6, []),
        ([5, 6, 7], [7], 5, [(7, 8)]),
        ([5, 6, 7], [7, 6], 5, [(6, 8)]),
        ([5, 6, 7], [7, 6, 5], 8, []),
        ([5, 9, 20], [5], 9, []),
        ([5, 9, 20], [9], 5, [(9, 10)]),
        ([5, 9, 20, 21], [20, 9], 5, [(9, 21)]),
        ([5, 9, 20], [5, 9, 20], 21, []),
    ],
    ids=["nothing", "none", "first", "last", "two", "all", "gap", "beyond-gap", "over-gap", "all-with-gaps"],
)
def test_the_lowest_unfinished_offset_is_committed(
    seen: list[int], finished: list[int], commit: int, beyond: list[tuple[int, int]]
) -> None:
    """Everything below the commit is finished; offsets that do not exist are not waited for."""
    ledger = Ledger(5)
    ledger.see(seen)
    for offset in finished:
        ledger.finish(offset)
    assert (ledger.commit, ledger.finished()) == (commit, beyond)


@given(OFFSETS, st.randoms(use_true_random=False), st.integers(0, 60))
def test_no_commit_ever_passes_an_unfinished_message(seen: list[int], random: object, number: int) -> None:
    """Finished in whatever order: below the commit nothing is open, and a restart handles exactly the rest."""
    order = list(seen)
    random.shuffle(order)  # type: ignore[attr-defined]
    ledger = Ledger(0)
    ledger.see(seen)
    done = set(order[:number])
    for offset in order[:number]:
        ledger.finish(offset)
        assert all(below in done for below in seen if below < ledger.commit)
    left = [offset for offset in seen if offset not in done]
    assert ledger.commit == (left[0] if left else ledger.position)
    again = [o for o in seen if o >= ledger.commit and not contains(ledger.finished(), o)]
    assert again == left
    assert ledger.open == len(left)


def test_trailing_markers_are_passed_only_when_nothing_is_open() -> None:
    """The fetcher's own position counts once everything that was seen is finished."""
    ledger = Ledger(0)
    ledger.see([0, 1])
    ledger.finish(1)
    ledger.advance(7)
    assert ledger.commit == 0
    ledger.finish(0)
    assert ledger.commit == 2
    ledger.advance(7)
    assert ledger.commit == 7


def test_an_offset_is_not_seen_twice() -> None:
    """A record from before the position is a bug of ours, and is not passed over in silence."""
    ledger = Ledger(10)
    with pytest.raises(ValueError, match="seen before"):
        ledger.see([9])


@given(OFFSETS, OFFSETS, st.dictionaries(st.integers(100, 140), st.just({"x-crashes": 2}), max_size=5))
def test_metadata_says_what_was_written(
    suspects: list[int], finished: list[int], notes: dict[int, dict[str, str | int]]
) -> None:
    """Ranges and notes come back as they were, from the commit on."""
    mine = [offset + 100 for offset in suspects]
    done = [offset + 100 for offset in finished]
    text = encode(100, ranges_of(mine), ranges_of(done), notes, "me")
    assert len(text) <= 4096
    found = decode(100, text)
    assert found == Legacy(ranges_of(mine), ranges_of(done), notes, "me")


def test_what_does_not_fit_is_left_out_on_the_safe_side() -> None:
    """Thousands of scattered offsets: more suspects and fewer finished ones are said, never the other way round."""
    scattered = list(range(0, 20_000, 2))
    text = encode(0, ranges_of(scattered), ranges_of(scattered))
    assert len(text) <= 4096
    found = decode(0, text)
    assert all(contains(found.suspects, offset) for offset in scattered)
    said = [offset for offset in range(20_000) if contains(found.finished, offset)]
    assert said
    assert set(said) <= set(scattered)


def test_long_texts_of_notes_go_first() -> None:
    """Attempts survive where their history does not fit: first without its long texts, then without any."""
    when = "2026-01-01T00:00:00.000Z"
    notes: dict[int, Note] = {n: {"x-retries": 3, "x-enqueued-at": when, "x-attempts": "y" * 1500} for n in range(5)}
    found = decode(0, encode(0, (), (), notes))
    assert found.notes == {offset: {"x-retries": 3, "x-enqueued-at": when} for offset in range(5)}
    many: dict[int, Note] = {offset: {"x-retries": 3, "x-enqueued-at": when} for offset in range(100)}
    assert decode(0, encode(0, (), (), many)).notes == {offset: {"x-retries": 3} for offset in range(100)}


def test_too_many_notes_do_not_keep_a_commit_from_being_written() -> None:
    """Another's commit may have had more room than ours: what is nearest is kept, and all of it fits."""
    notes: dict[int, Note] = {offset: {"x-retries": 3, "x-due-at": 1794995337127} for offset in range(500)}
    text = encode(0, [(0, 500)], (), notes, "me")
    assert len(text) <= 4096
    found = decode(0, text)
    assert 30 < len(found.notes) < 500
    assert list(found.notes) == list(range(len(found.notes)))


def test_a_note_without_room_is_refused_and_changes_nothing() -> None:
    """Whoever is told that a note stands can rely on it, so one too many is told at once."""
    lane = _lane()
    _feed(lane, *range(500))
    for offset in range(30):
        lane.note(offset, {"x-retries": 1, "x-due-at": 1794995337127})
    kept = dict(lane.notes)
    with pytest.raises(NoRoom):
        lane.note(499, {f"x-{n}": n for n in range(500)})
    assert lane.notes == kept
    assert _commit(lane).notes == kept


@pytest.mark.parametrize(
    "text", ["", "x", "{", "[]", "{}", '{"s":"5-1"}', '{"s":7}', '{"n":[]}', '{"d":"a-b"}', "{" * 3000], ids=repr
)
def test_a_strangers_metadata_says_nothing(text: str) -> None:
    """Another tool's commit, or a spoiled one: no suspects, nothing finished, no exception."""
    found = decode(3, text)
    assert (found.suspects, found.finished, dict(found.notes)) in (((), (), {}), ([], [], {}))


def test_ranges_are_merged() -> None:
    """Overlapping, touching and empty ranges become the fewest."""
    assert merged([(5, 7), (1, 3), (3, 4), (6, 9), (8, 8)]) == [(1, 4), (5, 9)]
    assert not contains([], 1)
    assert [offset for offset in range(10) if contains([(1, 4), (5, 9)], offset)] == [1, 2, 3, 5, 6, 7, 8]


# --- a lane: a partition in the hands of a consumer -------------------------------------------------------------


def _feed(lane: Lane, *numbers: int, size: int = 10) -> None:
    """Records with these offsets were fetched."""
    records = iter([SimpleNamespace(offset=number, value=b"x" * 10) for number in numbers])
    batch = SimpleNamespace(records=records, start=numbers[0], offset=numbers[-1], fetched=size)
    lane.feed(Unread([batch], "here"))  # type: ignore[list-item]


def _lane(start: int = 0, legacy: Legacy = NOTHING) -> Lane:
    return Lane(("t", 0), start, legacy, tier=None)


def _hold(lane: Lane, record: object, *, crashes: int = 0, noted: bool = False) -> None:
    delivery = Delivery(Event("a"), "s", "q", (lane, record), History(crashes=crashes), noted=noted)
    lane.held[record.offset] = delivery  # type: ignore[attr-defined]


def _give_out(lane: Lane, number: int, *, of: int) -> list[Record]:
    _feed(lane, *range(of))
    _commit(lane)
    taken = lane.take(number)
    for record in taken:
        _hold(lane, record)
    return taken


def _commit(lane: Lane, now: float = 0.0, **options: bool) -> Legacy:
    at, text, mark = lane.commit("me", now, **options)
    if options.get("ahead", True):
        lane.committed(mark, now)
    return decode(at, text)


def test_nothing_is_given_out_before_a_commit_says_so() -> None:
    """A message that kills its process at once has left its trace before it was called."""
    lane = _lane()
    _feed(lane, 0, 1, 2)
    assert lane.take(10) == []
    assert lane.wanting
    said = _commit(lane)
    assert len(lane.take(10)) == 3
    assert all(contains(said.suspects, offset) for offset in (0, 1, 2))


def test_the_lead_grows_while_messages_come_fast_and_shrinks_again() -> None:
    """A busy partition waits for no commit; an idle one has few suspects after a crash."""
    lane = _lane()
    _feed(lane, *range(20_000))
    leads, now = [], 0.0
    for _ in range(8):
        _commit(lane, now)
        lane.take(100_000)
        leads.append(lane.lead)
        now += 0.01
    assert leads[0] == SMALLEST_LEAD
    assert leads[-1] == LARGEST_LEAD
    while lane.in_hand:
        _commit(lane, now)
        lane.take(100_000)
    for _ in range(20):
        now += 0.2
        _commit(lane, now)
    assert lane.lead == SMALLEST_LEAD


def test_a_backlog_of_slow_messages_has_few_suspects() -> None:
    """Twenty a second, and thousands wait: a crash leaves those of a moment, not all that a fast partition may lead."""
    lane = _lane()
    _feed(lane, *range(5_000))
    leads, now = [], 0.0
    for _ in range(30):
        _commit(lane, now)
        for _ in range(4):  # as it is when a place gets free
            now += 0.05
            lane.take(1)
        leads.append(lane.lead)
    assert set(leads) == {SMALLEST_LEAD}


def test_after_a_crash_what_was_out_is_suspect_and_what_was_finished_is_not_handled_again() -> None:
    """The next owner reads the last commit, and knows."""
    lane = _lane()
    _feed(lane, *range(10))
    _commit(lane)
    for record in lane.take(4):
        _hold(lane, record)
    lane.finish(2)
    at, text, _ = lane.commit("me", 0.0)
    heir = _lane(at, decode(at, text))
    _feed(heir, *range(10))
    assert [record.offset for record in heir.peek(100)] == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert [offset for offset in (0, 1, 3) if heir.is_suspect(offset)] == [0, 1, 3]


def test_what_was_released_or_never_given_out_is_no_suspect_after_an_orderly_end() -> None:
    """Only what was held and never settled is."""
    lane = _lane()
    taken = _give_out(lane, 4, of=6)
    for record in taken[1:3]:
        del lane.held[record.offset]
    lane.put_back(taken[1:3])
    assert [record.offset for record in lane.peek(100)] == [1, 2, 4, 5]
    said = _commit(lane, ahead=False)
    assert list(said.suspects) == [(0, 1), (3, 4)]
    assert list(_commit(lane, ahead=False, held=False).suspects) == []


def test_what_is_put_back_takes_its_place_again() -> None:
    """In whatever turn they come back: the next to be given out is the lowest, and the commit begins with it."""
    lane = _lane()
    taken = _give_out(lane, 4, of=6)
    for record in (taken[1], taken[3], taken[2]):
        del lane.held[record.offset]
        lane.put_back([record])
    assert lane.next == 1
    assert list(_commit(lane, ahead=False).suspects) == [(0, 1)]
    assert [record.offset for record in lane.take(10)] == [1, 2, 3, 4, 5]


def test_suspicion_and_notes_survive_a_second_crash() -> None:
    """What the owner before us said about messages we have not come to is said again by us."""
    legacy = Legacy([(0, 1), (5, 6)], [(3, 4)], {5: {"x-crashes": 2}}, "other")
    lane = _lane(0, legacy)
    _feed(lane, 0, 1)
    _commit(lane)
    lane.take(1)
    lane.finish(0)
    said = _commit(lane, ahead=False)
    assert contains(said.suspects, 5)
    assert contains(said.finished, 3)
    assert said.notes == {5: {"x-crashes": 2}}


def test_a_call_that_moves_to_another_consumer_is_no_crash() -> None:
    """The note for a running call is taken back when its partition moves; it stands again if it comes back."""
    lane = _lane()
    _feed(lane, 0)
    _commit(lane)
    _hold(lane, lane.take(1)[0], crashes=1, noted=True)
    lane.notes[0] = {"x-crashes": 2}
    assert _commit(lane, held=False, ahead=False).notes == {0: {"x-crashes": 1}}
    assert _commit(lane).notes == {0: {"x-crashes": 2}}


def test_a_lane_is_full_by_number_bytes_and_spread() -> None:
    """No more is taken of what is fetched, and some again only when a good part is used up."""
    lane = _lane()
    _feed(lane, *range(ENOUGH))
    assert lane.full
    lane.marked = 10**6
    lane.take(3)
    assert not lane.full
    assert not lane.roomy
    lane.take(ENOUGH // 2)
    assert lane.roomy
    lane.paused = True
    assert not lane.roomy
    lane.take(ENOUGH // 4)
    assert lane.roomy
    heavy = _lane()
    _feed(heavy, 0, 1, 2, size=heavy.room)
    heavy.marked = 10**6
    heavy.take(2)
    assert heavy.full, "two of three large ones are gone, and all of their bytes are still here"
    heavy.take(1)
    assert not heavy.full
    wide = _lane()
    wide.ledger.see(range(60_000))
    assert wide.full
    for offset in range(1, 60_000):
        wide.ledger.finish(offset)
    assert wide.full, "one slow message holds tens of thousands of finished ones"
    wide.ledger.finish(0)
    assert not wide.full


@pytest.mark.parametrize(("partitions", "kilobytes"), [(0, 256), (1, 256), (128, 256), (1024, 32), (100_000, 16)])
def test_many_partitions_are_fetched_in_smaller_pieces(partitions: int, kilobytes: int) -> None:
    """A consumer of a thousand partitions takes hardly more memory than one of a hundred."""
    assert piece_of_each(partitions) == kilobytes * 1024


def test_records_are_read_when_they_are_taken() -> None:
    """What nobody takes stays the bytes that came, also where offsets are missing."""
    lane = _lane()
    _feed(lane, 0, 1, 2, 5, 6, 9)
    _feed(lane, 12, 13)
    assert (lane.in_hand, lane.fetched, lane.next, len(lane.buffer)) == (14, 14, 0, 0)
    assert lane.take(2) == []
    assert not lane.buffer
    lane.marked = 6
    assert [record.offset for record in lane.take(2)] == [0, 1]
    assert [record.offset for record in lane.take(10)] == [2, 5]
    lane.marked = 100
    assert [record.offset for record in lane.take(10)] == [6, 9, 12, 13]
    assert (lane.in_hand, lane.fetched, lane.next, lane.full) == (0, 14, 14, False)


def test_what_cannot_be_read_is_never_passed_over() -> None:
    """A spoiled batch stops its partition, again and again, and says where it is."""

    def spoiled(first: int = 0) -> Iterator[object]:
        yield SimpleNamespace(offset=first)
        raise ValueError("no such codec")

    batches = [SimpleNamespace(records=spoiled(), start=0, offset=4, fetched=9)]
    batches += [SimpleNamespace(records=iter([SimpleNamespace(offset=5)]), start=5, offset=5, fetched=9)]
    unread = Unread(batches, "kafka:9092 t/0")  # type: ignore[arg-type]
    assert [record.offset for record in unread.read(1)] == [0]
    for _ in range(3):
        with pytest.raises(BrokerError, match=r"kafka:9092 t/0: .* from offset 1 on .*no such codec"):
            unread.read(1)
    assert unread.left
    lane = _lane()
    _feed(lane, 0, 1)
    lane.feed(Unread([SimpleNamespace(records=spoiled(2), start=2, offset=4, fetched=9)], "t/0"))  # type: ignore[list-item]
    lane.marked = 100
    assert [record.offset for record in lane.take(10)] == [0, 1, 2], "what stands before it is given out"
    with pytest.raises(BrokerError):
        lane.take(10)


def test_holes_are_what_was_read_and_had_no_record() -> None:
    """A stretch grows at its end, and loses its head to retention; a topic that was made anew is unknown."""
    holes = Holes()
    assert holes.begin(10, 30) == 10
    holes.add([10, 11, 14], 15)
    assert (holes.end, holes.missing(10), holes.missing(13)) == (15, 2, 1)
    assert holes.begin(13, 30) == 15
    holes.add([16, 17], 20)
    assert (holes.end, holes.missing(13), holes.missing(15)) == (20, 4, 3)
    holes.add([14, 16, 20], 21)  # somebody else read the same meanwhile
    assert (holes.end, holes.missing(13)) == (21, 4)
    assert holes.begin(25, 30) == 25
    assert holes.missing(25) == 0
    holes.add([], 30)
    assert holes.missing(25) == 5
    assert (holes.begin(0, 3), holes.missing(0)) == (0, 0)
