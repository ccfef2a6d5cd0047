"""How a service's work is shaped: fairness between tenants, rates, idempotency. Settings only; checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from eventbus.durations import seconds
from eventbus.errors import ConfigError

Duration = float | str | timedelta


@dataclass(frozen=True, slots=True)
class Fairness:
    """Turns by tenant: `in_a_row` events each, times the tenant's weight; who waits longest is next.

    The priority of a waiting tenant is `max(highest, base - step * rounds waited)`: 5, 4, 3, 2, 1, and 1 is the most
    urgent. Events without a tenant are one tenant together.
    """

    in_a_row: int = 3
    base: int = 5
    step: int = 1
    highest: int = 1
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("in_a_row", "base", "step", "highest"):
            _whole(f"fairness.{name}", getattr(self, name))
        if self.highest > self.base:
            raise ConfigError(f"fairness.highest = {self.highest}: must not be above base = {self.base}")
        for tenant, weight in self.weights.items():
            if not _is_number(weight) or not 0 < weight <= 1000:
                raise ConfigError(f"fairness.weights.{tenant} = {weight!r}: must be a number above 0, at most 1000")

    def turn(self, tenant: str) -> int:
        """How many events of this tenant are handled in a row."""
        return max(1, round(self.in_a_row * self.weights.get(tenant, 1.0))) if self.weights else self.in_a_row

    def priority(self, rounds: int) -> int:
        """The priority of a tenant that has waited this many rounds."""
        return max(self.highest, self.base - self.step * rounds)


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `limit` calls in any `period`: `Rate(100, "60s")`; by="tenant" gives every tenant that many.

    `tenants` are other limits for single tenants. scope="worker" counts in each process, scope="service" for all
    replicas together, in `store` (where the broker is Redis or SQLite: there, unless another one is named).
    """

    limit: int
    period: float
    by: Literal["all", "tenant"] = "all"
    tenants: Mapping[str, int] = field(default_factory=dict)
    scope: Literal["worker", "service"] = "worker"
    store: str | None = None

    def __init__(
        self,
        limit: int,
        period: Duration = 1.0,
        *,
        by: Literal["all", "tenant"] = "all",
        tenants: Mapping[str, int] | None = None,
        scope: Literal["worker", "service"] = "worker",
        store: str | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "limit", _whole("rate.limit", limit))
        put(self, "period", _longer("rate.period", period, 0.01))
        put(self, "by", _one_of("rate.by", by, ("all", "tenant")))
        put(self, "tenants", {tenant: _whole(f"rate.tenants.{tenant}", n) for tenant, n in (tenants or {}).items()})
        put(self, "scope", _one_of("rate.scope", scope, ("worker", "service")))
        put(self, "store", store)
        if self.tenants and by != "tenant":
            raise ConfigError('rate.tenants: needs by = "tenant"; limits of single tenants are counted by tenant')
        if store is not None and scope != "service":
            raise ConfigError(f'rate.store = {store!r}: needs scope = "service"; a worker counts in its own memory')

    def limit_of(self, tenant: str) -> int:
        """How many calls this tenant may have in a period."""
        return self.tenants.get(tenant, self.limit)


@dataclass(frozen=True, slots=True)
class Idempotency:
    """What was completed is not handled again for `window`: `Idempotency("redis://cache", window="7d")`.

    Without `store`, where the broker keeps it: Redis and SQLite in themselves. `claim` also keeps concurrent copies
    of one event apart: the second waits until the first is done, or for that long if its process died.
    """

    store: str | None
    window: float
    claim: float | None

    def __init__(
        self, store: str | None = None, *, window: Duration = 24 * 3600.0, claim: Duration | None = None
    ) -> None:
        put = object.__setattr__
        put(self, "store", store)
        put(self, "window", _longer("idempotency.window", window, 0.0))
        put(self, "claim", None if claim is None else _longer("idempotency.claim", claim, 0.0))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise ConfigError(f"{name} = {value!r}: must be a whole number from 1")
    return value


def _longer(name: str, value: Duration, least: float) -> float:
    result = seconds(value)
    if result <= least:
        raise ConfigError(f"{name} = {value!r}: must be longer than {'zero' if not least else f'{least:g} s'}")
    return result


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}: must be {' or '.join(map(repr, allowed))}")
    return value
