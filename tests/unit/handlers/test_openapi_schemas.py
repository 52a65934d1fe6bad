"""JSON schemas are made from the parsers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from handlers.openapi_schemas import MEANINGS, parameters, struct
from handlers.parsing.json_fields import ParameterReader, Reader


def parse(reader: Reader) -> float:
    read = reader({})
    seed = read.optional_integer("seed", minimum=1, digits=True) or 0
    read.strings("stop")
    read.logit_bias("logit_bias")
    return read.number("top_p", 0.5, above=0.0, maximum=1.0) + read.integer("n", 1, minimum=1) + seed


def test_parameters_have_the_types_ranges_and_defaults_that_a_parser_asks_for() -> None:
    assert parameters(parse) == {
        "seed": {"type": ["integer", "string"], "minimum": 1},
        "stop": {"type": ["array", "string"], "items": {"type": "string", "maxLength": 1000}, "maxItems": 64},
        "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
        "top_p": {"type": "number", "default": 0.5, "maximum": 1.0, "exclusiveMinimum": 0.0},
        "n": {"type": "integer", "default": 1, "minimum": 1},
    }


def test_the_parser_gets_its_defaults() -> None:
    results: list[float] = []
    parameters(lambda reader: results.append(parse(reader)))
    assert results == [parse(ParameterReader)]


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
