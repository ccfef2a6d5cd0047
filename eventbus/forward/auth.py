"""The Authorization header of an endpoint, kept out of every repr."""

from __future__ import annotations

import base64

from eventbus.errors import ConfigError


class Auth:
    """`Auth.bearer(token)` or `Auth.basic(user, password)`."""

    __slots__ = ("_kind", "_secrets", "_value")

    def __init__(self, kind: str, value: str, *secrets: str) -> None:
        self._kind = kind
        self._value = value
        self._secrets = secrets

    @classmethod
    def bearer(cls, token: str) -> Auth:
        """`Authorization: Bearer ...`."""
        token = token.strip()  # a token read from a file ends in a newline
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError("auth.bearer: the token must be printable ASCII without spaces, and not empty")
        return cls("bearer", f"Bearer {token}", token)

    @classmethod
    def basic(cls, user: str, password: str) -> Auth:
        """`Authorization: Basic ...` (UTF-8)."""
        if not user or ":" in user:
            raise ConfigError("auth.basic: the user must not be empty nor hold a colon")
        if not (user + password).isprintable():
            raise ConfigError("auth.basic: user and password must not hold control characters")
        encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
        return cls("basic", f"Basic {encoded}", encoded, password)

    def header(self) -> tuple[str, str]:
        """The header to send."""
        return "authorization", self._value

    def hide(self, text: str) -> str:
        """The text with this secret masked: an endpoint may answer with what it was sent."""
        for secret in self._secrets:
            if len(secret) >= 4:  # masking "a" would mask every word
                text = text.replace(secret, "***")
        return text

    def __repr__(self) -> str:
        return f"Auth.{self._kind}(***)"
