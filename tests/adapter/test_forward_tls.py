"""TLS of an endpoint: a private CA, a client certificate, from files or as PEM text; wrong ones said in one line."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http_support import Server

from eventbus.config import load
from eventbus.errors import ConfigError
from eventbus.event import Event
from eventbus.forward import Endpoint, SendFailed
from eventbus.forward.tls import Tls
from eventbus.settlement import Delivery
from tests.brokers import certificates


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and by it a server for 127.0.0.1 and a client; another CA that nobody trusts."""
    return certificates.make(tmp_path_factory.mktemp("pki"), "IP:127.0.0.1")


@pytest.fixture
async def server(pki: Path) -> AsyncIterator[Server]:
    """Takes only clients with a certificate of the CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "server.pem", pki / "server.key")
    context.load_verify_locations(pki / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    running = Server()
    listener = await running.start(context)
    yield running
    listener.close()
    await running.idle()


def delivery() -> Delivery:
    return Delivery(Event("t", {}, source="/"), "svc", "q")


@pytest.mark.parametrize("sender", ["lean", "aiohttp"])
@pytest.mark.parametrize("as_text", [False, True])
async def test_a_client_certificate_is_shown(server: Server, pki: Path, sender: str, as_text: bool) -> None:
    """From files, or as the PEM text that an environment variable holds."""
    values = {"ca": pki / "ca.pem", "cert": pki / "client.pem", "key": pki / "client.key"}
    texts = {name: path.read_text() if as_text else str(path) for name, path in values.items()}
    endpoint = Endpoint(server.url, tls=Tls(**texts), sender=sender)  # type: ignore[arg-type]
    await endpoint.open()
    for _ in range(3):
        assert (await endpoint(delivery())).status == 200
    await endpoint.aclose()
    assert server.connections == 1


@pytest.mark.parametrize("sender", ["lean", "aiohttp"])
@pytest.mark.parametrize("names", [{"ca": "ca.pem"}, {"ca": "other.pem", "cert": "client.pem", "key": "client.key"}])
async def test_without_the_right_ones_nothing_is_said(server: Server, pki: Path, sender: str, names: dict) -> None:
    """No client certificate, or a CA that did not sign the server's: no request is read by anybody."""
    tls = Tls(**{name: str(pki / file) for name, file in names.items()})
    endpoint = Endpoint(server.url, tls=tls, sender=sender, timeout=5)  # type: ignore[arg-type]
    await endpoint.open()
    outcome = await endpoint(delivery())
    await endpoint.aclose()
    assert isinstance(outcome.error, SendFailed)
    assert outcome.error.kind in ("tls", "reset")
    assert server.requests == []


async def test_bus_toml_names_the_files(server: Server, pki: Path, tmp_path: Path) -> None:
    """Relative to the file itself; the token and the secret from files too."""
    for name in ("ca.pem", "client.pem", "client.key"):
        shutil.copy(pki / name, tmp_path / name)
    (tmp_path / "token").write_text("t0ken\n")
    (tmp_path / "secret").write_text("whsec_bmV3\nwhsec_b2xk\n")
    config = f'''
    url = "memory://"
    [[services.wms-a.routes]]
    on = "#"
    forward = "{server.url}"
    tls = {{ ca = "ca.pem", cert = "client.pem", key = "client.key" }}
    auth = {{ bearer_file = "token" }}
    sign = {{ secret_file = "secret" }}
    '''
    (tmp_path / "bus.toml").write_text(config)
    (service,) = load(tmp_path / "bus.toml", {}).services()
    endpoint = service.routes[0].endpoint
    assert endpoint is not None
    await endpoint.open()
    assert (await endpoint(delivery())).status == 200
    await endpoint.aclose()
    headers = dict(server.requests[0][1])
    assert headers["authorization"] == "Bearer t0ken"
    assert headers["webhook-signature"].count("v1,") == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "give ca, or cert and key"),
        ({"key": "a"}, "tls.key: needs cert"),
        ({"ca": "none.pem"}, "tls.ca: none.pem cannot be used: no such file"),
        ({"cert": "none.pem"}, "tls.cert: none.pem cannot be used: no such file"),
        ({"cert": "-----BEGIN sekrit-----"}, "tls.cert: the PEM text cannot be used"),
        ({"ca": "-----BEGIN sekrit-----"}, "tls.ca: the PEM text cannot be used"),
    ],
)
def test_a_wrong_certificate_is_one_line_without_its_text(values: dict, words: str) -> None:
    """Which one, and why."""
    with pytest.raises(ConfigError) as caught:
        Tls(**values).context()
    assert words in str(caught.value)
    assert "sekrit" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_another_certificate_is_refused(pki: Path) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match=r"tls.cert: .*client.pem cannot be used"):
        Tls(cert=str(pki / "client.pem"), key=str(pki / "server.key")).context()
    assert "client.key" not in repr(Tls(cert="client.pem", key="client.key"))


async def test_an_encrypted_key_never_asks_on_the_terminal(pki: Path) -> None:
    """Without its password it is an error; with it, it works."""
    locking = ("-aes256", "-passout", "pass:sekrit", "-out", "locked.key")
    certificates.openssl(pki, "ec", "-in", "client.key", *locking)
    certificate, key = str(pki / "client.pem"), str(pki / "locked.key")
    with pytest.raises(ConfigError, match="cannot be used"):
        await asyncio.to_thread(Tls(cert=certificate, key=key).context)
    Tls(cert=certificate, key=key, password="sekrit").context()
