"""Apache Kafka (KRaft) for tests: one node or three on loopback, killed, paused, restarted; only ours is stopped.

`EVENTBUS_TEST_KAFKA_URL` names a running broker instead; that one is never killed, so tests that kill skip then.
`python -m tests.brokers.kafka install|start|stop|url` is what `make brokers` calls.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.brokers.sharing import Shared, cache, locked

URL_VARIABLE = "EVENTBUS_TEST_KAFKA_URL"
VERSION = "4.1.0"
PORT = 19092
START_TIMEOUT = 90.0
CLUSTER_ID = "ZXZlbnRidXMtdGVzdHMtMQ"
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>eventbus</groupId><artifactId>kafka-for-tests</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>{VERSION}</version>
    </dependency>
  </dependencies>
</project>
"""
DEBIAN = """
set -e
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update
apt-get -q -y -o DPkg::Lock::Timeout=600 install --no-install-recommends openjdk-17-jre-headless maven
"""
# A small broker that answers at once: a test waits for topics and groups, not for what they save in a data centre.
QUICK = """
auto.create.topics.enable=true
offsets.topic.num.partitions=4
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
controller.quorum.append.linger.ms=0
num.network.threads=2
num.io.threads=4
num.recovery.threads.per.data.dir=2
log.index.size.max.bytes=65536
log.cleaner.dedupe.buffer.size=4194304
log.cleaner.threads=1
"""


def libraries() -> Path:
    """The folder of Kafka's jars: outside the tree."""
    return cache() / f"kafka-{VERSION}" / "libs"


def installed() -> bool:
    return shutil.which("java") is not None and (libraries().parent / "complete").exists()


def install() -> bool:
    """Bring Java from Debian's packages and Kafka by Maven, where they are missing and that is possible."""
    if installed():
        return True
    with locked(cache() / "install.lock"):
        if installed():
            return True
        if shutil.which("java") is None or shutil.which("mvn") is None:
            if os.geteuid() != 0 or shutil.which("apt-get") is None:
                return False
            if subprocess.run(["sh", "-c", DEBIAN], check=False).returncode != 0:
                return False
        libraries().mkdir(parents=True, exist_ok=True)
        (libraries().parent / "pom.xml").write_text(POM)
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={libraries()}"]
        done = subprocess.run(command, cwd=libraries().parent, check=False).returncode == 0
        if done:
            (libraries().parent / "complete").touch()
        return done and installed()


class KafkaNode:
    """One node, broker and controller at once, with its own ports and folder."""

    def __init__(
        self, port: int = PORT, *, folder: Path | None = None, id: int = 1, peers: Sequence[int] = (), conf: str = ""
    ) -> None:
        """`peers`: the ports of all nodes of the cluster, in the order of their ids; none for a node alone."""
        self.port, self.id = port, id
        self.folder = folder or cache() / f"kafka-node-{port}"
        self._peers = tuple(peers) or (port,)
        self._conf = conf
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{port}"
        self.url = f"kafka://{self.address}"

    # --- life ------------------------------------------------------------------------------------------------

    def start(self, *, wait: bool = True) -> None:
        """Start it, unless it answers already, and wait until it takes requests."""
        if self.answers():
            return
        if not installed():
            raise RuntimeError("Kafka is not installed: make brokers-install")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "server.properties").write_text(self._properties())
        if not (self.folder / "data" / "meta.properties").exists():
            config = str(self.folder / "server.properties")
            self.tool("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", config, "--ignore-formatted")
        with (self.folder / "console").open("ab") as console:
            self._process = subprocess.Popen(
                [*_java("-Xmx512m", "-Xms128m"), "kafka.Kafka", str(self.folder / "server.properties")],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # a group of its own: one signal reaches all of it, and nothing else
            )
        self._pid_file.write_text(str(self._process.pid))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until it takes requests."""
        deadline = time.monotonic() + START_TIMEOUT
        while not self.answers():
            gone = self._process is not None and self._process.poll() is not None
            if gone or time.monotonic() > deadline:
                console = (self.folder / "console").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"Kafka did not start on port {self.port}: {console}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, as the out-of-memory killer does it."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: an orderly shutdown."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Freeze it: connections stay open, nobody answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def _end(self, number: signal.Signals) -> None:
        self._signal(number)
        if self._process is not None:
            self._process.wait(60)
            self._process = None
        deadline = time.monotonic() + 60
        while self._listens():
            if time.monotonic() > deadline:
                raise RuntimeError(f"something still listens on port {self.port}")
            time.sleep(0.05)
        self._pid_file.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.killpg(int(self._pid_file.read_text()), number)

    # --- asking ----------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """Whether it answers a request for the versions of its API."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.settimeout(2.0)
                request = struct.pack(">hhih", 18, 0, 7, 1) + b"t"
                connection.sendall(struct.pack(">i", len(request)) + request)
                head = connection.recv(10)
                return len(head) == 10 and head[4:8] == b"\x00\x00\x00\x07" and head[8:10] == b"\x00\x00"
        except OSError:
            return False

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def tool(self, name: str, *arguments: str) -> str:
        """One of Kafka's own command-line tools, by the name of its class."""
        done = subprocess.run(
            [*_java("-Xmx128m"), name, *arguments], cwd=self.folder, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def committed(self, group: str) -> dict[tuple[str, int], tuple[int, int]]:
        """What the stock tool says of a group: committed offset and log end, by topic and partition."""
        out = self.tool(
            "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
            *("--bootstrap-server", self.address, "--describe", "--offsets", "--group", group),
        )
        found = {}
        for line in out.splitlines():
            row = line.split()
            if len(row) > 5 and row[0] == group and row[3].isdigit():
                found[row[1], int(row[2])] = int(row[3]), int(row[4])
        return found

    # --- inside ----------------------------------------------------------------------------------------------

    @property
    def _pid_file(self) -> Path:
        return self.folder / "pid"

    def _properties(self) -> str:
        voters = ",".join(f"{id}@127.0.0.1:{port + 1}" for id, port in enumerate(self._peers, 1))
        copies = min(3, len(self._peers))
        return f"""process.roles=broker,controller
node.id={self.id}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self.port + 1}
advertised.listeners=PLAINTEXT://127.0.0.1:{self.port}
controller.listener.names=CONTROLLER
log.dirs={self.folder}/data
offsets.topic.replication.factor={copies}
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr={max(1, copies - 1)}
{QUICK}{self._conf}
"""


def _java(*options: str) -> list[str]:
    # The first compiler is enough for minutes, and starts in half the time; one collector thread leaves a core to us.
    quick = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
    return ["java", *options, *quick, "-cp", f"{libraries()}/*"]


SHARED = Shared("Kafka", URL_VARIABLE, KafkaNode(), install, installed, by_hand="it needs Java 17 and Maven")
need = SHARED.need


def shared_url() -> str:
    """The broker that tests share: given by the environment, running already, or started now."""
    if SHARED.given:
        return SHARED.given
    shared = KafkaNode()

    def start() -> None:
        shutil.rmtree(shared.folder, ignore_errors=True)  # reading the topics of past runs would take longer
        shared.start()

    SHARED.use(start, shared.kill)
    return shared.url


@contextlib.contextmanager
def node(port: int, folder: Path, conf: str = "") -> Iterator[KafkaNode]:
    """A node of its own that lives as long as a test module."""
    need()
    fresh = KafkaNode(port, folder=folder, conf=conf)
    if fresh.answers():
        raise RuntimeError(f"another Kafka answers on port {port}: is another run of these tests under way?")
    fresh.start()
    try:
        yield fresh
    finally:
        fresh.resume()
        fresh.kill()


@contextlib.contextmanager
def cluster(first_port: int, folder: Path, conf: str = "") -> Iterator[list[KafkaNode]]:
    """Three nodes that form one cluster."""
    need()
    ports = [first_port, first_port + 10, first_port + 20]
    nodes = [
        KafkaNode(port, folder=folder / str(id), id=id, peers=ports, conf=conf) for id, port in enumerate(ports, 1)
    ]
    try:
        for each in nodes:
            each.start(wait=False)
        for each in nodes:
            each.wait()
        yield nodes
    finally:
        for each in nodes:
            each.resume()
            each.kill()


if __name__ == "__main__":
    sys.exit(SHARED.main())
