"""Writes JSON's values as YAML: what CloudFormation reads, and people read more easily than JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./ -]*[A-Za-z0-9_./-]|[A-Za-z]")
_NOT_TEXT = frozenset({"true", "false", "yes", "no", "on", "off", "null", "none", "y", "n"})


def to_yaml(value: Mapping[str, Any]) -> str:
    """Block style; texts that could be read as something else are quoted as in JSON."""
    return "\n".join(_lines(value, "")) + "\n"


def _lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{indent}{_scalar(key)}:", item, indent + "  ")
        return
    for item in value:
        if isinstance(item, Mapping | list | tuple) and item:
            first, *others = _lines(item, indent + "  ")
            yield f"{indent}- {first.lstrip()}"
            yield from others
        else:
            yield f"{indent}- {_scalar(item)}"


def _entry(head: str, item: Any, indent: str) -> Iterator[str]:
    if isinstance(item, Mapping | list | tuple) and item:
        yield head
        yield from _lines(item, indent)
    else:
        yield f"{head} {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    if isinstance(value, str):
        return '"' + "".join(map(_character, value)) + '"'
    if isinstance(value, float) and "." not in (text := repr(value)):
        return text.replace("e", ".0e")  # without a point, YAML has no float there
    return json.dumps(value)


def _character(character: str) -> str:
    # JSON writes what lies beyond 16 bits as two halves, which YAML does not put together.
    return f"\\U{ord(character):08x}" if ord(character) > 0xFFFF else json.dumps(character)[1:-1]
