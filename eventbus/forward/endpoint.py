"""The Endpoint: a route's handler that is an HTTP service. Delivery in, Outcome out.

    Endpoint("https://billing.internal/events", timeout=10, sign="whsec_...", auth=Auth.bearer(token))

What happens on failure: no usable answer is an outcome with an error (retry loop), any status goes through the
route's status map. After 10 failures in a row the breaker opens and events wait without being sent, at no cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

from eventbus.durations import seconds
from eventbus.errors import ConfigError
from eventbus.forward.answer import outcome_of_answer, outcome_of_failure
from eventbus.forward.auth import Auth
from eventbus.forward.breaker import Breaker
from eventbus.forward.cloudevents_http import MODES, HeaderList, Mode, build, escape
from eventbus.forward.port import Sender, SendFailed
from eventbus.forward.signing import Signer
from eventbus.redaction import redact
from eventbus.settlement import Delivery
from eventbus.status import ConsumerStatus, Outcome

BREAKER_OPEN: Final = "breaker open"
"""Reason of the REQUEUE for an event that was not sent: free of cost, without limit."""

PROBE_FAILED: Final = "probe failed"
"""How the reason begins of the REQUEUE for an event that was sent as a probe and found the endpoint still down."""

_GATEWAY_STATUSES: Final = frozenset({502, 503, 504})


class Endpoint:
    """One URL that events are posted to. Called by the worker like any handler; `open` before, `aclose` after.

    `breaker`: on by default; one of your own to set its numbers, None or False to go without.
    `sender`: an HTTP client of your own; without one the bus's shared sender is used, see `open`.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float | str | timedelta = 30.0,
        mode: Mode = "binary",
        sign: Signer | str | Sequence[str] | None = None,
        breaker: Breaker | bool | None = True,
        auth: Auth | None = None,
        sender: Sender | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        check_url(url)
        self.url: Final = url
        self.timeout: Final = seconds(timeout)
        if self.timeout <= 0:
            raise ConfigError(f"timeout = {timeout!r}: must be above 0, such as '10s'")
        if mode not in MODES:
            raise ConfigError(f"mode = {mode!r}: must be 'binary', 'structured' or 'raw'")
        self.mode: Final[Mode] = mode
        self.breaker: Final = (breaker if isinstance(breaker, Breaker) else Breaker()) if breaker else None
        self._signer = _signer(sign)
        self._auth = auth
        self._own_sender = sender
        self._sender = sender
        self._made_here = False
        self._now = now

    async def open(self, sender: Sender | None = None) -> None:
        """Be ready to send: with the sender of the constructor, else with this shared one, else with a new one."""
        if sender is not None:  # anew each time: a service may run on one bus after another
            await self.aclose()
            self._sender = self._own_sender or sender
        self._ready()

    async def aclose(self) -> None:
        """Close the sender if it was made here; one that was handed over belongs to who made it."""
        sender, self._sender = self._sender, self._own_sender
        made_here, self._made_here = self._made_here, False
        if made_here and sender is not None:
            await sender.aclose()

    async def __call__(self, delivery: Delivery) -> Outcome:
        """Post the event and say what came of it; every answer, and none, is an outcome."""
        breaker = self.breaker
        if breaker is None:
            outcome, _ = await self._send(delivery)
            return outcome
        now = self._now()
        if not breaker.allow(now):
            wait = breaker.wait(now)
            return Outcome(verdict=ConsumerStatus.REQUEUE, reason=BREAKER_OPEN, retry_after=wait, waiting=True)
        epoch, probing = breaker.epoch, breaker.state == "half-open"
        try:
            outcome, ok = await self._send(delivery)
        except BaseException:
            breaker.forget(epoch)  # called off by a shutdown: says nothing of the endpoint
            raise
        now = self._now()
        breaker.record(ok, now, epoch)
        if probing and outcome.verdict is None and _is_down(outcome):
            # A probe asks how the endpoint is, and that is not the event's fault: were it charged, a lonely event
            # would be parked by an endpoint that is merely down for an hour.
            return replace(
                outcome,
                verdict=ConsumerStatus.REQUEUE,
                reason=f"{PROBE_FAILED}: {outcome.reason}".removesuffix(": "),
                retry_after=max(breaker.wait(now), outcome.retry_after or 0.0),
            )
        return outcome

    def __repr__(self) -> str:
        return f"Endpoint({printable(self.url)!r}, timeout={self.timeout:g}, mode={self.mode!r})"

    async def _send(self, delivery: Delivery) -> tuple[Outcome, bool]:
        headers, body = self._request(delivery)
        try:
            answer = await self._ready().post(self.url, headers, body, timeout=self.timeout)
        except SendFailed as failure:
            return self._hide(outcome_of_failure(failure)), False
        # Anything but 5xx shows an endpoint that is alive, however little it likes the event.
        return self._hide(outcome_of_answer(answer, now=self._now())), answer.status < 500

    def _request(self, delivery: Delivery) -> tuple[HeaderList, bytes]:
        headers, body = build(delivery, self.mode)
        if self._signer is not None:
            headers += self._signer.headers(escape(delivery.event.id), body, self._now())
        if self._auth is not None:
            headers.append(self._auth.header())
        return headers, body

    def _hide(self, outcome: Outcome) -> Outcome:
        if self._auth is None or not outcome.reason:
            return outcome
        return replace(outcome, reason=self._auth.hide(outcome.reason))

    def _ready(self) -> Sender:
        if self._sender is None:
            self._made_here = True
            self._sender = default_sender()
        return self._sender


def default_sender() -> Sender:
    """A new sender of the default kind; one serves all endpoints of a process. Raises ConfigError without aiohttp."""
    from eventbus.forward.aiohttp_sender import AiohttpSender

    return AiohttpSender()


def check_url(url: str) -> None:
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
