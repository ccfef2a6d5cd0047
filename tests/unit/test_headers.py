"""The reserved headers: read whatever a stranger wrote, written so that everybody can read them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import ConsumerStatus, Delivery, Event, Outcome, Policy, decide
from eventbus import headers as h
from eventbus.settlement import FRESH, Ack, History, Park, Requeue, Retry

NOW = 1_750_000_000.123
MILLISECOND = 0.001

HOSTILE_TEXTS = [
    "",
    " ",
    "-1",
    "+1",
    "1.5",
    "1e3",
    "NaN",
    "Infinity",
    "٣",
    "²",
    "0x10",
    "1_000",
    " 7",
    "9" * 16,
    "9" * 17,
    "9" * 5000,
    "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59.999999Z",
    "9999-12-31T23:59:59-23:59",
    "1969-12-31T23:59:59Z",
    "2025-02-30T00:00:00Z",
    "2025-06-01",
    "2025-06-01T12:00:00",
    "2025-W23-1",
    "\x00",
    "[",
    "{}",
    "null",
    "true",
    '"abc"',
    "[[]]",
    "[[1]]",
    "[1,2,3]",
    "[[1,2,3,4]]",
    '[[1,NaN,"x"]]',
    '[[1,Infinity,"x"]]',
    '[[Infinity,1,"x"]]',
    '[[NaN,1,"x"]]',
    '[[1,1e300,"x"]]',
    '[[1,-1e300,"x"]]',
    "[[1,1" + "0" * 400 + ',"x"]]',
    "[[1" + "0" * 400 + ',1,"x"]]',
    '[[1,253402300800000,"x"]]',
    '[[1,-99999999999999,"x"]]',
    '[[-5,1,"x"]]',
    '[["1","2","3"]]',
    "[[1,2,null]]",
    '[[1,2,"' + "x" * 4000 + '"]]',
    '[[1,2,"\\ud800"]]',
    '[[1,2,"a\\nb"]]',
    '{"123":1}',
    "[" * 4000,
    "[[" * 1000 + "]]" * 1000,
    "\ud800",
]
HOSTILE_VALUES = [
    None,
    True,
    False,
    0,
    -1,
    7,
    2**53,
    2**53 + 1,
    10**400,
    -(10**400),
    0.5,
    7.0,
    float("nan"),
    float("inf"),
    [],
    [1],
    {},
    {"a": 1},
    (),
    object(),
    datetime(2025, 6, 1, tzinfo=timezone.utc),
    b"",
    b"\xff\xfe",
    b"7",
    b"2025-06-01T12:00:00Z",
    b'[[1,2,"x"]]',
    [[[[[]]]]],
    {"x-retries": {"x-retries": 1}},
    bytearray(b"7"),
]
ALL_HOSTILE = HOSTILE_VALUES + HOSTILE_TEXTS + [text.encode("utf-8", "replace") for text in HOSTILE_TEXTS]
RESERVED = sorted(h.RESERVED)


def delivery(history: History = FRESH, **attributes: object) -> Delivery:
    return Delivery(Event("order.created", id="1"), "wms", "wms.queue.wms", history=history, **attributes)  # type: ignore[arg-type]


def check_survives(story: dict[str, object]) -> None:
    """The whole way of a message with such a past: retried, requeued, parked, acknowledged."""
    history = h.read_history(story)
    assert history.retries >= 0
    assert history.requeues >= 0
    assert history.crashes >= 0
    for outcome, kinds in [
        (Outcome(status=500), (Retry, Park)),
        (Outcome(status=425), (Requeue, Park)),
        (Outcome(verdict=ConsumerStatus.PARK), (Park,)),
        (Outcome(), (Ack,)),
    ]:
        settlement = decide(outcome, delivery(history), Policy(), now=NOW)
        assert isinstance(settlement, kinds)
        if not isinstance(settlement, Ack):
            h.read_history(h.merge(story, settlement.headers))


@pytest.mark.parametrize("name", RESERVED)
def test_a_malformed_header_never_stops_a_message(name):
    """Whatever value a reserved header has, its message can be read, retried, requeued and parked."""
    failures = []
    for value in ALL_HOSTILE:
        try:
            check_survives({name: value})
        except Exception as error:  # noqa: BLE001 - all of them are collected, to be shown at once
            failures.append(f"{str(value)[:60]!r}: {type(error).__name__}: {error}")
    assert failures == []


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=50)
    | st.binary(max_size=50)
    | st.datetimes()
    | st.sampled_from(["9" * 30, "2025-06-01T12:00:00Z", '[[1,2,"x"]]'])
    | st.lists(st.tuples(st.integers(), st.integers(), st.text(max_size=5)).map(list), max_size=3).map(json.dumps),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(RESERVED) | st.text(max_size=10), ANYTHING, max_size=6))
def test_reading_arbitrary_headers_never_raises(story):
    """Any value at all under any name: a history comes out."""
    history = h.read_history(story)
    assert isinstance(history, History)
    assert min(history.retries, history.requeues, history.crashes, history.redriven) >= 0
    assert isinstance(history.attempts, str)
    assert isinstance(h.parse_attempts(story.get(h.ATTEMPTS)), list)


def test_a_message_without_ours_is_fresh():
    """The common case costs no object."""
    assert h.read_history({}) is FRESH
    assert h.read_history({"traceparent": "x", "x-something": 1}) is FRESH


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7),
        ("7", 7),
        (b"7", 7),
        (0, 0),
        (2**53, 2**53),
        ("007", 7),
        (2**53 + 1, 0),
        (-7, 0),
        ("-7", 0),
        (7.0, 0),
        (True, 0),
        (None, 0),
        ("seven", 0),
        ("٣", 0),
        ("²", 0),
        ("9" * 20, 0),
        (b"\xff", 0),
        ([7], 0),
        ({}, 0),
    ],
    ids=ascii,
)
def test_numbers(value, number):
    """A count is a whole number, as number, text or bytes; anything else counts as absent."""
    assert h.number(value) == number


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1970-01-01T00:00:10Z", 10.0),
        (b"1970-01-01T00:00:10Z", 10.0),
        ("1970-01-01T00:00:10", 10.0),
        ("1970-01-01T01:00:10.500+01:00", 10.5),
        ("1969-01-01T00:00:00Z", 0.0),
        ("", 0.0),
        ("yesterday", 0.0),
        (10, 0.0),
        (10.0, 0.0),
        (None, 0.0),
        (b"\xff", 0.0),
        ("2025-06-01T12:00:00Z" + " " * 40, 0.0),
    ],
    ids=ascii,
)
def test_moments(value, seconds):
    """A time is ISO 8601 text or bytes, UTC unless it says otherwise; anything else counts as absent."""
    assert h.moment(value) == seconds


@pytest.mark.parametrize("due", [2**53, 10**15], ids=["the year 287396", "the year 33658"])
def test_a_due_time_that_no_calendar_has_counts_as_absent(due):
    """A stranger's x-due-at must not bury a message for thousands of years, neither handled nor parked."""
    assert h.read_history({h.DUE_AT: due}).due_at == 0.0


@given(ANYTHING)
def test_every_moment_can_be_written_again(value):
    """What is read as a time can be printed as one: a forged year 9999 must not stop a retry."""
    assert h.iso(h.moment(value))


@pytest.mark.parametrize(
    "text", ["9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"]
)
def test_the_ends_of_the_calendar_can_be_written_again(text):
    """The same, at its edges."""
    assert h.iso(h.moment(text))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-retries", 99),
        ("X-Retries", 99),
        ("x-requeues", 1),
        ("x-crashes", 3),
        ("x-due-at", 10**15),
        ("x-redriven-by", "root"),
        ("x-redriven-anything", "x"),
        ("x-final-error", "x"),
        ("x-park-reason", "x"),
        ("x-attempts", "[]"),
        ("x-death", "[]"),
    ],
)
def test_a_publisher_cannot_forge_a_past(name, value):
    """Reserved names (spec sections 4 and 5), in any case of letters, are taken away by publish."""
    assert dict(h.strip_reserved({name: value, "mine": 1})) == {"mine": 1}


@pytest.mark.parametrize("name", ["x-request-id", "retries", "x-retries-of-mine", "xx-retries", "traceparent"])
def test_foreign_headers_are_left_alone(name):
    """Only ours are ours; and where there is nothing to strip nothing is copied."""
    headers = {name: "1"}
    assert h.strip_reserved(headers) is headers


def test_merge_changes_neither_side():
    """A delta sets and takes away, on a copy."""
    before, delta = {"a": 1, "b": 2}, {"b": None, "c": 3, "missing": None}
    assert h.merge(before, delta) == {"a": 1, "c": 3}
    assert (before, delta) == ({"a": 1, "b": 2}, {"b": None, "c": 3, "missing": None})


TIMES = st.integers(1, 4_000_000_000_000).map(lambda ms: ms / 1000)
PASTS = st.builds(
    History,
    retries=st.integers(0, 2**52),
    requeues=st.integers(0, 2**52),
    crashes=st.integers(0, 100),
    redriven=st.integers(0, 100),
    first_received_at=st.just(0.0) | TIMES,
    enqueued_at=TIMES,
    first_failed_at=st.just(0.0) | TIMES,
)


@given(PASTS, TIMES, st.floats(0, 1e6), st.text(max_size=80))
def test_what_a_retry_writes_is_read_again(past, now, delay, reason):
    """One more retry, the due time to the millisecond, the first failure kept, the attempt appended."""
    delta = h.for_retry(delivery(past), Outcome(status=500, reason=reason), now, now + delay)
    after = h.read_history(h.merge({h.REQUEUES: past.requeues, h.CRASHES: past.crashes}, delta))
    assert after.retries == past.retries + 1
    assert after.requeues == past.requeues
    assert after.crashes == 0
    assert after.due_at == pytest.approx(now + delay, abs=MILLISECOND)
    assert after.first_failed_at == pytest.approx(past.first_failed_at or now, abs=MILLISECOND)
    assert after.last_failed_at == pytest.approx(now, abs=MILLISECOND)
    assert after.enqueued_at == pytest.approx(past.enqueued_at, abs=MILLISECOND)
    (number, at, text), *more = h.parse_attempts(after.attempts)
    assert more == []
    assert (number, text[:3]) == (past.retries + 1, "500")
    assert at == pytest.approx(now, abs=MILLISECOND)


@given(PASTS, TIMES, st.floats(0, 1e6))
def test_what_a_requeue_writes_is_read_again(past, now, delay):
    """One more requeue, the retries untouched, the first receipt kept."""
    delta = h.for_requeue(delivery(past), now, now + delay, told_not_yet=True)
    after = h.read_history(h.merge({h.RETRIES: past.retries}, delta))
    assert (after.retries, after.requeues) == (past.retries, past.requeues + 1)
    assert after.first_received_at == pytest.approx(past.first_received_at or now, abs=MILLISECOND)
    assert after.due_at == pytest.approx(now + delay, abs=MILLISECOND)


def test_the_history_of_attempts_is_a_ring():
    """Two hundred failures with long texts stay within 2 KiB; the newest are kept, in order."""
    history = FRESH
    for attempt in range(200):
        outcome = Outcome(status=500, reason=f"{attempt} " + '"é\\' * 100)
        history = h.read_history(h.for_retry(delivery(history), outcome, NOW + attempt, NOW + attempt + 5))
        assert len(history.attempts.encode()) <= 2048
    numbers = [number for number, _, _ in h.parse_attempts(history.attempts)]
    assert numbers == list(range(201 - len(numbers), 201))
    assert len(numbers) >= 5


def test_an_in_place_retry_keeps_the_rest_of_the_past():
    """The delta goes on top of what the message was."""
    past = History(retries=1, requeues=4, redriven=2, first_received_at=NOW - 50)
    after = h.after_retry(past, h.for_retry(delivery(past), Outcome(status=500), NOW, NOW + 5))
    assert (after.retries, after.requeues, after.redriven) == (2, 4, 2)
    assert (after.first_received_at, after.due_at) == (NOW - 50, 0.0)


def test_parking_leaves_out_what_is_not_known():
    """No status, no code, no exception: no such headers; the due time goes."""
    delta = h.for_parking(delivery(), Outcome(reason="x"), "expired", "x", NOW)
    assert [name for name, value in delta.items() if value is None and name in h.OF_DEAD_LETTERS] == [
        h.FINAL_STATUS,
        h.ERROR_TYPE,
        h.ERROR_CODE,
    ]
    assert delta[h.DUE_AT] is None
    assert delta[h.FINAL_RETRIES] == 0


@pytest.mark.parametrize("error", ["", " ", "\n\r\n", "\x00"], ids=ascii)
def test_the_final_error_is_never_empty(error):
    """Where there is no text the reason stands for it."""
    assert h.for_parking(delivery(), Outcome(), "crash-loop", error, NOW)[h.FINAL_ERROR] == "crash-loop"


def test_a_redrive_goes_on_counting():
    """Where it was parked is taken away, who re-drove it is added, the retries stay."""
    parked = h.merge({}, h.for_parking(delivery(History(retries=3)), Outcome(status=500), "max-retries", "x", NOW))
    delta = h.for_redrive(parked, "ops\r\nx-evil: 1", NOW)
    after = h.merge(parked, delta)
    assert not set(after) & set(h.OF_DEAD_LETTERS)
    assert after[h.RETRIES] == 3
    assert after[h.REDRIVEN_COUNT] == 1
    assert after[h.REDRIVEN_AT] == h.iso(NOW)
    assert "\n" not in after[h.REDRIVEN_BY]
    assert "\r" not in after[h.REDRIVEN_BY]
    assert h.for_redrive(after, "ops", NOW)[h.REDRIVEN_COUNT] == 2


def test_a_redrive_can_begin_again():
    """reset_attempts gives all retries back."""
    parked = h.merge({}, h.for_parking(delivery(History(retries=3)), Outcome(status=500), "max-retries", "x", NOW))
    after = h.merge(parked, h.for_redrive(parked, "ops", NOW, reset_attempts=True))
    assert h.read_history(after).retries == 0


@pytest.mark.parametrize(
    "count", [None, "many", -1, 10**400, b"\xff"], ids=["none", "text", "negative", "huge", "bytes"]
)
def test_a_spoiled_redrive_count_begins_at_one(count):
    """A malformed count counts as absent."""
    assert h.for_redrive({h.REDRIVEN_COUNT: count}, "ops", NOW)[h.REDRIVEN_COUNT] == 1


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome(), "failed"),
        (Outcome(status=500), "500"),
        (Outcome(status=500, reason="boom"), "500: boom"),
        (Outcome(code="550", status=500, reason="boom"), "550: boom"),
        (Outcome(error=KeyError("a")), "KeyError: 'a'"),
        (Outcome(error=ValueError()), "ValueError"),
        (Outcome(error=ValueError("x"), reason="mine"), "ValueError: mine"),
    ],
    ids=str,
)
def test_describe(outcome, text):
    """The "code: text" of seed 0, never empty."""
    assert h.describe(outcome) == text


@given(st.text(max_size=300), st.integers(10, 200))
def test_cut_keeps_within_its_limit(text, limit):
    """At most that many bytes of UTF-8, one line; short plain text is left as it is."""
    short = h.cut(text, limit)
    assert len(short.encode()) <= limit
    assert not any(ord(c) < 32 or ord(c) == 127 for c in short)
    if text.isprintable() and len(text.encode()) <= limit:
        assert short == text.strip()


@pytest.mark.parametrize(
    ("headers", "least"),
    [
        ({"a": "b"}, 2),
        ({"a": "é" * 1000}, 2001),
        ({"a": b"x" * 1000}, 1001),
        ({"é" * 1000: ""}, 2000),
        ({"a": 10**18}, 9),
        ({"a": None}, 1),
    ],
    ids=["text", "two-byte letters", "bytes", "two-byte name", "number", "null"],
)
def test_sizes_are_never_underestimated(headers, least):
    """What publish takes for small enough must be so in bytes, not in characters."""
    assert h.size_of(headers.items()) >= least


def test_times_are_written_to_the_millisecond_in_utc():
    """One form for all times in headers."""
    assert h.iso(1_750_000_000.1236) == "2025-06-15T15:06:40.123Z"
    assert h.moment(h.iso(NOW)) == pytest.approx(NOW, abs=MILLISECOND)
    assert h.iso(timedelta(days=1).total_seconds()) == "1970-01-02T00:00:00.000Z"
