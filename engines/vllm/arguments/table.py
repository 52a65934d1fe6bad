"""All arguments of `vllm serve`, and the fields of vLLM's `AsyncEngineArgs`. This module does not import vLLM.

`table.json` has a row for each argument, with these fields:

- `kind`: the kind of value that `vllm serve` accepts. It is a key of `KINDS`, or the list of allowed words. It is null
  if `vllm serve` has no such argument.
- `of`: "engine" for a field of `AsyncEngineArgs`, or "front end" for an argument that vLLM's OpenAI front end reads in
  Slipway. Other arguments belong to vLLM's own server.
- `without_effect`: the reason why the argument has no effect in Slipway. Users see this text. Arguments that have an
  effect do not have this field.
- `since`: the next release of vLLM, if that release adds the argument. With an earlier release, the row is ignored.

A test compares the kinds with vLLM's parser. With `UPDATE_TABLES=1`, the test writes the kinds. vLLM itself checks each
value again when a model is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engines.settings.parsers import FALSE, SIZE_WITH_UNIT, TRUE, TRUE_OR_FALSE
from engines.vllm import RELEASE

ROWS: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("table.json").read_bytes())
TABLE = {name: row for name, row in ROWS.items() if row.get("since", RELEASE) <= RELEASE}
ARGUMENTS: Mapping[str, str | list[str]] = {name: row["kind"] for name, row in TABLE.items() if row["kind"] is not None}
FRONT_END = frozenset(name for name, row in TABLE.items() if row.get("of") == "front end")
WITHOUT_EFFECT: Mapping[str, str] = {
    name: row["without_effect"] for name, row in TABLE.items() if "without_effect" in row
}


def _matches(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda text: compiled.fullmatch(text) is not None


# For each kind: a check of a value, and a description of the allowed values. A checked value has no blanks at its ends.
KINDS: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "boolean": (lambda text: text.lower() in TRUE | FALSE | {""}, TRUE_OR_FALSE),
    "integer": (_matches(r"[+-]?\d+|none"), "an integer"),
    "size": (
        _matches(rf"[+-]?\d+|auto|none|(?-i:{SIZE_WITH_UNIT})"),
        "an integer such as 8192, or 8k (8000), or 8K (8192)",
    ),
    "number": (_matches(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|none"), "a number such as 0.9"),
    "text": (lambda text: True, "text"),
}


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")


def allowed_instead(name: str, text: str) -> str:
    """Return the allowed values if an argument has a wrong value; "" if the value may be right."""
    kind = ARGUMENTS.get(name, "text")
    if isinstance(kind, list):
        return "" if _folded(text.strip()) in map(_folded, kind) else ", ".join(kind)
    is_right, allowed = KINDS[kind]
    return "" if is_right(text.strip()) else allowed
