"""`python -m benchmarks [core] [sqlite]`: prints figures and ratios; exits 1 if a goal is missed."""

from __future__ import annotations

import sys

from benchmarks import core, sqlite

ALL = {"core": core.run, "sqlite": sqlite.run}


def main() -> int:
    chosen = sys.argv[1:] or list(ALL)
    unknown = [name for name in chosen if name not in ALL]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    results = [ALL[name]() for name in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
