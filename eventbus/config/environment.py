"""`EVENTBUS_*` variables that take the place of keys in bus.toml: EVENTBUS_URL, EVENTBUS_SQLITE__LEASE ..."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from eventbus.config.problems import Path
from eventbus.errors import ConfigError

PREFIX: Final = "EVENTBUS_"
NESTED: Final = "__"


class _Overridable(BaseSettings):
    """The keys of bus.toml that the environment can set; checked later, together with the file."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=NESTED, env_ignore_empty=True, extra="ignore"
    )

    url: str = ""
    source: str = ""
    prefix: str = ""
    provision: str = ""
    mapping: dict[str, object] = {}
    listen: dict[str, object] = {}
    rabbit: dict[str, object] = {}
    kafka: dict[str, object] = {}
    redis: dict[str, object] = {}
    sqlite: dict[str, object] = {}
    memory: dict[str, object] = {}


class _Environment(EnvSettingsSource):
    """The environment that was handed over, which is not always the process's own."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(_Overridable)
        self.env_vars = {name.lower(): value for name, value in env.items() if value}

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Only tables and lists are read as JSON: a password of digits stays a text."""
        decoded = super().decode_complex_value(field_name, field, value)
        return decoded if isinstance(decoded, (dict, list)) else value


def overrides(env: Mapping[str, str]) -> tuple[dict[str, object], dict[Path, str]]:
    """What the environment sets, as a document, and by which variable each value of it was set."""
    try:
        found: dict[str, object] = _Environment(env)()
    except SettingsError as error:
        key = str(error).partition('"')[2].partition('"')[0]
        raise ConfigError(f"{PREFIX}{key.upper()}: must be a JSON object, such as {{...}}") from None
    return found, {path: PREFIX + NESTED.join(str(step).upper() for step in path) for path in _leaves(found, ())}


def _leaves(table: Mapping[str, object], path: Path) -> Iterator[Path]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)
