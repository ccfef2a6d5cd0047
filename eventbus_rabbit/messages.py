"""Events as AMQP messages and back, and the copies that carry retries and dead letters. Pure.

CloudEvents binary mode: `cloudEvents:*` headers beside the AMQP properties. A message of a stranger without them is
read by its properties; what it carries, it keeps to the byte.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache
from typing import Final

from eventbus import headers as reserved
from eventbus import wire
from eventbus.adapter import BodyMapping
from eventbus.errors import Undecodable
from eventbus.event import NO_HEADERS, Event
from eventbus.settlement import FRESH, HeaderDelta, History
from eventbus_rabbit.publisher import Outgoing
from eventbus_rabbit.values import (
    MAX_SHORT,
    Properties,
    RawTable,
    decode,
    encode,
    encode_table,
    read_properties,
    short,
    write_properties,
)

PARKED_ID: Final = "x-parked-id"
"""The address of a dead letter of ours."""
HELD: Final = "x-held"
"""On a copy in a holding queue, and on one that came back from there: its consumer died while it held it."""
NOTED: Final = "x-crash-noted"
"""On a copy in the work queue whose x-crashes counts the call to come, where no holding queue can be made."""
_MARKS: Final = (PARKED_ID, HELD, NOTED)
NO_MARKS: Final[Mapping[str, str]] = {}
FOLDED: Final = "x-death-folded"
"""On a dead letter: how many of the rejects in its x-death are in x-retries already."""
_DEATH: Final = (
    "x-death",
    *(f"x-{when}-death-{what}" for when in ("first", "last") for what in ("exchange", "queue", "reason")),
)
_BROKERS: Final = frozenset({*_DEATH, "x-delivery-count", "x-acquired-count", PARKED_ID, FOLDED, HELD, NOTED})
"""Written by the broker or by this adapter: no headers of the event."""
_ROUTING: Final = {"CC": "x-original-cc", "BCC": "x-original-bcc"}
"""RabbitMQ sends a copy to every key in these; on a copy of ours that would reach other services."""
_USER_ID: Final = "x-original-user-id"
HEADROOM: Final = 16 * 1024
"""Room that a published event leaves in its header frame for the story it may carry one day."""
_CUTTABLE: Final = (*_DEATH, reserved.ATTEMPTS, reserved.RETRY_REASON, reserved.FINAL_ERROR)


_turns = itertools.count(random.getrandbits(16))


def new_mark() -> str:
    """The address of a letter that is parked now: in the order of time, and of parking within a process."""
    return f"{time.time_ns() // 1_000_000:012x}{next(_turns) & 0xFFFFFFFF:08x}{random.getrandbits(48):012x}"


class Message:
    """A message as it was delivered."""

    __slots__ = ("body", "exchange", "key", "problem", "properties", "redelivered", "tag")

    def __init__(self, tag: int, redelivered: bool, exchange: str, key: str, properties: bytes, body: bytes) -> None:
        self.tag, self.redelivered, self.exchange, self.key, self.body = tag, redelivered, exchange, key, body
        self.problem = ""
        try:
            self.properties = read_properties(properties)
        except ValueError as error:
            self.properties, self.problem = Properties(), f"unreadable AMQP properties: {error}"


# --- out ---------------------------------------------------------------------------------------------------------


def _entry(name: str) -> bytes:
    return short(f"cloudEvents:{name}") + b"S"


_NAMES: Final = {name: _entry(name) for name in ("specversion", "id", "type", "source", "time")}


def outgoing(
    event: Event, exchange: str, key: str, frame_max: int, story: Mapping[str, object] = NO_HEADERS, parked_as: str = ""
) -> Outgoing | str:
    """An event ready to be published, or to be parked with a story that it has already; or why it never can be."""
    parts: list[bytes] = []
    for name, text in wire.attributes(event):
        data = text.encode("utf-8", "replace")
        parts += (_NAMES.get(name) or _entry(name), len(data).to_bytes(4), data)
    for name, value in event.headers.items():
        if name in _ROUTING:
            return f"header {name!r}: RabbitMQ would send the event to other queues by it; use another name"
        if name in _BROKERS:
            continue  # forged: only the broker writes these
        if len(name.encode()) > MAX_SHORT:
            return f"header {name[:40]!r}...: RabbitMQ takes header names of at most {MAX_SHORT} bytes"
        parts += (short(name), encode(value))
    for name, value in story.items():
        parts += (short(name), encode(value))
    if parked_as:
        parts += (short(PARKED_ID), encode(parked_as))
    table = b"".join(parts)
    if len(table) > frame_max - (1024 if parked_as else HEADROOM):
        return f"{event.type} {event.id}: {len(table)} bytes of headers; RabbitMQ takes {frame_max - HEADROOM} here"
    if len(key.encode()) > MAX_SHORT:
        return f"{event.type[:40]}...: as a routing key a type has at most {MAX_SHORT} bytes"
    given = Properties()
    given.content_type = (event.content_type or "").encode()
    given.correlation_id = (event.correlation_id or "").encode()
    given.message_id, given.type = event.id.encode("utf-8", "replace"), event.type.encode("utf-8", "replace")
    given.timestamp = max(0, int(event.time.timestamp()))
    id = given.message_id if len(given.message_id) <= MAX_SHORT else b""
    return Outgoing(exchange, key, write_properties(given, len(table).to_bytes(4) + table), event.body, id)


# --- in ----------------------------------------------------------------------------------------------------------


def incoming(
    message: Message, queue: str, mapping: BodyMapping, *, back_exchange: str | None
) -> tuple[Event, Mapping[str, object], History, str]:
    """The event in a message, the reserved headers it carries, its history, and why it cannot be read (or "").

    `back_exchange` is where rejected messages come back from; None where a reject leads to no retry.
    """
    given = message.properties
    attrs: dict[str, str] = {}
    story: dict[str, object] = {}
    own: dict[str, object] = {}
    died = None
    for name, raw in given.headers.items():
        attribute = _attribute(name)
        if attribute is not None:
            attrs[attribute] = raw[5:].decode("utf-8", "replace") if raw[0] == 83 else _text(decode(raw))
        elif name in _BROKERS:
            if name == "x-death":
                died = raw
        elif name[:2] in ("x-", "X-") and reserved.is_reserved(name):
            story[name.lower()] = decode(raw)
        else:
            own[name] = decode(raw)
    history = reserved.read_history(story) if story else FRESH
    key = message.key
    if died is not None and message.exchange == back_exchange:  # never where that is None
        # Only what came back by the retry road was rejected here; a publisher can write any x-death it likes.
        deaths, key = _deaths(died, queue, key)
        deaths -= reserved.number(decode(given.headers.get(FOLDED, b"V")))
        if deaths > 0:
            history = _add_retries(history, deaths)
    moment = None if given.timestamp is None else _moment(given.timestamp)
    content_type = wire.shared_text(given.content_type) or None
    id = _text(given.message_id)
    headers: Mapping[str, object] = own or NO_HEADERS
    if message.problem:
        return wire.unreadable(headers, message.body, content_type, id=id, time=moment), story, history, message.problem
    try:
        event = wire.decode(
            attrs,
            headers,
            message.body,
            content_type,
            fallback_id=id,
            fallback_type=wire.shared_text(given.type) or key,
            fallback_time=moment,
            mapping=mapping,
        )
    except Undecodable as error:
        return wire.unreadable(headers, message.body, content_type, id=id, time=moment), story, history, str(error)
    if event.correlation_id is None and given.correlation_id:
        event = event.rewritten(correlation_id=_text(given.correlation_id))
    return event, story, history, ""


@lru_cache(maxsize=4096)
def _attribute(name: str) -> str | None:
    """The CloudEvents attribute that a header of this name holds."""
    return name[12:] if name.startswith(("cloudEvents:", "cloudEvents_")) else None


def rejects(message: Message, queue: str) -> int:
    """How often the broker says that this queue's consumers rejected the message."""
    raw = message.properties.headers.get("x-death")
    return 0 if raw is None else _deaths(raw, queue, "")[0]


def only_rejected(message: Message, queue: str) -> bool:
    """Whether a redelivery on RabbitMQ 4 is told by rejects: there a quorum queue goes on counting through the loop.

    After a crash it begins anew (4.0.5: 2 after two rejects, 1 after a crash, 4 after the next reject). So after n
    rejects the first n crashes are not seen; the next one is.
    """
    count = message.properties.headers.get("x-delivery-count")
    return count is not None and reserved.number(decode(count)) <= rejects(message, queue)


def _deaths(raw: bytes, queue: str, key: str) -> tuple[int, str]:
    """Rejects in our queue, and the routing key the message had before the first of them."""
    entries, count = decode(raw), 0
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("queue") == queue and entry.get("reason") == "rejected":
            count += min(reserved.number(entry.get("count")), 1_000_000)
            keys = entry.get("routing-keys")
            if isinstance(keys, list) and keys and isinstance(keys[0], str):
                key = keys[0]
    return count, key


def _add_retries(history: History, deaths: int) -> History:
    return replace(history, retries=history.retries + deaths)


@lru_cache(maxsize=1024)
def _moment(number: int) -> datetime | None:
    """A whole second, as those of many messages in a row."""
    found = decode(b"T" + number.to_bytes(8))
    return found if isinstance(found, datetime) else None


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
    return "" if value is None else str(value)


# --- copies ------------------------------------------------------------------------------------------------------


def copy(
    message: Message,
    event: Event,
    retries: int,
    delta: HeaderDelta,
    *,
    exchange: str,
    key: str,
    frame_max: int,
    parked_as: str = "",
    queue: str = "",
    body: bytes | None = None,
    marks: Mapping[str, str] = NO_MARKS,
) -> Outgoing:
    """A copy of a message with its story changed, and marks of this adapter.

    A copy to the work queue has no `x-death`: its count goes on in `x-retries`, because RabbitMQ 4 forgets what a
    client sends and RabbitMQ 3 counts on from it. A dead letter (`parked_as`) keeps it, as seed 4 asks.
    """
    given = message.properties
    table: RawTable = {}
    for name, raw in given.headers.items():
        if name in _BROKERS and not (parked_as and name in _DEATH):
            continue
        if name in delta or name.lower() in delta:
            continue
        table[_ROUTING.get(name, name)] = raw
    for name, value in delta.items():
        if value is not None:
            table[name] = encode(value)
    if reserved.RETRIES not in delta and retries:
        table[reserved.RETRIES] = encode(retries)
    if parked_as:
        table[PARKED_ID] = encode(parked_as)
        deaths = rejects(message, queue)
        if deaths:
            table[FOLDED] = encode(deaths)
    for name, mark in marks.items():
        table[name] = encode(mark)
    if given.user_id:
        table[_USER_ID] = b"S" + len(given.user_id).to_bytes(4) + given.user_id
    properties = _copied(given, event, foreign=not message.problem and "cloudEvents:id" not in given.headers)
    encoded = write_properties(properties, encode_table(table))
    limit = frame_max - 64
    if len(encoded) > limit:
        encoded = write_properties(properties, encode_table(_fitted(table, limit - len(encoded))))
    return Outgoing(exchange, key, encoded, message.body if body is None else body, properties.message_id)


def _copied(given: Properties, event: Event, *, foreign: bool) -> Properties:
    """The properties of a copy. Id and type of a stranger's message must not change on its way round."""
    found = Properties()
    found.content_type, found.content_encoding = given.content_type, given.content_encoding
    found.correlation_id, found.reply_to, found.app_id = given.correlation_id, given.reply_to, given.app_id
    found.priority, found.timestamp = given.priority, given.timestamp
    found.message_id, found.type = given.message_id, given.type
    if not found.message_id:
        found.message_id = event.id.encode("utf-8", "replace")[:MAX_SHORT]
    if foreign and not found.type:
        found.type = event.type.encode("utf-8", "replace")
    return found


def _fitted(table: RawTable, excess: int) -> RawTable:
    """The table without what can be spared, so that parking never fails on its own headers.

    First the history, then the largest foreign headers: the letter without a header is better than no letter.
    """
    over, result = -excess, dict(table)
    for name in (*_CUTTABLE, *sorted(table, key=lambda name: -len(table[name]))):
        if over <= 0:
            break
        if (
            name in result
            and (name in _CUTTABLE or not reserved.is_reserved(name))
            and name not in (PARKED_ID, HELD, NOTED)
        ):
            over -= len(result.pop(name)) + len(name) + 1
    return result
