"""load("bus.toml"): file -> document -> environment -> models -> BusConfig."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path as FilePath
from types import MappingProxyType

from eventbus import naming, registry
from eventbus.adapter import ProvisionMode
from eventbus.bus import Bus
from eventbus.config.building import Builder
from eventbus.config.environment import overrides
from eventbus.config.interpolation import interpolate
from eventbus.config.listening import listening
from eventbus.config.models import BROKER_TABLES, AdminTable, FileTable, told
from eventbus.config.problems import Origin, Path, Problem, did_you_mean, one_line, safe_url
from eventbus.config.validating import validate
from eventbus.errors import ConfigError
from eventbus.listening import Listening
from eventbus.redaction import redact_url
from eventbus.service import Service


@dataclass(frozen=True, slots=True)
class BusConfig:
    """A bus.toml that holds together: where the bus is, and what runs on it."""

    file: str
    url: str = field(repr=False)
    source: str
    prefix: str
    """Where it publishes to: as written, else the common prefix of its services, else that of `source`."""
    provision: ProvisionMode
    settings: Mapping[str, Mapping[str, object]] = field(repr=False)
    """The tables of the brokers; the URL decides which one is used."""
    prefixes: Mapping[str, str]
    """The services and the prefix of each; known without importing a handler."""
    admin: AdminTable = field(repr=False)
    """How `eventbus serve` listens, and to whom."""
    _table: FileTable = field(repr=False)
    _origin: Origin = field(repr=False)

    def services(self) -> list[Service]:
        """The services, their handlers imported. Raises ConfigError, one line per problem."""
        return self._build(dry=False)

    def outline(self) -> list[Service]:
        """The services with nothing imported: enough to know names, patterns and delays, not to be run."""
        return self._build(dry=True)

    def bus(self) -> Bus:
        """The bus, not yet open."""
        return Bus(self.url, source=self.source, prefix=self.prefix, provision=self.provision, settings=self.settings)

    def listening(self, address: str | None = None) -> Listening | None:
        """Where to listen for events, its token read; `address` goes before the file. None: nowhere."""
        return listening(self._table.listen, self._origin, FilePath(self.file).parent, address)

    def _build(self, *, dry: bool) -> list[Service]:
        builder = Builder(self._table, FilePath(self.file).parent, dry)
        services = builder.services()
        if builder.problems:
            raise self._origin.error(builder.problems)
        return services


def load(path: str | os.PathLike[str], env: Mapping[str, str] = os.environ, *, url: str | None = None) -> BusConfig:
    """Read bus.toml and check all of it but what would have to be imported. `url` goes before file and environment.

    Raises ConfigError with one line per problem: file, key, value, what is allowed.
    """
    document = _read(path)
    replaced, names = overrides(env)
    if url is not None:
        replaced["url"], names[("url",)] = url, "--url"
    origin = Origin(os.fspath(path), names)
    problems: list[Problem] = []
    resolved = interpolate(document, env, problems, skip=frozenset(names))
    assert isinstance(resolved, dict)
    _put(resolved, replaced)
    strangers = _tables_of_strangers(resolved)
    unresolved = {problem.path for problem in problems}
    table, more = validate(resolved)
    # A value that could not be resolved is told once, not again for being empty.
    problems += [problem for problem in more if not _concerns(problem.path, unresolved)]
    if table is None or problems:
        raise origin.error(problems)
    settings = {name: value for name in BROKER_TABLES if (value := getattr(table, name))} | strangers
    problems += _check_adapter(table.url, settings)
    config = _config(os.fspath(path), table, origin, settings)
    builder = Builder(table, FilePath(path).parent, dry=True)
    builder.services()
    problems += builder.problems
    if problems:
        raise origin.error(problems)
    return config


def _read(path: str | os.PathLike[str]) -> dict[str, object]:
    name = os.fspath(path)
    try:
        return tomllib.loads(FilePath(path).read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: is not TOML: {one_line(str(error))}") from None


def _put(document: dict[str, object], replaced: Mapping[str, object]) -> None:
    for key, value in replaced.items():
        below = document.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            _put(below, value)
        else:
            document[key] = value


def _tables_of_strangers(document: dict[str, object]) -> dict[str, Mapping[str, object]]:
    """Tables of adapters that somebody else has written, taken out; they are named like their scheme."""
    known = {entry.name for entry in entry_points(group=registry.GROUP)} - {*BROKER_TABLES, *FileTable.model_fields}
    names = [name for name, value in document.items() if name in known and isinstance(value, dict)]
    return {name: document.pop(name) for name in names}  # type: ignore[misc]


def _concerns(path: Path, others: set[Path]) -> bool:
    return any(path[: len(other)] == other or other[: len(path)] == path for other in others)


def _config(file: str, table: FileTable, origin: Origin, settings: Mapping[str, Mapping[str, object]]) -> BusConfig:
    prefixes = {name: service.prefix or naming.prefix_of(name) for name, service in table.services.items()}
    common = set(prefixes.values())
    return BusConfig(
        file=file,
        url=table.url,
        source=table.source,
        prefix=table.prefix or (common.pop() if len(common) == 1 else naming.prefix_of(table.source)),
        provision=table.provision,
        settings=MappingProxyType(settings),
        prefixes=MappingProxyType(prefixes),
        admin=table.admin,
        _table=table,
        _origin=origin,
    )


def _check_adapter(url: str, settings: Mapping[str, Mapping[str, object]]) -> list[Problem]:
    """What is wrong with the URL, or with the table of its broker."""
    try:
        adapter = registry.adapter_class(url)
        adapter.from_url(url, {})
    except ConfigError as error:
        return [Problem(("url",), why_not(url, error), url)]
    table = registry.settings_table(url)
    try:
        adapter.from_url(url, settings.get(table, {}))
    except ConfigError as error:
        return [_setting(table, settings[table], str(error).removeprefix(f"{table}: ").removeprefix(f"{table}."))]
    return []


def _setting(table: str, settings: Mapping[str, object], text: str) -> Problem:
    key = text.partition(" ")[0]
    if key in settings:
        return Problem((table, key), one_line(told(text)), settings[key])
    return Problem((table,), one_line(text))


def why_not(url: str, error: ConfigError) -> str:
    """Why a bus URL does not do, without the URL itself, and with a suggestion for a misspelt scheme."""
    text = str(error)
    for shown in (repr(redact_url(url)), redact_url(url), repr(url), url):
        text = text.removeprefix(shown).lstrip(": ")
    text = text.replace(redact_url(url), safe_url(url)).replace(url, safe_url(url))
    scheme, mark, _ = url.partition("://")
    if mark and "no adapter for" in text:
        text += did_you_mean(scheme, _SCHEMES)
    return one_line(text)


_SCHEMES = ("amqp", "amqps", "kafka", "redis", "rediss", "sqlite", "memory")
