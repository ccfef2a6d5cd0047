"""AMQP values and properties to and from bytes: nothing a stranger sends is changed or breaks the reader."""

from __future__ import annotations

import struct
from datetime import datetime, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus_rabbit.messages import Message, only_rejected
from eventbus_rabbit.publisher import Batch, Confirms, Outgoing
from eventbus_rabbit.tapping import Tap
from eventbus_rabbit.values import (
    Properties,
    decode,
    encode,
    encode_table,
    read_properties,
    split_table,
    write_properties,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    """Encoding and decoding is the identity for everything a header can hold."""
    assert decode(encode(value)) == value


def test_times_and_decimals_come_back() -> None:
    """AMQP times have seconds; decimals have a scale."""
    moment = datetime(2026, 5, 4, 3, 2, 1, tzinfo=timezone.utc)
    assert decode(encode(moment)) == moment
    assert decode(b"D\x02\x00\x00\x30\x39") == Decimal("123.45")
    assert decode(b"T" + (2**63).to_bytes(8)) == 2**63  # no date, no exception


@given(st.binary(max_size=200))
def test_garbage_is_a_value_error_and_nothing_else(data: bytes) -> None:
    """Whatever stands where properties should be: they are read, or it is a ValueError."""
    try:
        read_properties(data)
    except ValueError:
        return


@given(st.dictionaries(st.text(max_size=30), values, max_size=5))
def test_a_table_is_split_without_being_decoded(table: dict[str, object]) -> None:
    """The raw values of a table make the same table again, to the byte."""
    raw = {name: encode(value) for name, value in table.items()}
    data = encode_table(raw)
    found, end = split_table(data)
    assert (found, end) == (raw, len(data))


def test_properties_come_back_without_what_must_not_travel() -> None:
    """All properties survive but expiration and user_id; a text over 255 bytes is left out."""
    sent = Properties()
    sent.content_type, sent.message_id, sent.type, sent.app_id = b"text/plain", b"id", b"t", b"app"
    sent.correlation_id, sent.reply_to, sent.priority, sent.timestamp = b"c" * 300, b"r", 7, 5
    sent.user_id = b"somebody"
    got = read_properties(write_properties(sent, encode_table({"a": encode(1)})))
    assert (got.content_type, got.message_id, got.type, got.app_id) == (b"text/plain", b"id", b"t", b"app")
    assert (got.correlation_id, got.reply_to, got.priority, got.timestamp, got.user_id) == (b"", b"r", 7, 5, b"")
    assert got.headers == {"a": encode(1)}


class _Receiver:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.confirms: list[tuple[int, bool, bool]] = []

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        self.bodies.append(body)

    def confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        self.confirms.append((tag, multiple, ok))

    def returned(self, method: bytes, properties: bytes) -> None:
        raise AssertionError


@pytest.mark.parametrize("pieces", [[], [b"one"], [b"one", b"two", b"three"]])
def test_a_tap_puts_a_message_together(pieces: list[bytes]) -> None:
    """A delivery of no, one or many body frames arrives whole."""
    receiver = _Receiver()
    tap = Tap(receiver)
    size = sum(len(piece) for piece in pieces)
    assert tap.take(1, b"\x00\x3c\x00\x3c" + b"rest")
    assert tap.take(2, struct.pack(">HHQ", 60, 0, size) + b"\x00\x00")
    for piece in pieces:
        assert tap.take(3, piece)
    assert receiver.bodies == [b"".join(pieces)]
    assert not tap.take(1, b"\x00\x14\x00\x28")  # channel.close is the client's
    assert tap.take(1, b"\x00\x3c\x00\x50" + struct.pack(">QB", 9, 1))
    assert receiver.confirms == [(9, True, True)]


class _Future:
    def __init__(self) -> None:
        self.set = False

    def done(self) -> bool:
        return self.set

    def set_result(self, value: object) -> None:
        self.set = True


@pytest.mark.parametrize(("count", "rejected", "told"), [(1, 1, True), (2, 2, True), (2, 1, False), (1, 0, False)])
def test_a_redelivery_after_rejects_is_no_crash(count: int, rejected: int, told: bool) -> None:
    """RabbitMQ 4 counts deliveries through the dead-letter loop: what rejects account for is nobody's crash."""
    deaths = [{"queue": "q", "reason": "rejected", "count": rejected}] if rejected else []
    table = encode_table({"x-delivery-count": encode(count), "x-death": encode(deaths)})
    assert only_rejected(Message(1, True, "", "q", write_properties(Properties(), table), b""), "q") is told


def _batch(confirms: Confirms, first: int, number: int, key: str = "k") -> Batch:
    messages = [Outgoing("x", key, b"", b"", f"{first + n}".encode()) for n in range(number)]
    batch = Batch(first, messages, _Future())  # type: ignore[arg-type]
    confirms.batches.append(batch)
    return batch


def test_confirms_find_their_messages() -> None:
    """Single and multiple confirms, in any order and across batches, answer each message once."""
    confirms = Confirms()
    one, two = _batch(confirms, 1, 3), _batch(confirms, 4, 3)
    confirms.confirmed(2, False, True)
    confirms.confirmed(5, False, False)
    confirms.confirmed(4, True, True)
    assert one.answers == ["stored"] * 3
    assert one.done.done()
    assert two.answers == ["stored", "refused", None]
    confirms.confirmed(6, True, True)
    assert two.answers == ["stored", "refused", "stored"]
    assert not confirms.batches


def test_a_returned_message_stays_unrouted_when_it_is_confirmed() -> None:
    """RabbitMQ returns first and confirms after; a return is matched by exchange, key and id."""
    confirms = Confirms()
    batch = _batch(confirms, 1, 2)
    given_back = Properties()
    given_back.message_id = b"2"
    method = b"\x00\x3c\x00\x32" + b"\x01\x38" + b"\x08NO_ROUTE" + b"\x01x" + b"\x01k"
    confirms.returned(method, write_properties(given_back, encode_table({})))
    confirms.confirmed(2, True, True)
    assert batch.answers == ["stored", "unrouted"]


def test_a_lost_channel_leaves_the_unconfirmed_unknown() -> None:
    """What was confirmed stays confirmed; the rest is unknown, and nobody waits for it."""
    confirms = Confirms()
    batch = _batch(confirms, 1, 2)
    confirms.confirmed(1, False, True)
    confirms.fail()
    assert batch.answers == ["stored", "unknown"]
    assert batch.done.done()
