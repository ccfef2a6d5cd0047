"""The tap in the stream: deliveries come out whole, however the network cuts them and whoever speaks between."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from eventbus_rabbit import frames
from eventbus_rabbit.tapping import Tap, TappedReader
from eventbus_rabbit.values import Properties, short, write_properties

PROPERTIES = write_properties(Properties(), b"\x00\x00\x00\x00")
FRAME_MAX = 64
BODIES = (b"one", b"", b"in two frames " * 8, b"four", b"five")


class Seen:
    """A receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes, bytes]] = []

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        self.messages.append((frames.read_deliver(method)[0], properties, body))

    def confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        raise AssertionError("nothing was published")

    def returned(self, method: bytes, properties: bytes) -> None:
        raise AssertionError("nothing was published")


def _delivery(channel: int, tag: int, body: bytes) -> list[bytes]:
    """The frames of a delivery, one by one."""
    payload = frames.DELIVER + short("consumer") + tag.to_bytes(8) + b"\x00" + short("events") + short("key")
    content = frames.content(channel, PROPERTIES, body, FRAME_MAX)
    header, pieces = b"".join(content[:4]), content[4:]
    parts = [b"".join(pieces[start : start + 3]) for start in range(0, len(pieces), 3)]
    return [frames.FRAME.pack(frames.METHOD, channel, len(payload)) + payload + frames.END, header, *parts]


async def _read(chunks: list[bytes], *channels: int) -> list[Seen]:
    """What the receivers of some channels got out of a stream that comes in these chunks."""
    seen = [Seen() for _ in channels]
    inner = asyncio.StreamReader()
    reader = TappedReader(inner, {number: Tap(each) for number, each in zip(channels, seen, strict=True)})
    reading = asyncio.ensure_future(reader.readexactly(1))
    for chunk in chunks:
        inner.feed_data(chunk)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    inner.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await reading
    return seen


async def test_a_delivery_cut_anywhere_is_put_together_again() -> None:
    """Wherever the network cuts the stream in two, every delivery comes once, whole and in order."""
    stream = b"".join(frame for tag, body in enumerate(BODIES, 1) for frame in _delivery(1, tag, body))
    wanted = [(tag, PROPERTIES, body) for tag, body in enumerate(BODIES, 1)]
    for cut in range(1, len(stream)):
        (seen,) = await _read([stream[:cut], stream[cut:]], 1)
        assert seen.messages == wanted, f"cut after {cut} bytes"


async def test_frames_of_another_channel_in_between_are_not_taken_for_ones_own() -> None:
    """Two channels each get their own bodies, in whatever order their frames come."""
    for places in itertools.combinations(range(6), 3):
        ours, theirs = iter(_delivery(1, 1, b"ours")), iter(_delivery(2, 7, b"them"))
        stream = [next(ours if place in places else theirs) for place in range(6)]
        first, second = await _read([b"".join(stream)], 1, 2)
        assert first.messages == [(1, PROPERTIES, b"ours")], places
        assert second.messages == [(7, PROPERTIES, b"them")], places


async def test_an_untapped_frame_between_deliveries_reaches_the_client() -> None:
    """What nobody tapped is handed on as it is, and the deliveries after it still come."""
    seen, inner = Seen(), asyncio.StreamReader()
    reader = TappedReader(inner, {1: Tap(seen)})
    other = frames.FRAME.pack(frames.METHOD, 0, 4) + b"\x00\x0a\x00\x3d" + frames.END
    inner.feed_data(b"".join([*_delivery(1, 1, b"before"), other, *_delivery(1, 2, b"after")]))
    inner.feed_eof()
    assert await reader.readexactly(7) + await reader.readexactly(5) == other
    with pytest.raises(asyncio.IncompleteReadError):
        await reader.readexactly(1)
    assert [body for _, _, body in seen.messages] == [b"before", b"after"]
