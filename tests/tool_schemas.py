"""Tool schemas as the generators write them, with instances of each schema (`fixtures/tool_schemas`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

_DIRECTORY = Path(__file__).parent / "fixtures" / "tool_schemas"

NOT_HELD: dict[str, tuple[str, ...]] = {
    "pydantic: optional formats, set of UUID, with defaults": ("#/properties/ids/uniqueItems",),
    "pydantic: set, frozenset": (
        "#/properties/tags/uniqueItems",
        "#/properties/frozen/uniqueItems",
        "#/properties/few/uniqueItems",
    ),
    "schemars: flattened enums": ("#/allOf/2/oneOf", "#/allOf/3/oneOf"),
    "schemars: flattened enums, unknown fields denied": (
        "#/unevaluatedProperties",
        "#/allOf/2/oneOf",
        "#/allOf/3/oneOf",
    ),
}
"""The parts that the back end does not hold, as JSON pointers."""


class ToolSchema(msgspec.Struct, frozen=True):
    """A JSON schema, and some instances of it, whose members are in the schema's order."""

    schema: dict[str, Any]
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


class _File(msgspec.Struct, frozen=True):
    source: str
    schemas: dict[str, ToolSchema]


def tool_schemas() -> dict[str, ToolSchema]:
    """Return the schemas, by generator and name."""
    files = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=_File) for path in sorted(_DIRECTORY.glob("*.json"))
    }
    return {f"{generator}: {name}": tool for generator, file in files.items() for name, tool in file.schemas.items()}
