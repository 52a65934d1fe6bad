"""The request that every contract makes, and the deltas that every engine yields.

A contract turns bytes into a `GenerationRequest`; an engine turns that into `TokenDelta`s; the contract turns those
into bytes. Neither knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from engines.pooling import Pooling


class FinishReason(Enum):
    """Why a sequence ended, in terms that every contract can translate."""

    LENGTH = "length"  # The limit on new tokens, the model's context, or the deadline of the call was reached.
    EOS = "eos"  # The model produced its end-of-sequence token.
    STOP = "stop"  # A stop string or a stop token of the request was produced.
    ABORT = "abort"  # The request was cancelled.
    ERROR = "error"  # The engine failed.


DEADLINE = "deadline"
"""The stop reason of a sequence that ended at the deadline of its call. Its finish reason is `FinishReason.LENGTH`."""


class SchemaPart(NamedTuple):
    """A part of the JSON schema of an answer, as the client knows it. The schema of forced tools has many."""

    place: str = "#"  # In the schema of the answer, as a URI fragment.
    # In the client's body, as a URI fragment. Before it is the name of the field that has the schema if there are
    # several.
    name: str = "#"
    # True: the request is refused if the engine cannot hold the part whole. False: the answer follows what can be held.
    # None: the contract has no word for it, and the setting `partial_schemas` decides.
    strict: bool | None = None


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A form that the text of an answer must have; exactly one of `choice` to `grammar` is set.

    The engine enforces it token by token, or refuses the request with `InvalidParameter`.
    """

    parameter: str  # The client's name for it, for error messages.
    choice: tuple[str, ...] | None = None  # One of these texts, and nothing else.
    json_schema: str | None = None  # A JSON document that is valid under this schema, which is given as JSON text.
    json_object: bool = False  # Any JSON object.
    regex: str | None = None  # A text that matches the whole expression.
    grammar: str | None = None  # A text of this grammar, which is written in the engine's EBNF.
    any_whitespace: bool = (
        True  # JSON may have any white space, if the model's settings allow it; otherwise it has none.
    )
    # The engine takes it as vLLM's own clients mean it: `any_whitespace` is not set.
    as_is: bool = False
    strict: bool | None = None  # As in `SchemaPart`.

    def for_vllm(self) -> dict[str, Any]:
        """Return the form by vLLM's name for it, as a field of `structured_outputs`."""
        forms = {
            "json": self.json_schema,
            "regex": self.regex,
            "choice": None if self.choice is None else list(dict.fromkeys(self.choice)),
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        return {name: value for name, value in forms.items() if value is not None}


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The union of the contracts' sampling parameters. A contract has validated the values."""

    max_tokens: int | None = None  # Limit on new tokens, at least 1; None: the rest of the context.
    min_tokens: int = 0
    temperature: float = 0.0  # 0 is greedy decoding; anything above is sampling.
    top_k: int = 0  # 0 keeps the whole vocabulary.
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0  # Locally typical sampling; 1 is off.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    constraint: Constraint | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


MAX_LENGTH_PENALTY = 8.0  # Scores that are divided by a length to this power still differ in float32.


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Beam search instead of sampling; beams are returned best first."""

    width: int
    length_penalty: float = 1.0  # From -MAX_LENGTH_PENALTY to MAX_LENGTH_PENALTY.
    early_stopping: bool = False


class EngineMemo(msgspec.Struct):
    """The place for what an engine keeps of the parameters that several requests share."""

    # The engine's form of the parameters. None: the engine has not checked any of the requests.
    checked: Any = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, its continuation, and the contents of the answer.

    The `want_*` fields and `top_tokens` ask the engine only for data that the answer shows: log probabilities double
    the cost of a streamed token.
    """

    request_id: str = ""
    prompt: str | tuple[int, ...] = ""  # Text, or token ids.
    # Put the model's special tokens around a text; a chat template has written them already.
    add_special_tokens: bool = True
    sampling: SamplingParameters = SamplingParameters()
    stream: bool = False  # Deltas come when they are generated; otherwise one for each sequence, when it has finished.
    sequences: int = 1  # How many sequences are returned.
    # How many are generated, of which the `sequences` most probable are returned; at least `sequences`.
    candidates: int = 1
    beam_search: BeamSearch | None = None
    pooling: Pooling | None = None  # Numbers instead of text; `sampling` has no effect then.
    truncate_prompt_tokens: int | None = None  # Keep only this many tokens at the prompt's end.
    # Tokens at the end of the prompt that were generated for the client; a limit on prompts does not count them.
    generated_before: int = 0
    # New tokens for which the context must have room, at least 1; otherwise the request is refused. A larger
    # `max_tokens` is cut to the free room. Pooling needs none.
    room: int = 1
    want_tokens: bool = False  # Deltas carry `tokens`, not text alone.
    want_logprobs: bool = False  # Tokens carry their log probability.
    want_ranks: bool = False  # Tokens carry their rank as well; only together with `want_logprobs`.
    want_prompt_tokens: bool = False  # The first delta carries the prompt's tokens with their log probabilities.
    top_tokens: int = 0  # How many of the most probable alternatives each token carries.
    # A token's text does not depend on its neighbours, and tokens do not wait for text that is held back. So each step
    # has a delta, which may have no text.
    tokens_apart: bool = False
    adapter: str | None = None
    trace_context: Mapping[str, str] | None = None  # `traceparent` and `tracestate` of the client's trace.
    # Only requests with the same salt share cached prompts. Empty: the requests without a salt do.
    cache_salt: str = ""
    # Decoded images, in the order of their marks in the prompt (`ModelTexts.image_mark`). They are gone when the engine
    # has the prompt.
    images: Sequence[Any] = ()
    priority: int = 0  # With vLLM's scheduling policy `priority`, lower numbers run first.
    # Shared by requests that differ only in the prompt, the adapter, the images, and the fields of a call: its id, its
    # trace, its salt and its priority. None: the engine checks this request alone.
    memo: EngineMemo | None = None

    @property
    def sequences_in_engine(self) -> int:
        """Number of its sequences that the engine runs at a time."""
        return self.beam_search.width if self.beam_search is not None else self.candidates


def pooling_request(prompt: str | tuple[int, ...], pooling: Pooling, **fields: Any) -> GenerationRequest:
    """Return a request for numbers. The context needs no room for new tokens. `fields`: its further fields."""
    return GenerationRequest(prompt=prompt, pooling=pooling, room=0, **fields)


# A loaded model shows with this request that it works. A model that only transcribes hears silence instead.
WARM_UP = GenerationRequest(
    request_id="warm-up", prompt="Hello", sampling=SamplingParameters(max_tokens=2, ignore_eos=True)
)


class Token(msgspec.Struct, gc=False):
    """One token of the prompt or of the answer."""

    id: int
    # The text that this token adds. Concatenated over all tokens, it is the whole answer. Empty while a character is
    # incomplete, and for special tokens that are not shown.
    text: str
    logprob: float | None = None
    special: bool = False
    top: tuple[Token, ...] = ()  # The most probable tokens at this place, best first.
    rank: int | None = None  # Rank among all tokens by probability, from 1; set if the request wants ranks.


class TokenDelta(msgspec.Struct, gc=False):
    """The addition of one or more engine steps to one sequence of the answer."""

    text: str
    tokens: list[Token] = []  # Empty unless the request wants tokens.
    sequence: int = 0
    finish_reason: FinishReason | None = None
    prompt_token_count: int = 0  # Set on every delta.
    token_count: int = 0  # Tokens generated so far in this sequence.
    # Log probability of the sequence so far; set if log probabilities were computed.
    cumulative_logprob: float | None = None
    prompt_tokens: list[Token] | None = None  # On the first delta, if the request wants them.
    last: bool = False  # No further delta of this request follows.
    # With the finish reason: the stop string or the stop token that ended the sequence, or `DEADLINE`. The model's end
    # tokens beyond its first count as stop tokens here.
    stop_reason: int | str | None = None
    # The numbers of a request with `pooling`: an array of float32, with a row for each token if the task is one of
    # tokens. Such a request has one delta.
    numbers: Any = None
    # On the last delta of a sequence: when its prompt went to the engine, by the monotonic clock, and its time in the
    # queue. Beam search has 0 for both.
    submitted_at: float = 0.0
    queued_seconds: float = 0.0


class GeneratedSequence(msgspec.Struct):
    """One sequence of an answer, collected from its deltas."""

    text: list[str] = []
    tokens: list[Token] = []
    prompt_tokens: list[Token] = []
    finish_reason: FinishReason | None = None
    count: int = 0
    prompt_token_count: int = 0
    logprob: float = 0.0
    stop_reason: int | str | None = None

    @property
    def ended_at_deadline(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH and self.stop_reason == DEADLINE

    def add(self, delta: TokenDelta) -> None:
        self.text.append(delta.text)
        self.tokens.extend(delta.tokens)
        if delta.prompt_tokens is not None:
            self.prompt_tokens = delta.prompt_tokens
        self.finish_reason, self.count, self.stop_reason = delta.finish_reason, delta.token_count, delta.stop_reason
        self.prompt_token_count = delta.prompt_token_count
        self.logprob = delta.cumulative_logprob or 0.0
