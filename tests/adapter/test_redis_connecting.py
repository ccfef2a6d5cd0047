"""Ways to reach Redis: TLS, ACL user, Cluster, Sentinel, a ready-made client; and what is checked on arrival."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis, RedisCluster

from eventbus import Bus, Delivery, Event, RetryPolicy, Service
from eventbus.errors import BrokerError, BrokerUnavailable, ConfigError, PublishError
from eventbus.testing.contract.harness import eventually
from eventbus_redis import RedisAdapter, preconditions
from tests.brokers import redis
from tests.brokers.redis import RedisServer

ACL = "user bus on >secret ~{wms}:* +@all -@dangerous +info +config|get"


async def goes_the_whole_way(bus: Bus, name: str = "wms-stock") -> None:
    """Publish, fail, retry, park, count, re-drive, finish: every script runs once."""
    service = Service(name, retry=RetryPolicy(max_retries=1, delay=0.1))
    calls: list[int] = []

    @service.on("#")
    async def handle(event: Event, delivery: Delivery) -> int:
        calls.append(delivery.attempt)
        return 200 if len(calls) > 2 else 500

    async with bus:
        async with bus.serving(service):
            await bus.publish("order.created", {"n": 1})
            letters = bus.dead_letters(service)
            await eventually(letters.count, "it was parked")
            assert await letters.stats("type") == {"order.created": 1}
            assert (await letters.redrive()).done == 1
            await eventually(lambda: len(calls) == 3, "it came back")
        stats = await bus.stats(service)
        assert (stats.ready, stats.inflight, stats.delayed, stats.parked) == (0, 0, 0, 0)
        await bus.unsubscribe(service)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key), "-out",
         str(certificate), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


@pytest.fixture
async def cluster() -> AsyncIterator[list[RedisServer]]:
    """Three masters that share the slots."""
    with ExitStack() as stack:
        servers = [stack.enter_context(redis.server("--cluster-enabled", "yes")) for _ in range(3)]
        clients = [Redis.from_url(server.url, decode_responses=True) for server in servers]
        try:
            for place, client in enumerate(clients):
                await client.execute_command("CLUSTER ADDSLOTSRANGE", place * 16384 // 3, (place + 1) * 16384 // 3 - 1)
                await client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port)

            async def joined() -> bool:
                found = [await client.execute_command("CLUSTER INFO") for client in clients]
                return all(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3" for info in found)

            await eventually(joined, "the cluster stands")
        finally:
            for client in clients:
                await client.aclose()
        yield servers


async def test_an_acl_user_with_few_rights_is_enough() -> None:
    """The rule of docs/redis.md: the prefix's keys, no dangerous commands."""
    with redis.server() as server:
        admin = Redis.from_url(server.url)
        name, *rules = ACL.removeprefix("user ").split()
        await admin.execute_command("ACL SETUSER", name, *rules)
        await admin.aclose()
        await goes_the_whole_way(Bus(f"redis://bus:secret@127.0.0.1:{server.port}", source="wms-api"))
        with pytest.raises(BrokerError, match="user and password") as caught:
            await RedisAdapter.from_url(f"redis://bus:wrong@127.0.0.1:{server.port}", {}).open()
        assert "wrong@" not in str(caught.value)
    assert ACL in (Path(__file__).parents[2] / "docs" / "redis.md").read_text()


async def test_tls_is_verified(certificate: tuple[Path, Path]) -> None:
    """rediss:// with the right authority works; with none it is refused."""
    key, cert = certificate
    port = redis.claim_port()
    tls = ["--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    with redis.server(*tls, "--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no"):
        url = f"rediss://localhost:{port}"
        await goes_the_whole_way(Bus(f"{url}?ssl_ca_certs={cert}", source="wms-api"))
        with pytest.raises(BrokerUnavailable):
            await RedisAdapter.from_url(url, {}).open()


async def test_a_cluster_serves_by_url_and_by_client(cluster: list[RedisServer]) -> None:
    """All keys of a prefix are in one slot, so every script runs where its keys are, whichever node that is."""
    templates = {"main": "bus:{{{prefix}}}", "queue": "bus:{{{prefix}}}:{service}"}
    url = f"redis://127.0.0.1:{cluster[0].port}?cluster=true"
    client = RedisCluster(host="127.0.0.1", port=cluster[1].port)
    nodes = set()
    try:
        await client.initialize()
        for prefix in ("wms", "tms", "crm", "erp"):
            nodes.add(client.get_node_from_key(f"{{{prefix}}}:main").port)
            await goes_the_whole_way(Bus(url, source=f"{prefix}-api"), f"{prefix}-stock")
        assert nodes == {server.port for server in cluster}
        named = Bus(url, source="tms-api", settings={"redis": {"names": templates}})
        await goes_the_whole_way(named, "tms-stock")
        await goes_the_whole_way(Bus("redis://", adapter=RedisAdapter.from_client(client), source="wms-api"))
    finally:
        await client.aclose()


async def test_a_ready_made_client_stays_its_owners() -> None:
    """The bus uses its pool and leaves it open; one that decodes answers is refused with the fix."""
    with redis.server() as server:
        client = Redis.from_url(server.url)
        await goes_the_whole_way(
            Bus("redis://", adapter=RedisAdapter.from_client(client, lease="5s"), source="wms-api")
        )
        assert await client.ping()
        await client.aclose()
        text = Redis.from_url(server.url, decode_responses=True)
        with pytest.raises(ConfigError, match="decode_responses=False"):
            await RedisAdapter.from_client(text).open()
        await text.aclose()


async def test_a_server_that_could_lose_messages_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """No AOF, an evicting policy, a full memory: each a warning with its fix; seed 2's configuration has none."""
    with redis.server("--appendonly", "no", "--maxmemory-policy", "allkeys-lru", "--maxmemory", "2mb") as server:
        adapter = RedisAdapter.from_url(server.url, {})
        with caplog.at_level(logging.WARNING, "eventbus"):
            await adapter.open()
            await adapter.aclose()
    found = [record for record in caplog.records if record.event == "precondition"]  # type: ignore[attr-defined]
    text = " ".join(str(record.fields) for record in found)  # type: ignore[attr-defined]
    assert all(record.levelno == logging.WARNING for record in found)
    assert "appendonly" in text
    assert "allkeys-lru" in text
    caplog.clear()
    adapter = RedisAdapter.from_url(redis.shared_url(), {})
    await adapter.open()
    await adapter.aclose()
    assert not [record for record in caplog.records if record.event == "precondition"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"aof_enabled": "1", "maxmemory_policy": "noeviction", "maxmemory": "0"}, []),
        ({"aof_enabled": "0"}, ["appendonly"]),
        ({"maxmemory_policy": "volatile-ttl"}, ["volatile-ttl"]),
        ({"used_memory": "85", "maxmemory": "100"}, ["high", "85%"]),
        ({"used_memory": "95", "maxmemory": "100"}, ["critical", "95%"]),
        ({"used_memory": "nonsense", "maxmemory": ""}, []),
    ],
)
def test_preconditions_as_a_table(info: dict[str, str], words: list[str]) -> None:
    """Seed 2's values: AOF, noeviction, 80 % and 90 % of maxmemory."""
    text = " ".join(problem for problem, _ in preconditions.problems(info))
    assert all(word in text for word in words)
    assert bool(words) == bool(text)


@pytest.mark.parametrize(
    ("late", "before", "words"),
    [
        ("0", 0, ""),
        ("7", 7, ""),
        ("7", 4, "late 3 times"),
        ("1", 7, "late once"),
        ("0", 7, ""),
        ("", 0, ""),
    ],
)
def test_a_disk_that_does_not_keep_up_is_reported(late: str, before: int, words: str) -> None:
    """Under everysec a late disk lets a kill lose what was answered: each new time is said, old ones are not."""
    text = " ".join(problem for problem, _ in preconditions.disk_problems({"aof_delayed_fsync": late}, before))
    assert words in text
    assert bool(words) == bool(text)


async def test_a_servers_own_count_of_late_syncs_is_read() -> None:
    """The field has the name that Redis gives it, and a server whose disk kept up has none to report."""
    adapter = RedisAdapter.from_url(redis.shared_url(), {})
    await adapter.open()
    try:
        assert preconditions.LATE in await adapter.client.info()
        late = int((await adapter.client.info())[preconditions.LATE])
        assert await preconditions.check_again(adapter.client, late) >= late
    finally:
        await adapter.aclose()


async def test_a_full_memory_refuses_publishing_and_keeps_what_is_held() -> None:
    """OOM: publish raises, `refused` for each; retry and park stay with their consumer; acks and purges go through."""
    from eventbus.policy import DEFAULT_POLICY, decide
    from eventbus.settlement import ACK
    from eventbus.status import park, retry
    from tests.adapter.test_redis_streams import take

    with redis.server() as server:
        admin = Redis.from_url(server.url)
        sub = Service("wms-stock").subscription()
        try:
            async with Bus(server.url, source="wms-api") as bus:
                await bus.adapter.provision([sub], "create")
                await bus.publish_many([Event("a", n) for n in range(4)])
                letters = bus.dead_letters("wms-stock")
                async with bus.adapter.consume(sub) as consumer:
                    held = await take(consumer, 4)
                    parked = decide(park("no"), held[2], DEFAULT_POLICY)
                    assert await consumer.settle([(held[3], decide(park("old"), held[3], DEFAULT_POLICY))]) == ["done"]
                    await admin.config_set("maxmemory", "1mb")
                    with pytest.raises(PublishError, match="memory is full") as caught:
                        await bus.publish_many([Event("b"), Event("c")])
                    assert [result.status for result in caught.value.results] == ["refused", "refused"]
                    verdict = decide(retry("x"), held[0], DEFAULT_POLICY)
                    answers = await consumer.settle([(held[0], verdict), (held[1], ACK), (held[2], parked)])
                    assert answers == ["failed", "done", "failed"]
                    assert (await letters.purge()).done == 1
                    assert await letters.stats("reason") == {}
                    await admin.config_set("maxmemory", "512mb")
                    assert await consumer.settle([(held[0], verdict), (held[2], parked)]) == ["done", "done"]
                stats = await bus.stats("wms-stock")
                assert (stats.ready, stats.inflight, stats.delayed, stats.parked) == (0, 0, 1, 1)
        finally:
            await admin.aclose()


async def test_a_server_that_forgot_its_scripts_gets_them_again() -> None:
    """SCRIPT FLUSH, a restart, a failover: the next call brings the text along."""
    with redis.server() as server:
        admin = Redis.from_url(server.url)
        try:
            async with Bus(server.url, source="wms-api") as bus:
                await bus.provision(Service("wms-stock"))
                await bus.publish("a")
                await admin.script_flush()
                await bus.publish("b")
                assert (await bus.stats("wms-stock")).ready == 2
        finally:
            await admin.aclose()


async def test_a_restart_between_two_publishes_costs_nothing() -> None:
    """A pooled connection that died meanwhile is noticed before it is used."""
    with redis.server() as server:
        async with Bus(server.url, source="wms-api") as bus:
            await bus.provision(Service("wms-stock"))
            await bus.publish("a")
            server.kill()
            with pytest.raises(PublishError) as caught:
                await bus.publish("lost")
            assert caught.value.results[0].status == "unknown"
            server.start()
            await bus.publish("b")
            assert (await bus.stats("wms-stock")).ready == 2


def test_the_server_is_the_one_that_was_asked_for() -> None:
    """`make test-redis8` names a server: the tests must not fall back to another."""
    said = subprocess.run([redis.BINARY, "--version"], check=True, capture_output=True, text=True).stdout
    with redis.server() as server:
        client = BlockingRedis.from_url(server.url)
        info = client.info("server")
        client.close()
    version = info.get("valkey_version") or info["redis_version"]
    assert f"v={version} " in said
