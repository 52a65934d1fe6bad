"""The types, values and places in JSON schemas, as the rewriter reads and writes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

Schema = bool | dict[str, Any]
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
EVERY = frozenset(TYPES)
# llguidance reads bounds as doubles, and those of integers as 64 bits.
LARGEST_BOUND = math.nextafter(2.0**63, 0.0)


def named_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema names; None if it names none."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    if given is None or not all(isinstance(name, str) and name in EVERY for name in names):
        return None
    return frozenset(names) or None


def with_integers(types: frozenset[str]) -> frozenset[str]:
    """Return types, with integers if they have all numbers."""
    return types | {"integer"} if "number" in types else types


def type_names(types: frozenset[str]) -> list[str]:
    """Return types in a fixed order. A number may be an integer."""
    return [name for name in TYPES if name in types and not (name == "integer" and "number" in types)]


def type_value(types: frozenset[str]) -> str | list[str]:
    """Return the value of `type` for types."""
    names = type_names(types)
    return names[0] if len(names) == 1 else names


def allowed_types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a rewritten schema allows."""
    kinds = named_types(schema) or EVERY
    return kinds & with_integers(frozenset(map(type_of, schema["enum"]))) if "enum" in schema else kinds


def allowed_values(schema: Schema, most: int) -> Sequence[Any] | None:
    """Return all values that a rewritten schema allows; None if it may allow others, or more than that."""
    if not isinstance(schema, dict):
        return None
    values: list[Any]
    if "enum" in schema:
        values = schema["enum"]
    elif (kinds := named_types(schema)) is not None and kinds <= {"boolean", "null"}:
        values = [value for value in (None, False, True) if type_of(value) in kinds]
    else:
        return None
    return values if len(values) <= most else None


def type_of(value: Any) -> str:
    """Return the narrowest type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_number(value: Any) -> bool:
    """Return True for a finite number, which a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_size(value: Any) -> bool:
    """Return True for a number of characters, items or members that llguidance can read."""
    return is_whole(value) and 0 <= value < 1 << 63


def is_whole(value: Any) -> bool:
    """Return True for an integer, which 2.0 is too."""
    return is_number(value) and value == int(value)


def is_exact(value: Any) -> bool:
    """Return True if llguidance, which reads numbers as doubles, reads a value as it is."""
    if isinstance(value, list):
        return all(map(is_exact, value))
    if isinstance(value, dict):
        return all(map(is_exact, value.values()))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or (abs(value) <= LARGEST_BOUND and int(float(value)) == value)


def inward(value: float, *, up: bool) -> float:
    """Return a bound that a double can hold, and that allows no more."""
    value = min(max(value, -LARGEST_BOUND), LARGEST_BOUND)
    near = float(value)
    if near == value:
        return value
    return math.nextafter(near, math.inf if up else -math.inf) if (near < value) is up else near


def plain(value: Any) -> Any:
    """Return a value whose whole numbers are integers."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def strings(value: Any) -> list[str]:
    """Return the texts of a list, each once."""
    return list(dict.fromkeys(each for each in value if isinstance(each, str))) if isinstance(value, list) else []


def below(place: str, part: str | int) -> str:
    """Return the place of a part, as a URI fragment."""
    name = str(part).replace("~", "~0").replace("/", "~1")
    return f"{place}/{quote(name, safe='~$')}"


def anchors(schema: Any, pointer: str) -> Iterator[tuple[str, str]]:
    """Yield the names of places in a document, each with its pointer."""
    if isinstance(schema, list):
        for i, each in enumerate(schema):
            yield from anchors(each, f"{pointer}/{i}")
    if not isinstance(schema, dict):
        return
    for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
        name = schema.get(keyword)
        if isinstance(name, str) and (keyword.endswith("chor") or name.startswith("#")):
            yield name.lstrip("#"), pointer
    for name, each in schema.items():
        if name not in ("enum", "const", "default", "examples"):
            yield from anchors(each, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}")


def any_of(schemas: Sequence[Schema]) -> Schema:
    """Return a schema that holds where one of some does."""
    kept = [each for each in schemas if each is not False]
    if True in kept or any(each == {} for each in kept):
        return True
    return kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else False


def all_of(schemas: Sequence[Schema]) -> Schema:
    """Return a schema that holds where all of some do."""
    kept = [each for each in schemas if each is not True and each != {}]
    if False in kept:
        return False
    return kept[0] if len(kept) == 1 else {"allOf": kept} if kept else True
