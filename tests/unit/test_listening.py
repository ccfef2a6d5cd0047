"""Where to listen: the same words for the publishing listener, the admin API and health."""

from __future__ import annotations

import pytest

from eventbus.errors import ConfigError
from eventbus.listening import Address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("8000", "127.0.0.1", 8000),
        (":8000", "127.0.0.1", 8000),
        ("0.0.0.0:80", "0.0.0.0", 80),
        ("[::1]:80", "::1", 80),
        ("localhost:0", "localhost", 0),
    ],
)
def test_an_address_to_listen_on(text: str, host: str, port: int) -> None:
    """A port alone is for this machine."""
    assert Address.parse(text) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *[(text, "write HOST:PORT, such as") for text in ("", "x", "a:b", "host:", "host:70000", "a:-1", "a: 80")],
        *[(text, "in brackets") for text in ("::1", "::1:80", "1:2:3")],
    ],
)
def test_addresses_that_are_none(text: str, words: str) -> None:
    """One line that says how to write it."""
    with pytest.raises(ConfigError, match=words):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        *[(text, True) for text in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "LOCALHOST:1")],
        *[(text, False) for text in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "bus.example:1")],
    ],
)
def test_who_can_reach_an_address(text: str, loopback: bool) -> None:
    """Only this machine, or others too."""
    address = Address.parse(text)
    assert (str(address), address.is_loopback) == (text, loopback)


def test_an_address_that_is_taken() -> None:
    """Says which, and why not."""
    with Address("127.0.0.1", 0).bind() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"'127.0.0.1:{port}': cannot be listened on: Address already in use"):
            Address("127.0.0.1", port).bind()


def test_a_host_that_nobody_knows() -> None:
    """Says so, instead of a traceback."""
    with pytest.raises(ConfigError, match=r"'no-such-host\.invalid:0': the host is not known"):
        Address("no-such-host.invalid", 0).bind()
