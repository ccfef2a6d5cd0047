"""Where requests may go: addresses judged after DNS, the connection made to exactly those, no way round it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from eventbus.errors import ConfigError
from eventbus.forward import Endpoint, SendFailed
from eventbus.forward.aiohttp_sender import AiohttpSender
from eventbus.forward.egress import refusal, resolve
from eventbus.forward.lean_sender import LeanSender

METADATA = [
    *("169.254.169.254", "169.254.170.2", "169.254.0.1", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fd20:ce::254"),
    *("100.100.100.200", "168.63.129.16", "192.0.0.192"),
    # The same, dressed up as IPv6: mapped, NAT64, 6to4, Teredo, and the old compatible form.
    *("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "::169.254.169.254"),
    "2001:0:5ef5:79fd:0:0:5601:5601",
]
PRIVATE = [
    *("127.0.0.1", "127.9.9.9", "::1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fc00::1", "fd12::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "198.18.0.1", "192.0.2.1"),
]
PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1"]
NOBODY = ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255"]


@pytest.mark.parametrize("address", METADATA)
def test_metadata_and_link_local_addresses_are_always_refused(address):
    """Whoever can send a request there gets the machine's credentials."""
    assert refusal(address) == refusal(address, "public-only") == "is link-local or a cloud's metadata address"


@pytest.mark.parametrize("address", NOBODY)
def test_addresses_of_nobody_are_refused(address):
    """0.0.0.0 is this machine to some systems; a group is no endpoint."""
    assert refusal(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_refused_to_third_parties_only(address):
    """A sidecar listens on loopback; a customer's webhook does not."""
    assert refusal(address) is None
    assert refusal(address, "public-only") == "is not public, and egress = 'public-only'"


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_pass(address):
    """With either setting."""
    assert refusal(address) is None
    assert refusal(address, "public-only") is None


def test_what_is_no_address_is_refused():
    """Whatever a resolver may say."""
    assert refusal("elsewhere") == "is not an IP address"


@pytest.mark.parametrize("url", ["http://169.254.169.254/", "http://[fe80::1]/", "http://[::ffff:169.254.169.254]/x"])
def test_such_an_address_in_a_url_is_refused_at_once(url):
    """Before anything is opened, in one line."""
    with pytest.raises(ConfigError, match="nothing is sent there"):
        Endpoint(url)
    with pytest.raises(ConfigError, match="is not public"):
        Endpoint("http://10.0.0.1/", egress="public-only")


class Names:
    """A DNS whose answers a test may change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

        async def getaddrinfo(loop, host, port, **kwargs):
            if host.replace(".", "").replace(":", "").isalnum() and not host.endswith(".example"):
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
            self.asked += 1
            addresses = self.answers[min(self.asked, len(self.answers)) - 1]
            kinds = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
            return [(kind, socket.SOCK_STREAM, 6, "", (a, port)) for kind, a in zip(kinds, addresses, strict=True)]

        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)


@pytest.fixture(params=[LeanSender, AiohttpSender])
def make(request):
    return request.param


async def test_a_name_that_leads_to_metadata_is_refused_after_dns(make, monkeypatch):
    """No connection is tried."""
    Names(monkeypatch, ["169.254.169.254"])
    sender = make()
    with pytest.raises(SendFailed) as caught:
        await sender.post("http://innocent.example/", [], b"", timeout=5)
    await sender.aclose()
    assert (caught.value.kind, caught.value.connected) == ("egress", False)
    assert "innocent.example: 169.254.169.254 is link-local" in caught.value.text


async def test_an_odd_spelling_of_an_address_is_refused_too(make):
    """2852039166 is 169.254.169.254 to the system's resolver."""
    sender = make()
    for host in ("2852039166", "0xA9FEA9FE", "169.254.43518"):
        with pytest.raises(SendFailed) as caught:
            await sender.post(f"http://{host}/", [], b"", timeout=5)
        assert caught.value.kind in ("egress", "protocol")  # aiohttp takes some of them for no host at all
        assert not caught.value.connected
    await sender.aclose()


async def test_a_name_that_changes_its_mind_gains_nothing(make, monkeypatch):
    """Rebinding: the address that was judged is the one that is connected to."""
    connected: list[str] = []

    async def serve(reader, writer):
        connected.append(writer.get_extra_info("sockname")[0])
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 X\r\nconnection: close\r\n\r\n")
        writer.close()

    names = Names(monkeypatch, ["127.0.0.1"], ["169.254.169.254"])
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        sender = make()
        answer = await sender.post(f"http://rebinding.example:{port}/", [], b"", timeout=5)
        await sender.aclose()
    assert (answer.status, names.asked, connected) == (204, 1, ["127.0.0.1"])


async def test_only_the_allowed_addresses_of_a_name_are_used(monkeypatch):
    """A host with a link-local address beside its real one is reached by the real one."""
    Names(monkeypatch, ["fe80::1", "127.0.0.1", "169.254.169.254"])
    assert await resolve("both.example", 80, "any") == ["127.0.0.1"]
    with pytest.raises(SendFailed) as caught:
        await resolve("both.example", 80, "public-only")
    assert caught.value.kind == "egress"


async def test_public_only_holds_after_dns(make, monkeypatch):
    """A customer's name that leads into our network."""
    Names(monkeypatch, ["10.0.0.7"])
    sender = make(egress="public-only")
    with pytest.raises(SendFailed) as caught:
        await sender.post("https://customer.example/", [], b"", timeout=5)
    await sender.aclose()
    assert "10.0.0.7 is not public" in str(caught.value)


async def test_a_client_of_ones_own_cannot_be_held_to_it():
    """So asking for it is an error at start, and not a promise that is broken silently."""
    endpoint = Endpoint("https://customer.example/", egress="public-only")
    with pytest.raises(ConfigError, match="'lean' and 'aiohttp' only"):
        await endpoint.open(object())  # type: ignore[arg-type]
    await endpoint.aclose()


async def test_a_host_that_nobody_knows_is_a_warning_at_start(monkeypatch, caplog):
    """Not death: it may be there when the first event comes."""

    async def unknown(loop, host, port, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", unknown)
    endpoint = Endpoint("https://nowhere.example/events?token=hunter2")
    with caplog.at_level("WARNING", "eventbus"):
        await endpoint.open()
        async with asyncio.timeout(5):
            while not caplog.records:
                await asyncio.sleep(0)
    await endpoint.aclose()
    (record,) = caplog.records
    assert record.event == "endpoint_unknown"
    assert "host nowhere.example is not known" in record.fields["error"]
    assert "hunter2" not in record.getMessage()
