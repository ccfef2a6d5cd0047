"""What redis-py's errors mean for us, in one place, each with what to do about it.

BrokerError
├── NoGroup            the consumer group or its stream is gone: FLUSHALL, failover, XGROUP DESTROY
├── MemoryFull         maxmemory is reached; nothing was changed
├── Refused            the server answered, and said no; nothing was changed
└── BrokerUnavailable
    └── FateUnknown    the call was under way when the connection was lost: it may or may not have happened
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from eventbus.errors import BrokerError, BrokerUnavailable
from eventbus.redaction import redact


class NoGroup(BrokerError):
    """The consumer group is gone."""


class MemoryFull(BrokerError):
    """maxmemory is reached; nothing was changed."""


class Refused(BrokerError):
    """The server said no; nothing was changed."""


class FateUnknown(BrokerUnavailable):
    """The connection was lost while the call was under way."""


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Errors of the driver leave here as ours."""
    try:
        yield
    except (TimeoutError, exceptions.RedisError, OSError) as error:
        raise translate(error, address) from error


def translate(error: BaseException, address: str) -> BrokerError:
    """The error of ours for one of the driver's."""
    text = redact(str(error)) or type(error).__name__
    if isinstance(error, exceptions.AuthenticationError):
        return Refused(f"{address}: {text}; check user and password in the URL (redis://user:password@host)")
    if isinstance(error, exceptions.BusyLoadingError):
        return BrokerUnavailable(f"{address} is still loading its data; try again soon")
    if isinstance(error, exceptions.OutOfMemoryError) or (
        isinstance(error, exceptions.ResponseError) and "OOM" in text.partition(" ")[0]
    ):
        return _memory_full(address)
    if isinstance(error, exceptions.ReadOnlyError):
        return BrokerUnavailable(f"{address} is a replica now (failover?); the master is looked for at the next call")
    if isinstance(error, exceptions.ResponseError):
        return _answered(text, address)
    if isinstance(error, exceptions.MaxConnectionsError):
        return BrokerUnavailable(f"{address}: {text}")
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return FateUnknown(f"{address} did not answer in time; is it overloaded, or stopped?")
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return FateUnknown(f"{address} cannot be reached: {text}; is Redis running there?")
    return BrokerError(f"{address}: {text}")


def _answered(text: str, address: str) -> BrokerError:
    if "NOGROUP" in text:
        return NoGroup(f"{address}: {text}")
    if "OOM command not allowed" in text:
        return _memory_full(address)
    if text.startswith(("NOPERM", "NOAUTH", "WRONGPASS")):
        return Refused(f"{address}: {text}; docs/redis.md has the ACL rule that the bus needs")
    if text.startswith(("READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "LOADING", "BUSY")):
        return BrokerUnavailable(f"{address}: {text}")
    return Refused(f"{address}: {text}")


def _memory_full(address: str) -> MemoryFull:
    return MemoryFull(
        f"{address}: the memory is full (maxmemory); nothing was lost: purge dead letters, let lagging services catch "
        f"up, or raise maxmemory"
    )
