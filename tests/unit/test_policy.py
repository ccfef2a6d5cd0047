"""Policy: backoff, and `decide` as a table over every row of the verdicts (spec section 2)."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from typing import get_args

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from eventbus import (
    ConfigError,
    ConsumerStatus,
    Delivery,
    Event,
    InvalidOutcome,
    InvalidPayload,
    Outcome,
    Policy,
    RetryPolicy,
    StatusMap,
    Undecodable,
    decide,
    park,
    requeue,
    retry,
)
from eventbus import headers as h
from eventbus.policy import REQUEUE_LIMIT, judge, park_now, requeue_until, spread
from eventbus.settlement import ACK, Ack, History, Park, ParkReason, Requeue, Retry
from eventbus.status import outcome_of

NOW = 1_750_000_000.0
SEED_2 = Policy(
    retry=RetryPolicy.exponential(base=1, factor=2, cap=60, jitter=0.25, max_attempts=5),
    permanent_codes=frozenset({"500", "550", "554", "MessageRejected", "MailFromDomainNotVerified"}),
    retryable_codes=frozenset({"421", "450", "451", "452", "Throttling", "ServiceUnavailable"}),
)


class Permanent(Exception):
    pass


class MorePermanent(Permanent):
    pass


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this works")


def delivery(*, id: str = "1", process_after: datetime | None = None, **history: object) -> Delivery:
    event = Event("order.created", {"id": 1}, id=id, process_after=process_after)
    return Delivery(event, "wms-cincout", "wms.queue.wms-cincout", history=History(**history))  # type: ignore[arg-type]


# --- verdicts ------------------------------------------------------------------------------------------------

MAPPED = Policy(statuses=StatusMap({404: "park", "3xx": "ack", 503: "requeue", 200: "drop"}))
DECLARED = Policy(permanent=(Permanent, KeyError))


@pytest.mark.parametrize(
    ("outcome", "policy", "kind", "reason"),
    [
        pytest.param(Outcome(), Policy(), Ack, None, id="nothing said"),
        pytest.param(Outcome(status=200), Policy(), Ack, None, id="200"),
        pytest.param(Outcome(status=299), Policy(), Ack, None, id="299"),
        pytest.param(Outcome(verdict=ConsumerStatus.ACK), Policy(), Ack, None, id="ACK"),
        pytest.param(Outcome(status=409), Policy(), Retry, None, id="409"),
        pytest.param(Outcome(status=429), Policy(), Retry, None, id="429"),
        pytest.param(Outcome(status=425), Policy(), Requeue, None, id="425"),
        pytest.param(Outcome(status=500), Policy(), Retry, None, id="500"),
        pytest.param(Outcome(status=599), Policy(), Retry, None, id="599"),
        pytest.param(Outcome(error=TimeoutError("no answer")), Policy(), Retry, None, id="timeout"),
        pytest.param(Outcome(error=ConnectionRefusedError()), Policy(), Retry, None, id="refused connection"),
        pytest.param(Outcome(status=0), Policy(), Retry, None, id="broken answer"),
        pytest.param(Outcome(status=700), Policy(), Retry, None, id="status out of range"),
        pytest.param(Outcome(status=404), Policy(), Retry, None, id="404"),
        pytest.param(Outcome(status=400), Policy(), Retry, None, id="400"),
        pytest.param(Outcome(status=302), Policy(), Retry, None, id="302"),
        pytest.param(Outcome(status=100), Policy(), Retry, None, id="100"),
        pytest.param(Outcome(status=404), MAPPED, Park, "permanent", id="404 mapped to park"),
        pytest.param(Outcome(status=301), MAPPED, Ack, None, id="3xx mapped to ack"),
        pytest.param(Outcome(status=503), MAPPED, Requeue, None, id="503 mapped to requeue"),
        pytest.param(Outcome(status=200), MAPPED, Retry, None, id="200 mapped to drop"),
        pytest.param(Outcome(verdict=ConsumerStatus.DROP), Policy(), Retry, None, id="DROP"),
        pytest.param(Outcome(verdict=ConsumerStatus.REQUEUE), Policy(), Requeue, None, id="REQUEUE"),
        pytest.param(Outcome(verdict=ConsumerStatus.PARK), Policy(), Park, "permanent", id="PARK"),
        pytest.param(retry("why"), Policy(), Retry, None, id="retry()"),
        pytest.param(requeue(after=5), Policy(), Requeue, None, id="requeue()"),
        pytest.param(park("why"), Policy(), Park, "permanent", id="park()"),
        pytest.param(Outcome(status=200, verdict=ConsumerStatus.PARK), Policy(), Park, "permanent", id="verdict wins"),
        pytest.param(Outcome(error=ValueError("x")), Policy(), Retry, None, id="exception"),
        pytest.param(Outcome(error=InvalidOutcome("x")), Policy(), Retry, None, id="invalid outcome"),
        pytest.param(Outcome(error=SystemExit(1)), Policy(), Retry, None, id="SystemExit in a handler"),
        pytest.param(Outcome(error=Permanent("x")), DECLARED, Park, "permanent", id="permanent exception"),
        pytest.param(Outcome(error=MorePermanent("x")), DECLARED, Park, "permanent", id="its subclass"),
        pytest.param(Outcome(error=LookupError("x")), DECLARED, Retry, None, id="not its parent"),
        pytest.param(Outcome(error=Undecodable("x")), Policy(), Park, "undecodable", id="undecodable"),
        pytest.param(Outcome(error=InvalidPayload("x")), Policy(), Park, "invalid", id="invalid payload"),
        pytest.param(Outcome(code="421"), SEED_2, Retry, None, id="SMTP 421"),
        pytest.param(Outcome(code="Throttling"), SEED_2, Retry, None, id="SES Throttling"),
        pytest.param(Outcome(code="550"), SEED_2, Park, "permanent", id="SMTP 550"),
        pytest.param(Outcome(code="500"), SEED_2, Park, "permanent", id="SMTP 500"),
        pytest.param(Outcome(code="MessageRejected"), SEED_2, Park, "permanent", id="SES MessageRejected"),
        pytest.param(Outcome(code="550", error=OSError("x")), SEED_2, Park, "permanent", id="code of an exception"),
        pytest.param(Outcome(code="599"), SEED_2, Retry, None, id="unknown code"),
        pytest.param(
            Outcome(code="599"), Policy(unknown_code="park"), Park, "permanent", id="unknown code, told to park"
        ),
    ],
)
def test_verdict(outcome, policy, kind, reason):
    """Every row of the table of verdicts."""
    settlement = decide(outcome, delivery(), policy, now=NOW)
    assert type(settlement) is kind
    if reason is not None:
        assert settlement.reason == reason
        assert settlement.headers[h.PARK_REASON] == reason


@pytest.mark.parametrize("code", ["200", "204", "425", "500", "404", "302"])
@pytest.mark.parametrize(
    ("unknown", "kind"), [("retry", ConsumerStatus.DROP), ("park", ConsumerStatus.PARK)], ids=["retry", "park"]
)
def test_an_error_code_never_goes_through_the_http_map(code, unknown, kind):
    """An SMTP `500` or `200` is no HTTP status, whatever the map says about that number."""
    statuses = StatusMap(dict.fromkeys(("2xx", "3xx", "4xx", "5xx", 425), "ack"))
    assert judge(Outcome(code=code), Policy(statuses=statuses, unknown_code=unknown))[0] is kind


def test_a_success_is_the_one_shared_ack():
    """Success costs no new object and no clock."""
    assert decide(Outcome(), delivery(), Policy()) is ACK


def test_the_same_question_has_the_same_answer():
    """It has no dice of its own: jitter comes from the message."""
    question = (Outcome(status=500), delivery(retries=2), SEED_2)
    assert decide(*question, now=NOW) == decide(*question, now=NOW)


# --- retries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "calls"),
    [
        ({}, 11),
        ({"max_retries": 0}, 1),
        ({"max_retries": 1}, 2),
        ({"max_retries": 10}, 11),
        ({"max_attempts": 1}, 1),
        ({"max_attempts": 5}, 5),
        ({"max_attempts": 3}, 3),
    ],
    ids=str,
)
def test_the_number_of_calls(setting, calls):
    """max_retries=N is N+1 calls, max_attempts=N is N: counted by playing a message through to its end."""
    policy = Policy(retry=RetryPolicy(**setting))
    assert policy.retry.max_attempts == calls
    story: dict[str, object] = {}
    for call in range(1, calls + 1):
        current = Delivery(Event("a"), "s", "q", history=h.read_history(story), max_attempts=policy.retry.max_attempts)
        assert current.attempt == call
        assert current.is_last_attempt is (call == calls)
        settlement = decide(Outcome(status=500), current, policy, now=NOW)
        assert isinstance(settlement, Park if call == calls else Retry)
        story = h.merge(story, settlement.headers)
    assert settlement.reason == "max-retries"
    assert story[h.FINAL_RETRIES] == calls - 1


def test_a_message_over_the_limit_is_judged_after_its_call_only():
    """A re-driven message, whose count is above any limit, still succeeds if its call does."""
    assert decide(Outcome(status=200), delivery(retries=99), Policy(), now=NOW) is ACK
    assert isinstance(decide(Outcome(status=500), delivery(retries=99), Policy(), now=NOW), Park)


def test_exhausted_and_told_to_retry_for_ever():
    """Without a dead-letter queue a message may go round for ever, at the policy's delay."""
    policy = Policy(retry=RetryPolicy(max_retries=1, delay=5), on_exhausted="retry-forever")
    settlement = decide(Outcome(status=500), delivery(retries=1_000_000), policy, now=NOW)
    assert isinstance(settlement, Retry)
    assert settlement.delay == 5.0
    assert settlement.headers[h.RETRIES] == 1_000_001


def test_exhausted_and_told_to_discard():
    """A discarded message is acknowledged with the reason, for the log."""
    policy = Policy(retry=RetryPolicy(max_retries=0), on_exhausted="discard")
    settlement = decide(Outcome(status=500, reason="boom"), delivery(), policy, now=NOW)
    assert settlement == Ack(discarded="500: boom")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"max_retries": 3, "max_attempts": 4}, "not both"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_retries": 1.5}, "max_retries"),
        ({"max_retries": True}, "max_retries"),
        ({"max_retries": "3"}, "max_retries"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"max_attempts": 2.0}, "max_attempts"),
        ({"delay": -1}, "duration"),
        ({"delay": "soon"}, "duration"),
        ({"delay": float("nan")}, "duration"),
        ({"delay": float("inf")}, "duration"),
        ({"delay": None}, "duration"),
        ({"delay": 10**400}, "duration"),
        ({"mode": "sideways"}, "mode"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_fixed_policy_is_a_config_error(arguments, key):
    """Every setting of a fixed delay is checked, and the error names it."""
    with pytest.raises(ConfigError, match=key):
        RetryPolicy(**arguments)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"factor": 0.5}, "factor"),
        ({"factor": 101}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": "2"}, "factor"),
        ({"jitter": 1.0}, "jitter"),
        ({"jitter": -0.1}, "jitter"),
        ({"jitter": float("nan")}, "jitter"),
        ({"jitter": None}, "jitter"),
        ({"base": 61}, "cap"),
        ({"base": "2m", "cap": "1m"}, "cap"),
        ({"max_retries": 1, "max_attempts": 1}, "not both"),
    ],
    ids=str,
)
def test_a_bad_exponential_policy_is_a_config_error(arguments, key):
    """Every setting of an exponential delay is checked, and the error names it."""
    with pytest.raises(ConfigError, match=key):
        RetryPolicy.exponential(**arguments)


@pytest.mark.parametrize("retry_number", [1, 2, 10, 1000])
def test_a_fixed_delay_is_fixed(retry_number):
    """No jitter and no growth: seed 4's 5 s."""
    policy = RetryPolicy()
    assert {policy.delay(retry_number, place) for place in (0.0, 0.5, 1.0)} == {5.0}


@pytest.mark.parametrize(
    ("number", "low", "high"),
    [(1, 0.75, 1.25), (2, 1.5, 2.5), (3, 3, 5), (4, 6, 10), (5, 12, 20), (6, 24, 40), (7, 45, 75), (100, 45, 75)],
)
def test_the_delays_of_seed_2(number, low, high):
    """Its table, with 32 s at the sixth and the cap from the seventh on (its own formula)."""
    policy = SEED_2.retry
    assert policy.delay(number, 0.0) == pytest.approx(low)
    assert policy.delay(number, 0.5) == pytest.approx((low + high) / 2)
    assert policy.delay(number, 1.0) == pytest.approx(high)
    settlement = decide(
        Outcome(status=500), delivery(retries=number - 1), Policy(retry=policy, on_exhausted="retry-forever"), now=NOW
    )
    assert low <= settlement.delay <= high


def test_jitter_differs_between_messages_and_attempts():
    """A hundred messages that fail together do not come back together."""
    policy = Policy(retry=SEED_2.retry)
    delays = {decide(Outcome(status=500), delivery(id=str(n)), policy, now=NOW).delay for n in range(100)}
    assert len(delays) == 100
    assert max(delays) - min(delays) > 0.3
    assert spread(delivery(), 1) != spread(delivery(), 2)


@given(
    base=st.floats(0, 1e6),
    factor=st.floats(1, 100),
    extra=st.floats(0, 1e6),
    jitter=st.floats(0, 1, exclude_max=True),
    number=st.integers(1, 2**53),
    place=st.floats(0, 1),
)
@example(base=0.0, factor=2.0, extra=60.0, jitter=0.0, number=2000, place=0.5)
def test_backoff_stays_within_its_bounds(base, factor, extra, jitter, number, place):
    """min(cap, base*factor^(n-1)) plus or minus the jitter, for any parameters and any count."""
    cap = base + extra
    policy = RetryPolicy.exponential(base=base, factor=factor, cap=cap, jitter=jitter)
    try:
        plain = min(cap, base * factor ** (number - 1))
    except OverflowError:
        plain = cap if base else 0.0
    delay = policy.delay(number, place)
    slack = 1e-9 * (1 + plain)
    assert plain * (1 - jitter) - slack <= delay <= plain * (1 + jitter) + slack
    assert 0 <= delay <= cap * (1 + jitter) + slack


@given(st.text(st.characters(), max_size=30), st.integers(0, 10**6))
def test_the_place_within_the_jitter_is_between_0_and_1(id, turn):
    """For any event id, also a malformed one."""
    event = Event.from_wire(id, "a", "", datetime.now(timezone.utc), b"")
    assert 0.0 <= spread(Delivery(event, "s", "q"), turn) <= 1.0


def test_delays_lists_each_road_once():
    """Brokers with tiers make a road per delay that a policy asks for."""
    assert RetryPolicy(max_retries=10, delay=5).delays() == (5.0,)
    assert RetryPolicy(max_retries=0).delays() == ()
    policy = RetryPolicy.exponential(base=1, factor=2, cap=60, max_retries=20)
    assert policy.delays() == (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


@pytest.mark.parametrize(
    ("policy", "total"),
    [
        (RetryPolicy(max_retries=0), 0.0),
        (RetryPolicy(max_retries=10, delay=5), 50.0),
        (RetryPolicy.exponential(base=1, factor=2, cap=60, jitter=0.25, max_attempts=5), 18.75),
        (RetryPolicy(max_retries=1_000_000, delay=0.05), 50_000.0),
    ],
    ids=["none", "fixed", "exponential with jitter", "a million retries"],
)
def test_total_is_the_longest_wait_of_all_retries(policy, total):
    """What in-place retries may hold a message for is not underestimated."""
    assert policy.total() == pytest.approx(total)


def test_policies_are_values():
    """Equal settings, equal policies; max_attempts is the same setting as max_retries."""
    assert RetryPolicy(max_retries=4) == RetryPolicy(max_attempts=5)
    assert hash(RetryPolicy(max_retries=4)) == hash(RetryPolicy(max_attempts=5))
    assert RetryPolicy(max_retries=4) != RetryPolicy(max_retries=4, mode="in-place")
    assert RetryPolicy(delay=5) == RetryPolicy(delay="5s") == RetryPolicy(delay=timedelta(seconds=5))
    assert repr(RetryPolicy()) == "RetryPolicy(max_retries=10, delay=5.0)"


# --- Retry-After ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "own", "expected"),
    [
        pytest.param(Outcome(status=429, retry_after=60), 5, 60, id="larger than ours"),
        pytest.param(Outcome(status=429, retry_after=1), 5, 5, id="smaller than ours"),
        pytest.param(Outcome(status=429, retry_after=0), 5, 5, id="zero"),
        pytest.param(Outcome(status=409, retry_after=60), 5, 60, id="409"),
        pytest.param(Outcome(status=503, retry_after=60), 5, 60, id="503"),
        pytest.param(Outcome(status=500, retry_after=60), 5, 5, id="500 has no say"),
        pytest.param(Outcome(status=404, retry_after=60), 5, 5, id="404 has no say"),
        pytest.param(Outcome(status=429, retry_after=86_400), 5, 3600, id="at most an hour"),
        pytest.param(Outcome(status=429, retry_after=math.inf), 5, 3600, id="for ever"),
        pytest.param(Outcome(status=429, retry_after=math.nan), 5, 5, id="NaN"),
        pytest.param(Outcome(status=429, retry_after=-60), 5, 5, id="negative"),
        pytest.param(Outcome(status=429, retry_after=60), 7200, 7200, id="ours may be above an hour"),
        pytest.param(retry(after=60), 5, 60, id="retry(after=)"),
        pytest.param(retry(after=1), 5, 5, id="retry(after=) smaller"),
    ],
)
def test_retry_after(outcome, own, expected):
    """The larger of Retry-After and the policy's delay, at most an hour, on 409, 425, 429 and 503."""
    settlement = decide(outcome, delivery(), Policy(retry=RetryPolicy(delay=own)), now=NOW)
    assert settlement.delay == expected
    assert settlement.due_at == NOW + expected
    assert settlement.headers[h.DUE_AT] == round((NOW + expected) * 1000)


# --- REQUEUE -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "low"),
    [
        pytest.param(Outcome(status=425), 5.0, id="425 waits as a first retry would"),
        pytest.param(Outcome(status=425, retry_after=60), 60.0, id="425 with Retry-After"),
        pytest.param(Outcome(status=425, retry_after=1), 5.0, id="425 with a short Retry-After"),
        pytest.param(Outcome(status=425, retry_after=10**6), 3600.0, id="at most an hour"),
        pytest.param(requeue(after=2), 2.0, id="requeue(after=) is taken at its word"),
        pytest.param(requeue(after=0), 0.1, id="the floor of 100 ms"),
        pytest.param(requeue(), 5.0, id="requeue()"),
        pytest.param(Outcome(verdict=ConsumerStatus.REQUEUE), 5.0, id="REQUEUE"),
        pytest.param(Outcome(status=425, retry_after=math.nan), 0.1, id="NaN"),
        pytest.param(Outcome(status=425, retry_after=-5), 5.0, id="negative"),
    ],
)
def test_requeue_waits(outcome, low):
    """The wait, plus 0-25 %, never below 100 ms; the attempts do not change."""
    for n in range(20):
        current = delivery(id=str(n), retries=3, requeues=2)
        settlement = decide(outcome, current, Policy(), now=NOW)
        assert isinstance(settlement, Requeue)
        assert max(0.1, low) - 1e-6 <= settlement.delay <= max(0.1, low * 1.25) + 1e-6
        assert settlement.delay == pytest.approx(settlement.due_at - NOW)
        assert h.RETRIES not in settlement.headers
        assert settlement.headers[h.REQUEUES] == 3


@pytest.mark.parametrize("retries", [0, 10, 99])
def test_requeue_costs_no_retry(retries):
    """425 is never the last straw: not even for a message whose retries are used up."""
    assert isinstance(decide(Outcome(status=425), delivery(retries=retries), Policy(), now=NOW), Requeue)


@pytest.mark.parametrize(
    ("received_ago", "due_ago", "parked"),
    [
        pytest.param(None, None, False, id="first time"),
        pytest.param(REQUEUE_LIMIT, None, False, id="24 h to the second"),
        pytest.param(REQUEUE_LIMIT + 1, None, True, id="over 24 h"),
        pytest.param(REQUEUE_LIMIT * 10, REQUEUE_LIMIT - 60, False, id="24 h count from process_after"),
        pytest.param(REQUEUE_LIMIT * 10, REQUEUE_LIMIT + 60, True, id="over 24 h past process_after"),
        pytest.param(REQUEUE_LIMIT - 60, REQUEUE_LIMIT * 10, False, id="process_after long before first receipt"),
        pytest.param(REQUEUE_LIMIT * 10, -REQUEUE_LIMIT, False, id="process_after in the future"),
    ],
)
def test_requeue_limit(received_ago, due_ago, parked):
    """Requeued for over 24 h past the later of first receipt and process_after: parked."""
    due = None if due_ago is None else datetime.fromtimestamp(NOW - due_ago, timezone.utc)
    received = 0.0 if received_ago is None else NOW - received_ago
    settlement = decide(
        Outcome(status=425, reason="not open yet"),
        delivery(first_received_at=received, process_after=due),
        Policy(),
        now=NOW,
    )
    assert isinstance(settlement, Park if parked else Requeue)
    if parked:
        assert settlement.reason == "requeue-limit"
        assert "not open yet" in settlement.error
        assert settlement.headers[h.FINAL_STATUS] == 425


def test_the_first_receipt_is_written_once():
    """The 24 h are counted from the first 'not yet' on, through all that follow."""
    waited = requeue_until(delivery(), NOW + 60, now=NOW)  # not due, no room, breaker open: nobody was asked
    assert waited.headers[h.FIRST_RECEIVED_AT] is None
    first = requeue_until(delivery(), NOW + 60, now=NOW, told_not_yet=True)
    story = h.merge({}, first.headers)
    later = Delivery(Event("a"), "s", "q", history=h.read_history(story))
    second = requeue_until(later, NOW + 120, now=NOW + 60)
    assert second.headers[h.FIRST_RECEIVED_AT] == first.headers[h.FIRST_RECEIVED_AT] == h.iso(NOW)


# --- parking -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", get_args(ParkReason))
def test_a_parked_message_tells_its_story(reason):
    """Each reason to park gives the headers of spec section 5."""
    current = delivery(retries=2, first_failed_at=NOW - 60, enqueued_at=NOW - 100)
    settlement = park_now(current, Outcome(status=500, reason="boom"), reason, now=NOW)
    assert settlement.headers == settlement.headers | {
        h.ORIGINAL_QUEUE: "wms.queue.wms-cincout",
        h.FINAL_STATUS: 500,
        h.FINAL_ERROR: "500: boom",
        h.FINAL_RETRIES: 2,
        h.PARK_REASON: reason,
        h.ENQUEUED_AT: h.iso(NOW - 100),
        h.FIRST_FAILED_AT: h.iso(NOW - 60),
        h.LAST_FAILED_AT: h.iso(NOW),
        h.PARKED_AT: h.iso(NOW),
        h.RETRIES: 2,
        h.DUE_AT: None,
    }


# --- hostile outcomes ----------------------------------------------------------------------------------------

NASTY = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("\r\n\t\x00\"\\';:=")), max_size=300
) | st.sampled_from(["", " ", "\n", '"' * 5000, "\\" * 5000, "é" * 5000, "𝄞" * 5000, "\n" * 5000, " " * 5000 + "x"])
OUTCOMES = st.builds(
    Outcome,
    status=st.none() | st.integers(-1, 1000),
    verdict=st.none() | st.sampled_from(ConsumerStatus),
    reason=NASTY,
    code=st.none() | NASTY,
    retry_after=st.none() | st.floats(),
    error=st.none() | st.builds(ValueError, NASTY) | st.just(Undecodable("x")) | st.builds(Permanent),
)
MOMENTS = st.just(0.0) | st.floats(0, 253_402_300_000)
HISTORIES = st.builds(
    History,
    retries=st.integers(0, 2**53),
    requeues=st.integers(0, 2**53),
    crashes=st.integers(0, 2**53),
    first_received_at=MOMENTS,
    enqueued_at=MOMENTS,
    first_failed_at=MOMENTS,
    last_failed_at=MOMENTS,
    attempts=NASTY,
)
POLICIES = st.builds(
    Policy,
    retry=st.builds(RetryPolicy, max_retries=st.integers(0, 20), delay=st.floats(0, 1e6)) | st.just(SEED_2.retry),
    permanent=st.sampled_from([(), (Permanent,)]),
    permanent_codes=st.sampled_from([frozenset(), frozenset({"550"})]),
    unknown_code=st.sampled_from(["retry", "park"]),
    on_exhausted=st.sampled_from(["park", "retry-forever", "discard"]),
)


def size(headers: dict[str, object]) -> int:
    return sum(len(name) + len(str(value).encode()) for name, value in headers.items() if value is not None)


@given(OUTCOMES, HISTORIES, POLICIES)
def test_decide_is_total(outcome, history, policy):
    """Every outcome, history and policy has one settlement that an adapter can carry out."""
    current = Delivery(Event("a", id="1"), "wms", "q" * 500, history=history)
    settlement = decide(outcome, current, policy, now=NOW)
    assert isinstance(settlement, (Ack, Retry, Requeue, Park))
    if isinstance(settlement, Ack):
        return
    assert size(dict(settlement.headers)) <= 8192
    for name, value in settlement.headers.items():
        assert h.is_reserved(name)
        if isinstance(value, str):
            assert not any(ord(c) < 32 or ord(c) == 127 for c in value), name
    if isinstance(settlement, Park):
        error = settlement.headers[h.FINAL_ERROR]
        assert isinstance(error, str)
        assert error.strip()
        assert len(error.encode()) <= 2048
        assert settlement.reason in get_args(ParkReason)
    else:
        assert settlement.delay >= 0
        assert settlement.due_at == NOW + settlement.delay
        assert settlement.delay <= max(3600.0 * 1.25, policy.retry.cap * 1.25)


@given(OUTCOMES, HISTORIES, POLICIES)
def test_no_verdict_but_park_or_exhaustion_parks(outcome, history, policy):
    """They agree: ACK acknowledges, PARK parks, DROP retries until its retries are used up."""
    verdict = judge(outcome, policy)[0]
    settlement = decide(outcome, Delivery(Event("a"), "s", "q", history=history), policy, now=NOW)
    if verdict is ConsumerStatus.ACK:
        assert settlement is ACK
    elif verdict is ConsumerStatus.PARK:
        assert isinstance(settlement, Park)
    elif verdict is ConsumerStatus.DROP:
        spent = history.retries >= policy.retry.max_retries and policy.on_exhausted != "retry-forever"
        assert isinstance(settlement, (Park, Ack)) if spent else isinstance(settlement, Retry)
    else:
        assume(NOW - history.first_received_at <= REQUEUE_LIMIT or not history.first_received_at)
        assert isinstance(settlement, Requeue)


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(Outcome(status=500, reason="caf\udce9"), id="a file name that is not UTF-8"),
        pytest.param(Outcome(error=ValueError("\ud800")), id="exception"),
        pytest.param(Outcome(code="\ud800", verdict=ConsumerStatus.PARK), id="code"),
    ],
)
@pytest.mark.parametrize("retries", [0, 99], ids=["retried", "parked"])
def test_half_characters_never_reach_a_header(outcome, retries):
    """A text with lone surrogates cannot be encoded by any adapter: retrying and parking must not fail on it."""
    settlement = decide(outcome, delivery(retries=retries), Policy(), now=NOW)
    for value in settlement.headers.values():
        if isinstance(value, str):
            value.encode()


@pytest.mark.parametrize("breaker", ["\n", "\r\n", "\x0b", "\x1c", "\x85", "\u2028", "\u2029"], ids=ascii)
def test_the_final_error_is_one_line(breaker):
    """Nothing that any reader takes for a line break stands in x-final-error or x-retry-reason."""
    settlement = decide(park(f"first{breaker}second"), delivery(), Policy(), now=NOW)
    assert len(settlement.headers[h.FINAL_ERROR].splitlines()) == 1
    assert len(settlement.headers[h.RETRY_REASON].splitlines()) == 1


def test_an_exception_that_cannot_be_printed_is_still_decided():
    """A broken __str__ of the user's exception must not take the worker down."""
    settlement = decide(Outcome(error=Speechless()), delivery(), Policy(), now=NOW)
    assert isinstance(settlement, Retry)
    assert "Speechless" in settlement.reason


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(Outcome(status="500"), id="status as text"),
        pytest.param(Outcome(status=5.5), id="status as float"),
        pytest.param(Outcome(verdict="park"), id="verdict as text"),
        pytest.param(Outcome(verdict=ConsumerStatus.PARK, code=550), id="code as number"),
        pytest.param(Outcome(code=["550"]), id="code as list"),
        pytest.param(Outcome(status=429, retry_after="5"), id="retry_after as text"),
        pytest.param(Outcome(status=425, retry_after="5"), id="retry_after of a 425 as text"),
        pytest.param(Outcome(status=500, retry_after=timedelta(seconds=5)), id="retry_after as timedelta"),
        pytest.param(Outcome(verdict=ConsumerStatus.PARK, reason=None), id="no reason"),
        pytest.param(Outcome(verdict=ConsumerStatus.PARK, reason=Exception("x")), id="an exception as reason"),
        pytest.param(Outcome(error="boom"), id="error as text"),
    ],
)
def test_an_outcome_with_wrong_types_is_refused_or_decided(outcome):
    """A handler that fills an Outcome wrongly is told so, or understood; nothing else may happen to the worker."""
    try:
        outcome = outcome_of(outcome)
    except InvalidOutcome as error:
        outcome = Outcome(error=error)
    settlement = decide(outcome, delivery(), Policy(), now=NOW)
    assert isinstance(settlement, (Retry, Requeue, Park))


def test_a_verdict_by_its_text_is_not_silently_a_retry():
    """Outcome(verdict="park") is parked or refused: never taken for a retry without a word."""
    try:
        outcome = outcome_of(Outcome(verdict="park"))  # type: ignore[arg-type]
    except InvalidOutcome:
        return
    assert isinstance(decide(outcome, delivery(), Policy(), now=NOW), Park)


def test_secrets_stay_out_of_every_header():
    """A password in an exception shows up neither in the retry's nor in the parked message's headers."""
    error = RuntimeError("cannot connect to amqp://wms:hunter2@rabbit:5672/ with password=hunter2")
    for retries in (0, 99):
        settlement = decide(Outcome(error=error), delivery(retries=retries), Policy(), now=NOW)
        assert "hunter2" not in str(settlement)
