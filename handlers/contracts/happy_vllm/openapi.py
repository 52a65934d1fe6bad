"""What /openapi.json says of happy_vllm's routes. Source: contracts/happy_vllm.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handlers.contracts.family import Operation
from handlers.contracts.happy_vllm.errors import JSON

_Schema = Mapping[str, Any]


def _field(kind: str, meaning: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": meaning, **more}


def _list(kind: str, meaning: str, **more: Any) -> dict[str, Any]:
    return _field("array", meaning, items={"type": kind}, **more)


def _object(required: tuple[str, ...] = (), **properties: _Schema) -> dict[str, Any]:
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


_MESSAGES = {"type": "array", "items": {"type": "object"}, "description": "A chat, instead of prompt."}
_MODEL = _field("string", "The served model's name; may be left out.")
_VANILLA = _field("boolean", "As the tokenizer does it; false: as inside a longer text.", default=True)
_TOKEN_TEXTS = _field("boolean", "Show the tokens' texts as well.", default=False)

_SAMPLING: dict[str, Any] = {
    "n": _field("integer", "Number of sequences.", default=1, minimum=1),
    "best_of": _field("integer", "Number of candidates of which the n best are shown; n by default.", minimum=1),
    "presence_penalty": _field("number", "Discourages tokens that occurred.", default=0.0, minimum=-2, maximum=2),
    "frequency_penalty": _field("number", "Discourages frequent tokens.", default=0.0, minimum=-2, maximum=2),
    "repetition_penalty": _field("number", "Above 1 discourages repetition.", default=1.0, exclusiveMinimum=0),
    "temperature": _field("number", "Sampling temperature; 0 is greedy.", default=1.0, minimum=0, maximum=2),
    "top_p": _field("number", "Sample from this mass of probability.", default=1.0, exclusiveMinimum=0, maximum=1),
    "top_k": _field("integer", "Sample from so many tokens; 0 and -1 from all.", default=0, minimum=-1),
    "min_p": _field("number", "Least probability, relative to the best token.", default=0.0, minimum=0, maximum=1),
    "seed": _field("integer", "Seed for sampling; random by default."),
    "use_beam_search": _field("boolean", "Beam search, best_of or n wide.", default=False),
    "length_penalty": _field("number", "Beam search: above 1 favours longer sequences.", default=1.0),
    "early_stopping": _field("boolean", "Beam search: stop once all beams are complete.", default=False),
    "stop": {"type": ["string", "array"], "items": {"type": "string"}, "description": "Texts that end the generation."},
    "stop_token_ids": _list("integer", "Tokens that end the generation."),
    "bad_words": _list("string", "Texts that are not generated."),
    "include_stop_str_in_output": _field("boolean", "Keep the stop text in the answer.", default=False),
    "ignore_eos": _field("boolean", "Go on after the end-of-sequence token.", default=False),
    "max_tokens": _field("integer", "Limit on new tokens.", default=16, minimum=1),
    "min_tokens": _field("integer", "Least number of new tokens.", default=0, minimum=0),
    "logprobs": _field("integer", "Accepted; no answer shows them.", minimum=0),
    "prompt_logprobs": _field("integer", "Accepted; no answer shows them.", minimum=0),
    "detokenize": _field("boolean", "False: the texts are empty.", default=True),
    "skip_special_tokens": _field("boolean", "Leave special tokens out of the text.", default=True),
    "spaces_between_special_tokens": _field("boolean", "Put spaces between special tokens.", default=True),
    "truncate_prompt_tokens": _field("integer", "Keep only the last so many tokens of the prompt.", minimum=1),
    "logit_bias": _field("object", "Token ids and what is added to their logits, -100 to 100."),
    "allowed_token_ids": _list("integer", "Only these tokens are generated."),
    "structured_outputs": _field("object", "One of json, regex, choice, grammar, json_object, as in vLLM."),
}

_GENERATE = _object(
    ("prompt",),
    prompt=_field("string", "The prompt."),
    prompt_in_response=_field("boolean", "Give the prompt back.", default=False),
    response_pool=_list("string", "The answer is one of these. Not with min_tokens or json_format."),
    json_format=_field("object", "The answer is JSON of this form: field names and types, or a JSON schema."),
    json_format_is_json_schema=_field("boolean", "json_format is a JSON schema.", default=False),
    **_SAMPLING,
)
_USAGE = _object(
    prompt_tokens=_field("integer", "Tokens of the prompt."),
    completion_tokens=_field("integer", "Tokens generated so far."),
    total_tokens=_field("integer", "Their sum."),
)
_GENERATED = _object(
    ("responses", "finish_reasons", "usages"),
    responses=_list("string", "The texts, one for each sequence."),
    finish_reasons=_list("string", "Why each ended; None while it has not.", enum=["length", "stop", "abort", "None"]),
    usages=_field("array", "Token counts of each.", items=_USAGE),
    prompt=_field("string", "With prompt_in_response."),
)
_INVALID = _object(detail={"description": "A text, or an array of entries with type, loc and msg."})
_VLLM_INVALID = _object(error=_field("object", "message, type, param, code."))


def _operation(
    summary: str, answer: _Schema | None, request: _Schema | None = None, *, invalid: tuple[str, _Schema] | None = None
) -> Operation:
    answers = {"200": ("The answer", JSON, answer)}
    if request is not None:
        status, schema = invalid or ("422", _INVALID)
        answers[status] = ("The request is wrong", JSON, schema)
    return Operation(summary=summary, request=request, answers=answers)


GENERATE = _operation("Generate text (happy_vllm)", _GENERATED, _GENERATE)
GENERATE_STREAM = Operation(
    summary="Generate text, a line of JSON for each step with all of the text so far (happy_vllm)",
    request=_GENERATE,
    answers={
        "200": ("Lines of JSON, sent without a content type", "application/jsonlines", _GENERATED),
        "422": ("The request is wrong", JSON, _INVALID),
    },
)
TOKENIZER = _operation(
    "Token ids of a text (happy_vllm)",
    _object(
        tokens_ids=_list("integer", "Token ids."),
        tokens_nb=_field("integer", "How many."),
        tokens_str=_list("string", "Their texts, with with_tokens_str."),
    ),
    _object(("text",), text=_field("string", "The text."), with_tokens_str=_TOKEN_TEXTS, vanilla=_VANILLA),
)
DECODE = _operation(
    "Text of token ids (happy_vllm)",
    _object(
        decoded_string=_field("string", "The text."), tokens_str=_list("string", "The tokens', with with_tokens_str.")
    ),
    _object(("token_ids",), token_ids=_list("integer", "Token ids."), with_tokens_str=_TOKEN_TEXTS, vanilla=_VANILLA),
)
TOKENIZER_V2 = _operation(
    "Token ids of a prompt or a chat (happy_vllm, vLLM)",
    _object(
        count=_field("integer", "How many."),
        max_model_len=_field("integer", "The model's context."),
        tokens=_list("integer", "Token ids."),
    ),
    _object(
        model=_MODEL,
        prompt=_field("string", "The prompt."),
        messages=_MESSAGES,
        add_special_tokens=_field("boolean", "By default true for a prompt and false for a chat."),
        add_generation_prompt=_field("boolean", "Begin the assistant's answer.", default=True),
    ),
    invalid=("400", _VLLM_INVALID),
)
DECODE_V2 = _operation(
    "Text of token ids (happy_vllm, vLLM)",
    _object(prompt=_field("string", "The text.")),
    _object(("tokens",), model=_MODEL, tokens=_list("integer", "Token ids.")),
    invalid=("400", _VLLM_INVALID),
)
SPLIT_TEXT = _operation(
    "Split a text into chunks that end at separators (happy_vllm)",
    _object(split_text=_list("string", "The chunks; joined, they are the text.")),
    _object(
        ("text",),
        text=_field("string", "The text."),
        num_tokens_in_chunk=_field("integer", "Least number of tokens of a chunk.", default=200, minimum=0),
        separators=_list("string", "Where a chunk may end.", default=[".", "!", "?", "|", " .", " !", " ?", " |"]),
    ),
)
METADATA_TEXT = _operation(
    "Count a text's tokens, and show what truncation drops (happy_vllm)",
    _object(tokens_nb=_field("integer", "Tokens."), truncated_text=_field("string", "What is dropped.")),
    _object(
        ("text",),
        text=_field("string", "The text."),
        truncation_side=_field("string", "Where to truncate.", enum=["left", "right"], default="left"),
        max_length=_field("integer", "Tokens that are kept; the model's context by default.", minimum=0),
    ),
)
ABORT_REQUEST = _operation(
    "End a running request (happy_vllm)", None, _object(("request_id",), request_id=_field("string", "Its id."))
)
LIVENESS = _operation("Whether the server answers (happy_vllm)", _object(alive=_field("string", "ok")))
READINESS = _operation(
    "Whether the model answers; the status is always 200 (happy_vllm)", _object(ready=_field("string", "ok or ko"))
)
INFO = _operation(
    "The application and its model (happy_vllm)",
    _object(
        application=_field("string", "happy_vllm"),
        version=_field("string", "The server's."),
        vllm_version=_field("string", "vLLM's; another engine's with its name."),
        model_name=_field("string", "The served model."),
        truncation_side=_field("string", "left"),
        max_length=_field("integer", "The model's context, in tokens."),
        extra_information=_field("object", "Empty."),
    ),
)
LAUNCH_ARGUMENTS = _operation("The launch arguments; always empty (happy_vllm)", {"type": "object"})
LIVE_METRICS = _operation(
    "The scheduler's figures (happy_vllm)",
    _object(
        requests_running=_field("integer", "Sequences in the batch."),
        requests_swapped=_field("integer", "0"),
        requests_pending=_field("integer", "Sequences that wait."),
        gpu_cache_usage=_field("number", "Share of the KV cache in use, 0 to 1."),
        cpu_cache_usage=_field("number", "0"),
    ),
)
