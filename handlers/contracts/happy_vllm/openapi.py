"""happy_vllm's routes in the API description."""

from __future__ import annotations

from collections.abc import Mapping

from handlers.contracts.family import Operation
from handlers.contracts.happy_vllm.errors import JSON
from handlers.contracts.happy_vllm.tokens import DEFAULT_CHUNK, DEFAULT_SEPARATORS
from handlers.contracts.schemas import OBJECT, STRING, Schema, an_answer, an_array, an_object, parameters
from handlers.contracts.vllm_parameters import read_vllm_parameters

_TRUE: Schema = {"type": "boolean", "default": True}
_FALSE: Schema = {"type": "boolean", "default": False}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_STRINGS, _IDS = an_array(STRING), an_array(_COUNT)

_GENERATE = an_object(
    {
        "prompt": STRING,
        "prompt_in_response": _FALSE,
        "response_pool": _STRINGS,
        "json_format": OBJECT,
        "json_format_is_json_schema": _FALSE,
        **parameters(lambda reader: read_vllm_parameters({}, reader=reader)),
        "structured_outputs": OBJECT,
    },
    "prompt",
    name="HappyVllmRequest",
)
_GENERATED = an_answer(
    "HappyVllmAnswer",
    "The texts, why each ended (None: it has not), the token counts of each, and the prompt with prompt_in_response.",
    *("responses", "finish_reasons", "usages", "prompt"),
)
_INVALID = an_answer("HappyVllmError", "A text, or an array of entries with type, loc and msg.", "detail")
_REQUIRED = ("text", "token_ids", "tokens", "request_id")


def _generates(summary: str, media_type: str) -> Operation:
    answers = {"200": ("The texts", {media_type: _GENERATED}), "422": ("The request is wrong", {JSON: _INVALID})}
    return Operation(summary=f"{summary} (happy_vllm)", request=_GENERATE, answers=answers)


def _tells(summary: str, answer: str, **fields: Schema) -> Operation:
    """`answer`: names of its fields. `fields`: those of the body, if it has one."""
    shown = {"type": "object", "properties": {name: {} for name in answer.split()}}
    answers: dict[str, tuple[str, Mapping[str, Schema]]] = {"200": ("The answer", {JSON: shown})}
    if fields:
        answers["422"] = ("The request is wrong; 400 with vLLM's error below /v2", {JSON: _INVALID})
    request = an_object(fields, *(name for name in fields if name in _REQUIRED)) if fields else None
    return Operation(summary=f"{summary} (happy_vllm)", request=request, answers=answers)


GENERATE = _generates("Generate text", JSON)
# What the stream is; it is sent without a content type.
GENERATE_STREAM = _generates("Generate text, a line for each step with all of the text so far", "application/jsonlines")
TOKENIZER = _tells(
    "Token ids of a text", "tokens_ids tokens_nb tokens_str", text=STRING, with_tokens_str=_FALSE, vanilla=_TRUE
)
DECODE = _tells("Text of token ids", "decoded_string tokens_str", token_ids=_IDS, with_tokens_str=_FALSE, vanilla=_TRUE)
TOKENIZER_V2 = _tells(
    "Token ids of a prompt or a chat, as vLLM answers",
    "count max_model_len tokens",
    model=STRING,
    prompt=STRING,
    messages=an_array(OBJECT),
    add_special_tokens={"type": "boolean"},
    add_generation_prompt=_TRUE,
)
DECODE_V2 = _tells("Text of token ids, as vLLM answers", "prompt", model=STRING, tokens=_IDS)
SPLIT_TEXT = _tells(
    "Split a text into chunks that end at separators",
    "split_text",
    text=STRING,
    num_tokens_in_chunk={**_COUNT, "default": DEFAULT_CHUNK},
    separators={**_STRINGS, "default": DEFAULT_SEPARATORS},
)
METADATA_TEXT = _tells(
    "Count a text's tokens, and show what truncation drops",
    "tokens_nb truncated_text",
    text=STRING,
    truncation_side=STRING,
    max_length=_COUNT,
)
ABORT_REQUEST = _tells("End a running request", "", request_id=STRING)
LIVENESS = _tells("Whether the server answers", "alive")
READINESS = _tells("Whether the model answers; the status is always 200", "ready")
INFO = _tells(
    "The application and its model",
    "application version vllm_version model_name truncation_side max_length extra_information",
)
LAUNCH_ARGUMENTS = _tells("The launch arguments; always empty", "")
LIVE_METRICS = _tells(
    "The scheduler's figures",
    "requests_running requests_swapped requests_pending gpu_cache_usage cpu_cache_usage",
)
