"""Logins, TLS and permissions on a real Kafka that asks for them: who gets in, and what the others are told."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest, DescribeAclsRequest

from eventbus import Bus, Event, PublishError, RetryPolicy, Service
from eventbus.errors import BrokerError, BrokerUnavailable, EventBusError, UnknownService
from eventbus.testing.contract.harness import drained, eventually, running
from tests.brokers import certificates
from tests.brokers.kafka import KafkaNode, node

PORT = 19592
TLS, SASL_TLS, SASL = PORT + 2, PORT + 3, PORT + 4
PASSWORD = "open-sesame"
SMALL = {"partitions": 1, "retry_partitions": 1, "dlq_partitions": 1, "session_timeout": "3s", "timeout": "10s"}
KINDS = {"topic": 2, "group": 3}
RIGHTS = {"Read": 3, "Write": 4, "Create": 5, "Delete": 6, "Describe": 8, "DescribeConfigs": 10}
PREFIXED, ANY, ALLOW = 4, 1, 3


@dataclass
class Place:
    """The secured broker, the certificates, and who may do everything there."""

    node: KafkaNode
    pki: Path
    admin: Any = None

    def __post_init__(self) -> None:
        self.prefix = f"k{secrets.token_hex(4)}"

    def url(self, road: str) -> str:
        """A URL of the tests' tables: CA, CERT and such stand for files."""
        files = {name: f"{self.pki}/{name.replace('_', '.')}" for name in ("ca_pem", "other_pem", "other_key")}
        files |= {"client_pem": f"{self.pki}/client.pem", "client_key": f"{self.pki}/client.key"}
        return "kafka://" + road.format(tls=TLS, sasl_tls=SASL_TLS, sasl=SASL, plain=PORT, password=PASSWORD, **files)

    def bus(self, road: str, **settings: object) -> Bus:
        return Bus(self.url(road), source="api", prefix=self.prefix, settings={"kafka": {**SMALL, **settings}})

    def master(self) -> Bus:
        """A bus of one who may do everything."""
        return self.bus("127.0.0.1:{plain}")

    def clerk(self, **settings: object) -> Bus:
        """A bus of one who may do what was granted."""
        return self.bus("clerk:{password}@localhost:{sasl}", **settings)

    def service(self, **options: Any) -> Service:
        return Service(f"{self.prefix}-stock", **{"retry": RetryPolicy(max_retries=0), "grace": 2.0} | options)

    async def grant(self, kind: str, name: str, *rights: str, user: str = "clerk") -> None:
        """Allow a user something on all whose names begin so; returns once the broker goes by it."""
        for right in rights:
            acl = (KINDS[kind], name, PREFIXED, f"User:{user}", "*", RIGHTS[right], ALLOW)
            answer = await self.admin._send_request(CreateAclsRequest(*acl))
            assert answer.creation_responses[0][0] == 0, answer

            async def applies(acl: tuple[object, ...] = acl) -> bool:
                found = await self.admin._send_request(DescribeAclsRequest(*acl))
                return bool(found.resources)

            await eventually(applies, f"{right} on {name} is granted")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A broker that wants a client certificate or a login, each on a port of its own; it denies what is not granted."""
    pki = certificates.make(Path(tmp_path_factory.mktemp("pki")), "DNS:localhost")
    (pki / "server.both").write_text((pki / "server.key").read_text() + (pki / "server.pem").read_text())
    modules = "org.apache.kafka.common.security"
    logins = "".join(
        f"listener.name.{listener}.plain.sasl.jaas.config={modules}.plain.PlainLoginModule required "
        f'user_admin="{PASSWORD}" user_clerk="{PASSWORD}" user_guest="{PASSWORD}";\n'
        f"listener.name.{listener}.scram-sha-256.sasl.jaas.config={modules}.scram.ScramLoginModule required;\n"
        f"listener.name.{listener}.scram-sha-512.sasl.jaas.config={modules}.scram.ScramLoginModule required;\n"
        for listener in ("sasl_ssl", "sasl_plaintext")
    )
    conf = f"""
ssl.keystore.type=PEM
ssl.keystore.location={pki}/server.both
ssl.truststore.type=PEM
ssl.truststore.location={pki}/ca.pem
listener.name.ssl.ssl.client.auth=required
ssl.principal.mapping.rules=RULE:^CN=(.*)$/$1/
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512
connection.failed.authentication.delay.ms=1
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:admin;User:client
{logins}"""
    ports = {"SSL": TLS, "SASL_SSL": SASL_TLS, "SASL_PLAINTEXT": SASL}
    folder = Path(tmp_path_factory.mktemp("kafka"))
    with node(PORT, folder, secured=ports, users={"admin": PASSWORD}, conf=conf) as broker:
        yield Place(broker, pki)


@pytest.fixture
async def place(secured: Place) -> AsyncIterator[Place]:
    """A prefix of its own there."""
    admin = AIOKafkaAdminClient(bootstrap_servers=secured.node.address)
    await admin.start()
    yield Place(secured.node, secured.pki, admin)
    await admin.close()


# --- getting in ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "road",
    [
        "admin:{password}@localhost:{sasl_tls}?tls=true&cafile={ca_pem}",
        "admin:{password}@localhost:{sasl_tls}?tls=true&cafile={ca_pem}&sasl_mechanism=SCRAM-SHA-256",
        "admin:{password}@localhost:{sasl_tls}?tls=true&cafile={ca_pem}&sasl_mechanism=SCRAM-SHA-512",
        "admin:{password}@localhost:{sasl}?sasl_mechanism=SCRAM-SHA-512",
        "localhost:{tls}?tls=true&cafile={ca_pem}&certfile={client_pem}&keyfile={client_key}",
    ],
    ids=["PLAIN over TLS", "SCRAM-SHA-256 over TLS", "SCRAM-SHA-512 over TLS", "SCRAM without TLS", "certificate"],
)
async def test_with_a_login_or_a_certificate_the_bus_works_as_ever(place: Place, road: str) -> None:
    """Every one of its clients gets in: topics are made, an event goes round, and a failing one is parked."""
    service = place.service()
    seen: list[str] = []

    @service.on("#")
    async def handle(event: Event) -> int:
        seen.append(event.type)
        return 500 if event.type == "bad" else 200

    async with place.bus(road) as bus, running(bus, service):
        await bus.publish("good")
        await bus.publish("bad")
        await eventually(bus.dead_letters(service).count, "one was handled, one parked")
    assert sorted(seen) == ["bad", "good"]


@pytest.mark.parametrize(
    ("road", "words"),
    [
        ("admin:wrong-{password}@localhost:{sasl_tls}?tls=true&cafile={ca_pem}", "did not let us in"),
        ("admin:wrong-{password}@localhost:{sasl}?sasl_mechanism=SCRAM-SHA-512", "did not let us in"),
        ("nobody:{password}@localhost:{sasl}?sasl_mechanism=SCRAM-SHA-256", "check user and password"),
        ("admin:{password}@localhost:{plain}", "asks for no login"),
        ("localhost:{sasl_tls}?tls=true&cafile={ca_pem}", "does it want tls = true, a login or a client certificate"),
        ("localhost:{sasl}", "does it want tls = true, a login or a client certificate"),
        ("admin:{password}@localhost:{sasl_tls}?tls=true&cafile={other_pem}", "TLS with localhost:{sasl_tls} failed"),
        ("admin:{password}@localhost:{sasl_tls}?tls=true", "unable to get local issuer"),
        ("admin:{password}@127.0.0.1:{sasl_tls}?tls=true&cafile={ca_pem}", "not valid for '127.0.0.1'"),
        ("localhost:{tls}?tls=true&cafile={ca_pem}", "or a client certificate"),
        (
            "localhost:{tls}?tls=true&cafile={ca_pem}&certfile={other_pem}&keyfile={other_key}",
            "or a client certificate",
        ),
        ("localhost:{tls}", "does it want tls = true"),
        ("admin:{password}@localhost:{plain}?tls=true&cafile={ca_pem}", "(or none of them)"),
        ("localhost:19598", "is Kafka running there?"),
    ],
)  # fmt: skip
async def test_who_is_not_let_in_is_told_why(
    place: Place, road: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What happened, where, and what to do, at once; the password is in no error and in no log."""
    caplog.set_level(logging.DEBUG)
    async with asyncio.timeout(10):
        with pytest.raises(EventBusError, match=re.escape(words.format(sasl_tls=SASL_TLS))) as caught:
            await place.bus(road, connect_timeout="5s").open()
    assert "localhost" in str(caught.value) or "127.0.0.1" in str(caught.value)
    assert PASSWORD not in str(caught.value) + caplog.text


async def test_a_wrong_login_is_a_refusal_and_a_wrong_certificate_is_not_reached(place: Place) -> None:
    """A refusal was said by the broker, so nobody has to look for a network; TLS fails before anybody speaks."""
    with pytest.raises(BrokerError) as login:
        await place.bus("admin:wrong@localhost:{sasl}").open()
    assert not isinstance(login.value, BrokerUnavailable)
    with pytest.raises(BrokerUnavailable):
        await place.bus("localhost:{tls}?tls=true&cafile={other_pem}").open()


# --- being allowed to ----------------------------------------------------------------------------------------

ALL = ("Read", "Write", "Create", "Describe", "DescribeConfigs")


async def test_the_permissions_in_the_docs_are_enough_for_everything(place: Place) -> None:
    """Topics and groups of the prefix, nothing on the cluster: made, read, retried, parked, put back, erased, ended."""
    service = place.service(retry=RetryPolicy(max_retries=1, delay=0.1))
    calls: list[str] = []

    @service.on("#")
    async def handle(event: Event) -> int:
        calls.append(event.type)
        return 500 if len(calls) <= 4 else 200

    await place.grant("topic", f"{place.prefix}.", *ALL, "Delete")
    await place.grant("group", f"{place.prefix}.", "Read", "Describe", "Delete")
    async with place.clerk() as bus:
        letters = bus.dead_letters(service)

        async def parked() -> bool:
            return await letters.count() == 2

        async with running(bus, service):
            await bus.publish_many([Event("a"), Event("b")])
            await eventually(parked, "both failed twice")
            assert (await letters.redrive(limit=1)).done == 1
            assert (await letters.purge(erase=True)).erased == 2
            await eventually(lambda: len(calls) == 5, "it was handled")
            await drained(bus, service)
        await bus.unsubscribe(service)
        with pytest.raises(UnknownService):
            await bus.stats(service)


async def test_an_event_for_a_topic_that_may_not_be_written_is_refused_at_once(place: Place) -> None:
    """Refused, not unknown: it is certainly not there. And not for ever: the right can be granted."""
    service = place.service()
    async with place.master() as master:
        await master.provision(service)
        await place.grant("topic", f"{place.prefix}.", "Read", "Describe")
        async with place.clerk() as bus, asyncio.timeout(5):
            await place.grant("topic", f"{place.prefix}.retry", "Write")
            with pytest.raises(PublishError, match=rf"{place.prefix}\.main.*permissions") as caught:
                await bus.publish_many([Event("a"), Event("b")])
            assert [(result.status, result.later) for result in caught.value.results] == [("refused", True)] * 2
            await place.grant("topic", f"{place.prefix}.", "Write")
            await bus.publish("c")
        assert (await master.stats(service)).ready == 1


async def test_who_may_write_nothing_at_all_is_told_so(place: Place) -> None:
    """Kafka gives him no producer's number, and names no topic; so we say what he lacks."""
    async with place.master() as master:
        await master.provision(place.service())
    await place.grant("topic", f"{place.prefix}.", "Describe", user="guest")
    async with place.bus("guest:{password}@localhost:{sasl}") as bus, asyncio.timeout(5):
        with pytest.raises(PublishError, match=r"no right to write any topic.*permissions") as caught:
            await bus.publish("a")
        assert [(result.status, result.later) for result in caught.value.results] == [("refused", True)]


async def test_an_event_for_a_topic_that_may_not_even_be_known_is_no_event_for_nobody(place: Place) -> None:
    """Kafka says of such a topic only that it is not for us; "nobody has subscribed" would lose the event."""
    service = place.service()
    async with place.master() as master:
        await master.provision(service)
        async with place.clerk() as bus:
            with pytest.raises(PublishError) as caught:
                await bus.publish("a")
            assert [(result.status, result.later) for result in caught.value.results] == [("refused", True)]
            for asking in (bus.stats(service), bus.dead_letters(service).count(), bus.provision(service)):
                with pytest.raises(BrokerError, match="no right to describe"):
                    await asking


async def test_a_topic_that_may_not_be_made_is_named(place: Place) -> None:
    """Provisioning says which topic, and where the permissions are listed."""
    service = place.service()
    await place.grant("topic", f"{place.prefix}.", "Read", "Write", "Describe", "DescribeConfigs")
    await place.grant("group", f"{place.prefix}.", "Read")
    async with place.clerk() as bus:
        with pytest.raises(BrokerError, match=rf"not permitted .*{place.prefix}\.main.*permissions"):
            await bus.provision(service)


@pytest.mark.parametrize("lacks", ["topic", "group"])
async def test_who_may_not_read_is_told_so_and_goes_on_once_he_may(
    place: Place, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A topic or a group that may not be read: not ready, a log that says which; no restart is needed afterwards."""
    service = place.service()
    seen: list[str] = []

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.type)

    async with place.master() as master:
        await master.provision(service)
        await master.publish("waiting")
    rights = {"topic": ALL, "group": ("Read", "Describe")}
    for kind, all_of_them in rights.items():
        await place.grant(
            kind, f"{place.prefix}.", *(right for right in all_of_them if kind != lacks or right != "Read")
        )
    async with place.clerk() as bus, running(bus, service):
        await eventually(lambda: _said(caplog, "connection_lost"), "it says why it does not receive")
        (said,) = _said(caplog, "connection_lost")
        assert f"{place.prefix}." in said
        assert "docs/kafka.md lists the permissions" in said
        green = []
        for _ in range(30):
            await asyncio.sleep(0.05)
            green.append(bus.health[service.name].receiving)
        assert not any(green)
        assert len(_said(caplog)) < 15
        await place.grant(lacks, f"{place.prefix}.", "Read")
        await eventually(lambda: seen == ["waiting"], "it goes on", within=20)
        await eventually(lambda: bus.health[service.name].receiving, "it says that it receives", within=20)


async def test_a_message_whose_copy_may_not_be_written_stays_until_it_may(place: Place) -> None:
    """Without the right to write dead letters nothing is parked, nothing is lost, and readiness is red."""
    service = place.service()

    @service.on("#")
    async def handle(event: Event) -> int:
        return 500

    async with place.master() as master:
        await master.provision(service)
        await master.publish("a")
    await place.grant("topic", f"{place.prefix}.", *(right for right in ALL if right != "Write"))
    await place.grant("group", f"{place.prefix}.", "Read", "Describe")
    async with place.clerk() as bus, running(bus, service):
        await eventually(lambda: bus.health[service.name].failing_settles, "it cannot be settled")
        assert await bus.dead_letters(service).count() == 0
        await place.grant("topic", f"{place.prefix}.", "Write")
        await eventually(bus.dead_letters(service).count, "it was parked", within=20)
        await eventually(lambda: not bus.health[service.name].failing_settles, "all is well")


async def test_without_the_right_to_make_topics_a_retry_takes_the_road_there_is(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A delay without a topic near it would get one; where that is refused the worker waits, and nothing is early."""
    loop = asyncio.get_running_loop()
    calls: list[float] = []
    first = place.service(retry=RetryPolicy(max_retries=1, delay=0.1))
    later = place.service(retry=RetryPolicy(max_retries=1, delay=2.0))

    @later.on("#")
    async def handle(event: Event) -> int:
        calls.append(loop.time())
        return 500 if len(calls) == 1 else 200

    async with place.master() as master:
        await master.provision(first)
        await master.publish("a")
    await place.grant("topic", f"{place.prefix}.", *(right for right in ALL if right != "Create"))
    await place.grant("group", f"{place.prefix}.", "Read", "Describe")
    settings = {"kafka": SMALL}
    clerk = Bus(place.url("clerk:{password}@localhost:{sasl}"), prefix=place.prefix, provision="off", settings=settings)
    async with clerk as bus, running(bus, later):
        await eventually(lambda: len(calls) == 2, "it came back", within=20)
    assert calls[1] - calls[0] >= 2.0
    assert "road_refused" in [getattr(record, "event", "") for record in caplog.records]


def _said(caplog: pytest.LogCaptureFixture, *events: str) -> list[str]:
    """What the bus logged, or the errors of some of that."""
    found = [record for record in caplog.records if record.name == "eventbus"]
    return [record.fields.get("error", "") for record in found if not events or record.event in events]  # type: ignore[attr-defined]
