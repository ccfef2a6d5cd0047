"""Where requests may go: which addresses are refused, judged after DNS and used for the connection. Pure but for DNS.

A name is looked up once, its addresses are judged, and the connection is made to one of exactly those: a name that
answers with another address the next time (rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final, Literal, TypeAlias

from eventbus.forward.port import SendFailed

Egress: TypeAlias = Literal["any", "public-only"]
EGRESS: Final[tuple[Egress, ...]] = ("any", "public-only")

# Clouds hand out credentials to whoever can send a request to one of these; no service of anybody lives there.
_METADATA: Final = tuple(
    ip_network(text)
    for text in (
        "169.254.0.0/16",  # link-local: AWS, Google, Azure, DigitalOcean, ECS
        "fe80::/10",
        "fd00:ec2::/32",  # AWS by IPv6
        "fd20:ce::/32",  # Google by IPv6
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure's wire server
        "192.0.0.192/32",  # Oracle
    )
)
_NAT64: Final = ip_network("64:ff9b::/96")


def refusal(address: str, egress: Egress = "any") -> str | None:
    """Why nothing is sent to this address; None if it may be."""
    try:
        found = ip_address(address)
    except ValueError:
        return "is not an IP address"
    candidates = _meant(found)
    if any(candidate in network for candidate in candidates for network in _METADATA):
        return "is link-local or a cloud's metadata address"
    for candidate in candidates:
        if candidate.is_unspecified or candidate.is_multicast or str(candidate) == "255.255.255.255":
            return "is not the address of one host"
        if egress == "public-only" and not candidate.is_global:
            return "is not public, and egress = 'public-only'"
    return None


def literal(host: str) -> str | None:
    """The address, if the host is written as one; None for a name."""
    try:
        return str(ip_address(host))
    except ValueError:
        return None


async def resolve(host: str, port: int, egress: Egress) -> Sequence[str]:
    """The addresses of a host that may be connected to, in the system's order. Raises SendFailed."""
    address = literal(host)
    if address is None:
        loop = asyncio.get_running_loop()
        try:
            # What /etc/hosts and nsswitch say holds; so do the odd spellings of addresses, such as 2852039166.
            entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError) as error:
            why = f"host {host} is not known: {error}; check the URL of the route, and DNS as this machine sees it"
            raise SendFailed("dns", why, connected=False) from None
        found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    else:
        found = [address]
    reasons = [refusal(candidate, egress) for candidate in found]
    allowed = [candidate for candidate, reason in zip(found, reasons, strict=True) if reason is None]
    if allowed:
        return allowed
    if not found:
        raise SendFailed("dns", f"host {host} has no address", connected=False)
    raise SendFailed("egress", f"nothing is sent to {host}: {found[0]} {reasons[0]}", connected=False)


def _meant(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """The address and the IPv4 ones that it stands for, if it is IPv6: a packet to it may end there."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]  # nothing but another spelling
    found: list[IPv4Address | None] = [address.sixtofour, address.teredo[1] if address.teredo else None]
    if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):  # ::a.b.c.d, but not ::1
        found.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [address, *(entry for entry in found if entry is not None)]
