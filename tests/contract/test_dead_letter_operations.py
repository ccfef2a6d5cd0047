"""Every dead-letter operation, and every promise about its safety, on every broker."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from eventbus import (
    Bus,
    Canary,
    DeadLetter,
    Delivery,
    Event,
    RetryPolicy,
    Service,
    UnknownLetter,
    UnknownService,
    park,
    requeue,
)
from eventbus import headers as h
from eventbus.adapter import Moved, Parked, Redrive
from eventbus.errors import BrokerError, ConfigError
from eventbus.facets import facets
from eventbus.letterlines import dump, load
from eventbus.testing.contract import BrokerUnderTest
from eventbus.testing.contract.harness import drained, eventually, running
from tests.brokers import kafka, rabbit, redis

QUORUM = {"rabbit": {"queue_type": "quorum", "settling": 0}}
ONE_PARTITION = {"kafka": {"partitions": 1, "retry_partitions": 1, "dlq_partitions": 1, "session_timeout": "3s"}}
BROKERS: dict[str, Callable[[Path], BrokerUnderTest]] = {
    "memory": lambda folder: BrokerUnderTest(url=f"memory://{folder.name}-{random.getrandbits(32)}"),
    "sqlite": lambda folder: BrokerUnderTest(url=f"sqlite:///{folder}/bus.db"),
    "rabbit-classic": lambda folder: BrokerUnderTest(url=rabbit.shared_url()),
    "rabbit-quorum": lambda folder: BrokerUnderTest(url=rabbit.shared_url(), settings=QUORUM),
    "redis": lambda folder: BrokerUnderTest(url=redis.shared_url()),
    "kafka": lambda folder: BrokerUnderTest(url=kafka.shared_url(), settings=ONE_PARTITION),
}
FOR_OTHER_PROCESSES = [name for name in BROKERS if name != "memory"]
MANY = int(os.environ.get("EVENTBUS_REDRIVE_LETTERS", "2000"))


@pytest.fixture(params=list(BROKERS))
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> BrokerUnderTest:
    return BROKERS[request.param](tmp_path)


def line(n: int, **changes: object) -> str:
    """An exported letter, as a file would hold it."""
    parked = datetime(2026, 3, 1, tzinfo=timezone.utc) + timedelta(minutes=n)
    story = {
        h.PARK_REASON: "permanent" if n % 3 else "max-retries",
        h.FINAL_ERROR: f"no order {n}",
        h.FINAL_STATUS: 404 if n % 3 else 500,
        h.ORIGINAL_QUEUE: "somewhere",
        h.PARKED_AT: parked.isoformat(),
        h.RETRIES: 2,
        h.FINAL_RETRIES: 2,
    }
    row: dict[str, object] = {
        "id": f"e-{n}",
        "type": f"order.{'created' if n % 2 else 'paid'}",
        "source": "shop",
        "time": "2026-03-01T10:00:00+00:00",
        "tenant": ("acme", "globex")[n % 2],
        "content_type": "application/json",
        "body": json.dumps({"n": n}),
        "story": story,
    }
    return json.dumps(row | changes)


async def fill(bus: Bus, service: Service, number: int) -> list[str]:
    """A service with so many letters; gives their event ids, oldest first."""
    await bus.provision(service)
    report = await bus.dead_letters(service).import_(line(n) for n in range(number))
    assert (report.matched, report.done) == (number, number)
    return [f"e-{n}" for n in range(number)]


async def came_back(bus: Bus, service: Service) -> list[tuple[Event, Delivery]]:
    """What stands in the service's own queue, taken out by its own consumer."""
    taken: list[tuple[Event, Delivery]] = []
    taker = Service(service.name, prefix=service.prefix, concurrency=256)

    @taker.on("#")
    async def take(event: Event, delivery: Delivery) -> None:
        taken.append((event, delivery))

    async with running(bus, taker):
        await drained(bus, taker)
    return taken


# --- looking ---------------------------------------------------------------------------------------------------------


async def test_pages_follow_each_other(broker: BrokerUnderTest) -> None:
    """Each page goes on where the last one ended, oldest first, with and without a filter; nothing is consumed."""
    service = broker.service()
    async with broker.bus() as bus:
        ids = await fill(bus, service, 25)
        letters = bus.dead_letters(service)
        for where, wanted in ((None, ids), ("tenant=acme", ids[::2])):
            seen, after = [], None
            while True:
                page = await letters.browse(where, after, 7)
                seen += [letter.id for letter in page.letters]
                if (after := page.next) is None:
                    break
            assert seen == wanted
        assert await letters.count() == 25


async def test_stats_are_those_of_a_full_scan(broker: BrokerUnderTest) -> None:
    """By every key, from an index or by walking, before and after letters have gone."""
    service = broker.service()
    async with broker.bus() as bus:
        await fill(bus, service, 30)
        letters = bus.dead_letters(service)
        for _ in range(2):
            found = [letter async for letter in letters.all()]
            for key in ("reason", "status", "code", "type", "tenant", "fingerprint"):
                scanned = Counter(facets(letter.event, letter.story)[key] for letter in found)
                assert await letters.stats(key) == scanned
                some = Counter(facets(x.event, x.story)[key] for x in found if x.tenant == "acme")
                assert await letters.stats(key, "tenant=acme") == some
            assert sum((await letters.stats("age")).values()) == len(found)
            await letters.purge(limit=4)
            await letters.redrive(where="type=order.paid", limit=3)
        assert await letters.stats("fingerprint", "status=404") == {
            found[1].fingerprint: await letters.count("status=404")
        }
        with pytest.raises(ConfigError, match="use reason, status"):
            await letters.stats("colour")  # type: ignore[arg-type]


async def test_one_letter_by_its_id(broker: BrokerUnderTest) -> None:
    """All letters of an event id; none for an id that is not there."""
    service = broker.service()
    async with broker.bus() as bus:
        await fill(bus, service, 3)
        letters = bus.dead_letters(service)
        (letter,) = await letters.get("e-1")
        assert (letter.id, letter.reason, letter.status, letter.tenant) == ("e-1", "permanent", 404, "globex")
        assert letter.data == {"n": 1}
        assert await letters.get("e-99") == []


async def test_the_filter_chooses_everywhere(broker: BrokerUnderTest) -> None:
    """Count, list, re-drive and purge mean the same letters by the same words."""
    service = broker.service()
    async with broker.bus() as bus:
        await fill(bus, service, 12)
        letters = bus.dead_letters(service)
        where = "status=404 type=order.* tenant=acme age>1h reason=permanent"
        page = await letters.browse(where)
        ids = [letter.id for letter in page.letters]
        assert ids == ["e-2", "e-4", "e-8", "e-10"]
        assert await letters.count(where) == 4
        assert (await letters.redrive(where=where, dry_run=True)).ids == ids
        assert (await letters.purge(where=where, dry_run=True)).ids == ids
        digest = page.letters[0].fingerprint[:8]
        assert await letters.count(f"fingerprint={digest} status=404") == 8
        assert (await letters.redrive(where=where, limit=2)).ids == ids[:2]
        assert (await letters.purge(where=where)).ids == ids[2:]
        assert await letters.count() == 8


async def test_letters_of_other_tenants_do_not_exist(broker: BrokerUnderTest) -> None:
    """Whoever may see one tenant sees, counts and moves nothing of another's."""
    service = broker.service()
    async with broker.bus() as bus:
        await fill(bus, service, 10)
        mine = bus.dead_letters(service, tenants=["acme"])
        assert await mine.count() == 5
        assert await mine.count("tenant=globex") == 0
        assert await mine.stats("tenant") == {"acme": 5}
        assert {letter.tenant async for letter in mine.all()} == {"acme"}
        assert await mine.get("e-1") == []
        assert (await mine.redrive(["e-1"])).matched == 0
        with pytest.raises(UnknownLetter):
            await mine.edit("e-1", b"{}")
        with pytest.raises(ConfigError, match="not yours"):
            await mine.import_([line(1)])
        assert (await mine.redrive(limit=2)).ids == ["e-0", "e-2"]
        other = (await bus.dead_letters(service).get("e-1"))[0].address
        assert (await mine.purge(addresses=[other])).matched == 0
        assert (await mine.purge()).done == 3
        assert await bus.dead_letters(service).stats("tenant") == {"globex": 5}


# --- export and import -----------------------------------------------------------------------------------------------


async def test_export_and_import_are_exact_to_the_byte(broker: BrokerUnderTest, tmp_path: Path) -> None:
    """Purged with an export and imported again, letters have the same events, headers and stories."""
    service = broker.service()
    events = [
        Event(
            "order.created",
            b"\x00\xff\xfe no text",
            id="a",
            key="k",
            tenant="acme",
            correlation_id="c",
            headers={"x-mine": b"\x01\xff", "text": "São João"},
            content_type="application/octet-stream",
        ),
        Event("order.created", '{"größe": "1 €"}'.encode(), id="b", content_type="application/json; charset=utf-8"),
        Event("order.created", b"", id="c"),
    ]
    failing = broker.service(retry=RetryPolicy(max_retries=1, delay=0.1))

    @failing.on("#")
    async def fail(event: Event) -> int:
        return 503

    async with broker.bus() as bus:
        letters = bus.dead_letters(service)
        async with running(bus, failing):
            await bus.publish_many(events)

            async def parked() -> bool:
                return await letters.count() == 3

            await eventually(parked, "all parked")
        before = {letter.id: letter async for letter in letters.all()}
        with (tmp_path / "letters.jsonl").open("w") as file:
            assert (await letters.purge(export=file)).done == 3
        assert await letters.count() == 0
        lines = (tmp_path / "letters.jsonl").read_text().splitlines()
        report = await letters.import_(lines)
        assert (report.matched, report.done, report.gone) == (3, 3, 0)
        after = {letter.id: letter async for letter in letters.all()}
        again = await letters.import_(lines)
        assert (again.done, again.gone, await letters.count()) == (0, 3, 3)
        for id, letter in before.items():
            assert after[id].event == letter.event
            assert after[id].event.headers == letter.event.headers
            assert _told(after[id]) == _told(letter)
        assert (await letters.redrive()).done == 3
        back = {event.id: (event, delivery) for event, delivery in await came_back(bus, service)}
    for event in events:
        found, delivery = back[event.id]
        assert (found.body, found.key, found.tenant, found.type) == (event.body, event.key, event.tenant, event.type)
        assert found.headers == event.headers
        assert delivery.history.retries == 1


def _told(letter: DeadLetter) -> dict[str, object]:
    return {name: letter.story[name] for name in letter.story if name in h.RESERVED}


def test_a_line_that_was_dumped_loads_again() -> None:
    """Also what only some brokers have: extensions, due times, repeated and null headers."""
    event = Event("a", b"\xff", ttl=timedelta(days=1), process_after=timedelta(hours=1)).rewritten(
        extensions={"traceparent": "00-1-2-01"}, headers={"many": ["a", b"\xff"], "none": None}
    )
    parked = Parked("7", event, {"x-park-reason": "expired", "x-death": [{"queue": "q", "count": 3}]})
    found = load(dump(DeadLetter.read(parked, "wms-a")))
    assert (found.event, found.event.headers, found.event.extensions) == (event, event.headers, event.extensions)
    assert (found.event.process_after, found.event.expires_at) == (event.process_after, event.expires_at)
    assert found.headers == parked.headers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 3 is no exported letter"),
        ("[]", "line 3 is no exported letter"),
        (line(1, id=""), "line 3 is no exported letter: id"),
        (line(1, body=None), "needs body or body_base64"),
        (line(1, body=None, body_base64="!"), "body_base64"),
        (line(1, time="yesterday"), "line 3 is no exported letter: time"),
    ],
)
async def test_a_bad_line_is_named(text: str, said: str) -> None:
    """What is wrong with which line; what stood before it in its piece is not imported either."""
    async with Bus("memory://") as bus:
        await bus.provision(Service("wms-a"))
        with pytest.raises(ConfigError, match=said):
            await bus.dead_letters("wms-a").import_([line(0), "\n", text])
        assert await bus.dead_letters("wms-a").count() == 0


# --- re-drive --------------------------------------------------------------------------------------------------------


async def test_redrive_in_pieces_goes_on_where_it_ended(broker: BrokerUnderTest) -> None:
    """`next` of one report is `after` of the next call; together they are everything, once."""
    service = broker.service()
    async with broker.bus() as bus:
        ids = await fill(bus, service, 23)
        letters, moved, after = bus.dead_letters(service), [], None
        while True:
            report = await letters.redrive(after=after, limit=10)
            moved += report.ids
            if (after := report.next) is None:
                break
        assert moved == ids
        assert await letters.count() == 0
        back = await came_back(bus, service)
    assert sorted(event.id for event, _ in back) == sorted(ids)
    assert {delivery.history.redriven for _, delivery in back} == {1}


async def test_a_redrive_can_be_stopped(broker: BrokerUnderTest) -> None:
    """It ends after the piece in hand, says so, and what was not reached still stands there."""
    service, stop = broker.service(), asyncio.Event()
    async with broker.bus() as bus:
        await fill(bus, service, 40)
        letters = bus.dead_letters(service)
        report = await letters.redrive(rate=20, stop=stop, progress=lambda so_far: stop.set())
        assert report.stopped == "stopped"
        assert 0 < report.done < 40
        assert await letters.count() == 40 - report.done
        rest = await letters.redrive(after=report.next)
        assert report.done + rest.done == 40


async def test_by_the_retry_road_it_comes_back_later(broker: BrokerUnderTest) -> None:
    """`via="retry"` puts a letter on the retry road first (seed 1)."""
    service = broker.service()
    async with broker.bus() as bus:
        await fill(bus, service, 1)
        assert (await bus.dead_letters(service).redrive(via="retry", delay=60.0)).done == 1
        stats = await bus.stats(service)
        assert (stats.ready, stats.delayed, stats.parked) == (0, 1, 0)


async def test_the_canary_stops_a_redrive_that_fails_again(broker: BrokerUnderTest) -> None:
    """The first few are parked again: the others are left where they are."""
    service = broker.service(retry=RetryPolicy(max_retries=0))

    @service.on("#")
    async def fail(event: Event) -> int:
        return 500

    async with broker.bus() as bus:
        await fill(bus, service, 20)
        letters = bus.dead_letters(service)
        async with broker.bus() as other, running(other, service):
            report = await letters.redrive(canary=Canary(5, watch=20.0))
            assert report.stopped.startswith("canary: ")
            assert report.done == 5
            await drained(bus, service)

            async def all_there() -> bool:
                return await letters.count() == 20

            await eventually(all_there, "the canaries were parked again")
        assert await letters.count("redriven=0") == 15


async def test_after_a_good_canary_the_others_follow(broker: BrokerUnderTest) -> None:
    """Nothing of the first few comes back: the rest goes too."""
    service, seen = broker.service(), set[str]()

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.add(event.id)

    async with broker.bus() as bus:
        ids = await fill(bus, service, 20)
        async with broker.bus() as other, running(other, service):
            report = await bus.dead_letters(service).redrive(canary=Canary(3, watch=2.0))
            assert (report.done, report.stopped) == (20, "")
            await eventually(lambda: seen == set(ids), "all were handled")


async def test_a_run_ends_although_everything_is_parked_again(broker: BrokerUnderTest) -> None:
    """Each letter is put back once, however fast it comes back."""
    service, calls = broker.service(retry=RetryPolicy(max_retries=0)), Counter[str]()

    @service.on("#")
    async def fail(event: Event) -> int:
        calls[event.id] += 1
        return 500

    async with broker.bus() as bus:
        ids = await fill(bus, service, 30)
        async with broker.bus() as other, running(other, service):
            report = await bus.dead_letters(service).redrive(rate=200)
            assert report.done == 30
            await drained(bus, service)
    assert calls == dict.fromkeys(ids, 1)


async def test_an_edited_letter_goes_back_with_its_new_body_and_a_trace(broker: BrokerUnderTest) -> None:
    """The body is the new one, everything else as it was; who, when and both digests stay with the message."""
    service = broker.service(retry=RetryPolicy(max_retries=0))
    async with broker.bus() as bus:
        await fill(bus, service, 2)
        letters = bus.dead_letters(service)
        assert (await letters.edit("e-1", b'{"n": 1, "fixed": true}', by="ana")).done == 1

        @service.on("#")
        async def fail(event: Event) -> int:
            return 500

        async with broker.bus() as other, running(other, service):

            async def parked() -> bool:
                return await letters.count() == 2

            await eventually(parked, "it was parked again")
        (letter,) = await letters.get("e-1")
        assert letter.data == {"n": 1, "fixed": True}
        assert (letter.tenant, letter.redriven, letter.redriven_by) == ("globex", 1, "ana")
        assert letter.edited is not None
        assert " by ana: 8 bytes sha256:" in letter.edited
        assert "-> 23 bytes sha256:" in letter.edited
        with pytest.raises(UnknownLetter, match="no dead letter with the id 'nope'"):
            await letters.edit("nope", b"")


async def test_two_letters_of_one_event_are_told_apart(broker: BrokerUnderTest) -> None:
    """An edit of an id that stands there twice asks which one is meant."""
    service = broker.service()
    async with broker.bus() as bus:
        await bus.provision(service)
        letters = bus.dead_letters(service)
        story = json.loads(line(2))["story"]
        await letters.import_([line(1), line(1, story=story)])
        one, other = await letters.get("e-1")
        with pytest.raises(ConfigError, match="2 dead letters with the id 'e-1'"):
            await letters.edit("e-1", b"{}")
        assert (await letters.edit("e-1", b"{}", address=other.address)).done == 1
        assert [letter.address for letter in await letters.get("e-1")] == [one.address]


# --- safety ----------------------------------------------------------------------------------------------------------


async def test_two_operators_at_once_move_each_letter_once(broker: BrokerUnderTest) -> None:
    """Both begin at the same moment; every letter is moved by exactly one of them."""
    service = broker.service()
    async with broker.bus() as bus, broker.bus() as second:
        ids = await fill(bus, service, 300)
        reports = await asyncio.gather(
            bus.dead_letters(service).redrive(by="ana"), second.dead_letters(service).redrive(by="bob")
        )
        assert sum(report.done for report in reports) == 300
        assert sum(report.failed for report in reports) == 0
        back = await came_back(bus, service)
    assert Counter(event.id for event, _ in back) == dict.fromkeys(ids, 1)


async def test_one_redrives_while_the_other_purges(broker: BrokerUnderTest) -> None:
    """Nothing is both put back and purged, and nothing is neither."""
    service = broker.service()
    async with broker.bus() as bus, broker.bus() as second:
        await fill(bus, service, 300)
        redriven, purged = await asyncio.gather(
            bus.dead_letters(service).redrive(where="type=order.paid"), second.dead_letters(service).purge()
        )
        assert redriven.done + purged.done == 300
        assert len(await came_back(bus, service)) == redriven.done


async def test_a_service_that_was_unsubscribed_is_refused(broker: BrokerUnderTest) -> None:
    """Nobody would ever get the message: re-drive, import and edit say that there is no such service."""
    service = broker.service()
    async with broker.bus() as bus:
        await bus.provision(service)
        letters = bus.dead_letters(service)
        await bus.unsubscribe(service)
        with pytest.raises(UnknownService):
            await letters.redrive()
        with pytest.raises(UnknownService):
            await letters.import_([line(1)])
        with pytest.raises(UnknownService):
            await letters.edit("e-1", b"{}")


class Full(io.StringIO):
    """A disk that is full."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


async def test_what_could_not_be_exported_is_not_purged(broker: BrokerUnderTest) -> None:
    """A full disk ends the purge; every letter still stands there."""
    service = broker.service()
    async with broker.bus() as bus:
        await fill(bus, service, 5)
        with pytest.raises(OSError, match="No space left"):
            await bus.dead_letters(service).purge(export=Full())
        assert await bus.dead_letters(service).count() == 5


OPERATOR = """
import asyncio, json, sys
from eventbus import Bus
url, settings, service = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
async def main():
    async with Bus(url, settings=settings) as bus:
        print("ready", flush=True)
        await bus.dead_letters(service).redrive(progress=lambda report: print(report.done, flush=True))
asyncio.run(main())
"""


@pytest.mark.parametrize("name", FOR_OTHER_PROCESSES)
async def test_a_killed_redrive_loses_nothing(name: str, tmp_path: Path) -> None:
    """SIGKILL at any moment of a re-drive, again and again: each letter is in the queue or still parked."""
    broker, dice = BROKERS[name](tmp_path), random.Random(name)
    service = broker.service()
    command = [sys.executable, "-c", OPERATOR, broker.url, json.dumps(broker.settings), service.name]
    kills = 0
    async with broker.bus() as bus:
        ids = await fill(bus, service, MANY)
        letters = bus.dead_letters(service)
        while await letters.count() and kills < 6:
            operator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
            assert operator.stdout is not None
            try:
                for _ in range(dice.randint(1, 2)):  # it is ready; one piece is moved
                    operator.stdout.readline()
                await asyncio.sleep(dice.uniform(0.0, 0.02))  # any moment
                operator.send_signal(signal.SIGKILL)
                assert operator.wait(10) == -signal.SIGKILL
            except AssertionError:
                assert operator.returncode == 0
            finally:
                operator.stdout.close()
            kills += 1
        assert kills >= 2
        assert (await letters.redrive()).failed == 0
        back = Counter(event.id for event, _ in await came_back(bus, service))
    doubled = sum(number - 1 for number in back.values())
    print(f"\n{name}: {kills} kills, {len(back)} of {MANY} came back, {doubled} twice")
    assert set(back) == set(ids)


# A quorum queue is walked piece by piece: nothing is under way beside a piece there.
@pytest.mark.parametrize("name", [name for name in FOR_OTHER_PROCESSES if name != "rabbit-quorum"])
async def test_a_redrive_killed_with_two_pieces_and_a_page_under_way_loses_nothing(name: str, tmp_path: Path) -> None:
    """SIGKILL when one piece is moved, the next one begun and the page after it asked for."""
    broker = BROKERS[name](tmp_path)
    service = broker.service()
    command = [sys.executable, "-c", OPERATOR, broker.url, json.dumps(broker.settings), service.name]
    async with broker.bus() as bus:
        ids = await fill(bus, service, 2_600)  # six pieces
        letters = bus.dead_letters(service)
        env = os.environ | {"EVENTBUS_FAILPOINT": "redrive.next-begun"}
        ends = [(await asyncio.to_thread(subprocess.run, command, env=env)).returncode for _ in range(2)]
        assert ends == [-signal.SIGKILL] * 2
        assert await letters.count() > 0
        await letters.redrive()
        back = Counter(event.id for event, _ in await came_back(bus, service))
    print(f"\n{name}: {sum(back.values()) - len(back)} of {len(ids)} came back twice")
    assert set(back) == set(ids)


async def test_a_connection_lost_in_the_middle_loses_nothing(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A move that raises ends the run; what was not moved is there for the next one."""
    service = broker.service()
    async with broker.bus() as bus:
        await fill(bus, service, 1200)
        letters = bus.dead_letters(service)
        moves = letters._parking.redrive
        calls, moved = 0, list[object]()

        async def breaks(orders: Sequence[Redrive]) -> list[Moved]:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise BrokerError("the connection is gone")
            moved.extend(orders)
            return await moves(orders)

        monkeypatch.setattr(letters._parking, "redrive", breaks)
        with pytest.raises(BrokerError):
            await letters.redrive()
        assert len(moved) < 1200  # where the next piece is begun meanwhile, it is moved too
        assert await letters.count() == 1200 - len(moved)
        assert (await bus.dead_letters(service).redrive()).done == 1200 - len(moved)


# --- consumers of dead letters ---------------------------------------------------------------------------------------


async def test_a_dead_letter_consumer_takes_batches_and_removes_what_it_acknowledged(broker: BrokerUnderTest) -> None:
    """At most as many at a time as it asked for, each letter with its story; all of them are gone afterwards."""
    service, sizes, seen = broker.service(), list[int](), dict[str, DeadLetter]()

    @service.dead_letters(batch=10)
    async def keep(letters: list[DeadLetter]) -> None:
        sizes.append(len(letters))
        seen.update({letter.id: letter for letter in letters})

    async with broker.bus() as bus:
        ids = await fill(bus, service, 25)
        async with broker.bus() as other, running(other, service):

            async def empty() -> bool:
                return await bus.dead_letters(service).count() == 0

            await eventually(empty, "all were taken")
    assert set(seen) == set(ids)
    assert max(sizes) <= 10
    assert (seen["e-1"].status, seen["e-1"].reason, seen["e-1"].data) == (404, "permanent", {"n": 1})


ANSWERS: dict[str, Callable[[], object]] = {
    "500": lambda: 500,
    "409": lambda: 409,
    "425": lambda: 425,
    "requeue": lambda: requeue(after=0.1),
    "park": lambda: park("no use"),
    "exception": lambda: 1 / 0,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_anything_but_success_leaves_a_letter_where_it_is(
    broker: BrokerUnderTest, answer: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is offered again later, never parked a second time, and its story does not change."""
    monkeypatch.setattr("eventbus.worker.dead_letters.RETRY_DELAYS", (0.2,))
    service, calls = broker.service(), list[list[str]]()

    @service.dead_letters(batch=10)
    async def refuse(letters: list[DeadLetter]) -> object:
        calls.append([letter.id for letter in letters])
        return answer()

    async with broker.bus() as bus:
        await fill(bus, service, 2)
        letters = bus.dead_letters(service)
        before = {letter.id: _told(letter) async for letter in letters.all()}
        async with broker.bus() as other, running(other, service):
            await eventually(lambda: sum(map(len, calls)) >= 4, "both were offered a second time")

        async def both() -> bool:
            return await letters.count() == 2

        await eventually(both, "both stand there")
        after = {letter.id: _told(letter) async for letter in letters.all()}
        for id, story in before.items():
            assert {name: after[id].get(name) for name in story} == story
        assert (await bus.stats(service)).ready == 0
