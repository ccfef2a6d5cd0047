"""Shaping in the worker, on a virtual clock: what waits, what it costs, what happens when a store is not well."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from eventbus import (
    Batch,
    Bus,
    ConfigError,
    Delivery,
    Event,
    Idempotency,
    Rate,
    RetryPolicy,
    Service,
    requeue,
)
from eventbus.embedded.memory import MemoryAdapter
from eventbus.embedded.memory_store import MemoryStore
from eventbus.errors import BrokerUnavailable
from eventbus.registry import adapter_class
from eventbus.scheduling.rate import Window
from eventbus.scheduling.shaped import KEPT_TENANTS, TenantLimits
from eventbus.store import Ask, Granted, Seen, Store, Words
from eventbus.testing import TestBus
from eventbus.testing.contract.harness import eventually

DOCS = Path(__file__).parents[2] / "docs" / "shaping.md"


# --- rates -----------------------------------------------------------------------------------------------------------


async def test_a_rate_lets_so_many_through_and_no_more() -> None:
    """Three in any ten seconds; the others wait for their time without an attempt or a slot."""
    mail, seen = Service("mail", rate=Rate(3, "10s"), concurrency=2), list[object]()

    @mail.on("#")
    async def handle(event: Event, delivery: Delivery) -> None:
        assert delivery.attempt == 1
        seen.append(event.data)

    async with TestBus(mail) as bus:
        for number in range(7):
            await bus.send("mail.due", number)
        assert seen == [0, 1, 2]
        await bus.advance("9s")
        assert len(seen) == 3
        await bus.advance("2s")
        assert seen == [0, 1, 2, 3, 4, 5]
        await bus.advance("10s")
        assert seen == list(range(7))


async def test_a_tenant_at_its_limit_does_not_hold_up_another() -> None:
    """By tenant each has its own limit; one that must wait is passed by."""
    mail, seen = Service("mail", rate=Rate(1, "1m", by="tenant", tenants={"gold": 2})), list[str | None]()

    @mail.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.tenant)

    async with TestBus(mail) as bus:
        for tenant in ("tin", "tin", "tin", "gold", "gold", "gold", None):
            await bus.send("mail.due", tenant=tenant)
        assert sorted(seen, key=str) == [None, "gold", "gold", "tin"]
        await bus.advance("61s")
        assert sorted(seen, key=str) == [None, "gold", "gold", "gold", "tin", "tin"]


async def test_a_batch_is_as_large_as_its_rate_allows() -> None:
    """A batch takes what the rate lets through, and the rest when it may."""
    mail, sizes = Service("mail"), list[int]()

    @mail.batch("#", size=10, timeout=1.0, rate=Rate(4, "10s"))
    async def handle(events: list[Event]) -> None:
        sizes.append(len(events))

    async with TestBus(mail) as bus:
        for number in range(6):
            await bus.send("mail.due", number)
        await bus.advance("2s")
        assert sizes == [4]
        await bus.advance("12s")
        assert sizes == [4, 2]


async def test_a_rate_bounds_what_is_fetched() -> None:
    """A service holds no more than its rate lets it handle in five minutes: others could have it meanwhile."""
    assert Service("mail", rate=Rate(10, "60s")).prefetch == 50
    assert Service("mail", rate=Rate(1, "1h")).prefetch == 1
    assert Service("mail", rate=Rate(10, "60s", by="tenant")).prefetch == 256


class Down(Store):
    """A store that does not answer while it is down."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.down = True

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def tell(self, service: str, words: Words, *, window: float, claim: float | None, owner: str) -> list[Seen]:
        if self.down:
            raise BrokerUnavailable("the store is down")
        return await self.inner.tell(service, words, window=window, claim=claim, owner=owner)

    async def permits(self, asks: Sequence[Ask]) -> list[Granted]:
        if self.down:
            raise BrokerUnavailable("the store is down")
        return await self.inner.permits(asks)


class OnADownStore(MemoryAdapter):
    """A memory bus whose store can be down."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = Down()

    def store(self) -> Down:  # type: ignore[override]
        return self.beside


async def test_a_shared_rate_waits_for_its_store(caplog: pytest.LogCaptureFixture) -> None:
    """While the store of a shared rate is down nothing starts, nothing is lost; then everything goes on."""
    adapter, seen = OnADownStore(), list[object]()
    mail = Service("mail", rate=Rate(100, "1s", scope="service"))

    @mail.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.data)

    with caplog.at_level(logging.WARNING, "eventbus"):
        async with Bus("memory://", adapter=adapter) as bus, bus.serving(mail):
            await bus.publish("mail.due", 1)
            await eventually(lambda: "rate_store_failed" in caplog.text, "it was said")
            assert seen == []
            adapter.beside.down = False
            await eventually(lambda: seen == [1], "it was handled")


def test_tenants_that_are_gone_are_forgotten() -> None:
    """A limit for each of very many tenants: those whose period is over take no memory for ever."""
    limits = TenantLimits(Rate(1, "1s", by="tenant"), lambda limit, tenant: Window(limit, 1.0))
    for number in range(3 * KEPT_TENANTS):
        limits.of(f"t{number}", number / 1000).take(number / 1000)
    assert len(limits._limiters) <= KEPT_TENANTS
    assert limits.of("t29999", 30.0).free(30.0) == 0, "one that was let through a moment ago is not"


# --- idempotency -----------------------------------------------------------------------------------------------------


async def test_a_store_that_is_down_keeps_nothing_from_being_handled(caplog: pytest.LogCaptureFixture) -> None:
    """Events are handled; what was completed meanwhile is remembered once the store is back."""
    adapter, seen = OnADownStore(), list[str]()
    mail = Service("mail", idempotency=Idempotency())

    @mail.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.id)

    with caplog.at_level(logging.WARNING, "eventbus"):
        async with Bus("memory://", adapter=adapter) as bus, bus.serving(mail):
            await bus.publish("mail.due", id="a")
            await eventually(lambda: seen == ["a"], "it was handled")
            assert "idempotency_store_failed" in caplog.text
            adapter.beside.down = False
            await bus.publish("mail.due", id="b")
            await eventually(lambda: len(seen) == 2, "the next was handled")
            await bus.publish("mail.due", id="a")
            await bus.publish("mail.due", id="c")
            await eventually(lambda: len(seen) == 3, "the last was handled")
    assert seen == ["a", "b", "c"]


async def test_what_was_completed_is_forgotten_after_its_window() -> None:
    """Within the window a copy is skipped, after it it is handled; another source is another event."""
    mail, seen = Service("mail", idempotency=Idempotency(window="1h")), list[str]()

    @mail.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.source)

    async with TestBus(mail) as bus:
        for source in ("shop", "shop", "desk"):
            await bus.send(Event("mail.due", id="1", source=source))
        assert seen == ["shop", "desk"]
        await bus.advance("61m")
        await bus.send(Event("mail.due", id="1", source="shop"))
        assert seen == ["shop", "desk", "shop"]


async def test_a_claim_is_let_go_by_a_failure() -> None:
    """A failed event's own retry is called although it was claimed; a second copy goes on only after the first."""
    mail = Service("mail", idempotency=Idempotency(claim="10m"), retry=RetryPolicy(max_retries=2, delay=5))
    seen: list[int] = []

    @mail.on("#")
    async def handle(event: Event, delivery: Delivery) -> int:
        seen.append(delivery.attempt)
        return 500 if delivery.attempt == 1 else 200

    async with TestBus(mail) as bus:
        await bus.send(Event("mail.due", id="1", source="x"))
        assert seen == [1]
        await bus.advance("6s")
        assert seen == [1, 2]
        await bus.send(Event("mail.due", id="1", source="x"))
        assert seen == [1, 2]


async def test_a_short_window_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """A window that ends before the last retry is said at start, with what to do."""
    mail = Service("mail", idempotency=Idempotency(window="1m"), retry=RetryPolicy(max_retries=10, delay=60))

    @mail.on("#")
    async def handle(event: Event) -> None: ...

    with caplog.at_level(logging.WARNING, "eventbus"):
        async with TestBus(mail):
            pass
    assert "idempotency_window_short" in caplog.text
    assert "fix=" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ordering": "tenant"}, "mail.ordering = 'tenant': must be 'key'"),
        ({"ordering": "key", "on_exhausted": "retry-forever"}, "may hold its key for ever"),
        ({"rate": "100/s"}, "must be a Rate, such as Rate(100, '60s')"),
    ],
)
def test_what_cannot_be_is_an_error_where_it_is_written(options: dict[str, object], text: str) -> None:
    """Wrong settings are refused with what is allowed."""
    with pytest.raises(ConfigError) as error:
        Service("mail", **options)  # type: ignore[arg-type]
    assert text in str(error.value)


def test_retries_of_an_ordered_service_must_fit() -> None:
    """Followers wait for all retries: more than a quarter of an hour of them is refused."""
    service = Service("ledger", ordering="key", retry=RetryPolicy(max_retries=100, delay=10))
    with pytest.raises(ConfigError, match="retries that keep the order of keys may wait 1000 s in all; at most 900 s"):

        @service.on("#")
        async def handle(event: Event) -> None: ...


async def test_a_memory_store_is_no_shared_one() -> None:
    """scope="service" on a store that other processes cannot see is an error at start."""

    class ManyProcesses(MemoryAdapter):
        capabilities = adapter_class("sqlite:///x").capabilities

    mail = Service("mail", rate=Rate(1, "1s", scope="service", store="memory://"))
    async with Bus("memory://", adapter=ManyProcesses()) as bus:
        with pytest.raises(ConfigError, match="shared by all replicas, and memory:// is not"):
            async with bus.serving(mail):
                pass


# --- order of keys ---------------------------------------------------------------------------------------------------


async def test_order_goes_through_batches_and_other_routes() -> None:
    """Events of a key keep their order across routes, and never two of one key stand in one batch."""
    ledger, seen = Service("ledger", ordering="key", retry=RetryPolicy(max_retries=3, delay=1)), list[tuple[str, int]]()
    failures = {2: 2}

    @ledger.batch("entry", size=10, timeout=0.5)
    async def many(batch: Batch) -> None:
        keys = [entry.delivery.event.key for entry in batch]
        assert len(keys) == len(set(keys))
        for entry in batch:
            number = entry.delivery.event.data
            assert isinstance(number, int)
            if failures.get(number, 0) > 0:
                failures[number] -= 1
                entry.retry("not now")
            else:
                seen.append((str(entry.delivery.event.key), number))

    @ledger.on("balance")
    async def one(event: Event) -> None:
        seen.append((str(event.key), int(str(event.data))))

    async with TestBus(ledger) as bus:
        for number in range(12):
            await bus.send("balance" if number % 3 == 0 else "entry", number, key="ab"[number % 2])
        await bus.advance("30s")
    assert [n for key, n in seen if key == "a"] == [0, 2, 4, 6, 8, 10]
    assert [n for key, n in seen if key == "b"] == [1, 3, 5, 7, 9, 11]


async def test_an_event_for_later_takes_its_place_when_its_time_comes() -> None:
    """process_after does not hold back the events after it; a requeue does."""
    ledger, seen = Service("ledger", ordering="key"), list[object]()
    asked: list[object] = []

    @ledger.on("#")
    async def handle(event: Event) -> object:
        asked.append(event.data)
        if event.data == "patient" and asked.count("patient") == 1:
            return requeue(after=10)
        seen.append(event.data)
        return None

    async with TestBus(ledger) as bus:
        await bus.send("x", "tomorrow", key="k", process_after=timedelta(days=1))
        await bus.send("x", "first", key="k")
        await bus.send("x", "patient", key="k")
        await bus.send("x", "behind", key="k")
        assert seen == ["first"]
        await bus.advance("15s")
        assert seen == ["first", "patient", "behind"]
        await bus.advance("25h")
        assert seen == ["first", "patient", "behind", "tomorrow"]


async def test_a_stop_hands_back_in_order_with_attempts_and_times() -> None:
    """A retry that waits, its followers, and what was never started are handed back; the next one goes on in order."""
    adapter, seen = MemoryAdapter(), list[tuple[object, int]]()

    def replica() -> Service:
        ledger = Service("ledger", ordering="key", retry=RetryPolicy(max_retries=5, delay=0.3), grace=5)

        @ledger.on("#")
        async def handle(event: Event, delivery: Delivery) -> int:
            seen.append((event.data, delivery.attempt))
            return 500 if event.data == 0 and delivery.attempt == 1 else 200

        return ledger

    async with Bus("memory://", adapter=adapter) as bus:
        first = replica()
        await bus.provision(first)
        await bus.publish_many([Event("x", n, key="k") for n in range(4)])
        async with bus.serving(first):
            await eventually(lambda: seen, "the first one failed")
            await asyncio.sleep(0)
        stopped = asyncio.get_running_loop().time()
        async with bus.serving(replica()):
            await eventually(lambda: len(seen) == 5, "all were handled")
        assert asyncio.get_running_loop().time() - stopped > 0.1, "the retry was not called early"
    assert seen == [(0, 1), (0, 2), (1, 1), (2, 1), (3, 1)]


# --- docs ------------------------------------------------------------------------------------------------------------


def test_the_table_says_what_the_adapters_say() -> None:
    """Each row of the table in docs/shaping.md is what the adapter's capabilities say."""
    rows = re.findall(r"^\| `(\w+):///?` \| (.*?) \| (.*?) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    assert {row[0] for row in rows} == {"memory", "sqlite", "redis", "amqp", "kafka"}
    for scheme, fairness, order, store in rows:
        adapter = adapter_class(f"{scheme}://x")
        assert (fairness == "over all that waits") is adapter.capabilities.fair_receive, scheme
        assert bool(order.strip()) is adapter.capabilities.key_order, scheme
        own = "store" in {name for kind in adapter.__mro__[:-2] for name in vars(kind) if kind.__name__ != "Adapter"}
        assert store.startswith("yes") is own, scheme
