"""Publishing with confirms: many messages in one write, and one answer for each. Tags do the matching."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from eventbus.errors import BrokerUnavailable
from eventbus_rabbit import frames
from eventbus_rabbit.link import Link, Wire
from eventbus_rabbit.values import read_properties

CHUNK: Final = 256
CHUNK_BYTES: Final = 512 * 1024
WINDOW: Final = 8
"""Chunks on their way at once: enough to keep the broker busy, few enough that memory stays small."""

Stored: TypeAlias = Literal["stored", "unrouted", "refused", "late", "unknown", "missing"]
"""stored; unrouted: no queue took it; refused: a queue said no (full); late: no answer in time; unknown: the channel
was lost before an answer came; missing: lost because an exchange, of this message or of one beside it, is not there."""


@dataclass(slots=True)
class Outgoing:
    """A message on its way out."""

    exchange: str
    key: str
    properties: bytes
    body: bytes
    id: bytes


class Batch:
    """Messages written together, and what is known of each."""

    __slots__ = ("answers", "confirmed", "done", "first", "left", "low", "messages")

    def __init__(self, first: int, messages: Sequence[Outgoing], done: asyncio.Future[None]) -> None:
        self.first = first
        self.messages = messages
        self.answers: list[Stored | None] = [None] * len(messages)
        self.confirmed = bytearray(len(messages))
        self.left = len(messages)
        self.low = 0
        self.done = done

    def confirm(self, tag: int, *, multiple: bool, ok: bool) -> None:
        """The broker's word on one message, or on all up to it. What was returned before stays unrouted."""
        end = min(tag - self.first, len(self.messages) - 1)
        for position in range(self.low if multiple else end, end + 1):
            if not self.confirmed[position]:
                self.confirmed[position] = 1
                self.answers[position] = self.answers[position] or ("stored" if ok else "refused")
                self.left -= 1
        if multiple:
            self.low = end + 1
        if not self.left and not self.done.done():
            self.done.set_result(None)


class Confirms:
    """The receiver of a publishing channel: finds the batch that a confirm or a return is about."""

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()

    def delivered(self, method: bytes, properties: bytes, body: bytes) -> None:
        """Nothing is consumed on this channel."""

    def confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        """An ack or nack of one message, or of all up to it."""
        for batch in self.batches:
            if batch.first > tag:
                break
            if multiple or tag < batch.first + len(batch.messages):
                batch.confirm(tag, multiple=multiple, ok=ok)
                if not multiple:
                    break
        while self.batches and not self.batches[0].left:
            self.batches.popleft()

    def returned(self, method: bytes, properties: bytes) -> None:
        """No queue took it; its confirm comes after this.

        A return names no tag. Exchange, key and id do: two messages that are alike in all three share their fate.
        """
        _, exchange, key = frames.read_return(method)
        id = read_properties(properties).message_id
        for batch in self.batches:
            for position, message in enumerate(batch.messages):
                if (
                    batch.answers[position] is None
                    and message.id == id
                    and message.key == key
                    and message.exchange == exchange
                ):
                    batch.answers[position] = "unrouted"
                    return

    def fail(self, why: Stored = "unknown") -> None:
        """The channel is gone: nobody knows what became of what is not confirmed."""
        while self.batches:
            batch = self.batches.popleft()
            for position, answer in enumerate(batch.answers):
                if answer is None:
                    batch.answers[position] = why
            if not batch.done.done():
                batch.done.set_result(None)


class Publisher:
    """One channel with confirms, opened when needed."""

    def __init__(self, link: Link, timeout: float) -> None:
        self._link = link
        self._timeout = timeout
        self._wire: Wire | None = None
        self._confirms = Confirms()
        self._tag = 0
        self._lock = asyncio.Lock()
        self._retired: set[asyncio.Task[None]] = set()
        self.frame_max = 131_072

    async def send(self, messages: Sequence[Outgoing]) -> list[Stored]:
        """Publish messages, persistent and mandatory; returns when each is confirmed, or the time is over."""
        if not messages:
            return []
        batches: list[Batch] = []
        deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(deadline):
                for start, end in _chunks(messages):
                    if len(batches) >= WINDOW:
                        await _settled(batches[-WINDOW])
                    batches.append(await self._write(messages[start:end]))
                for batch in batches:
                    await _settled(batch)
        except TimeoutError:
            self._retire(batches)
        except BrokerUnavailable:
            if not batches:
                raise
        answers: list[Stored] = [answer or "late" for batch in batches for answer in batch.answers]
        return answers + ["unknown"] * (len(messages) - len(answers))

    async def _write(self, messages: Sequence[Outgoing]) -> Batch:
        async with self._lock:  # tags count in the order of writing
            wire = await self._ready()
            parts: list[bytes] = []
            for message in messages:
                parts.append(frames.publish(wire.number, message.exchange, message.key))
                parts += frames.content(wire.number, message.properties, message.body, wire.frame_max)
            batch = Batch(self._tag + 1, messages, asyncio.get_running_loop().create_future())
            self._tag += len(messages)
            self._confirms.batches.append(batch)
            try:
                await wire.write(b"".join(parts), drained=True)
            except BaseException:
                # Nobody knows whether it was written, and so which tags the broker gives to what comes after it.
                self._retire()
                raise
            return batch

    async def _ready(self) -> Wire:
        if self._wire is None or not self._wire.alive:
            confirms = Confirms()
            wire = await self._link.channel(confirms, confirms=True)
            wire.on_close(lambda: confirms.fail("missing" if wire.missed_exchange else "unknown"))
            self._confirms, self._wire, self._tag = confirms, wire, 0
            self.frame_max = wire.frame_max
        return self._wire

    def _retire(self, late: Sequence[Batch] = ()) -> None:
        """Publish on another channel from now on; the old one may still get the confirms it waits for.

        A quorum queue without a leader holds back its own confirms and, by and by, the whole channel.
        """
        if late and late[-1] not in self._confirms.batches:
            return  # they were late on a channel that is retired already
        wire, self._wire = self._wire, None
        if wire is not None:
            task = asyncio.create_task(_close_later(wire, list(self._confirms.batches), self._timeout))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    async def aclose(self) -> None:
        """Close the channels."""
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.aclose()


async def _close_later(wire: Wire, batches: Sequence[Batch], timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            for batch in batches:
                await _settled(batch)
    except TimeoutError:
        pass
    finally:
        await wire.aclose()


async def _settled(batch: Batch) -> None:
    if not batch.done.done():
        await asyncio.shield(batch.done)


def _chunks(messages: Sequence[Outgoing]) -> list[tuple[int, int]]:
    """Pieces of at most CHUNK messages or about CHUNK_BYTES."""
    found, start, size = [], 0, 0
    for position, message in enumerate(messages):
        if position - start >= CHUNK or (size > CHUNK_BYTES and position > start):
            found.append((start, position))
            start, size = position, 0
        size += len(message.body)
    found.append((start, len(messages)))
    return found
