"""Who asks: tokens with a role, kept as hashes, some of them for a few tenants only. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypeAlias, get_args

Role: TypeAlias = Literal["viewer", "operator", "admin"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""Each may do what those before it may."""

HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
_MARK: Final = "ebt_"


@dataclass(frozen=True, slots=True)
class Token:
    """One token of bus.toml; the token itself is nowhere, only its hash."""

    name: str
    role: Role
    hash: str = field(repr=False)
    tenants: frozenset[str] | None = None
    """Nothing exists for it but what belongs to these; None: it sees everything."""
    expires: datetime | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from."""

    name: str
    role: Role
    tenants: frozenset[str] | None = None

    def may(self, role: Role) -> bool:
        """Whether that role is theirs."""
        return ROLES.index(self.role) >= ROLES.index(role)


LOCAL: Final = Caller("local", "admin")
"""Whoever asks on a loopback address while there is no token: a user of this machine, who has the file as well."""


class Rejected(Exception):
    """No token, a wrong one, or one that has expired; the text says which."""


def new_token() -> str:
    """A token that nobody can guess: 256 random bits."""
    return _MARK + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """What stands in the config.

    A plain SHA-256, not scrypt: slow hashes protect secrets that can be guessed, and 256 random bits cannot be. It is
    computed for every request, where a slow one would only help whoever wants to keep the server busy.
    """
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


class Keyring:
    """All tokens there are."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tuple(tokens)

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def caller(self, authorization: str | None, now: float) -> Caller:
        """Who an Authorization header stands for."""
        if not self._tokens:
            return LOCAL
        scheme, _, token = (authorization or "").partition(" ")
        if not authorization:
            raise Rejected("there is no token")
        if scheme.lower() != "bearer" or not token.strip():
            raise Rejected("the Authorization header is not 'Bearer TOKEN'")
        wanted, found = hash_of(token.strip()), None
        for one in self._tokens:  # all of them, each in constant time: how long it takes says nothing
            if hmac.compare_digest(one.hash, wanted):
                found = one
        if found is None:
            raise Rejected("nobody has this token")
        if found.expires is not None and found.expires.timestamp() <= now:
            raise Rejected(f"the token {found.name} has expired")
        return Caller(found.name, found.role, found.tenants)
