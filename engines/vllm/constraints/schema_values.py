"""Reads and writes the types, values and bounds of JSON schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

Schema = bool | dict[str, Any]
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
EVERY = frozenset(TYPES)
# llguidance reads each bound as a double. If the bound is for integers, llguidance converts it to a 64-bit integer. So
# a bound must be below 2**63.
LARGEST_BOUND = math.nextafter(2.0**63, 0.0)
_LARGEST_INTEGER = (1 << 63) - 1
_STEP = 1e-9  # The distance between an exclusive bound and the nearest allowed number.


def named_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema names; None if it names no types."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    if given is None or not all(isinstance(name, str) and name in EVERY for name in names):
        return None
    return frozenset(names) or None


def with_integers(types: frozenset[str]) -> frozenset[str]:
    """Return these types. If `number` is among them, add `integer`."""
    return types | {"integer"} if "number" in types else types


def type_names(types: frozenset[str]) -> list[str]:
    """Return these types in a fixed order. `integer` is left out if `number` includes it."""
    return [name for name in TYPES if name in types and not (name == "integer" and "number" in types)]


def type_value(types: frozenset[str]) -> str | list[str]:
    """Return the value of the keyword `type` for these types."""
    names = type_names(types)
    return names[0] if len(names) == 1 else names


def allowed_types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a rewritten schema allows."""
    kinds = named_types(schema) or EVERY
    return kinds & with_integers(frozenset(map(type_of, schema["enum"]))) if "enum" in schema else kinds


def allowed_values(schema: Schema, most: int) -> Sequence[Any] | None:
    """Return all values that a rewritten schema allows; None if they are unknown, or too many."""
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
    """Return True for a finite number. A boolean is not a number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def is_size(value: Any) -> bool:
    """Return True if a value is a count (of characters, items or members) that llguidance can read."""
    return is_whole(value) and 0 <= value < 1 << 63


def is_whole(value: Any) -> bool:
    """Return True for an integer, including values such as 2.0."""
    return is_number(value) and value == int(value)


def is_exact(value: Any) -> bool:
    """Return True if the value stays the same when llguidance reads its numbers as doubles."""
    if isinstance(value, list):
        return all(map(is_exact, value))
    if isinstance(value, dict):
        return all(map(is_exact, value.values()))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or (abs(value) <= LARGEST_BOUND and int(float(value)) == value)


def bound_of(value: float, *, least: bool, exclusive: bool, whole: bool) -> dict[str, Any]:
    """Return a keyword with a bound that llguidance can enforce. The bound never allows more than the given bound.

    Args:
        value: The given bound.
        least: Whether it is a lower bound.
        exclusive: Whether the bound itself is not allowed.
        whole: Whether the numbers are integers.
    """
    if whole and not least and value >= _LARGEST_INTEGER:
        # This bound is not a double, but llguidance reads it correctly.
        return {"exclusiveMaximum": _LARGEST_INTEGER + 1} if exclusive else {"maximum": _LARGEST_INTEGER}
    value = min(max(value, -LARGEST_BOUND), LARGEST_BOUND)
    near, inward = float(value), math.inf if least else -math.inf
    if near != value and (near < value) is least:
        near = math.nextafter(near, inward)
    if exclusive and not whole:
        # If a number is less than `_STEP` away from the bound, llguidance treats the number as the bound itself.
        # llguidance may also wrongly allow the bound itself if it is an integer and less than 1 away from the other
        # bound.
        near, exclusive = sorted((math.nextafter(near, inward), near + math.copysign(_STEP, inward)))[least], False
    keyword = "inimum" if least else "aximum"
    return {f"exclusiveM{keyword}" if exclusive else f"m{keyword}": plain(near)}


def plain(value: Any) -> Any:
    """Return a value with integers instead of floats such as 2.0."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def distinct(values: list[Any]) -> list[Any]:
    """Return the values without duplicates. Here, 1 and True are different."""
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def strings(value: Any) -> list[str]:
    """Return the strings of a list without duplicates."""
    return list(dict.fromkeys(each for each in value if isinstance(each, str))) if isinstance(value, list) else []


def any_of(schemas: Sequence[Schema]) -> Schema:
    """Return a schema that holds if at least one of these schemas holds."""
    kept = [each for each in schemas if each is not False]
    if True in kept or any(each == {} for each in kept):
        return True
    return kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else False


def all_of(schemas: Sequence[Schema]) -> Schema:
    """Return a schema that holds if all of these schemas hold."""
    kept = [each for each in schemas if each is not True and each != {}]
    if False in kept:
        return False
    return kept[0] if len(kept) == 1 else {"allOf": kept} if kept else True
