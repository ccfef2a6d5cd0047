"""A Service: what one consumer does with which events. No I/O; handlers stay plain functions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from eventbus import naming, payload
from eventbus.adapter import BodyMapping, Subscription
from eventbus.durations import seconds
from eventbus.errors import ConfigError
from eventbus.policy import Policy, RetryPolicy
from eventbus.settlement import Delivery
from eventbus.shaping import Fairness, Idempotency, Rate
from eventbus.status import ConsumerStatus, StatusMap

if TYPE_CHECKING:
    from eventbus.forward.auth import Auth
    from eventbus.forward.breaker import Breaker
    from eventbus.forward.endpoint import Endpoint
    from eventbus.forward.port import Sender
    from eventbus.forward.tls import Tls

T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., object])
StatusRules = Mapping[int | str, ConsumerStatus | str]
Duration = float | str | timedelta

MAX_IN_PLACE: Final = 15 * 60.0
RATED_PREFETCH: Final = 300.0
"""A service with a rate holds no more than it may handle in this many seconds: nobody else could have it meanwhile."""


@dataclass(frozen=True, slots=True)
class BatchWindow:
    """How a batch is filled: at most `size` events, waiting at most `timeout` seconds for them."""

    size: int = 1000
    timeout: float = 1.0
    on_error: Literal["split", "fail-all"] = "split"

    def __post_init__(self) -> None:
        _count("batch.size", self.size)
        _positive("batch.timeout", self.timeout)
        _one_of("batch.on_error", self.on_error, ("split", "fail-all"))


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Events of one pattern, and what is called for them."""

    pattern: str
    name: str
    call: Callable[..., object]
    signature: payload.Signature
    policy: Policy
    concurrency: int
    timeout: float
    batch: BatchWindow | None = None
    endpoint: Endpoint | None = None
    rates: tuple[Rate, ...] = ()

    @property
    def capacity(self) -> int:
        """How many events it can have in its hands at once."""
        return self.concurrency * (self.batch.size if self.batch else 1)


@dataclass(frozen=True, slots=True)
class DeadLetterRoute:
    """A consumer of the service's dead letters."""

    call: Callable[..., object]
    is_async: bool
    batch: int
    timeout: float


@dataclass(slots=True)
class _Routes:
    exact: dict[str, Route] = field(default_factory=dict)
    patterns: list[tuple[int, Route]] = field(default_factory=list)


class Service:
    """One durable subscription, shared by its replicas: `wms = Service("wms-cincout", concurrency=64)`.

    Exactly one route takes an event: an exact type before a pattern, then the pattern with the longer literal
    beginning, then the one declared first. `concurrency` and `timeout` are the defaults of its routes: every route
    has its own lane, so that a slow one does not starve the others.
    """

    def __init__(
        self,
        name: str,
        *,
        prefix: str | None = None,
        concurrency: int = 64,
        timeout: Duration = 30.0,
        retry: RetryPolicy | None = None,
        status: StatusRules | None = None,
        permanent: tuple[type[BaseException], ...] = (),
        permanent_codes: Collection[str] = (),
        retryable_codes: Collection[str] = (),
        unknown_code: Literal["retry", "park"] = "retry",
        strict: bool = False,
        dlq: bool = True,
        on_exhausted: Literal["park", "retry-forever", "discard"] | None = None,
        prefetch: int | None = None,
        max_local_delay: Duration = 30.0,
        max_crashes: int = 3,
        grace: Duration = 25.0,
        mapping: BodyMapping | None = None,
        fairness: Fairness | bool = False,
        rate: Rate | Sequence[Rate] = (),
        idempotency: Idempotency | str | None = None,
        ordering: Literal["key"] | None = None,
    ) -> None:
        self.name = naming.check_service(name)
        self.prefix = naming.prefix_of(name) if prefix is None else naming.check_prefix(prefix)
        self.concurrency = _count(f"{name}.concurrency", concurrency)
        self.timeout = _positive(f"{name}.timeout", timeout)
        self.strict = strict
        self.max_local_delay = seconds(max_local_delay)
        self.max_crashes = _count(f"{name}.max_crashes", max_crashes)
        self.grace = seconds(grace)
        self.mapping = mapping or BodyMapping()
        self.fairness = (Fairness() if fairness else None) if isinstance(fairness, bool) else fairness
        self.rates = _rates(f"{name}.rate", rate)
        self.idempotency = Idempotency(idempotency) if isinstance(idempotency, str) else idempotency
        self.ordering = _one_of(f"{name}.ordering", ordering, (None, "key"))
        if ordering and on_exhausted == "retry-forever":
            raise ConfigError(
                f"{name}.ordering = 'key': with on_exhausted = 'retry-forever' one event may hold its key for ever"
            )
        if on_exhausted is not None:
            _one_of(f"{name}.on_exhausted", on_exhausted, ("park", "retry-forever", "discard"))
        if not dlq and on_exhausted not in ("retry-forever", "discard"):
            raise ConfigError(f"{name}.dlq = false needs on_exhausted = 'retry-forever' or 'discard', chosen by hand")
        self._policy = Policy(
            retry=retry or RetryPolicy(),
            statuses=StatusMap(status),
            permanent=_exceptions(f"{name}.permanent", permanent),
            permanent_codes=_codes(f"{name}.permanent_codes", permanent_codes),
            retryable_codes=_codes(f"{name}.retryable_codes", retryable_codes),
            unknown_code=_one_of(f"{name}.unknown_code", unknown_code, ("retry", "park")),
            on_exhausted=on_exhausted or "park",
            dlq=dlq,
        )
        self._status_rules: StatusRules = dict(status or {})
        self._prefetch = None if prefetch is None else _count(f"{name}.prefetch", prefetch)
        self._routes = _Routes()
        self._declared: list[Route] = []
        self._cache: dict[str, Route | None] = {}
        self.dead_letter_route: DeadLetterRoute | None = None

    # --- declaring -------------------------------------------------------------------------------------------

    def on(
        self,
        pattern: str,
        *,
        retry: RetryPolicy | None = None,
        concurrency: int | None = None,
        timeout: Duration | None = None,
        status: StatusRules | None = None,
        permanent: tuple[type[BaseException], ...] | None = None,
        rate: Rate | Sequence[Rate] = (),
    ) -> Callable[[Handler], Handler]:
        """Handle events of this type or pattern, one at a time. The function itself is returned unchanged."""
        names = sys._getframe(1).f_locals  # so that a payload type may be a local class, as in tests

        def register(function: Handler) -> Handler:
            self._add(
                Route(
                    pattern=pattern,
                    name=_name(function),
                    call=function,
                    signature=payload.read_handler(function, names),
                    policy=self._policy_of(retry, status, permanent),
                    concurrency=self._concurrency_of(pattern, concurrency),
                    timeout=self._timeout_of(pattern, timeout),
                    rates=_rates(f"{pattern}.rate", rate),
                )
            )
            return function

        return register

    def batch(
        self,
        pattern: str,
        *,
        size: int = 1000,
        timeout: Duration = 1.0,
        concurrency: int = 2,
        on_error: Literal["split", "fail-all"] = "split",
        handler_timeout: Duration | None = None,
        retry: RetryPolicy | None = None,
        status: StatusRules | None = None,
        permanent: tuple[type[BaseException], ...] | None = None,
        rate: Rate | Sequence[Rate] = (),
    ) -> Callable[[Handler], Handler]:
        """Handle events of this type or pattern many at a time: up to `size`, waiting up to `timeout` for them."""
        names = sys._getframe(1).f_locals
        window = BatchWindow(
            _count(f"{pattern}.size", size),
            _positive(f"{pattern}.timeout", timeout),
            _one_of(f"{pattern}.on_error", on_error, ("split", "fail-all")),
        )

        def register(function: Handler) -> Handler:
            self._add(
                Route(
                    pattern=pattern,
                    name=_name(function),
                    call=function,
                    signature=payload.read_batch_handler(function, names),
                    policy=self._policy_of(retry, status, permanent),
                    concurrency=self._concurrency_of(pattern, concurrency),
                    timeout=self._timeout_of(pattern, handler_timeout),
                    batch=window,
                    rates=_rates(f"{pattern}.rate", rate),
                )
            )
            return function

        return register

    def forward(
        self,
        pattern: str,
        *,
        to: str,
        timeout: Duration | None = None,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        status: StatusRules | None = None,
        mode: Literal["binary", "structured", "raw", "batch"] = "binary",
        batch: BatchWindow | None = None,
        sign: Sequence[str] | str | None = None,
        breaker: Breaker | bool = True,
        auth: Auth | None = None,
        rate: Rate | Sequence[Rate] = (),
        tls: Tls | None = None,
        egress: Literal["any", "public-only"] = "any",
        sender: Sender | Literal["lean", "aiohttp"] | None = None,
    ) -> None:
        """POST events of this type or pattern to an HTTP endpoint; its status decides.

        `concurrency` is also how many connections it gets. `mode="batch"` sends many events in one POST, filled as
        `batch` says: `BatchWindow(size=100, timeout=1.0)` unless given; `concurrency` is then 2 unless given.
        """
        from eventbus.forward.endpoint import Endpoint, printable

        if batch is not None and mode != "batch":
            raise ConfigError(f"{self.name}: batch goes with mode='batch' only; {pattern!r} has mode={mode!r}")
        if mode == "batch":
            batch, concurrency = batch or BatchWindow(size=100), concurrency or 2
        limit = self._timeout_of(pattern, timeout)
        at_once = self._concurrency_of(pattern, concurrency)
        endpoint = Endpoint(
            to,
            timeout=limit,
            mode=mode,
            sign=sign,
            breaker=breaker,
            auth=auth,
            tls=tls,
            egress=egress,
            connections=at_once,
            halving=batch is None or batch.on_error == "split",
            sender=sender,
        )
        endpoint.labels |= {"service": self.name, "type": pattern}
        # A batch endpoint is called with the Batch, any other with the Delivery.
        decode = None if batch is not None else payload.decoder(Delivery)
        self._add(
            Route(
                pattern=pattern,
                name=printable(to),
                call=endpoint if batch is None else endpoint.send_batch,
                signature=payload.Signature((decode,), is_async=True),
                policy=self._policy_of(retry, status, None),
                concurrency=at_once,
                timeout=limit + 5.0,  # the sender keeps the route's own; this one is the net below it
                batch=batch,
                endpoint=endpoint,
                rates=_rates(f"{pattern}.rate", rate),
            )
        )

    def dead_letters(self, *, batch: int = 100, timeout: Duration = 30.0) -> Callable[[Handler], Handler]:
        """Consume this service's dead letters, up to `batch` at a time; anything but success is tried again later."""

        def register(function: Handler) -> Handler:
            if self.dead_letter_route is not None:
                raise ConfigError(f"{self.name} already has a dead-letter consumer: {self.dead_letter_route.call!r}")
            is_async = payload.is_async(function)
            size = _count("dead_letters.batch", batch)
            self.dead_letter_route = DeadLetterRoute(function, is_async, size, seconds(timeout))
            return function

        return register

    def run(self, url: str | None = None, **options: str) -> None:
        """Consume until stopped, as a script: EVENTBUS_URL decides the broker."""
        import asyncio

        from eventbus.bus import Bus

        async def main() -> None:
            async with Bus.from_env(url=url, **options) as bus:
                await bus.run(self)

        asyncio.run(main())

    # --- asking ----------------------------------------------------------------------------------------------

    @property
    def routes(self) -> Sequence[Route]:
        """All routes, in the order of their declaration."""
        return tuple(self._declared)

    @property
    def prefetch(self) -> int:
        """How many deliveries a replica holds at most: twice what its routes can have in hand."""
        needed = sum(route.capacity for route in self._declared)
        if self._prefetch is None:
            rated = [math.ceil(rate.limit * RATED_PREFETCH / rate.period) for rate in self.rates if rate.by == "all"]
            least = 512 if self.idempotency else 256  # a store is asked for many at a time
            return min(max(least, 2 * needed), 20_000, *rated)
        largest = max((route.capacity for route in self._declared), default=1)
        if self._prefetch < largest:
            raise ConfigError(
                f"{self.name}.prefetch = {self._prefetch}: a route can have {largest} events in hand; "
                f"raise prefetch, or lower the route's concurrency or batch size"
            )
        return self._prefetch

    def route(self, type: str) -> Route | None:
        """The one route for an event type."""
        try:
            return self._cache[type]
        except KeyError:
            found = self._find(type)
            if len(self._cache) < 10_000:  # types may come from strangers; the cache must not grow with them
                self._cache[type] = found
            return found

    def subscription(self, *, dead_letters: bool = False) -> Subscription:
        """What an adapter needs to know of this service."""
        delays: dict[float, None] = {}
        for policy in (self._policy, *(route.policy for route in self._declared)):
            delays |= dict.fromkeys(policy.retry.delays())
        size = self.dead_letter_route.batch if dead_letters and self.dead_letter_route else self.prefetch
        return Subscription(
            service=self.name,
            prefix=self.prefix,
            patterns=tuple(route.pattern for route in self._declared) or ("#",),
            delays=tuple(delays),
            prefetch=size,
            dead_letters=dead_letters,
            mapping=self.mapping,
            fairness=self.fairness,
            ordered=self.ordering == "key",
        )

    @property
    def policy(self) -> Policy:
        """The service's own policy: for messages that never reach a route."""
        return self._policy

    def __repr__(self) -> str:
        return f"Service({self.name!r}, {len(self._declared)} routes)"

    # --- inside ----------------------------------------------------------------------------------------------

    def _add(self, route: Route) -> None:
        naming.check_pattern(route.pattern)
        for other in self._declared:
            if other.pattern == route.pattern:
                raise ConfigError(
                    f"{self.name}: two routes for {route.pattern!r} ({other.name} and {route.name}); "
                    f"exactly one route takes an event"
                )
        self._declared.append(route)
        self._cache.clear()
        if naming.is_pattern(route.pattern):
            self._routes.patterns.append((naming.literal_length(route.pattern), route))
            self._routes.patterns.sort(key=lambda entry: -entry[0])  # stable: declaration order among equals
        else:
            self._routes.exact[route.pattern] = route

    def _find(self, type: str) -> Route | None:
        exact = self._routes.exact.get(type)
        if exact is not None:
            return exact
        for _, route in self._routes.patterns:
            if naming.matches(route.pattern, type):
                return route
        return None

    def _policy_of(
        self,
        retry: RetryPolicy | None,
        status: StatusRules | None,
        permanent: tuple[type[BaseException], ...] | None,
    ) -> Policy:
        base = self._policy
        retry = retry or base.retry
        if (retry.mode == "in-place" or self.ordering) and retry.total() > MAX_IN_PLACE:
            kind = "retries that keep the order of keys" if self.ordering else "in-place retries"
            raise ConfigError(
                f"{self.name}: {kind} may wait {retry.total():.0f} s in all; at most {MAX_IN_PLACE:.0f} s "
                f"are allowed, because the message is held all that time"
            )
        return Policy(
            retry=retry,
            statuses=StatusMap({**self._status_rules, **(status or {})}) if status else base.statuses,
            permanent=base.permanent + _exceptions(f"{self.name}.permanent", permanent or ()),
            permanent_codes=base.permanent_codes,
            retryable_codes=base.retryable_codes,
            unknown_code=base.unknown_code,
            on_exhausted=base.on_exhausted,
            dlq=base.dlq,
        )

    def _concurrency_of(self, pattern: str, concurrency: int | None) -> int:
        return self.concurrency if concurrency is None else _count(f"{pattern}.concurrency", concurrency)

    def _timeout_of(self, pattern: str, timeout: Duration | None) -> float:
        return self.timeout if timeout is None else _positive(f"{pattern}.timeout", timeout)


def _name(function: object) -> str:
    module = getattr(function, "__module__", "")
    return f"{module}:{getattr(function, '__qualname__', repr(function))}"


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise ConfigError(f"{name} = {value!r}: must be a whole number from 1")
    return value


def _exceptions(name: str, value: object) -> tuple[type[BaseException], ...]:
    entries = value if isinstance(value, (tuple, list)) else None
    if entries is None or not all(isinstance(entry, type) and issubclass(entry, BaseException) for entry in entries):
        raise ConfigError(f"{name} = {value!r}: must be a tuple of exception types, such as permanent=(KeyError,)")
    return tuple(entries)


def _codes(name: str, value: Collection[str]) -> frozenset[str]:
    if isinstance(value, (str, bytes)):
        raise ConfigError(f"{name} = {value!r}: must be a list of codes, such as ('550', 'MessageRejected')")
    return frozenset(map(str, value))


def _one_of(name: str, value: T, allowed: Collection[T]) -> T:
    if value not in allowed:
        said = " or ".join(repr(entry) for entry in allowed if entry is not None)
        raise ConfigError(f"{name} = {value!r}: must be {said}")
    return value


def _rates(name: str, value: Rate | Sequence[Rate]) -> tuple[Rate, ...]:
    found = (value,) if isinstance(value, Rate) else tuple(value)
    if not all(isinstance(rate, Rate) for rate in found):
        raise ConfigError(f"{name} = {value!r}: must be a Rate, such as Rate(100, '60s'), or a list of them")
    return found


def _positive(name: str, value: Duration) -> float:
    result = seconds(value)
    if result <= 0:
        raise ConfigError(f"{name} = {value!r}: must be longer than zero")
    return result
