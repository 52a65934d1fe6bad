"""Rolling-batch answers as text: one JSON document, JSON lines, server-sent events.

Source: contracts/lmi.md sections 4.3 to 4.6.
"""

from __future__ import annotations

import json
from typing import Any

from djl_python.request_io import Sequence, TextGenerationOutput
from djl_python.utils import wait_till_generation_finished

ERROR_CODE = 400


def to_json(document: Any) -> str:
    """JSON with blanks after separators and non-ASCII characters as they are."""
    return json.dumps(document, ensure_ascii=False)


def generated_text(output: TextGenerationOutput, sequence: Sequence) -> str:
    """A sequence's text, behind the prompt if the request wants the full text."""
    prompt = output.input.input_text if output.input.parameters.get("return_full_text") else ""
    return str(prompt) + "".join(token.text for token in sequence.tokens)


def error_message(sequence: Sequence) -> str | None:
    """What the token that stands for a failure says."""
    last = sequence.get_last_token() or (sequence.tokens[-1] if sequence.tokens else None)
    return last.error_msg if last else None


def read_all(sequence: Sequence) -> None:
    """Marks all tokens as read: the document is made of the sequence itself."""
    while sequence.has_next_token():
        sequence.advance()


def format_json(output: TextGenerationOutput) -> str:
    """One document when the request has finished, else nothing."""
    sequence = output.best_sequence
    read_all(sequence)
    if not output.finished:
        return ""
    if wait_till_generation_finished(output.input.parameters):
        return _in_tgi_array(output, _several_sequences(output))
    details = _details(output, with_tokens=True)
    if sequence.finish_reason == "error":
        return to_json(
            {"generated_text": None, "error": error_message(sequence), "code": ERROR_CODE, "details": details}
        )
    document: dict[str, Any] = {"generated_text": generated_text(output, sequence)}
    if details:
        document["details"] = details
    return _in_tgi_array(output, document)


def format_json_lines(output: TextGenerationOutput) -> str:
    """The record of the next token; the last one carries the whole text. Nothing if there is no token."""
    sequence = output.best_sequence
    token, _, _, is_last = sequence.advance()
    if token is None:
        return ""
    record: dict[str, Any] = {"token": token.as_tgi_dict() if output.input.tgi_compat else token.as_dict()}
    if is_last:
        record["generated_text"] = generated_text(output, sequence)
        details = _details(output, with_tokens=False)
        if details:
            record["details"] = details
    return to_json(record) + "\n"


def format_sse(output: TextGenerationOutput) -> str:
    """The record of the next token as a server-sent event."""
    return as_event(format_json_lines(output))


def as_event(record: str) -> str:
    """A line as a server-sent event; nothing stays nothing."""
    return f"data: {record}\n" if record else ""


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
        _sequence_details(output, index) | {"generated_text": generated_text(output, output.sequences[index])}
        for index in output.other_sequences_indices
    ]
    if others:
        details["best_of_sequences"] = others
    return {"generated_text": generated_text(output, output.best_sequence), "details": details}


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
    return to_json([document] if output.input.tgi_compat else document)
