"""`${NAME}`, `${NAME:-default}` and `$$` in the values of a document. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from eventbus.config.problems import Path, Problem

# A dollar that begins neither of these is an ordinary character: passwords have them.
_TOKEN: Final = re.compile(r"\$\$|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|(?P<bad>\$\{)")


def interpolate(
    value: object, env: Mapping[str, str], problems: list[Problem], *, skip: Collection[Path] = (), path: Path = ()
) -> object:
    """The value with variables put into all its texts; what cannot be resolved is added to `problems`.

    Values at the paths in `skip` stay as they are: something else takes their place.
    """
    if path in skip:
        return value
    if isinstance(value, str):
        return _text(value, env, problems, path)
    if isinstance(value, dict):
        return {key: interpolate(entry, env, problems, skip=skip, path=(*path, key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [interpolate(entry, env, problems, skip=skip, path=(*path, i)) for i, entry in enumerate(value)]
    return value


def _text(text: str, env: Mapping[str, str], problems: list[Problem], path: Path) -> str:
    def put(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, default = match["name"], match["default"]
        if match["bad"]:
            # The value is not shown: what stands after a broken `${` may be a secret.
            problems.append(
                Problem(path, "cannot read '${...'; write ${NAME} or ${NAME:-default}, and $$ for a dollar")
            )
            return ""
        if default is not None:
            return env.get(name) or default  # as in a shell: an empty variable takes the default too
        if name in env:
            return env[name]
        problems.append(
            Problem(path, f"environment variable {name} is not set; set it, or give a default: ${{{name}:-...}}")
        )
        return ""

    return _TOKEN.sub(put, text)
