"""The choice of a model's parsers among those of vLLM, without an engine."""

from __future__ import annotations

import inspect
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def parser_for(backend: str, tools: str | None = None, reasoning: str | None = None) -> Any:
    from vllm.parser.parser_manager import ParserManager

    from engines.vllm.parsers.classes import parsers_for

    def get() -> Any:
        return ParserManager.get_parser(
            tool_parser_name=tools, reasoning_parser_name=reasoning, enable_auto_tools=tools is not None
        )

    if not backend:
        return get()
    with parsers_for(backend):
        return get()


def request(choice: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], tools=[FUNCTION], tool_choice=choice, model="m"
    )


def test_vllm_does_nothing_else_when_the_class_of_a_parser_is_made() -> None:
    from vllm.tool_parsers import ToolParser

    import engines.vllm.parsers.classes  # noqa: F401

    source = inspect.getsource(ToolParser)
    made = source[source.index("    def __init_subclass__") : source.index("    def __init__(")]
    assert [line.strip() for line in made.splitlines() if " = " in line] == ["cls.supports_required_and_named = False"]

    class Own(ToolParser):
        structural_tag_model = "hermes"

    assert Own.supports_required_and_named


@pytest.mark.parametrize("order", [("guidance", "xgrammar"), ("xgrammar", "guidance")])
def test_a_parser_reads_what_the_grammar_of_its_model_makes(order: tuple[str, str]) -> None:
    found = {backend: parser_for(backend, "hermes").tool_parser_cls for backend in order}
    tags, calls = found["xgrammar"], found["guidance"]
    assert (tags.structural_tag_model, tags.supports_required_and_named) == ("hermes", False)
    assert (calls.structural_tag_model, calls.supports_required_and_named) == (None, True)
    assert parser_for("", "hermes").tool_parser_cls in tags.__mro__[1:]


def test_vllms_own_switch_has_json_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")
    assert parser_for("xgrammar", "hermes").tool_parser_cls.supports_required_and_named


class Tokenizer:
    """A tokenizer with the tokens that parsers look for in the vocabulary."""

    def get_vocab(self) -> dict[str, int]:
        return {"<tool_call>": 1, "</tool_call>": 2}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_choice_that_has_no_grammar_is_refused(choice: Any) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.tool_parsers import ToolParser, ToolParserManager

    class Own(ToolParser):
        supports_required_and_named = False

    ToolParserManager.register_module("own syntax", module=Own)
    parser = parser_for("guidance", "own syntax")(Tokenizer())
    with pytest.raises(VLLMValidationError, match="cannot be enforced"):
        parser.adjust_request(request(choice))
    assert parser.adjust_request(request("auto")).structured_outputs is None
    enforced = parser_for("guidance", "hermes")(Tokenizer()).adjust_request(request(choice))
    assert enforced.structured_outputs.json is not None
    tagged = parser_for("xgrammar", "hermes")(Tokenizer()).adjust_request(request(choice))
    assert '"properties"' in tagged.structured_outputs.structural_tag, "the arguments follow the schema"


@pytest.mark.parametrize(
    ("reasoning", "tells"), [("granite", False), ("qwen3", True), ("deepseek_r1", True), ("", False)]
)
def test_who_can_tell_where_reasoning_ends(reasoning: str, tells: bool) -> None:
    from engines.vllm.parsers.classes import tells_end_of_reasoning

    config: Any = SimpleNamespace(structured_outputs_config=SimpleNamespace(reasoning_parser=reasoning))
    assert tells_end_of_reasoning(config) is tells


def test_an_answer_that_has_to_call_a_tool_has_no_reasoning_if_nobody_can_tell_its_end() -> None:
    parser = parser_for("guidance", "hermes", "granite")(Tokenizer())
    text = '[{"name": "f", "parameters": {"a": "Here is my thought process: b Here is my response: c"}}]'
    reasoning, content, calls = parser.parse(text, request("required"), enable_auto_tools=True)
    assert (reasoning, content, [call.name for call in calls]) == (None, None, ["f"])
    delta = parser.parse_delta(text, [3], request("required"), [4], finished=True)
    assert [call.function.name for call in delta.tool_calls] == ["f"]
    free = parser_for("guidance", "hermes", "granite")(Tokenizer())
    spoken = "Here is my thought process: b Here is my response: c"
    assert free.parse(spoken, request("auto"), enable_auto_tools=True)[:2] == (" b ", " c")


@pytest.mark.parametrize("reasoning", [None, "granite"])
def test_a_call_that_is_cut_off_is_text(reasoning: str | None) -> None:
    parser = parser_for("guidance", "hermes", reasoning)(Tokenizer())
    text = '[{"name": "f", "para'
    assert parser.parse(text, request("required"), enable_auto_tools=True) == (None, text, [])


def test_further_parts_of_a_streamed_call_have_its_arguments_alone() -> None:
    parser = parser_for("guidance", "hermes")(Tokenizer())
    first, *rest = [
        parser.parse_delta(text, [3], request("required"), [4], finished=text.endswith("]"))
        for text in ('[{"name": "f", "parameters": {"a":', " 1", "}}]")
    ]
    assert first.tool_calls[0].function.name == "f"
    parts = [part.model_dump(exclude_unset=True)["tool_calls"] for part in rest]
    assert parts == [[{"index": 0, "function": {"arguments": text}}] for text in (" 1", "}")]


CALLS = {
    "in vLLM's order": '{"name": "f", "arguments": {"a": "x"}}',
    "arguments first": '{"arguments": {"a": "x"}, "name": "f"}',
    "more members": '{"id": [{"name": "g"}], "name": "f", "arguments": {"name": "h", "arguments": 1}, "z": 2}',
    "marks in strings": '{"name": "f", "arguments": {"a": "</tool_call><tool_call>, \\"}{][\\\\"}}',
    "a number": '{"name": "f", "arguments": 12}',
    "nothing": '{"name": "f", "arguments": {} }',
}


@pytest.mark.parametrize("parts", [1, 3, 1000], ids="{} characters".format)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("name", "mark"), [("hermes", "tool_call"), ("longcat", "longcat_tool_call")])
def test_a_streamed_call_has_the_arguments_of_the_whole_answer(name: str, mark: str, call: str, parts: int) -> None:
    text = f"I call. <{mark}>{call}</{mark}><{mark}>{call}</{mark}>"
    content, streamed = read_in_parts(parser_for("guidance", name), text, parts)
    _, spoken, calls = parser_for("guidance", name)(Tokenizer()).parse(text, request("auto"), enable_auto_tools=True)
    assert content == spoken == "I call. "
    wanted = ("f", json.loads(call)["arguments"])
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [wanted] * 2
    assert [(name, json.loads(arguments)) for name, arguments in streamed] == [wanted] * 2


def test_a_streamed_call_that_is_cut_has_the_part_that_has_come() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f'
    assert read_in_parts(parser_for("guidance", "hermes"), text, 1)[1] == []
    text = '<tool_call>{"name": "f", "arguments": {"a": "</tool_ca'
    assert read_in_parts(parser_for("guidance", "hermes"), text, 1)[1] == [("f", '{"a": "')]


def read_in_parts(kind: Any, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of a stream, and its calls with names and arguments.

    Each part of the stream has `size` characters.
    """
    parser, content, calls = kind(Tokenizer()), "", {}
    for at in range(0, len(text), size):
        last = at + size >= len(text)
        delta = parser.parse_delta(text[at : at + size], [3], request("auto"), [4], finished=last)
        content += (delta.content or "") if delta is not None else ""
        for call in delta.tool_calls if delta is not None else ():
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    return content, list(calls.values())


def test_required_calls_have_the_schemas_of_tools_with_their_own_definitions() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers.utils import get_json_schema_from_tools

    import engines.vllm.parsers.classes  # noqa: F401

    def tool(name: str, parameters: Any) -> Any:
        function = {"name": name, "parameters": parameters}
        return ChatCompletionToolsParam.model_validate({"type": "function", "function": function})

    def item(kind: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": kind}}}

    data = {"$ref": "#/x"}
    others = {
        "properties": {"$ref": {"$ref": "#/definitions/B"}, "enum": {"$ref": "#"}, "c": {"const": data}},
        "definitions": {"B": {"$ref": "https://example.org/b#/c"}},
    }
    plain = {"type": "object", "properties": {"a": {"enum": [data]}}}
    tools = [tool("f", item("string")), tool("g", item("integer")), tool("h", others), tool("i", plain)]
    schema: Any = get_json_schema_from_tools("required", tools)
    assert [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]] == [["f"], ["g"], ["h"], ["i"]]
    parameters = [call["properties"]["parameters"] for call in schema["items"]["anyOf"]]
    assert parameters == [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}, {"$ref": "#/$defs/2"}, plain]
    assert schema["$defs"]["0"]["properties"]["a"] == {"$ref": "#/$defs/0/$defs/A"}
    assert schema["$defs"]["1"]["$defs"] == {"A": {"type": "integer"}}
    assert schema["$defs"]["2"]["properties"] == {
        "$ref": {"$ref": "#/$defs/2/definitions/B"},
        "enum": {"$ref": "#/$defs/2"},
        "c": {"const": data},
    }
    assert schema["$defs"]["2"]["definitions"] == others["definitions"]
    assert tools[0].function.parameters == item("string")
    assert "$defs" not in get_json_schema_from_tools("required", tools[3:])


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef", "$recursiveRef"])
def test_a_tool_that_refers_to_its_root_means_its_own_schema(keyword: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers.utils import get_json_schema_from_tools

    import engines.vllm.parsers.classes  # noqa: F401

    parameters = {"type": "object", "properties": {"next": {keyword: "#"}, keyword: {"type": "string"}}}
    function = {"name": "f", "parameters": parameters}
    tool = ChatCompletionToolsParam.model_validate({"type": "function", "function": function})
    schema: Any = get_json_schema_from_tools("required", [tool])
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == {"$ref": "#/$defs/0"}
    assert schema["$defs"]["0"]["properties"] == {"next": {keyword: "#/$defs/0"}, keyword: {"type": "string"}}


def test_the_deepest_schema_of_a_tool_that_is_read_takes_less_than_half_of_pythons_stack() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers.utils import get_json_schema_from_tools

    import engines.vllm.parsers.classes  # noqa: F401
    from handlers.parsing.json_limits import MOST_DEPTH

    def called_in(frames: int, function: Any) -> Any:
        return called_in(frames - 1, function) if frames else function()

    parameters: Any = {"$ref": "#"}
    for _ in range(MOST_DEPTH):
        parameters = [parameters]  # An array takes two frames, an object one.
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": parameters}}}
    tools = [ChatCompletionToolsParam.model_validate(tool)]
    schema = called_in(sys.getrecursionlimit() // 2, lambda: get_json_schema_from_tools("required", tools))
    assert repr(schema["$defs"]["0"]).count("#/$defs/0") == 1
