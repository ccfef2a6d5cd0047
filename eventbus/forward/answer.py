"""What an answer means: Answer or SendFailed -> Outcome. Pure; garbage in an answer never raises, it is ignored."""

from __future__ import annotations

import re
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import Final

from eventbus.forward.port import Answer, SendFailed
from eventbus.headers import MAX_ERROR_BYTES, cut
from eventbus.policy import MAX_RETRY_AFTER
from eventbus.redaction import redact
from eventbus.status import ConsumerStatus, Outcome

VERDICT_HEADER: Final = "x-eventbus-verdict"
VERDICTS: Final = {status.value: status for status in ConsumerStatus}
_DONE: Final = {status: Outcome(status=status) for status in range(200, 300)}
_DIGITS: Final = re.compile(r"[0-9]{1,19}")
_TEXT_TYPES: Final = re.compile(r"text/.*|application/(.*\+)?(json|xml)|application/x-www-form-urlencoded")


def outcome_of_answer(answer: Answer, *, now: float) -> Outcome:
    """The outcome of a request that was answered; the status map has the last word unless a verdict was sent."""
    said = answer.headers.get(VERDICT_HEADER)
    if said is None and answer.status in _DONE:
        return _DONE[answer.status]
    verdict = VERDICTS.get((said or "").strip().lower())
    if 200 <= answer.status <= 299 and verdict in (None, ConsumerStatus.ACK):
        return Outcome(status=answer.status, verdict=verdict)
    return Outcome(
        status=answer.status,
        verdict=verdict,
        reason=error_text(answer),
        retry_after=retry_after(answer.headers.get("retry-after"), now=now),
    )


def outcome_of_failure(failure: SendFailed) -> Outcome:
    """The outcome of a request without a usable answer: into the retry loop, like any exception."""
    return Outcome(error=failure, reason=cut(str(failure), MAX_ERROR_BYTES))


def retry_after(value: str | None, *, now: float) -> float | None:
    """Seconds that a Retry-After header asks for, from 0 to 1 h. Anything malformed is no header."""
    text = (value or "").strip()
    if _DIGITS.fullmatch(text):
        return min(float(text), MAX_RETRY_AFTER)
    if not text[:1].isalpha() or len(text) > 64:  # every form of an HTTP date begins with the name of a day
        return None
    try:
        moment = parsedate_to_datetime(text)
        # "-0000" and the old asctime form carry no zone; HTTP knows only GMT.
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return min(max(0.0, moment.timestamp() - now), MAX_RETRY_AFTER)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def error_text(answer: Answer) -> str:
    """The first 2 KiB of a text or JSON body on one line, without secrets; empty for anything else."""
    if answer.headers.get("content-encoding", "identity").strip().lower() != "identity":
        return ""  # not asked for, not unpacked
    kind, _, parameters = answer.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind and not _TEXT_TYPES.fullmatch(kind):
        return ""
    # Twice what is kept: a secret that stands across the cut must be seen whole to be masked.
    text = _decode(answer.body[: 2 * MAX_ERROR_BYTES], parameters)
    if not kind and not _looks_like_text(text):
        return ""
    return error_reason(text)


def error_reason(text: str) -> str:
    """An endpoint's words on one line, without secrets, at most 2 KiB of them."""
    return cut(" ".join(redact(text).split()), MAX_ERROR_BYTES)


def _decode(body: bytes, parameters: str) -> str:
    match = re.search(r"charset\s*=\s*\"?\s*(latin-?1|iso-8859-1|windows-1252|us-ascii)", parameters, re.IGNORECASE)
    if match:
        return body.decode("windows-1252", "replace")
    return body.decode("utf-8", "replace").rstrip("�")  # the last character may have been cut in two


def _looks_like_text(text: str) -> bool:
    return "\x00" not in text and "�" not in text
