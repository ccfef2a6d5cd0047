"""The OpenAPI 3.1 document, made from the table of endpoints: what they read is what it says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from eventbus.console.problems import MEDIA_TYPE, ProblemBody
from eventbus.console.routing import LINES, Route

_PATHS: Final = {
    "queue": "The dead-letter queue's name on the broker, or the name of its service.",
    "id": "The event's id.",
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The whole document."""
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "eventbus admin",
            "version": _version(),
            "description": "Dead letters over HTTP: look, re-drive, edit, purge, export, import; health and metrics.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of [[admin.tokens]] in bus.toml; without any, on loopback, none is needed.",
                }
            },
        },
    }


class _Schemas:
    """The schemas of all endpoints, each once."""

    def __init__(self, routes: Sequence[Route]) -> None:
        wanted: dict[tuple[str, JsonSchemaMode], TypeAdapter[Any]] = {
            ("problem", "serialization"): _adapter(ProblemBody)
        }
        for route in routes:
            if route.body not in (None, bytes):
                wanted[(f"{route.name} body", "validation")] = _adapter(route.body)
            if route.media == "application/json":
                wanted[(f"{route.name} answer", "serialization")] = _adapter(route.answer)
        inputs = [(key, mode, adapter) for (key, mode), adapter in wanted.items()]
        found, whole = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
        self._found = {key: schema for (key, _), schema in found.items()}
        self.definitions: dict[str, Any] = whole.get("$defs", {})

    def __getitem__(self, key: str) -> Any:
        return self._found[key]


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    summary, _, rest = route.about.partition("\n")
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": summary,
        "description": " ".join(rest.split()) or summary,
        "tags": ["dead letters" if "/dlq/" in route.path else "watching"],
        "security": [{"token": []}] if route.role else [],
        "x-role": route.role,
        "parameters": _parameters(route),
        "responses": {"200": _answer(route, schemas)} | {str(status): _problem(status) for status in _refusals(route)},
    }
    if route.body is not None:
        schema = {"type": "string"} if route.body is bytes else schemas[f"{route.name} body"]
        operation["requestBody"] = {"required": True, "content": {route.accepts: {"schema": schema}}}
    return operation


def _answer(route: Route, schemas: _Schemas) -> dict[str, Any]:
    text = "JSON lines" if route.media == LINES else "the answer"
    schema = schemas[f"{route.name} answer"] if route.media == "application/json" else {"type": "string"}
    return {"description": text, "content": {route.media: {"schema": schema}}}


def _problem(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}},
    }
    if status in (429, 503):
        found["headers"] = {"retry-after": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
    return found


def _refusals(route: Route) -> list[int]:
    """Every status but 200 that it can answer with."""
    found = {400, 403, 421, 429}
    if route.role is not None:
        found |= {401, 404, 503}
    if "{queue}" in route.path:
        found |= {404, 409, 422, 503}
    if route.body is not None:
        found |= {413, 415}
    if route.path == "/readyz":
        found.add(503)
    return sorted(found)


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _PATHS[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    if route.query is not None:
        schema = route.query.model_json_schema()
        required = schema.get("required", ())
        for name, value in schema["properties"].items():
            found.append({"name": name, "in": "query", "required": name in required, "schema": _not_null(value)})
    return found


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query says nothing by leaving a name out: it has no null."""
    kinds: list[dict[str, Any]] = [part for part in schema.get("anyOf", ()) if part.get("type") != "null"]
    if len(kinds) != 1:
        return schema
    return {name: value for name, value in schema.items() if name not in ("anyOf", "default")} | kinds[0]


def _version() -> str:
    try:
        return version("eventbus-core")
    except PackageNotFoundError:
        return "0"
