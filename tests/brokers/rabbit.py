"""A RabbitMQ of one's own for tests: started on loopback, killed, paused, restarted; only what it started is stopped.

`EVENTBUS_TEST_RABBIT_URL` names a running broker instead; that one is never killed, so tests that kill skip then.
`python -m tests.brokers.rabbit install|start|stop|url` is what `make brokers` calls.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.brokers.sharing import Shared, cache, locked

URL_VARIABLE = "EVENTBUS_TEST_RABBIT_URL"
HOME_VARIABLE = "EVENTBUS_RABBIT_HOME"
PORT_VARIABLE = "EVENTBUS_RABBIT_PORT"
PORT = int(os.environ.get(PORT_VARIABLE, "5673"))
"""The broker that tests share; brokers that tests start for themselves have the ports after it."""
EPMD_PORT = 4370
START_TIMEOUT = 90.0
INSTALL = """
set -e
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
mine=no
if [ ! -e /usr/sbin/policy-rc.d ]; then
    # The package must not start the system's own broker.
    printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    mine=yes
fi
trap 'if [ "$mine" = yes ]; then rm -f /usr/sbin/policy-rc.d; fi' EXIT
apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update
apt-get -q -y -o DPkg::Lock::Timeout=600 install --no-install-recommends rabbitmq-server
"""


def binaries(home: str | None = None) -> Path | None:
    """The folder of RabbitMQ's scripts, if it is installed."""
    found = Path(home or os.environ.get(HOME_VARIABLE) or "/usr/lib/rabbitmq") / "bin"
    return found if (found / "rabbitmq-server").exists() else None


def installed() -> bool:
    return binaries() is not None


def install() -> bool:
    """Install Debian's package where that is possible, without letting it start the system's own broker."""
    if installed():
        return True
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    with locked(cache() / "install.lock"):
        return installed() or (subprocess.run(["sh", "-c", INSTALL], check=False).returncode == 0 and installed())


class RabbitNode:
    """One node with its own name, ports and folders."""

    def __init__(self, name: str = "eventbus", port: int = PORT, *, folder: Path | None = None, conf: str = "") -> None:
        # One name server knows the nodes of all who test on this machine: other ports, other names.
        self.name = f"{name}@localhost" if PORT == 5673 else f"{name}-{PORT}@localhost"
        self.port = port
        self.dist_port = port + 20_000
        self.folder = folder or cache() / f"rabbit-{name}-{port}"
        self._conf = conf
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"amqp://guest:guest@127.0.0.1:{port}/"

    # --- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, unless it answers already, and wait until it takes connections."""
        if self.answers():
            return
        scripts = binaries()
        if scripts is None:
            raise RuntimeError("RabbitMQ is not installed: apt-get install rabbitmq-server")
        for part in ("mnesia", "log", "home"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.default = 127.0.0.1:{self.port}\nloopback_users.guest = true\nlog.file.level = warning\n"
            f"disk_free_limit.absolute = 50MB\n{self._conf}\n"
        )
        self._start_epmd()
        with (self.folder / "log" / "console").open("ab") as console:
            self._process = process = subprocess.Popen(
                [str(scripts / "rabbitmq-server")],
                env=self._env(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # a group of its own: one signal reaches all of it, and nothing else
            )
        self._pid_file.write_text(str(process.pid))
        self._wait(process)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not self.answers():
            if process.poll() is not None or time.monotonic() > deadline:
                console = (self.folder / "log" / "console").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"RabbitMQ did not start on port {self.port}: {console}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL, as the out-of-memory killer does it."""
        self._signal(signal.SIGKILL)
        self._pid_file.unlink(missing_ok=True)
        self._gone()

    def stop(self) -> None:
        """SIGTERM: an orderly shutdown."""
        self._signal(signal.SIGTERM)
        self._pid_file.unlink(missing_ok=True)
        self._gone()

    def pause(self) -> None:
        """Freeze it: connections stay open, nobody answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.killpg(int(self._pid_file.read_text()), number)

    def _gone(self) -> None:
        deadline = time.monotonic() + 60
        while _listens(self.port):
            if time.monotonic() > deadline:
                raise RuntimeError(f"something still listens on port {self.port}")
            time.sleep(0.05)
        if self._process is not None:
            self._process.wait(60)

    # --- asking ----------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """Whether it speaks AMQP."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.settimeout(2.0)
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return connection.recv(1) == b"\x01"
        except OSError:
            return False

    def wait_for_port(self, port: int) -> None:
        """Wait until it listens on a second port."""
        deadline = time.monotonic() + START_TIMEOUT
        while not _listens(port):
            if time.monotonic() > deadline:
                raise RuntimeError(f"RabbitMQ does not listen on port {port}")
            time.sleep(0.05)

    def ctl(self, *arguments: str) -> str:
        """rabbitmqctl, for what AMQP does not tell."""
        scripts = binaries()
        assert scripts is not None
        command = [str(scripts / "rabbitmqctl"), "-q", "-n", self.name, *arguments]
        return subprocess.run(
            command, env=self._env(), cwd=self.folder, check=True, capture_output=True, text=True, timeout=120
        ).stdout

    def depths(self, vhost: str = "/") -> dict[str, int]:
        """Messages by queue, ready and unacknowledged together."""
        out = self.ctl("list_queues", "-p", vhost, "--no-table-headers", "name", "messages")
        rows = (line.split("\t") for line in out.splitlines() if "\t" in line)
        return {name: int(number) for name, number in rows if number.isdigit()}

    def close_connections(self) -> None:
        """Cut every client off."""
        self.ctl("close_all_connections", "cut by a test")

    # --- inside ----------------------------------------------------------------------------------------------

    @property
    def _pid_file(self) -> Path:
        return self.folder / "pid"

    def _env(self) -> dict[str, str]:
        return os.environ | {
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.dist_port),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "no-such-file"),
            "ERL_EPMD_PORT": str(EPMD_PORT),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "HOME": str(self.folder / "home"),  # the Erlang cookie lives there
        }

    def _start_epmd(self) -> None:
        """Erlang's name server, on a port of its own; shared by our nodes, and left running like a daemon."""
        epmd = shutil.which("epmd")
        if epmd is not None:
            subprocess.run([epmd, "-daemon", "-port", str(EPMD_PORT), "-address", "127.0.0.1"], check=False, timeout=10)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


SHARED = Shared("RabbitMQ", URL_VARIABLE, RabbitNode(), install, installed, by_hand="apt-get install rabbitmq-server")
need = SHARED.need


@functools.cache
def shared_url() -> str:
    """The broker that tests share: given by the environment, running already, or started now."""
    if SHARED.given:
        return SHARED.given
    SHARED.use()
    vhost = f"tests-{os.getpid()}"  # of its own, so that queues of past runs do not pile up on a broker that stays
    shared = RabbitNode()
    shared.ctl("add_vhost", vhost)
    shared.ctl("set_permissions", "-p", vhost, "guest", ".*", ".*", ".*")
    atexit.register(shared.ctl, "delete_vhost", vhost)
    return shared.url + vhost


@contextlib.contextmanager
def node(name: str, port: int, folder: Path, conf: str = "") -> Iterator[RabbitNode]:
    """A node that lives as long as a test module."""
    need()
    fresh = RabbitNode(name, port, folder=folder, conf=conf)
    fresh.start()
    try:
        yield fresh
    finally:
        fresh.resume()
        fresh.kill()


if __name__ == "__main__":
    sys.exit(SHARED.main())
