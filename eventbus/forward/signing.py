"""Standard Webhooks signatures (standardwebhooks.com): the endpoint can tell that we sent it, and when. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

from eventbus.errors import ConfigError

_PREFIX: Final = "whsec_"


class Signer:
    """Signs with one secret, or with two while one takes the other's place: an endpoint accepts either signature.

    A secret is `whsec_` and base64, as the standard has it, or any other text, whose bytes are then the key.
    """

    __slots__ = ("_keys",)

    def __init__(self, *secrets: str) -> None:
        if not 1 <= len(secrets) <= 2:
            raise ConfigError(f"sign: give one secret, or two for rotation, not {len(secrets)}")
        self._keys = tuple(_key(secret) for secret in secrets)

    def headers(self, id: str, body: bytes, timestamp: float) -> list[tuple[str, str]]:
        """The three headers for one attempt. `id` must be what is sent as `webhook-id`, to the letter."""
        seconds = str(int(timestamp))
        signed = b".".join((id.encode(), seconds.encode(), body))
        signatures = (base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in self._keys)
        return [
            ("webhook-id", id),
            ("webhook-timestamp", seconds),
            ("webhook-signature", " ".join(f"v1,{signature}" for signature in signatures)),
        ]

    def __repr__(self) -> str:
        return f"Signer({', '.join(['***'] * len(self._keys))})"


def _key(secret: str) -> bytes:
    # No message of these may quote the secret.
    if not isinstance(secret, str) or not secret.strip():
        raise ConfigError("sign.secret is empty; is its environment variable set?")
    if not secret.startswith(_PREFIX):
        return secret.encode()
    text = secret[len(_PREFIX) :].strip()
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError("sign.secret: what follows 'whsec_' must be base64") from None
    if not key:
        raise ConfigError("sign.secret: nothing follows 'whsec_'")
    return key
