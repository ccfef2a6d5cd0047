"""Solitude: one suspect at a time, with nothing else in flight, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from eventbus import Bus, Event, RetryPolicy, Service
from eventbus.worker import Solitude


async def turns(number: int = 10) -> None:
    """Let everything happen that can happen without time passing."""
    for _ in range(number):
        await asyncio.sleep(0)


async def alone(solitude: Solitude, inside: asyncio.Event, leave: asyncio.Event, log: list[str], name: str) -> None:
    async with solitude:
        log.append(f"{name} in")
        inside.set()
        await leave.wait()
        log.append(f"{name} out")


async def test_an_empty_house_is_entered_at_once():
    """With nothing running a suspect does not wait; the door is shut meanwhile and open afterwards."""
    solitude = Solitude()
    assert not solitude.shut
    async with solitude:
        assert solitude.shut
    assert not solitude.shut


async def test_a_suspect_waits_until_all_handlers_are_done():
    """The door shuts at once for newcomers; those inside finish first."""
    solitude, inside, leave = Solitude(), asyncio.Event(), asyncio.Event()
    solitude.enter()
    solitude.enter()
    task = asyncio.create_task(alone(solitude, inside, leave, [], "s"))
    await turns()
    assert solitude.shut
    assert not inside.is_set()
    solitude.leave()
    await turns()
    assert not inside.is_set()
    solitude.leave()
    await turns()
    assert inside.is_set()
    leave.set()
    await task
    assert not solitude.shut


async def test_two_suspects_are_never_in_at_once():
    """One after the other, and the door stays shut between them."""
    solitude, log = Solitude(), []
    doors = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
    tasks = [asyncio.create_task(alone(solitude, *door, log, str(n))) for n, door in enumerate(doors)]
    await turns()
    assert log == ["0 in"]
    doors[0][1].set()
    await tasks[0]
    assert solitude.shut
    doors[1][1].set()
    await tasks[1]
    assert log == ["0 in", "0 out", "1 in", "1 out"]
    assert not solitude.shut


async def test_a_handler_that_stepped_out_comes_back_after_the_suspect():
    """An in-place retry does not slip in beside a suspect."""
    solitude, inside, leave = Solitude(), asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(alone(solitude, inside, leave, [], "s"))
    await turns()
    back = asyncio.create_task(solitude.enter_when_open())
    await turns()
    assert not back.done()
    leave.set()
    await task
    await back
    solitude.leave()
    async with asyncio.timeout(1), solitude:
        assert solitude.shut


@pytest.mark.parametrize("waits_for", ["handlers", "turn"])
async def test_a_suspect_that_gives_up_opens_the_door_again(waits_for):
    """Cancelled while it waits, it leaves nothing shut behind."""
    solitude, inside, leave = Solitude(), asyncio.Event(), asyncio.Event()
    first = None
    if waits_for == "handlers":
        solitude.enter()
    else:
        first = asyncio.create_task(alone(solitude, inside, leave, [], "first"))
        await turns()
    second = asyncio.create_task(alone(solitude, asyncio.Event(), asyncio.Event(), [], "second"))
    await turns()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    if first is None:
        assert not solitude.shut
        solitude.leave()
    else:
        assert solitude.shut
        leave.set()
        await first
    assert not solitude.shut
    async with asyncio.timeout(1), solitude:
        pass


async def test_an_error_inside_opens_the_door_again():
    """Whatever a suspect does, the others go on."""
    solitude = Solitude()
    with pytest.raises(RuntimeError):
        async with solitude:
            raise RuntimeError
    assert not solitude.shut


async def test_everybody_is_told_when_the_door_opens():
    """After each suspect: those who waited get their turn before the next one."""
    solitude, called = Solitude(), []
    solitude.on_reopen(lambda: called.append(1))
    doors = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
    tasks = [asyncio.create_task(alone(solitude, *door, [], "")) for door in doors]
    await turns()
    doors[0][1].set()
    await tasks[0]
    assert called == [1]
    doors[1][1].set()
    await tasks[1]
    assert called == [1, 1]


async def test_a_long_handler_does_not_keep_the_door_shut_for_ever():
    """Past its patience a suspect lets the others go on, and tries again later."""
    solitude, opened = Solitude(patience=0.01), asyncio.Event()
    solitude.on_reopen(opened.set)
    solitude.enter()  # a handler that takes its time
    inside = asyncio.Event()
    task = asyncio.create_task(alone(solitude, inside, asyncio.Event(), [], ""))
    async with asyncio.timeout(5):
        await opened.wait()
        assert not inside.is_set()
        solitude.leave()
        await inside.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def suspect_one(bus: Bus, service: Service, event: Event) -> None:
    """Publish, receive and let go of an event as a process does that dies: it comes back as a suspect."""
    await bus.provision(service)
    await bus.publish(event)
    async with bus.adapter.consume(service.subscription()) as consumer:
        assert len(await consumer.receive(1, 1.0)) == 1


@pytest.mark.parametrize("mode", ["delayed", "in-place"])
async def test_a_suspect_that_fails_does_not_stop_the_process(mode):
    """A suspect of a route that retries in place waits for its retry outside, and everybody else goes on."""
    calls: list[str] = []
    done = {"suspect": asyncio.Event(), "neighbour": asyncio.Event()}
    service = Service("wms", grace=0.1, retry=RetryPolicy(max_retries=3, delay=0, mode=mode))

    @service.on("#")
    async def handle(event: Event) -> int:
        calls.append(event.id)
        if event.id == "suspect" and calls.count("suspect") == 1:
            return 500
        done[event.id].set()
        return 200

    async with Bus("memory://") as bus:
        await suspect_one(bus, service, Event("a", id="suspect"))
        async with bus.serving(service):
            await bus.publish(Event("a", id="neighbour"))
            async with asyncio.timeout(3):
                await done["neighbour"].wait()
                await done["suspect"].wait()
        assert calls.count("suspect") == 2
        assert await bus.dead_letters(service).count() == 0


async def test_a_suspect_is_handled_with_nothing_else_in_flight():
    """While it runs no other handler of the process does, and afterwards they do."""
    running: set[str] = set()
    beside: set[str] = set()
    handled: list[str] = []
    finished = asyncio.Event()
    service = Service("wms", grace=0.1)

    @service.on("#")
    async def handle(event: Event) -> None:
        running.add(event.id)
        await turns(3)
        if "suspect" in running:
            beside.update(running)
        running.discard(event.id)
        handled.append(event.id)
        if len(handled) == 11:
            finished.set()

    async with Bus("memory://") as bus:
        await suspect_one(bus, service, Event("a", id="suspect"))
        await bus.publish_many([Event("a", id=str(n)) for n in range(10)])
        async with bus.serving(service), asyncio.timeout(3):
            await finished.wait()
    assert beside == {"suspect"}
