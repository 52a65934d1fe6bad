"""What is left of a schema for llguidance, what its grammar allows, and what is not held."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.vllm.constraints.json_schema import KEYWORDS
from engines.vllm.constraints.trial_process import Trial, trial
from tests.unit.engines.vllm.constraints.byte_tokens import byte_tokens

TOKENS = byte_tokens()
INT64 = 1 << 63


def tried(schema: Any) -> Trial:
    return trial(TOKENS, "json", json.dumps(schema))


def allows(text: str, value: Any) -> bool:
    """Return True if the grammar of a schema that was tried allows a value."""
    matcher = llguidance.LLMatcher(TOKENS, llguidance.LLMatcher.grammar_from_json_schema(text), log_level=0)
    ids = TOKENS.tokenize_str(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    if matcher.validate_tokens(ids) < len(ids):
        return False
    matcher.consume_tokens(ids)
    return matcher.is_accepting() or matcher.is_stopped()


HELD: list[tuple[Any, list[Any], list[Any]]] = [
    # What says nothing.
    ({"type": "string", "format": "path"}, ["a", ""], [1]),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}, [{}, {"a": 1}], [1]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": False}, [["a", "a"]], [[1]]),
    ({"type": "object", "dependencies": {}, "dependentRequired": {}}, [{"a": 1}], [1]),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": {}}}, [{"b": 1}, {}], [{"a": 1}]),
    ({"type": "integer", "if": {"minimum": 1}}, [0, 1], ["a"]),
    ({"type": "string", "minLength": 2.0, "uniqueItems": True, "x-order": 1}, ["ab"], ["a"]),
    ({"$schema": "https://spec.openapis.org/oas/3.0", "type": "null", "nullable": True}, [None], [1]),
    # Numbers.
    ({"type": "integer", "minimum": -INT64, "maximum": INT64 - 1}, [0, -(10**18), INT64 - 1], [INT64, -INT64 - 1]),
    ({"type": "integer", "exclusiveMaximum": 1e19}, [INT64 - 1, -(10**30)], [10**19]),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [1.5, -3], ["a"]),
    ({"type": "number", "minimum": -3.4028234663852886e38}, [0, -1.5], [-(10**39)]),
    ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 2.0}, [1, 2], [0, 3]),
    ({"type": "integer", "maximum": 9007199254740993}, [9007199254740992], [9007199254740994]),
    ({"enum": [2.0, "a"], "const": 2}, [2], ["a"]),
    # Formats.
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2023-04-31", "1900-02-29"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T23:59:60Z"], ["2024-02-29T22:59:60Z", "2024-02-29"]),
    ({"type": "string", "format": "json-pointer"}, ["", "/a~1b/0"], ["a", "/~2"]),
    ({"type": "string", "format": "uri-reference"}, ["/a?b#c", "a/b", "x:y", ""], ["://", "a b", "%"]),
    ({"type": "string", "format": "iri"}, ["http://ä.example/ö"], ["no", "http://a b"]),
    ({"type": "string", "format": "uri-template"}, ["/a/{b}{?c,d*}"], ["/{", "{a b}"]),
    # Patterns.
    ({"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+$"}, ["a.b"], [".a", "a..b"]),
    # not.
    ({"type": "string", "not": {"enum": ["a", "bc"]}}, ["b", "", "bcd"], ["a", "bc"]),
    ({"type": ["string", "integer"], "not": {"const": 3}}, ["a", 2, 4], [3]),
    ({"type": ["string", "null"], "not": {"type": "null"}}, ["a"], [None]),
    ({"type": "string", "not": {"pattern": "^a"}}, ["ba", ""], ["ab"]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
        [{"a": 1}, {}],
        [{"a": 1, "b": 1}],
    ),
    ({"type": "integer", "not": {"anyOf": [{"minimum": 5}, {"maximum": 1}]}}, [2, 4], [1, 5]),
    # Names of members.
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, [{"a": 1}, {}], [{"A": 1}]),
    ({"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}}, [{"ab": 1}], [{"abc": 1}, {"": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "a", "maxLength": 2}}, [{"ba": 1}], [{"bab": 1}, {"b": 1}]),
    (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/k"},
            "additionalProperties": {"type": "integer"},
            "$defs": {"k": {"enum": ["x", "y"]}},
        },
        [{"x": 1}, {}],
        [{"z": 1}, {"x": "a"}],
    ),
    ({"type": "object", "propertyNames": {"format": "uuid"}}, [{}], [{"a": 1}]),
    ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    # Members that depend on each other.
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{"b": 1}, {"a": 1, "b": 1}, {}],
        [{"a": 1}],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "dependencies": {"a": {"properties": {"b": {"const": 1}}}},
        },
        [{"a": 1, "b": 1}, {"b": 2}],
        [{"a": 1, "b": 2}],
    ),
    (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["n"]},
        },
        [{"kind": "a", "n": 1}, {"kind": "b"}],
        [{"kind": "a"}],
    ),
    # oneOf.
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}, "x": {}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": "b"}, "y": {}}, "required": ["k"]},
            ]
        },
        [{"k": "a", "x": 1}, {"k": "b"}],
        [{"k": "a", "y": 1}, {}],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    ({"oneOf": [{"type": "number", "maximum": 5}, {"type": "number", "minimum": 5}]}, [4, 6], [5]),
    ({"oneOf": [{"$ref": "#/$defs/t"}, {"type": "null"}], "$defs": {"t": {"type": "string"}}}, ["a", None], [1]),
    ({"oneOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]}, ["a", [["a"]]], [1, [1]]),
    # Counts.
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        [{"a": 1, "c": 1}],
        [{"a": 1}, {}],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1},
        [{"a": 1}, {}],
        [{"a": 1, "c": 1}],
    ),
    (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True, "minProperties": 1},
        [{"a": 1}, {"z": 1}],
        [{}],
    ),
    ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, [[], ["b", "a"]], [["a", "a"]]),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[1]], [[1, 1]]),
    ({"type": "array", "maxItems": 3, "contains": {"const": 1}}, [[1], [0, 0, 1]], [[], [0, 0]]),
    # Further members.
    (
        {
            "allOf": [{"properties": {"a": {}}}],
            "properties": {"b": {}},
            "unevaluatedProperties": False,
            "type": "object",
        },
        [{"a": 1, "b": 1}, {"b": 1}],
        [{"c": 1}],
    ),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}]),
    # References.
    ({"properties": {"a": {"$ref": "#/$defs/x~1y"}}, "$defs": {"x/y": {"const": 1}}}, [{"a": 1}], [{"a": 2}]),
    ({"$id": "urn:s", "$ref": "urn:s#n", "$defs": {"a": {"$anchor": "n", "type": "null"}}}, [None], [1]),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "properties": {"a": {"$ref": "#/definitions/t", "maxLength": 1}},
            "definitions": {"t": {"type": "string"}},
        },
        [{"a": "long"}],
        [{"a": 1}],
    ),
    (
        {"properties": {"a": {"$ref": "#/$defs/never"}, "b": {}}, "$defs": {"never": False}},
        [{"b": 1}],
        [{"a": 1}],
    ),
    ({"items": [{"const": 1}], "additionalItems": {"const": 2}, "type": "array"}, [[1, 2, 2]], [[2], [1, 1]]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), HELD, ids=lambda each: json.dumps(each)[:60])
def test_a_schema_is_held(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    found = tried(schema)
    assert (found.error, found.not_held) == ("", ())
    assert [value for value in valid if not allows(found.text, value)] == []
    assert [value for value in invalid if allows(found.text, value)] == []


@pytest.mark.parametrize(
    ("schema", "places", "valid"),
    [
        (
            {"properties": {"a/b": {"type": "array", "uniqueItems": True}}},
            ["#/properties/a~1b/uniqueItems"],
            {"a/b": [1, 1]},
        ),
        ({"type": "array", "contains": {"const": 1}}, ["#/contains"], [2]),
        ({"type": "string", "pattern": r"^(a)\1$"}, ["#/pattern"], "b"),
        ({"$ref": "https://example.com/other.json"}, ["#/$ref"], 1),
        ({"enum": [9007199254740993]}, ["#/enum"], 1),
        ({"type": "array", "items": {"not": {"items": {"type": "string"}}}}, ["#/items/not"], [1]),
        ({"type": ["string", "file"]}, ["#/type"], 1),
        (
            {"type": "object", "patternProperties": {"a": {"const": 1}, "b": {}}, "additionalProperties": False},
            ["#/patternProperties"],
            {"a": 2, "b": 1},
        ),
        (
            {"$defs": {"n": {"required": ["v"], "properties": {"v": {"uniqueItems": True}}}}, "$ref": "#/$defs/n"},
            ["#/$defs/n/properties/v/uniqueItems"],
            {"v": [1, 1]},
        ),
    ],
)
def test_what_is_not_held_is_named_and_the_rest_is_held(schema: Any, places: list[str], valid: Any) -> None:
    found = tried(schema)
    assert (found.error, list(found.not_held)) == ("", places)
    assert allows(found.text, valid)


def test_a_schema_with_very_many_parts_that_are_not_held_is_not_held_whole() -> None:
    found = tried({"type": "object", "properties": {f"a{i}": {"uniqueItems": True} for i in range(100)}})
    assert len(found.not_held) == 64
    assert found.not_held[-1] == "#"


def test_a_schema_that_no_text_satisfies_is_said_to_be_so() -> None:
    found = tried({"type": "object", "required": ["a"], "properties": {"a": {"allOf": [{"const": 1}, {"const": 2}]}}})
    assert "nsatisfiable" in found.error
    assert found.not_held


@pytest.mark.parametrize(
    ("schema", "open_"),
    [
        ({"properties": {"a": {}}}, False),
        ({"properties": {"a": {}}, "additionalProperties": True}, True),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, True),
        ({"anyOf": [{"properties": {"a": {}}}]}, False),
        ({"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {}}}]}, True),
        ({"properties": {"a": {}}, "minProperties": 2}, True),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, False),
    ],
)
def test_objects_that_name_their_members_are_closed_and_are_objects(schema: Any, open_: bool) -> None:
    text = tried(schema).text
    assert allows(text, {"a": 1, "z": 1}) == open_
    assert not allows(text, 1)


def test_objects_of_a_condition_are_open() -> None:
    branches = [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {"type": "string"}}}]
    found = tried({"type": "object", "oneOf": branches})
    assert not found.not_held
    assert not allows(found.text, {"a": 1})  # by the standard it is valid under both branches
    assert allows(found.text, {"b": "x"})


def test_descriptions_do_not_count() -> None:
    schema = {"type": "object", "properties": {f"a{i}": {"description": "x" * 1000, "const": i} for i in range(500)}}
    found = tried(schema)
    assert (found.error, found.not_held) == ("", ())
    assert len(found.text) < 1 << 15


@pytest.mark.parametrize(
    "schema",
    ['{"items": 1}', "[]", "nonsense", '{"enum": [NaN]}', r'{"enum": ["\ud800"]}', '{"properties": {"a": "b"}}'],
)
def test_what_is_no_schema_is_refused(schema: str) -> None:
    found = trial(TOKENS, "json", schema)
    assert found.error
    assert not found.text


def test_the_documentation_has_the_table() -> None:
    rows = re.findall(r"^\| (`[^|]+?) \| ([^|]*?) \|$", Path("docs/constraints.md").read_text(), re.MULTILINE)
    documented = {name.strip("`"): what for names, what in rows for name in names.split(", ")}
    assert {name: documented.get(name) for name in KEYWORDS} == {name: each.what for name, each in KEYWORDS.items()}


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["a", "b", "ab", "", 0, 1, 2, 3, -1, 1.5, True, False, None]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names, some = st.sampled_from("abc"), st.lists(inner, min_size=1, max_size=3)
    members, small = st.dictionaries(names, inner, max_size=2), st.integers(0, 3)
    kinds = st.sampled_from(["string", "integer", "number", "object", "array", "boolean", "null"])
    patterns = st.sampled_from(["^a", "b$", "^(?!a)", "^[ab]*$", "(?=b)a|b"])
    return st.fixed_dictionaries(
        {},
        optional={
            "type": kinds | st.lists(kinds, min_size=1, max_size=2),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "const": VALUES,
            **dict.fromkeys(("minimum", "exclusiveMaximum"), st.sampled_from([0, 1, 1.5, 2])),
            **dict.fromkeys(("minLength", "maxItems", "minItems", "minProperties", "maxProperties"), small),
            **dict.fromkeys(("uniqueItems", "unevaluatedProperties", "unevaluatedItems"), st.booleans()),
            **dict.fromkeys(("items", "contains", "additionalProperties", "propertyNames", "not", "if"), inner),
            **dict.fromkeys(("then", "else"), inner),
            **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), some),
            **dict.fromkeys(("properties", "dependentSchemas"), members),
            "pattern": patterns,
            "patternProperties": st.dictionaries(patterns, inner, max_size=2),
            "required": st.lists(names, max_size=2, unique=True),
            "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=2),
            "$ref": st.sampled_from(["#", "#/$defs/x"]),
        },
    )


SCHEMAS = st.recursive(st.booleans() | st.just({}), _keywords, max_leaves=6).filter(lambda each: isinstance(each, dict))


@settings(deadline=None, max_examples=300)
@given(schema=SCHEMAS, definition=SCHEMAS, values=st.lists(VALUES, min_size=10, max_size=10))
def test_no_value_that_is_invalid_is_allowed_by_a_schema_that_is_held(
    schema: dict[str, Any], definition: dict[str, Any], values: list[Any]
) -> None:
    schema = {**schema, "$defs": {"x": definition}}
    found = tried(schema)
    if found.error or found.not_held:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        if allows(found.text, value):
            try:
                assert validator.is_valid(value), value
            except RecursionError:  # a schema that refers to itself at the same place
                return


@settings(deadline=None, max_examples=300)
@given(
    schema=st.dictionaries(
        st.sampled_from(sorted(KEYWORDS)), VALUES | st.dictionaries(st.sampled_from(sorted(KEYWORDS)), VALUES)
    )
)
def test_any_value_of_a_keyword_is_followed_named_or_refused(schema: dict[str, Any]) -> None:
    found = tried(schema)
    assert found.text or found.error
