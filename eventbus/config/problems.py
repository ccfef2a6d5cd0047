"""What is wrong with a configuration, one line per problem, and never a secret in it. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from eventbus.errors import ConfigError
from eventbus.redaction import redact

Path: TypeAlias = tuple[str | int, ...]

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_SECRET_KEY: Final = re.compile(r"(?i)^(sign|auth)$|secret|bearer|passw|token|credential|private_?key|api_?key")
_MAX_SHOWN: Final = 80


class _Nothing:
    """No value to show."""


NOTHING: Final = _Nothing()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it stands, what is allowed, and the value, if it may be shown."""

    path: Path
    text: str
    value: object = NOTHING


@dataclass(slots=True)
class Origin:
    """Where a value came from: the file, or the environment variable or option that took its place."""

    file: str
    others: Mapping[Path, str] = field(default_factory=dict)

    def line(self, problem: Problem) -> str:
        """The one line for a problem."""
        shown = printed(problem.path, problem.value)
        value = f" = {shown}" if shown else ""
        for length in range(len(problem.path), 0, -1):
            name = self.others.get(problem.path[:length])
            if name is not None:
                return f"{name}{value}: {problem.text}"
        key = dotted(problem.path)
        return f"{self.file}: {key}{value}: {problem.text}" if key else f"{self.file}: {problem.text}"

    def error(self, problems: Iterable[Problem]) -> ConfigError:
        """All problems as one error."""
        return ConfigError("\n".join(dict.fromkeys(self.line(problem) for problem in problems)))


def dotted(path: Path) -> str:
    """A path as people write it: services.wms-cincout.routes[0].on"""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            name = step if _BARE_KEY.fullmatch(step) else '"' + one_line(step, 40).replace('"', "'") + '"'
            text += f".{name}" if text else name
    return text


def printed(path: Path, value: object) -> str:
    """A value for people: nothing for tables and lists, three stars for secrets."""
    if value is NOTHING or isinstance(value, (dict, list)):
        return ""
    if any(isinstance(step, str) and _SECRET_KEY.search(step) for step in path):
        return "***"
    if isinstance(value, str):
        return repr(one_line(safe_url(value), _MAX_SHOWN))
    if isinstance(value, bool):
        return str(value).lower()  # as TOML writes it
    return one_line(str(value), _MAX_SHOWN)


def safe_url(url: str) -> str:
    """A URL that can be printed, even if it is a broken one: nothing that stands before an "@" but the scheme."""
    head, at, tail = url.rpartition("@")
    if not at:
        return redact(url)
    scheme, mark, _ = head.partition("://")
    return f"{scheme}{mark}***@{redact(tail)}" if mark else f"***@{redact(tail)}"


def one_line(text: str, limit: int = 300) -> str:
    """The text on one line, cut where it gets long."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def did_you_mean(name: str, allowed: Iterable[str], *, quote: str = "'") -> str:
    """A suggestion to add to a message: the nearest allowed name, or nothing."""
    near = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {quote}{near[0]}{quote}?" if near else ""


def listed(names: Sequence[str]) -> str:
    """Names for people: a, b or c."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
