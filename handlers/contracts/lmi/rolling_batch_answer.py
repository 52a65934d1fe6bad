"""LMI's rolling-batch answers: JSON, jsonlines, SSE, and their TGI-compatible variants.

Source: LMI schema v0.31, Response Schema and API Object Schemas; contracts/lmi.md section 4. The bytes are those that
LMI writes: `", "` and `": "` between items, non-ASCII characters as they are, keys in the order of section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring as quote
from math import isfinite

from handlers.contracts.lmi.errors import (
    JSON,
    overloaded,
    request_error,
    status_of,
    stream_error,
    tgi_error_type,
    unknown_adapter,
)
from handlers.contracts.protocol import Reply
from handlers.errors import Overloaded, RequestError, UnknownAdapter
from handlers.request import FinishReason, Token, TokenDelta

FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
_NO_TOKEN = Token(-1, "")


class Show:
    """What one answer shows, from the request's parameters and the model's settings."""

    __slots__ = ("details", "full_text", "overload_status", "prefill", "several", "tgi", "top_tokens")

    def __init__(
        self,
        *,
        details: bool = False,
        full_text: bool = False,
        prefill: bool = False,
        top_tokens: bool = False,
        several: bool = False,
        tgi: bool = False,
        overload_status: int = 503,
    ) -> None:
        self.details = details or several
        self.full_text = full_text
        self.prefill = prefill
        self.top_tokens = top_tokens
        self.several = several
        self.tgi = tgi
        self.overload_status = overload_status


class _Sequence:
    """One generated sequence, as far as it has come."""

    __slots__ = ("count", "finish_reason", "prompt_tokens", "text", "tokens")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[Token] = []
        self.prompt_tokens: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self.count = 0

    def add(self, delta: TokenDelta) -> None:
        self.text.append(delta.text)
        self.tokens.extend(delta.tokens)
        if delta.prompt_tokens is not None:
            self.prompt_tokens = delta.prompt_tokens
        self.finish_reason, self.count = delta.finish_reason, delta.token_count


class JsonAnswer:
    """One JSON document when everything has finished; an array of them where the client sent an array of prompts."""

    content_type = JSON
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, prompts: Sequence[str], show: Show, in_array: bool) -> None:
        self._prompts = prompts
        self._show = show
        self._in_array = in_array or show.tgi
        self._sequences: list[dict[int, _Sequence]] = [{} for _ in prompts]
        self._open = len(prompts)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """See `Answer.feed`."""
        self._sequences[prompt].setdefault(delta.sequence, _Sequence()).add(delta)
        self._open -= delta.last
        return b"" if self._open else self._body().encode()

    def fail(self, error: RequestError) -> Reply:
        """See `Answer.fail`."""
        if isinstance(error, Overloaded):
            return overloaded(error, self._show.overload_status)
        if isinstance(error, UnknownAdapter):
            return unknown_adapter(error)
        status = status_of(error)
        kind = tgi_error_type(error) if self._show.tgi else None
        return Reply(status, JSON, request_error(error.message, status, kind).encode())

    def fail_midway(self, error: RequestError) -> bytes:
        """Never comes to it: the body is sent whole."""
        return b""

    def _body(self) -> str:
        documents = [self._document(*pair) for pair in zip(self._prompts, self._sequences, strict=True)]
        return f"[{', '.join(documents)}]" if self._in_array else documents[0]

    def _document(self, prompt: str, sequences: dict[int, _Sequence]) -> str:
        show, (best, *others) = self._show, [sequences[rank] for rank in sorted(sequences)]
        text = f'{{"generated_text": {quote(_text(prompt, best, show))}'
        if not show.details:
            return text + "}"
        if show.several:
            details = f'"inputs": {quote(prompt)}, {_counts(best)}, {_token_lists(best, show)}'
            if others:
                rest = ", ".join(self._other(prompt, other) for other in others)
                details += f', "best_of_sequences": [{rest}]'
        else:
            details = f'{_counts(best)}, "inputs": {quote(prompt)}, {_token_lists(best, show)}'
        return f'{text}, "details": {{{details}}}}}'

    def _other(self, prompt: str, sequence: _Sequence) -> str:
        text = quote(_text(prompt, sequence, self._show))
        return f'{{{_counts(sequence)}, {_token_lists(sequence, self._show)}, "generated_text": {text}}}'


class RecordAnswer:
    """A record for each token, as a line or as a server-sent event; the last one carries the whole text."""

    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, prompt: str, show: Show, sse: bool) -> None:
        self.content_type = "text/event-stream" if sse else "application/jsonlines"
        self._prompt = prompt
        self._show = show
        self._before, self._after = ("data: ", "\n\n") if sse else ("", "\n")
        self._head = self._before + '{"token": '
        self._sequence = _Sequence()
        self._top: list[Token] = []

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """See `Answer.feed`. The hot path: called for each token of each stream."""
        if delta.sequence:
            return b""
        sequence, tokens = self._sequence, delta.tokens
        sequence.text.append(delta.text)
        if self._show.top_tokens:
            sequence.tokens.extend(tokens)
        if delta.prompt_tokens is not None:
            sequence.prompt_tokens = delta.prompt_tokens
        if not delta.last:
            if len(tokens) == 1:
                return (self._record(tokens[0]) + "}" + self._after).encode()
            return "".join([self._record(token) + "}" + self._after for token in tokens]).encode()
        sequence.finish_reason, sequence.count = delta.finish_reason, delta.token_count
        *earlier, final = tokens or [_NO_TOKEN]
        records = [self._record(token) + "}" + self._after for token in earlier]
        return ("".join(records) + self._record(final) + self._end()).encode()

    def fail(self, error: RequestError) -> Reply:
        """See `Answer.fail`. Nothing has been streamed, so the record comes as a JSON document."""
        if isinstance(error, Overloaded):
            return overloaded(error, self._show.overload_status)
        if isinstance(error, UnknownAdapter):
            return unknown_adapter(error)
        return Reply(status_of(error), JSON, self._error(error).encode())

    def fail_midway(self, error: RequestError) -> bytes:
        """See `Answer.fail_midway`."""
        return (self._before + self._error(error) + self._after).encode()

    def _error(self, error: RequestError) -> str:
        kind = tgi_error_type(error) if self._show.tgi else None
        return stream_error(error.message, status_of(error), kind)

    def _record(self, token: Token) -> str:
        """A record up to where the token's own object has closed."""
        return self._head + _token(token, self._show)

    def _end(self) -> str:
        sequence, show = self._sequence, self._show
        end = f', "generated_text": {quote(_text(self._prompt, sequence, show))}'
        if show.details:
            details = f'{_counts(sequence)}, "inputs": {quote(self._prompt)}{_prompt_and_top(sequence, show)}'
            end += f', "details": {{{details}}}'
        return end + "}" + self._after


def _text(prompt: str, sequence: _Sequence, show: Show) -> str:
    text = "".join(sequence.text)
    return prompt + text if show.full_text else text


def _counts(sequence: _Sequence) -> str:
    reason = f'"{FINISH_REASONS[sequence.finish_reason]}"' if sequence.finish_reason else "null"
    return f'"finish_reason": {reason}, "generated_tokens": {sequence.count}'


def _token_lists(sequence: _Sequence, show: Show) -> str:
    return f'"tokens": {_tokens(sequence.tokens, show)}{_prompt_and_top(sequence, show)}'


def _prompt_and_top(sequence: _Sequence, show: Show) -> str:
    text = ""
    if show.prefill:
        text += f', "prefill": {_tokens(sequence.prompt_tokens, show)}'
    if show.top_tokens:
        lists = ", ".join(_tokens(token.top, show) for token in sequence.tokens)
        text += f', "top_tokens": [{lists}]'
    return text


def _tokens(tokens: Sequence[Token], show: Show) -> str:
    return f"[{', '.join(_token(token, show) for token in tokens)}]"


def _token(token: Token, show: Show) -> str:
    number = "null" if token.logprob is None or not isfinite(token.logprob) else repr(token.logprob)
    key, special_key = ("logprob", "special") if show.tgi else ("log_prob", "special_token")
    special = f', "{special_key}": true' if token.special else ""
    return f'{{"id": {token.id}, "text": {quote(token.text)}, "{key}": {number}{special}}}'
