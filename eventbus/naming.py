"""Names of services and prefixes, templates of names, and the patterns of event types. Pure."""

from __future__ import annotations

import re
import string
from collections.abc import Collection
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


def matches(pattern: str, type: str) -> bool:
    """Whether an event type fits a pattern: `*` is exactly one word, `#` any number, as on an AMQP topic exchange.

    Word by word, going back at most to the last `#`: the type may come from a stranger, and a regular expression
    with many `#` would take a time that grows with a power of its length.
    """
    wanted, words = pattern.split("."), type.split(".")
    here = there = 0
    last_hash, resume = -1, 0
    while there < len(words):
        if here < len(wanted) and wanted[here] == "#":
            last_hash, resume = here, there
            here += 1
        elif here < len(wanted) and wanted[here] in ("*", words[there]):
            here, there = here + 1, there + 1
        elif last_hash >= 0:
            resume += 1
            here, there = last_hash + 1, resume
        else:
            return False
    return all(word == "#" for word in wanted[here:])


def literal_length(pattern: str) -> int:
    """How many characters stand before the first wildcard: the measure of how exact a pattern is."""
    return min((pattern.index(c) for c in "*#" if c in pattern), default=len(pattern))


def template_fields(setting: str, template: str, known: Collection[str]) -> set[str]:
    """What a template of names fills in; ConfigError for one that cannot be read or asks for something unknown."""
    try:
        used = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"{setting} = {template!r}: {error}") from None
    for name in sorted(used.difference(known)):
        words = ", ".join(f"{{{word}}}" for word in known)
        raise ConfigError(f"{setting} = {template!r}: unknown {{{name}}}; known are {words}")
    return used
