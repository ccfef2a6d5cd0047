"""What a handler can say, and the map from HTTP statuses to verdicts."""

from __future__ import annotations

from datetime import timedelta
from http import HTTPStatus

import pytest

from eventbus import ConfigError, ConsumerStatus, InvalidOutcome, Outcome, StatusMap, park, requeue, retry
from eventbus.status import ACKED, outcome_of

ACK, DROP, REQUEUE, PARK = ConsumerStatus.ACK, ConsumerStatus.DROP, ConsumerStatus.REQUEUE, ConsumerStatus.PARK


class Response:
    def __init__(self, status_code: object) -> None:
        self.status_code = status_code


class Explosive:
    @property
    def status_code(self) -> int:
        raise RuntimeError("the response was closed")


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        pytest.param(None, ACKED, id="nothing"),
        pytest.param(200, Outcome(status=200), id="int"),
        pytest.param(100, Outcome(status=100), id="lowest"),
        pytest.param(599, Outcome(status=599), id="highest"),
        pytest.param(HTTPStatus.CONFLICT, Outcome(status=409), id="HTTPStatus"),
        pytest.param(PARK, Outcome(verdict=PARK), id="ConsumerStatus"),
        pytest.param(Outcome(status=503, retry_after=7), Outcome(status=503, retry_after=7), id="Outcome"),
        pytest.param(Response(404), Outcome(status=404), id="object with status_code"),
        pytest.param(Response(HTTPStatus.OK), Outcome(status=200), id="object with an HTTPStatus"),
    ],
)
def test_a_result_means(result, outcome):
    """Everything a handler may return stands for one outcome."""
    assert outcome_of(result) == outcome


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(True, id="True"),
        pytest.param(False, id="False"),
        pytest.param("ok", id="text"),
        pytest.param("200", id="number as text"),
        pytest.param({"status": 200}, id="dict"),
        pytest.param([200], id="list"),
        pytest.param(200.0, id="float"),
        pytest.param(b"", id="bytes"),
        pytest.param(0, id="zero"),
        pytest.param(99, id="below"),
        pytest.param(600, id="above"),
        pytest.param(-200, id="negative"),
        pytest.param(10**30, id="huge"),
        pytest.param(object(), id="object"),
        pytest.param(Response("200"), id="status_code as text"),
        pytest.param(Response(None), id="status_code missing"),
        pytest.param(Response(True), id="status_code as bool"),
        pytest.param(Response(1000), id="status_code out of range"),
        pytest.param(Explosive(), id="status_code that raises"),
    ],
)
def test_a_result_that_is_no_verdict_is_an_invalid_outcome(result):
    """Anything else is InvalidOutcome, whatever the object does when it is asked."""
    with pytest.raises(InvalidOutcome, match="a handler returned"):
        outcome_of(result)


def test_the_words_of_user_code():
    """retry(), requeue() and park() are the verdicts by name."""
    assert retry("later", after=7, code="421") == Outcome(verdict=DROP, reason="later", code="421", retry_after=7.0)
    assert retry() == Outcome(verdict=DROP)
    assert requeue(after=timedelta(minutes=1)) == Outcome(status=425, verdict=REQUEUE, retry_after=60.0)
    assert requeue() == Outcome(status=425, verdict=REQUEUE)
    assert park("why", code="550") == Outcome(verdict=PARK, reason="why", code="550")


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf"), timedelta(seconds=-1)])
@pytest.mark.parametrize("word", [retry, requeue])
def test_an_impossible_wait_is_refused(word, after):
    """A wait is zero or more seconds, and ends."""
    with pytest.raises(ValueError, match="zero or more"):
        word(after=after)


@pytest.mark.parametrize("status", range(100, 600))
def test_the_default_map(status):
    """2xx ACK, 425 REQUEUE, everything else DROP (seed 4)."""
    expected = ACK if 200 <= status <= 299 else REQUEUE if status == 425 else DROP
    assert StatusMap()[status] is expected


@pytest.mark.parametrize("status", [-1, 0, 99, 600, 10**9])
def test_no_status_at_all_is_a_broken_answer(status):
    """What is not an HTTP status goes into the retry loop."""
    assert StatusMap()[status] is DROP


@pytest.mark.parametrize(
    ("rules", "status", "verdict"),
    [
        pytest.param({404: "park"}, 404, PARK, id="int"),
        pytest.param({404: "park"}, 403, DROP, id="its neighbour is as before"),
        pytest.param({"404": PARK}, 404, PARK, id="text"),
        pytest.param({HTTPStatus.NOT_FOUND: "PARK"}, 404, PARK, id="HTTPStatus, capital letters"),
        pytest.param({" 4XX ": "park"}, 451, PARK, id="class"),
        pytest.param({"4xx": "park"}, 425, REQUEUE, id="425 is exact, so a class does not move it"),
        pytest.param({"4xx": "park", 409: "drop"}, 409, DROP, id="exact before class"),
        pytest.param({409: "drop", "4xx": "park"}, 409, DROP, id="exact before class in any order"),
        pytest.param({"5xx": "retry"}, 500, DROP, id="retry is another word for drop"),
        pytest.param({425: "park"}, 425, PARK, id="425 too can be changed"),
        pytest.param({"2xx": "park"}, 204, PARK, id="2xx too"),
        pytest.param({"3xx": "ack"}, 302, ACK, id="3xx"),
        pytest.param({"1xx": "requeue"}, 199, REQUEUE, id="1xx"),
    ],
)
def test_rules_go_over_the_defaults(rules, status, verdict):
    """A rule changes what it names; an exact status goes before its class."""
    assert StatusMap(rules)[status] is verdict


@pytest.mark.parametrize(
    "rules",
    [
        {99: "park"},
        {600: "park"},
        {"6xx": "park"},
        {"xx": "park"},
        {"": "park"},
        {"40x": "park"},
        {-404: "park"},
        {True: "park"},
        {None: "park"},
        {"²00": "park"},
        {404: "dorp"},
        {404: ""},
        {404: None},
        {404: 5},
    ],
    ids=str,
)
def test_a_bad_rule_is_a_config_error(rules):
    """A status that is none, or a verdict that is none, is a ConfigError that says what is allowed."""
    with pytest.raises(ConfigError, match="use"):
        StatusMap(rules)


@pytest.mark.parametrize("key", ["0404", "٤٠٤", "+404", "404.0"])
def test_an_odd_spelling_is_taken_or_refused_but_never_ignored(key):
    """A rule that was accepted is in force: an operator must not believe in one that is not."""
    try:
        statuses = StatusMap({key: "park"})
    except ConfigError:
        return
    assert statuses[404] is PARK


def test_maps_are_values():
    """Equal rules make equal maps, and building one changes neither the defaults nor the rules given."""
    rules = {404: "park"}
    assert StatusMap(rules) == StatusMap({"404": PARK})
    assert hash(StatusMap(rules)) == hash(StatusMap({"404": PARK}))
    assert StatusMap(rules) != StatusMap()
    assert StatusMap()[404] is DROP
    assert rules == {404: "park"}
    assert repr(StatusMap(rules)) == "StatusMap({'404': 'park'})"
