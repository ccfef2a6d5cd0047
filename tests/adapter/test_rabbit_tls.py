"""amqps:// on a real broker that asks for client certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eventbus import BrokerUnavailable, Bus, Event, Service
from eventbus.testing.contract.harness import eventually, running
from tests.brokers import certificates
from tests.brokers.rabbit import PORT, node

TLS_PORT = PORT + 5


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A CA, and a server and a client signed by it; the broker trusts only that CA."""
    folder = certificates.make(Path(tmp_path_factory.mktemp("tls")), "DNS:localhost,IP:127.0.0.1")
    conf = "\n".join(
        [
            f"listeners.ssl.default = 127.0.0.1:{TLS_PORT}",
            f"ssl_options.cacertfile = {folder}/ca.pem",
            f"ssl_options.certfile = {folder}/server.pem",
            f"ssl_options.keyfile = {folder}/server.key",
            "ssl_options.verify = verify_peer",
            "ssl_options.fail_if_no_peer_cert = true",
        ]
    )
    with node("tls", PORT + 4, Path(tmp_path_factory.mktemp("rabbit")), conf) as broker:
        broker.wait_for_port(TLS_PORT)  # RabbitMQ opens it after the plain one
        yield folder


async def test_a_client_certificate_lets_us_in(pki: Path) -> None:
    """With CA, certificate and key from the query the bus works as ever."""
    service = Service("tls-stock")
    seen: list[object] = []

    @service.on("#")
    async def handle(event: Event) -> None:
        seen.append(event.data)

    files = "&".join(
        f"{name}={pki}/{file}"
        for name, file in (("cafile", "ca.pem"), ("certfile", "client.pem"), ("keyfile", "client.key"))
    )
    async with (
        Bus(f"amqps://guest:guest@localhost:{TLS_PORT}/?{files}", source="tls-api") as bus,
        running(bus, service),
    ):
        await bus.publish("t", {"n": 1})
        await eventually(lambda: seen, "it was handled")


@pytest.mark.parametrize("query", ["", "cafile=CA"], ids=["unknown CA", "no client certificate"])
async def test_without_the_right_certificates_nobody_gets_in(pki: Path, query: str) -> None:
    """An unknown CA is refused by us, a missing client certificate by the broker; both say so."""
    query = query.replace("CA", f"{pki}/ca.pem")
    with pytest.raises(BrokerUnavailable):
        async with Bus(f"amqps://guest:guest@localhost:{TLS_PORT}/?connect_timeout=5s&{query}"):
            pass
