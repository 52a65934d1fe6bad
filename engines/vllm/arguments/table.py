"""All arguments of `vllm serve`, and the fields of vLLM's `AsyncEngineArgs`. This module needs no vLLM.

`table.json` has them. The row of an argument has

- `kind`: the kind of its value, as the parser of `vllm serve` reads it: a key of `KINDS`, or the list of its words.
  null: `vllm serve` has no such argument.
- `of`: "engine" for a field of `AsyncEngineArgs`, "front end" for what vLLM's OpenAI front end reads here. Other
  arguments are those of vLLM's own server.
- `without_effect`: the reason if it has no effect here. It is shown to the user.
- `since`: the release of vLLM that adds it, if that is the next one. Such a row holds from this release on.

A test compares the kinds with vLLM's parser, and writes them under `UPDATE_TABLES=1`. vLLM itself checks each value
once more when a model is loaded.
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


# By the kind: checks a value without blanks at its ends, and describes the allowed values.
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
    """Return the allowed values of an argument that has a wrong one; "" if the value may be right."""
    kind = ARGUMENTS.get(name, "text")
    if isinstance(kind, list):
        return "" if _folded(text.strip()) in map(_folded, kind) else ", ".join(kind)
    is_right, allowed = KINDS[kind]
    return "" if is_right(text.strip()) else allowed
