"""Members of a Kafka group: partitions come and go, and what is committed and noted meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from eventbus import (
    BrokerError,
    Delivery,
    Event,
    RetryPolicy,
    headers,
)
from eventbus.errors import BrokerUnavailable
from eventbus.settlement import ACK, Release, Settlement
from eventbus.testing.contract.harness import drained, eventually, running
from eventbus_kafka import KafkaAdapter
from eventbus_kafka._client import TP, Fenced, GroupConsumer, Moving
from eventbus_kafka._errors import Refused
from eventbus_kafka.log import LogConsumer
from eventbus_kafka.names import Topic
from tests.adapter.test_kafka_log import Place, place, receive

__all__ = ["place"]
RELEASE_UNNOTED = Release({headers.CRASHES: None})


class Told(Moving):
    """A member of a group, which knows when it has so many partitions."""

    def __init__(self, partitions: int = 1) -> None:
        self._wanted = partitions
        self.entered = asyncio.Event()

    async def assigned(self, partitions: Sequence[TP]) -> None:
        if len(partitions) >= self._wanted:  # a group that does not know a new topic yet meets twice
            self.entered.set()


async def test_partitions_that_go_while_they_are_taken_over_are_no_surprise(place: Place) -> None:
    """The client asserts that something is assigned; that ended the fetching for good."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        assert isinstance(bus.adapter, KafkaAdapter)
        member = bus.adapter.client.consumer(f"{place.prefix}.{service.name}", Moving())
        await member.start([f"{place.prefix}.main"])
        try:
            with pytest.raises(Fenced, match="no partitions at the moment"):
                member.begin({(f"{place.prefix}.main", 0): 0})
        finally:
            await member.stop()


async def test_a_partition_may_be_paused_while_none_is_assigned(place: Place) -> None:
    """Topics that come move all partitions; a full lane at that moment ended the membership."""
    service = place.service()
    tp, moving = (f"{place.prefix}.main", 0), Told()
    async with place.bus() as bus:
        await bus.provision(service)
        assert isinstance(bus.adapter, KafkaAdapter)
        member = bus.adapter.client.consumer(f"{place.prefix}.{service.name}", moving)
        await member.start([tp[0]])
        try:
            await eventually(moving.entered.is_set, "it is a member")
            member.subscribe([tp[0], f"{place.prefix}.retry.{service.name}.0"])
            member.pause(tp)
            member.resume(tp)
        finally:
            await member.stop()


async def test_who_was_put_out_commits_nothing(place: Place) -> None:
    """A group without members accepts commits without a name: others may have gone on from there, and be over too."""
    service = place.service()
    tp, said = (f"{place.prefix}.main", 0), list[str]()

    class Clinging(Told):
        async def revoked(self) -> None:
            try:
                said.append(f"without {await member.commit({tp: (1, 'stale')})}")
            except Fenced:
                said.append("fenced")

    async with place.bus() as bus:
        await bus.provision(service)
        await bus.publish_many([Event("a", n) for n in range(5)])
        assert isinstance(bus.adapter, KafkaAdapter)
        client, group = bus.adapter.client, f"{place.prefix}.{service.name}"
        moving = Clinging()
        member = client.consumer(group, moving)
        await member.start([tp[0]])
        try:
            await eventually(moving.entered.is_set, "it is a member")
            assert await member.commit({tp: (3, "ours")}) == set()
            said.clear()
            moving.entered.clear()
            coordinator = member._consumer._coordinator
            # As for one who was not heard of for so long; aiokafka's own code joins again, with the same group.
            await coordinator._maybe_leave_group()
            await eventually(moving.entered.is_set, "it is a member again")
            assert said == ["fenced"]
            assert await client.committed(group, [tp]) == {tp: (3, "ours")}
            assert await member.commit({tp: (4, "ours")}) == set()
        finally:
            await member.stop()


async def test_the_last_word_of_a_membership_that_is_over_does_not_stop_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit is answered late: another took its place meanwhile, and has the partitions."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        async with bus.adapter.consume(service.subscription()) as consumer:
            assert isinstance(consumer, LogConsumer)
            await bus.publish("a")
            (delivery,) = await receive(consumer)
            old = consumer._member
            assert old is not None
            poll, tried = old.poll, asyncio.Event()

            def taken_over() -> bool:
                return consumer._member not in (old, None) and not consumer._moving

            async def late(offsets: Mapping[TP, tuple[int, str]]) -> set[TP]:
                tried.set()
                await eventually(taken_over, "another membership has the partitions")
                raise Fenced("the group has moved on")

            async def refused(*arguments: Any) -> Any:
                if tried.is_set():
                    raise Refused("no right to read")
                return await poll(*arguments)

            monkeypatch.setattr(old, "commit", late)
            monkeypatch.setattr(old, "poll", refused)
            await consumer.settle([(delivery, ACK)])
            await eventually(tried.is_set, "it commits")
            await eventually(taken_over, "another membership has the partitions", within=20)
            await bus.publish_many([Event("b", n) for n in range(20)])
            more: set[object] = set()

            async def all_came() -> bool:
                with contextlib.suppress(BrokerError):
                    some = await consumer.receive(50, 0.1)
                    await consumer.settle([(delivery, ACK) for delivery in some])
                    more.update(delivery.event.data for delivery in some if delivery.event.type == "b")
                return len(more) == 20

            await eventually(all_came, "it gets all that comes", within=20)


async def test_a_topic_that_is_gone_holds_up_no_commit(place: Place) -> None:
    """The client would repeat the commit of all others until there is a topic of that name again."""
    service = place.service()
    main, gone = (f"{place.prefix}.main", 0), (f"{place.prefix}.retry.{service.name}.7000", 0)

    class Still(Told):
        async def assigned(self, partitions: Sequence[TP]) -> None:
            member.hold(partitions)  # who fetches hears at once what is gone, and the group moves
            await super().assigned(partitions)

    async with place.bus() as bus:
        await bus.provision(service)
        assert isinstance(bus.adapter, KafkaAdapter)
        client, group = bus.adapter.client, f"{place.prefix}.{service.name}"
        await client.create([Topic(gone[0], 1, {})], 1, 1)
        moving = Still(partitions=2)
        member = client.consumer(group, moving)
        await member.start([main[0], gone[0]])
        try:
            await eventually(moving.entered.is_set, "it is a member")
            offsets = {main: (0, "here"), gone: (0, "there")}
            assert await member.commit(offsets) == set()
            await client.delete([gone[0]])
            assert await member.commit(offsets | {main: (0, "still here")}) == {gone}
            assert await client.committed(group, [main]) == {main: (0, "still here")}
        finally:
            await member.stop()


async def test_nothing_can_be_noted_of_a_message_whose_topic_is_gone(place: Place) -> None:
    """Whoever calls a handler on the strength of a note must know that it does not stand."""
    service = place.service()
    async with place.bus() as bus, place.bus() as operator:
        await bus.provision(service)
        await bus.publish("a")
        async with bus.adapter.consume(service.subscription()) as consumer:
            (delivery,) = await receive(consumer)
            assert isinstance(operator.adapter, KafkaAdapter)
            await operator.adapter.client.delete([f"{place.prefix}.main"])
            with pytest.raises(BrokerUnavailable):
                await consumer.note(delivery, {"x-crashes": 1})


async def test_attempts_of_in_place_retries_survive_in_the_commit(place: Place) -> None:
    """Seed 3's blocking retry: a consumer that vanishes between two attempts costs none of them."""
    service = place.service(retry=RetryPolicy(max_retries=5, delay=0.05, mode="in-place"))
    sub = service.subscription()
    calls: list[int] = []

    @service.on("#")
    async def handle(event: Event, delivery: Delivery) -> int | None:
        calls.append(delivery.attempt)
        return 500 if delivery.attempt < 5 else None

    async with place.bus() as bus:
        await bus.provision(service)
        await bus.publish("a")
        async with bus.adapter.consume(sub) as consumer:
            (delivery,) = await receive(consumer)
            assert await consumer.note(delivery, {"x-retries": 2})
            group = f"{place.prefix}.{service.name}"
            assert isinstance(bus.adapter, KafkaAdapter)
            committed = await bus.adapter.client.committed(group)
            at, metadata = committed[f"{place.prefix}.main", 0]
            assert at == 0
            assert '"x-retries":2' in metadata
        async with running(bus, service):
            await eventually(lambda: calls and calls[-1] == 5, "it went on")
            await drained(bus, service)
    assert calls == [3, 4, 5]


async def test_more_notes_than_a_commit_has_room_for_do_not_stop_the_commits(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds fail while a commit is under way: some are told that there is no room, and the next commit goes."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        await bus.publish_many([Event("a", n) for n in range(300)])
        async with bus.adapter.consume(service.subscription()) as consumer:
            assert isinstance(consumer, LogConsumer)
            held: list[Delivery] = []
            while len(held) < 300:
                held += await consumer.receive(300, 1.0)
            slow, go_on = consumer._member.commit, asyncio.Event()  # type: ignore[union-attr]

            async def stalled(offsets: Mapping[TP, tuple[int, str]]) -> set[TP]:
                await go_on.wait()
                return await slow(offsets)

            monkeypatch.setattr(consumer._member, "commit", stalled)
            notes = [asyncio.create_task(consumer.note(held[0], {"x-retries": 1}))]
            await eventually(consumer._committing.locked, "a commit is under way")
            await consumer.settle([(held.pop(), ACK)])
            await eventually(lambda: bool(consumer._committing._waiters), "the next commit waits for its turn")  # type: ignore[attr-defined]
            told = {"x-retries": 1, "x-due-at": 1794995337127}
            notes += [asyncio.create_task(consumer.note(delivery, told)) for delivery in held]
            await asyncio.sleep(0)
            go_on.set()
            answers = await asyncio.gather(*notes, return_exceptions=True)
            assert {type(answer) for answer in answers} == {bool, BrokerError}
            await consumer.settle([(delivery, ACK) for delivery in held])

            async def committed() -> bool:
                assert isinstance(bus.adapter, KafkaAdapter)
                found = await bus.adapter.client.committed(f"{place.prefix}.{service.name}")
                return found[f"{place.prefix}.main", 0][0] == 300

            await eventually(committed, "all are committed")


async def test_a_note_while_the_group_moves_does_not_make_it_move_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit behind the request to join would be judged by the next generation, and end the membership."""
    service = place.service()
    sub = service.subscription()
    moves: list[str] = []
    async with place.bus(partitions=2, drain="0.1s") as hasty, place.bus(partitions=2) as patient:
        await hasty.provision(service)
        await hasty.publish_many([Event("a", n, key=f"k{n}") for n in range(20)])
        async with patient.adapter.consume(sub) as slow, hasty.adapter.consume(sub) as quick:
            assert isinstance(quick, LogConsumer)

            def settled() -> bool:
                return not quick._moving and sum(topic == f"{place.prefix}.main" for topic, _ in quick.lanes) == 1

            await eventually(settled, "each has a partition")
            (kept,), (running_on,) = await receive(slow), await receive(quick)
            revoked = quick.revoked

            async def counted() -> None:
                await revoked()
                moves.append("revoked")

            monkeypatch.setattr(quick, "revoked", counted)
            async with hasty.adapter.consume(sub):
                await eventually(lambda: moves, "one joins again, and waits for the other")
                noting = asyncio.create_task(quick.note(running_on, {"x-retries": 1}))
                await asyncio.sleep(0)
                await slow.settle([(kept, ACK)])
                with pytest.raises(BrokerUnavailable):
                    await noting
                await eventually(lambda: not quick._moving, "the group has settled down")
                assert moves == ["revoked"]


@pytest.mark.parametrize("settlement", [ACK, RELEASE_UNNOTED], ids=["done", "handed back"])
async def test_a_crash_note_is_gone_before_the_next_suspect_is_tried(place: Place, settlement: Settlement) -> None:
    """Of whichever service: the next one may kill the process, and nobody else is to be blamed for it."""
    one, two = place.service("one"), place.service("two")
    async with place.bus(commit_interval="60s") as bus:
        await bus.provision(one, two)
        await bus.publish("a")
        async with (
            bus.adapter.consume(one.subscription()) as first,
            bus.adapter.consume(two.subscription()) as second,
        ):
            (delivery,) = await receive(first)
            (suspect,) = await receive(second)
            assert isinstance(first, LogConsumer)
            first._tasks[1].cancel()  # no regular commit comes between
            assert await first.note(delivery, {"x-crashes": 1})
            assert await first.settle([(delivery, settlement)]) == ["done"]
            assert await second.note(suspect, {"x-crashes": 1})
            assert isinstance(bus.adapter, KafkaAdapter)
            committed = await bus.adapter.client.committed(f"{place.prefix}.{one.name}")
            at, metadata = committed[f"{place.prefix}.main", 0]
    assert at == (1 if settlement is ACK else 0)
    assert "x-crashes" not in metadata


async def test_an_error_nobody_thought_of_does_not_end_the_fetching(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, said to the worker, and a new member takes the place of the one that failed."""
    service = place.service()
    seen: list[str] = []

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.type)

    poll, broken = GroupConsumer.poll, [RuntimeError("out of the blue")]

    async def breaking(self: GroupConsumer, *arguments: object) -> object:
        if broken and seen:
            raise broken.pop()
        return await poll(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(GroupConsumer, "poll", breaking)
    async with place.bus() as bus, running(bus, service):
        await bus.publish("before")
        await eventually(lambda: not broken, "it broke")
        await bus.publish("after")
        await eventually(lambda: seen == ["before", "after"], "it goes on", within=20)
    assert "fetch_failed" in [getattr(record, "event", "") for record in caplog.records]


async def test_a_consumer_whose_coroutine_ends_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours must not look like an empty queue."""
    service = place.service()
    async with place.bus() as bus:
        await bus.provision(service)
        async with bus.adapter.consume(service.subscription()) as consumer:
            await bus.publish("a")
            (delivery,) = await receive(consumer)
            with monkeypatch.context() as broken:
                broken.setattr(consumer, "_commit", lambda *_: 1 / 0)
                await consumer.settle([(delivery, ACK)])
                with pytest.raises(ZeroDivisionError):
                    await consumer.receive(1, 10.0)
