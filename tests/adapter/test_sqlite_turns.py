"""Claims by turns of tenants and in the order of keys, on the real file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from eventbus.embedded.sqlite import turns
from eventbus.event import Event
from eventbus.settlement import ACK, RELEASE
from eventbus.shaping import Fairness
from tests.adapter.sqlite_support import SUB, freeze, opened, sql

FAIR = replace(SUB, fairness=Fairness(weights={"gold": 2}))
ORDERED = replace(SUB, ordered=True)


async def test_every_tenant_gets_its_share_of_a_claim(tmp_path: Path) -> None:
    """A tenant with thousands waiting takes no more of a claim than its share; weights make it larger."""
    async with opened(tmp_path, FAIR) as adapter, adapter.consume(FAIR) as consumer:
        await adapter.publish("wms", [Event("a", n, tenant="big") for n in range(3000)])
        late = [Event("a", n, tenant=tenant) for tenant in ("x", "y", "gold") for n in range(100)]
        await adapter.publish("wms", [*late, *(Event("a", n) for n in range(100))])
        claimed = await consumer.receive(120, 1.0)
        counts = Counter(delivery.event.tenant for delivery in claimed)
        assert counts == {"big": 20, "x": 20, "y": 20, "gold": 40, None: 20}
        for tenant in ("big", "x"):
            mine = [delivery.event.data for delivery in claimed if delivery.event.tenant == tenant]
            assert mine == sorted(mine)  # type: ignore[type-var]
        assert (await adapter.stats(SUB.service, SUB.prefix)).ready == 3400 - 120


async def test_what_small_tenants_leave_goes_to_the_large_one(tmp_path: Path) -> None:
    """A claim is filled as far as there is anything, and goes on with whose turn it was."""
    async with opened(tmp_path, FAIR) as adapter, adapter.consume(FAIR) as consumer:
        await adapter.publish("wms", [Event("a", n, tenant="big") for n in range(500)])
        await adapter.publish("wms", [Event("a", n, tenant=f"small-{n}") for n in range(10)])
        claimed = await consumer.receive(100, 1.0)
        assert len(claimed) == 100
        assert len({delivery.event.tenant for delivery in claimed}) == 11
        few: list[str | None] = []
        await adapter.publish("wms", [Event("a", n, tenant=f"t{n:03}") for n in range(40) for _ in range(6)])
        for _ in range(6):
            few += [delivery.event.tenant for delivery in await consumer.receive(24, 1.0)]
        assert len(set(few)) == 41, "six claims for eight tenants each have been at every tenant once"


async def test_nothing_is_lost_when_turns_are_switched_off_or_a_consumer_dies(tmp_path: Path) -> None:
    """What waits for its turn is found by a service without turns; what was claimed comes again as suspect."""
    async with opened(tmp_path, FAIR) as adapter:
        await adapter.publish("wms", [Event("a", n, tenant=f"t{n % 3}") for n in range(300)])
        async with adapter.consume(FAIR) as dying:
            assert len(await dying.receive(50, 1.0)) == 50
            freeze(dying)
        async with adapter.consume(SUB) as plain:
            seen: list[object] = []
            while len(seen) < 300:
                found = await plain.receive(100, 1.0)
                assert found
                assert await plain.settle([(delivery, ACK) for delivery in found]) == ["done"] * len(found)
                seen += [delivery.event.data for delivery in found]
        assert sorted(seen) == list(range(300))  # type: ignore[type-var]
        assert sql(tmp_path, "SELECT count(*) FROM inflight") == [(0,)]
        assert sql(tmp_path, "SELECT count(*) FROM events") == [(0,)]


async def test_few_events_take_no_detour(tmp_path: Path) -> None:
    """While all that waits fits into one claim nobody has to wait, and nothing is written twice."""
    async with opened(tmp_path, FAIR) as adapter, adapter.consume(FAIR) as consumer:
        await adapter.publish("wms", [Event("a", n, tenant=f"t{n % 3}") for n in range(30)])
        assert [delivery.event.data for delivery in await consumer.receive(64, 1.0)] == list(range(30))


async def test_a_key_is_in_one_pair_of_hands(tmp_path: Path) -> None:
    """While a consumer holds an event of a key, another gets only events of other keys; then the rest, in order."""
    async with opened(tmp_path, ORDERED) as adapter:
        await adapter.publish("wms", [Event("a", n, key="ab"[n % 2]) for n in range(20)])
        async with adapter.consume(ORDERED) as one, adapter.consume(ORDERED) as two:
            first = await one.receive(1, 1.0)
            assert [delivery.event.data for delivery in first] == [0]
            others = await two.receive(20, 1.0)
            assert [delivery.event.data for delivery in others] == list(range(1, 20, 2))
            assert await two.receive(20, 0.0) == []
            await one.settle([(first[0], ACK)])
            rest = await two.receive(20, 1.0)
            assert [delivery.event.data for delivery in rest] == list(range(2, 20, 2))
            await adapter.publish("wms", [Event("a", 20)])
            assert [delivery.event.data for delivery in await one.receive(9, 1.0)] == [20], "without a key: free"


async def test_what_is_released_or_left_comes_again_in_its_place(tmp_path: Path) -> None:
    """Released and lost events are received before later ones of their key, whoever receives them."""
    async with opened(tmp_path, ORDERED) as adapter:
        await adapter.publish("wms", [Event("a", n, key="k") for n in range(12)])
        async with adapter.consume(ORDERED) as one:
            held = await one.receive(4, 1.0)
            assert await one.settle([(delivery, RELEASE) for delivery in held[:2]]) == ["done"] * 2
            freeze(one)
        async with adapter.consume(ORDERED) as two:
            found = await two.receive(6, 1.0)
            assert [(delivery.event.data, delivery.suspect) for delivery in found] == [
                (0, False),
                (1, False),
                (2, True),
                (3, True),
                (4, False),
                (5, False),
            ]


async def test_keys_in_other_hands_do_not_make_a_claim_endless(tmp_path: Path) -> None:
    """What cannot be claimed yet is let out of the log only up to a limit."""
    async with opened(tmp_path, ORDERED) as adapter, adapter.consume(ORDERED) as one, adapter.consume(ORDERED) as two:
        await adapter.publish("wms", [Event("a", n, key="k") for n in range(8000)])
        await one.receive(1, 1.0)
        for _ in range(200):
            assert await two.receive(100, 0.0) == []
        out = sql(tmp_path, f"SELECT count(*) FROM inflight WHERE due = {turns.WAITING}")[0][0]
        assert out <= turns.MOST_OUT_OF_ORDER
