"""What the promise rests on: AOF, noeviction, room in memory, a disk that keeps up. Checked, and said loudly."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Final

from eventbus import telemetry
from eventbus.errors import BrokerError
from eventbus_redis._client import Client

OLDEST: Final = (7, 0)
WARN_AT: Final = 0.8
ALARM_AT: Final = 0.9
"""Seed 2's alerts on used_memory / maxmemory."""
LATE: Final = "aof_delayed_fsync"
"""How often the server answered before it wrote, because the disk was still busy with the sync before (everysec)."""


async def check(client: Client) -> int:
    """Refuse a server that is too old; warn of everything that could lose messages. How often its disk was late."""
    info = await client.info()
    version = _version(info)
    if version is not None and version < OLDEST:
        raise BrokerError(
            f"{client.address} is Redis {info.get('redis_version')}; the bus needs 7.0 or newer (or Valkey)"
        )
    _warn(client, problems(info, await client.setting("appendfsync")))
    return _number(info.get(LATE))


async def check_again(client: Client, late: int) -> int:
    """Warn while the memory is nearly full, and when the disk was late more often than it had been."""
    info = await client.info()
    _warn(client, memory_problems(info) + disk_problems(info, late))
    return _number(info.get(LATE))


def _warn(client: Client, found: Iterable[tuple[str, str]]) -> None:
    for problem, fix in found:
        fields = {"broker": "redis", "address": client.address, "problem": problem, "fix": fix}
        telemetry.log(logging.WARNING, "precondition", fields)


def problems(info: Mapping[str, str], appendfsync: str = "") -> list[tuple[str, str]]:
    """What is wrong with a server, and what to do about each. Pure."""
    found = []
    if info.get("aof_enabled") == "0":
        found.append(("appendonly is off: a restart of the server loses messages", "set appendonly yes"))
    if appendfsync == "no":
        found.append(("appendfsync is no: a power cut loses more than a second", "set appendfsync everysec or always"))
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append((f"maxmemory-policy is {policy}: messages are evicted silently", "set it to noeviction"))
    return found + memory_problems(info)


def memory_problems(info: Mapping[str, str]) -> list[tuple[str, str]]:
    """Whether the memory is nearly full. Pure."""
    used, most = _number(info.get("used_memory")), _number(info.get("maxmemory"))
    if most and used / most > WARN_AT:
        level = "critical" if used / most > ALARM_AT else "high"
        text = f"memory is {level}: {used / most:.0%} of maxmemory ({most} bytes)"
        return [(text, "purge dead letters, let lagging services catch up, or raise maxmemory")]
    return []


def disk_problems(info: Mapping[str, str], before: int) -> list[tuple[str, str]]:
    """Whether the disk was late since it was that often. Pure."""
    now = _number(info.get(LATE))
    if not now or now == before:
        return []
    times = now - before if now > before else now  # a restarted server counts from nought
    often = "once" if times == 1 else f"{times} times"
    text = (
        f"the disk was late {often}: in such a moment a kill of the server loses up to two seconds of what it accepted"
    )
    return [(text, "give the server a faster disk, or set appendfsync always")]


def _version(info: Mapping[str, str]) -> tuple[int, int] | None:
    if "valkey_version" in info:
        return None  # it began after 7.2
    match = re.match(r"(\d+)\.(\d+)", info.get("redis_version", ""))
    return (int(match[1]), int(match[2])) if match else None


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
