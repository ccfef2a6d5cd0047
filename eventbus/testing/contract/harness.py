"""What the contract tests stand on: the broker under test, fresh names, and waiting for a condition."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from eventbus.adapter import Adapter
from eventbus.bus import Bus
from eventbus.policy import RetryPolicy
from eventbus.registry import open_adapter
from eventbus.service import Service

DEADLINE = 20.0


@dataclass(slots=True)
class BrokerUnderTest:
    """How to reach the broker, and how late it may be."""

    url: str
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    lateness: Callable[[float], float] = lambda delay: 0.25
    """How much later than a delay a message may come; a broker with tiers: as much again as the delay."""
    lease: float = 1.0
    """After how many seconds at most an unsettled delivery of a vanished consumer comes again."""
    prefix: str = field(default_factory=lambda: f"t{secrets.token_hex(4)}")
    """A name of its own for each test."""

    def bus(self, **options: object) -> Bus:
        """A new connection to the same bus."""
        options = {"source": f"{self.prefix}-api"} | options
        return Bus(self.url, settings=self.settings, **options)  # type: ignore[arg-type]

    def adapter(self) -> Adapter:
        """A new adapter on the same bus, as a second process would have it."""
        return open_adapter(self.url, self.settings)

    def service(self, name: str = "stock", **options: object) -> Service:
        """A service of this test, with short delays."""
        options = {"retry": RetryPolicy(max_retries=3, delay=0.2), "grace": 5.0} | options
        return Service(f"{self.prefix}-{name}", **options)  # type: ignore[arg-type]


class Contract:
    """Base of the contract classes: skips by name only, and every skip has a reason."""

    pytestmark = pytest.mark.asyncio
    skipped: ClassVar[Mapping[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _skip_by_name(self, request: pytest.FixtureRequest) -> None:
        reason = self.skipped.get(request.function.__name__)
        if reason:
            pytest.skip(reason)


async def eventually(condition: Callable[[], object | Awaitable[object]], what: str, within: float = DEADLINE) -> None:
    """Wait until a condition holds; fail with its name when it does not within the deadline."""
    deadline = time.monotonic() + within
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what}")
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(bus: Bus, *services: Service) -> AsyncIterator[None]:
    """Consume in the background; drained at the end."""
    async with bus.serving(*services):
        yield


async def drained(bus: Bus, service: Service) -> None:
    """Wait until nothing of a service is ready, in flight or delayed."""

    async def empty() -> bool:
        stats = await bus.stats(service)
        return stats.ready == stats.inflight == stats.delayed == 0

    await eventually(empty, f"{service.name} has nothing left to do")
