"""One OpenAPI operation of two: a route that answers two kinds of clients by what is in the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ANYTHING: dict[str, Any] = {}


def joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The operation that takes what either takes, and answers what either answers."""
    item = {**other, **one}
    item["summary"] = f"{one['summary']}; {other['summary']}"
    if tags := dict.fromkeys((*one.get("tags", ()), *other.get("tags", ()))):
        item["tags"] = list(tags)
    item["responses"] = _union(one["responses"], other["responses"], _response)
    if "requestBody" in one and "requestBody" in other:
        item["requestBody"] = {**one["requestBody"], "content": _contents(one["requestBody"], other["requestBody"])}
    return item


def either(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    """A schema for what fits one of these. One that says nothing fits anything."""
    if not all(schemas):
        return _ANYTHING
    branches: list[Mapping[str, Any]] = []
    for schema in schemas:
        branches += [branch for branch in schema.get("anyOf", (schema,)) if branch not in branches]
    return dict(branches[0]) if len(branches) == 1 else {"anyOf": branches}


def _response(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    meanings = dict.fromkeys(part["description"].removesuffix(".") for part in (one, other))
    response: dict[str, Any] = {**other, **one, "description": "; ".join(meanings)}
    if content := _contents(one, other):
        response["content"] = content
    return response


def _contents(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return _union(one.get("content", {}), other.get("content", {}), _content)


def _content(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    schema = either(one.get("schema", _ANYTHING), other.get("schema", _ANYTHING))
    return {"schema": schema} if schema else {}


def _union(one: Mapping[str, Any], other: Mapping[str, Any], both: Any) -> dict[str, Any]:
    return {**other, **{key: both(value, other[key]) if key in other else value for key, value in one.items()}}
