"""Triton's generate responses: one object, or one event for each response.

Source: Triton 2.68, "Generate Extension", "generate vs. generate_stream" and "Generate Response JSON Object". The bytes
are Triton's: keys in alphabetical order, no white space, and non-ASCII characters unescaped. A tensor of one element is
a bare value, and any other tensor is a flat array.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring as quote
from math import isfinite
from typing import Any

from engines.errors import RequestError
from engines.request import GeneratedSequence, Token, TokenDelta
from handlers.contract import JSON, Answer, Reply
from handlers.parsing.vllm_parameters import FINISH_REASONS
from handlers.triton.errors import VERSION, SeveralResponses, error_object, message_of, refusal
from handlers.triton.request import TritonRequest

EVENTS = "text/event-stream; charset=utf-8"

_FINISH_REASONS = {None: "None"} | FINISH_REASONS  # The names that Triton's vLLM backend uses.
_FLOAT32 = struct.Struct("f")


class _Answer(Answer):
    def __init__(self, model: str, request: TritonRequest) -> None:
        self._request = request
        # For each sequence: the text and the tokens of this response.
        self._pieces = [GeneratedSequence() for _ in range(request.vllm.request.sequences)]
        self._counts_before = [0] * len(self._pieces)
        self._lead = request.prompt if request.repeat_prompt else ""
        self._members = {"id": quote(request.id)} if request.id else {}
        self._members |= {"model_name": quote(model), "model_version": f'"{VERSION}"'}
        self._names = sorted((*self._members, *request.outputs, "text_output"))

    def fail(self, error: RequestError) -> Reply:
        """Return the error as a JSON document. A stream also gets a document, because nothing has been sent yet."""
        return refusal(error)

    def _response(self, prompt_token_count: int) -> str:
        members = [
            f'"{name}":{self._members.get(name) or self._output(name, prompt_token_count)}' for name in self._names
        ]
        return f"{{{','.join(members)}}}"

    def _output(self, name: str, prompt_token_count: int) -> str:
        pieces = self._pieces
        match name:
            case "text_output":
                shows_text = self._request.vllm.detokenize
                return _tensor(quote(self._lead + "".join(piece.text if shows_text else ())) for piece in pieces)
            case "finish_reason":
                return _tensor(quote(_FINISH_REASONS[piece.finish_reason]) for piece in pieces)
            case "logprobs":
                return _tensor(quote(self._logprobs(piece)) for piece in pieces)
            case "num_input_tokens":
                return str(prompt_token_count)
            case "num_output_tokens":
                before = self._counts_before
                return _tensor(str(piece.count - seen) for piece, seen in zip(pieces, before, strict=True))
            case "output_log_probs":
                return _tensor(_rectangle(pieces))
            case _:  # `cumulative_logprob`, and TensorRT-LLM's `cum_log_probs`
                return _tensor(_float32(piece.logprob) for piece in pieces)

    def _logprobs(self, piece: GeneratedSequence) -> str:
        """Return the log probabilities as JSON text, or "null". As in Triton's backend, Python's `json` writes them."""
        return json.dumps([_candidates(token) for token in piece.tokens]) if self._request.shows_logprobs else "null"


class CollectedAnswer(_Answer):
    """One response: an object, or the only event of a stream.

    If the request sets `stream`, each step of the engine is a response. A second response is then an error.
    """

    def __init__(self, model: str, request: TritonRequest, *, events: bool) -> None:
        super().__init__(model, request)
        self.content_type = EVENTS if events else JSON
        self._events, self._steps = events, request.stream
        self._fed = False

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return the response at the last delta, and empty bytes at earlier deltas.

        Raises:
            SeveralResponses: The request sets `stream`, and this is the second step.
        """
        if self._steps and self._fed:
            raise SeveralResponses
        self._fed = True
        if delta.sequence < len(self._pieces):  # A beam search may return more sequences than the request asks for.
            self._pieces[delta.sequence].add(delta)
        if not delta.last:
            return b""
        document = self._response(delta.prompt_token_count)
        return (f"data: {document}\n\n" if self._events else document).encode()


class EventAnswer(_Answer):
    """An event for each step of the engine. No event marks the end."""

    content_type = EVENTS

    def __init__(self, model: str, request: TritonRequest) -> None:
        super().__init__(model, request)
        head = "".join(f'"{name}":{value},' for name, value in self._members.items())
        shows_text_alone = not request.outputs and request.vllm.request.sequences == 1 and request.vllm.detokenize
        # The beginning of each event, up to its text. None if more members follow the text.
        self._plain = f'data: {{{head}"text_output":' if shows_text_alone else None

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return the event of this delta. Hot path: this runs for each token of each stream."""
        if self._plain is not None:
            return f"{self._plain}{quote(delta.text)}}}\n\n".encode()
        for place, piece in enumerate(self._pieces):
            piece.text, piece.tokens, self._counts_before[place] = [], [], piece.count
        self._pieces[delta.sequence].add(delta)
        return f"data: {self._response(delta.prompt_token_count)}\n\n".encode()

    def fail_midway(self, error: RequestError) -> bytes:
        return f"data: {error_object(message_of(error))}\n\n".encode("utf-8", "replace")


def _tensor(elements: Iterable[str]) -> str:
    """Return a single element as a bare value, and any other number of elements as an array."""
    listed = list(elements)
    return listed[0] if len(listed) == 1 else f"[{','.join(listed)}]"


def _float32(value: float | None) -> str:
    """Return a float as Triton prints it: the nearest 32-bit value, with the digits of a double."""
    if value is None:
        return "0.0"
    return repr(_FLOAT32.unpack(_FLOAT32.pack(value))[0]) if isfinite(value) else "null"


def _rectangle(pieces: Sequence[GeneratedSequence]) -> Iterable[str]:
    """Yield the log probabilities of the tokens, one row for each sequence. Short rows are filled up with 0."""
    longest = max(len(piece.tokens) for piece in pieces)
    for piece in pieces:
        yield from (_float32(token.logprob) for token in piece.tokens)
        yield from ["0.0"] * (longest - len(piece.tokens))


def _candidates(token: Token) -> dict[int, dict[str, Any]]:
    """Return the chosen token, followed by the other most probable tokens."""
    found = {token.id: _candidate(token, token.rank)}
    for place, other in enumerate(token.top, start=1):
        found.setdefault(other.id, _candidate(other, place if other.rank is None else other.rank))
    return found


def _candidate(token: Token, rank: int | None) -> dict[str, Any]:
    logprob = token.logprob if token.logprob is not None and isfinite(token.logprob) else None
    return {"logprob": logprob, "rank": rank, "decoded_token": token.text}
