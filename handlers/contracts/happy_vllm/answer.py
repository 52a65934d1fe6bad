"""happy_vllm's answers: one compact document, or a line of JSON for each step that repeats the whole text so far.

Source: happy_vllm, "Generating endpoints", section "Output". The bytes are those of the original: the document as
Starlette writes JSON, the lines as Python's `json.dumps` does by default.
"""

from __future__ import annotations

from collections.abc import Callable
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import NamedTuple

from handlers.contracts.happy_vllm.errors import JSON, refuse
from handlers.contracts.happy_vllm.request import Generation
from handlers.contracts.protocol import Reply
from handlers.errors import RequestError
from handlers.request import FinishReason, TokenDelta

_FINISH_REASONS = {
    None: '"None"',
    FinishReason.LENGTH: '"length"',
    FinishReason.EOS: '"stop"',
    FinishReason.STOP: '"stop"',
    FinishReason.ABORT: '"abort"',
    FinishReason.ERROR: '"abort"',
}
_UNFINISHED = _FINISH_REASONS[None]
_ABORTED = _FINISH_REASONS[FinishReason.ABORT]


class _Style(NamedTuple):
    """One way to write JSON."""

    comma: str
    colon: str
    quote: Callable[[str], str]


_COMPACT = _Style(",", ":", encode_basestring)
_SPACED = _Style(", ", ": ", encode_basestring_ascii)


class _State:
    """All sequences of one answer, as far as they have been generated.

    The text of a sequence is kept as JSON, without the quotes, so that a step encodes only what it has added.
    """

    __slots__ = (
        *("_between_usages", "_completion", "_counts", "_end", "_finish", "_head", "_prompt_tokens", "_reasons"),
        *("_responses", "_separator", "_show_text", "_style", "_total", "_usage"),
    )

    def __init__(self, generation: Generation, style: _Style) -> None:
        comma, colon, quote = style
        count = generation.parameters.sequences
        self._style = style
        self._show_text = generation.parameters.detokenize
        self._responses = [""] * count
        self._reasons = [_UNFINISHED] * count
        self._counts = [0] * count
        self._prompt_tokens = 0
        self._head = f'{{"responses"{colon}["'
        self._separator = f'"{comma}"'
        self._finish = f'"]{comma}"finish_reasons"{colon}['
        self._usage = f']{comma}"usages"{colon}[{{"prompt_tokens"{colon}'
        self._completion = f'{comma}"completion_tokens"{colon}'
        self._total = f'{comma}"total_tokens"{colon}'
        self._between_usages = f'}}{comma}{{"prompt_tokens"{colon}'
        self._end = f'{comma}"prompt"{colon}{quote(generation.prompt)}' if generation.prompt_in_response else ""

    def add(self, delta: TokenDelta) -> bool:
        """Add a delta; whether that changed anything. Beams that are not shown change nothing."""
        sequence = delta.sequence
        if sequence >= len(self._responses):
            return False
        if delta.text and self._show_text:
            self._responses[sequence] += self._style.quote(delta.text)[1:-1]
        self._counts[sequence] = delta.token_count
        self._prompt_tokens = delta.prompt_token_count
        if delta.finish_reason is not None:
            self._reasons[sequence] = _FINISH_REASONS[delta.finish_reason]
        return True

    def abort(self) -> None:
        """Mark the sequences that have not finished as aborted."""
        self._reasons = [_ABORTED if reason == _UNFINISHED else reason for reason in self._reasons]

    def document(self, addition: str = "") -> str:
        """The whole object; `addition`: further members at its end."""
        comma, prompt_tokens = self._style.comma, self._prompt_tokens
        usages = self._between_usages.join(
            f"{prompt_tokens}{self._completion}{count}{self._total}{prompt_tokens + count}" for count in self._counts
        )
        return (
            f"{self._head}{self._separator.join(self._responses)}{self._finish}{comma.join(self._reasons)}"
            f"{self._usage}{usages}}}]{self._end}{addition}}}"
        )


class WholeAnswer:
    """`/v1/generate`: one document when all has finished."""

    content_type = JSON
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, generation: Generation) -> None:
        self._state = _State(generation, _COMPACT)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        self._state.add(delta)
        return self._state.document().encode() if delta.last else b""

    def fail(self, error: RequestError) -> Reply:
        return refuse(error)

    def fail_midway(self, error: RequestError) -> bytes:
        return b""  # the body is sent whole


class StreamAnswer:
    """`/v1/generate_stream`: a line for each step, with no content type, as the original has none.

    A `CumulativeAnswer`: a client that lags is sent fewer lines.
    """

    content_type = ""
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, generation: Generation) -> None:
        self._state = _State(generation, _SPACED)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        return self.latest() if self._state.add(delta) else b""

    def add(self, prompt: int, delta: TokenDelta) -> bool:
        """Take a delta without writing it. The hot path: called for each token of each stream."""
        return self._state.add(delta)

    def latest(self) -> bytes:
        return (self._state.document() + "\n").encode()

    def fail(self, error: RequestError) -> Reply:
        return refuse(error)

    def fail_midway(self, error: RequestError) -> bytes:
        """A last line with the texts so far, aborted, and the reason; the original breaks the connection off."""
        self._state.abort()
        reason = f', "error": {encode_basestring_ascii(error.message)}'
        return (self._state.document(reason) + "\n").encode()
