"""Dead letters on a real Kafka: a log, a compacted state beside it, addresses that are offsets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from aiokafka import AIOKafkaProducer

from eventbus import BrokerError, Bus, DeadLetter, Delivery, Event, RetryPolicy, Service, headers
from eventbus.adapter import Parked, Redrive
from eventbus.settlement import ACK
from eventbus.testing.contract.harness import drained, eventually, running
from eventbus_kafka import KafkaAdapter, _client, state
from eventbus_kafka import parking as kafka_parking
from eventbus_kafka.lanes import ENOUGH
from eventbus_kafka.log import LogConsumer
from eventbus_kafka.names import Topic
from eventbus_kafka.parking import KafkaParking
from eventbus_kafka.records import Outgoing
from tests.adapter.test_kafka_log import Place, place

__all__ = ["place"]


def _parking(bus: Bus, service: Service) -> KafkaParking:
    assert isinstance(bus.adapter, KafkaAdapter)
    return bus.adapter.parking(service.name, service.prefix)


async def _park(bus: Bus, service: Service, number: int, **options: object) -> None:
    failing = Service(service.name, prefix=service.prefix, retry=RetryPolicy(max_retries=0))

    @failing.on("#")
    async def fail(event: Event) -> int:
        return 500

    await bus.provision(failing)
    async with running(bus, failing):
        await bus.publish_many([Event("order.created", {"n": n}, id=f"e{n}", key=str(n)) for n in range(number)])

        async def parked() -> bool:
            return await bus.dead_letters(service).count() == number

        await eventually(parked, f"{number} parked")


async def test_pages_go_over_partitions_by_the_time_of_parking(place: Place) -> None:
    """Addresses are partition:offset; pages of any size show every letter once, oldest first."""
    service = place.service()
    async with place.bus(dlq_partitions=3) as bus:
        await _park(bus, service, 40)
        parking = _parking(bus, service)
        whole = (await parking.browse(None, 100)).letters
        assert len({letter.address.partition(":")[0] for letter in whole}) == 3
        seen, cursor = [], None
        while True:
            page = await parking.browse(cursor, 7)
            seen += [letter.address for letter in page.letters]
            cursor = page.next
            if cursor is None:
                break
        assert seen == [letter.address for letter in whole]
        assert len(set(seen)) == 40
        assert [letter.event.id for letter in await parking.find("e7")] == ["e7"]
        assert await parking.count() == (40, True)


async def test_a_page_begins_in_the_middle_of_a_batch(place: Place) -> None:
    """However many letters were written together, and however far into them a page begins, none is left out."""
    service = place.service()
    async with place.bus(dlq_compression="snappy") as bus:
        await bus.provision(service)
        letters = [Parked("", Event("a", n), {headers.PARK_REASON: "permanent"}) for n in range(700)]
        parking = _parking(bus, service)
        assert set(await parking.restore(letters)) == {"done"}
        seen, page = [], await parking.browse(None, 230)
        while True:
            seen += [letter.event.data for letter in page.letters]
            if page.next is None:
                break
            page = await parking.browse(page.next, 230)
        assert seen == list(range(700))
        assert [letter.event.data for letter in (await parking.browse("0:650", 230)).letters] == list(range(651, 700))


async def test_a_clock_that_went_back_hides_no_letter(place: Place) -> None:
    """A leader whose clock is behind, or a topic with its writers' times: pages show every letter, in one order."""
    service = place.service()
    async with place.bus() as bus:
        parking = _parking(bus, service)
        await bus.provision(service)
        assert isinstance(bus.adapter, KafkaAdapter)
        name = bus.adapter.names(service.name, service.prefix).dlq
        await bus.adapter.client.delete([name])
        await bus.adapter.client.create([Topic(name, 3, {"message.timestamp.type": "CreateTime"})], 1, 1)
        now = time.time_ns() // 1_000_000
        times = [[500, 400, 600, 100, 500], [450, 450, 300, 700], [500, 50, 50, 800, 500]]
        producer = AIOKafkaProducer(bootstrap_servers=place.address)
        await producer.start()
        try:
            for partition, some in enumerate(times):
                for number, at in enumerate(some):
                    value = f"{partition}:{number}".encode()
                    await producer.send_and_wait(name, value, partition=partition, timestamp_ms=now - 10_000 + at)
        finally:
            await producer.stop()
        whole = [letter.address for letter in (await parking.browse(None, 100)).letters]
        assert len(whole) == len(set(whole)) == sum(map(len, times))
        for limit in (1, 2, 3, 5):
            seen: list[str] = []
            page = await parking.browse(None, limit)
            while len(seen) <= len(whole):
                seen += [letter.address for letter in page.letters]
                if page.next is None:
                    break
                page = await parking.browse(page.next, limit)
            assert seen == whole, limit


async def test_a_walk_that_keeps_its_place_shows_the_same_and_sees_what_others_took(place: Place) -> None:
    """Within one look pages of any size show every letter once, oldest first, but for those purged meanwhile."""
    service = place.service()
    async with place.bus(dlq_partitions=3) as bus, place.bus() as other:
        await _park(bus, service, 40)
        parking = _parking(bus, service)
        whole = [letter.address for letter in (await parking.browse(None, 100)).letters]
        seen: list[str] = []
        async with parking.looking():
            page = await parking.browse(None, 7)
            seen += [letter.address for letter in page.letters]
            assert await _parking(other, service).purge([whole[3], whole[20]]) == ["done", "done"]
            while page.next is not None:
                page = await parking.browse(page.next, 7)
                seen += [letter.address for letter in page.letters]
            order = Redrive(whole[20], {})
            assert await parking.redrive([order]) == ["gone"]
        assert seen == [address for address in whole if address != whole[20]]


async def test_what_another_put_back_and_erased_since_it_was_seen_is_not_put_back_again(place: Place) -> None:
    """The log has no word of such a letter any more, neither where it stood nor that it was moved."""
    service = place.service()
    async with place.bus() as bus, place.bus() as other:
        await _park(bus, service, 6)
        parking, delta = _parking(bus, service), headers.for_redrive({}, "me", time.time())
        async with parking.looking():
            page = await parking.skim(None, 4)
            assert (await other.dead_letters(service).redrive()).done == 6
            assert (await other.dead_letters(service).erase()).erased == 6
            answers = await parking.redrive([Redrive(letter.address, delta) for letter in page.letters])
        assert answers == ["gone"] * 4
        assert (await bus.stats(service)).ready == 6


async def test_what_a_dead_operator_had_begun_to_move_is_moved_by_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not called gone, for it still stands: the next re-drive waits until the first is taken for dead."""
    monkeypatch.setattr(state, "CLAIM_LASTS", 0.5)
    service = place.service()
    async with place.bus() as bus, place.bus() as dead:
        await _park(bus, service, 4)
        assert isinstance(dead.adapter, KafkaAdapter)
        claims = dead.adapter.letters(dead.adapter.names(service.name, service.prefix))
        assert (await claims.claim({0: [1, 2]})).letters == {0: {1, 2}}
        report = await bus.dead_letters(service).redrive()
        assert (report.done, report.gone, report.failed) == (4, 0, 0)
        assert (await bus.stats(service)).ready == 4


async def test_the_state_says_what_is_gone_and_the_log_keeps_it(place: Place) -> None:
    """Re-driven and purged letters are out of sight for everybody, though the log still has their records."""
    service = place.service()
    async with place.bus() as bus, place.bus() as other:
        await _park(bus, service, 6)
        letters = bus.dead_letters(service)
        assert (await letters.redrive(["e0", "e1"])).done == 2
        assert (await letters.purge(["e2"])).done == 1
        assert await other.dead_letters(service).count() == 3
        assert [letter.id for letter in (await other.dead_letters(service).browse()).letters] == ["e3", "e4", "e5"]
        assert (await other.dead_letters(service).redrive(["e0"])).matched == 0
        assert len(await place.read(f"{place.prefix}.dlq.{service.name}")) == 6
        rows = await place.read(f"{place.prefix}.dlq-state.{service.name}")
        last = {row.key: json.loads(row.value) for row in rows}  # type: ignore[attr-defined]
        assert len(rows) == 4  # a claim for both letters of the re-drive, one of the purge, and what became of them
        assert [(row["state"], row["letters"]) for row in last.values()] == [
            ("redriven", ["0:0-1"]),
            ("purged", ["0:2"]),
        ]
        redriven = await place.read(f"{place.prefix}.retry.{service.name}.0")
        assert len(redriven) == 2


async def _say(bus: Bus, service: Service, *rows: tuple[str, dict[str, object] | None]) -> None:
    """Write rows to the state as others do."""
    assert isinstance(bus.adapter, KafkaAdapter)
    topic = bus.adapter.names(service.name, service.prefix).state
    written = [Outgoing(topic, key.encode(), json.dumps(row).encode() if row else None, [], 0) for key, row in rows]
    await bus.adapter.client.append(written)


async def test_what_was_said_letter_by_letter_is_understood(place: Place) -> None:
    """A row for each letter that is gone, a claim that lists each letter: so the state was written before."""
    service = place.service()
    async with place.bus() as bus:
        await _park(bus, service, 6)
        now = time.time()
        await _say(
            bus,
            service,
            ("claim:x", {"state": "moving", "by": "x", "at": now, "letters": ["0:0", "0:1"]}),
            ("0:0", {"state": "redriven", "at": now}),
            ("0:1", {"state": "redriven", "at": now}),
            ("claim:x", None),
            ("0:3", {"state": "purged", "at": now}),
            ("claim:y", {"state": "moving", "by": "y", "at": now, "letters": ["0:4"]}),
            ("a stranger's", {"letters": [7]}),
        )
        letters = bus.dead_letters(service)
        assert [letter.id for letter in (await letters.browse()).letters] == ["e2", "e4", "e5"]
        assert isinstance(bus.adapter, KafkaAdapter)
        claims = bus.adapter.letters(bus.adapter.names(service.name, service.prefix))
        assert (await claims.claim({0: [1, 2, 4]})).letters == {0: {2}}


async def test_who_takes_a_claim_back_brings_no_letter_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who was taken for dead says that he moved nothing; what another moved meanwhile stays gone."""
    monkeypatch.setattr(state, "CLAIM_LASTS", 0.1)
    service = place.service()
    async with place.bus() as bus:
        await _park(bus, service, 2)
        await _say(bus, service, ("claim:slow", {"state": "moving", "at": time.time(), "letters": ["0:0-1"]}))
        letters = bus.dead_letters(service)
        assert (await letters.redrive()).done == 2
        await _say(bus, service, ("claim:slow", None))
        assert await letters.count() == 0


async def test_a_claim_of_a_clock_that_is_far_ahead_holds_nobody_up(place: Place) -> None:
    """It would be an hour until it is over."""
    service = place.service()
    async with place.bus() as bus:
        await _park(bus, service, 2)
        await _say(bus, service, ("claim:early", {"state": "moving", "at": time.time() + 3600, "letters": ["0:0-1"]}))
        async with asyncio.timeout(5):
            assert (await bus.dead_letters(service).redrive()).done == 2


async def test_a_letter_whose_copy_was_not_taken_stands_for_everybody(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the letters that were claimed with it only those are gone that were moved; it is nobody's at once."""
    service = place.service()
    async with place.bus() as bus, place.bus() as other:
        await _park(bus, service, 3)
        assert isinstance(bus.adapter, KafkaAdapter)
        send = bus.adapter.client.send

        async def full(records: Sequence[Outgoing]) -> list[BrokerError | None]:
            kept = await send([records[0], *records[2:]])
            return [kept[0], BrokerError("no room"), *kept[1:]]

        with monkeypatch.context() as patch:
            patch.setattr(bus.adapter.client, "send", full)
            report = await bus.dead_letters(service).redrive()
        assert (report.done, report.failed) == (2, 1)
        assert [letter.id for letter in (await other.dead_letters(service).browse()).letters] == ["e1"]
        started = time.monotonic()
        assert (await other.dead_letters(service).redrive()).done == 1
        assert time.monotonic() - started < state.CLAIM_LASTS / 2


async def test_a_letter_that_was_only_glimpsed_at_goes_back_as_the_order_says(place: Place) -> None:
    """An order that takes nothing away gets every header, though skimming leaves out what re-drives take away."""
    service = place.service()
    async with place.bus() as bus:
        await _park(bus, service, 1)
        (letter,) = await place.read(f"{place.prefix}.dlq.{service.name}")
        parking = _parking(bus, service)
        async with parking.looking():
            (skimmed,) = (await parking.skim(None, 10)).letters
            assert await parking.redrive([Redrive(skimmed.address, {"x-added": "1"})]) == ["done"]
        (copy,) = await place.read(f"{place.prefix}.retry.{service.name}.0")
        assert list(copy.headers) == [*letter.headers, ("x-added", b"1")]  # type: ignore[attr-defined]


async def test_of_letters_that_retention_took_nothing_is_said_any_more(place: Place) -> None:
    """Rows of which the log has no letter left are taken back with the next move; those of others stay."""
    service = place.service()
    async with place.bus() as bus:
        await _park(bus, service, 6)
        letters = bus.dead_letters(service)
        await letters.redrive(["e0", "e1"])
        await letters.purge(["e2"])
        await letters.purge(["e4"])
        await bus.adapter.client.truncate({(f"{place.prefix}.dlq.{service.name}", 0): 3})  # type: ignore[attr-defined]
        await letters.purge(["e5"])
        rows = await place.read(f"{place.prefix}.dlq-state.{service.name}")
        last = {row.key: row.value and json.loads(row.value)["letters"] for row in rows}  # type: ignore[attr-defined]
        assert list(last.values()) == [None, None, ["0:4"], ["0:5"]]
        async with place.bus() as other:
            assert [letter.id for letter in (await other.dead_letters(service).browse()).letters] == ["e3"]
            assert await other.dead_letters(service).count() == 1


async def test_of_letters_that_are_no_more_in_the_log_nothing_is_kept(place: Place) -> None:
    """Neither by who erased them nor by who only looks; to both they are gone for all that."""
    service = place.service()
    async with place.bus() as bus, place.bus() as looking:
        await _park(bus, service, 30)
        await looking.dead_letters(service).purge(limit=20)
        assert isinstance(bus.adapter, KafkaAdapter)
        assert isinstance(looking.adapter, KafkaAdapter)
        assert await _parking(bus, service).erase() == 20
        assert await looking.dead_letters(service).count() == 10
        for adapter in (bus.adapter, looking.adapter):
            letters = adapter.letters(adapter.names(service.name, service.prefix))
            assert sum(map(len, letters.gone.values())) == 0
            assert [letters.is_gone(0, offset) for offset in (0, 19, 20, 29)] == [True, True, False, False]


async def test_who_only_asks_how_a_service_stands_counts_no_letter_that_is_gone(place: Place) -> None:
    """Also where he asks for the first time: it is the state that says what was re-driven."""
    service = place.service()
    async with place.bus() as bus, place.bus() as asking:
        await _park(bus, service, 5)
        assert (await asking.stats(service)).parked == 5
        assert (await bus.dead_letters(service).redrive(limit=3)).done == 3
        assert (await asking.stats(service)).parked == 2
        async with place.bus() as fresh:
            assert (await fresh.stats(service)).parked == 2


async def test_operators_at_the_same_time_move_each_letter_once(place: Place) -> None:
    """Whoever was first in the log moves a letter; the others hear that it is gone."""
    service = place.service()
    async with place.bus() as one, place.bus() as two, place.bus() as three:
        await _park(one, service, 20)
        reports = await asyncio.gather(*(bus.dead_letters(service).redrive() for bus in (one, two, three)))
        assert sum(report.done for report in reports) == 20
        assert (await one.stats(service)).ready == 20
        assert await one.dead_letters(service).count() == 0


async def test_who_claims_too_late_leaves_no_claim_behind(place: Place) -> None:
    """Nobody would ever take it back: the letters are moved by the one who was first, under his own key."""
    service = place.service()
    async with place.bus() as one, place.bus() as two:
        await _park(one, service, 2)
        assert isinstance(one.adapter, KafkaAdapter)
        assert isinstance(two.adapter, KafkaAdapter)
        first = one.adapter.letters(one.adapter.names(service.name, service.prefix))
        late = two.adapter.letters(two.adapter.names(service.name, service.prefix))
        assert (await first.claim({0: [0, 1]})).letters == {0: {0, 1}}
        assert (await late.claim({0: [0, 1]})).letters == {0: set()}
        rows = await place.read(f"{place.prefix}.dlq-state.{service.name}")
        last = {row.key: row.value and json.loads(row.value)["state"] for row in rows}  # type: ignore[attr-defined]
        assert list(last.values()) == ["moving", None]


async def test_erasing_takes_letters_out_of_the_log_and_keeps_the_others(place: Place) -> None:
    """What was purged is in no record any more; what stands before it is written again, with its story."""
    service = place.service()
    async with place.bus() as bus:
        await _park(bus, service, 5)
        letters = bus.dead_letters(service)
        await letters.purge(["e1", "e3"])
        parking = _parking(bus, service)
        assert await parking.erase() == 2
        assert sorted([letter.id async for letter in letters.all()]) == ["e0", "e2", "e4"]
        assert await letters.count() == 3
        begins = await bus.adapter.client.begins([(f"{place.prefix}.dlq.{service.name}", 0)])  # type: ignore[attr-defined]
        assert list(begins.values()) == [4]
        kept = [letter async for letter in letters.all()]
        assert {letter.reason for letter in kept} == {"max-retries"}
        assert await parking.erase() == 0
        assert (await letters.redrive()).done == 3


async def test_a_count_knows_the_offsets_that_no_letter_has(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markers, aborted and open transactions, a head that retention took; of more than is read at a time it says so."""
    service = place.service()
    dlq = f"{place.prefix}.dlq.{service.name}"
    async with place.bus() as bus:
        await _park(bus, service, 4)
        parking = _parking(bus, service)
        producer = AIOKafkaProducer(bootstrap_servers=place.address, transactional_id=place.prefix, acks="all")
        await producer.start()
        try:
            for end in (producer.commit_transaction, producer.abort_transaction):
                await producer.begin_transaction()
                for _ in range(3):
                    await producer.send_and_wait(dlq, b"{}")
                await end()
            await producer.begin_transaction()
            await producer.send_and_wait(dlq, b"{}")
            assert len((await parking.browse(None, 100)).letters) == 7
            assert await parking.depth() == 12
            monkeypatch.setattr(kafka_parking, "MOST_COUNTED", 0)
            monkeypatch.setattr(_client, "TAKEN_TOGETHER", 2)
            assert await parking.count() == (12, False)
            monkeypatch.undo()
            assert await parking.count() == (7, True)
            assert await parking.depth() == 7
            await producer.commit_transaction()

            async def seen() -> bool:  # the marker is written a moment after the answer
                return await parking.count() == (8, True)

            await eventually(seen, "the letter of the last transaction counts")
        finally:
            await producer.stop()
        await bus.dead_letters(service).purge(["e0", "e3"])
        assert await parking.count() == (6, True)
        await bus.adapter.client.truncate({(dlq, 0): 6})  # type: ignore[attr-defined]
        letters = (await parking.browse(None, 100)).letters
        assert await parking.count() == (len(letters), True) == (2, True)
        async with place.bus() as other:
            assert await _parking(other, service).count() == (2, True)


async def test_an_embedded_letter_reads_as_it_was_sent(place: Place) -> None:
    """Seed 3's `dlq_metadata` stands in the body on the topic; our readers and a re-drive see the body of before."""
    service = place.service()
    seen: list[bytes] = []
    async with place.bus(dlq_format="embedded") as bus:
        await _park(bus, service, 1)
        (record,) = await place.read(f"{place.prefix}.dlq.{service.name}")
        metadata = json.loads(record.value)["dlq_metadata"]  # type: ignore[attr-defined]
        assert (metadata["original_error"], metadata["retry_count"]) == ("500", 0)
        assert metadata["dlq_published_at"] > 1_600_000_000_000
        (letter,) = (await bus.dead_letters(service).browse()).letters
        assert letter.body == b'{"n":0}'

        @service.on("#")
        async def handle(data: bytes) -> None:
            seen.append(data)

        assert (await bus.dead_letters(service).redrive()).done == 1
        async with running(bus, service):
            await eventually(lambda: seen, "it came back")
    assert seen == [b'{"n":0}']


async def test_a_reader_takes_no_more_letters_than_it_has_room_for(place: Place) -> None:
    """Also one that has no partition but full ones: the rest stays as it was fetched until there is room."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        letters = [Parked("", Event("a", n), {headers.PARK_REASON: "permanent"}) for n in range(2000)]
        assert set(await _parking(bus, service).restore(letters)) == {"done"}
        async with bus.adapter.consume(service.subscription(dead_letters=True)) as consumer:
            assert isinstance(consumer, LogConsumer)
            await eventually(lambda: any(lane.full for lane in consumer.lanes.values()), "it is full")
            polls = 0

            async def poll() -> bool:
                nonlocal polls
                came = await polling()
                polls += 1
                return came

            polling, consumer._poll = consumer._poll, poll  # type: ignore[method-assign]
            await eventually(lambda: polls > 10, "it has looked for more")
            [lane] = consumer.lanes.values()
            assert ENOUGH <= lane.in_hand < 2000, "the rest is with the broker, or as it came"
            assert not lane.buffer, "nobody has asked for a letter, so none was read"


async def test_a_reader_takes_what_was_erased_for_no_loss(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """It was purged before, and whoever is told that messages expired at night looks for a fault."""
    service = place.service()
    async with place.bus() as bus:
        await _park(bus, service, 6)
        assert (await bus.dead_letters(service).purge(["e0", "e1", "e2"], erase=True)).erased == 3
        async with bus.adapter.consume(service.subscription(dead_letters=True)) as consumer:
            got: list[Delivery] = []
            while len(got) < 3:
                got += await consumer.receive(3, 5.0)
            assert isinstance(consumer, LogConsumer)
            await eventually(lambda: not consumer._skipped, "it has looked at what did not come")
    assert sorted(delivery.event.id for delivery in got) == ["e3", "e4", "e5"]
    assert "messages_expired" not in [getattr(record, "event", "") for record in caplog.records]


async def test_who_has_no_room_for_more_stays_in_the_group(place: Place) -> None:
    """Nothing is asked for while all partitions are full, but who does not poll at all is put out, and stays out."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        letters = [Parked("", Event("a", n), {headers.PARK_REASON: "permanent"}) for n in range(600)]
        assert set(await _parking(bus, service).restore(letters)) == {"done"}
        async with bus.adapter.consume(service.subscription(dead_letters=True)) as consumer:
            assert isinstance(consumer, LogConsumer)
            await eventually(lambda: any(lane.paused for lane in consumer.lanes.values()), "it rests")
            assert consumer._member is not None
            coordinator = consumer._member._consumer._coordinator
            generation, beats = coordinator.generation, 0
            coordinator._max_poll_interval = 0.3

            async def heartbeat(send: Callable[[], Awaitable[bool]] = coordinator._do_heartbeat) -> bool:
                nonlocal beats
                beats += 1  # who does not poll is put out before the next one
                return await send()

            coordinator._do_heartbeat = heartbeat
            await eventually(lambda: beats > 3, "it was heard of, again and again")
            assert coordinator.generation == generation
            got: list[Delivery] = []
            while len(got) < 600:
                some = await consumer.receive(600, 5.0)
                await consumer.settle([(delivery, ACK) for delivery in some])
                got += some


async def test_readers_of_dead_letters_have_a_group_of_their_own(place: Place) -> None:
    """What they acknowledge is gone; what they refuse stays; what was purged they never see."""
    service = place.service()
    seen: list[str] = []

    @service.dead_letters(batch=10)
    async def keep(letters: list[DeadLetter]) -> None:
        seen.extend(letter.id for letter in letters)

    @service.on("#")
    async def handle(event: Event) -> None:
        return None

    async with place.bus() as bus:
        await _park(bus, service, 6)
        await bus.dead_letters(service).purge(["e0"])
        async with running(bus, service):
            await eventually(lambda: len(seen) == 5, "all that stood were read")

            async def none_left() -> bool:
                return await bus.dead_letters(service).count() == 0

            await eventually(none_left, "they are gone")
            await drained(bus, service)
        assert isinstance(bus.adapter, KafkaAdapter)
        committed = await bus.adapter.client.committed(f"{place.prefix}.{service.name}-dlq")
        assert committed[f"{place.prefix}.dlq.{service.name}", 0][0] == 6
        async with running(bus, service):
            await drained(bus, service)
    assert sorted(seen) == ["e1", "e2", "e3", "e4", "e5"]
