"""From a document to its models; what pydantic finds wrong becomes lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from eventbus.config import models
from eventbus.config.problems import NOTHING, Path, Problem, did_you_mean, listed

_BELOW: Final[Mapping[str, type[models.Table]]] = {
    "retry": models.RetryTable,
    "batch": models.BatchTable,
    "sign": models.SignTable,
    "breaker": models.BreakerTable,
    "auth": models.AuthTable,
    "tls": models.TlsTable,
    "basic": models.BasicTable,
    "mapping": models.MappingTable,
    "listen": models.ListenTable,
    "admin": models.AdminTable,
}

_ALLOWED: Final[Mapping[str, str]] = {
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
}


def validate(document: Mapping[str, object]) -> tuple[models.FileTable | None, list[Problem]]:
    """The models of a document, or everything that is wrong with it."""
    try:
        return models.FileTable.model_validate(document), []
    except ValidationError as error:
        return None, problems_of(error)


def problems_of(error: ValidationError, at: Path = ()) -> list[Problem]:
    """What pydantic found; `at` leads to the table that was validated."""
    return [_problem(details, at) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, at: Path) -> Problem:
    kind, path, value = details["type"], (*at, *details["loc"]), details["input"]
    context = details.get("ctx", {})
    if kind == "eventbus":
        if path and path[-1] == "[key]":
            return Problem(path[:-1], context["text"])
        below = context["path"]
        for step in below:
            value = value[step] if isinstance(value, (dict, list)) else NOTHING
        return Problem((*path, *below), context["text"], value)
    if kind == "extra_forbidden":
        return Problem(path, _unknown(path))  # without its value: it may be a secret under a misspelt name
    if kind == "missing":
        return Problem(path, _MISSING.get(str(path[-1]), "is missing"))
    if kind == "literal_error":
        return Problem(path, f"must be {context['expected']}", value)
    return Problem(path, _ALLOWED.get(kind, details["msg"]), value)


_MISSING: Final[Mapping[str, str]] = {
    "url": 'is missing; write url = "sqlite:///bus.db" or set EVENTBUS_URL',
    "on": 'is missing; write the event type or pattern, such as on = "order.*"',
}


def _unknown(path: Path) -> str:
    name = str(path[-1])
    allowed = tuple(_model_at(path[:-1]).model_fields)
    hint = did_you_mean(name, allowed)
    if not hint:
        for model, place in ((models.RouteTable, "[[services.NAME.routes]]"), (models.ServiceTable, "[services.NAME]")):
            if name in model.model_fields and model is not _model_at(path[:-1]):
                return f"unknown key here; it belongs into {place}"
    return f"unknown key{hint}" if hint else f"unknown key; known are {listed(allowed)}"


def _model_at(path: Path) -> type[models.Table]:
    if not path:
        return models.FileTable
    last = path[-1]
    if isinstance(last, str) and last in _BELOW and path[0] != "services":
        return _BELOW[last]
    if path[0] == "services" and len(path) == 2:
        return models.ServiceTable
    if isinstance(last, int):
        return models.TokenTable if path[0] == "admin" else models.RouteTable
    return _BELOW.get(last, models.FileTable)
