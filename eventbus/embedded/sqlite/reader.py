"""The reader: a thread with a connection of its own that only looks. In WAL mode it never holds up the writer."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from eventbus.embedded.sqlite import failures, schema

T = TypeVar("T")


class Reader:
    """Runs queries one after the other; opens the file with the first one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="eventbus sqlite reader")
        self._connection: sqlite3.Connection | None = None

    async def query(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """The answer to a question, asked in the reader's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, question)

    async def aclose(self) -> None:
        """Close the file and end the thread."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._close)
        self._pool.shutdown(wait=False)

    def _ask(self, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = schema.connect(self._path, write=False)
            return question(self._connection)
        except sqlite3.Error as error:
            raise failures.translate(error, self._path) from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
