"""Many events in one POST: the request, and an answer for each of them or one for all. Pure; never raises.

The body is a JSON array of structured CloudEvents (`application/cloudevents-batch+json`). Each carries beside its
attributes what a single request says in headers: `eventbusattempt`, `eventbusmaxattempts`, `eventbuslastattempt`.

An endpoint answers for all with a status, or for each of them with a JSON list:

    [{"id": "1", "status": 200}, {"id": "2", "status": 422, "error": "no such product"}]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from eventbus import wire
from eventbus.errors import Undecodable
from eventbus.event import from_json
from eventbus.forward.answer import VERDICTS, error_reason, outcome_of_answer, retry_after
from eventbus.forward.cloudevents_http import HeaderList, escape, structured
from eventbus.forward.port import MAX_ANSWER_BYTES, Answer, SendFailed
from eventbus.settlement import Delivery
from eventbus.status import ConsumerStatus, Outcome

_TOLD: Final = frozenset({"eventbusattempt", "eventbuslastattempt", "eventbusmaxattempts"})
_ABOUT_THE_ENDPOINT: Final = frozenset({409, 425, 429, 502, 503, 504})
"""Statuses that say how the endpoint is, and nothing about an event: halves of the batch would get them too."""


class Refused(Exception):
    """A batch was refused as a whole, and one of its events may be the cause: the halves are tried by themselves."""


def build_batch(deliveries: Sequence[Delivery]) -> tuple[HeaderList, bytes]:
    """Headers and body of the request for these events."""
    events = [
        structured(delivery.event, _told(delivery.attempt, delivery.max_attempts, delivery.is_last_attempt), _TOLD)
        for delivery in deliveries
    ]
    headers = [
        ("content-type", wire.BATCHED),
        ("idempotency-key", batch_id(deliveries)),
        ("x-eventbus-batch-size", str(len(deliveries))),
        ("x-eventbus-service", escape(deliveries[0].service)),
    ]
    return headers, b"[" + b",".join(events) + b"]"


def batch_id(deliveries: Sequence[Delivery]) -> str:
    """The same for the same events in the same order, whenever they are sent."""
    names = "".join([f"{delivery.event.source}\n{delivery.event.id}\n" for delivery in deliveries])
    return f"batch-{hashlib.sha256(names.encode('utf-8', 'replace')).hexdigest()[:32]}"


def outcomes_of_answer(answer: Answer, deliveries: Sequence[Delivery], *, now: float) -> list[Outcome] | Outcome:
    """One outcome for each event if the endpoint gave a list, else one for all of them."""
    listed = _listed(answer)
    if listed is None:
        return outcome_of_answer(answer, now=now)
    if isinstance(listed, SendFailed):
        return Outcome(error=listed, reason=str(listed))
    missing = Outcome(verdict=ConsumerStatus.DROP, reason="the endpoint's answer to the batch leaves this event out")
    found = {str(entry["id"]): _outcome(entry, now) for entry in listed}
    return [found.get(delivery.event.id, missing) for delivery in deliveries]


def worth_halving(outcome: Outcome) -> bool:
    """Whether one bad event may have spoilt the call for the others."""
    if outcome.verdict is not None or outcome.status is None:
        return False
    return outcome.status >= 300 and outcome.status not in _ABOUT_THE_ENDPOINT


@lru_cache(maxsize=1024)
def _told(attempt: int, max_attempts: int, last: bool) -> str:
    """What the endpoint is told about the attempt: the same members for nearly every event."""
    limit = f', "eventbusmaxattempts": {max_attempts}' if max_attempts else ""
    return f', "eventbusattempt": {attempt}, "eventbuslastattempt": {"true" if last else "false"}{limit}'


def _listed(answer: Answer) -> list[dict[str, object]] | SendFailed | None:
    """The entries of an answer for each event; None if it is none; a failure if it is one, and broken."""
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not answer.body.lstrip().startswith(b"[") or not (kind.endswith("json") or not kind):
        return None
    if len(answer.body) >= MAX_ANSWER_BYTES:
        # Half of a list must not pass for a word about all.
        return SendFailed("protocol", "the answer to the batch is longer than 64 KiB; make the batch smaller")
    try:
        entries = from_json(answer.body)
    except Undecodable as error:
        return SendFailed("protocol", f"the answer to the batch is not JSON: {error}")
    if not isinstance(entries, list) or not entries or not all(map(_is_entry, entries)):
        return None
    return entries


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), (str, int)):
        return False
    status = entry.get("status")
    return isinstance(status, int) and not isinstance(status, bool) and 100 <= status <= 599


def _outcome(entry: Mapping[str, object], now: float) -> Outcome:
    status = entry["status"]
    assert isinstance(status, int)
    outcome = Outcome(status=status, verdict=VERDICTS.get(str(entry.get("verdict", "")).strip().lower()))
    if 200 <= status <= 299 and outcome.verdict in (None, ConsumerStatus.ACK):
        return outcome
    error = entry.get("error")
    text = error if isinstance(error, str) else json.dumps(error) if error is not None else ""
    after = entry.get("retry_after")
    wait = retry_after(str(after) if isinstance(after, (int, float, str)) else None, now=now)
    return replace(outcome, reason=error_reason(text), retry_after=wait)
