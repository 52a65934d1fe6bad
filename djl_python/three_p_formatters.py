"""Bedrock-compatible rolling-batch answers, called `3p` (contracts/lmi.md section 4.9)."""

from __future__ import annotations

from typing import Any

from djl_python.chat_formatters import prompt_token_count
from djl_python.request_io import Sequence, TextGenerationOutput
from djl_python.text_formatters import ERROR_CODE, error_message, generated_text, read_all, to_json


def format_3p(output: TextGenerationOutput) -> str:
    """One document when the request has finished, else nothing."""
    sequence = output.best_sequence
    read_all(sequence)
    if not output.finished:
        return ""
    prompt_tokens, new_tokens = prompt_token_count(output), len(sequence.tokens)
    failed = sequence.finish_reason == "error"
    document: dict[str, Any] = {
        "body": {
            "generation": None if failed else generated_text(output, sequence),
            "prompt_token_count": 0 if failed else prompt_tokens,
            "generation_token_count": 0 if failed else new_tokens,
            "stop_reason": sequence.finish_reason,
        },
        "metering": {"inputTokenCount": prompt_tokens, "outputTokenCount": new_tokens},
        "content_type": "application/json",
    }
    return to_json(document | (_error(sequence) if failed else {}))


def format_3p_stream(output: TextGenerationOutput) -> str:
    """The record of the next token; the prompt is counted on the first. Nothing if there is no token."""
    sequence = output.best_sequence
    token, index, is_first, is_last = sequence.advance()
    if token is None:
        return ""
    prompt_tokens = prompt_token_count(output) if is_first else None
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
    return to_json(record | (_error(sequence) if reason == "error" else {})) + "\n"


def _error(sequence: Sequence) -> dict[str, Any]:
    return {"error": {"error_code": ERROR_CODE, "error_msg": error_message(sequence)}}
