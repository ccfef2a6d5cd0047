"""A real redis-server of one's own: started on loopback, killed, paused, restarted; docs/redis.conf is its config."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.brokers.sharing import missing

CONFIG = Path(__file__).parents[2] / "docs" / "redis.conf"
URL = "EVENTBUS_TEST_REDIS_URL"
BINARY = os.environ.get("EVENTBUS_TEST_REDIS_SERVER", "redis-server")
PORTS = range(6391, 6440)
"""Below the ephemeral range: a reconnecting client would otherwise sit on the server's own port one day. 6390 is
that of `make brokers`."""


class RedisServer:
    """One redis-server process. Everything it writes is in one folder; only what was started here is killed."""

    def __init__(
        self, folder: Path | None = None, *arguments: str, port: int | None = None, config: Path | None = CONFIG
    ) -> None:
        self._own = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="eventbus-redis-"))
        self.port = port or claim_port()
        self._arguments = arguments
        self._config = config
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, within: float = 30.0) -> RedisServer:
        """Start it, or start it again on the same data; returns once it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self.folder / "redis.conf"
        if not own.exists() and self._config is not None:
            shutil.copyfile(self._config, own)  # a failover by Sentinel writes into the file that a server was given
        command = [BINARY, *([str(own)] if own.exists() else []), "--port", str(self.port)]
        command += ["--bind", "127.0.0.1", "--dir", str(self.folder), "--daemonize", "no", *self._arguments]
        if shutil.which("setpriv"):  # a test run that is itself killed leaves no server behind
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        deadline = time.monotonic() + within
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"redis-server did not start:\n{(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        return self

    def answers(self) -> bool:
        """Whether it takes commands: a server that loads its data does not yet."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
            connection.sendall(b"PING\r\n")
            reply = connection.recv(64)
            return reply.startswith((b"+PONG", b"-NOAUTH"))
        return False

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nothing is said."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nobody answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it, and remove its folder if it was made here."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
        lock = _claimed.pop(self.port, None)
        if lock is not None:
            lock.close()
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


_claimed: dict[int, IO[str]] = {}


def claim_port() -> int:
    """A port of ours that nobody uses now, kept for this process: a killed server finds it free when it restarts."""
    for port in PORTS:
        if port in _claimed:
            continue
        lock = (Path(tempfile.gettempdir()) / f"eventbus-redis-{port}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _claimed[port] = lock
        atexit.register(lock.close)
        return port
    raise AssertionError(f"all ports from {PORTS[0]} to {PORTS[-1]} are taken")


def require() -> None:
    """Skip where there is no redis-server; in CI that is a failure."""
    if shutil.which(BINARY) is None:
        missing("no redis-server here: run `make brokers`, or apt-get install redis-server")


_shared: list[RedisServer] = []


def shared_url() -> str:
    """A server that all tests of a run share: the environment's, or one that is started now and ends with the run."""
    if os.environ.get(URL):
        return os.environ[URL]
    require()
    if not _shared:
        server = RedisServer().start()
        atexit.register(server.stop)
        _shared.append(server)
    return _shared[0].url


@contextlib.contextmanager
def server(*arguments: str, port: int | None = None, config: Path | None = CONFIG) -> Iterator[RedisServer]:
    """A server of the test's own, to be killed.

    With everysec a server whose disk is busy answers up to two seconds before it writes: what it accepted just before
    a kill may be gone, and that is not the test's matter.
    """
    require()
    with RedisServer(None, "--appendfsync", "always", *arguments, port=port, config=config) as running:
        yield running
