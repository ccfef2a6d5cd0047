"""The whole API as one ASGI app: who asks, may they, what do they say, what is answered, what is noted."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, Final

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from eventbus import telemetry
from eventbus.console import letters, openapi, watching
from eventbus.console.answers import encoded
from eventbus.console.desk import Call, Desk
from eventbus.console.guard import Guard
from eventbus.console.limits import RateLimit
from eventbus.console.orders import Order
from eventbus.console.problems import Problem, of_error, of_validation
from eventbus.console.routing import JSON, LINES, Route
from eventbus.console.tokens import LOCAL, Caller, Keyring, Rejected
from eventbus.errors import EventBusError

SMALL: Final = 1024 * 1024
"""The largest body but for a message's own."""
LARGE: Final = 32 * 1024 * 1024
RATE: Final = 50.0

ADMIN_ROUTES: Final[tuple[Route, ...]] = (*watching.ROUTES, *watching.ADMIN, *letters.ROUTES)
HEALTH_ROUTES: Final[tuple[Route, ...]] = tuple(watching.ROUTES)
OPEN_HEALTH_ROUTES: Final = tuple(route for route in HEALTH_ROUTES if not route.path.startswith("/admin/"))
"""What a consumer serves to everybody, where others than this machine can ask and there are no tokens."""


def make_app(
    desk: Desk,
    *,
    routes: Sequence[Route] = ADMIN_ROUTES,
    keyring: Keyring | None = None,
    hosts: Collection[str] | None = None,
    rate: float = RATE,
    max_body: int = LARGE,
    now: Callable[[], float] = time.time,
) -> ASGIApp:
    """The app. Without tokens everybody who reaches it is an admin: `server` lets that be on loopback only."""
    front = _Front(desk, keyring or Keyring(()), RateLimit(rate), max_body, now)
    described = json.dumps(openapi.document(routes)).encode()

    async def document(request: Request) -> Response:
        return Response(described, media_type=JSON)

    paths = [
        StarletteRoute(route.path.replace("{id}", "{id:path}"), front.answering(route), methods=[route.method])
        for route in routes
    ]
    app = Starlette(
        routes=[StarletteRoute("/openapi.json", document), *paths],
        exception_handlers={HTTPException: _of_starlette},
    )
    return Guard(app, hosts=hosts)


class _Front:
    """What stands between a request and its endpoint."""

    def __init__(self, desk: Desk, keyring: Keyring, limit: RateLimit, max_body: int, now: Callable[[], float]) -> None:
        self._desk, self._keyring, self._limit = desk, keyring, limit
        self._max_body, self._now = max_body, now

    def answering(self, route: Route) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint as the web framework calls it: nothing gets out of it but an answer."""

        async def answer(request: Request) -> Response:
            try:
                return await self._answer(route, request)
            except Problem as problem:
                return problem.response()
            except ClientDisconnect:
                return Response(status_code=499)  # nobody is there to read it
            except Exception as error:  # noqa: BLE001 - a bug of ours: told in the log, not to a stranger
                telemetry.log(logging.ERROR, "admin_failed", {"endpoint": route.name}, exc_info=error)
                return Problem(
                    500, "bug", "this is a bug of the server", "its log says more; please report it"
                ).response()

        return answer

    async def _answer(self, route: Route, request: Request) -> Response:
        caller = self._admitted(route, request)
        arguments: dict[str, Any] = {}
        if route.query is not None:
            arguments["query"] = _checked_query(route.query, request)
        elif request.query_params:
            raise Problem(400, "bad-request", "query: this endpoint knows no parameters", "leave them out")
        if route.body is not None:
            raw = await _read(request, route, self._max_body if route.large else min(SMALL, self._max_body))
            arguments["body"] = raw if route.body is bytes else _checked_body(route.body, raw)
        call = Call(self._desk, request, caller)
        try:
            try:
                answer = await route.call(call, **arguments)
                if route.media == LINES:
                    return await _streamed(answer)
            except EventBusError as error:
                raise of_error(error) from None
        except Problem as problem:
            if route.changes:
                self._note(route, request, caller, "failed", {"error": problem.detail})
            raise
        if route.changes:
            self._note(route, request, caller, "done", call.audit)
        if route.media != JSON:
            return Response(answer, headers={"content-type": f"{route.media}; version=0.0.4; charset=utf-8"})
        return Response(encoded(answer), media_type=JSON)

    def _admitted(self, route: Route, request: Request) -> Caller:
        """Who asks, if they may ask this now."""
        caller, refused = LOCAL, None
        if route.role is not None:
            try:
                caller = self._keyring.caller(request.headers.get("authorization"), self._now())
            except Rejected as error:
                refused = error
        known = self._keyring and route.role is not None and refused is None
        self._within_rate(f"token {caller.name}" if known else f"address {_address(request)}")
        if refused is not None:
            help = "send 'Authorization: Bearer TOKEN'; `eventbus token NAME --role viewer` makes one"
            raise Problem(401, "no-token", str(refused), help, headers={"www-authenticate": 'Bearer realm="eventbus"'})
        if route.role is not None and not caller.may(route.role):
            if route.changes:
                self._note(route, request, caller, "refused", {"error": f"needs the role {route.role}"})
            raise Problem(
                403, "role", f"{caller.name} has the role {caller.role}; this needs {route.role}", "use another token"
            )
        if route.all_tenants and caller.tenants is not None:
            raise Problem(403, "tenants", f"{caller.name} is for some tenants; this is about all", "use another token")
        return caller

    def _within_rate(self, who: str) -> None:
        wait = self._limit.take(who, time.monotonic())
        if wait:
            help = f"wait {wait} s; [admin] rate in bus.toml allows more"
            raise Problem(429, "too-many", f"{who} asks too often", help, headers={"retry-after": str(wait)})

    def _note(self, route: Route, request: Request, caller: Caller, outcome: str, fields: dict[str, object]) -> None:
        facts: dict[str, object] = {
            "by": caller.name,
            "role": caller.role,
            "address": _address(request),
            "endpoint": route.name,
            "queue": request.path_params.get("queue"),
            "outcome": outcome,
        }
        telemetry.log(logging.WARNING, "audit", facts | fields)


def _checked_query(model: type[Order], request: Request) -> Order:
    try:
        return model.model_validate(model.from_query(request.query_params.multi_items()))
    except ValidationError as error:
        raise of_validation(error, "query") from None


def _checked_body(model: type[Any], raw: bytes) -> object:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise of_validation(error, "body") from None


async def _read(request: Request, route: Route, most: int) -> bytes:
    """The body, if it is of the right kind and not too large. Another kind could come from a form on any web page."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != route.accepts:
        raise Problem(415, "media-type", f"the content type is {kind!r}", f"send 'Content-Type: {route.accepts}'")
    too_large = Problem(413, "too-large", f"the body has more than {most} bytes", "send it in pieces")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


async def _streamed(lines: AsyncIterator[str]) -> Response:
    """The lines as they come; what goes wrong before the first one is still an answer of its own."""
    first = await anext(lines, None)

    async def all_lines() -> AsyncIterator[str]:
        if first is not None:
            yield first
        async for line in lines:
            yield line

    return StreamingResponse(all_lines(), media_type=LINES)


def _address(request: Request) -> str:
    return request.client.host if request.client else "unknown"


async def _of_starlette(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    help = "/openapi.json lists what there is"
    if error.status_code == 405:
        detail = f"{request.url.path} cannot be asked with {request.method}"
        return Problem(405, "method", detail, help, headers=error.headers).response()
    return Problem(error.status_code, "not-found", f"there is no {request.url.path}", help).response()
