"""The decorator for custom output formatters, and the choice of a formatter (contracts/lmi.md sections 4.3 and 8)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from djl_python.chat_formatters import format_chat_json as _json_chat_output_formatter
from djl_python.chat_formatters import format_chat_json_lines as _jsonlines_chat_output_formatter
from djl_python.chat_formatters import format_chat_sse as _sse_chat_output_formatter
from djl_python.chat_formatters import prompt_token_count
from djl_python.request_io import NextToken, RequestOutput, Sequence, TextGenerationOutput, Token
from djl_python.text_formatters import format_json as _json_output_formatter
from djl_python.text_formatters import format_json_lines as _jsonlines_output_formatter
from djl_python.text_formatters import format_sse as sse_response_formatter
from djl_python.text_formatters import generated_text as _generated_text
from djl_python.three_p_formatters import format_3p as _json_3p_output_formatter
from djl_python.three_p_formatters import format_3p_stream as _jsonlines_3p_output_formatter

Formatter = Callable[..., str]
LegacyArguments = tuple[Token | None, bool, bool, dict[str, Any], str, Any]
"""`(token, first_token, last_token, details, generated_text, request_id)`"""
_Function = TypeVar("_Function", bound=Callable[..., Any])

# LMI's own tests and some customers' code import these names.
_sse_output_formatter = sse_response_formatter

_OUTPUT_TYPES = {"RequestOutput", "TextGenerationOutput"}
_JSON = "application/json"
_JSON_LINES = "application/jsonlines"
_EVENTS = "text/event-stream"
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
WHOLE_DOCUMENT = frozenset({_json_output_formatter, _json_chat_output_formatter, _json_3p_output_formatter})
"""Formatters that say everything in one call; the other built-in ones make one record in each."""


def output_formatter(function: _Function) -> _Function:
    """Marks a function of `model.py` as the output formatter."""
    function.is_output_formatter = True  # type: ignore[attr-defined]
    return function


def get_generated_text(sequence: Sequence, request_output: TextGenerationOutput) -> str:
    """A sequence's text, behind the prompt if the request wants the full text."""
    return _generated_text(request_output, sequence)


def get_output_formatter(
    output_formatter: Formatter | str | None, stream: bool, tgi_compat: bool
) -> tuple[Formatter, str | None]:
    """The formatter and its content type, which a custom formatter does not have.

    An unknown name is logged, and the default taken: JSON, or when streaming JSON lines, or events for TGI clients.
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


def takes_request_output(function: Callable[..., Any]) -> bool:
    """Whether an output formatter is called with the output; one of the legacy kind is called with single tokens.

    Section 8.2: by the annotation of its first parameter, which may be text. A function of one parameter cannot be of
    the legacy kind.

    Raises:
        ValueError, TypeError: the callable has no signature.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < 2:
        return True
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        return annotation.strip("'\"").rpartition(".")[2] in _OUTPUT_TYPES
    return isinstance(annotation, type) and issubclass(annotation, RequestOutput)


def legacy_call_arguments(request_output: TextGenerationOutput, next_token: NextToken) -> LegacyArguments:
    """What a formatter of the legacy kind is called with for a token that `Sequence.advance` has returned.

    Section 8.2: the details are filled if the request asks for them, or has failed. The text is that of all tokens at
    the last one; before, it is empty, or the prompt if the request wants the full text.
    """
    token, _, is_first, is_last = next_token
    sequence = request_output.best_sequence
    text = _generated_text(request_output, sequence) if is_last else _prefix(request_output)
    return token, is_first, is_last, _legacy_details(request_output), text, request_output.request_id


def adapt_legacy_output_formatter(request_output: TextGenerationOutput) -> str:
    """Calls a formatter of the legacy kind, with a token and what belongs to it, for each unread token."""
    request, sequence, text = request_output.input, request_output.best_sequence, ""
    while sequence.has_next_token():
        text += request.output_formatter(*legacy_call_arguments(request_output, sequence.advance()))
    return text


def _prefix(output: TextGenerationOutput) -> str:
    return str(output.input.input_text) if output.input.parameters.get("return_full_text") else ""


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
        "prompt_tokens": prompt_token_count(output),
    }


__all__ = [
    "WHOLE_DOCUMENT",
    "_json_3p_output_formatter",
    "_json_chat_output_formatter",
    "_json_output_formatter",
    "_jsonlines_3p_output_formatter",
    "_jsonlines_chat_output_formatter",
    "_jsonlines_output_formatter",
    "_sse_chat_output_formatter",
    "_sse_output_formatter",
    "adapt_legacy_output_formatter",
    "get_generated_text",
    "get_output_formatter",
    "legacy_call_arguments",
    "output_formatter",
    "sse_response_formatter",
    "takes_request_output",
]
