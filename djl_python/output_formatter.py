"""The built-in output formatters, the decorator for custom formatters, and the choice between them.

A formatter turns the tokens of a rolling-batch request into text: one document, JSON lines, or server-sent events. The
built-in formatters keep LMI's private names, because LMI's tests and some customers' code import them.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from djl_python.request_io import NextToken, RequestOutput, Sequence, TextGenerationOutput, Token
from djl_python.utils import wait_till_generation_finished

Formatter = Callable[..., str]
# `(token, first_token, last_token, details, generated_text, request_id)`
LegacyArguments = tuple[Token | None, bool, bool, dict[str, Any], str, Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])

_OUTPUT_TYPES = {"RequestOutput", "TextGenerationOutput"}
_ERROR_CODE = 400


def output_formatter(function: _Function) -> _Function:
    """Mark a function of `model.py` as the output formatter."""
    function.is_output_formatter = True  # type: ignore[attr-defined]
    return function


def get_output_formatter(
    output_formatter: Formatter | str | None, stream: bool, tgi_compat: bool
) -> tuple[Formatter, str | None]:
    """Return the formatter and its content type. The content type of a custom formatter is None.

    Args:
        output_formatter: A function, or the name of a built-in formatter. None and unknown names select the default,
            and unknown names are logged. The default is JSON. For a stream, the default is JSON lines, or server-sent
            events if `tgi_compat` is True.
        stream: Whether the client requests a stream.
        tgi_compat: Whether the client is a TGI client.
    """
    if callable(output_formatter):
        return output_formatter, None
    if output_formatter in _BUILT_IN:
        return _BUILT_IN[output_formatter]
    if output_formatter is not None:
        logging.warning("Unsupported output formatter: %s", output_formatter)
    if not stream:
        return _BUILT_IN["json"]
    return _BUILT_IN["sse" if tgi_compat else "jsonlines"]


def get_generated_text(sequence: Sequence, request_output: TextGenerationOutput) -> str:
    """Return a sequence's text. It starts with the prompt if the request sets `return_full_text`."""
    return _prefix(request_output) + "".join(token.text for token in sequence.tokens)


def takes_request_output(function: Callable[..., Any]) -> bool:
    """Return True if an output formatter takes a `RequestOutput`. A legacy formatter takes single tokens instead.

    The annotation of the first parameter decides; the annotation may be a string. A function with fewer than two
    parameters is not a legacy formatter.

    Raises:
        TypeError: The object is not callable.
        ValueError: The callable has no signature.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < 2:
        return True
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        return annotation.strip("'\"").rpartition(".")[2] in _OUTPUT_TYPES
    return isinstance(annotation, type) and issubclass(annotation, RequestOutput)


def legacy_call_arguments(request_output: TextGenerationOutput, next_token: NextToken) -> LegacyArguments:
    """Return the arguments of a legacy formatter for a token that `Sequence.advance` returned.

    If the request does not set `details`, the details are empty, or contain only the finish reason if it is `error`.
    The text is the text of all tokens for the last token, and empty for earlier tokens. In both cases, the prompt
    precedes it if the request sets `return_full_text`.
    """
    token, _, is_first, is_last = next_token
    sequence = request_output.best_sequence
    text = get_generated_text(sequence, request_output) if is_last else _prefix(request_output)
    return token, is_first, is_last, _legacy_details(request_output), text, request_output.request_id


def adapt_legacy_output_formatter(request_output: TextGenerationOutput) -> str:
    """Call a legacy formatter for each unread token, and return the concatenated results."""
    request, sequence, text = request_output.input, request_output.best_sequence, ""
    while sequence.has_next_token():
        text += request.output_formatter(*legacy_call_arguments(request_output, sequence.advance()))
    return text


def _legacy_details(output: TextGenerationOutput) -> dict[str, Any]:
    sequence, parameters = output.best_sequence, output.input.parameters
    if not parameters.get("details"):
        return {"finish_reason": "error"} if sequence.finish_reason == "error" else {}
    return {
        "finish_reason": sequence.finish_reason,
        "tokens": output.get_tokens_as_dict(output.best_sequence_index),
        "generated_tokens": len(sequence.tokens),
        "inputs": output.input.input_text,
        "parameters": parameters,
        "prompt_tokens": _prompt_token_count(output),
    }


# LMI's schema and TGI's schema.


def _json_output_formatter(output: TextGenerationOutput) -> str:
    """Return one document if the request has finished, or else an empty string."""
    sequence = output.best_sequence
    _read_all(sequence)
    if not output.finished:
        return ""
    if wait_till_generation_finished(output.input.parameters):
        return _in_tgi_array(output, _several_sequences(output))
    details = _details(output, with_tokens=True)
    if sequence.finish_reason == "error":
        error = _error_message(sequence)
        return _to_json({"generated_text": None, "error": error, "code": _ERROR_CODE, "details": details})
    document: dict[str, Any] = {"generated_text": get_generated_text(sequence, output)}
    if details:
        document["details"] = details
    return _in_tgi_array(output, document)


def _jsonlines_output_formatter(output: TextGenerationOutput) -> str:
    """Return the record of the next token, or an empty string. The last record contains the whole text."""
    sequence = output.best_sequence
    token, _, _, is_last = sequence.advance()
    if token is None:
        return ""
    record: dict[str, Any] = {"token": token.as_tgi_dict() if output.input.tgi_compat else token.as_dict()}
    if is_last:
        record["generated_text"] = get_generated_text(sequence, output)
        details = _details(output, with_tokens=False)
        if details:
            record["details"] = details
    return _to_json(record) + "\n"


def sse_response_formatter(output: TextGenerationOutput) -> str:
    """Return the record of the next token as a server-sent event."""
    return _as_event(_jsonlines_output_formatter(output))


_sse_output_formatter = sse_response_formatter


def _details(output: TextGenerationOutput, with_tokens: bool) -> dict[str, Any]:
    sequence, parameters = output.best_sequence, output.input.parameters
    if not parameters.get("details", output.input.tgi_compat):
        return {"finish_reason": "error"} if sequence.finish_reason == "error" else {}
    details: dict[str, Any] = {
        "finish_reason": sequence.finish_reason,
        "generated_tokens": len(sequence.tokens),
        "inputs": output.input.input_text,
    }
    if with_tokens:
        details["tokens"] = output.get_tokens_as_dict(output.best_sequence_index)
    return details | _prefill_and_top_tokens(output, output.best_sequence_index)


def _several_sequences(output: TextGenerationOutput) -> dict[str, Any]:
    details = {"inputs": output.input.input_text, **_sequence_details(output, output.best_sequence_index)}
    others = [
        _sequence_details(output, index) | {"generated_text": get_generated_text(output.sequences[index], output)}
        for index in output.other_sequences_indices
    ]
    if others:
        details["best_of_sequences"] = others
    return {"generated_text": get_generated_text(output.best_sequence, output), "details": details}


def _sequence_details(output: TextGenerationOutput, index: int) -> dict[str, Any]:
    sequence = output.sequences[index]
    return {
        "finish_reason": sequence.finish_reason,
        "generated_tokens": len(sequence.tokens),
        "tokens": output.get_tokens_as_dict(index),
    } | _prefill_and_top_tokens(output, index)


def _prefill_and_top_tokens(output: TextGenerationOutput, index: int) -> dict[str, Any]:
    parameters, shown = output.input.parameters, dict[str, Any]()
    if parameters.get("decoder_input_details"):
        shown["prefill"] = output.get_prompt_tokens_as_dict()
    if (parameters.get("top_n_tokens") or 0) > 0:
        shown["top_tokens"] = output.get_top_tokens_as_dict(index)
    return shown


def _in_tgi_array(output: TextGenerationOutput, document: dict[str, Any]) -> str:
    return _to_json([document] if output.input.tgi_compat else document)


# The chat schema, with LMI's deviations from OpenAI's schema.


def _json_chat_output_formatter(output: TextGenerationOutput) -> str:
    """Return a `chat.completion` if the request has finished, or else an empty string."""
    sequence = output.best_sequence
    _read_all(sequence)
    if not output.finished:
        return ""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": get_generated_text(sequence, output)},
        "logprobs": None,
        "finish_reason": sequence.finish_reason,
    }
    if _wants_logprobs(output):
        choice["logprobs"] = {"content": [_logprob(token, token.text) for token in sequence.tokens]}
    prompt_tokens, completion_tokens = _prompt_token_count(output), len(sequence.tokens)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return _to_json(_chat_head(output, "chat.completion") | {"choices": [choice], "usage": usage})


def _jsonlines_chat_output_formatter(output: TextGenerationOutput) -> str:
    """Return the `chat.completion.chunk` of the next token, or an empty string."""
    return _next_chat_chunk(output)[0]


def _sse_chat_output_formatter(output: TextGenerationOutput) -> str:
    """Return the next chunk as a server-sent event. After the last chunk, the event `[DONE]` follows."""
    chunk, is_last = _next_chat_chunk(output)
    return _as_event(chunk) + ("data: [DONE]\n\n" if is_last else "")


def _next_chat_chunk(output: TextGenerationOutput) -> tuple[str, bool]:
    token, _, is_first, is_last = output.best_sequence.advance()
    if token is None:
        return "", False
    delta = {"content": token.text} | ({"role": "assistant"} if is_first else {})
    choice = {
        "index": 0,
        "delta": delta,
        # As in LMI's tests and documentation, `logprobs` is an array, and the `token` in `top_logprobs` is a log
        # probability instead of a text.
        "logprobs": [{"content": [_logprob(token, token.log_prob)]}] if _wants_logprobs(output) else None,
        "finish_reason": output.best_sequence.finish_reason if is_last else None,
    }
    return _to_json(_chat_head(output, "chat.completion.chunk") | {"choices": [choice]}) + "\n", is_last


def _wants_logprobs(output: TextGenerationOutput) -> bool:
    parameters = output.input.parameters
    return bool(parameters.get("logprobs") or parameters.get("top_logprobs"))


def _chat_head(output: TextGenerationOutput, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id(output)}", "object": kind, "created": int(time.time())}


def _logprob(token: Token, top_token: Any) -> dict[str, Any]:
    code_points = [ord(character) for character in token.text] or None
    return {
        "token": token.text,
        "logprob": token.log_prob,
        "bytes": code_points,
        "top_logprobs": [{"token": top_token, "logprob": token.log_prob, "bytes": code_points}],
    }


# Bedrock's schema, which LMI calls `3p`.


def _json_3p_output_formatter(output: TextGenerationOutput) -> str:
    """Return one document if the request has finished, or else an empty string."""
    sequence = output.best_sequence
    _read_all(sequence)
    if not output.finished:
        return ""
    prompt_tokens, new_tokens = _prompt_token_count(output), len(sequence.tokens)
    failed = sequence.finish_reason == "error"
    document: dict[str, Any] = {
        "body": {
            "generation": None if failed else get_generated_text(sequence, output),
            "prompt_token_count": 0 if failed else prompt_tokens,
            "generation_token_count": 0 if failed else new_tokens,
            "stop_reason": sequence.finish_reason,
        },
        "metering": {"inputTokenCount": prompt_tokens, "outputTokenCount": new_tokens},
        "content_type": "application/json",
    }
    return _to_json(document | (_3p_error(sequence) if failed else {}))


def _jsonlines_3p_output_formatter(output: TextGenerationOutput) -> str:
    """Return the record of the next token, or an empty string. The first record contains the prompt's token count."""
    sequence = output.best_sequence
    token, index, is_first, is_last = sequence.advance()
    if token is None:
        return ""
    prompt_tokens = _prompt_token_count(output) if is_first else None
    metering = {"outputTokenCount": index + 1} | ({"inputTokenCount": prompt_tokens} if is_first else {})
    reason = sequence.finish_reason if is_last else None
    record: dict[str, Any] = {
        "body": {
            "generation": token.text,
            "prompt_token_count": prompt_tokens,
            "generation_token_count": index + 1,
            "stop_reason": reason,
        },
        "metering": metering,
        "content_type": "application/jsonlines",
    }
    return _to_json(record | (_3p_error(sequence) if reason == "error" else {})) + "\n"


def _3p_error(sequence: Sequence) -> dict[str, Any]:
    return {"error": {"error_code": _ERROR_CODE, "error_msg": _error_message(sequence)}}


# Functions for all schemas


def _to_json(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False)


def _as_event(record: str) -> str:
    return f"data: {record}\n" if record else ""


def _prefix(output: TextGenerationOutput) -> str:
    """Return the prompt if the request sets `return_full_text`, or else an empty string."""
    return str(output.input.input_text) if output.input.parameters.get("return_full_text") else ""


def _read_all(sequence: Sequence) -> None:
    while sequence.has_next_token():
        sequence.advance()


def _error_message(sequence: Sequence) -> str | None:
    """Return the error message of the last token."""
    last = sequence.get_last_token() or (sequence.tokens[-1] if sequence.tokens else None)
    return last.error_msg if last else None


def _prompt_token_count(output: TextGenerationOutput) -> int:
    return len(output.prompt_tokens_details) or len(getattr(output.input, "input_ids", ()))


_JSON, _JSON_LINES, _EVENTS = "application/json", "application/jsonlines", "text/event-stream"
_BUILT_IN: dict[str, tuple[Formatter, str]] = {
    "json": (_json_output_formatter, _JSON),
    "jsonlines": (_jsonlines_output_formatter, _JSON_LINES),
    "sse": (sse_response_formatter, _EVENTS),
    "json_chat": (_json_chat_output_formatter, _JSON),
    "jsonlines_chat": (_jsonlines_chat_output_formatter, _JSON_LINES),
    "sse_chat": (_sse_chat_output_formatter, _EVENTS),
    "3p": (_json_3p_output_formatter, _JSON),
    "3p_stream": (_jsonlines_3p_output_formatter, _JSON_LINES),
}
