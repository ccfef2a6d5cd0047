"""The Lua scripts, read once from the package; each runs as a whole or not at all on the server."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the hash that the server knows it by."""

    name: str
    text: str
    sha: str


def _load(name: str, *, common: bool = True) -> Script:
    folder = files("eventbus_redis").joinpath("lua")
    body = folder.joinpath(f"{name}.lua").read_text("utf-8")
    head = folder.joinpath("common.lua").read_text("utf-8") if common else ""
    if body.startswith("#!"):  # the line of flags must stay the first
        flags, _, body = body.partition("\n")
        text = f"{flags}\n{head}\n{body}"
    else:
        text = f"{head}\n{body}"
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


PUBLISH: Final = _load("publish", common=False)  # sent as text, see Line
SUBSCRIBE: Final = _load("subscribe")
UNSUBSCRIBE: Final = _load("unsubscribe")
MOVE: Final = _load("move")
SETTLE: Final = _load("settle")
FORGET_NOTES: Final = _load("forget_notes")
NOTE: Final = _load("note")
RENEW: Final = _load("renew")
CLAIM: Final = _load("claim")
LET_GO: Final = _load("let_go")
TRIM: Final = _load("trim")
SWEEP: Final = _load("sweep")
STATS: Final = _load("stats")
LETTERS_CLAIM: Final = _load("letters_claim")
LETTERS_SETTLE: Final = _load("letters_settle")
LETTERS_GET: Final = _load("letters_get")
LETTERS_MOVE: Final = _load("letters_move")
LETTERS_REMOVE: Final = _load("letters_remove")
LETTERS_RESTORE: Final = _load("letters_restore")
LETTERS_EXPIRE: Final = _load("letters_expire")
LETTERS_TALLY: Final = _load("letters_tally")
COMPLETED: Final = _load("completed")
PERMITS: Final = _load("permits")
TURNS: Final = _load("turns")
ELECT: Final = _load("elect")
TAKE_OVER: Final = _load("take_over")
READ_IN_ORDER: Final = _load("read_in_order")
