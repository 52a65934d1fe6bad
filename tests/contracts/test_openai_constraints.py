"""Constraints on the text in OpenAI's bodies: the parameters that vLLM gets, and the bytes of refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import InvalidParameter
from engines.request import SchemaPart
from handlers.openai.constraints import (
    BATCH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RENDER,
    RESPONSES,
    TOKENIZE,
    Form,
    enforceable,
)

SCHEMA = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
TEXT = '{"properties":{"n":{"type":"integer"}},"required":["n"]}'
TGIS = {"json": TEXT, "disable_any_whitespace": True, "disable_additional_properties": True}
VLLMS = {"json": TEXT, "disable_any_whitespace": False, "disable_additional_properties": False}
OPENAIS = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TAG = {"type": "structural_tag", "structures": [], "triggers": []}


def changes_of(body: dict[str, Any], path: str, **options: bool) -> dict[str, Any]:
    changes, _ = enforceable(body, path, **options)
    return changes


def form_of(body: dict[str, Any], path: str) -> Form:
    _, form = enforceable(body, path)
    return form


def in_chats(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def in_responses(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def in_messages(name: str, *, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": parameters, **fields}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    ("name", "value", "outputs"),
    [
        ("response_format", {"type": "json_object", "value": SCHEMA}, TGIS),
        ("response_format", {"type": "json", "value": SCHEMA}, TGIS),
        ("response_format", {"type": "json", "value": TEXT}, TGIS),
        ("response_format", {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, TGIS),
        ("response_format", {"type": "json_schema", "value": {"schema": SCHEMA}}, TGIS),
        ("response_format", {"type": "regex", "value": "a+"}, {"regex": "a+"}),
        ("response_format", {"type": "json_object", "schema": SCHEMA}, VLLMS),
        ("response_format", {"type": "json_object", "json_schema": {"schema": SCHEMA}}, VLLMS),
        ("response_format", {"type": "json_schema", "schema": SCHEMA}, VLLMS),
        ("grammar", {"type": "json", "value": SCHEMA}, TGIS),
        ("grammar", {"type": "json_object", "value": SCHEMA}, TGIS),
        ("grammar", {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, TGIS),
        ("grammar", {"type": "regex", "value": "a+"}, {"regex": "a+"}),
        ("guided_json", SCHEMA, VLLMS),
        ("guided_json", TEXT, VLLMS),
        ("guided_regex", "a+", {"regex": "a+"}),
        ("guided_choice", ["a", "b", "a"], {"choice": ["a", "b"]}),
        ("guided_grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        ("guided_decoding", {"choice": ["a"]}, {"choice": ["a"]}),
        (
            "guided_decoding",
            {"json_object": True, "disable_any_whitespace": True},
            {"json_object": True, "disable_any_whitespace": True},
        ),
    ],
)
def test_forms_of_others_become_structured_outputs(path: str, name: str, value: Any, outputs: dict[str, Any]) -> None:
    assert changes_of({name: value}, path) == {name: None, "structured_outputs": outputs}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": OPENAIS},
        {"response_format": TAG},
        {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": 5},
        {"stop": ["a"], "logit_bias": {"1": 5}, "bad_words": ["x"], "min_tokens": 1, "allowed_token_ids": [1]},
        {"use_beam_search": True, "stop": [], "min_tokens": 0},
        {"tool_choice": "auto", "response_format": {"type": "json_object"}},
        {"extra_body": {"top_k": 5}, "parameters": 5},
    ],
)
def test_what_vllm_enforces_or_refuses_itself_stays(body: dict[str, Any]) -> None:
    assert changes_of(body, CHAT) == {}


def test_responses_and_messages_have_forms_of_their_own() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    assert changes_of({"text": {"format": form}}, RESPONSES) == {}
    assert changes_of({"text": {"format": {"type": "text"}}, "guided_regex": "a"}, RESPONSES) == {
        "guided_regex": None,
        "structured_outputs": {"regex": "a"},
    }
    assert changes_of({"output_config": {"format": form}, "stop_sequences": ["a"]}, MESSAGES) == {}
    assert changes_of({"tool_choice": {"type": "function", "name": "f"}}, RESPONSES, parses_tools=True) == {}
    assert changes_of({"response_format": {"type": "x"}}, "/v1/responses/id/cancel") == {}


@pytest.mark.parametrize("path", [CHAT, BATCH])
def test_a_tool_may_be_named_by_a_string_as_tgis_clients_do(path: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    assert changes_of({"tool_choice": "weather"}, path) == {"tool_choice": named}
    for choice in ("", "auto", "none", "required", named, {"function": {"name": "weather"}}, 5):
        assert changes_of({"tool_choice": choice}, path) == {}


def test_the_format_of_a_message_does_not_matter_where_a_tool_is_to_be_called() -> None:
    named = {"tool_choice": {"type": "function", "name": "f"}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "low"}
    assert changes_of({**named, "text": text}, RESPONSES) == {"text": {"verbosity": "low"}}
    for form in (OPENAIS, {"type": "json_object"}, {"type": "json_schema", "schema": SCHEMA}):
        assert changes_of({"tool_choice": "required", "response_format": form}, CHAT) == {"response_format": None}
    assert changes_of({"tool_choice": "f", "response_format": OPENAIS}, CHAT) == {
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": None,
    }


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"response_format": OPENAIS}, "response_format"),
        (CHAT, {"response_format": {"type": "text"}, "guided_json": {}}, "guided_json"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config.format"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": "required", "response_format": OPENAIS}, "tool_choice"),
        (CHAT, {"tool_choice": "auto"}, "structured_outputs"),
    ],
)
def test_a_form_is_called_as_the_client_calls_it(path: str, body: dict[str, Any], name: str) -> None:
    assert form_of(body, path).name == name


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_gets_the_allowed_tools_alone(mode: str) -> None:
    choice: dict[str, Any] = {"type": "allowed_tools", "mode": mode, "tools": [in_responses("b")]}
    body: dict[str, Any] = {"tool_choice": choice, "tools": [in_responses("a"), in_responses("b")]}
    assert changes_of(body, RESPONSES) == {"tool_choice": mode, "tools": [in_responses("b")]}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [in_chats("b")]}}
    body = {"tool_choice": choice, "tools": [in_chats("a"), in_chats("b")]}
    for path in (CHAT, BATCH, TOKENIZE, RENDER):
        assert changes_of(body, path) == {"tool_choice": mode, "tools": [in_chats("b")]}


@pytest.mark.parametrize(
    "choice",
    [
        *(
            {},
            {"mode": "any", "tools": [in_responses("a")]},
            {"mode": "auto"},
            {"mode": "auto", "tools": [in_responses("b")]},
        ),
        {"mode": "auto", "tools": [{"type": "mcp", "server_label": "a"}]},
    ],
)
@pytest.mark.parametrize("tools", [[in_responses("a")], [in_responses("a"), {"type": "web_search"}], [5], 5, None])
def test_a_wrong_choice_of_allowed_tools_is_refused(choice: dict[str, Any], tools: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        changes_of({"tool_choice": {"type": "allowed_tools", **choice}, "tools": tools}, RESPONSES)
    assert refused.value.parameter in ("tool_choice.mode", "tool_choice.tools")


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_message_that_has_to_call_a_tool_needs_one(kind: str) -> None:
    choice = {"type": kind, "name": "f"}
    with pytest.raises(InvalidParameter) as refused:
        changes_of({"tool_choice": choice}, MESSAGES)
    assert refused.value.parameter == "tool_choice"
    assert changes_of({"tool_choice": choice, "tools": [{"name": "f", "input_schema": {}}]}, MESSAGES) == {}


def test_tools_of_the_platform_cannot_be_forced() -> None:
    with pytest.raises(InvalidParameter) as refused:
        changes_of({"tool_choice": {"type": "web_search"}}, RESPONSES)
    assert refused.value.parameter == "tool_choice.type"


@pytest.mark.parametrize(
    ("body", "strict"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": None}}}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}}, False),
        ({"response_format": OPENAIS}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "true"}}}, True),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, False),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}, True),
        ({"response_format": {"type": "json_schema", "value": {"schema": SCHEMA, "strict": True}}}, True),
        ({"response_format": {"type": "json_schema", "value": {"schema": SCHEMA}}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "strict": True}}, True),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, None),
        ({"response_format": {"type": "json_object", "schema": SCHEMA, "strict": True}}, True),
        ({"grammar": {"type": "json", "value": SCHEMA}}, None),
        ({"grammar": {"type": "json_schema", "value": {"schema": SCHEMA, "strict": True}}}, True),
        ({"guided_json": {**SCHEMA, "strict": True}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"structured_outputs": {"json": SCHEMA}, "response_format": OPENAIS}, True),
        ({"guided_json": SCHEMA}, None),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, False),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}}, True),
        ({}, None),
    ],
)
def test_the_form_says_whether_all_of_it_must_be_held(body: dict[str, Any], strict: bool | None) -> None:
    assert form_of(body, RESPONSES).parts(SCHEMA) == [SchemaPart("#", "#", strict)]


@pytest.mark.parametrize(("strict", "expected"), [(True, True), (False, None), (None, None)])
def test_a_message_may_ask_for_all_of_its_schema(strict: bool | None, expected: bool | None) -> None:
    form = {"type": "json_schema", "schema": SCHEMA, "strict": strict}
    assert form_of({"output_config": {"format": form}}, MESSAGES) == Form("output_config.format", expected)


CHATS, ANSWERS, TURNS = (
    (CHAT, in_chats, "function.parameters", "required"),
    (RESPONSES, in_responses, "parameters", "required"),
    (MESSAGES, in_messages, "input_schema", {"type": "any"}),
)


def calls_of(*names: str) -> dict[str, Any]:
    """Return the relevant part of vLLM's schema for a call of one of these tools."""
    return {"items": {"anyOf": [{"properties": {"name": {"enum": [name]}}} for name in names]}}


@pytest.mark.parametrize(("path", "tool", "place", "choice"), [CHATS, ANSWERS, TURNS])
def test_each_tool_has_its_part_of_the_schema_of_calls(path: str, tool: Any, place: str, choice: Any) -> None:
    tools = [tool("a"), tool("b", strict=True), tool("c", strict=False)]
    form = form_of({"tools": tools, "tool_choice": choice}, path)
    assert form.name == "tool_choice"
    assert form.parts(calls_of("a", "b", "unknown", "c") | {"$defs": {"1": {}, "2": {}}}) == [
        SchemaPart("#/items/anyOf/0/properties/parameters", f"tools[0].{place}#", False),
        SchemaPart("#/items/anyOf/1/properties/parameters", f"tools[1].{place}#", True),
        SchemaPart("#/$defs/1", f"tools[1].{place}#", True),
        SchemaPart("#/items/anyOf/3/properties/parameters", f"tools[2].{place}#", False),
    ]


@pytest.mark.parametrize(
    ("path", "tool", "place", "choice"),
    [
        (*CHATS[:3], {"type": "function", "function": {"name": "b"}}),
        (*CHATS[:3], "b"),
        (*ANSWERS[:3], {"type": "function", "name": "b"}),
        (*TURNS[:3], {"type": "tool", "name": "b"}),
    ],
)
def test_the_schema_of_a_named_tool_is_the_whole(path: str, tool: Any, place: str, choice: Any) -> None:
    form = form_of({"tools": [tool("a"), tool("b", strict=True)], "tool_choice": choice}, path)
    assert form.parts({"type": "object"}) == [SchemaPart("#", f"tools[1].{place}#", True)]


def test_tools_keep_their_numbers_if_only_some_are_allowed_or_they_are_in_a_namespace() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    body = {"tools": [in_responses("a"), in_responses("b")], "tool_choice": choice}
    assert [part.name for part in form_of(body, RESPONSES).parts(calls_of("b"))] == ["tools[1].parameters#"]
    space = {"type": "namespace", "name": "files", "tools": [in_responses("read", strict=True)]}
    body = {"tools": [space, in_responses("a")], "tool_choice": "required"}
    parts = form_of(body, RESPONSES).parts(calls_of("files__read", "a"))
    assert [(part.name, part.strict) for part in parts] == [
        ("tools[0].tools[0].parameters#", True),
        ("tools[1].parameters#", False),
    ]


@pytest.mark.parametrize(("path", "tool", "place", "choice"), [CHATS, ANSWERS, TURNS])
def test_tools_of_one_name_are_told_apart_by_their_order(path: str, tool: Any, place: str, choice: Any) -> None:
    form = form_of({"tools": [tool("a", strict=True), tool("b"), tool("a")], "tool_choice": choice}, path)
    assert form.parts(calls_of("a", "b", "a", "a")) == [
        SchemaPart("#/items/anyOf/0/properties/parameters", f"tools[0].{place}#", True),
        SchemaPart("#/items/anyOf/1/properties/parameters", f"tools[1].{place}#", False),
        SchemaPart("#/items/anyOf/2/properties/parameters", f"tools[2].{place}#", False),
    ]


@pytest.mark.parametrize("schema", [None, "{}", {}, {"items": {"anyOf": [5]}}, {"items": []}])
def test_another_schema_of_calls_is_of_no_tool(schema: Any) -> None:
    assert form_of({"tools": [in_chats("a")], "tool_choice": "required"}, CHAT).parts(schema) == []


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 1)
    | st.sampled_from(["required", "any", "auto", "function", "json_schema"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "name", "function", "parameters", "input_schema", "strict", "$defs", "schema", "format"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(["a", "b"])
FUNCTIONS = st.fixed_dictionaries({}, optional={"name": NAMES, "strict": VALUES, "parameters": VALUES})
TOOLS = st.lists(
    VALUES
    | FUNCTIONS
    | st.fixed_dictionaries({"function": FUNCTIONS})
    | st.fixed_dictionaries({"type": st.just("namespace"), "name": NAMES, "tools": st.lists(FUNCTIONS, max_size=2)}),
    max_size=4,
)
CHOICES = VALUES | st.sampled_from(["required", "a", {"type": "any"}, in_chats("a"), in_responses("b")])
FORMS = ("response_format", "text", "structured_outputs")
BODIES = st.fixed_dictionaries({}, optional={"tools": TOOLS, "tool_choice": CHOICES} | dict.fromkeys(FORMS, VALUES))
SCHEMAS = VALUES | st.lists(NAMES | st.sampled_from(["a__b", "None"])).map(lambda names: calls_of(*names))


@given(BODIES, st.sampled_from([CHAT, BATCH, COMPLETIONS, RESPONSES, MESSAGES, TOKENIZE]), SCHEMAS)
def test_each_part_of_a_form_has_the_strictness_of_its_tool(body: dict[str, Any], path: str, schema: Any) -> None:
    try:
        form = form_of(body, path)
    except InvalidParameter:
        return
    parts = form.parts(schema)
    assert len({part.place for part in parts}) == len(parts)
    for part in parts:
        field, _, fragment = part.name.partition("#")
        assert fragment == ""
        if not field:
            assert part.strict is form.strict
            continue
        owner: Any = body
        *steps, _ = re.findall(r"\w+", field)
        for step in steps:
            owner = owner[int(step)] if isinstance(owner, list) else owner[step]
        assert part.strict is (owner.get("strict") not in (None, False))
