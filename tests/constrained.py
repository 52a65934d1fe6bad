"""Every way in which a client may constrain the text, and the routes that support it.

tests/contracts/test_constraint_matrix.py shows what reaches the engine. A few live tests show that the text obeys the
constraint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 12

SCHEMA = {"properties": {"n": {"type": "integer", "minimum": 1, "maximum": 5}}, "required": ["n"]}
CLOSED = {"type": "object", "additionalProperties": False, **SCHEMA}
REGEX = "[0-9]{3}-[0-9]{2}"
POOL = ["yes", "no"]
GRAMMAR = 'root ::= "red" | "blue"'
END, PARIS = 2, 7042
"""Tokens of the sample model: the end of a turn, and " Paris"."""
SOME = [504, 314, 253]
"""Ids of a few frequent tokens."""

Fields = dict[str, Any]
Forms = dict[str, tuple[Fields, Fields]]
"""For each form: the fields of a request that asks for it, and the form under vLLM's name."""
Refused = dict[str, tuple[Fields, str]]
"""The fields of a request, and the text that its refusal contains."""


def typed(kind: str, **members: Any) -> Fields:
    return {"type": kind, **members}


def tgi_forms(name: str) -> Forms:
    """Return TGI's forms, as `grammar` or as `response_format`."""
    named = {"name": "x", "schema": SCHEMA}
    return {
        f"{name}: json": ({name: typed("json", value=SCHEMA)}, {"json": SCHEMA}),
        f"{name}: json, a text": ({name: typed("json", value=json.dumps(SCHEMA))}, {"json": SCHEMA}),
        f"{name}: json_object, a value": ({name: typed("json_object", value=SCHEMA)}, {"json": SCHEMA}),
        f"{name}: json_schema, a value": ({name: typed("json_schema", value=named)}, {"json": SCHEMA}),
        f"{name}: regex": ({name: typed("regex", value=REGEX)}, {"regex": REGEX}),
    }


VLLMS: Fields = {"json": CLOSED, "regex": REGEX, "choice": POOL, "grammar": GRAMMAR}
FORMS: Forms = {
    **{
        f"structured_outputs: {kind}": ({"structured_outputs": {kind: form}}, {kind: form})
        for kind, form in VLLMS.items()
    },
    "structured_outputs: json_object": ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    **{f"guided_{kind}": ({f"guided_{kind}": form}, {kind: form}) for kind, form in VLLMS.items()},
    "guided_decoding": ({"guided_decoding": {"choice": POOL}}, {"choice": POOL}),
    **tgi_forms("grammar"),
    **tgi_forms("response_format"),
    "response_format: json_object": ({"response_format": typed("json_object")}, {"json_object": True}),
    "response_format: json_object, a schema": (
        {"response_format": typed("json_object", schema=CLOSED)},
        {"json": CLOSED},
    ),
    "response_format: json_schema": (
        {"response_format": typed("json_schema", json_schema={"name": "x", "schema": CLOSED, "strict": True})},
        {"json": CLOSED},
    ),
    "response_format: json_schema, not strict": (
        {"response_format": typed("json_schema", json_schema={"name": "x", "schema": CLOSED, "strict": False})},
        {"json": CLOSED},
    ),
}
"""Schemas without a type are written in TGI's form."""
TOKENWISE: dict[str, Fields] = {
    "logit_bias": {"logit_bias": {str(PARIS): -100}},
    "bad_words": {"bad_words": ["Paris"]},
    "allowed_token_ids": {"allowed_token_ids": SOME},
    "stop": {"stop": ["Par"]},
    "stop_token_ids": {"stop_token_ids": [PARIS]},
    "min_tokens": {"logit_bias": {str(END): 100}, "min_tokens": 6},
}
"""Parameters that constrain single tokens."""
BOOLEAN = {
    "type": "object",
    "properties": {"n": {"type": "boolean"}},
    "required": ["n"],
    "additionalProperties": False,
}
"""The schema for happy_vllm's form `{"n": "boolean"}`."""

TOOL = {"type": "function", "name": "f", "parameters": {}}
BEAMS = {"use_beam_search": True, "n": 2}
NAMES: dict[str, Fields] = {
    **TOKENWISE,
    **{name: fields for name, (fields, _) in FORMS.items() if name in fields},
    "min_tokens": {"min_tokens": 3},
    "response_format": {"response_format": typed("json_object")},
    "structured_outputs": {"structured_outputs": {"regex": REGEX}},
    "bad_sequences": {"bad_sequences": ["Paris"]},
    "force_words_ids": {"force_words_ids": [[PARIS]]},
    "function_call": {"function_call": {"name": "f"}},
    "tool_choice": {"tool_choice": "required"},
    "json_format": {"json_format": {"n": "boolean"}},
    "structural_tag": {"structural_tag": {"format": {}}},
    "grammar": {"grammar": typed("regex", value=REGEX)},
}
"""An example for each field name that constrains the text on at least one server."""
NAMES |= {
    name: {name: value}
    for name, value in (
        *((name, 3) for name in ("min_new_tokens", "min_length")),
        *((name, "x") for name in ("regex", "ebnf", "guided_whitespace_pattern", "guided_decoding_guide")),
        *((name, ["Paris"]) for name in ("stop_sequences", "stop_words")),
        ("json_schema", SCHEMA),
        ("response_pool", POOL),
    )
}
WRONG_FORMS: Refused = {
    "response_format of an unknown type": (
        {"response_format": typed("xml", value="x")},
        "`response_format.type` must be one of text, json_object, json_schema, json, regex; got xml",
    ),
    "response_format of text with a schema": (
        {"response_format": typed("text", value=SCHEMA)},
        "`response_format.value` has no effect where `type` is text",
    ),
    "response_format without its schema": (
        {"response_format": typed("json_schema")},
        "`response_format` of type json_schema must have `json_schema`; got none",
    ),
    "response_format with two": (
        {"response_format": typed("json_object", value=SCHEMA, json_schema={"schema": SCHEMA})},
        "got value and json_schema",
    ),
    "grammar of an unknown type": (
        {"grammar": typed("ebnf", value="x")},
        "`grammar.type` must be one of json_object, json_schema, json, regex; got ebnf",
    ),
    "two forms": ({"guided_choice": POOL, "response_format": typed("json_object")}, "cannot be combined with"),
    "json_object that is false": (
        {"structured_outputs": {"json_object": False}},
        "`structured_outputs.json_object` must be true",
    ),
    "a pattern of white space": (
        {"structured_outputs": {"json": CLOSED, "whitespace_pattern": " "}},
        "`structured_outputs.whitespace_pattern` is not a field that this server can follow",
    ),
    "two kinds": (
        {"structured_outputs": {"regex": "a", "grammar": "x"}},
        "`structured_outputs` must have exactly one of",
    ),
    "no end": (
        {"structured_outputs": {"choice": POOL}, "ignore_eos": True},
        "cannot be used together with `ignore_eos`",
    ),
    "a minimum of tokens": (
        {"structured_outputs": {"choice": POOL}, "min_tokens": 3},
        "cannot be used together with ",
    ),
}


def by_name(names: str) -> Refused:
    """Return a case for each of these names. The message has to begin with the case's name."""
    return {name: (NAMES[name], f"`{name}` ") for name in names.split()}


@dataclass(frozen=True)
class Route:
    """A route's requests, and the place of the text in its answers."""

    path: str
    body: Callable[[Fields], Fields]
    text: Callable[[Any], str]
    """Reads the text from the document. For a streamed answer, the argument is the list of all documents."""
    stream: bool = False


def _first(document: Any, *path: str | int) -> str:
    for key in path:
        document = document[key]
    text: str = document
    return text


def _joined(*path: str | int) -> Callable[[list[Any]], str]:
    """Return a function that extracts a stream's text. It ignores records without this path."""

    def text(documents: list[Any]) -> str:
        pieces = []
        for document in documents:
            try:
                pieces.append(_first(document, *path) or "")
            except (KeyError, IndexError, TypeError):
                continue
        return "".join(pieces)

    return text


def _at(*path: str | int) -> Callable[[Any], str]:
    return lambda document: _first(document, *path)


def _last(*path: str | int) -> Callable[[list[Any]], str]:
    return lambda documents: _first(documents[-1], *path)


def _chat(fields: Fields) -> Fields:
    return {"model": "tgi", "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, **fields}


def _completion(fields: Fields) -> Fields:
    return {"model": "tgi", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, **fields}


def _response(fields: Fields) -> Fields:
    return {
        "model": "tgi",
        "input": "What is the capital of France?",
        "max_output_tokens": TOKENS,
        "temperature": 0,
        **fields,
    }


def _inputs(fields: Fields) -> Fields:
    return {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS, **fields}}


def _greedy(fields: Fields) -> Fields:
    return _inputs({"do_sample": False, **fields})


def _rooted(fields: Fields) -> Fields:
    return _inputs({"return_full_text": False, **fields})


def _happy(fields: Fields) -> Fields:
    return {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, **fields}


def _triton(fields: Fields) -> Fields:
    """Return a body for Triton. Parameters are plain values or JSON in a string. `bad_words` is for TensorRT-LLM."""
    values = {
        name: value if isinstance(value, str | int | float) else json.dumps(value) for name, value in fields.items()
    }
    values |= {name: fields[name] for name in ("bad_words",) if name in fields}
    values |= {name: fields[name][0] for name in ("stop",) if name in fields}
    return {"text_input": PROMPT, "exclude_input_in_output": True, "max_tokens": TOKENS, "temperature": 0, **values}


def _sampling_parameters(fields: Fields) -> Fields:
    values = {"max_tokens": TOKENS, "temperature": 0, **fields}
    return {"text_input": PROMPT, "exclude_input_in_output": True, "sampling_parameters": json.dumps(values)}


def _streamed(body: Callable[[Fields], Fields]) -> Callable[[Fields], Fields]:
    return lambda fields: {**body(fields), "stream": True}


CHAT, COMPLETIONS, RESPONSES, INVOCATIONS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/invocations"
_CONTENT = ("choices", 0, "message", "content")
_DELTA = ("choices", 0, "delta", "content")
OPENAI = {
    "chat": Route(CHAT, _chat, _at(*_CONTENT)),
    "chat, streamed": Route(CHAT, _streamed(_chat), _joined(*_DELTA), stream=True),
    "completions": Route(COMPLETIONS, _completion, _at("choices", 0, "text")),
    "completions, streamed": Route(COMPLETIONS, _streamed(_completion), _joined("choices", 0, "text"), stream=True),
    "LMI's chat": Route(INVOCATIONS, _chat, _at(*_CONTENT)),
    "LMI's chat, streamed": Route(INVOCATIONS, _streamed(_chat), _joined(*_DELTA), stream=True),
    "LMI's completions": Route(INVOCATIONS, _completion, _at("choices", 0, "text")),
}
RESPONSE = {
    "responses": Route(RESPONSES, _response, _at("output", 0, "content", 0, "text")),
    "responses, streamed": Route(
        RESPONSES,
        _streamed(_response),
        lambda events: "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta"),
        stream=True,
    ),
}
MESSAGE = {
    "messages": Route("/v1/messages", _chat, _at("content", 0, "text")),
    "messages, streamed": Route("/v1/messages", _streamed(_chat), _joined("delta", "text"), stream=True),
}
LMI = {
    "LMI": Route(INVOCATIONS, _inputs, _at("generated_text")),
    "LMI, streamed": Route(INVOCATIONS, _streamed(_inputs), _last("generated_text"), stream=True),
    "LMI, several": Route(
        INVOCATIONS, lambda fields: _inputs(fields) | {"inputs": [PROMPT, PROMPT]}, _at(1, "generated_text")
    ),
}
ASYNCHRONOUS = {
    "LMI's asynchronous handler": Route(INVOCATIONS, _greedy, _at("generated_text")),
    "LMI's asynchronous handler, streamed": Route(
        INVOCATIONS, _streamed(_greedy), _last("generated_text"), stream=True
    ),
}
DYNAMIC = {"dynamic batch": Route(INVOCATIONS, _rooted, _at(0, "generated_text"))}
VLLM_NAMES = {
    "happy_vllm": Route("/v1/generate", _happy, _at("responses", 0)),
    "happy_vllm, streamed": Route("/v1/generate_stream", _happy, _last("responses", 0), stream=True),
    "Triton": Route("/v2/models/model/generate", _triton, _at("text_output")),
    "Triton, streamed": Route(
        "/v2/models/model/generate_stream", _streamed(_triton), _joined("text_output"), stream=True
    ),
    "Triton, sampling_parameters": Route("/v2/models/model/generate", _sampling_parameters, _at("text_output")),
}
TGI = {
    "generate": Route("/generate", _inputs, _at("generated_text")),
    "generate_stream": Route("/generate_stream", _inputs, _last("generated_text"), stream=True),
    "TGI's root": Route("/", _rooted, _at(0, "generated_text")),
    "TGI's root, streamed": Route("/", _streamed(_rooted), _last("generated_text"), stream=True),
}


ROUTES: dict[str, Route] = {**OPENAI, **RESPONSE, **MESSAGE, **LMI, **VLLM_NAMES, **TGI}
HAPPY = ("happy_vllm", "happy_vllm, streamed")


def for_each(names: Iterable[str], cases: Any) -> dict[str, Any]:
    return dict.fromkeys(names, cases)


ENFORCED: dict[str, Forms] = {
    **for_each((*OPENAI, *LMI, *ASYNCHRONOUS, *DYNAMIC, *VLLM_NAMES), FORMS),
    **for_each(
        RESPONSE,
        {
            **FORMS,
            "text.format: json_schema": (
                {"text": {"format": typed("json_schema", name="x", schema=CLOSED)}},
                {"json": CLOSED},
            ),
            "text.format: json_object": ({"text": {"format": typed("json_object")}}, {"json_object": True}),
        },
    ),
    **for_each(
        MESSAGE,
        {
            "output_config.format": (
                {"output_config": {"format": typed("json_schema", schema=CLOSED)}},
                {"json": CLOSED},
            )
        },
    ),
    **for_each(
        HAPPY,
        {
            **FORMS,
            "response_pool": ({"response_pool": POOL}, {"choice": POOL}),
            "json_format": ({"json_format": {"n": "boolean"}}, {"json": BOOLEAN}),
        },
    ),
    **for_each(TGI, tgi_forms("grammar")),
}
"""The forms that each route supports."""
