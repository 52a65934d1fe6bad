"""Types as pydantic takes them: happy_vllm is a FastAPI application, and its clients were never corrected.

A switch may be `1` or `"yes"`, and a number may be text. What has no such reading stays as it is, for its reader to
refuse by name. Source: pydantic's conversion table, lax mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handlers.contracts.vllm_parameters import BOOLEANS, number_of_text

_SWITCHES = BOOLEANS | {
    *("prompt_in_response", "json_format_is_json_schema", "vanilla", "with_tokens_str", "with_token_str"),
    *("add_special_tokens", "add_generation_prompt"),
}
_INTEGERS = frozenset({"num_tokens_in_chunk", "max_length"})
_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})


def lax(values: Mapping[str, Any]) -> dict[str, Any]:
    """The body's fields, those of happy_vllm's own and vLLM's switches, with the types that their readers want."""
    return {name: _read(name, value) for name, value in values.items()}


def _read(name: str, value: Any) -> Any:
    if name in _SWITCHES:
        return _switch(value)
    return number_of_text(value) if name in _INTEGERS and isinstance(value, str) else value


def _switch(value: Any) -> Any:
    if isinstance(value, str):
        word = value.lower()
        return True if word in _TRUE else False if word in _FALSE else value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return value
