"""JSON schemas, as llguidance has to get them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MAX_CHARACTERS = 1 << 17
_NO_SCHEMA, _TOO_DEEP = "it must be a JSON schema, which is a JSON object", "it is nested too deeply"
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf")
# llguidance's options for writing JSON, which stand in the schema in the place of the client's.
_FLEXIBLE = {"whitespace_flexible": True}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_COMBINED = ("anyOf", "oneOf", "$ref", "if", "unevaluatedProperties", "additionalProperties")


def for_guidance(text: str, *, compact: bool) -> tuple[str, tuple[str, ...]]:
    """Return a schema as llguidance can hold it, and the places of its parts that it cannot hold, as JSON pointers.

    Args:
        text: The schema.
        compact: The JSON has no white space.

    Raises:
        ValueError: It is no JSON schema, nested too deeply, or too long.
    """
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError(_NO_SCHEMA)
        _tighten(schema, closed='"allOf"' not in text)
        schema["x-guidance"] = _COMPACT if compact else _FLEXIBLE
        written = json.dumps(schema)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError:
        raise ValueError(_NO_SCHEMA) from None
    if len(written) > _MAX_CHARACTERS:
        raise ValueError(f"it must have at most {_MAX_CHARACTERS} characters, got {len(written)}")
    return written, ()


def _below(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas right below one, each with the keyword that has it."""
    for keyword in _MAPS_OF_SCHEMAS:
        members = schema.get(keyword)
        for value in members.values() if isinstance(members, dict) else ():
            if isinstance(value, dict):
                yield keyword, value
    for keyword in _SCHEMAS:
        values = schema.get(keyword)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, dict):
                yield keyword, value


def _tighten(schema: dict[str, Any], closed: bool) -> None:
    """Let what names members be an object and, if it is `closed`, have no others.

    By the standard `{"properties": ...}` allows any number or text as well, which nobody means who writes it, and any
    further members: a model that may add some seldom stops, and vLLM's usual back end does not allow them either.
    Schemas that are combined with others stay open.
    """
    named = isinstance(schema.get("properties"), dict)
    for keyword, part in _below(schema):
        _tighten(part, closed and not (named and keyword in ("anyOf", "oneOf")))
    if not named:
        return
    schema.setdefault("type", "object")
    if closed and not any(keyword in schema for keyword in _COMBINED):
        schema["additionalProperties"] = False
