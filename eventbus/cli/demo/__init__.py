"""`eventbus demo`: the whole story on a temporary SQLite bus, with endpoints that answer this and that.

- `endpoints`: the HTTP server whose answers make things happen
- `cast`: the services, their routes, and the events that are sent
- `board`: what became of every event so far; `screen`: the board as a live table, or as plain lines
- `story`: the acts, one after the other
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from eventbus.cli.exits import DONE, Failure
from eventbus.cli.interrupts import start


def demo() -> int:
    """See events published, handled, retried, held back, parked and re-driven, in a few seconds.

    Needs no broker and leaves nothing behind: a temporary SQLite file, and a web server on 127.0.0.1.
    """
    try:
        from eventbus.cli.demo.story import tell
    except ImportError as error:
        raise Failure(f"the demo needs {error.name}: pip install 'eventbus-core[cli]'") from None
    with tempfile.TemporaryDirectory(prefix="eventbus-demo-", ignore_cleanup_errors=True) as folder:
        start(tell(f"sqlite:///{Path(folder, 'bus.db')}"))
    return DONE
