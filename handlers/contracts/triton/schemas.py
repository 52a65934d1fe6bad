"""JSON schemas of Triton's generate routes, for /openapi.json. Source: contracts/triton_generate.md sections 2 to 5."""

from __future__ import annotations

from typing import Any

from handlers.contracts.family import Operation


def _field(kind: str | list[str], meaning: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": meaning, **more}


_SWITCHES = {
    "stream": _field("boolean", "A response for each step of the engine.", default=False),
    "exclude_input_in_output": _field(
        "boolean", "Leave the prompt out of text_output; by default it is there unless streaming."
    ),
    "return_finish_reason": _field("boolean", "Add finish_reason.", default=False),
    "return_cumulative_logprob": _field("boolean", "Add cumulative_logprob.", default=False),
    "return_logprobs": _field("boolean", "Add logprobs; needs the parameter logprobs.", default=False),
    "return_num_input_tokens": _field("boolean", "Add num_input_tokens.", default=False),
    "return_num_output_tokens": _field("boolean", "Add num_output_tokens.", default=False),
}

_SAMPLING = {
    "max_tokens": _field("integer", "Limit on new tokens.", default=16, minimum=1),
    "temperature": _field("number", "Sampling temperature; 0 is greedy.", default=1.0, minimum=0, maximum=2),
    "top_p": _field("number", "Sample from this mass of probability.", default=1.0, exclusiveMinimum=0, maximum=1),
    "top_k": _field("integer", "Sample from so many tokens; 0 and -1 from all.", default=0, minimum=-1),
    "min_p": _field("number", "Least probability, relative to the best token.", default=0.0, minimum=0, maximum=1),
    "n": _field("integer", "Number of texts; the outputs become arrays.", default=1, minimum=1),
    "seed": _field("integer", "Seed for sampling; random by default."),
    "stop": _field("string", "A text that ends the generation; for several use sampling_parameters."),
    "presence_penalty": _field("number", "Discourages tokens that occurred.", default=0.0, minimum=-2, maximum=2),
    "frequency_penalty": _field("number", "Discourages frequent tokens.", default=0.0, minimum=-2, maximum=2),
    "repetition_penalty": _field("number", "Above 1 discourages repetition.", default=1.0, exclusiveMinimum=0),
    "min_tokens": _field("integer", "No end before so many tokens.", default=0, minimum=0),
    "ignore_eos": _field("boolean", "Go on after the end-of-sequence token.", default=False),
    "logprobs": _field("integer", "So many alternatives for each token, for return_logprobs.", minimum=0),
    "structured_outputs": _field("string", "A JSON object in a string: json, regex, choice, grammar or json_object."),
}

_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["text_input"],
    "properties": {
        "id": _field("string", "Comes back in every response."),
        "text_input": _field("string", "The prompt."),
        **_SWITCHES,
        "sampling_parameters": _field("string", "A JSON object in a string, in the place of all parameters."),
        "parameters": {
            "type": "object",
            "description": "Sampling parameters by vLLM's names; they may stand beside text_input as well.",
            "properties": _SAMPLING,
            "additionalProperties": {"type": ["string", "number", "boolean"]},
        },
    },
    "additionalProperties": True,
}

_RESPONSE: dict[str, Any] = {
    "type": "object",
    "required": ["model_name", "model_version", "text_output"],
    "properties": {
        "cumulative_logprob": _field(["number", "array"], "Log probability of the text so far."),
        "finish_reason": _field(["string", "array"], 'length, stop or abort; "None" while unfinished.'),
        "id": _field("string", "The request's, if it has one."),
        "logprobs": _field(["string", "array"], "A JSON array in a string, with an object for each new token."),
        "model_name": _field("string", "The model."),
        "model_version": _field("string", "Its version."),
        "num_input_tokens": _field("integer", "Tokens of the prompt."),
        "num_output_tokens": _field(["integer", "array"], "New tokens in this response."),
        "text_output": _field(["string", "array"], "The text; in a stream what is new. An array where n is above 1."),
    },
}

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": _field("string", "What went wrong.")},
}

_FAILURES = {
    "400": ("The request is wrong", "application/json", _ERROR),
    "404": ("Unknown model or version", "application/json", _ERROR),
    "500": ("Generation failed", "application/json", _ERROR),
    "503": ("The queue is full, or the model is not ready", "application/json", _ERROR),
}

GENERATE = Operation(
    summary="Generate text (Triton)",
    request=_REQUEST,
    answers={"200": ("One response.", "application/json", _RESPONSE), **_FAILURES},
)
GENERATE_STREAM = Operation(
    summary="Generate text as server-sent events (Triton)",
    request=_REQUEST,
    answers={
        "200": (
            "An event for each response. An event may hold an error object instead.",
            "text/event-stream",
            {"anyOf": [_RESPONSE, _ERROR]},
        ),
        **_FAILURES,
    },
)

_PROBE = {"200": ("Yes.", "", None), "400": ("No.", "application/json", None)}
_OBJECT: dict[str, Any] = {"type": "object"}


def probe(summary: str) -> Operation:
    """A route that answers by its status."""
    return Operation(summary=summary, answers=_PROBE)


def document(summary: str) -> Operation:
    """A route that answers with an object."""
    return Operation(
        summary=summary,
        answers={
            "200": (summary + ".", "application/json", _OBJECT),
            "404": ("Unknown model", "application/json", _ERROR),
        },
    )


INDEX = Operation(
    summary="Models of this server (Triton)",
    request={"type": "object", "properties": {"ready": _field("boolean", "Only ready ones.", default=False)}},
    answers={"200": ("The models.", "application/json", {"type": "array", "items": _OBJECT})},
)
LOAD = Operation(
    summary="Load a model, which the served one needs not (Triton)",
    answers={
        "200": ("It is loaded.", "", None),
        "404": ("Another model than the served one", "application/json", _ERROR),
        "503": ("It is not ready", "application/json", _ERROR),
    },
)
UNLOAD = Operation(
    summary="Unload a model, which the served one cannot be (Triton)",
    answers={
        "200": ("Another model, which is not there.", "", None),
        "501": ("The served model", "application/json", _ERROR),
    },
)
INFER = Operation(
    summary="Tensors in and out (KServe); refused, use generate",
    answers={
        "404": ("Unknown model or version", "application/json", _ERROR),
        "501": ("Models of this kind do not take it", "application/json", _ERROR),
    },
)
