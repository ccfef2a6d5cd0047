"""The second sender, on aiohttp: for when the lean one is in doubt, or httptools cannot be installed."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from eventbus.errors import ConfigError
from eventbus.forward.egress import Egress, literal, resolve
from eventbus.forward.port import MAX_ANSWER_BYTES, Answer, SendFailed
from eventbus.forward.senders import OwnSender

try:
    import aiohttp
except ImportError as error:
    raise ConfigError("forwarding over HTTP needs aiohttp: pip install 'eventbus-core[http]'") from error

# Below the 5 s after which uvicorn, Node and others close an idle connection: reusing one in the moment it is being
# closed would cost the event a retry.
_KEEP_ALIVE: Final = 4.0
# aiohttp rounds longer timeouts up to the next whole second; the worker's own deadline is closer than that.
_NO_ROUNDING: Final = float("inf")
_AUTO_HEADERS: Final = ("Accept-Encoding", "Content-Type", "User-Agent")


@dataclass(kw_only=True, eq=False)
class AiohttpSender(OwnSender):
    """POST by aiohttp, over one pool."""

    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _checked: str = field(default="", init=False)

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes, *, timeout: float) -> Answer:
        """Send one POST and read its answer."""
        session = self._session
        if session is None:
            session = self._session = self._open()
        limits = aiohttp.ClientTimeout(
            total=timeout, sock_connect=min(self.connect_timeout, timeout), ceil_threshold=_NO_ROUNDING
        )
        try:
            await self._check_literal(url)
            async with session.post(
                url,
                data=body,
                headers=[*headers, ("accept-encoding", "identity")],
                skip_auto_headers=_AUTO_HEADERS,
                allow_redirects=False,
                timeout=limits,
            ) as response:
                content = await _read(response)
                return Answer(response.status, _first_of_each(response.headers), content)
        # `from None`: the client's exceptions carry the request, with its secrets, into every traceback.
        except aiohttp.ConnectionTimeoutError:
            raise SendFailed("timeout", f"no connection within {limits.sock_connect:g} s", connected=False) from None
        except TimeoutError:
            raise SendFailed("timeout", f"no complete answer within {timeout:g} s") from None
        except aiohttp.ClientConnectorDNSError as error:
            if isinstance(error.os_error, _NotAllowed):
                raise SendFailed(error.os_error.failure.kind, error.os_error.failure.text, connected=False) from None
            raise SendFailed("dns", f"host {error.host} is not known: {error.os_error}", connected=False) from None
        except (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch, ssl.SSLError) as error:
            raise SendFailed("tls", str(error), connected=False) from None
        except aiohttp.ClientConnectorError as error:
            raise SendFailed("refused", str(error), connected=False) from None
        except aiohttp.ClientPayloadError as error:
            raise SendFailed("reset", f"the answer broke off: {error}") from None
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise SendFailed("reset", str(error) or type(error).__name__) from None
        except aiohttp.ClientResponseError as error:
            raise SendFailed("protocol", f"the answer is not HTTP: {error.message}") from None
        except aiohttp.InvalidURL:
            raise SendFailed("protocol", "the URL cannot be used", connected=False) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise SendFailed("protocol", f"{type(error).__name__}: {error}") from None

    async def aclose(self) -> None:
        """Close the pool; a later `post` opens a new one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _check_literal(self, url: str) -> None:
        # aiohttp asks the resolver about names only.
        if url != self._checked:
            host = urlsplit(url).hostname or ""
            if literal(host):
                await resolve(host, 0, self.egress)
            self._checked = url

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=self.max_connections,
            keepalive_timeout=_KEEP_ALIVE,
            ssl=self.ssl_context if self.ssl_context is not None else True,
            resolver=_Resolver(self.egress),
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,  # a few KiB of gzip can be a GiB of text
            headers={"User-Agent": "eventbus"},
        )


class _NotAllowed(OSError):
    def __init__(self, failure: SendFailed) -> None:
        self.failure = failure
        super().__init__(str(failure))


class _Resolver(aiohttp.abc.AbstractResolver):
    """Gives aiohttp only addresses that may be connected to; it connects to what it is given, and nowhere else."""

    def __init__(self, egress: Egress) -> None:
        self._egress: Egress = egress

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[aiohttp.abc.ResolveResult]:
        try:
            addresses = await resolve(host, port, self._egress)
        except SendFailed as failure:
            raise _NotAllowed(failure) from None
        return [
            aiohttp.abc.ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Nothing is held."""


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    missing = MAX_ANSWER_BYTES
    while missing > 0:
        part = await response.content.read(missing)
        if not part:
            return b"".join(parts)
        parts.append(part)
        missing -= len(part)
    if not response.content.at_eof():
        # The rest is not worth reading: a new connection is cheaper than an unknown number of bytes.
        response.close()
    return b"".join(parts)


def _first_of_each(headers: Mapping[str, str]) -> dict[str, str]:
    result: dict[str, str] = {}
    for name, value in headers.items():
        result.setdefault(name.lower(), value)
    return result
