"""What the promise rests on: AOF, noeviction, room in memory. Checked at start-up and said loudly."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Final

from eventbus import telemetry
from eventbus.errors import BrokerError
from eventbus_redis._client import Client

OLDEST: Final = (7, 0)
WARN_AT: Final = 0.8
ALARM_AT: Final = 0.9
"""Seed 2's alerts on used_memory / maxmemory."""


async def check(client: Client) -> None:
    """Refuse a server that is too old; warn of everything that could lose messages."""
    info = await client.info()
    version = _version(info)
    if version is not None and version < OLDEST:
        raise BrokerError(
            f"{client.address} is Redis {info.get('redis_version')}; the bus needs 7.0 or newer (or Valkey)"
        )
    for problem, fix in problems(info, await client.setting("appendfsync")):
        fields = {"broker": "redis", "address": client.address, "problem": problem, "fix": fix}
        telemetry.log(logging.WARNING, "precondition", fields)


async def check_memory(client: Client) -> None:
    """Say it again while the memory is nearly full."""
    for problem, fix in memory_problems(await client.info()):
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


def _version(info: Mapping[str, str]) -> tuple[int, int] | None:
    if "valkey_version" in info:
        return None  # it began after 7.2
    match = re.match(r"(\d+)\.(\d+)", info.get("redis_version", ""))
    return (int(match[1]), int(match[2])) if match else None


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
