"""The only place that talks to aiokafka. Every call has a deadline, and every error leaves as one of ours.

Found by trying (aiokafka 0.14, Kafka 4.1): calls that ask for offsets wait behind a consumer's own long poll, so they
go through a consumer that fetches nothing; `commit` and `stop` retry without end while the broker is down, so they are
abandoned at their deadline; a batch that expired leaves a hole in the idempotent producer's sequence, so the producer
is made anew after a failure; asking for topics makes those that are missing, so clients are made to ask otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, Final, TypeAlias, TypeVar

import aiokafka.client
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka import errors as kafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.partitioner import murmur2
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.types import Array, Int16, Int32, Schema, String

from eventbus.errors import BrokerError, BrokerUnavailable
from eventbus_kafka import _logs
from eventbus_kafka._errors import Fenced, OutOfOrder, Refused, TooLarge, hung_up, translate, translated
from eventbus_kafka._unread import LARGEST_PIECE, Unread, fetch_pieces, leave_unread, piece_of_each
from eventbus_kafka.names import Topic
from eventbus_kafka.options import Options
from eventbus_kafka.records import TP, Outgoing, Record

Answer: TypeAlias = BrokerError | int
"""What became of a record that was to be written: the offset it has (below 0: not known), or why it may have none."""
Shelf: TypeAlias = list[tuple[Any, list[int]]]
"""Batches for one partition, each with the places of its records among all that are written."""
Rest: TypeAlias = dict[TP, tuple[int, Unread]]
"""What was fetched of partitions and not looked at: the offset where it goes on, and the bytes."""
T = TypeVar("T")

BATCH_BYTES: Final = 256 * 1024
FEWEST_TOGETHER: Final = 64
"""Records without a key that go to one partition before the next has its turn."""
LONG_POLL: Final = 100
"""Milliseconds that a fetch waits at the broker: what is resumed or assigned meanwhile waits as long."""
TAKEN_TOGETHER: Final = 100
"""Records that are looked at together."""
METADATA_AGE: Final = 10_000
"""Milliseconds until new partitions and leaders are noticed without an error."""
LEADERLESS: Final = 3.0
"""Seconds that a group may be without a coordinator: it moves, or its broker is restarted."""
STOP_TIMEOUT: Final = 10.0
COMMIT_TIMEOUT: Final = 10.0
RETRY_COMMIT: Final = 0.1
_TOPIC_EXISTS: Final = 36
_DENIED: Final = kafka.TopicAuthorizationFailedError.errno
_logs.install()
_NOT_ASSIGNED: Final = (kafka.IllegalStateError, AssertionError)
"""How aiokafka says that a partition is not ours, and that nothing is assigned at the moment."""
_HAS_MEMBERS: Final = (kafka.UnknownMemberIdError, kafka.IllegalGenerationError, kafka.RebalanceInProgressError)


class Client:
    """The connections of one bus to one cluster."""

    def __init__(self, options: Options, given: Mapping[str, object] | None = None) -> None:
        """`given`: parameters of aiokafka's clients in place of those the options say."""
        self.options = options
        self.where = options.where if given is None else str(given.get("bootstrap_servers", "the given cluster"))
        self._given = given
        self._admin: Any = None
        self._reader: Any = None
        self._reading = asyncio.Lock()
        self._producer = Producer(self)
        self._partitions: dict[str, int] = {}
        self._denied: set[str] = set()
        self._asked = -1e9

    async def open(self) -> None:
        """Connect, and see that somebody answers."""
        if self._admin is not None:
            return
        admin = AIOKafkaAdminClient(**self.parameters())
        _ask_modestly(admin._client)
        reader = AIOKafkaConsumer(
            enable_auto_commit=False,
            auto_offset_reset="earliest",  # where retention was faster than we, the rest is still to be read
            fetch_max_wait_ms=20,
            max_partition_fetch_bytes=LARGEST_PIECE,
            retry_backoff_ms=10,  # the first question about a topic costs one: its leader is not known yet
            isolation_level="read_committed",
            **self.parameters(),
        )
        _ask_modestly(reader._client)
        try:
            await self.start(admin)
            await self.start(reader)
            leave_unread(reader)
        except BaseException:
            await _quietly(admin.close())
            await _quietly(reader.stop())
            raise
        self._admin, self._reader = admin, reader

    async def start(self, client: Any) -> None:
        """Connect a client of aiokafka. Why that failed it tells only its log, so we try ourselves and see."""
        try:
            await self.call(client.start(), self.options.connect_timeout)
        except BrokerUnavailable as error:
            if isinstance(error.__cause__, kafka.KafkaConnectionError):
                await self._reach()
            raise

    async def _reach(self) -> None:
        """Ask the brokers to begin with, one after the other; raises what the first that is not just gone says."""
        parameters = self.parameters()
        hosts = collect_hosts(parameters.get("bootstrap_servers", "localhost"))
        known = inspect.signature(create_conn).parameters
        said: list[BrokerError] = []
        for host, port, _ in hosts:
            where = f"{host}:{port}"
            connection = None
            try:
                with translated(where):
                    async with asyncio.timeout(self.options.connect_timeout):
                        connection = await create_conn(
                            host, port, **{name: value for name, value in parameters.items() if name in known}
                        )
                        await connection.send(MetadataRequest([]))
                return
            except BrokerError as error:
                closed = isinstance(error.__cause__, (kafka.KafkaConnectionError, ConnectionResetError))
                said.append(hung_up(where) if closed else error)
            finally:
                if connection is not None:
                    connection.close()
        raise next((error for error in said if not isinstance(error.__cause__, ConnectionError)), said[0])

    async def aclose(self) -> None:
        """Disconnect; a broker that is gone does not keep us."""
        await self._producer.aclose()
        admin, reader = self._admin, self._reader
        self._admin = self._reader = None
        self._partitions.clear()
        if admin is not None:
            await _quietly(reader.stop())
            await _quietly(admin.close())

    def parameters(self) -> dict[str, Any]:
        """What every client of aiokafka is made with."""
        options = self.options
        common: dict[str, Any] = {
            "client_id": options.client_id,
            "request_timeout_ms": round(options.timeout * 1000),
            "metadata_max_age_ms": METADATA_AGE,
        }
        if self._given is not None:
            return common | dict(self._given)
        common["bootstrap_servers"] = options.servers
        secured = "SASL_" if options.username is not None else ""
        common["security_protocol"] = secured + ("SSL" if options.tls else ("PLAINTEXT"))
        common["ssl_context"] = options.context()
        if options.username is not None:
            common |= {
                "sasl_mechanism": options.sasl_mechanism,
                "sasl_plain_username": options.username,
                "sasl_plain_password": options.password,
            }
        return common

    async def call(self, work: Awaitable[T], timeout: float | None = None) -> T:
        """Wait for a call of the driver, up to its deadline."""
        with translated(self.where):
            async with asyncio.timeout(timeout or self.options.timeout):
                return await work

    # --- topics ----------------------------------------------------------------------------------------------

    async def topics(self, *, age: float = 0.0) -> Mapping[str, int]:
        """All topics, and how many partitions each has, as of at most `age` seconds ago. Costly on a large cluster."""
        now = asyncio.get_running_loop().time()
        if now - self._asked >= age:
            self._partitions = await self._describe(None)
            self._asked = now
        return self._partitions

    async def describe(self, topics: Iterable[str]) -> dict[str, int]:
        """Those of the topics that are there, and how many partitions each has. Asking makes none of them."""
        asked = list(dict.fromkeys(topics))
        found = await self._describe(asked)
        for topic in asked:
            self._partitions.pop(topic, None)
        self._partitions |= found
        return found

    async def _describe(self, topics: list[str] | None) -> dict[str, int]:
        answer = await self._patiently(lambda: self._open._send_request(MetadataRequest(topics, False)))
        self._denied.difference_update(topics or ())
        self._denied.update(topic for code, topic, *_ in answer.topics if code == _DENIED)
        return {topic: len(partitions) for code, topic, _, partitions in answer.topics if not code and partitions}

    @property
    def known(self) -> Mapping[str, int]:
        """The topics as of the last time somebody asked for them."""
        return self._partitions

    async def partitions(self, topic: str, *, known: bool = True) -> int:
        """How many partitions a topic has, 0 where there is none; what is `known` will do, if there is anything."""
        found = (known and self._partitions.get(topic)) or (await self.describe([topic])).get(topic, 0)
        if not found:
            self.permitted(topic)
            found = await self._ask_all(topic)
        return found

    async def _ask_all(self, topic: str) -> int:
        """How many partitions a topic has, if any node knows it; one that stood still has not heard of it yet.

        Who believed the first answer told publishers that nobody was subscribed, and the event was gone.
        """
        request = MetadataRequest([topic], False)

        async def ask(node: int) -> int:
            answer = await self._open._send_request_to_node(node, request)
            ((code, _, _, partitions),) = answer.topics
            if kafka.for_code(code) is not kafka.UnknownTopicOrPartitionError:
                _no_error(code, f"topic {topic}")
            return len(partitions)

        nodes = [node.nodeId for node in self._open._client.cluster.brokers()]
        found = max(
            await asyncio.gather(*[self.call(ask(node), self.options.connect_timeout) for node in nodes]), default=0
        )
        if found:
            self._partitions[topic] = found
        return found

    def permitted(self, *topics: str) -> None:
        """Raise Refused for topics that we were not told of because we may not know them, there or not."""
        denied = self._denied.intersection(topics)
        if denied:
            error = kafka.TopicAuthorizationFailedError(f"no right to describe {', '.join(sorted(denied))}")
            raise translate(error, self.where)

    async def brokers(self) -> int:
        """How many brokers the cluster has."""
        return len((await self.call(self._open.describe_cluster()))["brokers"])

    async def create(self, topics: Sequence[Topic], replication: int, min_insync: int) -> None:
        """Make topics; one that exists is left as it is."""
        if not topics:
            return
        extra = {"min.insync.replicas": str(min_insync)}
        wanted = [
            NewTopic(topic.name, topic.partitions, replication, topic_configs={**topic.config, **extra})
            for topic in topics
        ]
        answer = await self.call(self._open.create_topics(wanted, timeout_ms=round(self.options.timeout * 1000)))
        for name, code, *rest in answer.topic_errors:
            if code not in (0, _TOPIC_EXISTS):
                text = rest[0] if rest else ""
                error = kafka.for_code(code)
                raise translate(error(f"topic {name}: {text or error.__name__}"), self.where)
        names = [topic.name for topic in topics]
        await self._until(lambda found: len(found) == len(names), names, "were made, but nobody knows them")

    async def _until(self, true: Callable[[Mapping[str, int]], bool], names: Sequence[str], problem: str) -> None:
        """What is made or deleted is known to every broker a moment later."""
        deadline = asyncio.get_running_loop().time() + self.options.timeout
        while not true(await self.describe(names)):
            if asyncio.get_running_loop().time() > deadline:
                raise BrokerUnavailable(f"{self.where}: {', '.join(names)} {problem}")
            await asyncio.sleep(0.01)

    async def delete(self, topics: Sequence[str]) -> None:
        """Delete topics; one that is not there is no error."""
        if topics:
            await self.call(self._delete(list(topics)))
            await self._until(lambda found: not found, topics, "were deleted, but are still there")
            self._look._client.set_topics([])  # or it would go on asking for them

    async def _delete(self, topics: list[str]) -> None:
        for topic, code in (await self._open.delete_topics(topics)).topic_error_codes:
            if kafka.for_code(code) is not kafka.UnknownTopicOrPartitionError:
                _no_error(code, f"topic {topic} cannot be deleted")

    async def configs(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """The settings of topics."""
        if not topics:
            return {}
        resources = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
        found: dict[str, dict[str, str]] = {}
        for answer in await self.call(self._open.describe_configs(resources)):
            for code, text, _, name, entries in answer.resources:
                if code:
                    raise translate(kafka.for_code(code)(f"settings of {name}: {text}"), self.where)
                found[name] = {entry[0]: entry[1] for entry in entries}
        return found

    # --- groups ----------------------------------------------------------------------------------------------

    async def committed(self, group: str, partitions: Sequence[TP] | None = None) -> dict[TP, tuple[int, str]]:
        """What a group has committed: offset and metadata by partition; what it has not is left out.

        Not by aiokafka's own call, which overlooks the error of a coordinator that still loads, after a restart or a
        move: a group that has committed everything looked like one that had committed nothing.
        """
        if partitions is not None and not partitions:
            return {}
        topics: dict[str, list[int]] = defaultdict(list)
        for topic, partition in partitions or ():
            topics[topic].append(partition)
        request = OffsetFetchRequest(group, list(topics.items()) or None)

        async def ask() -> dict[TP, tuple[int, str]]:
            answer = await self._ask_coordinator(group, request)
            _no_error(answer.error_code, f"commits of group {group}")
            found: dict[TP, tuple[int, str]] = {}
            for topic, rows in answer.topics:
                for partition, offset, metadata, code in rows:
                    _no_error(code, f"commits of group {group} for {topic}")
                    if offset >= 0:
                        found[topic, partition] = offset, metadata
            return found

        return await self._patiently(ask)

    async def _ask_coordinator(self, group: str, request: Any) -> Any:
        return await self._open._send_request_to_node(await self._open.find_coordinator(group), request)

    async def commit_first(self, group: str, offsets: Mapping[TP, int]) -> bool:
        """Commit for a group without members; False where it has some, who commit for themselves."""
        topics: dict[str, list[tuple[int, int, str]]] = {}
        for (topic, partition), offset in offsets.items():
            topics.setdefault(topic, []).append((partition, offset, ""))
        request = OffsetCommitRequest(group, -1, "", -1, list(topics.items()))

        async def commit() -> bool:
            for _, rows in (await self._ask_coordinator(group, request)).topics:
                for _, code in rows:
                    if kafka.for_code(code) in _HAS_MEMBERS:
                        return False
                    _no_error(code, f"first commit of group {group}")  # a coordinator that still loads is asked again
            return True

        return await self._patiently(commit)

    async def delete_group(self, group: str) -> None:
        """Forget a group; one that is not there is no error, one with members is."""

        async def delete() -> None:
            for _, code in (await self._ask_coordinator(group, _DeleteGroups([group]))).results:
                if kafka.for_code(code) is not kafka.GroupIdNotFound:
                    _no_error(code, f"group {group} cannot be deleted")

        await self._patiently(delete)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask a coordinator that may only just be coming up."""
        deadline = asyncio.get_running_loop().time() + self.options.timeout
        while True:
            try:
                return await self.call(call())
            except BrokerUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.1)
                with contextlib.suppress(BrokerError):
                    await self.call(self._open._client.force_metadata_update())

    # --- looking into the log --------------------------------------------------------------------------------

    async def begins(self, partitions: Sequence[TP], *, within: float | None = None) -> dict[TP, int]:
        """The first offsets of partitions."""
        found = await self.call(self._look.beginning_offsets(self._introduced(partitions)), within)
        return {tuple(tp): offset for tp, offset in found.items()}

    async def ends(self, partitions: Sequence[TP]) -> dict[TP, int]:
        """The offsets that the next records of partitions will have."""
        found = await self.call(self._look.end_offsets(self._introduced(partitions)))
        return {tuple(tp): offset for tp, offset in found.items()}

    async def since(self, partitions: Sequence[TP], timestamp: int) -> dict[TP, int]:
        """The first offsets of partitions whose records are not older than a time (in ms), where there are any."""
        found = await self.call(self._look.offsets_for_times(dict.fromkeys(self._introduced(partitions), timestamp)))
        return {tuple(tp): at.offset for tp, at in found.items() if at is not None}

    def _introduced(self, partitions: Sequence[TP]) -> list[TopicPartition]:
        """Partitions that the reader will be asked about. It learns of each topic by failing, so we tell it of all."""
        for topic in {tp[0] for tp in partitions}:
            self._look._client.add_topic(topic)
        return [TopicPartition(*tp) for tp in partitions]

    async def read(
        self, starts: Mapping[TP, int], ends: Mapping[TP, int], *, keep: Callable[[Record], bool] = lambda record: True
    ) -> dict[TP, list[Record]]:
        """Records of partitions between two offsets."""
        found: dict[TP, list[Record]] = {tp: [] for tp in starts}

        def take(tp: TP, some: Sequence[Record]) -> bool:
            found[tp] += filter(keep, some)
            return False

        await self.scan(starts, ends, take)
        return found

    async def scan(
        self,
        starts: Mapping[TP, int],
        ends: Mapping[TP, int],
        take: Callable[[TP, Sequence[Record]], bool],
        rest: Rest | None = None,
    ) -> dict[TP, int]:
        """Show what partitions have between two offsets, a few records at a time, until `take` says that it is enough.

        Returns where each goes on, and leaves in `rest` what was fetched beyond, for who comes back with it. A few,
        because whoever makes of them what he needs at once finds all in the processor's cache, and because many
        objects alive at the same time are what the garbage collector is slow with.
        """
        goes_on, rest = dict(starts), {} if rest is None else rest

        def show(tp: TP, unread: Unread) -> bool:
            """Whether it was enough, or all up to the end."""
            while some := unread.read(TAKEN_TOGETHER):
                within = [record for record in some if record.offset < ends[tp]]
                enough = bool(within) and take(tp, within)
                goes_on[tp] = some[-1].offset + 1
                if enough and len(within) == len(some):
                    rest[tp] = goes_on[tp], unread
                if enough or len(within) < len(some):
                    return True
            goes_on[tp] = unread.end
            return bool(unread.end >= ends[tp])

        left = {tp for tp, start in starts.items() if start < ends[tp]}
        for tp in list(left):
            at, unread = rest.pop(tp, (-1, None))
            if unread is not None and at == starts[tp] and show(tp, unread):
                left.discard(tp)
        if left:
            await self._fetch(left, goes_on, ends, show)
        return {tp: min(at, ends[tp]) for tp, at in goes_on.items()}

    async def _fetch(
        self, left: set[TP], goes_on: dict[TP, int], ends: Mapping[TP, int], show: Callable[[TP, Unread], bool]
    ) -> None:
        async with self._reading:
            reader = self._look
            deadline = asyncio.get_running_loop().time() + self.options.timeout
            try:
                with translated(self.where):
                    reader.assign([TopicPartition(*tp) for tp in left])
                    for tp in left:
                        reader.seek(TopicPartition(*tp), goes_on[tp])
                    while left:
                        fetched = _unread(await reader.getmany(timeout_ms=100), self.where)
                        for tp in list(left):
                            if tp in fetched:
                                done = show(tp, fetched[tp])
                            else:  # it may have moved on over offsets that have no record
                                goes_on[tp] = await reader.position(TopicPartition(*tp))
                                done = goes_on[tp] >= ends[tp]
                            if done:
                                left.discard(tp)
                                reader.pause(TopicPartition(*tp))
                        if left and asyncio.get_running_loop().time() > deadline:
                            raise TimeoutError(f"reading {sorted(left)}")
            finally:
                if self._reader is reader:
                    reader._subscription.unsubscribe()  # the public one forgets the leaders too, and asks again

    async def truncate(self, offsets: Mapping[TP, int]) -> None:
        """Delete the records of partitions before an offset, for good."""
        wanted = {TopicPartition(*tp): RecordsToDelete(offset) for tp, offset in offsets.items()}
        if wanted:
            with translated(f"{self.where} {', '.join(sorted({tp[0] for tp in offsets}))}"):
                await asyncio.wait_for(self._open.delete_records(wanted), self.options.timeout)

    # --- writing and consuming -------------------------------------------------------------------------------

    async def send(self, records: Sequence[Outgoing]) -> list[BrokerError | None]:
        """Write records; for each None once all in-sync replicas have it, or why it may not be there."""
        return [None if isinstance(answer, int) else answer for answer in await self._producer.send(records)]

    async def append(self, records: Sequence[Outgoing]) -> list[int]:
        """Write records, or raise; where each stands then, below 0 where that is not known."""
        answers = await self._producer.send(records)
        for answer in answers:
            if isinstance(answer, BrokerError):
                raise answer
        return answers  # type: ignore[return-value]

    def consumer(self, group: str, moving: Moving) -> GroupConsumer:
        """A member of a consumer group."""
        return GroupConsumer(self, group, moving)

    @property
    def _open(self) -> Any:
        if self._admin is None:
            raise BrokerError("the bus is not open; use it inside `async with Bus(...) as bus:`")
        return self._admin

    @property
    def _look(self) -> Any:
        if self._reader is None:
            raise BrokerError("the bus is not open; use it inside `async with Bus(...) as bus:`")
        return self._reader


class Producer:
    """Whoever writes while a write is under way travels with the next one: one record or a thousand, one round trip."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._made: Any = None
        self._waiting: deque[tuple[Sequence[Outgoing], asyncio.Future[list[Answer]]]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._turn = 0

    async def send(self, records: Sequence[Outgoing]) -> list[Answer]:
        """Write records; one answer for each."""
        if not records:
            return []
        answered: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting.append((records, answered))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_all(), name="eventbus kafka send")
        return await answered

    async def aclose(self) -> None:
        """Wait for what is under way, and disconnect."""
        if self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)
        await self._drop()

    async def _drop(self) -> None:
        producer, self._made = self._made, None
        if producer is not None:
            await _quietly(producer.stop())

    async def _send_all(self) -> None:
        while self._waiting:
            parcels = list(self._waiting)
            self._waiting.clear()
            records = [record for some, _ in parcels for record in some]
            answers: Sequence[Answer]
            try:
                answers = await self._deliver(records)
            except BrokerError as error:
                answers = [error] * len(records)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is for those who wait
                answers = [translate(error, self._client.where)] * len(records)
            place = 0
            for some, answered in parcels:
                if not answered.done():
                    answered.set_result([*answers[place : place + len(some)]])
                place += len(some)

    async def _deliver(self, records: Sequence[Outgoing]) -> list[Answer]:
        producer = await self._ready()
        answers: list[Answer] = [-1] * len(records)
        spread = await self._spread(producer, records, answers)
        shelves = {tp: _pack(producer, records, places) for tp, places in spread.items()}
        works = [self._write(producer, tp, shelf, answers) for tp, shelf in shelves.items()]
        try:
            async with asyncio.timeout(self._client.options.timeout):
                whole = all(await asyncio.gather(*works))
        except TimeoutError:
            whole, late = False, translate(TimeoutError(), self._client.where)
            for places in spread.values():
                for place in places:
                    answers[place] = late
        if not whole:
            await self._drop()  # its sequence has a hole now: whatever came after the failure is out of order
            await self._again(records, shelves, answers)
        return answers

    async def _again(self, records: Sequence[Outgoing], shelves: Mapping[TP, Shelf], answers: list[Answer]) -> None:
        """Of a batch that was too large, find the record whose fault it was; write what came out of order again."""
        for shelf in shelves.values():
            for _, places in shelf:
                answer = answers[places[0]]
                if isinstance(answer, TooLarge) and len(places) > 1:
                    for place in places:
                        answers[place] = (await self._deliver([records[place]]))[0]
                elif isinstance(answer, OutOfOrder):
                    for place, again in zip(places, await self._deliver([records[p] for p in places]), strict=True):
                        answers[place] = again

    async def _write(self, producer: Any, tp: TP, shelf: Shelf, answers: list[Answer]) -> bool:
        """Write the batches of one partition; whether all went well."""
        under_way, problem = [], None
        for batch, places in shelf:
            try:
                under_way.append((await producer.send_batch(batch, tp[0], partition=tp[1]), places))
            except (kafka.KafkaError, AssertionError) as error:
                problem = translate(error, f"{self._client.where} {tp[0]}")
                for place in places:
                    answers[place] = problem
        for future, places in under_way:
            try:
                first = (await future).offset
                for number, place in enumerate(places):
                    answers[place] = first + number if first >= 0 else -1
            except kafka.KafkaError as error:
                problem = translate(error, f"{self._client.where} {tp[0]}")
                for place in places:
                    answers[place] = problem
        return problem is None

    async def _spread(self, producer: Any, records: Sequence[Outgoing], answers: list[Answer]) -> dict[TP, list[int]]:
        """The records of every partition: by key as Java's client does it, without one in turn, some at a time.

        How many there are the producer knows best: it hears of new ones by itself. A new producer knows of none, and
        what was true when the one before it failed may not be so any more: it is asked for.
        """
        counts: dict[str, int] = {}
        refused: dict[str, Refused] = {}
        free: dict[str, list[int]] = defaultdict(list)
        spread: dict[TP, list[int]] = defaultdict(list)
        for topic in {record[0] for record in records}:
            try:
                counts[topic] = len(producer.client.cluster.partitions_for_topic(topic) or ())
                counts[topic] = counts[topic] or await self._client.partitions(topic, known=False)
            except Refused as error:
                counts[topic], refused[topic] = 0, error
        for place, (topic, key, _, _, partition) in enumerate(records):
            if not counts[topic]:
                missing = f"{self._client.where}: there is no topic {topic}; provision the service first"
                answers[place] = refused.get(topic) or Refused(missing)
            elif partition is not None:
                spread[topic, partition].append(place)
            elif key is not None:
                spread[topic, (murmur2(key) & 0x7FFFFFFF) % counts[topic]].append(place)
            else:
                free[topic].append(place)
        for topic, places in free.items():
            piece = max(FEWEST_TOGETHER, -(-len(places) // counts[topic]))
            for start in range(0, len(places), piece):
                self._turn += 1
                spread[topic, self._turn % counts[topic]] += places[start : start + piece]
        for places in spread.values():
            places.sort()  # those with a key among those without
        return spread

    async def _ready(self) -> Any:
        if self._made is None:
            options = self._client.options
            producer = AIOKafkaProducer(
                acks="all",
                enable_idempotence=True,
                linger_ms=0,
                max_batch_size=min(BATCH_BYTES, options.max_event_bytes),
                max_request_size=options.copy_bytes + BATCH_BYTES,
                compression_type=None if options.compression == "none" else options.compression,
                **self._client.parameters(),
            )
            _ask_modestly(producer.client)
            try:
                await self._client.start(producer)
            except BaseException as error:
                await _quietly(producer.stop())
                if isinstance(error.__cause__, kafka.ClusterAuthorizationFailedError):
                    lacking = kafka.ClusterAuthorizationFailedError("no right to write any topic, nor IdempotentWrite")
                    raise translate(lacking, self._client.where) from error
                raise
            self._made = producer
        return self._made


class Moving:
    """What a member of a group is told when partitions move; both are awaited."""

    async def revoked(self) -> None:
        """All partitions are about to be taken away: the last moment to commit for them."""

    async def assigned(self, partitions: Sequence[TP]) -> None:
        """These are ours now."""


class GroupConsumer:
    """One member of a consumer group."""

    def __init__(self, client: Client, group: str, moving: Moving) -> None:
        self._client = client
        self._group = group
        self._led = asyncio.get_running_loop().time()
        self._listener = _Listener(self, moving)
        self._generation = -1
        options = client.options
        self._consumer = AIOKafkaConsumer(
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            fetch_max_wait_ms=LONG_POLL,
            fetch_max_bytes=32 * LARGEST_PIECE,
            session_timeout_ms=round(options.session_timeout * 1000),
            heartbeat_interval_ms=max(50, round(options.session_timeout * 100)),
            max_poll_interval_ms=round(options.session_timeout * 10_000),  # we poll always, whatever handlers do
            rebalance_timeout_ms=round((options.drain + options.session_timeout) * 1000),
            # By topic: a new retry topic leaves the partitions of all others where they are.
            partition_assignment_strategy=(RangePartitionAssignor,),
            **client.parameters(),
        )
        _ask_modestly(self._consumer._client)

    async def start(self, topics: Sequence[str]) -> None:
        """Connect and join."""
        try:
            await self._client.start(self._consumer)
        except BaseException:
            await self.stop()
            raise
        leave_unread(self._consumer)
        self.subscribe(topics)

    def subscribe(self, topics: Sequence[str]) -> None:
        """Read these topics from now on; partitions move."""
        self._consumer.subscribe(list(topics), listener=self._listener)

    async def poll(self, timeout: float, partitions: Iterable[TP] = ()) -> dict[TP, Unread]:
        """What was fetched, of all partitions or of some. Never cancelled: aiokafka's idle clock would stay wrong."""
        some = [TopicPartition(*tp) for tp in partitions]
        with translated(self._client.where):
            found = await self._consumer.getmany(*some, timeout_ms=round(timeout * 1000))
        return _unread(found, self._client.where)

    def check(self) -> None:
        """Raise where nobody leads the group: polls are just empty then, and whoever is idle would never know."""
        now = asyncio.get_running_loop().time()
        if self._consumer._coordinator.coordinator_id is not None:
            self._led = now
        elif now - self._led > LEADERLESS:
            who = f"the coordinator of group {self._group}"
            raise BrokerUnavailable(f"{self._client.where}: {who} cannot be reached; is Kafka running there?")

    def hold(self, partitions: Iterable[TP]) -> None:
        """Fetch nothing of these, which were just assigned, until it is known from where on.

        A partition with a position, whatever it is, is one whose commit aiokafka does not ask for: it would ask one by
        one. And a fetch that began with some of them would keep the others waiting until it has something.
        """
        for tp in partitions:
            self._consumer.pause(TopicPartition(*tp))
            self._consumer.seek(TopicPartition(*tp), 0)

    def begin(self, offsets: Mapping[TP, int]) -> None:
        """Fetch all of these, each from its offset on; raises Fenced where they are being taken away just now."""
        fetch_pieces(self._consumer, piece_of_each(len(offsets)))
        try:
            with translated(self._client.where):
                for tp, offset in offsets.items():
                    self._consumer.seek(TopicPartition(*tp), offset)
                for tp in offsets:
                    self._consumer.resume(TopicPartition(*tp))
        except AssertionError as error:
            raise Fenced(f"{self._client.where}: group {self._group} has no partitions at the moment") from error

    def pause(self, tp: TP) -> None:
        """Fetch no more of this partition for now; what was fetched ahead is fetched again."""
        with contextlib.suppress(*_NOT_ASSIGNED):
            self._consumer.pause(TopicPartition(*tp))

    def resume(self, tp: TP) -> None:
        """Fetch it again."""
        with contextlib.suppress(*_NOT_ASSIGNED):
            self._consumer.resume(TopicPartition(*tp))

    async def position(self, tp: TP) -> int:
        """The offset that is fetched next: beyond all that was seen, and beyond what does not exist."""
        return int(await self._client.call(self._consumer.position(TopicPartition(*tp)), COMMIT_TIMEOUT))

    async def commit(self, offsets: Mapping[TP, tuple[int, str]]) -> set[TP]:
        """Commit; returns those whose topic is gone, of which nothing stands. Raises Fenced where the group moved on.

        Not by aiokafka's own call. For one who was put out it commits without a name, and a group without members
        accepts that: what others have said since would be written over. And a commit that names a topic that is gone
        it repeats until there is one again, a new one.
        """
        if self._abandoned:
            raise BrokerUnavailable(f"{self._client.where}: interrupted; what is not committed is handled again")
        there = self._consumer._client.cluster
        gone = {tp for tp in offsets if tp[1] not in (there.partitions_for_topic(tp[0]) or ())}
        topics: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for (topic, partition), at in offsets.items():
            if (topic, partition) not in gone:
                topics[topic].append((partition, *at))
        if topics:
            gone |= await self._client.call(self._commit(list(topics.items())), COMMIT_TIMEOUT)
        return gone

    async def _commit(self, topics: list[tuple[str, list[tuple[int, int, str]]]]) -> set[TP]:
        coordinator, what = self._consumer._coordinator, f"commit of group {self._group}"
        while True:
            await coordinator.ensure_coordinator_known()
            if self._generation < 0 or coordinator.generation != self._generation:
                raise kafka.IllegalGenerationError(what)
            request = OffsetCommitRequest(self._group, self._generation, coordinator.member_id, -1, topics)
            gone: set[TP] = set()
            try:
                for topic, rows in (await asyncio.shield(coordinator._send_req(request))).topics:
                    for partition, code in rows:
                        if kafka.for_code(code) is kafka.UnknownTopicOrPartitionError:
                            gone.add((topic, partition))
                        else:
                            _no_error(code, what)
                return gone
            except kafka.RebalanceInProgressError:
                coordinator.request_rejoin()
                raise
            except (kafka.IllegalGenerationError, kafka.UnknownMemberIdError):
                if coordinator.generation == self._generation:
                    coordinator.reset_generation()
                raise
            except kafka.KafkaError as error:
                if not error.retriable:
                    raise
                if not isinstance(error, kafka.GroupLoadInProgressError):
                    coordinator.coordinator_dead()  # or it is another node's by now
            await asyncio.sleep(RETRY_COMMIT)

    def entered(self) -> None:
        """The group has a new generation, and this is one of it: commits are said in its name, and in no other's."""
        self._generation = self._consumer._coordinator.generation

    async def stop(self) -> None:
        """Leave the group and disconnect; a commit that is still tried is given up."""
        self._generation = -1
        if self._abandoned:
            self._consumer._closed = True
            await _quietly(self._consumer._client.close())
        else:
            await _quietly(self._consumer.stop())

    @property
    def _abandoned(self) -> bool:
        """Whether the driver's own coroutines have ended: a second Ctrl-C cancels all, and no answer is read."""
        coordinator = self._consumer._coordinator
        return coordinator is not None and bool(coordinator._coordination_task.done())


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, member: GroupConsumer, moving: Moving) -> None:
        self._member = member
        self._moving = moving

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self._moving.revoked()

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        self._member.entered()
        await self._moving.assigned([tuple(tp) for tp in assigned])


class _DeleteGroupsResponse(Response):  # type: ignore[misc]
    API_KEY = 42
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("results", Array(("group_id", String("utf-8")), ("error_code", Int16)))
    )


class _DeleteGroupsStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 42
    API_VERSION = 1
    RESPONSE_TYPE = _DeleteGroupsResponse
    SCHEMA = Schema(("groups", Array(String("utf-8"))))


class _DeleteGroups(Request[_DeleteGroupsStruct]):  # type: ignore[misc]
    """A request that aiokafka's admin client does not have."""

    API_KEY = 42

    def __init__(self, groups: list[str]) -> None:
        self._groups = groups

    def build(self, request_struct_class: type[_DeleteGroupsStruct]) -> _DeleteGroupsStruct:
        return request_struct_class(self._groups)


def _unread(found: Mapping[TopicPartition, Any], where: str) -> dict[TP, Unread]:
    return {tuple(tp): Unread(batches, f"{where} {tp.topic}/{tp.partition}") for tp, batches in found.items()}


def _asked(topics: list[str] | None) -> MetadataRequest:
    return MetadataRequest(topics or [], allow_auto_topic_creation=False)


_ASKING: Final = FunctionType(
    aiokafka.client.AIOKafkaClient._metadata_update.__code__, vars(aiokafka.client) | {"MetadataRequest": _asked}
)


def _ask_modestly(connections: Any) -> None:
    """Ask for the topics that are needed, and make none. aiokafka has no option for it: its own code, another request.

    Where the broker makes what is asked for (its default), whoever had looked at a service brought it back after it was
    unsubscribed, with one partition and no settings, at the next look at the metadata. And a client that needs no topic
    asked for all of the cluster, every ten seconds.
    """
    connections._metadata_update = MethodType(_ASKING, connections)


def _pack(producer: Any, records: Sequence[Outgoing], places: Sequence[int]) -> Shelf:
    """The records of one partition in batches, as many in each as it holds; a larger record is one alone."""
    shelf: Shelf = []
    add, inside = None, list[int]()
    for place in places:
        _, key, value, headers, _ = records[place]
        headers = headers if type(headers) is list else list(headers)
        if add is None or add(timestamp=None, key=key, value=value, headers=headers) is None:
            batch, inside = producer.create_batch(), []
            shelf.append((batch, inside))
            add = batch.append
            add(timestamp=None, key=key, value=value, headers=headers)
        inside.append(place)
    return shelf


def _no_error(code: int, what: str) -> None:
    if code:
        error = kafka.for_code(code)
        raise error(f"{what}: {error.__name__}")


async def _quietly(work: Awaitable[object]) -> None:
    """Stop something, whatever it says, and not for ever."""
    with contextlib.suppress(kafka.KafkaError, OSError, TimeoutError, asyncio.InvalidStateError):
        await asyncio.wait_for(work, STOP_TIMEOUT)


__all__ = ["TP", "Client", "Fenced", "GroupConsumer", "Moving"]
