"""The port: what an HTTP client must do to carry events. One method, two kinds of end: Answer or SendFailed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from eventbus.errors import EventBusError
from eventbus.redaction import redact

MAX_ANSWER_BYTES: Final = 64 * 1024
"""What is read of an answer's body; the rest is cut off together with the connection."""

CONNECT_TIMEOUT: Final = 5.0

FailureKind: TypeAlias = Literal["refused", "reset", "timeout", "tls", "dns", "egress", "protocol"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint answered. Header names are in lower case; of a repeated header the first counts."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    """As it came, not decompressed; at most 64 KiB of it."""


class SendFailed(EventBusError):
    """There was no usable answer. The text holds no secret.

    `connected` is False where the request certainly never left: the failure is then the endpoint's, not the event's.
    """

    def __init__(self, kind: FailureKind, text: str, *, connected: bool = True) -> None:
        self.kind: FailureKind = kind
        self.text = redact(text)
        self.connected = connected
        self.__suppress_context__ = True  # a client's exception carries the request, with its secrets, into tracebacks
        super().__init__(kind, self.text)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


class Sender(Protocol):
    """Sends one POST and reads one answer: no redirects, no cookies, no proxies from the environment, no retries.

    Retries of the client would multiply with those of the bus (Dapr issue 5670).
    """

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes, *, timeout: float) -> Answer:
        """The answer, complete within `timeout` seconds from now, connecting included. Raises SendFailed."""

    async def aclose(self) -> None:
        """Let go of every connection this sender has made."""
