"""`python -m benchmarks [name ...]`: prints figures and ratios; exits 1 if a goal is missed."""

from __future__ import annotations

import importlib
import sys

ALL = ("core", "sqlite", "redis", "rabbit", "kafka", "shaping", "forward", "outage", "ingest", "dead_letters")
DEFAULT = ("core", "sqlite")  # the others need a broker (`make brokers`) and their peers (`pip install --group bench`)


def main() -> int:
    chosen = sys.argv[1:] or list(DEFAULT)
    unknown = [name for name in chosen if name not in ALL]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    results = [importlib.import_module(f"benchmarks.{name}").run() for name in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
