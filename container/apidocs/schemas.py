"""OpenAPI schemas of LMI's routes. Source: LMI schema v0.31."""

from __future__ import annotations

from typing import Any


def _field(kind: str | list[str], meaning: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": meaning, **more}


def _list(kind: str, meaning: str) -> dict[str, Any]:
    return _field("array", meaning, items={"type": kind})


def _tokens(meaning: str) -> dict[str, Any]:
    return _field("array", meaning, items={"$ref": "#/components/schemas/Token"})


PARAMETERS: dict[str, Any] = {
    "do_sample": _field("boolean", "Sample; by default inferred from the other sampling parameters.", default=False),
    "seed": _field("integer", "Seed for sampling; random by default."),
    "temperature": _field("number", "Sampling temperature; 0 is greedy.", default=1.0, minimum=0),
    "repetition_penalty": _field("number", "Above 1 discourages repetition.", default=1.0, exclusiveMinimum=0),
    "top_k": _field("integer", "Sample from so many tokens; 0 and -1 from all.", default=0, minimum=-1),
    "top_p": _field("number", "Sample from this mass of probability.", default=1.0, exclusiveMinimum=0, maximum=1),
    "min_p": _field("number", "Least probability, relative to the best token.", default=0.0, minimum=0, maximum=1),
    "typical_p": _field("number", "Locally typical sampling (option.rolling_batch lmi-dist, scheduler).", default=1.0),
    "max_new_tokens": _field("integer", "Limit on new tokens.", default=30, minimum=1),
    "details": _field("boolean", "Show details of the generation.", default=False),
    "return_full_text": _field("boolean", "Put the prompt in front of generated_text.", default=False),
    "stop_sequences": _list("string", "Texts that end the generation."),
    "decoder_input_details": _field("boolean", "Show the prompt's tokens in details.prefill.", default=False),
    "truncate": _field("integer", "Keep only the last so many tokens of the prompt.", minimum=1),
    "ignore_eos_token": _field("boolean", "Go on after the end-of-sequence token.", default=False),
    "presence_penalty": _field("number", "Discourages tokens that occurred.", default=0.0, minimum=-2, maximum=2),
    "frequency_penalty": _field("number", "Discourages frequent tokens.", default=0.0, minimum=-2, maximum=2),
    "n": _field("integer", "Number of sequences; not when streaming.", default=1, minimum=1),
    "best_of": _field("integer", "Number of candidates of which the best are shown.", default=1, minimum=1),
    "num_beams": _field("integer", "Above 1: beam search; not when streaming.", default=1, minimum=1),
    "length_penalty": _field("number", "Beam search: above 1 favours longer sequences.", default=1.0),
    "early_stopping": _field("boolean", "Beam search: stop once num_beams are complete.", default=False),
    "stop_token_ids": _list("integer", "Tokens that end the generation."),
    "include_stop_str_in_output": _field("boolean", "Keep the stop text in the answer.", default=False),
    "top_n_tokens": _field("integer", "Show so many alternatives for each token, in details.", default=0, minimum=0),
    "skip_special_tokens": _field("boolean", "Leave special tokens out of the text.", default=True),
    "spaces_between_special_tokens": _field("boolean", "Put spaces between special tokens.", default=True),
    "logprobs": _field("integer", "Accepted; log_prob is shown with each token anyway.", minimum=0),
    "prompt_logprobs": _field("integer", "Accepted; decoder_input_details shows them.", minimum=0),
    "token_logprobs": _field("boolean", "Compute log_prob for each token; false: it is null.", default=True),
    "output_formatter": _field("string", "Format of this answer.", enum=["json", "jsonlines", "sse"]),
}

_REASONS = ["length", "eos_token", "stop_sequence", "abort", "error"]
_STREAM = _field("boolean", "A record for each token instead of one document.", default=False)

_ASYNC_NAMES = (
    *("do_sample", "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "max_new_tokens", "stop_sequences", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos_token", "return_full_text", "details", "decoder_input_details", "truncate", "skip_special_tokens"),
    *("spaces_between_special_tokens",),
)
ASYNC_PARAMETERS: dict[str, Any] = {
    **{name: PARAMETERS[name] for name in _ASYNC_NAMES},
    "max_tokens": _field("integer", "The same as max_new_tokens.", minimum=1),
    "min_tokens": _field("integer", "Least number of new tokens.", default=0, minimum=0),
    "stop": {"type": ["string", "array"], "items": {"type": "string"}, "description": "Beside stop_sequences."},
    "ignore_eos": _field("boolean", "The same as ignore_eos_token."),
    "truncate_prompt_tokens": _field("integer", "The same as truncate.", minimum=1),
    "bad_words": _list("string", "Texts that are not generated."),
    "logit_bias": _field("object", "Token ids and what is added to their logits, -100 to 100."),
    "allowed_token_ids": _list("integer", "Only these tokens are generated."),
    "structured_outputs": _field("object", "One of json, regex, choice, grammar, json_object, as in vLLM."),
}

_CHAT_REASONS = ["length", "eos_token", "stop_sequence", "tool_calls", "error"]
_CHAT_FIELDS = {
    "id": _field("string", "chatcmpl- and the request's id."),
    "object": _field("string", "chat.completion, or chat.completion.chunk."),
    "created": _field("integer", "Seconds since the epoch."),
    "usage": _field("object", "prompt_tokens, completion_tokens, total_tokens; in a stream where asked for."),
}


def _choices(part: str) -> dict[str, Any]:
    properties = {
        "index": _field("integer", "Number of the choice."),
        part: _field("object", "role, content; reasoning_content and tool_calls where there are any."),
        "logprobs": _field(["object", "null"], "Where asked for."),
        "finish_reason": _field(["string", "null"], "Why generation ended.", enum=[*_CHAT_REASONS, None]),
    }
    return _field("array", "What was generated.", items={"type": "object", "properties": properties})


SCHEMAS: dict[str, Any] = {
    "Request": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": _field(["string", "array"], "The prompt, or an array of prompts.", items={"type": "string"}),
            "parameters": {"$ref": "#/components/schemas/Parameters", "description": "How to generate."},
            "stream": _STREAM,
        },
    },
    "Parameters": {"type": "object", "properties": PARAMETERS},
    "AsyncRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": _field(["string", "array"], "The prompt, or an array of one.", items={"type": "string"}),
            "parameters": {"$ref": "#/components/schemas/AsyncParameters", "description": "How to generate."},
            "stream": _STREAM,
        },
    },
    "AsyncParameters": {"type": "object", "properties": ASYNC_PARAMETERS},
    "AsyncAnswer": {
        "type": "object",
        "required": ["generated_text"],
        "properties": {
            "generated_text": _field("string", "The text."),
            "details": _field("object", "finish_reason, generated_tokens, seed, prefill, tokens; where asked for."),
        },
    },
    "AsyncRecord": {
        "type": "object",
        "description": "One line for each token.",
        "required": ["index", "token", "generated_text", "details"],
        "properties": {
            "index": _field("integer", "From 0."),
            "token": _field("object", "id, text and logprob."),
            "generated_text": _field(["string", "null"], "The whole text; on the last record."),
            "details": _field(["object", "null"], "On the last record, where asked for."),
        },
    },
    "ChatAnswer": {
        "type": "object",
        "description": "LMI's answer to a chat.",
        "properties": {**_CHAT_FIELDS, "choices": _choices("message")},
    },
    "ChatRecord": {
        "type": "object",
        "description": "One line for each chunk of a chat's answer.",
        "properties": {**_CHAT_FIELDS, "choices": _choices("delta")},
    },
    "OpenAIAnswer": {
        "type": "object",
        "description": "OpenAI's own object, as /v1/chat/completions or /v1/completions answers; a chunk in a stream.",
    },
    "Answer": {
        "type": "object",
        "required": ["generated_text"],
        "properties": {
            "generated_text": _field("string", "The text."),
            "details": {"$ref": "#/components/schemas/Details", "description": "Only where asked for."},
        },
    },
    "StreamRecord": {
        "type": "object",
        "description": "One line or event for each token.",
        "required": ["token"],
        "properties": {
            "token": {"$ref": "#/components/schemas/Token", "description": "The token."},
            "generated_text": _field("string", "The whole text; on the last record."),
            "details": {"$ref": "#/components/schemas/Details", "description": "On the last record, where asked for."},
        },
    },
    "Token": {
        "type": "object",
        "required": ["id", "text", "log_prob"],
        "properties": {
            "id": _field("integer", "Token id."),
            "text": _field("string", "What the token adds to the text."),
            "log_prob": _field(["number", "null"], "Log probability; `logprob` under option.tgi_compat."),
            "special_token": _field("boolean", "Only on special tokens; `special` under option.tgi_compat."),
        },
    },
    "Details": {
        "type": "object",
        "properties": {
            "finish_reason": _field("string", "Why generation ended.", enum=_REASONS),
            "generated_tokens": _field("integer", "Number of generated tokens."),
            "inputs": _field("string", "The prompt."),
            "tokens": _tokens("The generated tokens; not when streaming."),
            "prefill": _tokens("The prompt's tokens, with decoder_input_details."),
            "top_tokens": _field("array", "Alternatives for each token, with top_n_tokens."),
            "best_of_sequences": _field("array", "The other sequences, where there are several."),
        },
    },
    "Text": {
        "type": "object",
        "description": "One prompt's text, of a dynamic batch.",
        "required": ["generated_text"],
        "properties": {"generated_text": _field("string", "The prompt and what was generated after it.")},
    },
    "StepRecord": {
        "type": "object",
        "description": "One line for each step of a streamed dynamic batch.",
        "required": ["outputs"],
        "properties": {"outputs": _field("array", "What the step added for each prompt.", items={"type": "string"})},
    },
    "HandlerError": {
        "type": "object",
        "required": ["code", "message", "error"],
        "properties": {
            "code": _field("integer", "The status."),
            "message": _field("string", "Always `invoke handler failure`."),
            "error": _field("string", "What was wrong."),
        },
    },
    "RequestError": {
        "type": "object",
        "required": ["error", "code"],
        "properties": {
            "error": _field("string", "What was wrong."),
            "code": _field("integer", "The status."),
            "generated_text": _field("string", "Empty; where a parameter was wrong or generation failed."),
            "details": _field("object", "finish_reason is `error`, the rest null."),
        },
    },
    "PlainError": {
        "type": "object",
        "required": ["error", "code"],
        "properties": {
            "error": _field("string", "What was wrong."),
            "code": _field("integer", "The status."),
        },
    },
    "FrontEndError": {
        "type": "object",
        "required": ["code", "type", "message"],
        "properties": {
            "code": _field("integer", "The status."),
            "type": _field("string", "LMI's name for the error."),
            "message": _field("string", "What was wrong."),
        },
    },
}
