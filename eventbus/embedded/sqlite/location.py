"""Whether the file can live where the URL says: not a folder, not below a missing one, not on a network."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

from eventbus.errors import ConfigError

NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "ncpfs", "gpfs"}
    | {"beegfs", "pvfs2", "vboxsf", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.rclone", "fuse.s3fs"}
    | {"fuse.davfs", "fuse.davfs2", "fuse.gcsfuse", "fuse.smbnetfs", "fuse.curlftpfs"}
)
"""File systems on which several clients do not share memory, and SQLite's WAL would corrupt the file."""


def check(path: str) -> None:
    """Raise a ConfigError that says what to do if no bus can live at this path."""
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; name a file in it, such as sqlite:///{path}/bus.db")
    if not os.path.isdir(folder):
        raise ConfigError(f"the folder {folder} does not exist; create it (mkdir -p {folder}) or correct the URL")
    try:
        mode = os.stat(path).st_mode
    except OSError:
        pass  # not there yet, or not readable: opening it will tell which
    else:
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is not an ordinary file; a bus needs one")
    kind = file_system(path)
    if kind in NETWORK:
        raise ConfigError(
            f"{path} is on a network file system ({kind}), where SQLite's shared memory does not work and the file "
            f"would be corrupted; put it on a local disk, or use a broker for several machines"
        )


def file_system(path: str) -> str:
    """The type of the file system that holds the path; empty where the system does not tell."""
    real = os.path.realpath(path)
    best, found = -1, ""
    for place, kind in mounts():
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        # Of two mounts on one place the later one is on top.
        if inside and len(place) >= best:
            best, found = len(place), kind
    return found


def mounts() -> Iterator[tuple[str, str]]:
    """Every mount's place and type."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as table:
            lines = table.readlines()
    except OSError:
        return  # not Linux: SQLite's own checks are what is left
    for line in lines:
        fields = line.split(" ")
        if len(fields) > 2:
            yield _unescaped(fields[1]), fields[2]


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
