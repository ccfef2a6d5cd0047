"""Where `eventbus run` listens for events: `[listen]`, `EVENTBUS_LISTEN__*`, `--listen`; and with which token."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath

from pydantic import ValidationError

from eventbus.config.environment import overrides
from eventbus.config.models import ListenTable, told
from eventbus.config.problems import Origin, Path, Problem
from eventbus.config.validating import problems_of
from eventbus.errors import ConfigError
from eventbus.listening import Address, Listening, check_token


def listening_by_environment(address: str | None, env: Mapping[str, str] = os.environ) -> Listening | None:
    """The same without a file: `--listen` and the environment alone."""
    found, names = overrides(env)
    origin = Origin("", names)
    try:
        table = ListenTable.model_validate(found.get("listen", {}))
    except ValidationError as error:
        raise origin.error(problems_of(error, ("listen",))) from None
    return listening(table, origin, FilePath(), address)


def listening(table: ListenTable, origin: Origin, folder: FilePath, address: str | None) -> Listening | None:
    """What a table says; `address` takes the place of the table's. None where neither has one."""
    at: Path = ("listen", "address")
    if address is not None:
        origin = Origin(origin.file, {**origin.others, at: "--listen"})
    given = address or table.address
    if given is None:
        return None
    try:
        place = Address.parse(given)
    except ConfigError as error:
        raise origin.error([Problem(at, told(str(error), given), given)]) from None
    token = table.token.get_secret_value() if table.token is not None else ""
    if table.token_file is not None:
        token = _read(table.token_file, folder, origin)
    if not token and not place.is_loopback:
        text = (
            "others than this machine can reach it, so a token is needed: set EVENTBUS_LISTEN__TOKEN, "
            "or token_file in [listen]"
        )
        raise origin.error([Problem(at, text, given)])
    return Listening(place, token)


def _read(name: str, folder: FilePath, origin: Origin) -> str:
    at: Path = ("listen", "token_file")
    try:
        return check_token((folder / name).read_text())
    except OSError as error:
        raise origin.error([Problem(at, f"cannot be read: {name}: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise origin.error([Problem(at, f"is not a text: {name}")]) from None
    except ConfigError as error:
        raise origin.error([Problem(at, f"{name}: {error}")]) from None
