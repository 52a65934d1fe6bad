"""The schema that llguidance gets, the texts that this schema allows, and the parts that are not enforced."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

import jsonschema
from hypothesis import given
from hypothesis import strategies as st

from engines.vllm.constraints.json_schema import KEYWORDS
from engines.vllm.constraints.trial_process import Trial, trial
from tests.python_calls import python_calls
from tests.unit.engines.vllm.constraints.byte_tokens import allows, allows_text, byte_tokens

TOKENS = byte_tokens()
INT64 = 1 << 63


def tried(schema: Any) -> Trial:
    return trial(TOKENS, "json", json.dumps(schema))


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
    (
        {
            "properties": {"a": {"$ref": "#/$defs/x"}},
            "$defs": {
                "x": {"anyOf": [{"$ref": "#/$defs/y"}, {"type": "null"}]},
                "y": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "array"}]},
            },
        },
        [{"a": None}, {"a": []}],
        [{"a": 1}],
    ),
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
    # Exclusive bounds.
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.5, 0.001], [0, -1]),
    ({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, [-1.5, -1.25], [-1]),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, [1.5], [1]),
    ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, [0.25], [0]),
    ({"type": "number", "not": {"enum": [1.5, 1]}}, [1.25, 2], [1, 1.5]),
    ({"type": "number", "exclusiveMinimum": 0, "minimum": 0.5}, [0.5], [0.25]),
    # Equal values count as one value.
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 1.0]}}, [[1]], [[1, 1]]),
    # An object that names its members allows no others. The exception is a combination of schemas that needs others.
    ({"properties": {"a": {}}}, [{"a": 1}], [{"a": 1, "z": 1}, 1]),
    ({"properties": {"a": {}}, "additionalProperties": True}, [{"a": 1, "z": 1}], [1]),
    ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, [{"a": 1, "z": 1}], [1]),
    ({"anyOf": [{"properties": {"a": {}}}]}, [{"a": 1}], [{"a": 1, "z": 1}, 1]),
    ({"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {}}}]}, [{"a": 1, "z": 1}], [1]),
    ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, [{"a": 1}], [{"a": 1, "z": 1}, 1]),
    ({"properties": {"a": {}}, "required": ["a"], "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ({"properties": {"a": {}}, "patternProperties": {"^x": {}}, "required": ["a", "b"]}, [{"a": 1, "b": 1}], [{}]),
    (  # By the standard, {"a": 1} is valid under both branches.
        {
            "type": "object",
            "oneOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {"type": "string"}}}],
        },
        [{"b": "x"}],
        [{"a": 1}],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), HELD, ids=lambda each: json.dumps(each)[:60])
def test_a_schema_is_held(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    found = tried(schema)
    assert (found.error, found.not_held) == ("", ())
    assert [value for value in valid if not allows(TOKENS, found.text, value)] == []
    assert [value for value in invalid if allows(TOKENS, found.text, value)] == []


@pytest.mark.parametrize(
    ("schema", "places", "valid"),
    [
        (
            {"properties": {"a/b": {"type": "array", "uniqueItems": True}}},
            ["#/properties/a~1b/uniqueItems"],
            [{"a/b": [1, 1]}],
        ),
        ({"type": "array", "contains": {"const": 1}}, ["#/contains"], [[2]]),
        ({"type": "string", "pattern": r"^(a)\1$"}, ["#/pattern"], ["b"]),
        ({"type": "string", "pattern": "^[a-z&&[^b]]$"}, ["#/pattern"], ["b"]),  # Rust and ECMA-262 differ here
        ({"$ref": "https://example.com/other.json"}, ["#/$ref"], [1]),
        ({"enum": [9007199254740993]}, ["#/enum"], [1]),
        ({"type": "array", "items": {"not": {"items": {"type": "string"}}}}, ["#/items/not"], [[1]]),
        ({"type": ["string", "file"]}, ["#/type"], [1]),
        (
            {"type": "object", "patternProperties": {"a": {"const": 1}, "b": {}}, "additionalProperties": False},
            ["#/patternProperties"],
            [{"a": 2, "b": 1}],
        ),
        (
            {"$defs": {"n": {"required": ["v"], "properties": {"v": {"uniqueItems": True}}}}, "$ref": "#/$defs/n"},
            ["#/$defs/n/properties/v/uniqueItems"],
            [{"v": [1, 1]}],
        ),
        # A part behind a reference is reported wherever the reference is used.
        (
            {
                "type": "array",
                "uniqueItems": True,
                "items": {"$ref": "#/$defs/x"},
                "$defs": {"x": {"enum": ["a@b.de", "x"], "not": {"format": "email"}}},
            },
            ["#/$defs/x/not"],
            [],
        ),
        # References below an `$id` belong to another document.
        (
            {
                "$ref": "#/$defs/x",
                "$defs": {"y": {}, "x": {"$id": "http://b/", "items": {"$ref": "#/$defs/y"}, "$defs": {"y": False}}},
            },
            ["#/$defs/x/items/$ref"],
            [],
        ),
        ({"type": "object", "minProperties": 2}, ["#/minProperties"], []),  # a model may write a name twice
        ({"properties": {"a": {}}, "minProperties": 2}, ["#/minProperties"], [{"a": 1, "z": 1}]),
        ({"propertyNames": {"enum": ["a", "b"], "pattern": "b$"}}, ["#/propertyNames"], []),
        ({"minimum": 10**400}, ["#/minimum"], []),
        ({"items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": "a"}, ["#/uniqueItems", "#/minItems"], []),
        ({"allOf": [{"$ref": "#/allOf/-1"}]}, ["#/allOf/0/$ref"], []),
    ],
)
def test_what_is_not_held_is_named_and_the_rest_is_held(schema: Any, places: list[str], valid: list[Any]) -> None:
    found = tried(schema)
    assert (found.error, list(found.not_held)) == ("", places)
    assert [value for value in valid if not allows(TOKENS, found.text, value)] == []


def test_a_schema_with_very_many_parts_that_are_not_held_is_not_held_whole() -> None:
    found = tried({"type": "object", "properties": {f"a{i}": {"uniqueItems": True} for i in range(100)}})
    assert len(found.not_held) == 64
    assert found.not_held[-1] == "#"


def test_a_schema_that_no_text_satisfies_is_said_to_be_so() -> None:
    found = tried({"type": "object", "required": ["a"], "properties": {"a": {"allOf": [{"const": 1}, {"const": 2}]}}})
    assert "nsatisfiable" in found.error
    assert found.not_held


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True}, r'{"\u0061":2}'),
        ({"type": "object", "properties": {"a/b": {"const": 1}}, "additionalProperties": {}}, r'{"a\/b":2}'),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
            r'{"a":1,"\u0061":null}',
        ),
        ({"type": "object", "required": ["a"], "not": {"required": ["b"]}}, r'{"a":1,"\u0062":1}'),
        ({"type": "object", "patternProperties": {"^[^a]": {"enum": [False]}}}, r'{"\u0062":54}'),
        ({"type": "object", "anyOf": [{}], "patternProperties": {"^[^a]": {"enum": [False]}}}, r'{"\u0062":54}'),
        ({"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 1}}}]}, r'{"\u0062":2}'),
        ({"type": "object", "minProperties": 1, "additionalProperties": {}, "properties": {"a": {}}}, r'{"\u0061":1}'),
    ],
)
def test_the_name_of_a_member_has_one_spelling(schema: Any, text: str) -> None:
    found = tried(schema)
    assert not found.not_held
    assert not allows_text(TOKENS, found.text, text)
    assert allows_text(
        TOKENS, found.text, text.replace(r"\u0061", "z").replace(r"\u0062", "z").replace(r"\/", "z")
    ) or ("^[^a]" in json.dumps(schema))


@pytest.mark.parametrize("keyword", ["uniqueItems", "oneOf", "propertyNames", "not", "if", "contains"])
def test_nesting_does_not_multiply_the_work(keyword: str) -> None:
    schema: Any = {"enum": [1, 2]}
    for _ in range(20):
        schema = {
            "uniqueItems": {"type": "array", "items": schema, "uniqueItems": True},
            "oneOf": {"oneOf": [{"type": "array", "items": schema}, {"type": "array", "maxItems": 2}]},
            "propertyNames": {"type": "object", "propertyNames": {"not": schema}},
            "not": {"not": {"properties": {"a": schema}}},
            "if": {"if": {"properties": {"a": schema}}, "then": {"required": ["a"]}},
            "contains": {"type": "array", "maxItems": 5, "contains": schema},
        }[keyword]
    found: list[Trial] = []
    # About one second. Without a budget, each of the 20 levels would double the work.
    assert python_calls(lambda: found.append(tried(schema))) < 2_000_000
    assert found[0].text


def test_long_places_are_not_named_for_ever() -> None:
    name = "語" * 20_000
    schema = {"$ref": f"#/{name}", name: {"properties": {f"a{i}": {"contains": {"const": 1}} for i in range(80)}}}
    assert tried(schema).not_held == ("#",)


def test_members_come_in_the_order_of_the_schema() -> None:
    branches = [{"properties": {"c": {"const": 1}, "a": {"const": i}}, "required": ["a"]} for i in (1, 2)]
    members = {"a": {}, "b": {}, "c": {}}
    closed = tried({"additionalProperties": False, "oneOf": branches, "properties": members})
    assert allows(TOKENS, closed.text, {"a": 1, "b": 1, "c": 1})
    combined = tried({"oneOf": branches, "properties": members})
    assert allows(TOKENS, combined.text, {"c": 1, "a": 1, "b": 1})


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
        if allows(TOKENS, found.text, value):
            try:
                assert validator.is_valid(value), value
            except RecursionError:  # a schema that refers to itself at the same place
                return


@given(
    schema=st.dictionaries(
        st.sampled_from(sorted(KEYWORDS)), VALUES | st.dictionaries(st.sampled_from(sorted(KEYWORDS)), VALUES)
    )
)
def test_any_value_of_a_keyword_is_followed_named_or_refused(schema: dict[str, Any]) -> None:
    found = tried(schema)
    assert found.text or found.error
