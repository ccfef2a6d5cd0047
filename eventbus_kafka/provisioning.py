"""Subscribing: topics are made, and where a group begins is committed once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from eventbus import telemetry
from eventbus.adapter import PARKING_MARGIN, Drift, ProvisionMode, Subscription
from eventbus_kafka.names import Names, Topic, topics_of

if TYPE_CHECKING:
    from eventbus_kafka.adapter import KafkaAdapter

FEWEST_COPIES: Final = 3


class Provisioner:
    """Makes what is missing, and says what differs from what the promise rests on."""

    def __init__(self, adapter: KafkaAdapter) -> None:
        self._names = adapter.names
        self._client = adapter.client
        self._options = adapter.options
        self._copies: tuple[int, int] | None = None

    async def provision(self, subscriptions: Sequence[Subscription], mode: ProvisionMode) -> list[Drift]:
        """Make topics and first commits (`create`), or only compare (`verify`)."""
        drifts: list[Drift] = []
        for sub in subscriptions if mode != "off" else ():
            names = self._names(sub.service, sub.prefix)
            wanted = topics_of(names, sub.delays, self._options)
            there = await self._client.describe(topic.name for topic in wanted)
            self._client.permitted(*(topic.name for topic in wanted))
            if mode == "create" and any(topic.name not in there for topic in wanted):
                await self._make(names, wanted, there)
            elif mode == "create":
                await self._check_commits(names)
            else:
                drifts += [Drift(t.name, "topic", "missing", "present") for t in wanted if t.name not in there]
                if not drifts and not await self._begun(names):
                    drifts.append(Drift(names.group, "committed offsets", "none", "where the subscription began"))
            drifts += await self._differences(names, [topic for topic in wanted if topic.name in there])
        return drifts

    async def _make(self, names: Names, wanted: Sequence[Topic], there: object) -> None:
        missing = [topic for topic in wanted if topic.name not in there]  # type: ignore[operator]
        if any(topic.name == names.redriven for topic in missing):
            main = [topic for topic in missing if topic.name == names.main]
            await self.create(main)
            await self._begin(names)
            missing = [topic for topic in missing if topic.name != names.main]
        # The last of them is the sign that the service is subscribed: it comes after its group has a beginning.
        await self.create(missing[:-1])
        await self.create(missing[-1:])

    async def create(self, topics: Sequence[Topic]) -> None:
        """Make topics with the copies that the cluster can hold."""
        if topics:
            copies, in_sync = await self._replication()
            await self._client.create(topics, copies, in_sync)

    async def _begin(self, names: Names) -> None:
        """Commit the ends of the shared topic: the service gets what comes from now on.

        The ends are read before the commits are: when two replicas do this at the same time, the later commit says an
        end from before the first one returned, and nothing that was accepted since is skipped.
        """
        number = await self._client.partitions(names.main)
        ends = await self._client.ends([(names.main, partition) for partition in range(number)])
        if not await self._begun(names):
            await self._client.commit_first(names.group, ends)

    async def _begun(self, names: Names) -> bool:
        return any(tp[0] == names.main for tp in await self._client.committed(names.group))

    async def _check_commits(self, names: Names) -> None:
        """Kafka forgets the commits of a group without members after a week (offsets.retention.minutes)."""
        if not await self._begun(names):
            fields = {"service": names.service, "group": names.group, "topic": names.main}
            fix = "it reads the topic from its start; raise offsets.retention.minutes on the brokers"
            telemetry.log(logging.ERROR, "commits_expired", fields | {"fix": fix})

    async def _replication(self) -> tuple[int, int]:
        if self._copies is None:
            copies = self._options.replication or min(FEWEST_COPIES, await self._client.brokers())
            if copies < FEWEST_COPIES:
                problem = f"topics have {copies} of {FEWEST_COPIES} copies: the loss of a broker loses messages"
                fields = {"broker": "kafka", "address": self._client.where, "problem": problem}
                telemetry.log(logging.WARNING, "precondition", fields | {"fix": "replication = 3 on three brokers"})
            self._copies = copies, 2 if copies >= FEWEST_COPIES else 1
        return self._copies

    async def _differences(self, names: Names, topics: Sequence[Topic]) -> list[Drift]:
        """What would lose messages: letters compacted away, a state that is not, copies that do not fit."""
        found = await self._client.configs([topic.name for topic in topics])
        room = int(found.get(names.main, {}).get("max.message.bytes", 0))
        drifts = []
        if 0 < room < self._options.max_event_bytes:
            drifts.append(Drift(names.main, "max.message.bytes", str(room), f"{self._options.max_event_bytes} or more"))
        for topic in topics:
            config = found[topic.name]
            policy = config.get("cleanup.policy", "delete")
            if topic.name == names.state and policy != "compact":
                drifts.append(Drift(topic.name, "cleanup.policy", policy, "compact"))
            elif topic.name not in (names.state, names.main):
                if "compact" in policy:
                    drifts.append(Drift(topic.name, "cleanup.policy", policy, "delete"))
                largest = int(config.get("max.message.bytes", 0))
                if room and largest < room + PARKING_MARGIN:
                    wanted = (
                        f"at least {room + PARKING_MARGIN}, or a message of {names.main} may not fit with its story"
                    )
                    drifts.append(Drift(topic.name, "max.message.bytes", str(largest), wanted))
        return drifts
