"""The stores, each the same from outside: completed events, claims, rates."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from eventbus.embedded.memory_store import MemoryStore
from eventbus.embedded.sqlite import SqliteAdapter, schema
from eventbus.embedded.sqlite.store import SqliteStore, _permit
from eventbus.errors import ConfigError
from eventbus.registry import open_store
from eventbus.store import Ask, Seen, Store, Words
from tests.brokers import redis

Another = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def another(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Another]:
    """Makes one more connection to the same store, as another replica would."""
    made: list[Store] = []
    memory = MemoryStore()

    def make() -> Store:
        if request.param == "memory":
            return memory
        url = f"sqlite:///{tmp_path}/store.db" if request.param == "sqlite" else redis.shared_url()
        made.append(open_store(url))
        return made[-1]

    yield make
    for store in made:
        await store.aclose()


async def tell(
    store: Store, service: str, owner: str = "me", claim: float | None = None, window: float = 60.0, **words: list[str]
) -> list[Seen]:
    return await store.tell(service, Words(**words), window=window, claim=claim, owner=owner)


def fresh() -> str:
    return f"svc-{time.time_ns()}"


async def test_what_is_done_is_done_for_all_replicas_of_that_service(another: Another) -> None:
    """A completed name is known to every replica of the service and to no other service."""
    one, two, service = another(), another(), fresh()
    await one.open()
    await two.open()
    assert await tell(one, service, asks=["a", "b"]) == ["new", "new"]
    assert await tell(one, service, done=["a"], asks=["a", "b"]) == ["done", "new"]
    assert await tell(two, service, asks=["b", "a"]) == ["new", "done"]
    assert await tell(two, f"{service}-x", asks=["a"]) == ["new"]


async def test_the_window_ends(another: Another) -> None:
    """After its window a name is new again."""
    store, service = another(), fresh()
    await store.open()
    await tell(store, service, done=["a"], window=0.15)
    assert await tell(store, service, asks=["a"]) == ["done"]
    deadline = time.monotonic() + 5
    while await tell(store, service, asks=["a"]) != ["new"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_claim_keeps_copies_apart(another: Another) -> None:
    """The first who asks has it; others see it claimed until it is done, let go, or its time is over."""
    one, two, service = another(), another(), fresh()
    await one.open()
    await two.open()
    assert await tell(one, service, "one", 30.0, asks=["a", "b", "c"]) == ["new"] * 3
    assert await tell(two, service, "two", 30.0, asks=["a", "b", "c"]) == ["claimed"] * 3
    assert await tell(one, service, "one", 30.0, asks=["a"]) == ["claimed"], "a second copy at the same worker too"
    await tell(two, service, "two", 30.0, let_go=["a"])
    assert await tell(two, service, "two", 30.0, asks=["a"]) == ["claimed"], "only its owner lets go"
    await tell(one, service, "one", 30.0, done=["b"], let_go=["a"])
    assert await tell(two, service, "two", 0.1, asks=["a", "b", "c"]) == ["new", "done", "claimed"]
    deadline = time.monotonic() + 5
    while await tell(one, service, "one", 30.0, asks=["a"]) != ["new"]:  # two's claim was short, and two died
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_name_twice_in_one_question_is_claimed_once(another: Another) -> None:
    """Two copies in one batch: the first goes on, the second waits."""
    store, service = another(), fresh()
    await store.open()
    assert await tell(store, service, "me", 30.0, asks=["a", "a"]) == ["new", "claimed"]
    assert await tell(store, service, "me", None, asks=["b", "b"]) == ["new", "new"]


async def test_permits_are_never_more_than_the_limit_in_any_period(another: Another) -> None:
    """Two replicas that ask as fast as they can get no more than the limit in any period, and not much less."""
    stores, name, period, limit = [another(), another()], fresh(), 0.4, 10
    for store in stores:
        await store.open()
    granted: list[float] = []
    until = time.monotonic() + 4 * period

    async def greedy(store: Store) -> None:
        while time.monotonic() < until:
            asked = time.monotonic()
            answer = (await store.permits([Ask(name, limit, period, 4)]))[0]
            granted.extend([asked] * answer.number)
            assert answer.number > 0 or answer.opens_in > 0
            await asyncio.sleep(0 if answer.number else min(answer.opens_in, 0.02))

    await asyncio.gather(*map(greedy, stores))
    granted.sort()
    # Counted by when they were asked for: the answers of the earliest may have come a little after that.
    for first, last in zip(granted, granted[limit:], strict=False):
        assert last - first > period - 0.1
    assert len(granted) >= 2 * limit


def test_slots_of_a_shared_rate_never_let_one_too_many_through() -> None:
    """Random questions at random times against the window's own definition."""
    connection = sqlite3.connect(":memory:")
    connection.execute(next(step for step in schema.MIGRATIONS[2] if isinstance(step, str) and "TABLE rates" in step))
    chance, now, passed = random.Random(7), 1_000_000, list[int]()
    for _ in range(3000):
        now += chance.choice((0, 1, 3, 50, 400))
        answer = _permit(connection, now, Ask("r", 5, 1.0, chance.randint(1, 4)))
        passed += [now] * answer.number
        assert len(passed) <= 5 or passed[-1] - passed[-6] >= 1000
        if not answer.number:
            assert 0 < answer.opens_in <= 1.0 + 2 / 64
    assert len(passed) > 500


async def test_a_bus_file_is_a_store_too(tmp_path: Path) -> None:
    """The store of an SQLite bus lives in its own file, beside its events."""
    url = f"sqlite:///{tmp_path}/bus.db"
    adapter = SqliteAdapter.from_url(url, {})
    await adapter.open()
    store = SqliteStore.from_url(url)
    try:
        await store.open()
        await tell(store, "svc", done=["a"])
        assert await tell(store, "svc", asks=["a"]) == ["done"]
    finally:
        await store.aclose()
        await adapter.aclose()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("amqp://localhost", "no store; write redis://host, sqlite:///file or memory://"),
        ("memory://name", "write memory://"),
        ("nonsense", "is not a bus URL"),
    ],
)
def test_a_wrong_store_says_what_to_write(url: str, text: str) -> None:
    """An address that keeps nothing is an error with the fix in it."""
    with pytest.raises(ConfigError, match=text):
        open_store(url)
