"""What the answers of completions and chats share: their options, usage, log probabilities and errors.

The bytes are vLLM's. It writes a whole answer with Python's `json` and the records of a stream with pydantic; numbers
are spelled differently (0.00002 in a stream is 2e-05 in a whole answer).
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring as quote

import msgspec

from handlers.contracts.openai.family import refuse
from handlers.contracts.protocol import Reply
from handlers.errors import EngineFault, GenerationFailed, RequestError
from handlers.request import FinishReason, Token, TokenDelta

EVENTS = "text/event-stream; charset=utf-8"
DONE = "data: [DONE]\n\n"
_LEAST = -9999.0
"""In the place of minus infinity."""
_FAULT = "Internal server error"
"""vLLM's message when its engine has failed at a request."""

FINISH_REASONS = {
    None: "null",
    FinishReason.LENGTH: '"length"',
    FinishReason.EOS: '"stop"',
    FinishReason.STOP: '"stop"',
    FinishReason.ABORT: '"abort"',
    FinishReason.ERROR: '"error"',
}


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer shows."""

    id: str
    created: int
    model: str
    fingerprint: str | None
    role: str = ""
    """Of the message in a chat's answer."""
    sequences: int = 1
    """For each prompt."""
    logprobs: bool = False
    top: int = 0
    """Alternatives for each token of a chat."""
    usage: bool = False
    """A stream ends with a record of the usage."""
    running_usage: bool = False
    """Each of its records has the usage so far."""


def head(options: AnswerOptions, kind: str) -> str:
    """The fields with which every document and record of an answer begins."""
    return f'"id":{quote(options.id)},"object":"{kind}","created":{options.created},"model":{quote(options.model)}'


def usage_of(prompt_tokens: int, new_tokens: int) -> str:
    """Counts of tokens, without a closing brace."""
    total = prompt_tokens + new_tokens
    return f'{{"prompt_tokens":{prompt_tokens},"total_tokens":{total},"completion_tokens":{new_tokens}'


def stop_reason(delta: TokenDelta) -> str:
    """The stop string or the stop token that ended a sequence."""
    reason = delta.stop_reason
    return "null" if reason is None else quote(reason) if isinstance(reason, str) else str(reason)


def nullable(text: str | None) -> str:
    """A string or null."""
    return "null" if text is None else quote(text)


def in_stream(token: Token) -> str:
    """A token's log probability, as pydantic writes it."""
    return msgspec.json.encode(_logprob(token)).decode()


def in_document(token: Token) -> str:
    """A token's log probability, as Python's `json` writes it."""
    return repr(_logprob(token))


def _logprob(token: Token) -> float:
    assert token.logprob is not None, "the engine gave no log probabilities"
    return max(token.logprob, _LEAST)


def alternatives(token: Token) -> list[Token]:
    """A token and the most probable ones at its place, each once."""
    return [token, *(other for other in token.top if other.id != token.id)]


def failure(error: RequestError) -> Reply:
    """The reply of a call that failed before its answer began, in the words of the other way."""
    return refuse(GenerationFailed(_FAULT) if isinstance(error, EngineFault) else error)


def failure_in_stream(error: RequestError) -> bytes:
    """The last events of a stream that failed."""
    return f"data: {json.dumps(json.loads(failure(error).body))}\n\n{DONE}".encode()
