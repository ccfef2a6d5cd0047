"""What both consumers share: what is held, and the keeper that renews leases and keeps house."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from eventbus import telemetry
from eventbus.adapter import Consumer, Subscription
from eventbus.errors import EventBusError, UnknownService
from eventbus.settlement import Delivery
from eventbus_redis.fields import Story

if TYPE_CHECKING:
    from eventbus_redis.adapter import RedisAdapter

EXPIRE_INTERVAL: Final = 30.0


class Receipt:
    """Which entry a delivery is, its reserved headers, and its fields as they came."""

    __slots__ = ("fields", "id", "key", "noted", "story")

    def __init__(self, key: bytes, id: bytes, fields: list[bytes], story: Story, noted: bool) -> None:
        self.key = key
        """`m` or `q`, for the shared stream or the service's own, and the id."""
        self.id = id
        self.fields = fields
        self.story = story
        self.noted = noted


class LeasedConsumer(Consumer):
    """A consumer without a place to read from: see work.py and letters.py."""

    def __init__(self, adapter: RedisAdapter, subscription: Subscription) -> None:
        self._adapter = adapter
        self._client = adapter.client
        self._subscription = subscription
        self._keys = adapter.options.names.of_service(subscription.service, subscription.prefix)
        self._name = fresh_name()
        self._held: dict[bytes, Delivery] = {}
        self._woken = False
        self._closed = False
        self._signal = asyncio.Event()
        self._ending = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LeasedConsumer:
        await self._adapter.check_subscribed(self._subscription.service, self._subscription.prefix)
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name=f"eventbus lease {self.queue}")
        return self

    def wake(self) -> None:
        """Make a waiting receive return; if none waits just now, the next one."""
        self._woken = True
        self._signal.set()

    async def _keep(self) -> None:
        """Renew the leases of what is held well before they end, and keep house in between."""
        loop = asyncio.get_running_loop()
        lease = self._adapter.options.lease
        renewed = expired = loop.time()
        while True:
            # Ended by a word and not cancelled: a renewal that is under way is finished first.
            try:
                async with asyncio.timeout(min(lease / 3, 0.5)):
                    await self._ending.wait()
                return
            except TimeoutError:
                now = loop.time()
            try:
                if now - renewed >= lease / 3 - 0.01:
                    renewed = now
                    await self._renew()
                await self._clean()
                if now - expired >= EXPIRE_INTERVAL:
                    expired = now
                    await self._adapter.expire(self._subscription.service, self._subscription.prefix)
            except UnknownService:
                continue  # whoever receives will hear of it
            except EventBusError as error:
                # The next round may still be in time; if not, others take over and we hear of it then.
                telemetry.log(logging.WARNING, "lease_renewal_failed", self._fields() | {"error": str(error)})
            except Exception as error:  # noqa: BLE001 - a bug in here must not cost us every lease
                telemetry.log(logging.ERROR, "keeper_failed", self._fields() | {"error": repr(error)}, exc_info=error)

    def _drop(self, deliveries: Sequence[Delivery]) -> None:
        """These were taken away."""
        lost = []
        for delivery in deliveries:
            key = receipt_of(delivery).key
            if self._held.get(key) is delivery:
                del self._held[key]
                lost.append(delivery)
        if lost:
            self.lost(lost)

    async def aclose(self) -> None:
        """Stop renewing; what is unsettled can be received by others at once."""
        if self._closed:
            return
        self._closed = True
        self.wake()
        self._ending.set()
        if self._keeper is not None:
            await asyncio.gather(self._keeper, return_exceptions=True)
        try:
            await self._let_go()
        except EventBusError as error:
            # Their leases end by themselves.
            telemetry.log(logging.DEBUG, "let_go_failed", {"queue": self.queue, "error": str(error)})

    def _fields(self) -> dict[str, object]:
        return {"service": self._subscription.service, "queue": self.queue}

    @abstractmethod
    async def _renew(self) -> None: ...

    @abstractmethod
    async def _clean(self) -> None: ...

    @abstractmethod
    async def _let_go(self) -> None: ...


def fresh_name() -> str:
    """Never the name of another one, nor of a former life: a name is what a settlement is checked by."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(6)}"


def receipt_of(delivery: Delivery) -> Receipt:
    """The receipt of a delivery of ours."""
    receipt = delivery.receipt
    assert isinstance(receipt, Receipt)
    return receipt
