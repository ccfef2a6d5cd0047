"""Brokers that tests share: started by whoever needs one first, stopped by whoever needs it last.

Test processes beside each other use the same one. What `make brokers` started is used too, and stays.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NoReturn, Protocol

import pytest


def cache() -> Path:
    """Where brokers keep their data: outside the tree."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "eventbus-brokers"


def missing(reason: str) -> NoReturn:
    """Skip a test for something that is not installed; under CI that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Node(Protocol):
    """What a broker must be able to do to be shared."""

    folder: Path
    url: str

    def answers(self) -> bool:
        """Whether it is there."""

    def start(self) -> None:
        """Start it, unless it answers already."""

    def stop(self) -> None:
        """End it."""


class Shared:
    """The one broker of a kind that tests share."""

    def __init__(
        self,
        title: str,
        variable: str,
        node: Node,
        install: Callable[[], bool],
        installed: Callable[[], bool],
        *,
        by_hand: str,
    ) -> None:
        """`variable`: of the environment, which may name a running broker instead; that one is never touched."""
        self.title, self.variable, self.node, self._by_hand = title, variable, node, by_hand
        self._install, self._installed = install, installed
        self._gate = cache() / f"{node.folder.name}.gate"
        self._users = cache() / f"{node.folder.name}.users"
        self._ours = cache() / f"{node.folder.name}.ours"
        self._using: IO[str] | None = None

    @property
    def given(self) -> str | None:
        return os.environ.get(self.variable)

    def need(self) -> None:
        """Skip (under CI: fail) where it is not installed."""
        if not self._installed():
            missing(f"{self.title} is not installed: `make brokers`, or set {self.variable}")

    def use(self, start: Callable[[], None] | None = None, stop: Callable[[], None] | None = None) -> None:
        """Have it run until this process ends; `start` and `stop` in place of the node's own."""
        if self._using is not None:
            return
        self.need()
        with locked(self._gate):
            if not self.node.answers():
                (start or self.node.start)()
                self._ours.touch()
            self._using = self._users.open("w")
            fcntl.flock(self._using, fcntl.LOCK_SH)  # the kernel takes it back from a process that is killed
        atexit.register(self._leave, stop or self.node.stop)

    def _leave(self, stop: Callable[[], None]) -> None:
        assert self._using is not None
        with locked(self._gate), self._using as using, contextlib.suppress(BlockingIOError):
            fcntl.flock(using, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._ours.exists():
                self._ours.unlink()
                stop()

    def main(self) -> int:
        """install, start, stop or url: what `make brokers` calls."""
        what = sys.argv[1] if len(sys.argv) > 1 else "url"
        if what in ("install", "start") and not self.given and not self._install():
            print(f"{self.title} is missing and cannot be installed here: {self._by_hand}", file=sys.stderr)
            return 1
        if what == "start" and not self.given:
            with locked(self._gate):
                self.node.start()
                self._ours.unlink(missing_ok=True)  # tests leave it alone from now on
        if what == "stop":
            self.node.stop()
        elif what != "install":
            prefix = f"{self.variable}=" if what == "start" else ""
            print(f"{prefix}{self.given or self.node.url}")
        return 0
