"""OpenAPI paths of the families' routes, and of those that go to vLLM's own server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from container.openapi_schemas import SCHEMAS
from handlers.contracts.family import Family, Forwards, Operation

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_REFERENCE = "#/components/schemas/"


def family_paths(families: Iterable[Family], *, generates: bool) -> dict[str, dict[str, Any]]:
    """OpenAPI path items of the routes that say what they are for.

    `generates`: an engine generates, so that routes of all kinds answer.
    """
    paths: dict[str, dict[str, Any]] = {}
    for family in families:
        for route in family.routes:
            if isinstance(route, Forwards) or route.about is None:
                continue
            if not generates and any(method == "POST" for method in route.methods):
                continue
            path = _PARAMETER.sub(r"{\1}", route.path)
            for method in route.methods:
                verb = method.lower()
                item = _operation(family, route.about, f"{verb}_{path}", _PARAMETER.findall(route.path))
                paths.setdefault(path, {}).setdefault(verb, item)
    return paths


def _operation(family: Family, about: Operation, operation: str, parameters: list[str]) -> dict[str, Any]:
    item: dict[str, Any] = {
        "summary": about.summary,
        "tags": [family.name],
        "operationId": re.sub(r"\W+", "_", operation).strip("_"),
        "responses": {
            status: {"description": meaning, "content": {media_type: {"schema": schema} if schema else {}}}
            if media_type
            else {"description": meaning}
            for status, (meaning, media_type, schema) in about.answers.items()
        },
    }
    if about.request is not None:
        item["requestBody"] = {"required": True, "content": {"application/json": {"schema": about.request}}}
    if parameters:
        item["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters
        ]
    return item


def forwarded(families: Iterable[Family], vllm: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of vLLM's document, the path items of the routes that go there, and the schemas that these name.

    A schema that has the name of one of ours gets another.
    """
    paths: dict[str, Any] = {}
    for family in families:
        for route in family.routes:
            if not isinstance(route, Forwards):
                continue
            verbs = vllm.get("paths", {}).get(route.path.removeprefix(route.prefix), {})
            wanted = {method.lower() for method in route.methods}
            if found := {verb: _theirs(family, route, item) for verb, item in verbs.items() if verb in wanted}:
                paths.setdefault(route.path, {}).update(found)
    schemas: dict[str, Any] = {}
    for name in _reachable(paths, vllm.get("components", {}).get("schemas", {})):
        schemas[_ours(name)] = _renamed(vllm["components"]["schemas"][name])
    return _renamed(paths), schemas


def _theirs(family: Family, route: Forwards, item: dict[str, Any]) -> dict[str, Any]:
    identity = f"{route.prefix.strip('/')}_{item['operationId']}" if route.prefix else item["operationId"]
    return {**item, "operationId": identity, "tags": [family.name]}


def _reachable(content: Any, schemas: dict[str, Any]) -> dict[str, None]:
    found: dict[str, None] = {}
    todo = list(_references(content))
    while todo:
        name = todo.pop()
        if name not in found and name in schemas:
            found[name] = None
            todo.extend(_references(schemas[name]))
    return found


def _references(content: Any) -> Iterable[str]:
    if isinstance(content, dict):
        reference = content.get("$ref")
        if isinstance(reference, str) and reference.startswith(_REFERENCE):
            yield reference.removeprefix(_REFERENCE)
        for value in content.values():
            yield from _references(value)
    elif isinstance(content, list):
        for value in content:
            yield from _references(value)


def _renamed(content: Any) -> Any:
    if isinstance(content, list):
        return [_renamed(value) for value in content]
    if not isinstance(content, dict):
        return content
    renamed = {key: _renamed(value) for key, value in content.items()}
    reference = renamed.get("$ref")
    if isinstance(reference, str) and reference.startswith(_REFERENCE):
        renamed["$ref"] = _REFERENCE + _ours(reference.removeprefix(_REFERENCE))
    return renamed


def _ours(name: str) -> str:
    return f"Vllm{name}" if name in SCHEMAS else name
