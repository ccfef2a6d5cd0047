"""What a request may say: queries and bodies as models. They check the input and are the schemas in the document."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from eventbus.canary import Canary
from eventbus.errors import ConfigError
from eventbus.parking import MAX_IDS, StatKey

MOST_AT_ONCE: Final = 200
"""Letters on one page: each comes with its body."""


def _whole(value: object) -> object:
    """JSON knows one kind of number, so 10.0 is a whole one; a text is none."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_WHOLE: Final = BeforeValidator(_whole)
Many = Annotated[int, Field(ge=1, le=1_000_000_000), _WHOLE]
Where = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1000,
        description="Only these: terms that must all hold, such as `status=500 age>1h type=order.* tenant=acme`.",
        examples=["status=500 age>1h"],
    ),
]
Place = Annotated[
    str, Field(min_length=1, max_length=500, description="Go on behind this place: `next` of the answer before.")
]
Id = Annotated[str, Field(min_length=1, max_length=1000, description="An event's id.")]
Address = Annotated[str, Field(min_length=1, max_length=500, description="Where a message stands in the queue.")]


class Order(BaseModel):
    """Input: an unknown name or a wrong type is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def from_query(cls, pairs: list[tuple[str, str]]) -> dict[str, object]:
        """The values of a query string by the types of the model; what does not fit stays a text, and is refused."""
        values: dict[str, object] = {}
        for name, text in pairs:
            values[name] = [values[name], text] if name in values else _value(text, _types(cls, name))
        return values


def _types(model: type[Order], name: str) -> set[object]:
    schema: dict[str, Any] = model.model_json_schema()["properties"].get(name, {})
    return {part.get("type") for part in schema.get("anyOf", [schema])}


def _value(text: str, types: set[object]) -> object:
    if "integer" in types and re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if "boolean" in types and text in ("true", "false"):
        return text == "true"
    return text


class FilterQuery(Order):
    """Which messages."""

    where: Where | None = None


class ListQuery(FilterQuery):
    """A page of messages, oldest first."""

    limit: Annotated[int, Field(ge=1, le=MOST_AT_ONCE), _WHOLE] = 20
    after: Place | None = None


class StatsQuery(FilterQuery):
    """What to count by."""

    by: StatKey = "reason"


class CanaryOrder(Order):
    """The first few letters go alone; the others follow only if not too many of them are parked again."""

    letters: Annotated[int, Field(ge=1, le=1000), _WHOLE]
    watch: Annotated[float, Field(gt=0, le=300, allow_inf_nan=False, description="Seconds to watch them.")] = 30.0
    tolerated: Annotated[float, Field(ge=0, lt=1, description="The share of them that may be parked again.")] = 0.1

    def canary(self) -> Canary:
        """The same for the core."""
        return Canary(self.letters, self.watch, self.tolerated)


class MoveOrder(Order):
    """Which messages, and how many at most: the oldest first."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=MAX_IDS)] | None = None
    where: Where | None = None
    after: Place | None = None
    dry_run: Annotated[bool, Field(description="Only say what would be done.")] = False


class RedriveOrder(MoveOrder):
    """Put messages back to their service. `{"limit": 10}` puts back the oldest ten."""

    limit: Many | None = None
    rate: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, description="At most so many a second.")] | None = (
        None
    )
    canary: CanaryOrder | None = None
    reset_attempts: Annotated[bool, Field(description="Count the retries from zero again.")] = False
    via: Annotated[Literal["queue", "retry"], Field(description="`retry`: by the retry road, after `delay`.")] = "queue"
    delay: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False, description="Seconds on the retry road.")] = 5.0


class PurgeOrder(MoveOrder):
    """Remove messages for good. `limit` is obligatory: what is parked after you counted was not asked about."""

    addresses: Annotated[list[Address], Field(min_length=1, max_length=MAX_IDS)] | None = None
    limit: Many


class EraseOrder(Order):
    """Take out of the broker's log what was purged and re-driven."""

    dry_run: Annotated[bool, Field(description="Only say whether there is a log to take it out of.")] = False


class EditOrder(Order):
    """Put one message back with another body: `body` as text, or `body_base64` where it is no text."""

    id: Id
    address: Annotated[Address | None, Field(description="Which one, if a duplicate was parked too.")] = None
    body: str | None = None
    body_base64: str | None = None
    reset_attempts: bool = False

    def content(self) -> bytes:
        """The new body."""
        if (self.body is None) == (self.body_base64 is None):
            raise ConfigError("give body, or body_base64 where it is no text")
        if self.body is not None:
            return self.body.encode()
        try:
            return base64.b64decode(self.body_base64 or "", validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError("body_base64 is not base64") from None


class ImportQuery(Order):
    """How to import."""

    dry_run: bool = False
