"""What aiokafka's errors mean for us, in one place, each with what to do about it.

BrokerError
├── TooLarge           the record is larger than its topic takes
├── Refused            the cluster answered, and said no; nothing was changed
├── OutOfOrder         a record before it was refused, and it with it; nothing was changed
├── Fenced             the group has moved on: the partitions may belong to another consumer now
└── BrokerUnavailable
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from aiokafka import errors as kafka

from eventbus.errors import BrokerError, BrokerUnavailable
from eventbus.redaction import redact


class TooLarge(BrokerError):
    """The record is larger than its topic takes."""


class Refused(BrokerError):
    """The cluster said no."""


class OutOfOrder(BrokerError):
    """A record before it was refused, and so was it."""


class Fenced(BrokerError):
    """The group has moved on."""


_REFUSALS = (
    kafka.TopicAuthorizationFailedError,
    kafka.GroupAuthorizationFailedError,
    kafka.ClusterAuthorizationFailedError,
    kafka.TransactionalIdAuthorizationFailed,
)
_NOT_LET_IN = (
    kafka.SaslAuthenticationFailed,
    kafka.AuthenticationFailedError,
    kafka.UnsupportedSaslMechanismError,
)


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Errors of the driver leave here as ours."""
    try:
        yield
    except (kafka.KafkaError, OSError, TimeoutError) as error:
        raise translate(error, where) from error


def translate(error: BaseException, where: str) -> BrokerError:
    """The error of ours for one of the driver's."""
    if isinstance(error, BrokerError):
        return error
    known = str(error) if isinstance(error, kafka.KafkaError) else f"{type(error).__name__}: {error}"
    text = redact(known).rstrip(": ")
    if isinstance(error, (kafka.MessageSizeTooLargeError, kafka.RecordTooLargeError, kafka.RecordListTooLargeError)):
        return TooLarge(f"{where}: larger than the topic takes (max.message.bytes)")
    if isinstance(error, kafka.OutOfOrderSequenceNumber):
        return OutOfOrder(f"{where}: {text}")
    if isinstance(error, _REFUSALS):
        return Refused(f"{where}: not permitted ({text}); docs/kafka.md lists the permissions that the bus needs")
    if isinstance(error, kafka.IllegalSaslStateError):
        return Refused(f"{where} asks for no login; take user and password out of the URL, or use its port for SASL")
    if isinstance(error, _NOT_LET_IN):
        return Refused(f"{where} did not let us in ({text}); check user and password in the URL, and sasl_mechanism")
    if isinstance(error, kafka.RebalanceInProgressError):
        return BrokerUnavailable(f"{where}: the group is rebalancing")
    if isinstance(error, (kafka.UnknownMemberIdError, kafka.IllegalGenerationError)):
        return Fenced(f"{where}: the group has moved on without this consumer")
    if isinstance(error, kafka.IllegalStateError):
        return Fenced(f"{where}: {text}")
    if isinstance(error, (TimeoutError, kafka.KafkaTimeoutError, kafka.RequestTimedOutError)):
        return BrokerUnavailable(f"{where} did not answer in time; is it overloaded, or stopped? Is it Kafka?")
    if isinstance(error, kafka.IncompatibleBrokerVersion):
        return BrokerUnavailable(f"{where} does not answer as a broker does ({text}); is it the port of a controller?")
    if isinstance(error, kafka.NodeNotReadyError):
        return BrokerUnavailable(f"{where} is not ready ({text}); is Kafka running there?")
    if isinstance(error, ssl.SSLError):
        return BrokerUnavailable(
            f"TLS with {where} failed ({text}); check the host's name and cafile, certfile and keyfile"
        )
    if isinstance(error, (kafka.KafkaConnectionError, OSError)):
        return BrokerUnavailable(f"{where} cannot be reached ({text}); is Kafka running there?")
    if isinstance(error, kafka.KafkaError) and not error.retriable:
        return Refused(f"{where}: {text}")
    return BrokerUnavailable(f"{where}: {text}")


def hung_up(where: str) -> BrokerUnavailable:
    """Somebody is there, and closed the connection instead of an answer: Kafka does so to who is not let in."""
    wants = "tls = true, a login or a client certificate (or none of them)"
    return BrokerUnavailable(f"{where} closed the connection at our first words; does it want {wants}? Is it Kafka?")
