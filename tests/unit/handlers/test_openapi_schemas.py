"""JSON schemas are made from structs. tests/unit/test_parameter_tables.py tests the schemas from parsers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from handlers.openapi_schemas import MEANINGS, struct


class Inner(msgspec.Struct):
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Outer(msgspec.Struct):
    """Not for clients."""

    inputs: str
    parameters: Inner | None = None
    stream: bool = False


def test_a_struct_is_shown_without_nulls_and_with_meanings() -> None:
    inner = {
        "type": "object",
        "required": [],
        "properties": {"seed": {"description": MEANINGS["seed"], "type": "integer", "minimum": 0}},
    }
    assert struct(Outer, "Shown") == {
        "title": "Shown",
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": {"description": MEANINGS["inputs"], "type": "string"},
            "parameters": {"description": MEANINGS["parameters"], **inner},
            "stream": {"description": MEANINGS["stream"], "type": "boolean", "default": False},
        },
    }
