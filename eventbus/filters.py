"""The filter language of the dead-letter operations: `status=500 age>1h type=order.* tenant=acme`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from eventbus import headers
from eventbus.adapter import Parked
from eventbus.durations import seconds
from eventbus.errors import ConfigError
from eventbus.facets import facet
from eventbus.naming import check_pattern, matches

if TYPE_CHECKING:
    from eventbus.deadletter import DeadLetter

FIELDS: Final = (
    "status",
    "age",
    "type",
    "tenant",
    "reason",
    "code",
    "id",
    "key",
    "error",
    "fingerprint",
    "retries",
    "redriven",
)
_TERM: Final = re.compile(r"""([a-z_]+)\s*(!=|>=|<=|=|>|<|~)\s*("[^"]*"|'[^']*'|\S+)""")

Value = Callable[["DeadLetter | Glance", float], "float | int | None"]
Test = Callable[["DeadLetter | Glance", float], bool]


class Glance:
    """What a filter may ask about a letter, read when it is asked: reading a whole letter costs ten times as much."""

    __slots__ = ("_event", "_story", "address")

    def __init__(self, parked: Parked) -> None:
        self.address, self._event, self._story = parked.address, parked.event, parked.headers

    @property
    def parked_at(self) -> datetime | None:  # noqa: D102 - as in DeadLetter, and so are those below
        seconds = headers.moment(self._story.get(headers.PARKED_AT))
        return datetime.fromtimestamp(seconds, timezone.utc) if seconds else None

    @property
    def id(self) -> str:  # noqa: D102
        return self._event.id

    @property
    def type(self) -> str:  # noqa: D102
        return self._event.type

    @property
    def tenant(self) -> str | None:  # noqa: D102
        return self._event.tenant

    @property
    def key(self) -> str | None:  # noqa: D102
        return self._event.key

    @property
    def status(self) -> int | None:  # noqa: D102
        return headers.number(self._story.get(headers.FINAL_STATUS)) or None

    @property
    def retries(self) -> int:  # noqa: D102
        return headers.number(self._story.get(headers.FINAL_RETRIES))

    @property
    def redriven(self) -> int:  # noqa: D102
        return headers.number(self._story.get(headers.REDRIVEN_COUNT))

    @property
    def reason(self) -> str:  # noqa: D102
        return headers.text(self._story.get(headers.PARK_REASON)) or "unknown"

    @property
    def error(self) -> str:  # noqa: D102
        return headers.text(self._story.get(headers.FINAL_ERROR)) or self.reason

    @property
    def error_code(self) -> str | None:  # noqa: D102
        return headers.text(self._story.get(headers.ERROR_CODE))

    @property
    def fingerprint(self) -> str:  # noqa: D102
        return facet("fingerprint", self._event, self._story)


@dataclass(frozen=True, slots=True)
class Filter:
    """Terms that must all hold. `=`, `!=`, `~` (contains) for texts; `>`, `<`, `>=`, `<=` too for numbers and age."""

    text: str = ""
    tests: tuple[Test, ...] = ()

    @classmethod
    def of(cls, where: str | Filter | None) -> Filter:
        """A filter from its text."""
        if isinstance(where, Filter):
            return where
        return cls.parse(where) if where else cls()

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Read the language; a ConfigError says what is wrong and what is allowed."""
        tests, position = [], 0
        while position < len(text):
            if text[position].isspace():
                position += 1
                continue
            match = _TERM.match(text, position)
            if match is None:
                raise ConfigError(
                    f"filter {text!r}: cannot read {text[position:]!r}; write terms such as status=500 age>1h"
                )
            name, operator, value = match.groups()
            if value[0] in "\"'":
                if len(value) < 2 or value[-1] != value[0]:
                    raise ConfigError(f"filter {text!r}: the quote that begins {value!r} is not closed")
                value = value[1:-1]
            tests.append(_test(name, operator, value))
            position = match.end()
        return cls(text, tuple(tests))

    def of_tenants(self, tenants: Collection[str]) -> Filter:
        """The same for letters of these tenants only."""
        mine = frozenset(tenants)
        return Filter(self.text, (*self.tests, lambda letter, now: letter.tenant in mine))

    def at(self, addresses: Collection[str]) -> Filter:
        """The same for letters at these addresses only."""
        places = frozenset(addresses)
        return Filter(self.text, (*self.tests, lambda letter, now: letter.address in places))

    @property
    def empty(self) -> bool:
        """Whether everything matches."""
        return not self.tests

    def matches(self, letter: DeadLetter | Glance, now: float) -> bool:
        """Whether a letter fits all terms."""
        return all(test(letter, now) for test in self.tests)


def _test(name: str, operator: str, value: str) -> Test:
    if name not in FIELDS:
        raise ConfigError(f"filter: unknown field {name!r}; use {', '.join(FIELDS)}")
    if name == "age":
        limit = seconds(value)
        return _numeric(name, operator, lambda letter, now: _age(letter, now), limit)
    digits = value.isascii() and value.isdigit() and len(value) < 16
    if name in ("retries", "redriven") or (name == "status" and digits):
        if not digits:
            raise ConfigError(f"filter: {name}{operator}{value}: must be a whole number")
        return _numeric(name, operator, lambda letter, now: getattr(letter, name), float(value))
    return _textual(name, operator, value)


def _age(letter: DeadLetter | Glance, now: float) -> float | None:
    return None if letter.parked_at is None else now - letter.parked_at.timestamp()


def _numeric(name: str, operator: str, get: Value, limit: float) -> Test:
    compare = {
        "=": lambda a: a == limit,
        "!=": lambda a: a != limit,
        ">": lambda a: a > limit,
        "<": lambda a: a < limit,
        ">=": lambda a: a >= limit,
        "<=": lambda a: a <= limit,
    }.get(operator)
    if compare is None:
        raise ConfigError(f"filter: {name} cannot be compared with {operator!r}; use = != > < >= <=")

    def test(letter: DeadLetter | Glance, now: float) -> bool:
        value = get(letter, now)
        return bool(compare(value)) if value is not None else operator == "!="

    return test


def _textual(name: str, operator: str, value: str) -> Test:
    attribute = {"code": "error_code"}.get(name, name)

    def text(letter: DeadLetter | Glance) -> str:
        found = getattr(letter, attribute)
        return "" if found is None else str(found)

    if operator == "~":
        return lambda letter, now: value.lower() in text(letter).lower()
    if operator not in ("=", "!="):
        raise ConfigError(f"filter: {name} cannot be compared with {operator!r}; use = != ~")
    wanted = operator == "="
    if name == "type":
        pattern = check_pattern(value)
        return lambda letter, now: matches(pattern, letter.type) is wanted
    if name == "status":
        digits = re.fullmatch(r"([1-5])xx", value)
        if digits is None:
            raise ConfigError(f"filter: status{operator}{value}: use a number such as 500, or a class such as 5xx")
        return lambda letter, now: (letter.status is not None and letter.status // 100 == int(digits[1])) is wanted
    if name == "fingerprint":  # its digest is enough to name it
        return lambda letter, now: (value in (letter.fingerprint, letter.fingerprint[:8])) is wanted
    return lambda letter, now: (text(letter) == value) is wanted
