"""What every request must pass and every answer carries, whatever its path: hosts, origins, headers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eventbus.console.problems import Problem

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Guard:
    """The outermost layer.

    `hosts`: the names this server answers to; None, where tokens are asked for, leaves that to them and to the proxy.
    Without it a page of the attacker's could be shown under a name that leads to 127.0.0.1 (DNS rebinding), and be
    of the same origin as this API. No answer allows another origin (CORS), and a request that names one is refused.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str] | None = None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def decorated(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        problem = self._problem(Headers(scope=scope))
        await (self._app if problem is None else problem.response())(scope, receive, decorated)

    def _problem(self, headers: Headers) -> Problem | None:
        host = headers.get("host", "")
        if self._hosts is not None and host_name(host) not in self._hosts:
            return Problem(
                421,
                "wrong-host",
                f"this server does not answer to the name {host!r}",
                "ask for it as localhost or 127.0.0.1, or give it tokens ([[admin.tokens]] in bus.toml)",
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return Problem(403, "wrong-origin", f"a page of {origin!r} cannot use this API", "ask from the same origin")
        return None


def host_name(host: str) -> str:
    """The name in a Host header, in lower case and without the port."""
    host = host.lower()
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
