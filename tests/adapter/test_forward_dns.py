"""A host that nobody knows, through the whole forwarder: waited for, told plainly, at no cost to other routes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from http_support import Server

from eventbus import Bus, Event, RetryPolicy, Service
from eventbus.forward import Breaker
from eventbus.testing.contract.harness import eventually

HOST = "nowhere.invalid"


class Names:
    """DNS, as far as one host goes: unknown until somebody enters it."""

    def __init__(self) -> None:
        self.known = False
        self.asked = 0

    def look_up(self, host: str, port: int) -> list[object]:
        if host == HOST:
            self.asked += 1
            if not self.known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    found = Names()

    async def look_up(loop: object, host: str, port: int, **options: object) -> list[object]:
        return found.look_up(host, port)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    return found


@asynccontextmanager
async def endpoint() -> AsyncIterator[Server]:
    server = Server()
    running = await server.start()
    yield server
    running.close()


def of(server: Server, type: str) -> int:
    return sum(dict(headers)["ce-type"] == type for _, headers, _ in server.requests)


@pytest.mark.parametrize("sender", ["lean", "aiohttp"])
async def test_it_is_waited_for_and_costs_no_other_route_anything(
    names: Names, sender: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is parked with only two retries, the other route goes on, and all arrive once the host is known."""
    caplog.set_level(logging.INFO, "eventbus")
    service = Service("t-stock", retry=RetryPolicy(max_retries=2, delay=0.05))
    async with endpoint() as server, Bus("memory://", source="t-api") as bus:
        port = server.url.split(":")[2]
        breaker = Breaker(failures=5, open=0.05, max=0.1)
        service.forward("lost", to=f"http://{HOST}:{port}", breaker=breaker, sender=sender)  # type: ignore[arg-type]
        service.forward("well", to=server.url, sender=sender)  # type: ignore[arg-type]
        async with bus.serving(service):
            await bus.publish_many([Event(type) for _ in range(20) for type in ("lost", "well")])
            await eventually(lambda: of(server, "well") == 20, "the other route's events have arrived")
            await eventually(lambda: breaker.state != "closed", "the breaker has opened")
            probes = names.asked
            await eventually(lambda: names.asked >= probes + 4, "it was probed for longer than all retries")
            for number in range(20):
                await bus.publish("well")
                await eventually(lambda number=number: of(server, "well") == 21 + number, "and the other goes on")
            assert of(server, "lost") == 0
            assert (await bus.stats(service)).parked == 0
            names.known = True
            await eventually(lambda: of(server, "lost") == 20, "all arrived once the host was known")
            await eventually(lambda: breaker.state == "closed", "the breaker has closed")
        assert (await bus.stats(service)).parked == 0
    [unknown] = [record.fields for record in caplog.records if getattr(record, "event", "") == "endpoint_unknown"]  # type: ignore[attr-defined]
    assert HOST in unknown["endpoint"]
    retried = [record.fields for record in caplog.records if getattr(record, "event", "") == "retry_scheduled"]  # type: ignore[attr-defined]
    assert all(f"host {HOST} is not known" in fields["reason"] for fields in retried)
    opened = [record.fields for record in caplog.records if getattr(record, "event", "") == "breaker_opened"]  # type: ignore[attr-defined]
    assert "check the URL of the route" in opened[0]["error"]
    assert (opened[0]["service"], opened[0]["type"]) == ("t-stock", "lost")


async def test_without_a_breaker_the_dead_letter_names_the_host_and_what_to_do(names: Names) -> None:
    """Its own retries are spent, and what is parked says why."""
    service = Service("t-stock", retry=RetryPolicy(max_retries=2, delay=0.01))
    service.forward("lost", to=f"http://{HOST}/", breaker=False)
    async with Bus("memory://", source="t-api") as bus, bus.serving(service):
        await bus.publish("lost")

        async def parked() -> bool:
            return await bus.dead_letters(service).count() == 1

        await eventually(parked, "it was parked")
        [letter] = (await bus.dead_letters(service).browse()).letters
    assert (letter.reason, letter.retries) == ("max-retries", 2)
    assert f"host {HOST} is not known" in letter.error
    assert "check the URL of the route, and DNS" in letter.error
    assert names.asked >= 3
