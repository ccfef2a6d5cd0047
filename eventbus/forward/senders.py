"""The senders that we bring ourselves: what both are told, and which one is made."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from eventbus.forward.egress import Egress
from eventbus.forward.port import CONNECT_TIMEOUT, Sender

SenderKind: TypeAlias = Literal["lean", "aiohttp"]
SENDERS: Final[tuple[SenderKind, ...]] = ("lean", "aiohttp")


@dataclass(kw_only=True, eq=False)
class OwnSender:
    """Opens connections when they are needed, in the running loop; `aclose` when done.

    `ssl_context` is for client certificates or a private CA; without it the system's CAs decide.
    """

    max_connections: int = 256
    connect_timeout: float = CONNECT_TIMEOUT
    ssl_context: ssl.SSLContext | None = None
    egress: Egress = "any"


def default_sender(
    kind: SenderKind = "lean",
    connections: int = 256,
    egress: Egress = "any",
    ssl_context: ssl.SSLContext | None = None,
) -> Sender:
    """A new sender of ours. Raises ConfigError where its client is not installed."""
    if kind == "aiohttp":
        from eventbus.forward.aiohttp_sender import AiohttpSender

        return AiohttpSender(max_connections=connections, egress=egress, ssl_context=ssl_context)
    from eventbus.forward.lean_sender import LeanSender

    return LeanSender(max_connections=connections, egress=egress, ssl_context=ssl_context)
