"""Endpoints: a function whose signature says what it reads and answers. The table of them is the whole API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_type_hints

from eventbus.console.answers import Lines
from eventbus.console.orders import Order
from eventbus.console.tokens import Role

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"

Method: TypeAlias = Literal["GET", "POST"]
Function: TypeAlias = Callable[..., Awaitable[Any]]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint, as the server, the document and the tests know it."""

    method: Method
    path: str
    role: Role | None
    """The least role that may call it; None: anybody, without a token."""
    call: Function
    query: type[Order] | None
    body: type[Order] | type[bytes] | None
    """A model (JSON), or bytes (JSON lines)."""
    answer: Any
    changes: bool
    """Every call leaves a line in the audit log."""
    large: bool
    """Its body may be as large as a message."""
    all_tenants: bool
    """It shows figures of all tenants: nothing for a token with tenants."""
    media: str

    @property
    def name(self) -> str:
        """The operation's name."""
        return self.call.__name__

    @property
    def about(self) -> str:
        """What it does, in its own words."""
        return self.call.__doc__ or ""

    @property
    def accepts(self) -> str:
        """The media type of its body."""
        return LINES if self.body is bytes else JSON


def endpoint(
    table: list[Route],
    method: Method,
    path: str,
    role: Role | None,
    *,
    changes: bool = False,
    large: bool = False,
    all_tenants: bool = False,
    media: str = "",
) -> Callable[[F], F]:
    """Put a function into a table; the function stays as it is.

    Its parameters: the call; `query`, a model; `body`, a model or bytes. Its answer is what it is annotated with.
    """

    def add(function: F) -> F:
        hints = get_type_hints(function, include_extras=True)
        answer = hints["return"]
        kind = media or (LINES if answer == Lines else JSON)
        table.append(
            Route(
                method,
                path,
                role,
                function,
                hints.get("query"),
                hints.get("body"),
                answer,
                changes,
                large,
                all_tenants,
                kind,
            )
        )
        return function

    return add
