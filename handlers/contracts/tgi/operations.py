"""What TGI's routes are for, as /openapi.json and /docs show it. Source: contracts/tgi.md sections 2 to 8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handlers.contracts.family import Operation
from handlers.contracts.tgi.errors import EVENTS, JSON
from handlers.contracts.tgi.request import MAX_TOP_N_TOKENS

Schema = Mapping[str, Any]
Answers = dict[str, tuple[str, str, Schema | None]]


def _field(kind: str, meaning: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": meaning, **more}


def _object(*required: str, **fields: Schema) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": fields}


def _array(items: Schema, meaning: str = "") -> dict[str, Any]:
    return _field("array", meaning, items=items)


_PARAMETERS = _object(
    max_new_tokens=_field("integer", "Limit on new tokens; the rest of the context by default.", minimum=1),
    do_sample=_field("boolean", "Sample.", default=False),
    temperature=_field("number", "Sampling temperature.", default=1.0, exclusiveMinimum=0),
    top_k=_field("integer", "Sample from so many tokens.", minimum=1),
    top_p=_field("number", "Sample from this mass of probability.", exclusiveMinimum=0, exclusiveMaximum=1),
    typical_p=_field("number", "Locally typical sampling.", exclusiveMinimum=0, exclusiveMaximum=1),
    repetition_penalty=_field("number", "Above 1 discourages repetition.", default=1.0, exclusiveMinimum=0),
    frequency_penalty=_field("number", "Discourages frequent tokens.", default=0.0, minimum=-2, maximum=2),
    seed=_field("integer", "Seed for sampling; random by default.", minimum=0),
    stop=_array({"type": "string"}, "Texts that end the generation, at most as many as `/info` says."),
    best_of=_field(
        "integer", "Candidates of which the best is the answer, at most as many as `/info` says.", default=1
    ),
    top_n_tokens=_field("integer", "Alternatives to show for each token.", default=0, maximum=MAX_TOP_N_TOKENS),
    return_full_text=_field("boolean", "Put the prompt in front of the text; by default on / only."),
    details=_field("boolean", "Show details.", default=False),
    decoder_input_details=_field("boolean", "Show the prompt's tokens in details.prefill.", default=False),
    truncate=_field("integer", "Keep only the last so many tokens of the prompt.", minimum=1),
    grammar=_object("type", "value", type=_field("string", "", enum=["json", "json_schema", "regex"]), value={}),
)
_INPUTS = _field("string", "The prompt.")
_REQUEST = _object("inputs", inputs=_INPUTS, parameters=_PARAMETERS)
_STREAM = {"stream": _field("boolean", "An event for each token instead of one document.", default=False)}
_ROOT_REQUEST = {**_REQUEST, "properties": {**_REQUEST["properties"], **_STREAM}}

_TOKEN_FIELDS = {
    "id": _field("integer", "Token id."),
    "text": _field("string", "Its text."),
    "logprob": {"type": ["number", "null"], "description": "Log probability."},
}
_PROMPT_TOKEN = _object("id", "text", "logprob", **_TOKEN_FIELDS)
_TOKEN = _object(
    "id", "text", "logprob", "special", **_TOKEN_FIELDS, special=_field("boolean", "Not part of the generated text.")
)
_REASON = _field("string", "Why generation ended.", enum=["length", "eos_token", "stop_sequence"])
_COUNTS = {
    "finish_reason": _REASON,
    "generated_tokens": _field("integer", "Number of generated tokens."),
    "seed": {"type": ["integer", "null"], "description": "Where the request samples."},
}
_LISTS = {
    "prefill": _array(_PROMPT_TOKEN, "The prompt's tokens, with decoder_input_details."),
    "tokens": _array(_TOKEN, "The generated tokens."),
    "top_tokens": _array(_array(_TOKEN), "Alternatives for each token, with top_n_tokens."),
}
_TEXT = _field("string", "The text.")
_DETAILS = _object(
    "finish_reason",
    "generated_tokens",
    "prefill",
    "tokens",
    **_COUNTS,
    **_LISTS,
    best_of_sequences=_array(_object(generated_text=_TEXT, **_COUNTS, **_LISTS), "The others, with best_of."),
)
_ANSWER = _object("generated_text", generated_text=_TEXT, details=_DETAILS)
_NULL_TEXT = {"type": ["string", "null"], "description": "The whole text, on the last event."}
_EVENT = _object(
    *("index", "token", "generated_text", "details"),
    index=_field("integer", "From 1."),
    token=_TOKEN,
    top_tokens=_array(_TOKEN, "Alternatives, with top_n_tokens."),
    generated_text=_NULL_TEXT,
    details={
        "type": ["object", "null"],
        "description": "On the last event, where asked for.",
        "properties": {**_COUNTS, "input_length": _field("integer", "Tokens of the prompt.")},
    },
)
_ERROR = _object("error", "error_type", error=_field("string", "What was wrong."), error_type=_field("string", ""))

_FAILURES: Answers = {
    "422": ("A parameter is wrong, or the prompt too long", JSON, _ERROR),
    "424": ("Generation failed", JSON, _ERROR),
    "429": ("The queue is full", JSON, _ERROR),
    "503": ("The model is not ready", JSON, _ERROR),
}
_PLACED = _object(
    "id",
    "text",
    "start",
    "stop",
    id=_field("integer", "Token id."),
    text=_field("string", "Its text."),
    start=_field("integer", "First byte in `inputs`."),
    stop=_field("integer", "One beyond its last byte."),
)


def _generates(summary: str, request: Schema, meaning: str, kind: str, answer: Schema) -> Operation:
    return Operation(summary=summary, request=request, answers={"200": (meaning, kind, answer), **_FAILURES})


ROOT = _generates(
    "Generate text (TGI); events with `stream`", _ROOT_REQUEST, "The answer, in an array.", JSON, _array(_ANSWER)
)
GENERATE = _generates("Generate text (TGI)", _REQUEST, "The answer.", JSON, _ANSWER)
GENERATE_STREAM = _generates(
    "Stream text (TGI)", _REQUEST, "An event for each token; errors are events as well.", EVENTS, _EVENT
)
VERTEX = _generates(
    "Generate texts (TGI, as Vertex AI asks for them)",
    _object("instances", instances=_array(_REQUEST, "Requests, also chats with `messages`.")),
    "A text for each instance.",
    JSON,
    _object("predictions", predictions=_array({"type": "string"})),
)
HEALTH = Operation(
    summary="Health (TGI)",
    answers={"200": ("The model can serve", "", None), "503": ("It cannot", JSON, _ERROR)},
)
INFO = Operation(
    summary="Model and limits (TGI)",
    answers={"200": ("Model and limits", JSON, {"type": "object"}), "503": ("The model is not ready", JSON, _ERROR)},
)
TOKENIZE = Operation(
    summary="Tokens of a text (TGI)",
    request=_REQUEST,
    answers={"200": ("The tokens", JSON, _array(_PLACED)), "503": ("The model is not ready", JSON, _ERROR)},
)
CHAT_TOKENIZE = Operation(
    summary="Prompt and tokens of a chat (TGI)",
    request=_object("messages", messages=_array({"type": "object"}, "The chat so far.")),
    answers={
        "200": (
            "The prompt and its tokens",
            JSON,
            _object(tokenize_response=_array(_PLACED), templated_text=_field("string", "The prompt.")),
        ),
        "422": ("The model's template does not take these messages", JSON, _ERROR),
        "503": ("The model is not ready", JSON, _ERROR),
    },
)
