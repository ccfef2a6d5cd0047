"""Failpoints: places where a test may let the process die, to show that nothing is lost there.

`EVENTBUS_FAILPOINT="sqlite.settle.before-commit:0.01"` kills the process with SIGKILL in one of a hundred passes;
several are separated by commas. Without the variable a failpoint does nothing.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from typing import Final

from eventbus.errors import ConfigError

VARIABLE: Final = "EVENTBUS_FAILPOINT"


def parse(text: str) -> Mapping[str, float]:
    """Names and probabilities in the variable's text; a name without a number always strikes."""
    points = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, chance = part.partition(":")
        try:
            points[name.strip()] = float(chance or 1.0)
        except ValueError:
            raise ConfigError(f"{VARIABLE} = {text!r}: write name:probability, such as x.before-commit:0.01") from None
    return points


_POINTS: Final = parse(os.environ.get(VARIABLE, ""))
ACTIVE: Final = bool(_POINTS)


def failpoint(name: str) -> None:
    """Die here, if the environment says so."""
    if ACTIVE and random.random() < _POINTS.get(name, 0.0):
        # SIGKILL and not an exception: nothing may clean up, as nothing does when the machine's OOM killer comes.
        os.kill(os.getpid(), signal.SIGKILL)
