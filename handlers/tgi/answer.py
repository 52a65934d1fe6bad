"""TGI's answers: one JSON document, or an event for each token.

The bytes match serde_json's: no spaces between items, non-ASCII characters unescaped, and keys in the order of TGI's
structs. Source: TGI's router, `src/lib.rs` and `src/server.rs`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from struct import Struct

import msgspec

from engines.errors import RequestError
from engines.request import FinishReason, Token, TokenDelta
from handlers.answers.token_answer import ShownSequence, TokenDocument, TokenForm, TokenStream
from handlers.contract import Reply
from handlers.tgi.errors import EVENTS, INCOMPLETE_STREAM, IncompleteGeneration, error_event, refuse, refuse_stream

# The members of `details` (DETAILS), of an item of `best_of_sequences` (OTHER), and of a stream's `details` (LAST).
_COUNTS = ("finish_reason", "generated_tokens", "seed")
DETAILS = (*_COUNTS, "prefill", "tokens", "best_of_sequences", "top_tokens")
OTHER = ("generated_text", *_COUNTS, "prefill", "tokens", "top_tokens")
LAST = (*_COUNTS, "input_length")
# An answer with one of these finish reasons is incomplete. TGI's clients know only the other reasons.
_INCOMPLETE = (None, FinishReason.ABORT, FinishReason.ERROR)
_pack, _unpack = Struct("<f").pack, Struct("<f").unpack
IDLE_COMMENT = b":\n\n"  # TGI sends this comment while a stream is idle.
_NO_TOKEN = Token(0, "", special=True)

Headers = tuple[tuple[str, str], ...]


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


class WholeAnswer(TokenDocument):
    """One document: the sequence with the highest mean log probability. `details` has the other sequences."""

    def __init__(
        self, form: TokenForm, inputs: str, seeds: Sequence[int | None], *, in_array: bool, compute_type: str
    ) -> None:
        """Create the answer.

        Args:
            form: The form of the answer.
            inputs: The prompt.
            seeds: The seed of each sequence. None for greedy decoding.
            in_array: True if the document is in an array.
            compute_type: The value of option.rolling_batch.
        """
        super().__init__(form, (inputs,) * len(seeds), seeds)
        if in_array:
            self.around = ("[{", "", "}]")
        self._characters, self._compute_type = len(inputs), compute_type
        self._begun_at = self._submitted_at = time.monotonic()
        self._queued = 0.0

    def _counts_and_times(self, best: ShownSequence) -> Headers:
        """Return headers with counts and times. `x-compute-time` is in seconds, other times are in milliseconds."""
        seconds = time.monotonic() - self._begun_at
        validation = self._submitted_at - self._begun_at
        inference = max(seconds - validation - self._queued, 0.0)
        return (
            ("x-compute-type", self._compute_type),
            ("x-compute-time", f"{seconds:.9f}"),
            ("x-compute-characters", str(self._characters)),
            ("x-total-time", _milliseconds(seconds)),
            ("x-validation-time", _milliseconds(validation)),
            ("x-queue-time", _milliseconds(self._queued)),
            ("x-inference-time", _milliseconds(inference)),
            ("x-time-per-token", _milliseconds(inference / max(best.count, 1))),
            ("x-prompt-tokens", str(best.prompt_token_count)),
            ("x-generated-tokens", str(best.count)),
        )

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        if delta.submitted_at:
            self._submitted_at, self._queued = max(delta.submitted_at, self._begun_at), delta.queued_seconds
        return super().feed(prompt, delta)

    def fail(self, error: RequestError) -> Reply:
        return refuse(error)

    def _documents(self) -> list[str]:
        sequences = [ranked[0] for ranked in self._sequences]
        if any(sequence.finish_reason in _INCOMPLETE for sequence in sequences):
            raise IncompleteGeneration
        # A sequence without a token was ended by its deadline. It is the best only if no sequence has a token.
        best = max(sequences, key=lambda one: one.logprob / one.count if one.count else -math.inf)
        self.headers = self._counts_and_times(best)
        return [self._document(best, *[other for other in sequences if other is not best])]


def stream_headers(compute_type: str, characters: int) -> Headers:
    """Return the headers of a stream. A stream with only an error also has these headers.

    Args:
        compute_type: The value of option.rolling_batch.
        characters: The length of `inputs`.
    """
    return (
        ("x-compute-type", compute_type),
        ("x-compute-characters", str(characters)),
        ("x-accel-buffering", "no"),
        ("cache-control", "no-cache"),
    )


class StreamAnswer(TokenStream):
    """An event for each token."""

    content_type = EVENTS
    head, after = 'data:{"index":', "\n\n"

    def __init__(self, form: TokenForm, inputs: str, seed: int | None, compute_type: str) -> None:
        super().__init__(form, inputs, seed)
        self._index = 0
        self.headers = stream_headers(compute_type, len(inputs))

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return an event for each token of the delta. Hot path: this runs for each token of each stream."""
        form, complete, events = self._form, delta.last and delta.finish_reason not in _INCOMPLETE, ""
        for token in delta.tokens or ([_NO_TOKEN] if complete else ()):
            self._index += 1
            top = f',"top_tokens":{form.tokens(token.top)}' if token.top else ""
            events += f'{self.head}{self._index},"token":{form.token_of(token)}{top}{self._tail}'
        if complete:
            self._sequence.add(delta)
            return (events.removesuffix(self._tail) + self._end()).encode()
        self._sequence.text.append(delta.text)
        return events.encode() + (INCOMPLETE_STREAM if delta.last else b"")

    def fail(self, error: RequestError) -> Reply:
        return refuse_stream(error, self.headers)

    def fail_midway(self, error: RequestError) -> bytes:
        return error_event(error)


def _float32(value: float) -> str:
    """Return a number as serde_json writes a 32-bit float, or "null" if the number is too large for a 32-bit float."""
    try:
        packed = _pack(value)
    except OverflowError:
        return "null"
    nearest: float = _unpack(packed)[0]
    # serde_json writes the fewest digits that identify the number. Nine digits identify every 32-bit number.
    for form in ("%.6g", "%.7g", "%.8g", "%.9g"):
        text = form % nearest
        if _pack(float(text)) == packed:
            break
    if "e" in text:
        return _exponential(text)
    return text if "." in text else text + ".0"


def _exponential(text: str) -> str:
    """Return an exponential number in the form of serde_json: 1.5e-7 for 1.5e-07, and 0.000001 for 1e-06."""
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if power < -6 or power > 0:
        return f"{mantissa}e{power}"
    sign, digits = ("-", mantissa[1:]) if mantissa[0] == "-" else ("", mantissa)
    return f"{sign}0.{'0' * (-power - 1)}{digits.replace('.', '')}"


_PREFILL = TokenForm(token=('{"id":', ',"text":', ',"logprob":'), number=_float32, comma=",", colon=":")
FORM = msgspec.structs.replace(_PREFILL, ends=(',"special":false}', ',"special":true}'), prefill=_PREFILL, nulls=True)
