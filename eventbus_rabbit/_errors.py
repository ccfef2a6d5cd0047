"""The client's errors, translated in this one place. aiormq and aio-pika errors never leave the package."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import aiormq.exceptions as amqp
from pamqp.exceptions import PAMQPException

from eventbus.errors import BrokerError, BrokerUnavailable, EventBusError

CLIENT_ERRORS: Final = (
    amqp.AMQPError,
    amqp.ChannelInvalidStateError,
    PAMQPException,
    OSError,  # refused, reset, unknown host, TLS
    TimeoutError,
    EOFError,
    RuntimeError,  # "connection closed" of aiormq.Connection.channel
)


class NotFound(BrokerError):
    """A queue or exchange is not there."""


class Refused(BrokerError):
    """The user lacks the permission, or somebody else has exclusive access."""


class Differs(BrokerError):
    """A queue or exchange is there with other arguments."""


class Rejected(BrokerUnavailable):
    """The broker answered and did not let us in: wrong password, vhost or TLS."""


@contextmanager
def translated(what: str, *, where: str = "") -> Iterator[None]:
    """Turn every client error inside into one of ours that says what was being done."""
    try:
        yield
    except EventBusError:
        raise
    except CLIENT_ERRORS as error:
        raise translate(error, what, where) from error
    except asyncio.CancelledError as error:
        # aiormq cancels the waiting call when its channel goes away; that is not somebody cancelling us.
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise BrokerUnavailable(f"{what}: the connection was lost{_at(where)}") from error
        raise


def translate(error: BaseException, what: str, where: str = "") -> EventBusError:
    """Our error for one of the client's."""
    text = _text(error)
    if isinstance(error, (amqp.ProbableAuthenticationError, amqp.AuthenticationError)):
        return Rejected(f"{what}: RabbitMQ{_at(where)} refused the user name or password ({text}); check the URL")
    # aiormq meets the server's refusal of a vhost as a frame it did not expect, and drops the reason.
    unexpected = isinstance(error, amqp.InvalidFrameError) and "Connection.OpenOk" in text
    if unexpected or isinstance(error, amqp.ConnectionNotAllowed):
        return Rejected(
            f"{what}: RabbitMQ{_at(where)} has no such vhost for this user ({text}); "
            "make it with `rabbitmqctl add_vhost` and `set_permissions`, or change the path of the URL"
        )
    if isinstance(error, amqp.ChannelAccessRefused):
        return Refused(f"{what}: not permitted ({text}); grant it with `rabbitmqctl set_permissions`")
    if isinstance(error, amqp.ChannelNotFoundEntity):
        return NotFound(f"{what}: not there ({text})")
    if isinstance(error, amqp.ChannelLockedResource):
        return Refused(f"{what}: somebody else holds it ({text})")
    if isinstance(error, amqp.ChannelPreconditionFailed):
        return Differs(f"{what}: {text}")
    if isinstance(error, ssl.SSLError):
        return Rejected(f"{what}: TLS with {where or 'RabbitMQ'} failed ({text}); check cafile, certfile and keyfile")
    if isinstance(error, TimeoutError):
        return BrokerUnavailable(f"{what}: RabbitMQ{_at(where)} did not answer in time")
    if isinstance(error, (amqp.AMQPConnectionError, OSError, EOFError)):
        return BrokerUnavailable(f"{what}: RabbitMQ{_at(where)} cannot be reached ({text}); is it running?")
    if isinstance(error, (amqp.ChannelInvalidStateError, RuntimeError)):
        return BrokerUnavailable(f"{what}: the channel was closed ({text})")
    return BrokerError(f"{what}: {text}")


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _text(error: BaseException) -> str:
    text = ", ".join(str(part) for part in error.args if part not in (None, "")) or type(error).__name__
    return text.replace("\n", " ")[:500]
