"""What a JSON value is, in words for error messages."""

from __future__ import annotations

from typing import Any

_KINDS = {str: "a string", int: "a number", float: "a number", list: "an array", dict: "an object", bool: "a boolean"}


def json_kind(value: Any) -> str:
    """ "a string", "an array", ...; "null" for None."""
    return _KINDS.get(type(value), "null")
