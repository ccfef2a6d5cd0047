"""The admin API as the commands ask it: one client, its token, and its refusals as the errors of a broker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import httpx

from eventbus.cli.exits import Failure, UsageError
from eventbus.errors import BrokerError, BrokerUnavailable, ConfigError, EventBusError, UnknownLetter, UnknownService

_PATIENCE: Final = httpx.Timeout(60.0, read=400.0)
_TRIES: Final = 5


@asynccontextmanager
async def admin_api(url: str, token_file: str | None) -> AsyncIterator[Api]:
    """The admin API at an address, or a consumer's `--health`."""
    try:
        base = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(f"--api: is no URL: {error}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise UsageError("--api: write http://127.0.0.1:8000 or https://...")
    local = base.host in ("localhost", "127.0.0.1", "::1")
    token = _token(token_file)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    # No redirects: the token is for this server alone.
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=_PATIENCE, trust_env=not local) as client:
        yield Api(client)


class Api:
    """Asks, waits where it is told to, and raises what straight on the broker would have been raised."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str, query: Mapping[str, object] | None = None) -> Any:
        """What it answers."""
        return await self.ask("GET", path, params=given(query or {}))

    async def post(self, path: str, order: Mapping[str, object]) -> Any:
        """What came of an order."""
        return await self.ask("POST", path, json=given(order))

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """A request as httpx takes it."""
        for _ in range(_TRIES):
            try:
                answer = await self._client.request(method, path, **options)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None
            if answer.status_code != 429:
                break
            await asyncio.sleep(min(60.0, float(answer.headers.get("retry-after", 1))))
        if answer.status_code != 200:
            _refuse(answer)
        return answer.json()

    async def lines(self, path: str, query: Mapping[str, object]) -> AsyncIterator[str]:
        """Lines by their ends alone, as they are sent: httpx would also split at characters that a text may hold."""
        try:
            async with self._client.stream("GET", path, params=given(query)) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    _refuse(answer)
                rest = b""
                async for piece in answer.aiter_bytes():
                    *whole, rest = (rest + piece).split(b"\n")
                    for line in whole:
                        yield line.decode()
                if rest:
                    yield rest.decode()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.HTTPError) -> BrokerUnavailable:
        why = " ".join(str(error).split()) or type(error).__name__
        return BrokerUnavailable(f"{self._client.base_url}: the admin API does not answer: {why}; is it served there?")


def given(values: Mapping[str, object]) -> dict[str, Any]:
    """Those that are given."""
    return {name: value for name, value in values.items() if value is not None}


def _token(file: str | None) -> str | None:
    """The token from a file, else from EVENTBUS_TOKEN: a command line can be read by every user of the machine."""
    if file is None:
        return os.environ.get("EVENTBUS_TOKEN") or None
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {file}: cannot be read: {getattr(error, 'strerror', '') or error}") from None


def _refuse(answer: httpx.Response) -> NoReturn:
    """The error that straight on the broker would have been raised."""
    try:
        problem = answer.json()
        code, detail, help = problem["type"].rpartition(":")[2], problem["detail"], problem["help"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Failure(
            f"{answer.url.copy_with(query=None)} answered {answer.status_code}; is it an admin API?"
        ) from None
    errors: dict[str, type[EventBusError]] = {
        "unknown-queue": UnknownService,
        "unknown-message": UnknownLetter,
        "bad-request": ConfigError,
        "not-possible": ConfigError,
        "broker-unavailable": BrokerUnavailable,
        "broker-refused": BrokerError,
    }
    known = errors.get(code)
    raise known(detail) if known else Failure(f"the admin API refused: {detail}; {help}")
