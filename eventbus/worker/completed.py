"""Idempotency: what was completed is acknowledged without a call. Asked and told many at a time.

While one call is on its way to the store, every question and every completion that comes up becomes the next call:
under load less than one round trip for a batch. The store is a help, not a gate: if it is down, events are handled.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

from eventbus import telemetry
from eventbus.errors import EventBusError
from eventbus.event import Event
from eventbus.settlement import ACK, Delivery
from eventbus.shaping import Idempotency
from eventbus.store import Seen, Store, Words
from eventbus.worker.settling import Item

PATIENCE: Final = 2.0
ASK_AGAIN: Final = 0.25
"""How often a copy asks whether the claim of the other one has ended."""
KEPT: Final = 100_000
"""Completions that are kept for a store that is down; what is beyond may be handled twice."""


def name_of(event: Event) -> str:
    """What an event is known by: a digest of its source and id, so that names are short whatever they are."""
    return hashlib.blake2b(f"{event.source}\0{event.id}".encode("utf-8", "replace"), digest_size=16).hexdigest()


class Completed:
    """One service's memory of what it has completed, kept in a store."""

    def __init__(self, service: str, settings: Idempotency, store: Store) -> None:
        self._service = service
        self._settings = settings
        self._store = store
        self._owner = secrets.token_hex(8)
        self._words = Words()
        self._asking: list[tuple[asyncio.Future[list[Seen]], int]] = []
        self._said: list[asyncio.Future[None]] = []
        self._call: asyncio.Task[None] | None = None
        self._warned = 0.0
        self.round_trips = 0

    async def ask(self, deliveries: Sequence[Delivery]) -> list[Seen]:
        """For each: new, done, or claimed by another copy."""
        self._words.asks += [name_of(delivery.event) for delivery in deliveries]
        answer: asyncio.Future[list[Seen]] = asyncio.get_running_loop().create_future()
        self._asking.append((answer, len(deliveries)))
        self._go()
        return await answer

    async def record(self, items: Sequence[Item]) -> None:
        """Write down what is completed, before the broker hears of it; let go of what is not."""
        done = [name_of(delivery.event) for delivery, settlement in items if settlement is ACK]
        let_go = []
        if self._settings.claim is not None:
            let_go = [name_of(delivery.event) for delivery, settlement in items if settlement is not ACK]
        if not done and not let_go:
            return
        self._words.done += done
        self._words.let_go += let_go
        said: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._said.append(said)
        self._go()
        await said

    def _go(self) -> None:
        if self._call is None:
            self._call = asyncio.get_running_loop().create_task(self._talk(), name=f"eventbus store {self._service}")

    async def _talk(self) -> None:
        try:
            # A turn of the loop: completions that are being settled now go along with the questions.
            await asyncio.sleep(0)
            while self._asking or self._said:
                await self._tell()
        finally:
            self._call = None

    async def _tell(self) -> None:
        words, asking, said = self._words, self._asking, self._said
        self._words, self._asking, self._said = Words(), [], []
        self.round_trips += 1
        settings = self._settings
        try:
            async with asyncio.timeout(PATIENCE):
                answers = await self._store.tell(
                    self._service, words, window=settings.window, claim=settings.claim, owner=self._owner
                )
        except (EventBusError, TimeoutError) as error:
            self._failed(words, error)
            answers = ["new"] * len(words.asks)
        except BaseException as error:
            waiting: list[asyncio.Future[Any]] = [*(entry[0] for entry in asking), *said]
            for each in waiting:
                if not each.done():
                    each.set_exception(error)
            raise
        start = 0
        for answer, number in asking:
            if not answer.done():
                answer.set_result(answers[start : start + number])
            start += number
        for future in said:
            if not future.done():
                future.set_result(None)

    def _failed(self, words: Words, error: BaseException) -> None:
        self._words.done = words.done[-KEPT:] + self._words.done
        if time.monotonic() - self._warned > 10.0:
            self._warned = time.monotonic()
            fields = {"service": self._service, "error": str(error) or "no answer in time", "kept": len(words.done)}
            telemetry.log(logging.WARNING, "idempotency_store_failed", fields)
