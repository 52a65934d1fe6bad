"""Rolling-batch chat answers, with the oddities that LMI's clients know (contracts/lmi.md section 6.1)."""

from __future__ import annotations

import time
from typing import Any

from djl_python.request_io import TextGenerationOutput, Token
from djl_python.text_formatters import as_event, generated_text, read_all, to_json

DONE = "data: [DONE]\n\n"


def format_chat_json(output: TextGenerationOutput) -> str:
    """One `chat.completion` when the request has finished, else nothing."""
    sequence = output.best_sequence
    read_all(sequence)
    if not output.finished:
        return ""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": generated_text(output, sequence)},
        "logprobs": None,
        "finish_reason": sequence.finish_reason,
    }
    if _wants_logprobs(output):
        choice["logprobs"] = {"content": [_logprob(token, token.text) for token in sequence.tokens]}
    prompt_tokens, completion_tokens = prompt_token_count(output), len(sequence.tokens)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return to_json(_head(output, "chat.completion") | {"choices": [choice], "usage": usage})


def format_chat_json_lines(output: TextGenerationOutput) -> str:
    """The `chat.completion.chunk` of the next token. Nothing if there is no token."""
    return _next_chunk(output)[0]


def format_chat_sse(output: TextGenerationOutput) -> str:
    """The next chunk as a server-sent event, and `[DONE]` behind the last one."""
    chunk, is_last = _next_chunk(output)
    return as_event(chunk) + (DONE if is_last else "")


def prompt_token_count(output: TextGenerationOutput) -> int:
    """The length of the prompt, as far as it is known."""
    return len(output.prompt_tokens_details) or len(getattr(output.input, "input_ids", ()))


def _next_chunk(output: TextGenerationOutput) -> tuple[str, bool]:
    token, _, is_first, is_last = output.best_sequence.advance()
    if token is None:
        return "", False
    delta = {"content": token.text} | ({"role": "assistant"} if is_first else {})
    choice = {
        "index": 0,
        "delta": delta,
        # An array here, and the number for the alternative's text: LMI's tests and documentation have it so.
        "logprobs": [{"content": [_logprob(token, token.log_prob)]}] if _wants_logprobs(output) else None,
        "finish_reason": output.best_sequence.finish_reason if is_last else None,
    }
    return to_json(_head(output, "chat.completion.chunk") | {"choices": [choice]}) + "\n", is_last


def _wants_logprobs(output: TextGenerationOutput) -> bool:
    parameters = output.input.parameters
    return bool(parameters.get("logprobs") or parameters.get("top_logprobs"))


def _head(output: TextGenerationOutput, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id(output)}", "object": kind, "created": int(time.time())}


def _logprob(token: Token, top_token: Any) -> dict[str, Any]:
    code_points = [ord(character) for character in token.text] or None
    return {
        "token": token.text,
        "logprob": token.log_prob,
        "bytes": code_points,
        "top_logprobs": [{"token": top_token, "logprob": token.log_prob, "bytes": code_points}],
    }
