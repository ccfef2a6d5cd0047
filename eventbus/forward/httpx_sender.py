"""The other sender: a user's own `httpx.AsyncClient`, for in-process ASGI apps, special auth, HTTP/2.

aiohttp is the default because httpx spends some thirty times the CPU per request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from http.cookiejar import Cookie, DefaultCookiePolicy
from typing import TYPE_CHECKING, Final

import anyio

from eventbus.errors import ConfigError
from eventbus.forward.port import CONNECT_TIMEOUT, MAX_ANSWER_BYTES, Answer, SendFailed

if TYPE_CHECKING:
    from urllib.request import Request

try:
    import httpx
except ImportError as error:
    raise ConfigError("this sender needs httpx: pip install 'eventbus-core[http]'") from error

_CLOSED_EARLY: Final = ("disconnected", "closed connection")


class HttpxSender:
    """POST by a ready-made client. Its auth, TLS, proxies and cookies are the user's; `aclose` leaves it open.

    One thing is changed on the client: cookies that an endpoint sets are no longer stored. `max_in_flight` must not
    be above the client's `max_connections` (100 unless set otherwise), or its pool leaks, see below.
    """

    def __init__(
        self, client: httpx.AsyncClient, *, max_in_flight: int = 100, connect_timeout: float = CONNECT_TIMEOUT
    ) -> None:
        self._client = client
        self._connect_timeout = connect_timeout
        # A request whose wait in httpcore's queue ends, by timeout or cancellation, just as it is given a connection
        # leaves that connection in the pool for ever (httpcore issue 1093). Waiting here, nobody queues there.
        self._places = asyncio.Semaphore(max_in_flight)
        client.cookies.jar.set_policy(_StoreNone())

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes, *, timeout: float) -> Answer:
        """Send one POST and read its answer."""
        limits = httpx.Timeout(timeout, connect=min(self._connect_timeout, timeout))
        started = False
        try:
            # httpx knows no total: its read timeout starts again with every byte of a slow body. anyio's scope and not
            # asyncio's timeout, because httpcore's cleaning up is shielded only against the former.
            with anyio.fail_after(timeout):
                async with self._places:
                    started = True
                    async with self._client.stream(
                        "POST",
                        url,
                        headers=[*headers, ("accept-encoding", "identity"), ("user-agent", "eventbus")],
                        content=body,
                        timeout=limits,
                        follow_redirects=False,
                    ) as response:
                        content = await _read(response)
                        return Answer(response.status_code, _first_of_each(response.headers), content)
        # `from None`: the client's exceptions carry the request, with its secrets, into every traceback.
        except (httpx.ConnectTimeout, httpx.PoolTimeout):
            raise SendFailed("timeout", f"no connection within {limits.connect:g} s", connected=False) from None
        except (httpx.TimeoutException, TimeoutError):
            text = f"no complete answer within {timeout:g} s" if started else f"no free connection within {timeout:g} s"
            raise SendFailed("timeout", text, connected=started) from None
        except httpx.ConnectError as error:
            raise _not_connected(error) from None
        except httpx.RemoteProtocolError as error:
            early = any(word in str(error) for word in _CLOSED_EARLY)
            raise SendFailed("reset" if early else "protocol", str(error)) from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise SendFailed("protocol", "the URL cannot be used", connected=False) from None
        except httpx.NetworkError as error:
            raise SendFailed("reset", str(error) or type(error).__name__) from None
        # Anything: an in-process app's own exception comes out of the client too, and means what a 500 means.
        except Exception as error:  # noqa: BLE001
            raise SendFailed("protocol", f"{type(error).__name__}: {error}") from None

    async def aclose(self) -> None:
        """Nothing: who made the client closes it."""


class _StoreNone(DefaultCookiePolicy):
    """Cookies the user put into the client are sent; those of endpoints are not kept."""

    def set_ok(self, cookie: Cookie, request: Request) -> bool:
        return False


async def _read(response: httpx.Response) -> bytes:
    parts: list[bytes] = []
    size = 0
    # Raw: a few KiB of gzip can be a GiB of text. Leaving the loop early closes the connection.
    async for part in response.aiter_raw():
        parts.append(part)
        size += len(part)
        if size >= MAX_ANSWER_BYTES:
            break
    return b"".join(parts)[:MAX_ANSWER_BYTES]


def _not_connected(error: httpx.ConnectError) -> SendFailed:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLError):
            return SendFailed("tls", str(cause), connected=False)
        if isinstance(cause, socket.gaierror):
            return SendFailed("dns", f"the host is not known: {cause}", connected=False)
    return SendFailed("refused", str(error), connected=False)


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _first_of_each(headers: httpx.Headers) -> dict[str, str]:
    result: dict[str, str] = {}
    for name, value in headers.multi_items():
        result.setdefault(name.lower(), value)
    return result
