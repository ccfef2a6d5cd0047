"""Redaction: secrets do not come through, everything else does, and no text makes it slow."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.redaction import redact, redact_url

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.hunter2hunter2"


@pytest.mark.parametrize(
    "text",
    [
        # URLs
        "amqp://wms:hunter2@rabbit:5672/",
        "cannot connect to redis://:hunter2@cache:6379/0: refused",
        "amqps://wms:hunter2@a,amqps://wms:hunter2@b",
        "postgresql+asyncpg://u:hunter2@db/x",
        "AMQP://u:hunter2@host",
        "amqp://u:p@hunter2@host",
        "https://hunter2hunter2@github.com/acme/repo.git",
        "redis://u:pa/hunter2@host",
        "https://s3.example/x?X-Amz-Signature=hunter2&X-Amz-Date=1",
        "https://x/?access_token=hunter2",
        "https://x/?api_key=hunter2#frag",
        # headers
        "Authorization: Bearer hunter2hunter2",
        "authorization: basic aHVudGVyMmh1bnRlcjI6",
        "{'Authorization': 'Bearer hunter2hunter2'}",
        "Authorization: hunter2",
        "Authorization: ApiKey hunter2hunter2",
        "Authorization: Token hunter2hunter2",
        "Proxy-Authorization: Negotiate hunter2hunter2",
        "X-Api-Key: hunter2",
        "x-auth-token=hunter2",
        "Cookie: session=hunter2",
        "Cookie: a=1; session=hunter2",
        "Set-Cookie: session=hunter2; HttpOnly",
        # assignments
        "password=hunter2",
        "PASSWORD = hunter2",
        "password: hunter2",
        "passwd=hunter2",
        "pwd=hunter2",
        "passphrase='hunter2'",
        "db_password=hunter2",
        "DB_PASSWORD=hunter2",
        "PGPASSWORD=hunter2",
        "userPassword=hunter2",
        "client_secret=hunter2",
        "clientSecret=hunter2",
        "secret_key=hunter2",
        "aws_secret_access_key=hunter2",
        "AWS_SECRET_ACCESS_KEY=hunter2",
        "SharedAccessKey=hunter2",
        "AccountKey=hunter2",
        "private_key=hunter2",
        "refresh_token=hunter2",
        "authToken=hunter2",
        "sessionToken=hunter2",
        "token=hunter2",
        # quoted
        '{"password": "hunter2"}',
        '{"password":"hunter2"}',
        "{'password': 'hunter2'}",
        "{'password': b'hunter2'}",
        "{b'password': b'hunter2'}",
        '{"password": "my hunter2"}',
        '{"password": "a,hunter2"}',
        '{"password": "a&hunter2"}',
        '{"password": "a\\"hunter2"}',
        '{\\"password\\": \\"hunter2\\"}',
        "[('password', 'hunter2')]",
        "User(name='a', password='hunter2')",
        # keys and tokens wherever they stand
        f"got {JWT} from them",
        "secret is whsec_hunter2hunter2hunter2",
        "-----BEGIN PRIVATE KEY-----\nhunter2hunter2\n-----END PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2hunter2\n-----END RSA PRIVATE KEY-----",
    ],
    ids=lambda text: text[:60],
)
def test_a_secret_does_not_come_through(text):
    """However it is written down."""
    masked = redact(text)
    assert "hunter2" not in masked
    assert "aHVudGVy" not in masked
    assert "***" in masked


@pytest.mark.parametrize(
    "text",
    [
        "",
        "500: boom",
        "no answer within 30 s",
        "amqp://rabbit:5672/",
        "http://127.0.0.1:8000/events",
        "sqlite:///bus.db",
        "password is too short",
        "the token expired",
        "id: Field required",
        "compass=north",
        "user=acme&order=7",
        "KeyError: 'order'",
        "a@b.c",
        "mailto:someone@example.com",
        "see https://example.com/a:b@c",
        "passed=3 failed=1",
        "tokens: many",
        "basic idea",
        "basic validation failed",
        "digest mismatch",
        "signal=9",
    ],
    ids=lambda text: text or "empty",
)
def test_what_is_no_secret_is_left_alone(text):
    """An error must still say what went wrong."""
    assert redact(text) == text


def test_the_rest_of_the_text_stays():
    """Only the secret itself is masked: where it stood can still be read."""
    assert redact_url("amqp://wms:hunter2@rabbit:5672/x?heartbeat=5") == "amqp://wms:***@rabbit:5672/x?heartbeat=5"
    assert redact('{"user": "a", "password": "hunter2", "n": 1}') == '{"user": "a", "password": "***", "n": 1}'
    assert redact("a=1&token=hunter2&b=2") == "a=1&token=***&b=2"


PIECES = st.sampled_from(
    [
        "password",
        "token",
        "secret",
        "authorization",
        "bearer ",
        "basic ",
        "=",
        ":",
        ": ",
        "://",
        "@",
        "'",
        '"',
        "\\",
        "/",
        " ",
        "\n",
        ",",
        "a",
        "hunter2",
        "***",
        "eyJabcdefgh.abcd",
        "whsec_abcdefgh",
        "amqp",
        "&",
        ".",
        "-",
        "é",
        "\ud800",
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join) | st.text(st.characters(), max_size=100))
def test_it_never_raises_and_a_second_time_changes_nothing(text):
    """Texts are redacted again on their way: the answer must stay the same."""
    once = redact(text)
    assert redact(once) == once


@pytest.mark.parametrize(
    "piece",
    ["a.", "a-", "a:", "eyJaaaaaaaa-", "x://a:", "x://a@", "token ", "token=", "basic ", "password='", '\\"', " ", "a"],
)
def test_no_text_makes_it_slow(piece):
    """An exception may quote a whole payload: 200 KB of anything take well under a few seconds, not minutes."""
    code = (
        "import sys; from eventbus.redaction import redact\n"
        "piece = sys.argv[1]; redact(piece * (200_000 // len(piece)))"
    )
    try:
        subprocess.run([sys.executable, "-c", code, piece], timeout=5, check=True)
    except subprocess.TimeoutExpired:
        pytest.fail(f"redacting 200 KB of {piece!r} took longer than 5 s")


@pytest.mark.parametrize("piece", ["a.", "eyJaaaaaaaa-"])
def test_no_outcome_makes_describing_it_slow(piece):
    """Whoever limits the text first is free to do so: what must be quick is the way to the header."""
    code = (
        "import sys; from eventbus import Outcome, headers\n"
        "headers.describe(Outcome(error=ValueError(sys.argv[1] * 100_000)))"
    )
    try:
        subprocess.run([sys.executable, "-c", code, piece], timeout=5, check=True)
    except subprocess.TimeoutExpired:
        pytest.fail(f"describing an exception with a long text of {piece!r} took longer than 5 s")
