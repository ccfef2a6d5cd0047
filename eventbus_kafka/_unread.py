"""What was fetched of a partition stays bytes until somebody wants a record of it. The only other place with aiokafka.

aiokafka makes objects of everything that it was asked for, one by one, in Python. Thousands of them wait then, and the
garbage collector walks through all of them again and again: a third of what a message cost. So it gets batches in the
place of records, and does with them all that it does: checks them, skips what was aborted, moves its position. What is
in them is read here, by the same parser, a handful at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, dropwhile, islice
from types import FunctionType, MethodType
from typing import Any, Final

from aiokafka.consumer import fetcher

from eventbus.errors import BrokerError
from eventbus_kafka.records import Record

LARGEST_PIECE: Final = 256 * 1024
SMALLEST_PIECE: Final = 16 * 1024
IN_ALL: Final = 32 * 1024 * 1024
"""Bytes of all partitions that lanes keep; as much again may wait at the fetcher."""


def piece_of_each(partitions: int) -> int:
    """Bytes of one of so many partitions that are fetched at once. A larger batch comes alone."""
    return max(SMALLEST_PIECE, min(LARGEST_PIECE, IN_ALL // max(1, partitions)))


class Unread:
    """Records of one partition that were fetched together, in their order."""

    __slots__ = ("_goes_on", "_problem", "_records", "_where", "end", "left", "size", "start")

    def __init__(self, batches: Sequence[_Batch], where: str) -> None:
        """`where` they come from, for whoever must be told that they cannot be read."""
        records = chain.from_iterable(batch.records for batch in batches)
        start = batches[0].start
        self._records: Iterator[Record] = dropwhile(lambda record: record.offset < start, records)
        self._where = where
        self._problem: BrokerError | None = None
        self.start = self._goes_on = start
        """Where they begin, maybe in the middle of a batch."""
        self.end = batches[-1].offset + 1
        """Beyond the last of them."""
        self.size = batches[0].fetched
        """Bytes that they take, as they came."""
        self.left = True
        """Whether there may be more."""

    def read(self, most: int) -> list[Record]:
        """The next ones; fewer at the end. Raises for what cannot be read, every time: nothing is passed over."""
        if self._problem is not None:
            raise self._problem.with_traceback(None)
        found: list[Record] = []
        try:
            found.extend(islice(self._records, most))
        except Exception as error:
            start = found[-1].offset + 1 if found else self._goes_on
            problem = f"{self._where}: what was fetched from offset {start} on cannot be read ({error!r})"
            self._problem = BrokerError(problem)
            self._problem.__cause__ = error
            if not found:  # else first what stands before
                raise self._problem from error
            return found
        if found:
            self._goes_on = found[-1].offset + 1
        self.left = len(found) == most
        return found


class _Batch:
    """A batch as aiokafka reads it, that has itself for its only record, with the last offset in it."""

    def __init__(self, records: Any, fetched: int) -> None:
        self.records = records
        self.fetched = fetched
        self.offset = records.next_offset - 1
        self.start = 0

    def validate_crc(self) -> bool:
        """Looked at before, in _Batches: an error of aiokafka here takes what came of all other partitions with it."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.records, name)

    def __iter__(self) -> Iterator[_Batch]:
        return iter((self,))

    def __next__(self) -> Any:
        return next(self.records)  # of a batch that says how a transaction ended


class _Batches:
    def __init__(self, records: Any) -> None:
        self._records = records
        self._size = records.size_in_bytes()
        self.has_next = records.has_next

    def next_batch(self) -> _Batch:
        batch = self._records.next_batch()
        return _Batch(batch if batch.validate_crc() else _Spoiled(batch.next_offset), self._size)


class _Spoiled:
    """In the place of a batch that is not as it was written: whoever wants a record of it is told."""

    is_control_batch = is_transactional = False
    producer_id = None

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset

    def __iter__(self) -> Iterator[Record]:
        raise ValueError(f"the checksum of the batch that ends at offset {self.next_offset - 1} is wrong")


class _PartitionRecords(fetcher.PartitionRecords):  # type: ignore[misc]
    def __init__(self, tp: Any, records: Any, *rest: Any) -> None:
        super().__init__(tp, _Batches(records), *rest)

    def _consumer_record(self, tp: Any, record: _Batch) -> _Batch:
        record.start = self.next_fetch_offset
        return record


_FETCHING: Final = FunctionType(
    fetcher.Fetcher._proc_fetch_request.__code__, vars(fetcher) | {"PartitionRecords": _PartitionRecords}
)


def leave_unread(consumer: Any) -> None:
    """Let a consumer of aiokafka that was started give out batches. Its own code, with another class in it."""
    consumer._fetcher._proc_fetch_request = MethodType(_FETCHING, consumer._fetcher)


def fetch_pieces(consumer: Any, size: int) -> None:
    """How much of a partition comes at once: aiokafka wants to know before it knows how many there will be."""
    consumer._fetcher._max_partition_fetch_bytes = size
