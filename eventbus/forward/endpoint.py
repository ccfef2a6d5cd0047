"""The Endpoint: a route's handler that is an HTTP service. Delivery in, Outcome out; a Batch in, outcomes out.

    Endpoint("https://billing.internal/events", timeout=10, sign="whsec_...", auth=Auth.bearer(token))

What happens on failure: no usable answer is an outcome with an error (retry loop), any status goes through the
route's status map. After 10 failures in a row the breaker opens and events wait without being sent, at no cost; when
it closes again they are let through a few at a time first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Literal
from urllib.parse import urlsplit

from eventbus import telemetry
from eventbus.batch import Batch
from eventbus.durations import seconds
from eventbus.errors import ConfigError
from eventbus.forward.answer import outcome_of_answer, outcome_of_failure
from eventbus.forward.auth import Auth
from eventbus.forward.batching import Refused, build_batch, outcomes_of_answer, worth_halving
from eventbus.forward.breaker import Breaker, BreakerState
from eventbus.forward.cloudevents_http import MODES, HeaderList, Mode, build, escape
from eventbus.forward.egress import EGRESS, Egress, literal, refusal, resolve
from eventbus.forward.port import Answer, Sender, SendFailed
from eventbus.forward.senders import SENDERS, SenderKind, default_sender
from eventbus.forward.signing import Signer
from eventbus.forward.tls import Tls
from eventbus.redaction import redact
from eventbus.settlement import Delivery
from eventbus.status import ConsumerStatus, Outcome

BREAKER_OPEN: Final = "breaker open"
"""Reason of the REQUEUE for an event that was not sent: free of cost, without limit."""

ENDPOINT_DOWN: Final = "endpoint down"
"""How the reason begins of the REQUEUE for an event that found the endpoint down, as a probe or on its last attempt."""

_GATEWAY_STATUSES: Final = frozenset({502, 503, 504})
_STATES: Final[dict[BreakerState, int]] = {"closed": 0, "half-open": 1, "open": 2}
_TURN: Final = 1.0
"""How long a call waits for its turn at an endpoint that is coming back; then its event waits elsewhere."""
_LOOKUP_TIMEOUT: Final = 10.0


@dataclass(frozen=True, slots=True)
class EndpointState:
    """How an endpoint is doing, as this process sees it."""

    url: str
    breaker: BreakerState | Literal["off"]
    failures: int
    """In a row, so far."""
    probe_at: float | None
    """When it is asked again, while the breaker is open (seconds since the epoch)."""
    limit: int | None
    """Calls at a time that it gets while it comes back; None for as many as the route has."""


class Endpoint:
    """One URL that events are posted to. Called by the worker like any handler; `open` before, `aclose` after.

    `breaker`: on by default; one of your own to set its numbers, None or False to go without.
    `sender`: "lean" (the default), "aiohttp", or an HTTP client of your own behind the port. `tls` and `egress` are
    kept by the first two only. `connections` is how many of them are open at most.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float | str | timedelta = 30.0,
        mode: Mode | Literal["batch"] = "binary",
        sign: Signer | str | Sequence[str] | None = None,
        breaker: Breaker | bool | None = True,
        auth: Auth | None = None,
        tls: Tls | None = None,
        egress: Egress = "any",
        connections: int = 64,
        halving: bool = True,
        sender: Sender | SenderKind | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        check_url(url, egress)
        self.url: Final = url
        self.timeout: Final = seconds(timeout)
        if self.timeout <= 0:
            raise ConfigError(f"timeout = {timeout!r}: must be above 0, such as '10s'")
        if mode not in (*MODES, "batch"):
            raise ConfigError(f"mode = {mode!r}: must be 'binary', 'structured', 'raw' or 'batch'")
        if egress not in EGRESS:
            raise ConfigError(f"egress = {egress!r}: must be 'any' or 'public-only'")
        if isinstance(sender, str) and sender not in SENDERS:
            raise ConfigError(f"sender = {sender!r}: must be 'lean' or 'aiohttp', or a Sender")
        self.mode: Final = mode
        self._single_mode: Mode = "structured" if mode == "batch" else mode
        self.breaker: Final = (breaker if isinstance(breaker, Breaker) else Breaker()) if breaker else None
        self._signer = _signer(sign)
        self._auth = auth
        self._tls = tls
        self._egress: Egress = egress
        self._connections = connections
        self._halving = halving
        self._kind: SenderKind = sender if isinstance(sender, str) else "lean"
        self._own_sender = None if isinstance(sender, str) else sender
        self._sender = self._own_sender
        self._made_here = False
        self._now = now
        self.labels: dict[str, str] = {"endpoint": printable(url)}
        """Who it is, in logs and metrics; its service adds what it knows."""
        self._turns: deque[asyncio.Future[None]] = deque()
        self._lookup: asyncio.Task[None] | None = None

    async def open(self, sender: Sender | None = None, *, now: Callable[[], float] | None = None) -> None:
        """Be ready to send: with the sender of the constructor, else with this shared one, else with a new one.

        A host that nobody knows is a warning and not an error: it may be there when the first event comes.
        """
        self._now = now or self._now
        if sender is not None:  # anew each time: a service may run on one bus after another
            await self.aclose()
            self._sender = self._own_sender or sender
        theirs = self._own_sender or sender
        if theirs is not None and (self._tls is not None or self._egress != "any"):
            raise ConfigError(
                f"{printable(self.url)}: tls and egress are kept by the senders 'lean' and 'aiohttp' only; set them on "
                f"the client of {type(theirs).__name__} and leave them out here"
            )
        self._ready()
        if self.breaker is not None:
            telemetry.breakers.add(self)
        if theirs is None and self._lookup is None:
            self._lookup = asyncio.get_running_loop().create_task(self._look_up())

    async def aclose(self) -> None:
        """Close the sender if it was made here; one that was handed over belongs to who made it."""
        telemetry.breakers.discard(self)
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            lookup.cancel()
        sender, self._sender = self._sender, self._own_sender
        made_here, self._made_here = self._made_here, False
        if made_here and sender is not None:
            await sender.aclose()

    @property
    def breaker_number(self) -> int:
        """Where its breaker stands, as metrics tell it."""
        return 0 if self.breaker is None else _STATES[self.breaker.state]

    @property
    def state(self) -> EndpointState:
        """How it is doing."""
        breaker = self.breaker
        if breaker is None:
            return EndpointState(printable(self.url), "off", 0, None, None)
        return EndpointState(printable(self.url), breaker.state, breaker.failed, breaker.opens_at, breaker.limit)

    async def __call__(self, delivery: Delivery) -> Outcome:
        """Post the event and say what came of it; every answer, and none, is an outcome."""
        if not (self.breaker is None or self.breaker.allow(self._now()) or await self._turn(self.breaker)):
            return self._not_now(self.breaker)
        headers, body = build(delivery, self._single_mode)
        end, free = await self._exchange(headers, body, delivery.event.id, last=delivery.is_last_attempt)
        if isinstance(end, SendFailed):
            return self._told(outcome_of_failure(end), free)
        return self._told(outcome_of_answer(end, now=self._now()), free)

    async def send_batch(self, batch: Batch) -> Outcome | list[Outcome]:
        """Post many events at once: an outcome for each of them, or one for all.

        Raises Refused where the batch as a whole got a status that one of its events may have caused.
        """
        deliveries = [item.delivery for item in batch]
        if not (self.breaker is None or self.breaker.allow(self._now()) or await self._turn(self.breaker)):
            return self._not_now(self.breaker)
        headers, body = build_batch(deliveries)
        key = next(value for name, value in headers if name == "idempotency-key")
        last = any(delivery.is_last_attempt for delivery in deliveries)
        end, free = await self._exchange(headers, body, key, last=last)
        if isinstance(end, SendFailed):
            return self._told(outcome_of_failure(end), free)
        found = outcomes_of_answer(end, deliveries, now=self._now())
        if isinstance(found, list):
            return [self._told(outcome, free=False) for outcome in found]
        if self._halving and len(deliveries) > 1 and worth_halving(found):
            raise Refused(f"{found.status} for {len(deliveries)} events")
        return self._told(found, free)

    def __repr__(self) -> str:
        return f"Endpoint({printable(self.url)!r}, timeout={self.timeout:g}, mode={self.mode!r})"

    # --- sending ---------------------------------------------------------------------------------------------

    async def _exchange(
        self, headers: HeaderList, body: bytes, id: str, *, last: bool
    ) -> tuple[Answer | SendFailed, bool]:
        """What came back, and whether finding the endpoint down costs the event nothing.

        That is so for the breaker's probe, and for an event on its last attempt that found nobody to talk to: it opens
        the breaker and waits, so that an endpoint that is down parks nothing, however few retries there are.
        """
        if self._signer is not None:
            headers += self._signer.headers(escape(id), body, self._now())
        if self._auth is not None:
            headers.append(self._auth.header())
        breaker = self.breaker
        epoch, probing = (0, False) if breaker is None else (breaker.epoch, breaker.state == "half-open")
        end: Answer | SendFailed
        try:
            end = await self._ready().post(self.url, headers, body, timeout=self.timeout)
            if not 100 <= end.status <= 599:
                end = SendFailed("protocol", f"the answer has the status {end.status}; there are 100 to 599")
        except SendFailed as failure:
            end = failure
        except BaseException:
            if breaker is not None:
                breaker.forget(epoch)  # called off by a shutdown: says nothing of the endpoint
                self._let_in()
            raise
        if breaker is None:
            return end, False
        nobody = last and isinstance(end, SendFailed) and not end.connected
        before = breaker.epoch
        # Anything but 5xx shows an endpoint that is alive, however little it likes the event.
        breaker.record(isinstance(end, Answer) and end.status < 500, self._now(), epoch, trip=nobody)
        if breaker.epoch != before:  # changed by this very call, not by one of those beside it
            self._report(breaker, end)
        if self._turns:
            self._let_in()
        return end, probing or nobody

    def _told(self, outcome: Outcome, free: bool) -> Outcome:
        if self._auth is not None and outcome.reason:
            outcome = replace(outcome, reason=self._auth.hide(outcome.reason))
        if not free or outcome.verdict is not None or not _is_down(outcome):
            return outcome
        # A probe asks how the endpoint is, and that is not the event's fault: were it charged, a lonely event
        # would be parked by an endpoint that is merely down for an hour.
        assert self.breaker is not None
        return replace(
            outcome,
            verdict=ConsumerStatus.REQUEUE,
            reason=f"{ENDPOINT_DOWN}: {outcome.reason}".removesuffix(": "),
            retry_after=max(self.breaker.wait(self._now()), outcome.retry_after or 0.0),
        )

    def _ready(self) -> Sender:
        if self._sender is None:
            self._made_here = True
            context = self._tls.context() if self._tls is not None else None
            self._sender = default_sender(self._kind, self._connections, self._egress, context)
        return self._sender

    async def _look_up(self) -> None:
        parts = urlsplit(self.url)
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT):
                await resolve(parts.hostname or "", parts.port or 0, self._egress)
        except (SendFailed, TimeoutError) as error:
            why = str(error) or f"no answer from DNS within {_LOOKUP_TIMEOUT:g} s"
            fields = {"error": why, "advice": "events wait until it is there"}
            telemetry.log(logging.WARNING, "endpoint_unknown", self.labels | fields)

    # --- the breaker -----------------------------------------------------------------------------------------

    def _not_now(self, breaker: Breaker) -> Outcome:
        wait = breaker.wait(self._now())
        return Outcome(verdict=ConsumerStatus.REQUEUE, reason=BREAKER_OPEN, retry_after=wait, waiting=True)

    async def _turn(self, breaker: Breaker) -> bool:
        """Wait in line at an endpoint that is coming back; False if it is not, or if the line is too long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _TURN
        while breaker.limit is not None:
            turn = loop.create_future()
            self._turns.append(turn)
            try:
                async with asyncio.timeout_at(deadline):
                    await turn
            except TimeoutError:
                return False
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._let_in()  # it was our turn, and we do not take it
                raise
            if breaker.allow(self._now()):
                return True
        return breaker.state == "closed" and breaker.allow(self._now())

    def _let_in(self) -> None:
        breaker = self.breaker
        room = None if breaker is None else breaker.room
        while self._turns and (room is None or room > 0):
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                room = None if room is None else room - 1

    def _report(self, breaker: Breaker, end: Answer | SendFailed) -> None:
        state, fields = breaker.state, dict[str, object](self.labels)
        if state == "open":
            fields["error"] = str(end) if isinstance(end, SendFailed) else f"status {end.status}"
            fields["probe_in"] = round(breaker.wait(self._now()), 3)
            telemetry.log(logging.WARNING, "breaker_opened", fields)
        elif state == "closed":
            telemetry.log(logging.INFO, "breaker_closed", fields)


def check_url(url: str, egress: Egress = "any") -> None:
    """Raises ConfigError, with what to do, for a URL that events cannot be posted to."""
    shown = printable(url)
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        raise ConfigError(f"forward = {shown!r}: a URL holds no spaces nor control characters")
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed, and found wrong, only when asked for
    except ValueError as error:
        raise ConfigError(f"forward = {shown!r}: not a URL ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"forward = {shown!r}: write the whole URL, such as 'https://billing.internal/events'")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"forward = {shown!r}: take the user and password out of the URL and set auth instead")
    address = literal(parts.hostname)
    reason = refusal(address, egress) if address else None
    if reason:
        raise ConfigError(f"forward = {shown!r}: nothing is sent there, {address} {reason}")
    if parts.fragment:
        raise ConfigError(f"forward = {shown!r}: take the part after '#' away; it is never sent")


def printable(url: object) -> str:
    """The URL for people: no user, no password, and only that there is a query."""
    scheme, mark, rest = str(url).partition("://")
    # Up to the last "@", wherever it stands: a password with a slash in it must not show either.
    _, at, rest = rest.rpartition("@")
    text = f"{scheme}{mark}{'***@' if at else ''}{rest}"
    path, query, _ = text.partition("?")
    return redact(f"{path}?***" if query else path)


def _signer(sign: Signer | str | Sequence[str] | None) -> Signer | None:
    if sign is None or isinstance(sign, Signer):
        return sign
    return Signer(sign) if isinstance(sign, str) else Signer(*sign)


def _is_down(outcome: Outcome) -> bool:
    return isinstance(outcome.error, SendFailed) or outcome.status in _GATEWAY_STATUSES
