"""sqlite:///file: the durable bus of one machine, without a server. Any number of processes share the file.

    file.db      one log of events per prefix, one cursor per service, a small table of what is in flight
    writer       one thread per process: everything queued meanwhile is one transaction (group commit)
    reader       one thread for browsing and counting; WAL lets it look while the writer writes
    watch        one thread that notices what other processes did, and what has become due

When a process dies, its leases run out and others take over. When the disk is full, nothing is taken and nothing
is lost. Not for network file systems (SQLite's WAL needs shared memory), and not for more than one machine.
"""

from eventbus.embedded.sqlite.adapter import SqliteAdapter

__all__ = ["SqliteAdapter"]
