"""What can go wrong with a file: each trouble has a clear word, and nothing is lost by any of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventbus.embedded.sqlite import SqliteAdapter, failures, location, schema
from eventbus.embedded.sqlite.writer import Operation, Transaction
from eventbus.errors import BrokerError, BrokerUnavailable, ConfigError
from eventbus.event import Event
from eventbus.settlement import ACK
from tests.adapter.sqlite_support import SUB, locked, opened, parking, receive, sql

NOBODY = 65534


async def refused(path: Path | str, kind: type[Exception], words: str) -> None:
    """Opening the bus there fails with this word."""
    adapter = SqliteAdapter.from_url(f"sqlite:///{path}", {"lock_timeout": "100ms"})
    with pytest.raises(kind, match=words):
        await adapter.open()
    await adapter.aclose()


async def test_a_file_locked_by_another_process(tmp_path: Path) -> None:
    """After lock_timeout the error names the file and what to do; once unlocked all is well."""
    async with opened(tmp_path, SUB, lock_timeout="100ms") as adapter:
        with locked(tmp_path):
            with pytest.raises(BrokerUnavailable, match=r"bus.db was locked by another process.*fuser.*lock_timeout"):
                await adapter.publish("wms", [Event("a")])
            async with adapter.consume(SUB) as consumer:
                with pytest.raises(BrokerUnavailable, match="locked"):
                    await consumer.receive(1, 0.1)
            assert (await adapter.stats("wms-stock", "wms")).ready == 0
        assert (await adapter.publish("wms", [Event("b")]))[0].status == "stored"
        assert (await adapter.stats("wms-stock", "wms")).ready == 1


async def test_a_lock_that_is_given_back_in_time_is_waited_for(tmp_path: Path) -> None:
    """A publish that finds the file locked goes through as soon as the lock is free."""
    async with opened(tmp_path, SUB) as adapter:
        with locked(tmp_path):
            task = asyncio.ensure_future(adapter.publish("wms", [Event("a")]))
            done, _ = await asyncio.wait([task], timeout=0.2)
            assert not done
        assert (await task)[0].status == "stored"


async def test_a_file_that_cannot_be_made_because_it_is_locked(tmp_path: Path) -> None:
    """Opening a new file while somebody holds it is an error after the deadline, not a hang."""
    async with opened(tmp_path, SUB):
        pass
    sql(tmp_path, "PRAGMA user_version = 0")
    with locked(tmp_path):
        await refused(tmp_path / "bus.db", BrokerUnavailable, "locked by another process")


class Limit(Operation[None]):
    """Lets the file grow by so many pages and no more, as a full disk would."""

    def __init__(self, pages: int) -> None:
        self.pages = pages

    def run(self, tx: Transaction) -> None:
        now = tx.execute("PRAGMA page_count").fetchone()[0]
        tx.execute(f"PRAGMA max_page_count = {now + self.pages}").fetchone()


async def test_a_full_disk_refuses_and_loses_nothing(tmp_path: Path) -> None:
    """Publishing is refused with the reason, parking fails and is kept; with room again all goes on."""
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        await adapter.publish("wms", [Event("kept", b"x" * 20_000) for _ in range(3)])
        got = await receive(consumer, 3)
        await adapter.writer.submit(Limit(1))
        results = await adapter.publish("wms", [Event("big", b"x" * 50_000), Event("small")])
        assert [result.status for result in results] == ["refused", "refused"]
        assert "disk is full" in results[0].error
        assert await consumer.settle([(delivery, parking(delivery)) for delivery in got]) == ["failed"] * 3
        assert await consumer.settle([(got[0], ACK)]) == ["done"]
        await adapter.writer.submit(Limit(10_000))
        assert await consumer.settle([(delivery, parking(delivery)) for delivery in got[1:]]) == ["done"] * 2
        assert (await adapter.publish("wms", [Event("big", b"x" * 50_000)]))[0].status == "stored"
        stats = await adapter.stats("wms-stock", "wms")
        assert (stats.ready, stats.inflight, stats.parked) == (1, 0, 2)


async def test_a_full_disk_under_one_publish_does_not_refuse_the_others(tmp_path: Path) -> None:
    """Of many publishes in one transaction only those that do not fit are refused."""
    async with opened(tmp_path, SUB) as adapter:
        await adapter.writer.submit(Limit(4))
        calls = [adapter.publish("wms", [Event("n", b"x" * (100_000 if n == 5 else 10))]) for n in range(10)]
        results = [result[0].status for result in await asyncio.gather(*calls)]
        assert results == ["stored"] * 5 + ["refused"] + ["stored"] * 4
        assert (await adapter.stats("wms-stock", "wms")).ready == 9


def test_a_file_size_limit_is_told_like_a_full_disk(tmp_path: Path) -> None:
    """Under RLIMIT_FSIZE the commit itself fails: refused, and every event that was stored is still there."""
    script = """
    import asyncio, resource, sys
    from pathlib import Path
    from eventbus.event import Event
    from tests.adapter.sqlite_support import SUB, opened

    async def main(folder):
        async with opened(folder, SUB) as adapter:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
            stored, refused = 0, None
            for _ in range(200):
                (result,) = await adapter.publish("wms", [Event("n", b"x" * 5_000)])
                stored += result.status == "stored"
                refused = refused or (result if result.status != "stored" else None)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert refused.status == "refused", refused
            assert "disk" in refused.error, refused
            (result,) = await adapter.publish("wms", [Event("n")])
            assert result.status == "stored", result
            ready = (await adapter.stats("wms-stock", "wms")).ready
            assert 0 < stored < 200 and ready == stored + 1, (ready, stored)

    asyncio.run(main(Path(sys.argv[1])))
    """
    run_python(script, str(tmp_path))


def run_python(script: str, *args: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", textwrap.dedent(script), *args]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can enter, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def make_read_only(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def spoil(path: Path) -> None:
    """Overwrite everything behind the first page."""
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (os.path.getsize(path) - 4096))


class Unprivileged:
    """For a moment not root: root may write anywhere."""

    def __enter__(self) -> None:
        self.user = os.geteuid()
        if self.user == 0:
            os.seteuid(NOBODY)

    def __exit__(self, *exc: object) -> None:
        os.seteuid(self.user)


async def test_a_folder_that_cannot_be_written(public_folder: Path) -> None:
    """No file can be made there: the error says which access is missing."""
    make_read_only(public_folder)
    with Unprivileged():
        await refused(public_folder / "bus.db", BrokerUnavailable, r"bus.db cannot be opened.*write access")


async def test_a_file_that_cannot_be_written(public_folder: Path) -> None:
    """A read-only file is refused at open, with the access that is missing."""
    async with opened(public_folder, SUB):
        pass
    make_read_only(public_folder)
    with Unprivileged():
        await refused(public_folder / "bus.db", BrokerUnavailable, r"write access")


async def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    """A path that is a folder is refused with a better one."""
    await refused(tmp_path, ConfigError, "is a folder; name a file")


async def test_a_missing_folder(tmp_path: Path) -> None:
    """A missing folder is named, with the command that makes it."""
    await refused(tmp_path / "no" / "bus.db", ConfigError, r"folder .*/no does not exist.*mkdir")


async def test_something_that_is_no_ordinary_file() -> None:
    """A device is refused."""
    await refused("/dev/null", ConfigError, "not an ordinary file")


async def test_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    """Any other file is refused and left as it is."""
    (tmp_path / "bus.db").write_bytes(b"this is a letter to my mother, not a database" * 100)
    before = (tmp_path / "bus.db").read_bytes()
    await refused(tmp_path / "bus.db", ConfigError, "not an SQLite database")
    assert (tmp_path / "bus.db").read_bytes() == before


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
async def test_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """WAL does not work over a network: refused before anything is made there."""
    monkeypatch.setattr(location, "mounts", lambda: [("/", "ext4"), (str(tmp_path), kind), ("/proc", "proc")])
    await refused(tmp_path / "bus.db", ConfigError, rf"network file system \({kind}\)")
    assert files(tmp_path) == []


def test_the_innermost_mount_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local disk mounted below a network one is a local disk; a similar name is not the same place."""
    table = [("/", "ext4"), (str(tmp_path), "nfs"), (f"{tmp_path}/local", "xfs"), (f"{tmp_path}/lo", "cifs")]
    monkeypatch.setattr(location, "mounts", lambda: table)
    assert location.file_system(f"{tmp_path}/local/bus.db") == "xfs"
    assert location.file_system(f"{tmp_path}/locals/bus.db") == "nfs"
    assert location.file_system("/elsewhere/bus.db") == "ext4"


def test_the_mount_table_is_read() -> None:
    """The system's own table has at least the root, with names as they are."""
    table = dict(location.mounts())
    assert table.get("/") or not sys.platform.startswith("linux")
    assert location._unescaped(r"/a\040b\134c") == "/a b\\c"


async def test_a_deleted_file_is_noticed(tmp_path: Path) -> None:
    """Events must not go into a file that nobody can see any more."""
    async with opened(tmp_path, SUB) as adapter:
        for path in files(tmp_path):
            path.unlink()
        adapter.writer._checked = 0.0
        with pytest.raises(BrokerUnavailable, match="is gone"):
            await adapter.publish("wms", [Event("a")])
        (tmp_path / "bus.db").touch()
        adapter.writer._checked = 0.0
        with pytest.raises(BrokerUnavailable, match="replaced"):
            await adapter.publish("wms", [Event("a")])


def test_a_fork_must_open_its_own(tmp_path: Path) -> None:
    """A bus carried over a fork says to open it afterwards; the parent goes on undisturbed."""
    script = """
    import asyncio, os, sys
    from pathlib import Path
    from eventbus.errors import BrokerError
    from eventbus.event import Event
    from tests.adapter.sqlite_support import SUB, opened

    async def child(adapter):
        for call in (adapter.publish("wms", [Event("a")]), adapter.stats("wms-stock", "wms")):
            try:
                await call
            except BrokerError as error:
                assert "after the fork" in str(error), error
            else:
                raise AssertionError("a fork used the parent's connection")
        await adapter.aclose()

    async def main(folder):
        async with opened(folder, SUB) as adapter:
            pid = os.fork()
            if pid == 0:
                asyncio.events._set_running_loop(None)
                code = 1
                try:
                    asyncio.new_event_loop().run_until_complete(child(adapter))
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(pid, 0)[1] == 0
            await adapter.publish("wms", [Event("b")])
            assert (await adapter.stats("wms-stock", "wms")).ready == 1

    asyncio.run(main(Path(sys.argv[1])))
    """
    run_python(script, str(tmp_path))


def sqlite_error(code: int) -> Exception:
    error = schema.sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    return error


async def test_a_commit_whose_fate_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk fails at the very end of a commit, publish says unknown, and settle that it failed."""
    io_fsync, io_write, corrupt = 1034, 778, 11
    fate = failures.translate(sqlite_error(io_fsync), "f", committing=True)  # type: ignore[arg-type]
    assert isinstance(fate, failures.FateUnknown)
    for code, committing in ((io_fsync, False), (io_write, True), (corrupt, True)):
        error = failures.translate(sqlite_error(code), "f", committing=committing)  # type: ignore[arg-type]
        assert isinstance(error, failures.NotStored)
    async with opened(tmp_path, SUB) as adapter, adapter.consume(SUB) as consumer:
        await adapter.publish("wms", [Event("a")])
        (delivery,) = await receive(consumer)

        def fail(operations: object) -> None:
            raise fate

        with monkeypatch.context() as patch:
            patch.setattr(adapter.writer, "_transact", fail)
            (result,) = await adapter.publish("wms", [Event("b")])
            assert (result.status, "not known" in result.error) == ("unknown", True)
            assert await consumer.settle([(delivery, ACK)]) == ["failed"]
        assert await consumer.settle([(delivery, ACK)]) == ["done"]


async def test_a_spoiled_file_says_how_to_mend_it(tmp_path: Path) -> None:
    """A corrupt page is an error with advice, never a wrong answer."""
    async with opened(tmp_path, SUB) as adapter:
        await adapter.publish("wms", [Event("n", b"x" * 3000) for _ in range(50)])
    spoil(tmp_path / "bus.db")
    with pytest.raises(BrokerError, match=r"malformed.*\.recover"):
        async with opened(tmp_path, SUB):
            pass
