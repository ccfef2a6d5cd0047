"""What the `eventbus dlq` commands share: the app, its options, and the open queue of a service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import IO, Annotated

from cyclopts import App, Parameter

from eventbus.cli.connection import AnyConnection, find, must_exist
from eventbus.cli.exits import UsageError
from eventbus.cli.output import progress
from eventbus.durations import seconds
from eventbus.filters import Filter
from eventbus.parking import DeadLetters

app = App(name="dlq", help="Dead letters: what was parked, why, and putting it back or away.")

Service = Annotated[str, Parameter(help="The service whose dead letters are meant, such as wms-cincout.")]
Where = Annotated[str | None, Parameter(help="Only these: 'status=500 age>1h type=order.* tenant=acme error~timeout'.")]
OlderThan = Annotated[str | None, Parameter(help="Only those parked longer ago than this, such as 7d.")]
Ids = Annotated[
    list[str] | None,
    Parameter(name="--id", negative=(), consume_multiple=False, help="Only this event; may be given more than once."),
]
Limit = Annotated[int | None, Parameter(help="At most so many, the oldest first.")]
DryRun = Annotated[bool, Parameter(negative=(), help="Only say what would be done.")]
AsJson = Annotated[bool, Parameter(negative=(), help="Print the result as JSON.")]


def at_least_one(option: str, value: int | None) -> int | None:
    """The number, if it is one or more (or none)."""
    if value is not None and value < 1:
        raise UsageError(f"{option} {value}: must be a whole number from 1")
    return value


@Parameter(name="*")
@dataclass(frozen=True)
class Chosen:
    """Which letters: by filter and age, or by event id; the oldest first."""

    where: Where = None
    older_than: OlderThan = None
    id: Ids = None
    limit: Limit = None

    def __post_init__(self) -> None:
        if self.id and self.where:
            raise UsageError("give --id or --where, not both")
        at_least_one("--limit", self.limit)
        Filter.of(self.filter)

    @property
    def ids(self) -> list[str] | None:
        """The event ids, if any were named."""
        return self.id or None

    @property
    def filter(self) -> str | None:
        """The filter with --older-than in it."""
        if self.older_than is None:
            return self.where
        return f"{self.where or ''} age>{seconds(self.older_than)}s".strip()


ALL = Chosen()


@asynccontextmanager
async def letters_of(service: str, connection: AnyConnection, where: str | None = None) -> AsyncIterator[DeadLetters]:
    """The open queue of a service; what was typed wrong is told before anything is opened."""
    Filter.of(where)
    if connection.api is not None:
        from eventbus.cli.remote import remote_letters

        async with remote_letters(connection.api, service, connection.token_file) as letters:
            yield letters
        return
    place = find(connection)
    target = place.service(service, connection.prefix)
    bus = place.bus()
    must_exist(bus)
    async with bus:
        yield bus.dead_letters(target)


@contextmanager
def scan_shown(letters: DeadLetters, *, quiet: bool) -> Iterator[None]:
    """A progress bar on a terminal while the whole queue is read, where there is no index to ask."""
    with progress("reading", None, quiet=quiet) as tell:
        letters.on_scan = tell
        yield


def new_file(option: str, path: str) -> IO[str]:
    """A file that was not there before."""
    try:
        return open(path, "x", encoding="utf-8", errors="backslashreplace")
    except FileExistsError:
        raise UsageError(f"{option} {path}: exists already; name a new file") from None
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written: {error.strerror}") from None
