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
from eventbus.config.models import (
    AuthTable,
    BatchTable,
    FileTable,
    MappingTable,
    RouteTable,
    ServiceTable,
    SignTable,
    TlsTable,
    told,
)
from eventbus.config.problems import NOTHING, Path, Problem, one_line
from eventbus.errors import ConfigError
from eventbus.event import Event
from eventbus.forward.auth import Auth
from eventbus.forward.signing import Signer
from eventbus.forward.tls import Tls, is_pem
from eventbus.policy import RetryPolicy
from eventbus.service import BatchWindow, Service

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
                concurrency=route.batch.concurrency if route.batch else route.concurrency,
                retry=retry,
                status=cast("Mapping[int | str, str]", route.status),
                mode=route.mode,
                batch=_window(route.batch),
                sign=self._sign(route.sign),
                breaker=route.breaker.breaker() if route.breaker else False,
                auth=self._auth(route.auth),
                tls=self._tls(route.tls),
                egress=route.egress,
                sender=route.sender,
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
                size=route.batch.size or 1000,
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

    def _auth(self, table: AuthTable | None) -> Auth | None:
        if table is None:
            return None
        key = ("auth", "bearer_file") if table.basic is None else ("auth", "basic", "password_file")
        return table.auth(self._secret(table.file, *key))

    def _sign(self, table: SignTable | None) -> list[str] | None:
        if table is None:
            return None
        secrets = table.values(self._secret(table.secret_file, "sign", "secret_file"))
        try:
            Signer(*secrets)
        except ConfigError as error:
            raise _At(("sign", "secret_file"), str(error).removeprefix("sign: ").removeprefix("sign.")) from None
        return secrets

    def _secret(self, file: str | None, *key: str) -> str:
        """What stands in a file of secrets; its place in bus.toml is told if it cannot be read."""
        if file is None or self.dry:
            return "unread"
        try:
            return (self.folder / file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not a text"
            raise _At(key, f"cannot be read: {file}: {why}") from None

    def _tls(self, table: TlsTable | None) -> Tls | None:
        if table is None:
            return None
        key = table.key.get_secret_value() if table.key else None
        password = table.password.get_secret_value() if table.password else None
        found = Tls(ca=self._pem(table.ca), cert=self._pem(table.cert), key=self._pem(key), password=password)
        if not self.dry:
            try:
                found.context()
            except ConfigError as error:
                place, _, text = str(error).partition(": ")
                raise _At(tuple(place.split(".")), text) from None
        return found

    def _pem(self, source: str | None) -> str | None:
        return source if source is None or is_pem(source) else str(self.folder / source)

    @contextmanager
    def _telling(self, path: Path, service: str, value: object = NOTHING) -> Iterator[None]:
        """Turn an error of the core into a problem at this place."""
        try:
            yield
        except _At as error:
            self.problems.append(Problem((*path, *error.key), str(error)))
        except ConfigError as error:
            text = str(error).removeprefix(f"{service}: ").removeprefix(f"{service}.")
            key, _, rest = text.partition(" = ")
            if key in ServiceTable.model_fields and rest.partition(":")[0].isdecimal():  # prefetch = 10: ...
                path, value = (*path, key), int(rest.partition(":")[0])
            self.problems.append(Problem(path, one_line(told(text, value)), value))


class _At(ConfigError):
    def __init__(self, key: tuple[str, ...], text: str) -> None:
        self.key = key
        super().__init__(text)


async def _placeholder(event: Event) -> None:
    """Stands for a handler that is not imported."""


async def _batch_placeholder(batch: Batch) -> None:
    """Stands for a batch handler that is not imported."""


def _window(table: BatchTable | None) -> BatchWindow | None:
    """How a batch for an endpoint is filled: a hundred at a time, because servers limit the size of a request."""
    return None if table is None else BatchWindow(table.size or 100, table.timeout, table.on_error)


def _mapping(common: MappingTable, own: MappingTable) -> BodyMapping:
    values: dict[str, Any] = common.model_dump(exclude_none=True) | own.model_dump(exclude_none=True)
    return BodyMapping(**values)
