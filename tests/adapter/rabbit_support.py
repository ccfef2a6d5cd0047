"""What the RabbitMQ tests share: fresh names on the shared broker, and a stranger who knows only aio-pika."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from eventbus import Bus, Service
from tests.brokers.rabbit import shared_url


def fresh() -> str:
    """A prefix of its own for each test."""
    return f"r{secrets.token_hex(4)}"


def bus(prefix: str, **rabbit: object) -> Bus:
    return Bus(shared_url(), source=f"{prefix}-api", settings={"rabbit": rabbit})


@asynccontextmanager
async def stranger(url: str | None = None) -> AsyncIterator[AbstractChannel]:
    """A channel of another program."""
    connection = await aio_pika.connect(url or shared_url())
    try:
        yield await connection.channel(on_return_raises=True)
    finally:
        await connection.close()


async def get(channel: AbstractChannel, queue: str) -> AbstractIncomingMessage | None:
    """The next message of a queue, if there is one."""
    return await (await channel.get_queue(queue, ensure=False)).get(fail=False)


def work_queue(service: Service) -> str:
    return f"{service.prefix}.queue.{service.name}"


def dead_letter_queue(service: Service) -> str:
    return f"{service.prefix}.dlq.{service.name}"
