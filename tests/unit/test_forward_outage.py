"""Endpoints that are down, slow or rate-limited for an hour of virtual time, beside one that is well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from eventbus import RetryPolicy, Service
from eventbus.forward import Answer, SendFailed
from eventbus.settlement import Retry
from eventbus.testing import TestBus

DOWN, WELL = "http://down.internal/", "http://well.internal/"


class Sender:
    """Answers by URL; keeps which events were sent where."""

    def __init__(self, down: Callable[[], Answer]) -> None:
        self.down = down
        self.sent: dict[str, list[str]] = {DOWN: [], WELL: []}
        self.done: dict[str, list[str]] = {DOWN: [], WELL: []}
        self.in_flight = self.most = 0

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes, *, timeout: float) -> Answer:
        id = dict(headers)["ce-id"]
        self.sent[url].append(id)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0)
            answer = self.down() if url == DOWN else Answer(200, {})
        finally:
            self.in_flight -= 1
        if answer.status == 200:
            self.done[url].append(id)
        return answer

    async def aclose(self) -> None: ...


def service() -> Service:
    found = Service("wms-cincout")
    found.forward("down.*", to=DOWN)
    found.forward("well.*", to=WELL)
    return found


def refuse() -> Answer:
    raise SendFailed("refused", "nobody listens", connected=False)


async def test_an_hour_without_one_endpoint_parks_nothing_and_the_other_notices_nothing():
    """Its events wait free of cost; those of the other are delivered at once; in the end all are."""
    sender = Sender(refuse)
    async with TestBus(service(), sender=sender) as bus:
        for minute in range(60):
            for number in range(2):
                await bus.send("down.x", {}, id=f"d{minute}-{number}")
                await bus.send("well.x", {}, id=f"w{minute}-{number}")
            assert len(sender.done[WELL]) == 2 * (minute + 1)
            await bus.advance("1m")
        assert bus.parked == []
        stats = await bus._buses["wms"].stats("wms-cincout")
        assert [(state.url, state.breaker) for state in stats.endpoints] == [(DOWN, "open"), (WELL, "closed")]
        # Ten failures, then about one probe a minute: nobody was asked for every event that waited.
        assert len(sender.sent[DOWN]) < 10 + 80
        sender.down, sender.most = lambda: Answer(200, {}), 0
        await bus.advance("10m")
        assert sorted(sender.done[DOWN]) == sorted(f"d{minute}-{number}" for minute in range(60) for number in range(2))
        assert bus.parked == []
        assert sender.most <= 64
        assert len(sender.done[WELL]) == 120


@pytest.mark.parametrize("retries", [0, 2])
async def test_a_lonely_event_with_few_retries_outlives_the_hour_too(retries):
    """Its last attempt finds nobody, long before ten failures: that opens the breaker, and the event waits."""
    sender, few = Sender(refuse), Service("wms-cincout", retry=RetryPolicy(max_retries=retries))
    few.forward("down.*", to=DOWN)
    async with TestBus(few, sender=sender) as bus:
        await bus.send("down.x", {}, id="alone")
        await bus.advance("1h")
        assert bus.parked == []
        assert len(sender.sent[DOWN]) < 80
        sender.down = lambda: Answer(200, {})
        await bus.advance("2m")
        assert sender.done[DOWN] == ["alone"]


async def test_an_endpoint_of_gateway_errors_parks_nothing_either():
    """502, 503 and 504 say that nobody is there, as a refused connection does."""
    sender = Sender(lambda: Answer(503, {}))
    async with TestBus(service(), sender=sender) as bus:
        for number in range(50):
            await bus.send("down.x", {}, id=str(number))
        await bus.advance("1h")
        assert bus.parked == []
        sender.down = lambda: Answer(200, {})
        await bus.advance("10m")
        assert len(set(sender.done[DOWN])) == 50


async def test_a_rate_limited_endpoint_is_left_alone_as_long_as_it_asks_and_slows_nobody():
    """429 with Retry-After: its events wait so long; the other route is not held up."""
    sender = Sender(lambda: Answer(429, {"retry-after": "30"}))
    async with TestBus(service(), sender=sender) as bus:
        for number in range(300):
            await bus.send("down.x", {}, id=f"d{number}")
            await bus.send("well.x", {}, id=f"w{number}")
            assert len(sender.done[WELL]) == number + 1
        assert all(entry.settlement.delay == 30.0 for entry in bus.handled if isinstance(entry.settlement, Retry))
        await bus.advance(29)
        assert len(sender.sent[DOWN]) == 300
        sender.down = lambda: Answer(200, {})
        await bus.advance(2)
        assert len(sender.done[DOWN]) == 300
        assert bus.parked == []


async def test_a_slow_endpoint_keeps_its_own_places_only():
    """Its route's concurrency is full; the other's is its own."""
    gate = asyncio.Event()

    class Slow(Sender):
        async def post(self, url: str, *args, **kwargs) -> Answer:
            if url == DOWN:
                self.sent[DOWN].append("")
                await gate.wait()
                return Answer(200, {})
            return await super().post(url, *args, **kwargs)

    sender = Slow(refuse)
    slow = Service("wms-cincout")
    slow.forward("down.*", to=DOWN, concurrency=3)
    slow.forward("well.*", to=WELL)
    async with TestBus(slow, sender=sender) as bus:
        publish = bus._buses["wms"].publish
        for number in range(50):
            await publish("down.x", {}, id=f"d{number}")
            await publish("well.x", {}, id=f"w{number}")
        async with asyncio.timeout(10):
            while len(sender.done[WELL]) < 50:
                await asyncio.sleep(0)
        assert len(sender.sent[DOWN]) == 3
        gate.set()
        await bus.settle()
        assert len(sender.sent[DOWN]) == 50
