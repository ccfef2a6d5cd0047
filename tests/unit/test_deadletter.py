"""DeadLetter: a parked message, read from whatever headers there are."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from eventbus import ConsumerStatus, DeadLetter, Delivery, Event, Outcome, Policy, RetryPolicy, decide
from eventbus import headers as h
from eventbus.adapter import Parked
from eventbus.settlement import History, Park

NOW = 1_750_000_000.0
RESERVED = sorted(h.RESERVED)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def parked(outcome: Outcome, event: Event | None = None, **history: object) -> DeadLetter:
    event = event or Event("mail.due", {"to": "a@b.c"}, id="job-1", tenant="acme")
    delivery = Delivery(event, "mail-gateway", "mail.queue", history=History(**history))  # type: ignore[arg-type]
    policy = Policy(retry=RetryPolicy.exponential(max_attempts=5), permanent_codes={"550"})
    settlement = decide(outcome, delivery, policy, now=NOW)
    assert isinstance(settlement, Park)
    return DeadLetter.read(Parked("7", event, h.merge({}, settlement.headers)), "mail-gateway")


def read(**story: object) -> DeadLetter:
    return DeadLetter.read(
        Parked("7", Event("a"), {name.replace("_", "-"): value for name, value in story.items()}), "wms"
    )


def test_what_parking_writes_a_letter_reads():
    """The whole story, field by field."""
    letter = parked(
        Outcome(status=500, reason="boom"),
        retries=4,
        first_failed_at=NOW - 60,
        enqueued_at=NOW - 100,
        attempts=json.dumps([[1, (NOW - 60) * 1000, "500: first"]]),
    )
    assert (letter.address, letter.id, letter.type, letter.service) == ("7", "job-1", "mail.due", "mail-gateway")
    assert (letter.tenant, letter.original_queue) == ("acme", "mail.queue")
    assert (letter.reason, letter.error, letter.status, letter.retries) == ("max-retries", "500: boom", 500, 4)
    assert (letter.error_type, letter.error_code) == (None, None)
    assert (letter.enqueued_at, letter.first_failed_at) == (at(NOW - 100), at(NOW - 60))
    assert letter.last_failed_at == letter.parked_at == at(NOW)
    assert [(entry.number, entry.at, entry.reason) for entry in letter.attempts] == [
        (1, at(NOW - 60), "500: first"),
        (5, at(NOW), "500: boom"),
    ]
    assert letter.body == b'{"to":"a@b.c"}'
    assert letter.data == {"to": "a@b.c"}


def test_an_exception_is_named():
    """Its type and text, and the error code where there is one."""
    letter = parked(Outcome(error=OSError("mailbox not found"), code="550"))
    assert (letter.reason, letter.error_type, letter.error_code) == ("permanent", "OSError", "550")
    assert letter.error == "550: mailbox not found"


def test_the_entry_of_seed_2():
    """Every field of its schema, with its names, and seven days to live."""
    letter = parked(Outcome(code="421", reason="try later"), retries=4, enqueued_at=NOW - 100)
    assert letter.entry() == {
        "jobId": "job-1",
        "outboxId": "job-1",
        "companyId": "acme",
        "originalData": {"to": "a@b.c"},
        "failedAttempts": 5,
        "lastFailureReason": "421: try later",
        "lastFailureCode": "421",
        "lastFailureTimestamp": h.iso(NOW),
        "enqueuedAt": h.iso(NOW - 100),
        "movedToDLQAt": h.iso(NOW),
        "ttl": 604_800_000,
    }
    assert letter.entry(ttl_ms=5)["ttl"] == 5


def test_the_failure_code_of_seed_2_may_be_the_status():
    """Where there is no code of its own the HTTP status says what happened."""
    assert parked(Outcome(status=500), retries=4).entry()["lastFailureCode"] == "500"
    assert parked(Outcome(error=OSError("x")), retries=4).entry()["lastFailureCode"] is None


def test_the_dlq_metadata_of_seed_3():
    """Its five fields; times in milliseconds."""
    letter = parked(Outcome(error=TimeoutError("no answer")), retries=4)
    assert letter.dlq_metadata() == {
        "original_error": "TimeoutError: no answer",
        "error_type": "TimeoutError",
        "retry_count": 4,
        "last_failure_timestamp": round(NOW * 1000),
        "dlq_published_at": round(NOW * 1000),
    }
    assert parked(Outcome(status=500), retries=4).dlq_metadata()["error_type"] == "max-retries"


@pytest.mark.parametrize("error", ["", None], ids=["empty", "missing"])
def test_an_empty_reason_is_a_validation_error(error):
    """Seed 2: no dead letter without a reason."""
    values = read().model_dump() | {"error": error, "event": Event("a")}
    with pytest.raises(ValidationError, match="error"):
        DeadLetter(**values)


def test_a_letter_without_any_story_is_still_a_letter():
    """A stranger put it there: unknown, but never empty."""
    letter = DeadLetter.read(Parked("7", Event("a"), {}), "wms")
    assert (letter.reason, letter.error, letter.status, letter.retries) == ("unknown", "unknown", None, 0)
    assert (letter.attempts, letter.parked_at, letter.redriven) == ((), None, 0)
    assert letter.entry()["lastFailureReason"] == "unknown"
    assert letter.dlq_metadata()["dlq_published_at"] is None


SPOILED = [
    None,
    "",
    " ",
    True,
    -1,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    [],
    {},
    [1],
    {"a": {"b": 1}},
    object(),
    b"\xff",
    b"",
    "nonsense",
    "9" * 5000,
    "9999-12-31T23:59:59.999999Z",
    "9999-12-31T23:59:59-23:59",
    "0001-01-01T00:00:00+23:59",
    '[[1,NaN,"x"]]',
    '[[1,Infinity,"x"]]',
    '[[1,1e300,"x"]]',
    '[[1,-1e300,"x"]]',
    "[[1,1" + "0" * 400 + ',"x"]]',
    '[[Infinity,1,"x"]]',
    "[" * 100_000,
    "\ud800",
    "a\nb",
]


@pytest.mark.parametrize("name", RESERVED)
def test_a_spoiled_header_counts_as_absent(name):
    """One bad message must not make a whole dead-letter queue unreadable."""
    failures = []
    for value in SPOILED:
        try:
            letter = DeadLetter.read(Parked("7", Event("a"), {name: value}), "wms")
            assert letter.error
            letter.entry()
            letter.dlq_metadata()
            json.dumps(letter.model_dump(mode="json"))
        except Exception as error:  # noqa: BLE001 - all of them are collected, to be shown at once
            failures.append(f"{str(value)[:50]!r}: {type(error).__name__}: {error}")
    assert failures == []


@given(
    st.dictionaries(
        st.sampled_from(RESERVED),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.binary(max_size=30),
    )
)
def test_any_story_is_read(story):
    """Whatever the headers hold, a letter with a reason comes out."""
    letter = DeadLetter.read(Parked("7", Event("a"), story), "wms")
    assert letter.error
    assert letter.retries >= 0


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"text": "é", "number": 5, "null": None}, id="plain"),
        pytest.param({"bytes": b"\xff\x00"}, id="bytes that are no text"),
        pytest.param({"nan": float("nan")}, id="NaN"),
    ],
)
def test_a_letter_can_be_printed_as_json(headers):
    """Whatever headers the publisher sent: nobody wants an exception when looking at a failure."""
    letter = DeadLetter.read(Parked("7", Event("a", b"\xff", headers=headers), {}), "wms")
    assert json.loads(letter.model_dump_json())["id"] == letter.id


@pytest.mark.parametrize("body", [b"\xff\xfe", b"not json"], ids=["binary", "broken JSON"])
def test_data_that_cannot_be_decoded_is_shown_as_bytes(body):
    """Looking at an undecodable letter does not raise."""
    event = Event.from_wire("1", "a", "", at(NOW), body, "application/json")
    assert DeadLetter.read(Parked("7", event, {}), "wms").data == body


def test_the_entry_of_a_binary_letter_can_be_written_as_json():
    """Seed 2's entry is a JSON object, also where the body is none."""
    event = Event("a", b"\xff\x00")
    json.dumps(DeadLetter.read(Parked("7", event, {}), "wms").entry())


def test_a_letter_is_frozen():
    """It tells what was; nobody rewrites it."""
    with pytest.raises(ValidationError):
        read().error = "nothing happened"  # type: ignore[misc]


def test_foreign_headers_are_kept_apart():
    """The publisher's headers as they were; the story is in the fields."""
    event = Event("a", headers={"mine": b"1", "n": 5})
    letter = parked(Outcome(verdict=ConsumerStatus.PARK, reason="why"), event)
    assert letter.headers == {"mine": b"1", "n": 5}
    assert letter.event is event


def test_a_redriven_letter_says_by_whom():
    """The count and the name of the last re-drive."""
    letter = read(x_redriven_count=2, x_redriven_by="ops")
    assert (letter.redriven, letter.redriven_by) == (2, "ops")
