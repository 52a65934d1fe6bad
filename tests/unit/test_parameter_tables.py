"""The tables of parameters in docs/ are what the parsers take.

A table stands between `<!-- parameters: NAME -->` and `<!-- end -->`. To write them anew:
`UPDATE_TABLES=1 python -m pytest tests/unit/test_parameter_tables.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from container.openapi import openapi_document
from handlers.triton.request import TENSORRT_LLM_INPUTS, VLLM_INPUTS
from tests.contracts.exchange import MODEL

PAGES = sorted(Path(__file__).parents[2].glob("docs/*.md"))
TABLE = re.compile(r"(?<=<!-- parameters: )(?P<name>[\w -]+) -->\n(?P<rows>.*?)(?=<!-- end -->)", re.DOTALL)

_SCHEMAS = openapi_document(MODEL)["components"]["schemas"]
_TRITON = _SCHEMAS["TritonRequest"]["properties"]
TABLES: dict[str, Mapping[str, Any]] = {
    "lmi": _SCHEMAS["LmiRequest"]["properties"]["parameters"]["properties"],
    "tgi": _SCHEMAS["TgiRequest"]["properties"]["parameters"]["properties"],
    "triton inputs": {name: _TRITON[name] for name in VLLM_INPUTS},
    "triton parameters": _TRITON["parameters"]["properties"],
    "tensorrt-llm inputs": {name: _TRITON[name] for name in TENSORRT_LLM_INPUTS},
    "happy_vllm": _SCHEMAS["HappyVllmRequest"]["properties"],
}


def table(properties: Mapping[str, Any]) -> str:
    rows = ["| parameter | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, schema in properties.items():
        default = str(schema.get("default", "")).lower()
        rows.append(f"| `{name}` | {type_of(schema)}{limits(schema)} | {default} | {schema['description']} |")
    return "\n".join(rows) + "\n"


def type_of(schema: Mapping[str, Any]) -> str:
    if schema.get("contentMediaType") == "application/json":
        return "JSON in a string"
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return " or ".join(f"array of {type_of(schema['items'])}s" if kind == "array" else kind for kind in kinds)


def limits(schema: Mapping[str, Any]) -> str:
    """The range, but for bounds that are those of a machine's integers."""
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
    if os.environ.get("UPDATE_TABLES"):
        page.write_text(made)
    assert page.read_text() == made


def test_every_table_is_on_a_page() -> None:
    assert {found["name"] for page in PAGES for found in TABLE.finditer(page.read_text())} == TABLES.keys()
