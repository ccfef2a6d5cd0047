"""From models to Service objects: retries, endpoints, handlers. Handlers are imported here, and only if asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, cast

from eventbus.adapter import BodyMapping
from eventbus.batch import Batch
from eventbus.config.importing import find_exception, find_handler
from eventbus.config.models import AuthTable, FileTable, MappingTable, RouteTable, ServiceTable, told
from eventbus.config.problems import NOTHING, Path, Problem, one_line
from eventbus.errors import ConfigError
from eventbus.event import Event
from eventbus.forward.auth import Auth
from eventbus.policy import RetryPolicy
from eventbus.service import Service

Callback = Callable[..., object]


@dataclass(slots=True)
class Builder:
    """Builds the services of a file; goes on after a problem, so that all of them are told at once.

    With `dry` nothing outside the file is touched: no handler is imported, no token is read.
    """

    table: FileTable
    folder: FilePath
    dry: bool = False
    problems: list[Problem] = field(default_factory=list)

    def services(self) -> list[Service]:
        """All services, in the order of the file."""
        built = [self._service(name, table) for name, table in self.table.services.items()]
        return [service for service in built if service is not None]

    def _service(self, name: str, table: ServiceTable) -> Service | None:
        path: Path = ("services", name)
        permanent = self._exceptions(table.permanent, (*path, "permanent"))
        with self._telling(path, name):
            service = Service(
                name,
                prefix=table.prefix,
                concurrency=table.concurrency,
                timeout=table.timeout,
                retry=table.retry.policy() if table.retry else None,
                status=cast("Mapping[int | str, str]", table.status),
                permanent=permanent,
                permanent_codes=table.permanent_codes,
                retryable_codes=table.retryable_codes,
                unknown_code=table.unknown_code,
                strict=table.strict,
                dlq=table.dlq,
                on_exhausted=table.on_exhausted,
                prefetch=table.prefetch,
                max_local_delay=table.max_local_delay,
                max_crashes=table.max_crashes,
                grace=table.grace,
                mapping=_mapping(self.table.mapping, table.mapping),
                fairness=table.fairness.fairness() if table.fairness else False,
                rate=[rate.rate() for rate in table.rate],
                idempotency=table.idempotency.idempotency() if table.idempotency else None,
                ordering=table.ordering,
            )
            for number, route in enumerate(table.routes):
                at = (*path, "routes", number)
                with self._telling(at, name):
                    self._route(service, route, at)
            service.subscription()  # prefetch is judged against all routes
            return service
        return None

    def _route(self, service: Service, route: RouteTable, path: Path) -> None:
        retry = route.retry.policy() if route.retry else None
        if route.forward is not None:
            service.forward(
                route.on,
                to=route.forward,
                timeout=route.timeout,
                concurrency=route.concurrency,
                retry=retry,
                status=cast("Mapping[int | str, str]", route.status),
                mode=route.mode,
                sign=route.sign.values() if route.sign else None,
                breaker=route.breaker.breaker() if route.breaker else False,
                auth=self._auth(route.auth, (*path, "auth")),
                rate=[rate.rate() for rate in route.rate],
            )
            return
        assert route.handler is not None
        permanent = self._exceptions(route.permanent or (), (*path, "permanent"))
        handler = self._handler(route, (*path, "handler"))
        with self._telling((*path, "handler"), service.name, route.handler):
            self._register(service, route, retry, permanent)(handler)

    def _register(
        self, service: Service, route: RouteTable, retry: RetryPolicy | None, permanent: tuple[type[BaseException], ...]
    ) -> Callable[[Callback], Callback]:
        if route.batch is not None:
            return service.batch(
                route.on,
                size=route.batch.size,
                timeout=route.batch.timeout,
                concurrency=route.batch.concurrency,
                on_error=route.batch.on_error,
                handler_timeout=route.timeout,
                retry=retry,
                status=cast("Mapping[int | str, str]", route.status),
                permanent=permanent,
                rate=[rate.rate() for rate in route.rate],
            )
        return service.on(
            route.on,
            retry=retry,
            concurrency=route.concurrency,
            timeout=route.timeout,
            status=cast("Mapping[int | str, str]", route.status),
            permanent=permanent,
            rate=[rate.rate() for rate in route.rate],
        )

    def _handler(self, route: RouteTable, path: Path) -> Callback:
        placeholder: Callback = _batch_placeholder if route.batch else _placeholder
        if self.dry:
            return placeholder
        assert route.handler is not None
        try:
            return cast("Callback", find_handler(route.handler))
        except ConfigError as error:
            self.problems.append(Problem(path, str(error), route.handler))
            return placeholder

    def _exceptions(self, names: list[str] | tuple[str, ...], path: Path) -> tuple[type[BaseException], ...]:
        found = []
        for number, name in enumerate(names):
            if self.dry and ":" in name:
                continue
            try:
                found.append(find_exception(name))
            except ConfigError as error:
                self.problems.append(Problem((*path, number), str(error), name))
        return tuple(found)

    def _auth(self, table: AuthTable | None, path: Path) -> Auth | None:
        if table is None:
            return None
        token = "unread"
        if table.bearer_file is not None and not self.dry:
            try:
                token = (self.folder / table.bearer_file).read_text()
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "is not a text"
                raise _At("bearer_file", f"cannot be read: {table.bearer_file}: {why}") from None
        return table.auth(token)

    @contextmanager
    def _telling(self, path: Path, service: str, value: object = NOTHING) -> Iterator[None]:
        """Turn an error of the core into a problem at this place."""
        try:
            yield
        except _At as error:
            self.problems.append(Problem((*path, "auth", error.key), str(error)))
        except ConfigError as error:
            text = str(error).removeprefix(f"{service}: ").removeprefix(f"{service}.")
            key, _, rest = text.partition(" = ")
            if key in ServiceTable.model_fields and rest.partition(":")[0].isdecimal():  # prefetch = 10: ...
                path, value = (*path, key), int(rest.partition(":")[0])
            self.problems.append(Problem(path, one_line(told(text, value)), value))


class _At(ConfigError):
    def __init__(self, key: str, text: str) -> None:
        self.key = key
        super().__init__(text)


async def _placeholder(event: Event) -> None:
    """Stands for a handler that is not imported."""


async def _batch_placeholder(batch: Batch) -> None:
    """Stands for a batch handler that is not imported."""


def _mapping(common: MappingTable, own: MappingTable) -> BodyMapping:
    values: dict[str, Any] = common.model_dump(exclude_none=True) | own.model_dump(exclude_none=True)
    return BodyMapping(**values)
