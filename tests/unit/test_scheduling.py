"""Lanes and the waiting room: pure structures, time comes in as an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.scheduling.lanes import DIVERT_CAP, PATIENCE, Lane, divert_delay
from eventbus.scheduling.waiting import WaitingRoom


def lane(items: int = 0, *, limit: int = 2, share: int = 4, at: float = 0.0) -> Lane[int]:
    made: Lane[int] = Lane(limit, share)
    for item in range(items):
        made.push(item, at)
    return made


# --- a lane --------------------------------------------------------------------------------------------------


def test_first_in_first_out():
    """Items are taken in the order they came."""
    made = lane(3, limit=3)
    assert [made.take(), made.take(), made.take(), made.take()] == [0, 1, 2, None]


def test_never_more_than_the_limit_run():
    """A full lane gives nothing until a call ends."""
    made = lane(3, limit=2)
    assert (made.take(), made.take(), made.take()) == (0, 1, None)
    made.running -= 1
    made.in_hand -= 1
    assert made.take() == 2
    assert (made.running, made.in_hand) == (2, 2)


def test_an_item_that_is_false_is_still_an_item():
    """Zero is taken like any other; None means nothing is there."""
    made = lane(1)
    assert made.take() == 0
    assert made.take() is None


@pytest.mark.parametrize(
    ("ready", "size", "window", "now", "batches"),
    [
        (0, 10, 1.0, 99.0, 0),
        (9, 10, 1.0, 0.5, 0),
        (10, 10, 1.0, 0.0, 1),
        (25, 10, 1.0, 0.5, 2),
        (25, 10, 1.0, 1.0, 3),
        (1, 10, 1.0, 0.999, 0),
        (1, 10, 1.0, 1.0, 1),
        (3, 1, 1.0, 0.0, 3),
    ],
)
def test_how_many_batches_can_start(ready, size, window, now, batches):
    """Full ones at once; one that is not full when its first item has waited for the window."""
    assert lane(ready).batches(size, window, now) == batches


def test_a_batch_is_full_or_has_waited():
    """At most `size`, in order; the rest waits for its own window."""
    made = lane(3, limit=9)
    made.push(3, 0.9)
    assert made.take_batch(3, 1.0, 0.0) == [0, 1, 2]
    assert made.take_batch(3, 1.0, 1.8) is None
    assert made.take_batch(3, 1.0, 1.9) == [3]
    assert (made.running, made.in_hand) == (2, 4)


def test_the_limit_of_a_batch_lane_counts_calls():
    """Two batches of two run; the third waits for one of them to end."""
    made = lane(6, limit=2)
    assert made.take_batch(2, 1.0, 0.0) == [0, 1]
    assert made.take_batch(2, 1.0, 0.0) == [2, 3]
    assert made.take_batch(2, 1.0, 99.0) is None
    assert (made.running, made.in_hand, len(made.ready)) == (2, 4, 2)


def test_a_busy_lane_keeps_everything():
    """Over its share but still keeping up: waiting is cheaper than sending messages round."""
    made = lane(100, share=4)
    assert not made.blocked(PATIENCE)
    assert made.surplus(PATIENCE) == []
    assert len(made.ready) == 100


def test_a_blocked_lane_gives_its_surplus_newest_first():
    """What is beyond its share leaves, running items counted in; the oldest stay, in order."""
    made = lane(6, limit=1, share=4)
    made.take()
    late = PATIENCE + 0.01
    assert made.blocked(late)
    assert made.surplus(late) == [5, 4]
    assert made.surplus(late) == []
    assert [item for _, item in made.ready] == [1, 2, 3]


def test_a_blocked_lane_within_its_share_gives_nothing():
    """Half of the prefetch is its own, however slow it is."""
    assert lane(4, share=4).surplus(99.0) == []


def test_surplus_never_takes_what_runs():
    """A lane whose calls alone fill its share gives up only what is ready."""
    made = lane(3, limit=2, share=1)
    made.take()
    made.take()
    assert made.surplus(99.0) == [2]
    assert made.running == 2


def test_an_empty_lane_is_not_blocked():
    """Long running calls alone block nobody."""
    made = lane(1)
    made.take()
    assert not made.blocked(99.0)
    assert made.surplus(99.0) == []


def test_lost_items_are_dropped():
    """What was taken away by the broker is not started any more."""
    made = lane(5)
    assert made.drop({1, 3, 99}) == [1, 3]
    assert [item for _, item in made.ready] == [0, 2, 4]


def test_clearing_a_lane_gives_what_has_not_started():
    """Running items stay counted."""
    made = lane(3, limit=1)
    made.take()
    assert made.clear() == [1, 2]
    assert made.clear() == []
    assert made.running == 1


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.sampled_from(["push", "take", "batch", "end", "surplus"]), max_size=60),
)
def test_a_lane_loses_and_doubles_nothing(limit, share, steps):
    """Whatever happens in whatever order: each item leaves once, and the limit holds."""
    made: Lane[int] = Lane(limit, share)
    pushed, out, running, now = 0, [], [], 0.0
    for step in steps:
        now += 0.4
        if step == "push":
            made.push(pushed, now)
            pushed += 1
        elif step == "take" and (item := made.take()) is not None:
            running.append([item])
        elif step == "batch" and (items := made.take_batch(3, 1.0, now)) is not None:
            assert 1 <= len(items) <= 3
            running.append(items)
        elif step == "end" and running:
            ended = running.pop(0)
            made.running -= 1
            made.in_hand -= len(ended)
            out += ended
        elif step == "surplus":
            left = made.surplus(now)
            assert not left or len(made.ready) + made.in_hand >= made.share
            out += left
        assert made.running == len(running) <= limit
        assert made.in_hand == sum(map(len, running))
    out += made.clear() + [item for items in running for item in items]
    assert sorted(out) == list(range(pushed))


def test_surplus_stays_away_longer_each_time():
    """5 s doubling up to 5 min, for any count."""
    assert [divert_delay(n) for n in range(8)] == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert divert_delay(2**53) == DIVERT_CAP


# --- the waiting room ----------------------------------------------------------------------------------------


def test_who_is_due_comes_out_in_order():
    """By due time, then by arrival; never early."""
    room: WaitingRoom[str] = WaitingRoom(9)
    for item, due in (("c", 3.0), ("a", 1.0), ("b1", 2.0), ("b2", 2.0)):
        assert room.admit(item, due)
    assert room.next_due == 1.0
    assert room.due(0.999) == []
    assert room.due(2.0) == ["a", "b1", "b2"]
    assert (room.next_due, len(room)) == (3.0, 1)
    assert room.due(99.0) == ["c"]
    assert room.next_due is None


@pytest.mark.parametrize("places", [0, 1, 3])
def test_a_full_room_admits_nobody(places):
    """The number of places is fixed; a place that was left is free again."""
    room: WaitingRoom[int] = WaitingRoom(places)
    assert [room.admit(n, 1.0) for n in range(places + 1)] == [True] * places + [False]
    assert len(room) == places
    room.due(1.0)
    assert room.admit(9, 2.0) is (places > 0)


def test_items_are_never_compared():
    """Two with the same due time need no order of their own."""
    room: WaitingRoom[object] = WaitingRoom(9)
    for _ in range(5):
        room.admit(object(), 1.0)
    assert len(room.due(1.0)) == 5


def test_the_lost_are_forgotten_and_the_rest_still_in_order():
    """Dropping from the middle keeps the heap a heap."""
    room: WaitingRoom[int] = WaitingRoom(99)
    for n in (5, 1, 4, 2, 3, 0):
        room.admit(n, float(n))
    assert sorted(room.drop({0, 4, 77})) == [0, 4]
    assert [room.due(float(n)) for n in range(6)] == [[], [1], [2], [3], [], [5]]


def test_everybody_out():
    """Clearing gives all, once, each with its time."""
    room: WaitingRoom[int] = WaitingRoom(9)
    room.admit(1, 1.0)
    room.admit(2, 9.0)
    assert sorted(room.clear()) == [(1.0, 1), (9.0, 2)]
    assert (room.clear(), len(room), room.next_due) == ([], 0, None)


@given(st.lists(st.floats(0, 100), max_size=30), st.lists(st.floats(0, 100), max_size=10))
def test_nobody_is_early_and_nobody_is_forgotten(dues, moments):
    """For any due times and any moments of looking."""
    room: WaitingRoom[int] = WaitingRoom(1000)
    for number, due in enumerate(dues):
        room.admit(number, due)
    seen: list[int] = []
    for now in sorted(moments):
        out = room.due(now)
        assert all(dues[number] <= now for number in out)
        seen += out
        assert room.next_due is None or room.next_due > now
    assert sorted(seen + [number for _, number in room.clear()]) == list(range(len(dues)))
