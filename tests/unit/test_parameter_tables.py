"""The tables of parameters in docs/ have the parameters of the parsers.

The table of happy_vllm leaves out parameters that are in the table of Triton.

A table stands between `<!-- parameters: NAME -->` and `<!-- end -->`. This command writes the tables again:
`UPDATE_TABLES=1 python -m pytest tests/unit/test_parameter_tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from container.openapi import openapi_document
from handlers.triton.request import TENSORRT_LLM_INPUTS, VLLM_INPUTS
from tests.contracts.exchange import MODEL
from tests.doc_tables import assert_written

PAGES = sorted(Path(__file__).parents[2].glob("docs/*.md"))
TABLE = re.compile(r"(?<=<!-- parameters: )(?P<name>[\w -]+) -->\n(?P<rows>.*?)(?=<!-- end -->)", re.DOTALL)

# A table in docs/constraints.md has these parameters.
CONSTRAINTS = {"structured_outputs", "guided_decoding", "response_format", "grammar"} | {
    f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")
}
_SCHEMAS = openapi_document(MODEL)["components"]["schemas"]
_TRITON = _SCHEMAS["TritonRequest"]["properties"]
_HAPPY_VLLM = _SCHEMAS["HappyVllmRequest"]["properties"]
_TEI = {
    name: schema
    for route in ("Embed", "Rerank", "Predict", "Tokenize", "Decode")
    for name, schema in _SCHEMAS[f"Tei{route}Request"]["properties"].items()
    if name != "inputs"  # The forms of `inputs` differ from route to route.
}
TABLES: dict[str, Mapping[str, Any]] = {
    "lmi": _SCHEMAS["LmiRequest"]["properties"]["parameters"]["properties"],
    "tei": _TEI,
    "tgi": _SCHEMAS["TgiRequest"]["properties"]["parameters"]["properties"],
    "triton inputs": {name: _TRITON[name] for name in VLLM_INPUTS},
    "triton parameters": _TRITON["parameters"]["properties"],
    "tensorrt-llm inputs": {name: _TRITON[name] for name in TENSORRT_LLM_INPUTS},
    "happy_vllm": {
        name: schema
        for name, schema in _HAPPY_VLLM.items()
        if name not in CONSTRAINTS and schema != _TRITON["parameters"]["properties"].get(name)
    },
}


def table(properties: Mapping[str, Any]) -> str:
    """Return a table. Parameters with the same type, limits and description share a row."""
    names: dict[str, list[str]] = {}
    for name, schema in properties.items():
        names.setdefault(row(name, schema), []).append(f"`{name}`")
    rows = [f"| {', '.join(alike)} | {text} |" for text, alike in names.items()]
    return "\n".join(["| parameter | type | default | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


def row(name: str, schema: Mapping[str, Any]) -> str:
    if name in CONSTRAINTS:
        return "|  | [Constraints](constraints.md#names)."
    return f"{type_of(schema)}{limits(schema)} | {str(schema.get('default', '')).lower()} | {schema['description']}"


def type_of(schema: Mapping[str, Any]) -> str:
    if schema.get("contentMediaType") == "application/json":
        return "JSON in a string"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema.get("items", {}):
        return str(schema["type"])
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return " or ".join(f"array of {type_of(schema['items'])}s" if kind == "array" else kind for kind in kinds)


def limits(schema: Mapping[str, Any]) -> str:
    """Return the range. A bound is left out if it is the lowest or the highest integer of a machine."""
    if "maxItems" in schema:
        return f", at most {schema['maxItems']} of {schema['items']['maxLength']} characters"
    low, high = schema.get("minimum", -(2**31)), schema.get("maximum", 2**31)
    if "exclusiveMinimum" in schema:
        return f", above {schema['exclusiveMinimum']:g}" + (f" to {high:g}" if high < 2**31 - 1 else "")
    if low <= -(2**31):
        return ""
    return f", {low:g} to {high:g}" if high < 2**31 - 1 else f" ≥ {low:g}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_parameters_are_what_the_parsers_take(page: Path) -> None:
    text = page.read_text()
    made = TABLE.sub(lambda found: f"{found['name']} -->\n{table(TABLES[found['name']])}", text)
    assert_written(page, made)


def test_every_table_is_on_a_page() -> None:
    assert {found["name"] for page in PAGES for found in TABLE.finditer(page.read_text())} == TABLES.keys()
