"""One constraint under several names. They are from several releases of vLLM, from OpenAI and from TGI."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from engines.errors import InvalidParameter
from handlers.openai.constraints import CHAT, COMPLETIONS, RESPONSES, enforceable, uses_tools
from handlers.parsing.constraints import read_constraint
from handlers.parsing.json_fields import ParameterReader

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, indent=1)
SAME: list[dict[str, Any]] = [
    {
        "structured_outputs": {"json": SCHEMA},
        "guided_decoding": {"json": TEXT},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "grammar": {"type": "json", "value": SCHEMA},
        "guided_json": TEXT,
    },
    {
        "structured_outputs": {"regex": "a+"},
        "guided_decoding": {"regex": "a+"},
        "response_format": {"type": "regex", "value": "a+"},
        "grammar": {"type": "regex", "value": "a+"},
        "guided_regex": "a+",
    },
    {
        "structured_outputs": {"choice": ["a", "b"]},
        "guided_decoding": {"choice": ["a", "b"]},
        "guided_choice": ["a", "b"],
    },
    {
        "structured_outputs": {"grammar": 'root ::= "a"'},
        "guided_decoding": {"grammar": 'root ::= "a"'},
        "guided_grammar": 'root ::= "a"',
    },
    {
        "structured_outputs": {"json_object": True},
        "guided_decoding": {"json_object": True},
        "response_format": {"type": "json_object"},
    },
]
PAIRS = [{name: names[name] for name in pair} for names in SAME for pair in itertools.combinations(names, 2)]
OLDER = ("guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def means(parameters: dict[str, Any]) -> dict[str, Any]:
    constraint = read_constraint(ParameterReader(parameters))
    assert constraint is not None
    form = constraint.for_vllm()
    return {**form, "json": json.loads(form["json"])} if "json" in form else form


def changes_of(body: dict[str, Any], path: str) -> dict[str, Any]:
    changes, _ = enforceable(body, path)
    return changes


@pytest.mark.parametrize("parameters", PAIRS)
def test_a_constraint_may_have_two_names(parameters: dict[str, Any]) -> None:
    (first, *_) = parameters
    expected = means({first: parameters[first]})
    assert means(parameters) == means({"guided_decoding_backend": "guidance", **parameters}) == expected
    for path in (CHAT, COMPLETIONS, RESPONSES):
        body = {**parameters, **changes_of(parameters, path)}
        assert sum(value is not None for value in body.values()) == 1


@pytest.mark.parametrize("older", OLDER)
def test_vllms_newest_name_decides_if_its_older_names_differ(older: str) -> None:
    value = next(names[older] for names in SAME if older in names)
    parameters = {older: value, "structured_outputs": {"regex": "b"}}
    assert means(parameters) == {"regex": "b"}
    for path in (CHAT, COMPLETIONS, RESPONSES):
        assert changes_of(parameters, path) == {older: None}


@pytest.mark.parametrize(
    "parameters",
    [
        {"structured_outputs": {"regex": "b"}, "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "b"}, "grammar": {"type": "regex", "value": "a"}},
        {"guided_decoding": {"regex": "b"}, "guided_regex": "a"},
        {"guided_json": SCHEMA, "guided_regex": "a"},
        {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
        {"guided_regex": "a", "structured_outputs": {"regex": "b"}, "response_format": {"type": "json_object"}},
    ],
)
def test_other_constraints_that_differ_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        read_constraint(ParameterReader(parameters))
    for path in (CHAT, COMPLETIONS, RESPONSES):
        with pytest.raises(InvalidParameter):
            changes_of(parameters, path)


def test_the_format_of_a_response_may_be_repeated_under_another_name() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    for name in ("structured_outputs", "guided_json", "response_format"):
        body = {name: SAME[0][name], "text": {"format": form}}
        assert changes_of(body, RESPONSES) == {name: None}
    with pytest.raises(InvalidParameter):
        changes_of({"guided_regex": "a", "text": {"format": form}}, RESPONSES)


def test_structural_tags_are_not_combined() -> None:
    tag = {"type": "structural_tag", "structures": [], "triggers": []}
    with pytest.raises(InvalidParameter):
        changes_of({"response_format": tag, "structured_outputs": {"regex": "a"}}, CHAT)


def strict_of(**fields: Any) -> bool | None:
    constraint = read_constraint(ParameterReader(fields))
    assert constraint is not None
    return constraint.strict


@pytest.mark.parametrize("name", ["response_format", "grammar"])
@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "strict": True},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA, "strict": True}},
        {"type": "json_object", "schema": SCHEMA, "strict": True},
    ],
)
def test_strict_counts_wherever_it_stands(name: str, form: dict[str, Any]) -> None:
    assert strict_of(**{name: form}) is True


def test_of_several_names_the_strictest_counts() -> None:
    openais = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert strict_of(response_format=openais, guided_json=SCHEMA) is None
    assert strict_of(response_format=strict, guided_json=SCHEMA) is True


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, False),
        ({"tools": []}, False),
        ({"tools": [{}]}, True),
        ({"tools": [{}], "tool_choice": "auto"}, True),
        ({"tools": [{}], "tool_choice": "required"}, True),
        ({"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tools": [{}], "tool_choice": {"type": "any"}}, True),
        ({"tools": [{}], "tool_choice": "none"}, False),
        ({"tools": [{}], "tool_choice": {"type": "none"}}, False),
        ({"tool_choice": "auto"}, False),
    ],
)
def test_tools_are_used_unless_there_are_none_or_none_may_be_called(body: dict[str, Any], expected: bool) -> None:
    assert uses_tools(body) is expected
