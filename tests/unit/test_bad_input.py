"""Bad input over a bus in memory: refused at the door, or parked alone; the service goes on in any case."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timedelta, timezone

import pytest

from eventbus import (
    BrokerError,
    Bus,
    ConsumerStatus,
    Delivery,
    Event,
    EventBusError,
    InvalidEvent,
    Outcome,
    PublishError,
    RetryPolicy,
    Service,
    wire,
)
from eventbus import headers as h
from eventbus.embedded.memory import Message

GOOD = "good"


def no_retries(name: str = "wms", **options: object) -> Service:
    return Service(name, grace=0.1, retry=RetryPolicy(max_retries=0), **options)  # type: ignore[arg-type]


async def consumed(bus: Bus, *services: Service) -> None:
    """Serve until nothing is ready or in flight any more."""
    async with bus.serving(*services), asyncio.timeout(3):
        while True:
            stats = [await bus.stats(service) for service in services]
            if not any(entry.ready or entry.inflight for entry in stats):
                return
            await asyncio.sleep(0)


async def reasons(bus: Bus, service: Service) -> dict[str, str]:
    return {letter.id: letter.reason async for letter in bus.dead_letters(service).all()}


# --- publish -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"a": "x\r\nx-evil: 1"}, id="CR LF"),
        pytest.param({"a": "x\ny"}, id="LF"),
        pytest.param({"a": "x\x00"}, id="NUL"),
        pytest.param({"a\r\nb": "x"}, id="CR LF in the name"),
        pytest.param({"a": ["x"]}, id="list"),
        pytest.param({"a": "\ud800"}, id="half a character"),
    ],
)
async def test_a_bad_header_is_never_published(headers):
    """InvalidEvent, and nothing is stored."""
    service = no_retries()
    async with Bus("memory://") as bus:
        await bus.provision(service)
        with pytest.raises(InvalidEvent):
            await bus.publish("order.created", {}, headers=headers)
        assert (await bus.stats(service)).ready == 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"headers": {"a": "x\r\nx-evil: 1"}}, id="CR LF in a header"),
        pytest.param({"headers": {"a": object()}}, id="an object as a header"),
        pytest.param({"id": "x\r\nx-evil: 1"}, id="CR LF in the id"),
        pytest.param({"type": ""}, id="no type"),
        pytest.param({"body": "text"}, id="a body that is no bytes"),
    ],
)
async def test_a_copy_is_checked_like_an_event(changes):
    """event.replace() is the way to change an event: it is no way round the checks."""
    service = no_retries()
    async with Bus("memory://") as bus:
        await bus.provision(service)
        with pytest.raises(EventBusError):
            await bus.publish(Event("order.created", {}).replace(**changes))
        assert (await bus.stats(service)).ready == 0


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"a": "x" * 2_000_000}, id="text"),
        pytest.param({"a": b"x" * 2_000_000}, id="bytes"),
        pytest.param({"x" * 2_000_000: "a"}, id="name"),
        pytest.param({f"a{n}": "x" * 2_000 for n in range(1_000)}, id="a thousand of them"),
    ],
)
async def test_2_mb_of_headers_are_refused(headers):
    """They would pass on no broker and no HTTP server: refused, and nothing is stored."""
    service = no_retries()
    async with Bus("memory://") as bus:
        await bus.provision(service)
        with pytest.raises(PublishError) as caught:
            await bus.publish("order.created", {}, headers=headers)
        assert [result.status for result in caught.value.results] == ["refused"]
        assert (await bus.stats(service)).ready == 0


async def test_a_body_that_could_not_be_parked_is_refused():
    """The broker's limit less 64 KiB: one byte more is refused, and says by how much."""
    service = no_retries()
    async with Bus("memory://") as bus:
        await bus.provision(service)
        limit = bus.adapter.capabilities.max_event_bytes - 64 * 1024
        with pytest.raises(PublishError, match=str(limit)) as caught:
            await bus.publish("order.created", b"x" * (limit + 1))
        assert caught.value.results[0].status == "refused"
        await bus.publish("order.created", b"x" * limit)
        assert (await bus.stats(service)).ready == 1


async def test_one_bad_event_among_many_does_not_stop_the_others():
    """One result per event, in order; the good ones are stored."""
    service = no_retries()
    async with Bus("memory://") as bus:
        await bus.provision(service)
        large = Event("a", b"x" * bus.adapter.capabilities.max_event_bytes)
        with pytest.raises(PublishError, match="1 refused of 3") as caught:
            await bus.publish_many([Event("a"), large, Event("a")])
        assert [result.status for result in caught.value.results] == ["stored", "refused", "stored"]
        assert (await bus.stats(service)).ready == 2


@pytest.mark.parametrize(
    "data", [float("nan"), {"a": [float("inf")]}, object(), {1j}], ids=lambda data: type(data).__name__
)
async def test_data_that_is_no_json_is_never_published(data):
    """NaN and its like are refused where they are made, not where they are read."""
    async with Bus("memory://") as bus:
        with pytest.raises(InvalidEvent):
            await bus.publish("order.created", data)


async def test_forged_reserved_headers_are_stripped():
    """A publisher cannot give a message a past: its first attempt is the first."""
    seen: list[tuple[int, dict[str, object]]] = []
    service = no_retries()

    @service.on("#")
    async def handle(delivery: Delivery) -> None:
        seen.append((delivery.attempt, dict(delivery.event.headers)))

    forged = dict.fromkeys(h.RESERVED, 99) | {"X-RETRIES": 99, "x-redriven-what": 1}
    async with Bus("memory://") as bus:
        await bus.provision(service)
        await bus.publish("order.created", {}, headers=forged | {"mine": "1"})
        await consumed(bus, service)
    assert seen == [(1, {"mine": "1"})]


async def test_a_closed_bus_says_so():
    """Publishing outside `async with` is one clear error."""
    with pytest.raises(BrokerError, match="not open"):
        await Bus("memory://").publish("a")


async def test_publishing_nothing_is_nothing():
    """An empty list has no results and no error."""
    async with Bus("memory://") as bus:
        assert await bus.publish_many([]) == []


@pytest.mark.parametrize("forged", [{}, {"x-retries": 1}], ids=["plain", "with a header that is stripped"])
async def test_what_one_service_does_to_an_event_another_does_not_see(forged):
    """All services of a bus in memory get the same event: nobody can write into it."""
    seen: list[dict[str, object]] = []
    services = [no_retries("wms-a"), no_retries("wms-b")]
    for service in services:

        @service.on("#")
        async def handle(event: Event) -> None:
            seen.append(dict(event.headers) | dict(event.extensions))
            for mapping in (event.headers, event.extensions):
                try:
                    mapping["mine"] = "changed"  # type: ignore[index]
                except TypeError:
                    continue

    async with Bus("memory://", source="wms-api") as bus:
        await bus.provision(*services)
        await bus.publish(Event("a", headers={"h": "1", **forged}, extensions={"e": "1"}))
        await consumed(bus, *services)
    assert seen == [{"h": "1", "e": "1"}] * 2


# --- what is delivered ---------------------------------------------------------------------------------------

WRONG = [
    None,
    True,
    -1,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    [],
    [1],
    {},
    {"a": {"b": 1}},
    object(),
    b"\xff",
    "",
    "nonsense",
    "9999-12-31T23:59:59-23:59",
    "9" * 5000,
    '[[1,NaN,"x"]]',
    '[[1,Infinity,"x"]]',
    '[[1,1e300,"x"]]',
    "[" * 4000,
]


@pytest.mark.parametrize("name", sorted(h.RESERVED))
async def test_wrong_types_in_a_reserved_header_count_as_absent(name):
    """Each message is handled at its first attempt, parked with its story, and can be looked at."""
    attempts: list[int] = []
    service = no_retries()

    @service.on("#")
    async def handle(delivery: Delivery) -> int:
        attempts.append(delivery.attempt)
        return 500

    async with Bus("memory://") as bus:
        await bus.provision(service)
        queue = bus.adapter._store.queue("wms", "default")  # type: ignore[attr-defined]
        queue.ready.extend(Message(Event("a", id=str(n)), {name: value}, 0.0) for n, value in enumerate(WRONG))
        await consumed(bus, service)
        assert attempts == [1] * len(WRONG)
        assert await reasons(bus, service) == {str(n): "max-retries" for n in range(len(WRONG))}


def structured(**changes: object) -> bytes:
    return json.dumps({"specversion": "1.0", "id": "bad", "type": "a", "source": "/", **changes}).encode()


FIRST = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=23, minutes=59)))
LAST = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=timezone(timedelta(hours=-23)))


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        pytest.param(Event("a", b"NaN", content_type="application/json"), "undecodable", id="NaN"),
        pytest.param(Event("a", b'{"a":1,"a":1}', content_type="application/json"), "undecodable", id="duplicate keys"),
        pytest.param(
            Event("a", b"[" * 10_000 + b"]" * 10_000, content_type="application/json"), "undecodable", id="10,000 deep"
        ),
        pytest.param(Event("a", b'"\xff"', content_type="application/json"), "undecodable", id="invalid UTF-8"),
        pytest.param(Event("a"), "invalid", id="empty body"),
        pytest.param(Event("a", [1]), "invalid", id="wrong shape"),
        pytest.param(Event("a", b"\xff"), "invalid", id="wrong content type"),
        pytest.param(Event("a", b"", content_type=wire.STRUCTURED), "undecodable", id="empty envelope"),
        pytest.param(Event("a", b"[]", content_type=wire.STRUCTURED), "undecodable", id="envelope that is a list"),
        pytest.param(
            Event("a", structured(data="\ud800"), content_type=wire.STRUCTURED),
            "undecodable",
            id="half a character in an envelope",
        ),
        pytest.param(
            Event(
                "a",
                structured(data=1, time="9999-12-31T23:59:59Z"),
                content_type=wire.STRUCTURED,
                headers={"processAfterDelayMs": 10**11},
            ),
            "invalid",
            id="a delay beyond the calendar",
        ),
        pytest.param(Event("a", {}, expires_at=FIRST), "expired", id="expired before the calendar"),
        pytest.param(
            Event("a", {}, expires_at=datetime(1, 1, 1, tzinfo=timezone.utc)), "expired", id="expired in year 1"
        ),
        pytest.param(Event("a", [1], expires_at=LAST, process_after=FIRST), "invalid", id="the ends of the calendar"),
    ],
)
async def test_a_bad_message_is_parked_alone(event, reason):
    """It goes to the dead letters without a call; the good one after it is handled."""
    called: list[str] = []
    service = no_retries()

    @service.on("#")
    async def handle(data: dict, event: Event) -> None:  # type: ignore[type-arg]
        called.append(event.id)

    async with Bus("memory://") as bus:
        await bus.provision(service)
        await bus.publish_many([event, Event("a", {}, id=GOOD)])
        await consumed(bus, service)
        assert list((await reasons(bus, service)).values()) == [reason]
        assert called == [GOOD]


async def test_an_envelope_is_known_by_any_spelling_of_its_content_type():
    """Capital letters and parameters do not matter on any bus."""
    seen: list[str] = []
    service = no_retries()

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.id)

    async with Bus("memory://") as bus:
        await bus.provision(service)
        for content_type in (wire.STRUCTURED, wire.STRUCTURED.upper(), wire.STRUCTURED + "; charset=utf-8"):
            await bus.publish("outer", structured(id="inner"), content_type=content_type)
        await consumed(bus, service)
    assert seen == ["inner"] * 3


async def test_a_content_type_that_only_begins_like_an_envelopes_is_none():
    """`application/cloudevents+jsonl` is somebody else's."""
    service = no_retries()

    @service.on("#")
    async def handle(event: Event) -> None: ...

    async with Bus("memory://") as bus:
        await bus.provision(service)
        await bus.publish("a", b"{}\n{}", content_type=wire.STRUCTURED + "l")
        await consumed(bus, service)
        assert await reasons(bus, service) == {}


# --- what handlers do ----------------------------------------------------------------------------------------


class Explosive:
    @property
    def status_code(self) -> int:
        raise RuntimeError("the response was closed")


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this works")


class Rude(BaseException):
    pass


def raises(error: BaseException) -> object:
    raise error


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda: True, id="True"),
        pytest.param(lambda: {"status": 200}, id="dict"),
        pytest.param(lambda: 1000, id="1000"),
        pytest.param(Explosive, id="status_code that raises"),
        pytest.param(lambda: Outcome(status="500"), id="status as text"),
        pytest.param(lambda: Outcome(verdict="park"), id="verdict as text"),
        pytest.param(lambda: Outcome(verdict=ConsumerStatus.PARK, code=550), id="code as number"),
        pytest.param(lambda: Outcome(status=500, reason="\ud800"), id="half a character as reason"),
        pytest.param(lambda: raises(Speechless()), id="an exception that cannot be printed"),
        pytest.param(lambda: raises(ValueError("\ud800")), id="an exception with half a character"),
        pytest.param(lambda: raises(SystemExit(1)), id="SystemExit"),
        pytest.param(lambda: raises(asyncio.CancelledError()), id="CancelledError"),
        pytest.param(lambda: raises(StopIteration()), id="StopIteration"),
        pytest.param(lambda: raises(Rude()), id="a BaseException, such as pytest.fail() raises"),
    ],
)
@pytest.mark.parametrize("kind", ["async", "thread", "batch"])
async def test_a_handler_that_misbehaves_spends_its_own_retries_only(answer, kind):
    """Whatever it returns or raises, its message is parked, nothing stays in flight, and the next one is handled."""
    called: list[str] = []
    service = no_retries()

    def act(event: Event) -> object:
        called.append(event.id)
        return answer() if event.id == "bad" else None

    if kind == "async":

        @service.on("#")
        async def handle(event: Event):
            return act(event)

    elif kind == "thread":

        @service.on("#")
        def handle_in_thread(event: Event):
            return act(event)

    else:

        @service.batch("#", size=1, timeout=0.01)
        async def handle_batch(events: list[Event]):
            return act(events[0])

    async with Bus("memory://") as bus:
        await bus.provision(service)
        await bus.publish_many([Event("a", id="bad"), Event("a", id=GOOD)])
        await consumed(bus, service)
        assert set(await reasons(bus, service)) == {"bad"}
        assert sorted(set(called)) == ["bad", GOOD]
