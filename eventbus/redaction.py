"""Keeps secrets out of headers, logs and errors: passwords in URLs, tokens, signatures. Pure."""

from __future__ import annotations

import re
from typing import Final

_MASK: Final = "***"
_SECRET_WORDS: Final = (
    r"pass(?:word|wd|phrase)?|pwd|secret|client[_-]?secret|token|access[_-]?token|refresh[_-]?token|id[_-]?token"
    r"|api[_-]?key|apikey|auth[_-]?key|x-api-key|private[_-]?key|sig|signature|x-amz-signature|x-amz-credential"
    r"|x-amz-security-token|x-goog-signature|sharedaccesssignature|credential|cookie|set-cookie"
)
_RULES: Final = (
    # scheme://user:password@host
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s/:@]*):[^\s/@]+@"), rf"\1:{_MASK}@"),
    # scheme://token@host
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/:@]+@"), rf"\1{_MASK}@"),
    # Authorization: Bearer abc, Basic abc
    (re.compile(r"(?i)\b(bearer|basic|digest)\s+[a-z0-9._~+/=-]{6,}"), rf"\1 {_MASK}"),
    (re.compile(r"(?i)\b(authorization['\"]?\s*[:=]\s*['\"]?)(?!bearer|basic|digest)[^\s'\",;]+"), rf"\1{_MASK}"),
    # password=abc, "token": "abc", ?X-Amz-Signature=abc
    (re.compile(rf"(?i)(?<![a-z0-9])((?:{_SECRET_WORDS})['\"]?\s*[:=]\s*)(['\"]?)[^\s'\"&,;)}}\]]+"), rf"\1\2{_MASK}"),
    # JSON Web Tokens wherever they stand
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?"), _MASK),
    # Standard Webhooks secrets
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=]{8,}"), f"whsec_{_MASK}"),
)


def redact(text: str) -> str:
    """The text with everything that looks like a secret masked."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_url(url: str) -> str:
    """A URL that can be printed."""
    return redact(url)
