"""What the answers of completions and chats share: their options, usage, log probabilities and errors.

The bytes are vLLM's. It writes a whole answer with Python's `json` and the records of a stream with pydantic; numbers
are spelled differently (0.00002 in a stream is 2e-05 in a whole answer).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from json.encoder import encode_basestring as quote
from typing import ClassVar

import msgspec

from handlers.contracts.openai.family import refuse
from handlers.contracts.protocol import Answer, Reply
from handlers.errors import EngineFault, GenerationFailed, RequestError
from handlers.request import FinishReason, GeneratedSequence, Token, TokenDelta

EVENTS = "text/event-stream; charset=utf-8"
_DONE = "data: [DONE]\n\n"
_LEAST = -9999.0  # In the place of minus infinity.
_FAULT = "Internal server error"  # vLLM's message when its engine has failed at a request.

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
    role: str = ""  # Of the message in a chat's answer.
    sequences: int = 1  # For each prompt.
    logprobs: bool = False
    top: int = 0  # Alternatives for each token of a chat.
    usage: bool = False  # A stream ends with a record of the usage.
    running_usage: bool = False  # Each of its records has the usage so far.


class StreamAnswer(Answer):
    """A record for each step of a sequence. The sequences of all prompts are numbered through."""

    content_type = EVENTS
    kind: ClassVar[str]  # `object` of a record.

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._head = f'data: {{{_head(options, self.kind)},"choices":['
        self._plain = not (options.logprobs or options.running_usage)
        """A record that does not end a sequence has nothing but text."""
        self._tokens = 0  # Of the sequences that have ended.

    def fail(self, error: RequestError) -> Reply:
        return Reply(200, EVENTS, self.fail_midway(error))

    def fail_midway(self, error: RequestError) -> bytes:
        return f"data: {json.dumps(json.loads(_failure(error).body))}\n\n{_DONE}".encode()

    def _end(self, prompt_tokens: int) -> str:
        if not self._options.usage:
            return _DONE
        fingerprint = self._options.fingerprint
        end = f',"system_fingerprint":{quote(fingerprint)}' if fingerprint is not None else ""
        return f'{self._head}],"usage":{usage_of(prompt_tokens, self._tokens)}}}{end}}}\n\n{_DONE}'


class DocumentAnswer(Answer):
    """One JSON document when everything has finished."""

    content_type = "application/json"
    kind: ClassVar[str]  # `object` of the document.
    further: ClassVar[str]  # Members after the usage.

    def __init__(self, options: AnswerOptions, prompts: int = 1) -> None:
        self._options = options
        self._sequences = [GeneratedSequence() for _ in range(prompts * options.sequences)]
        self._stops = ["null"] * len(self._sequences)
        self._open = prompts

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        index = prompt * self._options.sequences + delta.sequence
        self._sequences[index].add(delta)
        if delta.finish_reason is not None:
            self._stops[index] = stop_reason(delta)
        self._open -= delta.last
        return b"" if self._open else self._document().encode()

    def fail(self, error: RequestError) -> Reply:
        return _failure(error)

    @abstractmethod
    def _choice(self, index: int) -> str: ...

    def _document(self) -> str:
        options, sequences = self._options, self._sequences
        prompt_tokens = sum([sequence.prompt_token_count for sequence in sequences[:: options.sequences]])
        usage = usage_of(prompt_tokens, sum([sequence.count for sequence in sequences]))
        choices = ",".join([self._choice(index) for index in range(len(sequences))])
        fingerprint = "null" if options.fingerprint is None else quote(options.fingerprint)
        return (
            f'{{{_head(options, self.kind)},"choices":[{choices}],"service_tier":null,'
            f'"system_fingerprint":{fingerprint},"usage":{usage},'
            f'"prompt_tokens_details":null,"completion_tokens_details":null}},{self.further}}}'
        )


def _head(options: AnswerOptions, kind: str) -> str:
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


def _failure(error: RequestError) -> Reply:
    """The reply of a call that failed before its answer began, in the words of the other way."""
    return refuse(GenerationFailed(_FAULT) if isinstance(error, EngineFault) else error)
