"""Dead letters as JSON lines, to the byte: written by an export, read again by an import. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from eventbus import headers, wire
from eventbus.adapter import Parked
from eventbus.errors import ConfigError, EventBusError
from eventbus.event import Event

if TYPE_CHECKING:
    from eventbus.deadletter import DeadLetter


def dump(letter: DeadLetter) -> str:
    """One letter as one line, without its end."""
    return json.dumps(letter.row(), ensure_ascii=False)


def body_fields(body: bytes) -> dict[str, str]:
    """The body as text where it is text, as base64 where it is not: either way to the byte."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}
    return {"body": text}


def packed(values: Mapping[str, object]) -> dict[str, object]:
    """Headers as JSON without loss; what no JSON can say is told as text."""
    result: dict[str, object] = {}
    for name, value in values.items():
        try:
            result[name] = wire.pack_header(value)
        except EventBusError:
            result[name] = str(value)
    return result


def _base64(text: str | None) -> str | None:
    if text is not None:
        try:
            base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("is not base64") from None
    return text


class Line(BaseModel):
    """What an import needs of a line; the rest of it is for people."""

    model_config = ConfigDict(strict=False, extra="ignore")

    id: Annotated[str, Field(min_length=1)]
    type: Annotated[str, Field(min_length=1)]
    source: str = ""
    time: AwareDatetime
    key: str | None = None
    tenant: str | None = None
    correlation_id: str | None = None
    content_type: str | None = None
    process_after: datetime | None = None
    expires_at: datetime | None = None
    extensions: dict[str, str] = Field(default_factory=dict)
    headers: dict[str, Any] = Field(default_factory=dict)
    story: dict[str, Any]
    body: str | None = None
    body_base64: Annotated[str | None, AfterValidator(_base64)] = None


def load(line: str | bytes, number: int = 1) -> Parked:
    """The letter in a line; a ConfigError that names the line says what is wrong with it."""
    try:
        found = Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"line {number} is no exported letter: {where + ': ' if where else ''}{first['msg']}"
        ) from None
    if (found.body is None) == (found.body_base64 is None):
        raise ConfigError(f"line {number} is no exported letter: it needs body or body_base64, one of them")
    body = found.body.encode() if found.body is not None else base64.b64decode(found.body_base64 or "")
    event = Event.from_wire(
        found.id,
        found.type,
        found.source,
        found.time,
        body,
        found.content_type,
        found.key,
        found.tenant,
        found.correlation_id,
        found.process_after,
        found.expires_at,
        headers.strip_reserved({name: wire.unpack_header(value) for name, value in found.headers.items()}),
        found.extensions or None,
    )
    story = {name: wire.unpack_header(value) for name, value in found.story.items() if headers.is_reserved(name)}
    return Parked("", event, story)
