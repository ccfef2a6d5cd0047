"""Publishing to Redis in pieces that follow one another: their order, their answers, a connection that is lost."""

from __future__ import annotations

import asyncio
import secrets

import pytest
from redis.asyncio import Redis

from eventbus import Bus, Event, Service
from eventbus.errors import BrokerError
from eventbus_redis import RedisAdapter
from eventbus_redis._client import Line
from eventbus_redis._errors import FateUnknown
from tests.brokers import redis


async def test_large_batches_of_several_callers_keep_their_order() -> None:
    """Their pieces are under way together; each caller's events stand in its own order, none twice."""
    prefix = f"t{secrets.token_hex(4)}"
    batches = [[Event("a", [caller, n]) for n in range(1200)] for caller in range(3)]
    client = Redis.from_url(redis.shared_url())
    try:
        async with Bus(redis.shared_url(), source=f"{prefix}-api") as bus:
            await bus.provision(Service(f"{prefix}-stock"))
            results = await asyncio.gather(*(bus.publish_many(events) for events in batches))
        assert all(result.subscribed for some in results for result in some)
        stored = [entry[b"id"].decode() for _, entry in await client.xrange(f"{{{prefix}}}:main")]
        assert len(stored) == 3600
        for events in batches:
            mine = {event.id for event in events}
            assert [id for id in stored if id in mine] == [event.id for event in events]
    finally:
        await client.aclose()


async def test_calls_of_a_line_get_each_its_own_answer() -> None:
    """They are sent before the first is answered; an error is the answer of one of them, and of no other."""
    adapter = RedisAdapter.from_url(redis.shared_url(), {})
    await adapter.open()
    try:
        line = adapter.client.line()
        calls = [echo(line, n) for n in range(50)]
        calls.insert(20, line.call(("NONSENSE",), 0, []))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers.pop(20), BrokerError)
        assert answers == [b"%d" % n for n in range(50)]
    finally:
        await adapter.aclose()


async def test_after_a_lost_connection_no_call_gets_the_answer_of_another() -> None:
    """What was under way behind a call that was given up is of unknown fate; the next call has a new connection."""
    adapter = RedisAdapter.from_url(redis.shared_url(), {"timeout": "500ms"})
    await adapter.open()
    try:
        line = adapter.client.line()
        late = asyncio.ensure_future(line.call(("BLPOP", f"nothing-{secrets.token_hex(4)}", 2), 0, []))
        behind = [asyncio.ensure_future(echo(line, n)) for n in range(5)]
        for call in (late, *behind):
            with pytest.raises(FateUnknown):
                await call
        assert await asyncio.gather(*(echo(line, n) for n in range(5, 10))) == [b"%d" % n for n in range(5, 10)]
    finally:
        await adapter.aclose()


async def test_the_answer_to_a_call_that_was_called_off_is_nobody_elses() -> None:
    """Called off while it waits for its turn to read: those behind it are of unknown fate, later ones are served."""
    adapter = RedisAdapter.from_url(redis.shared_url(), {})
    await adapter.open()
    try:
        line = adapter.client.line()
        first = asyncio.ensure_future(line.call(("BLPOP", f"nothing-{secrets.token_hex(4)}", 0.2), 0, []))
        second, third = [asyncio.ensure_future(echo(line, n)) for n in (2, 3)]
        await asyncio.wait([first], timeout=0.05)
        second.cancel()
        assert await first is None
        with pytest.raises(FateUnknown):
            await third
        assert await echo(line, 4) == b"4"
    finally:
        await adapter.aclose()


async def echo(line: Line, number: int) -> object:
    text = b"%d" % number
    return await line.call(("ECHO",), 1, [b"$%d\r\n%b\r\n" % (len(text), text)])
