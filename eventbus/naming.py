"""Names of services and prefixes, and the patterns of event types. Pure."""

from __future__ import annotations

import re
from typing import Final

from eventbus.errors import ConfigError

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
DEFAULT_PREFIX: Final = "default"


def check_service(name: str) -> str:
    """The name, if it is a legal service name; a ConfigError that names the fix otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fixed = re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")[:100].strip("-")
        hint = f"; try {fixed!r}" if fixed else ""
        raise ConfigError(f"service name {name!r}: use a-z, 0-9 and inner hyphens, such as 'wms-cincout'{hint}")
    if len(name) > 100:
        raise ConfigError(f"service name {name!r} has {len(name)} characters; at most 100 are allowed")
    return name


def prefix_of(service: str) -> str:
    """The part before the first hyphen; `default` where there is none."""
    head, hyphen, _ = service.partition("-")
    return check_prefix(head) if hyphen and head else DEFAULT_PREFIX


def check_prefix(prefix: str) -> str:
    """The prefix, if every broker can carry it."""
    if not isinstance(prefix, str) or not _NAME.fullmatch(prefix) or len(prefix) > 100:
        raise ConfigError(f"prefix {prefix!r}: use a-z, 0-9 and inner hyphens, at most 100 characters")
    if prefix == "amq":
        raise ConfigError("prefix 'amq' belongs to RabbitMQ itself; set another one with prefix=...")
    return prefix


def check_pattern(pattern: str) -> str:
    """The pattern, if it is one: words joined by dots, `*` one word, `#` any number of words."""
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"event type pattern {pattern!r}: use a text such as 'order.created' or 'order.*'")
    for word in pattern.split("."):
        if not word:
            raise ConfigError(f"event type pattern {pattern!r} has an empty word; words are joined by single dots")
        if word not in ("*", "#") and ("*" in word or "#" in word):
            raise ConfigError(f"event type pattern {pattern!r}: '*' and '#' stand for whole words, such as 'order.*'")
    return pattern


def is_pattern(pattern: str) -> bool:
    """Whether it has a wildcard."""
    return "*" in pattern or "#" in pattern


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A compiled pattern, to be matched against "." + event type: every word then begins with its dot."""
    parts = {"*": r"\.[^.]*", "#": r"(?:\.[^.]*)*"}
    return re.compile("".join(parts.get(word, r"\." + re.escape(word)) for word in pattern.split(".")))


def matches(pattern: re.Pattern[str], type: str) -> bool:
    """Whether an event type fits a compiled pattern."""
    return pattern.fullmatch("." + type) is not None


def literal_length(pattern: str) -> int:
    """How many characters stand before the first wildcard: the measure of how exact a pattern is."""
    return min((pattern.index(c) for c in "*#" if c in pattern), default=len(pattern))
