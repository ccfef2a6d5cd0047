"""The `eventbus` command: demo, run, publish, dlq, serve, topology.

- `app`: the commands, and how an error becomes a line and an exit code
- `connection`: --url, EVENTBUS_URL, --config; `output`: tables, JSON, errors; `interrupts`: Ctrl-C
- one module per group of commands: `demo`, `run` (with `plan`, `supervisor`, `logs`), `publish`, `dlq` (with
  `remote`), `serve`, `topology`

cyclopts and rich come with the extra and are imported nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        import cyclopts  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        print(f"error: the command line needs {error.name}: pip install 'eventbus-core[cli]'", file=sys.stderr)
        return 1
    from eventbus.cli.app import run

    return run(sys.argv[1:] if arguments is None else arguments)
