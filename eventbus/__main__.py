"""`python -m eventbus`: the same as the command `eventbus`."""

import sys

from eventbus.cli import main

if __name__ == "__main__":
    sys.exit(main())
