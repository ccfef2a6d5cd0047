"""Finding what a user wrote as "module:name". Every failure is one line that says which part of it is wrong."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import traceback
from types import ModuleType

from eventbus.config.problems import did_you_mean, one_line
from eventbus.errors import ConfigError
from eventbus.redaction import redact


def find_object(target: str) -> object:
    """The object that "module:name" stands for; the current directory is searched for the module too."""
    module_name, colon, name = target.partition(":")
    if not (colon and module_name and name) or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError("write module:name, such as 'app:reserve'")
    found: object = _module(module_name)
    at = module_name
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [known for known in dir(found) if not known.startswith("_")]
            raise ConfigError(f"{at!r} has no {part!r}{did_you_mean(part, public)}") from None
        at = f"{at}.{part}"
    return found


def find_handler(target: str) -> object:
    """A function, or anything else that can be called."""
    found = find_object(target)
    if not callable(found):
        raise ConfigError(f"is not callable but a {type(found).__name__}")
    return found


def find_exception(target: str) -> type[BaseException]:
    """An exception type: a built-in one by its name, any other as "module:name"."""
    if ":" in target:
        found = find_object(target)
    else:
        found = getattr(builtins, target, None)
        if found is None:
            known = [name for name, value in vars(builtins).items() if _is_exception(value)]
            hint = did_you_mean(target, known)
            raise ConfigError(f"no such built-in exception; write others as 'module:Name'{hint}")
    if not _is_exception(found):
        raise ConfigError("is not an exception type")
    return found  # type: ignore[return-value]


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _module(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(f"no module named {error.name!r}, neither in {here} nor installed") from None
        raise ConfigError(_broken(name, error)) from error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything at import
        raise ConfigError(_broken(name, error)) from error


def _broken(name: str, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({os.path.basename(error.filename)} line {error.lineno})"
    elif frames:
        place = f" ({os.path.basename(frames[-1].filename)} line {frames[-1].lineno})"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"module {name!r} failed at import: {one_line(redact(reason))}{place}"
