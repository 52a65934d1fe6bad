"""Triton's generate responses: one object, or an event for each.

Source: Triton 2.68, "Generate Extension", "generate vs. generate_stream" and "Generate Response JSON Object". The bytes
are Triton's: keys in alphabetical order, no white space, non-ASCII characters as they are, a tensor of one element as a
bare value and any other as a flat array.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from math import isfinite
from typing import Any

from handlers.contracts.protocol import Reply
from handlers.contracts.triton.errors import JSON, VERSION, SeveralResponses, error_object, message_of, refusal
from handlers.contracts.triton.request import Outputs
from handlers.errors import RequestError
from handlers.request import FinishReason, Token, TokenDelta

EVENTS = "text/event-stream; charset=utf-8"

_FINISH_REASONS = {
    None: "None",
    FinishReason.LENGTH: "length",
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
"""vLLM's names, as its backend writes them."""
_FLOAT32 = struct.Struct("f")
_PLAIN = Outputs()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The form of the responses to one request."""

    model: str
    id: str = ""
    """Empty: the request has none, and so have the responses."""
    sequences: int = 1
    outputs: Outputs = _PLAIN
    logprobs: bool = False
    """The request has `logprobs`; without them the output of that name is "null"."""
    lead: str = ""
    """What each text begins with; the prompt, or nothing."""
    text: bool = True
    """False: `detokenize` is off, and there is no text."""


class _Piece:
    """One sequence's part of one response."""

    __slots__ = ("cumulative", "finish_reason", "new_tokens", "seen", "text", "tokens")

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self.cumulative: float | None = None
        self.new_tokens = self.seen = 0

    def add(self, delta: TokenDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason
        self.new_tokens += delta.token_count - self.seen
        self.seen = delta.token_count
        if delta.cumulative_logprob is not None:
            self.cumulative = delta.cumulative_logprob

    def begin(self) -> None:
        """Begin the next response, in which nothing is new yet."""
        self.text, self.tokens, self.new_tokens = "", [], 0


class _Objects:
    """Writes the response objects of one answer, from prefixes made once."""

    __slots__ = ("_head", "_id", "_model", "_options")

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._id = f'"id":{quote(options.id)},' if options.id else ""
        self._model = f'"model_name":{quote(options.model)},"model_version":"{VERSION}",'
        self._head = "{" + self._id + self._model + '"text_output":'

    @property
    def plain(self) -> str | None:
        """What comes before the text, if only a brace comes after it; None if there is more."""
        options = self._options
        return self._head if options.outputs == _PLAIN and options.sequences == 1 and options.text else None

    def write(self, pieces: Sequence[_Piece], prompt_token_count: int) -> str:
        """One response."""
        options, outputs = self._options, self._options.outputs
        parts = ["{"]
        if outputs.cum_log_probs:
            parts.append(f'"cum_log_probs":{_tensor(_float32(piece.cumulative) for piece in pieces)},')
        if outputs.cumulative_logprob:
            parts.append(f'"cumulative_logprob":{_tensor(_float32(piece.cumulative) for piece in pieces)},')
        if outputs.finish_reason:
            parts.append(f'"finish_reason":{_tensor(quote(_FINISH_REASONS[piece.finish_reason]) for piece in pieces)},')
        parts.append(self._id)
        if outputs.logprobs:
            parts.append(f'"logprobs":{_tensor(quote(self._logprobs(piece)) for piece in pieces)},')
        parts.append(self._model)
        if outputs.num_input_tokens:
            parts.append(f'"num_input_tokens":{prompt_token_count},')
        if outputs.num_output_tokens:
            parts.append(f'"num_output_tokens":{_tensor(str(piece.new_tokens) for piece in pieces)},')
        if outputs.cum_log_probs:
            parts.append(f'"output_log_probs":{_tensor(_rectangle(pieces))},')
        texts = (quote(options.lead + piece.text if options.text else options.lead) for piece in pieces)
        parts.append(f'"text_output":{_tensor(texts)}}}')
        return "".join(parts)

    def _logprobs(self, piece: _Piece) -> str:
        """JSON in a string, as Python's own writer makes it, which the backend uses."""
        return json.dumps([_candidates(token) for token in piece.tokens]) if self._options.logprobs else "null"


class CollectedAnswer:
    """The one response to a request without `stream`: an object, or the only event of a stream.

    `steps`: the engine is asked for every step, each of which is a response; more than one is an error.
    """

    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, options: AnswerOptions, *, events: bool, steps: bool = False) -> None:
        self.content_type = EVENTS if events else JSON
        self._objects = _Objects(options)
        self._pieces = [_Piece() for _ in range(options.sequences)]
        self._events, self._steps = events, steps
        self._fed = False

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """The response, with the last delta.

        Raises:
            SeveralResponses: this is a second step, and there is room for one.
        """
        if self._steps and self._fed:
            raise SeveralResponses
        self._fed = True
        if delta.sequence < len(self._pieces):  # a beam search may give more than are shown
            self._pieces[delta.sequence].add(delta)
        if not delta.last:
            return b""
        document = self._objects.write(self._pieces, delta.prompt_token_count)
        return (f"data: {document}\n\n" if self._events else document).encode()

    def fail(self, error: RequestError) -> Reply:
        return refusal(error)

    def fail_midway(self, error: RequestError) -> bytes:
        return b""  # the body is sent whole


class EventAnswer:
    """An event for each step of the engine; nothing marks the last one."""

    content_type = EVENTS
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, options: AnswerOptions) -> None:
        self._objects = _Objects(options)
        plain = self._objects.plain
        self._plain = None if plain is None else f"data: {plain}"
        self._pieces = [_Piece() for _ in range(options.sequences)]

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """The event of this delta. The hot path: called for each token of each stream."""
        if self._plain is not None:
            return f"{self._plain}{quote(delta.text)}}}\n\n".encode()
        for piece in self._pieces:
            piece.begin()
        self._pieces[delta.sequence].add(delta)
        return f"data: {self._objects.write(self._pieces, delta.prompt_token_count)}\n\n".encode()

    def fail(self, error: RequestError) -> Reply:
        """The error as a JSON document, since nothing has been streamed."""
        return refusal(error)

    def fail_midway(self, error: RequestError) -> bytes:
        return f"data: {error_object(message_of(error))}\n\n".encode("utf-8", "replace")


def _tensor(elements: Iterable[str]) -> str:
    """One element as a bare value, any other number of them as an array."""
    listed = list(elements)
    return listed[0] if len(listed) == 1 else f"[{','.join(listed)}]"


def _float32(value: float | None) -> str:
    """A float as Triton prints it: the nearest 32-bit value, in the digits of a double."""
    if value is None:
        return "0.0"
    return repr(_FLOAT32.unpack(_FLOAT32.pack(value))[0]) if isfinite(value) else "null"


def _rectangle(pieces: Sequence[_Piece]) -> Iterable[str]:
    """Log probabilities of all sequences' tokens, row by row; short rows are filled up with 0."""
    longest = max(len(piece.tokens) for piece in pieces)
    for piece in pieces:
        yield from (_float32(token.logprob) for token in piece.tokens)
        yield from ["0.0"] * (longest - len(piece.tokens))


def _candidates(token: Token) -> dict[int, dict[str, Any]]:
    """The chosen token, then the other most probable ones."""
    found = {token.id: _candidate(token, token.rank)}
    for place, other in enumerate(token.top, start=1):
        found.setdefault(other.id, _candidate(other, place if other.rank is None else other.rank))
    return found


def _candidate(token: Token, rank: int | None) -> dict[str, Any]:
    logprob = token.logprob if token.logprob is not None and isfinite(token.logprob) else None
    return {"logprob": logprob, "rank": rank, "decoded_token": token.text}
