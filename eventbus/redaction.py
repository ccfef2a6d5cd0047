"""Keeps secrets out of headers, logs and errors: passwords in URLs, tokens, keys, cookies. Pure.

Texts may quote a stranger's payload, so every pattern is linear: bounded repeats, and no two that can share a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_MASK: Final = "***"
MAX_TEXT: Final = 8 * 1024
"""What is looked at; the rest is cut off, because nobody keeps more than 2 KiB of an error."""

# A name may end in one of these: PGPASSWORD, aws_secret_access_key, X-Amz-Signature, authToken.
_ENDS: Final = (
    r"(?:password|passwd|passphrase|secret|token|credentials?|signature|(?:api|auth|access|secret|account|private)[_-]?key"
    r"|sharedaccesssignature|session[_-]?id)"
)
# These are parts of common words (compass, design), and count only by themselves.
_ALONE: Final = r"(?:pass|pwd|sig)"
_NAME: Final = rf"(?:[A-Za-z0-9_-]{{0,40}}?{_ENDS}|(?:[A-Za-z0-9_-]{{0,40}}?[_-])?{_ALONE})"
_QUOTE: Final = r"(?:\\?['\"])"
# A quoted value goes to its closing quote, whatever stands between; a bare one to the next separator.
_VALUE: Final = (
    r"(?:b?\\\"(?:[^\"\\]|\\[^\"]){0,2000}\\?\"?"
    r"|b?\"(?:[^\"\\]|\\.){0,2000}\"?"
    r"|b?'(?:[^'\\]|\\.){0,2000}'?"
    r"|[^\s'\"&,;)}\]]{1,2000})"
)


def _masked(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    quote = re.match(r"b?\\?['\"]", value)
    if quote is None:
        return name + _MASK
    closing = quote[0].removeprefix("b")
    return f"{name}{quote[0]}{_MASK}{closing if value.endswith(closing[-1]) else ''}"


_CREDENTIAL: Final = r"(?=[^\s]{0,200}[0-9A-Z=])[A-Za-z0-9._~+/=-]{6,4000}"  # and not the next word of a sentence

_RULES: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    # PEM blocks, whole
    (
        re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]{0,8192}(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"),
        _MASK,
    ),
    # scheme://user:password@host, up to the last @ before the host: a password may hold @ and /
    (
        re.compile(r"(?i)(?<![\w.+-])([a-z][a-z0-9+.-]{0,30}://)([^\s:/@'\"]{0,200}):[^\s'\"]{1,1000}@"),
        rf"\1\2:{_MASK}@",
    ),
    # scheme://token@host
    (re.compile(r"(?i)(?<![\w.+-])([a-z][a-z0-9+.-]{0,30}://)[^\s/:@'\"]{1,1000}@"), rf"\1{_MASK}@"),
    # Authorization: anything at all; Cookie: all of them
    (
        re.compile(
            r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)(\\?['\"]?\s{0,5}[:=,]\s{0,5}\\?['\"]?"
            r"(?:(?:bearer|basic|digest|apikey|token|negotiate)\s{1,5})?)[^\r\n'\"]{1,4000}"
        ),
        rf"\1\2{_MASK}",
    ),
    (re.compile(r"(?i)\b(bearer)\s{1,5}[a-z0-9._~+/=-]{6,4000}"), rf"\1 {_MASK}"),
    (re.compile(rf"\b([Bb]asic|BASIC|[Dd]igest|[Tt]oken|[Aa]pi[Kk]ey)\s{{1,5}}{_CREDENTIAL}"), rf"\1 {_MASK}"),
    # password=abc, "token": "abc", ('secret', 'abc'), ?X-Amz-Signature=abc
    (re.compile(rf"(?i)((?<![A-Za-z0-9_-]){_NAME}{_QUOTE}?\s{{0,5}}[:=]\s{{0,5}})({_VALUE})"), _masked),
    (re.compile(rf"(?i)({_QUOTE}{_NAME}{_QUOTE}\s{{0,5}},\s{{0,5}})({_VALUE})"), _masked),
    # JSON Web Tokens and Standard Webhooks secrets, wherever they stand
    (re.compile(r"(?<![\w-])eyJ[\w-]{8,4000}\.[\w-]{4,4000}(?:\.[\w-]{0,4000})?"), _MASK),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=]{8,200}"), f"whsec_{_MASK}"),
)


def redact(text: str) -> str:
    """The text, at most 8 KiB of it, with everything that looks like a secret masked."""
    text = text[:MAX_TEXT]
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_url(url: str) -> str:
    """A URL that can be printed; also one that somebody mistyped."""
    _, at, rest = url.rpartition("@")
    return redact(url) if "://" in url or not at else f"{_MASK}@{rest}"
