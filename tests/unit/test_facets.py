"""Facets: what letters are grouped by; two cases of one error have one fingerprint."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.event import Event
from eventbus.facets import FACETS, by_age, facets, fingerprint, normalised

SAME = [
    ("no order 17", "no order 18000", "no order <n>"),
    ("timeout after 3.5 s", "timeout after 10 s", "timeout after <n> s"),
    ("KeyError: 'a-1'", "KeyError: 'b 2'", "KeyError: <value>"),
    ('bad value "x"', 'bad value "it\'s"', "bad value <value>"),
    ("no user ana@example.org", "no user bo.b+1@mail.example.com", "no user <address>"),
    (
        "job 3fa85f64-5717-4562-b3fc-2c963f66afa6 failed",
        "job 00000000-5717-4562-b3fc-2c963f66afa6 failed",
        "job <id> failed",
    ),
    ("GET https://a.example/x?y=1 gave 500", "GET http://b.example/ gave 502", "GET <url> gave <n>"),
    ("cannot reach 10.0.0.1:5432", "cannot reach 192.168.7.12:80", "cannot reach <host>"),
    ("late since 2026-03-01T10:00:00Z", "late since 2025-12-31 23:59:59.5+01:00", "late since <time>"),
    ("no such message 01J9ZQ4T8A3BCDEF", "no such message 7f3kq0zpl2mn8x", "no such message <id>"),
    ("<object at 0x7f12ab>", "<object at 0x10>", "<object at <id>>"),
]

DIFFERENT = [
    ("no order", "no user"),
    ("500: Internal Server Error", "NotFound: Internal Server Error"),
    ("table v1 missing", "table v1 locked"),
]


@pytest.mark.parametrize(("one", "other", "text"), SAME)
def test_what_differs_from_case_to_case_is_replaced(one: str, other: str, text: str) -> None:
    """Numbers, ids, quoted values, addresses, times."""
    assert normalised(one) == normalised(other) == text
    assert fingerprint("ValueError", "", one) == fingerprint("ValueError", "", other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_errors_have_different_fingerprints(one: str, other: str) -> None:
    """Words make the error."""
    assert fingerprint("ValueError", "", one) != fingerprint("ValueError", "", other)


def test_type_and_code_are_part_of_it() -> None:
    """The same words under another type or code are another error."""
    assert len({fingerprint(kind, code, "boom") for kind in ("A", "B") for code in ("", "421")}) == 4


def test_a_fingerprint_is_a_digest_to_choose_by_and_a_text_to_read() -> None:
    """Eight digits, then the words."""
    digest, _, text = fingerprint("ValueError", "", "no order 7").partition(" ")
    assert (len(digest), text) == (8, "no order <n>")


def test_every_letter_has_every_facet() -> None:
    """What a letter does not have is a dash, so that counts add up."""
    assert facets(Event("a"), {}) == {
        "reason": "unknown",
        "status": "-",
        "code": "-",
        "type": "a",
        "tenant": "-",
        "fingerprint": fingerprint("", "", "unknown"),
        "hour": "-",
    }


def test_facets_say_what_the_story_says() -> None:
    """Each from its own header."""
    story = {
        "x-park-reason": "permanent",
        "x-final-status-code": 404,
        "x-error-code": "E7",
        "x-error-type": "KeyError",
        "x-final-error": "no 'x'",
        "x-parked-at": "2026-03-01T14:59:59Z",
    }
    assert facets(Event("order.created", tenant="acme"), story) == {
        "reason": "permanent",
        "status": "404",
        "code": "E7",
        "type": "order.created",
        "tenant": "acme",
        "fingerprint": fingerprint("KeyError", "E7", "no <value>"),
        "hour": "2026-03-01T14",
    }


@given(st.dictionaries(st.sampled_from(["x-park-reason", "x-final-error", "x-parked-at", "x-error-code"]), st.text()))
def test_any_text_of_a_stranger_gives_facets(story: dict[str, object]) -> None:
    """Never an exception, always all of them, always short."""
    found = facets(Event("a"), story)
    assert tuple(found) == FACETS
    assert all(value and len(value.encode()) <= 256 for value in found.values())


def test_hours_become_groups_of_age() -> None:
    """Youngest first, empty groups left out, what has no hour last."""
    now = datetime(2026, 3, 10, 12, 30, tzinfo=timezone.utc).timestamp()
    hours = {
        "2026-03-10T12": 1,
        "2026-03-10T11": 2,
        "2026-03-10T08": 4,
        "2026-03-01T00": 8,
        "2020-01-01T00": 16,
        "-": 32,
    }
    assert list(by_age(hours, now).items()) == [("<2h", 3), ("2h-6h", 4), ("7d-30d", 8), (">30d", 16), ("-", 32)]


def test_two_statuses_are_two_errors() -> None:
    """What an endpoint said with 404 is not counted with what it said with 500, and the status can be read."""
    story = {"x-final-status-code": 404, "x-final-error": "404: no order 7"}
    other = story | {"x-final-status-code": 500, "x-final-error": "500: no order 8"}
    found = [facets(Event("a"), each)["fingerprint"] for each in (story, other)]
    assert [text.partition(" ")[2] for text in found] == ["404: no order <n>", "500: no order <n>"]
