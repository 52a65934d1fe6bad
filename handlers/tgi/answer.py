"""TGI's answers: one JSON document, or an event for each token.

The bytes are those that serde_json writes: no spaces between items, non-ASCII characters unescaped, and keys in the
order that TGI's structs have. Source: TGI's router, `src/lib.rs` and `src/server.rs`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from math import isfinite
from struct import Struct

from engines.errors import RequestError
from engines.request import FinishReason, GeneratedSequence, Token, TokenDelta
from handlers.contract import JSON, Answer, Reply
from handlers.tgi.errors import EVENTS, INCOMPLETE_STREAM, IncompleteGeneration, error_event, refuse, refuse_stream

# The reasons that TGI's clients know. An answer with another reason is incomplete.
FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS: "eos_token",
    FinishReason.STOP: "stop_sequence",
}
_pack, _unpack = Struct("<f").pack, Struct("<f").unpack
IDLE_COMMENT = b":\n\n"  # TGI sends this comment while a stream is idle.
_NO_TOKEN = Token(0, "", special=True)

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The contents of an answer."""

    prompt: str  # The beginning of each text. Empty unless the client asks for the full text.
    details: bool
    top_tokens: bool
    in_array: bool
    seeds: tuple[int | None, ...]  # The seed of each sequence. None for greedy decoding.
    special_texts: Mapping[int, str]  # The texts of special tokens by id. The generated text lacks them.
    characters: int  # The length of `inputs`.
    compute_type: str


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


class WholeAnswer(Answer):
    """One document with the sequence of the highest mean log probability. Details have the other sequences too."""

    content_type = JSON

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._sequences = [GeneratedSequence() for _ in options.seeds]
        self._open = len(options.seeds)
        self._begun_at = self._submitted_at = time.monotonic()
        self._queued = 0.0
        self._best = 0

    @property
    def headers(self) -> Headers:
        """Counts and times of the finished answer, in seconds (`x-compute-time`) and whole milliseconds."""
        best, seconds = self._sequences[self._best], time.monotonic() - self._begun_at
        validation = self._submitted_at - self._begun_at
        inference = max(seconds - validation - self._queued, 0.0)
        return (
            ("x-compute-type", self._options.compute_type),
            ("x-compute-time", f"{seconds:.9f}"),
            ("x-compute-characters", str(self._options.characters)),
            ("x-total-time", _milliseconds(seconds)),
            ("x-validation-time", _milliseconds(validation)),
            ("x-queue-time", _milliseconds(self._queued)),
            ("x-inference-time", _milliseconds(inference)),
            ("x-time-per-token", _milliseconds(inference / max(best.count, 1))),
            ("x-prompt-tokens", str(best.prompt_token_count)),
            ("x-generated-tokens", str(best.count)),
        )

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        self._sequences[prompt].add(delta)
        self._open -= delta.last
        if delta.submitted_at:
            self._submitted_at, self._queued = max(delta.submitted_at, self._begun_at), delta.queued_seconds
        if self._open:
            return b""
        if any(sequence.finish_reason not in FINISH_REASONS for sequence in self._sequences):
            raise IncompleteGeneration
        return self._body().encode()

    def fail(self, error: RequestError) -> Reply:
        return refuse(error)

    def _body(self) -> str:
        places = range(len(self._sequences))
        mean_logprobs = [sequence.logprob / max(sequence.count, 1) for sequence in self._sequences]
        self._best = mean_logprobs.index(max(mean_logprobs))
        text = f'{{"generated_text":{self._text(self._best)}'
        if self._options.details:
            others = [
                f'{{"generated_text":{self._text(place)},{self._outcome(place)}{self._top_tokens(place)}}}'
                for place in places
                if place != self._best
            ]
            best_of = f',"best_of_sequences":[{",".join(others)}]' if others else ""
            text += f',"details":{{{self._outcome(self._best)}{best_of}{self._top_tokens(self._best)}}}'
        return f"[{text}}}]" if self._options.in_array else text + "}"

    def _text(self, place: int) -> str:
        return quote(self._options.prompt + "".join(self._sequences[place].text))

    def _outcome(self, place: int) -> str:
        sequence, texts = self._sequences[place], self._options.special_texts
        prefill = ",".join(
            f'{{"id":{token.id},"text":{quote(token.text)},"logprob":{float32(token.logprob)}}}'
            for token in sequence.prompt_tokens
        )
        tokens = ",".join(_token(token, texts) for token in sequence.tokens)
        return f'{_counts(sequence, self._options.seeds[place])},"prefill":[{prefill}],"tokens":[{tokens}]'

    def _top_tokens(self, place: int) -> str:
        if not self._options.top_tokens:
            return ""
        lists = ",".join(_tokens(token.top, self._options.special_texts) for token in self._sequences[place].tokens)
        return f',"top_tokens":[{lists}]'


def stream_headers(compute_type: str, characters: int) -> Headers:
    """Return the headers of a stream. A stream with only an error has them too.

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


class StreamAnswer(Answer):
    """An event for each token. The last event has the whole text."""

    content_type = EVENTS
    headers: Headers = ()

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._text: list[str] = []
        self._index = 0
        self.headers = stream_headers(options.compute_type, options.characters)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return an event for each token of the delta.

        This is the hot path: it is called for each token of each stream.
        """
        self._text.append(delta.text)
        if not delta.last or delta.finish_reason not in FINISH_REASONS:
            events = "".join([self._event(token) for token in delta.tokens]).encode()
            return events + INCOMPLETE_STREAM if delta.last else events
        *earlier, final = delta.tokens or [_NO_TOKEN]
        return ("".join(map(self._event, earlier)) + self._event(final, self._end(delta))).encode()

    def fail(self, error: RequestError) -> Reply:
        return refuse_stream(error, self.headers)

    def fail_midway(self, error: RequestError) -> bytes:
        return error_event(error)

    def _event(self, token: Token, end: str = '"generated_text":null,"details":null') -> str:
        self._index += 1
        texts = self._options.special_texts
        if token.top:
            end = f'"top_tokens":{_tokens(token.top, texts)},{end}'
        return f'data:{{"index":{self._index},"token":{_token(token, texts)},{end}}}\n\n'

    def _end(self, delta: TokenDelta) -> str:
        text = quote(self._options.prompt + "".join(self._text))
        if not self._options.details:
            return f'"generated_text":{text},"details":null'
        details = f'{_counts(delta, self._options.seeds[0])},"input_length":{delta.prompt_token_count}'
        return f'"generated_text":{text},"details":{{{details}}}'


def _counts(ended: GeneratedSequence | TokenDelta, seed: int | None) -> str:
    assert ended.finish_reason is not None
    reason = FINISH_REASONS[ended.finish_reason]
    count = ended.count if isinstance(ended, GeneratedSequence) else ended.token_count
    return f'"finish_reason":"{reason}","generated_tokens":{count},"seed":{"null" if seed is None else seed}'


def _token(token: Token, special_texts: Mapping[int, str]) -> str:
    if token.special:
        text = quote(token.text or special_texts.get(token.id, ""))
        return f'{{"id":{token.id},"text":{text},"logprob":{float32(token.logprob)},"special":true}}'
    return f'{{"id":{token.id},"text":{quote(token.text)},"logprob":{float32(token.logprob)},"special":false}}'


def _tokens(tokens: Sequence[Token], special_texts: Mapping[int, str]) -> str:
    return f"[{','.join([_token(token, special_texts) for token in tokens])}]"


def float32(value: float | None) -> str:
    """Return the JSON of a 32-bit number as serde_json writes it, or "null" for None and numbers beyond 32 bits."""
    if value is None or not isfinite(value):
        return "null"
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
    """Return a number in exponential form as serde_json writes it: 1.5e-07 as 1.5e-7, and 1e-06 as 0.000001."""
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if power < -6 or power > 0:
        return f"{mantissa}e{power}"
    sign, digits = ("-", mantissa[1:]) if mantissa[0] == "-" else ("", mantissa)
    return f"{sign}0.{'0' * (-power - 1)}{digits.replace('.', '')}"
