"""What answers mean, as tables."""

from __future__ import annotations

import gzip
from datetime import datetime, timezone
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.forward.answer import error_text, outcome_of_answer, outcome_of_failure, retry_after
from eventbus.forward.port import Answer, SendFailed
from eventbus.policy import judge
from eventbus.status import ConsumerStatus

NOW = datetime(2025, 6, 1, 12, 0, 0, tzinfo=timezone.utc).timestamp()
TEXT = {"content-type": "text/plain"}


def http_date(after: float) -> str:
    return format_datetime(datetime.fromtimestamp(NOW + after, timezone.utc), usegmt=True)


@pytest.mark.parametrize("status", range(100, 600))
def test_every_status_goes_to_the_status_map(status):
    """2xx acknowledges, 425 requeues, anything else goes into the retry loop."""
    outcome = outcome_of_answer(Answer(status, {}), now=NOW)
    assert outcome.status == status
    assert outcome.verdict is None
    expected = ConsumerStatus.DROP
    if 200 <= status <= 299:
        expected = ConsumerStatus.ACK
    elif status == 425:
        expected = ConsumerStatus.REQUEUE
    assert judge(outcome)[0] is expected


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("999999999999", 3600.0),
        (http_date(90), 90.0),
        (http_date(-90), 0.0),
        (http_date(10**6), 3600.0),
        ("Sunday, 01-Jun-25 12:01:30 GMT", 90.0),
        ("Sun Jun  1 12:01:30 2025", 90.0),
        (None, None),
        ("", None),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("Tomorrow, at noon", None),
        ("٣", None),
        ("9" * 400, None),
        ("Sun, 99 Jun 2025 12:00:00 GMT", None),
        ("Sun, 01 Jun 99999999999 12:00:00 GMT", None),
        ("\ud800", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_garbage_is_no_header(value, seconds):
    """Clamped to the hour; whatever cannot be read counts as absent."""
    assert retry_after(value, now=NOW) == seconds


@given(st.text(max_size=80))
def test_no_retry_after_raises(text):
    """An endpoint cannot break the worker with a header."""
    found = retry_after(text, now=NOW)
    assert found is None or 0 <= found <= 3600


@pytest.mark.parametrize(
    ("header", "verdict"),
    [
        ("ack", ConsumerStatus.ACK),
        ("drop", ConsumerStatus.DROP),
        (" Requeue ", ConsumerStatus.REQUEUE),
        ("PARK", ConsumerStatus.PARK),
        ("explode", None),
        ("", None),
        ("park, ack", None),
    ],
)
@pytest.mark.parametrize("status", [200, 404, 500])
def test_the_verdict_header_overrides_the_status(status, header, verdict):
    """A known word is the verdict; an unknown one leaves it to the status."""
    assert outcome_of_answer(Answer(status, {"x-eventbus-verdict": header}), now=NOW).verdict is verdict


def test_a_success_that_asks_to_be_parked_has_its_reason():
    """The text matters where the verdict is not ACK, whatever the status."""
    answer = Answer(200, TEXT | {"x-eventbus-verdict": "park"}, b"no such product")
    assert outcome_of_answer(answer, now=NOW).reason == "no such product"


def test_the_text_of_a_success_is_not_kept():
    """Nobody will read it."""
    assert outcome_of_answer(Answer(200, TEXT, b"all is well"), now=NOW).reason == ""


@pytest.mark.parametrize(
    ("headers", "body", "reason"),
    [
        (TEXT, b"out of stock", "out of stock"),
        ({"content-type": "application/json"}, b'{"error":\n  "no"}', '{"error": "no"}'),
        ({"content-type": "application/problem+json; charset=utf-8"}, b'{"title":"no"}', '{"title":"no"}'),
        ({"content-type": "text/html"}, b"<h1>502</h1>\r\n", "<h1>502</h1>"),
        ({"content-type": "text/plain; charset=ISO-8859-1"}, "Müller".encode("latin-1"), "Müller"),
        ({}, b"no content type", "no content type"),
        ({}, b"\x89PNG\x00\xff", ""),
        ({"content-type": "image/png"}, b"looks like text", ""),
        ({"content-type": "application/octet-stream"}, b"looks like text", ""),
        (TEXT | {"content-encoding": "gzip"}, gzip.compress(b"text", mtime=0), ""),
        (TEXT, b"a\x00b\x1b[31mc\x7fd", "a b [31mc d"),
        (TEXT, "née ☃".encode(), "née ☃"),
        (TEXT, b"\xff\xfe broken", "�� broken"),
        (TEXT, b"refused: password=hunter2 for bob", "refused: password=*** for bob"),
        (TEXT, b"Authorization: Bearer abcdefghijk", "Authorization: Bearer ***"),
    ],
)
def test_a_text_body_becomes_the_reason(headers, body, reason):
    """Text and JSON on one line, without control characters and secrets; nothing else."""
    assert outcome_of_answer(Answer(500, headers, body), now=NOW).reason == reason


@pytest.mark.parametrize("letter", ["x", "é", "☃", "🙂"])
def test_the_reason_has_at_most_two_kib(letter):
    """Longer ones are cut between characters."""
    reason = error_text(Answer(500, TEXT, (letter * 9000).encode()))
    assert 2000 < len(reason.encode()) <= 2048
    assert "�" not in reason


def test_a_secret_across_the_cut_is_masked():
    """Masking comes before cutting."""
    token = "eyJhbGciOiJIUzI1NiJ9." + "x" * 60 + ".sig"
    reason = error_text(Answer(500, TEXT, b"." * 2000 + b" " + token.encode()))
    assert "eyJ" not in reason


@given(st.binary(max_size=300), st.dictionaries(st.sampled_from(["content-type", "content-encoding"]), st.text()))
def test_no_body_raises(body, headers):
    """Whatever an endpoint answers is an outcome."""
    outcome_of_answer(Answer(500, headers, body), now=NOW)


def test_no_answer_goes_into_the_retry_loop():
    """By the rule for exceptions: no status, an error, a reason."""
    failure = SendFailed("refused", "Cannot connect to http://bob:hunter2@127.0.0.1:9", connected=False)
    outcome = outcome_of_failure(failure)
    assert (outcome.status, outcome.error) == (None, failure)
    assert judge(outcome)[0] is ConsumerStatus.DROP
    assert outcome.reason == "refused: Cannot connect to http://bob:***@127.0.0.1:9"
    assert "hunter2" not in repr(failure)
