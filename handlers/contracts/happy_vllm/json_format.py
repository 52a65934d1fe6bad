"""`json_format`: the simple form, or a JSON schema, as the schema that the answer is held to.

Source: happy_vllm_generate, Json format; contracts/happy_vllm.md sections 2.1 and 2.2.
"""

from __future__ import annotations

from typing import Any

import msgspec

from handlers.errors import InvalidParameter

_TYPES = ("string", "integer", "boolean", "number")
_TYPES_IN_WORDS = ", ".join(f'"{name}"' for name in _TYPES)
_LONGEST_NAME = 80


def schema_of(json_format: dict[str, Any], is_json_schema: bool) -> str:
    """The JSON schema, as text.

    Raises:
        InvalidParameter: the simple form has something else than its types.
    """
    schema = json_format if is_json_schema else _from_simple_form(json_format)
    return msgspec.json.encode(schema).decode()


def _from_simple_form(json_format: dict[str, Any]) -> dict[str, Any]:
    """Every field is in the answer, and no other."""
    return {
        "type": "object",
        "properties": {name: _property(name, kind) for name, kind in json_format.items()},
        "required": list(json_format),
        "additionalProperties": False,
    }


def _property(name: str, kind: Any) -> dict[str, Any]:
    if kind in _TYPES:
        return {"type": kind}
    if isinstance(kind, list) and len(kind) == 1 and kind[0] in _TYPES:
        return {"type": "array", "items": {"type": kind[0]}}
    raise InvalidParameter(
        f"json_format.{name[:_LONGEST_NAME]}",
        f"must be one of {_TYPES_IN_WORDS}, or an array of exactly one of them; "
        "a JSON schema needs `json_format_is_json_schema` true",
    )
