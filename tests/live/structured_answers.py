"""Pools of answers and forms of JSON that constrain a model, as clients of happy_vllm and others send them."""

from __future__ import annotations

from typing import Any

POOLS: list[list[str]] = [
    ["Yes", "No", "Maybe"],
    ["mathematician", "astronaut", "show writer"],
    ["positive", "negative"],
    ["only one"],
    ["a", "ab", "abc", "abcd"],  # each inside the next
    ["New York", "New Jersey", "New", "York"],
    ["prefix", "prefix-one", "prefix-two"],
    ["the cat", "the cat sat", "the cat sat on the mat"],
    [" leading", "trailing ", " both "],
    ["two  spaces", "tab\there"],
    ['say "hello"', 'say "goodbye"'],
    ["it's", "its", "'quoted'"],
    ["C:\\Users\\ada", "C:\\Users\\bob", "\\n"],
    ['\\"', '"\\', "\\\\"],
    ["first line\nsecond line", "one line"],
    ["carriage\r\nreturn", "form\x0cfeed"],
    ["café", "naïve", "Ångström"],
    ["你好", "再见", "你"],
    ["привет", "пока"],
    ["😀", "😢", "🤗", "👨‍👩‍👧"],
    ["مرحبا", "שלום"],
    ["a|b", "[ab]", "(a)", "a*", "^a$", "{a}", "a::=b"],
    ["1", "10", "100", "3.14", "-7"],
    ["The quick brown fox jumps over the lazy dog. " * 6, "The quick brown cat sleeps under the busy hen. " * 6],
    [f"choice number {index}" for index in range(100)],
    [f"{index:03}" for index in range(1000)],
    ["true", "false", "null", '{"a": 1}', "[1, 2]"],
]

_NAME: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 12}
_DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


SIMPLE_FORMS: list[dict[str, Any]] = [
    {"is_alive": "boolean"},
    {"is_alive": "boolean", "is_rich": "boolean", "flags": ["boolean"]},
    {"name": "string", "surname": "string"},
    {"name": "string", "age": "integer", "is_alive": "boolean"},
    {"name": "string", "surname": "string", "age": "integer", "occupation": "string"},
    {"prénom": "string", "年": "integer", "😀": "boolean"},
    {'with "quotes"': "boolean", "back\\slash": "boolean", "new\nline": "boolean", "": "boolean"},
]
"""Schemas in happy_vllm's notation. Nothing bounds their strings and arrays."""

SCHEMAS: list[dict[str, Any]] = [
    _object(name=_NAME),
    _object(name=_NAME, age=_DIGIT, is_alive={"type": "boolean"}),
    _object(height={"type": "number", "minimum": 0, "maximum": 2}),
    _object(name=_object(first=_NAME, last=_NAME)),
    _object(a=_object(b=_object(c=_object(d=_DIGIT)))),
    _object(children={"type": "array", "items": _NAME, "minItems": 1, "maxItems": 3}),
    _object(points={"type": "array", "items": _object(x=_DIGIT, y=_DIGIT), "minItems": 2, "maxItems": 2}),
    _object(grid={"type": "array", "items": {"type": "array", "items": _DIGIT, "maxItems": 2}, "maxItems": 2}),
    _object(color={"enum": ["red", "green", "blue"]}),
    _object(mixed={"enum": ["one", 1, True, None, 1.5]}),
    _object(kind={"const": "person"}, age=_DIGIT),
    _object(quoted={"enum": ['say "hi"', "back\\slash", "new\nline", "é"]}),
    _object(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}),
    _object(date={"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])$"}),
    _object(percent={"type": "integer", "minimum": 0, "maximum": 100}),
    _object(below={"type": "integer", "exclusiveMinimum": -10, "exclusiveMaximum": 10}),
    _object(person={"$ref": "#/$defs/person"}) | {"$defs": {"person": _object(name=_NAME, age=_DIGIT)}},
    _object(who={"$ref": "#/definitions/who"}) | {"definitions": {"who": {"enum": ["me", "you"]}}},
    _object(value={"anyOf": [_NAME, _DIGIT]}),
    _object(shape={"oneOf": [_object(radius=_DIGIT), _object(width=_DIGIT, height=_DIGIT)]}),
    _object(value={"type": ["string", "null"], "maxLength": 5}),
    {"type": "object", "properties": {"prénom": _NAME, "年齢": _DIGIT}, "required": ["prénom", "年齢"]},
    _object(a=_DIGIT) | {"additionalProperties": False},
    {"type": "object", "properties": {"a": _DIGIT, "b": _DIGIT}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": _DIGIT, "minItems": 3, "maxItems": 3},
    {"type": "array", "prefixItems": [_NAME, _DIGIT], "items": False, "minItems": 2},
    _object(text={"type": "string", "minLength": 3, "maxLength": 8}),
    {"type": "string", "enum": ["a", "b"]},
    {"type": "boolean"},
]
"""JSON schemas with bounds for strings and arrays. A small model would fill unbounded ones to its limit."""
