"""happy_vllm's answers: one compact document, or a line of JSON for each step.

Each line repeats the whole text so far. The bytes match the original: the document is JSON as Starlette writes it, and
the lines are JSON as Python's `json.dumps` writes it by default. Source: happy_vllm, "Generating endpoints", section
"Output".
"""

from __future__ import annotations

from collections.abc import Callable
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import NamedTuple

from engines.errors import RequestError
from engines.request import DEADLINE, FinishReason, TokenDelta
from handlers.contract import JSON, Answer, Reply
from handlers.happy_vllm.errors import refuse
from handlers.happy_vllm.request import GenerationParameters
from handlers.parsing.vllm_parameters import FINISH_REASONS

_UNFINISHED, _ABORTED = '"None"', '"abort"'
_FINISH_REASONS = {reason: f'"{name}"' for reason, name in FINISH_REASONS.items()} | {FinishReason.ERROR: _ABORTED}


class _Style(NamedTuple):
    comma: str
    colon: str
    quote: Callable[[str], str]


_COMPACT = _Style(",", ":", encode_basestring)
_SPACED = _Style(", ", ": ", encode_basestring_ascii)


class _Answer(Answer):
    """All sequences of one answer, and the text of each so far.

    The text of a sequence is kept as JSON without the quotes, so that each step encodes only the text that it adds.
    """

    _style: _Style

    def __init__(self, generation: GenerationParameters) -> None:
        count = generation.parameters.request.sequences
        self._show_text = generation.parameters.detokenize
        self._responses = [""] * count
        self._reasons = [_UNFINISHED] * count
        self._counts = [0] * count
        self._prompt_tokens = 0
        self._changed = False  # Whether the answer has changed since the last part.
        self._told = ""  # The member `stop_reason`, if the deadline ended a sequence.
        self._end = ""
        if generation.prompt_in_response:
            self._end = f'{self._style.comma}"prompt"{self._style.colon}{self._style.quote(generation.prompt)}'

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Add a delta. Hot path: this runs for each token of each stream."""
        sequence = delta.sequence
        if sequence >= len(self._responses):  # Beams that are not shown do not change the answer.
            return self.latest() if delta.last else b""
        if delta.text and self._show_text:
            self._responses[sequence] += self._style.quote(delta.text)[1:-1]
        self._counts[sequence] = delta.token_count
        self._prompt_tokens = delta.prompt_token_count
        if delta.finish_reason is not None:
            self._reasons[sequence] = _FINISH_REASONS[delta.finish_reason]
            if delta.finish_reason is FinishReason.LENGTH and delta.stop_reason == DEADLINE:
                self._told = f'{self._style.comma}"stop_reason"{self._style.colon}"{DEADLINE}"'
        self._changed = True
        return self.latest() if delta.last else b""

    def fail(self, error: RequestError) -> Reply:
        return refuse(error)

    def _document(self, addition: str = "") -> str:
        """Return the whole object. `addition` is the text of further members, which come last."""
        comma, colon, _ = self._style
        prompt_tokens = self._prompt_tokens
        responses = f'"{comma}"'.join(self._responses)
        usages = comma.join(
            [
                f'{{"prompt_tokens"{colon}{prompt_tokens}{comma}"completion_tokens"{colon}{count}{comma}'
                f'"total_tokens"{colon}{prompt_tokens + count}}}'
                for count in self._counts
            ]
        )
        return (
            f'{{"responses"{colon}["{responses}"]{comma}"finish_reasons"{colon}[{comma.join(self._reasons)}]{comma}'
            f'"usages"{colon}[{usages}]{self._end}{self._told}{addition}}}'
        )


class WholeAnswer(_Answer):
    """`/v1/generate`: one document, which is sent when all sequences have finished."""

    content_type = JSON
    _style = _COMPACT

    def latest(self) -> bytes:
        return self._document().encode()


class StreamAnswer(_Answer):
    """`/v1/generate_stream`: a line for each step, without a content type, as in the original.

    A slow client gets fewer lines.
    """

    content_type = ""
    cumulative = True
    _style = _SPACED

    def latest(self) -> bytes:
        if not self._changed:
            return b""
        self._changed = False
        return (self._document() + "\n").encode()

    def fail_midway(self, error: RequestError) -> bytes:
        """Return a last line with the aborted texts and the error. The original closes the connection instead."""
        self._reasons = [_ABORTED if reason == _UNFINISHED else reason for reason in self._reasons]
        reason = f', "error": {encode_basestring_ascii(error.message)}'
        return (self._document(reason) + "\n").encode()
