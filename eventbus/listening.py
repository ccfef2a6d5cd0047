"""Where to listen, for the publishing listener, the admin API and health: the address, who reaches it, the token."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Final

from eventbus.errors import ConfigError

BACKLOG: Final = 1024


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port; port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read 127.0.0.1:8000, [::1]:8000 or localhost:8000; a port alone is for this machine. Raises ConfigError."""
        host, _, port = text.strip().rpartition(":")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"listen = {text!r}: write HOST:PORT, such as 127.0.0.1:8000, or a port alone")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigError(f"listen = {text!r}: write an IPv6 address in brackets, such as [::1]:8000")
        return cls(host or "127.0.0.1", int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it, as far as its name tells."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def bind(self) -> socket.socket:
        """A listening socket. Raises ConfigError where there is none to be had."""
        try:
            infos = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError(f"listen = {str(self)!r}: the host is not known: {error.strerror}") from None
        # A name with two addresses: the IPv4 one, which is what others mean by localhost.
        family, kind, protocol, _, where = min(infos, key=lambda info: info[0] != socket.AF_INET)
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except OSError as error:
            listening.close()
            raise ConfigError(f"listen = {str(self)!r}: cannot be listened on: {error.strerror}") from None
        return listening

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Listening:
    """An address, and the token that publishers send; none where only this machine can reach the address."""

    address: Address
    token: str = field(default="", repr=False)


def check_token(token: str) -> str:
    """The token without the newline that its file ends in. Raises ConfigError for one that no header can carry."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("the token must be printable ASCII without spaces, and not empty")
    return token
