"""The decorator for custom output formatters, and the choice of a formatter (contracts/lmi.md sections 4.3 and 8)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from djl_python.chat_formatters import format_chat_json as _json_chat_output_formatter
from djl_python.chat_formatters import format_chat_json_lines as _jsonlines_chat_output_formatter
from djl_python.chat_formatters import format_chat_sse as _sse_chat_output_formatter
from djl_python.chat_formatters import prompt_token_count
from djl_python.request_io import Sequence, TextGenerationOutput
from djl_python.text_formatters import format_json as _json_output_formatter
from djl_python.text_formatters import format_json_lines as _jsonlines_output_formatter
from djl_python.text_formatters import format_sse as sse_response_formatter
from djl_python.text_formatters import generated_text as _generated_text
from djl_python.three_p_formatters import format_3p as _json_3p_output_formatter
from djl_python.three_p_formatters import format_3p_stream as _jsonlines_3p_output_formatter

Formatter = Callable[..., str]
_Function = TypeVar("_Function", bound=Callable[..., Any])

# LMI's own tests and some customers' code import these names.
_sse_output_formatter = sse_response_formatter

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


def adapt_legacy_output_formatter(request_output: TextGenerationOutput) -> str:
    """Calls a formatter of the legacy kind, with a token and what belongs to it, for each unread token."""
    request, sequence, text = request_output.input, request_output.best_sequence, ""
    while sequence.has_next_token():
        details = _legacy_details(request_output)
        token, _, is_first, is_last = sequence.advance()
        whole = _generated_text(request_output, sequence) if is_last else _prefix(request_output)
        text += request.output_formatter(token, is_first, is_last, details, whole, request_output.request_id)
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
    "output_formatter",
    "sse_response_formatter",
]
