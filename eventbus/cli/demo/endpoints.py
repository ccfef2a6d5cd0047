"""A small web server on 127.0.0.1 whose endpoints answer 200, 409, 425, 429, 500 and 404."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

Witness = Callable[[str, int], None]
"""Told the event's id and the status that was answered."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What an endpoint answers: these statuses first, one per call for the same event, and 200 after that.

    With `until_fixed` the last status is answered until somebody repairs the endpoint.
    """

    statuses: tuple[int, ...] = ()
    text: str = ""
    retry_after: int | None = None
    until_fixed: bool = False


BEHAVIOURS: Final[Mapping[str, Behaviour]] = {
    "orders": Behaviour(),
    "stock": Behaviour((409, 409), "shelf A-17 is locked by another picker"),
    "delivery": Behaviour((425,), "the truck is not loaded yet", retry_after=1),
    "labels": Behaviour((429,), "label printer: too many requests", retry_after=1),
    "invoices": Behaviour((500,), "SEFAZ gateway: connection pool exhausted", until_fixed=True),
    "prices": Behaviour((404,), "no such product: 7891000100103", until_fixed=True),
}


@dataclass(slots=True)
class Endpoints:
    """All endpoints of the demo."""

    witness: Witness
    fixed: bool = False
    _calls: Counter[str] = field(default_factory=Counter)

    async def answer(self, request: web.Request) -> web.Response:
        """One event was posted."""
        behaviour = BEHAVIOURS[request.match_info["name"]]
        await request.read()
        id = request.headers["ce-id"]
        self._calls[id] += 1
        status = self._status(behaviour, self._calls[id])
        self.witness(id, status)
        if status == 200:
            return web.Response(text="ok")
        headers = {} if behaviour.retry_after is None else {"Retry-After": str(behaviour.retry_after)}
        return web.Response(status=status, text=behaviour.text, headers=headers)

    def _status(self, behaviour: Behaviour, call: int) -> int:
        if behaviour.until_fixed:
            return 200 if self.fixed else behaviour.statuses[-1]
        return behaviour.statuses[call - 1] if call <= len(behaviour.statuses) else 200


@asynccontextmanager
async def serving(endpoints: Endpoints) -> AsyncIterator[str]:
    """The server, on a port of the system's choice; gives its address."""
    application = web.Application()
    names = "|".join(BEHAVIOURS)
    application.router.add_post(f"/{{name:{names}}}", endpoints.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
