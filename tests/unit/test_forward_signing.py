"""Standard Webhooks, checked by the official package; and the Authorization header."""

from __future__ import annotations

import base64
import time

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from eventbus.errors import ConfigError
from eventbus.forward.auth import Auth
from eventbus.forward.signing import Signer

OLD = "whsec_" + base64.b64encode(b"the old secret of 24 bytes").decode()
NEW = "whsec_" + base64.b64encode(b"the new secret of 24 bytes").decode()
BODY = '{"id": 1, "name": "Müller"}'.encode()


def test_the_official_package_accepts_the_signature():
    """A receiver with the standard's library verifies what we send."""
    headers = dict(Signer(OLD).headers("evt-1", BODY, time.time()))
    assert Webhook(OLD).verify(BODY, headers) == {"id": 1, "name": "Müller"}


def test_the_example_of_the_standard_comes_out_to_the_letter():
    """The known answer of the official library's own tests."""
    headers = dict(
        Signer("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").headers(
            "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', 1614265330
        )
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert headers["webhook-timestamp"] == "1614265330"


def test_while_secrets_rotate_either_one_verifies():
    """Two secrets give two signatures, separated by a space."""
    headers = dict(Signer(NEW, OLD).headers("evt-1", BODY, time.time()))
    assert len(headers["webhook-signature"].split(" ")) == 2
    for secret in (OLD, NEW):
        Webhook(secret).verify(BODY, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + base64.b64encode(b"another").decode()).verify(BODY, headers)


def test_a_plain_text_secret_is_its_own_bytes():
    """A secret without the prefix need not be base64."""
    headers = dict(Signer("not base64 at all!").headers("evt-1", BODY, time.time()))
    Webhook(b"not base64 at all!").verify(BODY, headers)


def test_a_secret_without_padding_is_taken():
    """Senders hand out both spellings of base64."""
    headers = dict(Signer(OLD.rstrip("=")).headers("evt-1", BODY, time.time()))
    Webhook(OLD).verify(BODY, headers)


def test_each_attempt_has_its_own_timestamp():
    """A receiver refuses old timestamps, so that of the first attempt would not do for the tenth."""
    signer = Signer(OLD)
    first, second = (dict(signer.headers("evt-1", BODY, now)) for now in (1000.9, 1005.0))
    assert (first["webhook-timestamp"], second["webhook-timestamp"]) == ("1000", "1005")
    assert first["webhook-signature"] != second["webhook-signature"]


@pytest.mark.parametrize("secrets", [(), ("",), ("   ",), ("whsec_",), ("whsec_not-base64!",), (OLD, NEW, OLD)])
def test_an_unusable_secret_is_refused_without_being_quoted(secrets):
    """The error says what to do and keeps the secret to itself."""
    with pytest.raises(ConfigError) as caught:
        Signer(*secrets)
    assert "not-base64!" not in str(caught.value)
    assert str(caught.value).startswith("sign")


def test_reprs_hide_the_secrets():
    """Signers and auths can be logged."""
    assert repr(Signer(NEW, OLD)) == "Signer(***, ***)"
    assert repr(Auth.bearer("abcdef")) == "Auth.bearer(***)"
    assert repr(Auth.basic("user", "pass")) == "Auth.basic(***)"


def test_auth_is_written_as_http_has_it():
    """Bearer as it is, basic in base64 of UTF-8; the newline of a secret's file is no part of it."""
    assert Auth.bearer("abc.def\n").header() == ("authorization", "Bearer abc.def")
    assert Auth.basic("user", "pässword").header() == ("authorization", "Basic dXNlcjpww6Rzc3dvcmQ=")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Auth.bearer(""),
        lambda: Auth.bearer("two words"),
        lambda: Auth.bearer("a\r\nx: y"),
        lambda: Auth.bearer("tökken"),
        lambda: Auth.basic("", "password"),
        lambda: Auth.basic("us:er", "password"),
        lambda: Auth.basic("user", "pass\r\nword"),
    ],
)
def test_auth_that_could_not_be_sent_is_refused(make):
    """An unset variable or a line break is an error at construction."""
    with pytest.raises(ConfigError, match=r"auth\."):
        make()


def test_auth_masks_itself_in_what_an_endpoint_echoes():
    """The token never reaches x-final-error."""
    assert Auth.bearer("s3cr3t-t0k3n").hide("no such key: s3cr3t-t0k3n") == "no such key: ***"
