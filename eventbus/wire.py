"""CloudEvents 1.0 on the wire: attributes to and from text, structured mode, and foreign messages. Pure.

Adapters add only their own spelling: `cloudEvents:id` on AMQP, `ce_id` on Kafka, `ce-id` on HTTP.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Container, Mapping
from datetime import datetime, timedelta, timezone
from typing import Final

from eventbus.adapter import BodyMapping
from eventbus.errors import InvalidEvent, Undecodable
from eventbus.event import JSON, NO_HEADERS, Event, from_json, is_json, new_id

SPEC_VERSION: Final = "1.0"
STRUCTURED: Final = "application/cloudevents+json"
BATCHED: Final = "application/cloudevents-batch+json"
PROCESS_AFTER_DELAY: Final = "processAfterDelayMs"

# Attributes of ours that CloudEvents keeps as extensions; the spellings are those of its registry where it has one.
_KEY: Final = "partitionkey"
_TENANT: Final = "tenant"
_CORRELATION: Final = "correlationid"
_PROCESS_AFTER: Final = "processafter"
_EXPIRES_AT: Final = "expirytime"
EXTENSIONS: Final[Mapping[str, str]] = {
    "key": _KEY,
    "tenant": _TENANT,
    "correlation_id": _CORRELATION,
    "process_after": _PROCESS_AFTER,
    "expires_at": _EXPIRES_AT,
}
"""Attributes of an Event by their names on the wire."""
KNOWN: Final = frozenset(
    {"specversion", "id", "type", "source", "time", "datacontenttype", "data", "data_base64", *EXTENSIONS.values()}
)
"""Names that are an attribute of every event, and so never an extension."""
_quoted: Final = json.encoder.encode_basestring_ascii


def attributes(event: Event) -> list[tuple[str, str]]:
    """The CloudEvents attributes of an event as text, in binary mode; the content type travels beside them."""
    return [
        ("specversion", SPEC_VERSION),
        ("id", event.id),
        ("type", event.type),
        ("source", event.source or "/"),
        ("time", event.time.isoformat().replace("+00:00", "Z")),
        *_optional(event),
    ]


def _optional(event: Event) -> list[tuple[str, str]]:
    """The attributes that not every event has."""
    found: list[tuple[str, str]] = []
    if event.key is not None:
        found.append((_KEY, event.key))
    if event.tenant is not None:
        found.append((_TENANT, event.tenant))
    if event.correlation_id is not None:
        found.append((_CORRELATION, event.correlation_id))
    if event.process_after is not None:
        found.append((_PROCESS_AFTER, event.process_after.isoformat()))
    if event.expires_at is not None:
        found.append((_EXPIRES_AT, event.expires_at.isoformat()))
    if event.extensions:  # one of them never stands in for an attribute
        found += [(name, text) for name, text in event.extensions.items() if name not in KNOWN]
    return found


def to_structured(event: Event, more: str = "", taken: Container[str] = ()) -> bytes:
    """The event as one JSON object (structured mode), with some members more, whose names are `taken`.

    JSON data stands in it to the letter: decoding and encoding it again would turn 1.10 into 1.1.
    """
    text = (
        f'{{"specversion": "{SPEC_VERSION}", "id": {_quoted(event.id)}, "type": {_quoted(event.type)}, '
        f'"source": {_quoted(event.source or "/")}, "time": "{event.time.isoformat().replace("+00:00", "Z")}"{more}'
    )
    for name, value in _optional(event):
        if name not in taken:
            text += f", {_quoted(name)}: {_quoted(value)}"
    if event.content_type:
        text += f', "datacontenttype": {_quoted(event.content_type)}'
    if event.body:
        if is_json(event.content_type or JSON):
            try:
                from_json(event.body)
            except Undecodable:
                pass  # not JSON after all: carried as bytes, so that nothing is changed
            else:
                return f'{text}, "data": '.encode() + event.body + b"}"
        text += f', "data_base64": "{base64.b64encode(event.body).decode()}"'
    return f"{text}}}".encode()


def decode(
    attrs: Mapping[str, str],
    headers: Mapping[str, object],
    body: bytes,
    content_type: str | None,
    *,
    fallback_id: str,
    fallback_type: str = "",
    fallback_time: datetime | None = None,
    mapping: BodyMapping,
) -> Event:
    """The event in a message: binary mode, structured mode, or a foreign message without any attributes.

    Raises Undecodable only for a message that claims to be a CloudEvent and is broken.
    """
    if is_structured(content_type):
        return _from_structured(body, headers, fallback_time)
    if "id" in attrs and "type" in attrs:
        return _from_attributes(attrs, headers, body, content_type, fallback_time)
    time = fallback_time or datetime.now(timezone.utc)
    return _foreign(attrs, headers, body, content_type, fallback_id, fallback_type, time, mapping)


def is_structured(content_type: str | None) -> bool:
    """Whether the message is an envelope with the event inside."""
    if content_type is None or content_type == JSON:  # nearly all
        return False
    return content_type.partition(";")[0].strip().lower() == STRUCTURED


def unwrap(event: Event, mapping: BodyMapping) -> tuple[Event, str]:
    """A structured CloudEvent taken out of its envelope; or the event as it is, and what is wrong with it."""
    if event.content_type is None or not is_structured(event.content_type):
        return event, ""
    try:
        inner = decode(
            {},
            event.headers,
            event.body,
            event.content_type,
            fallback_id=event.id,
            fallback_time=event.time,
            mapping=mapping,
        )
    except Undecodable as error:
        return event, str(error)
    return inner, ""


def with_body(stored: bytes, content_type: str | None, body: bytes) -> bytes:
    """What to store for a message whose event gets another body: in structured mode the envelope stays around it."""
    if not is_structured(content_type):
        return body
    try:
        envelope = from_json(stored)
    except Undecodable:
        return body
    if not isinstance(envelope, dict):
        return body
    envelope.pop("data", None)
    envelope.pop("data_base64", None)
    given = envelope.get("datacontenttype")
    try:
        if given is None or (isinstance(given, str) and is_json(given)):
            return json.dumps(envelope | {"data": from_json(body)}, ensure_ascii=False).encode()
    except Undecodable:
        pass  # carried as bytes, so that nothing is changed
    return json.dumps(envelope | {"data_base64": base64.b64encode(body).decode()}, ensure_ascii=False).encode()


def pack_header(value: object) -> object:
    """A header value as JSON, without loss; what JSON does not know is an object with one key that names its kind."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, datetime):
        return {"time": value.isoformat()}
    # Headers from other brokers may repeat (lists) or nest (AMQP tables).
    if isinstance(value, (list, tuple)):
        return [pack_header(item) for item in value]
    if isinstance(value, Mapping):
        return {"table": {str(name): pack_header(item) for name, item in value.items()}}
    raise InvalidEvent(f"a header of type {type(value).__name__} cannot be written; send text, bytes or a number")


def unpack_header(value: object) -> object:
    """What `pack_header` packed."""
    if isinstance(value, list):
        return [unpack_header(item) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "time":
        return datetime.fromisoformat(content)
    if kind == "table" and isinstance(content, dict):
        return {name: unpack_header(item) for name, item in content.items()}
    return value


def unreadable(
    headers: Mapping[str, object], body: bytes, content_type: str | None, *, id: str, time: datetime | None = None
) -> Event:
    """A stand-in for a message that could not be decoded: enough to park it, body untouched."""
    time = time or datetime.now(timezone.utc)
    return Event.from_wire(id, "undecodable", "", time, body, content_type, headers=headers)


def _from_attributes(
    attrs: Mapping[str, str],
    headers: Mapping[str, object],
    body: bytes,
    content_type: str | None,
    fallback_time: datetime | None,
) -> Event:
    due = _instant(attrs.get(_PROCESS_AFTER))
    created = _instant(attrs.get("time")) or fallback_time or datetime.now(timezone.utc)
    return Event.from_wire(
        attrs["id"],
        attrs["type"],
        attrs.get("source", ""),
        created,
        body,
        content_type or attrs.get("datacontenttype"),
        attrs.get(_KEY),
        attrs.get(_TENANT),
        attrs.get(_CORRELATION),
        due or delay_header(headers, created),
        _instant(attrs.get(_EXPIRES_AT)),
        headers,
        None if attrs.keys() <= KNOWN else {name: text for name, text in attrs.items() if name not in KNOWN},
    )


def _from_structured(body: bytes, headers: Mapping[str, object], time: datetime | None) -> Event:
    attrs, data, content_type = unpack(from_json(body))
    return _from_attributes(attrs, headers, data, content_type, time)


def unpack(envelope: object) -> tuple[dict[str, str], bytes, str | None]:
    """Attributes, body and content type out of a structured CloudEvent. Raises Undecodable."""
    if not isinstance(envelope, dict):
        raise Undecodable("a structured CloudEvent must be a JSON object")
    for name in ("id", "type", "source"):
        if not isinstance(envelope.get(name), str) or not envelope[name]:
            raise Undecodable(f"a structured CloudEvent needs a text {name!r}")
    try:
        json.dumps(envelope, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Undecodable(f"a structured CloudEvent holds half of a character: {error}") from error
    if envelope.get("data") is not None and envelope.get("data_base64") is not None:
        raise Undecodable("a structured CloudEvent has data or data_base64, not both")
    content_type = envelope.get("datacontenttype")
    if content_type is not None and not isinstance(content_type, str):
        raise Undecodable("datacontenttype must be text")
    if envelope.get("data_base64") is not None:
        if not isinstance(envelope["data_base64"], str):
            raise Undecodable("data_base64 must be text")
        try:
            data = base64.b64decode(envelope["data_base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise Undecodable(f"data_base64 is not base64: {error}") from error
    elif envelope.get("data") is None:
        data = b""
    else:
        as_text = isinstance(envelope["data"], str) and content_type and not is_json(content_type)
        text = envelope["data"] if as_text else json.dumps(envelope["data"], ensure_ascii=False, separators=(",", ":"))
        data = str(text).encode()
        content_type = content_type or JSON
    attrs = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in envelope.items()
        if name not in ("data", "data_base64", "datacontenttype") and value is not None
    }
    return attrs, data, content_type


def _foreign(
    attrs: Mapping[str, str],
    headers: Mapping[str, object],
    body: bytes,
    content_type: str | None,
    fallback_id: str,
    fallback_type: str,
    time: datetime,
    mapping: BodyMapping,
) -> Event:
    found: dict[str, str] = {}
    if mapping.id or mapping.type or mapping.key or mapping.tenant:
        found = _mapped(body, mapping)
    return Event.from_wire(
        found.get("id") or attrs.get("id") or fallback_id or new_id(),
        found.get("type") or attrs.get("type") or fallback_type or mapping.default_type,
        attrs.get("source", ""),
        time,
        body,
        content_type,
        found.get("key") or attrs.get(_KEY),
        found.get("tenant") or attrs.get(_TENANT),
        attrs.get(_CORRELATION),
        delay_header(headers, time),
        None,
        headers,
    )


def _mapped(body: bytes, mapping: BodyMapping) -> dict[str, str]:
    try:
        data = from_json(body)
    except Undecodable:
        return {}  # whether that matters is for the handler's payload type to say
    found = {}
    for name in ("id", "type", "key", "tenant"):
        value: object = data
        for step in getattr(mapping, name).removeprefix("data.").split("."):
            value = value.get(step) if isinstance(value, dict) and step else None
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            found[name] = str(value)
    return found


def delay_header(headers: Mapping[str, object], since: datetime) -> datetime | None:
    """When seed 4's `processAfterDelayMs` header says the message is due; None for a missing or bad one."""
    if headers is NO_HEADERS or PROCESS_AFTER_DELAY not in headers:
        return None
    value = headers[PROCESS_AFTER_DELAY]
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        return None
    try:
        return since + timedelta(milliseconds=int(text))
    except OverflowError:
        return None


def _instant(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)


shared_texts: dict[bytes, str] = {}
"""What `shared_text` knows: whoever calls it for every message looks here first."""


def shared_text(raw: bytes) -> str:
    """Text that is one of few, as types, sources and content types are: one object for all of a kind."""
    known = shared_texts.get(raw)
    if known is None:
        known = raw.decode("utf-8", "replace")
        if len(shared_texts) < 4096:
            shared_texts[raw] = known
    return known
