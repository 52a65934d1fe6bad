"""The request that every contract makes, and the deltas that every engine makes.

A contract turns bytes into a `GenerationRequest`. An engine turns the request into `TokenDelta`s. The contract turns
the deltas into bytes. Contracts and engines do not import each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from engines.pooling import Pooling


class FinishReason(Enum):
    """The reason why a sequence ended, in terms that every contract can translate."""

    LENGTH = "length"  # The limit on new tokens, the model's context, or the deadline of the call was reached.
    EOS = "eos"  # The model produced its end-of-sequence token.
    STOP = "stop"  # A stop string or a stop token of the request was produced.
    ABORT = "abort"  # The request was cancelled.
    ERROR = "error"  # The engine failed.


DEADLINE = "deadline"
"""The stop reason of a sequence that ended at the deadline of its call. Its finish reason is `FinishReason.LENGTH`."""


class SchemaPart(NamedTuple):
    """A client's JSON schema as a part of the answer's schema. The schema of forced tool calls has several parts."""

    place: str = "#"  # The part's location in the answer's schema, as a URI fragment.
    # The part's location in the client's body, as a URI fragment. If several fields have schemas, the field's name
    # comes first.
    name: str = "#"
    # True: the request is refused if the engine cannot enforce the whole part. False: the engine enforces as much of
    # the part as it can. None: the contract has no such flag, and the setting `partial_schemas` decides.
    strict: bool | None = None


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A form that the text of an answer must have. Exactly one field from `choice` to `grammar` is set.

    The engine enforces the constraint token by token, or refuses the request with `InvalidParameter`.
    """

    parameter: str  # The client's name for the constraint, for error messages.
    choice: tuple[str, ...] | None = None  # The answer is one of these texts.
    json_schema: str | None = None  # The answer is JSON that is valid under this schema, which is given as JSON text.
    json_object: bool = False  # The answer is any JSON object.
    regex: str | None = None  # The whole answer matches this regular expression.
    grammar: str | None = None  # The answer is a text of this grammar, which is written in the engine's EBNF.
    # True: JSON may have arbitrary white space, unless the model's settings forbid it. False: JSON has no white space.
    any_whitespace: bool = True
    # Whether the constraint goes to vLLM unchanged. If so, `any_whitespace` has no effect.
    as_is: bool = False
    strict: bool | None = None  # As in `SchemaPart`.

    def for_vllm(self) -> dict[str, Any]:
        """Return the constraint as a field of vLLM's `structured_outputs`."""
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

    max_tokens: int | None = None  # The limit on new tokens, at least 1. None: the rest of the context.
    min_tokens: int = 0
    temperature: float = 0.0  # 0 means greedy decoding. A higher value means sampling.
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


# The limit on `length_penalty`. With this penalty, the scores of beams still differ in float32 after the division by
# `length ** length_penalty`.
MAX_LENGTH_PENALTY = 8.0


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Beam search instead of sampling. Beams are returned best first."""

    width: int
    length_penalty: float = 1.0  # From -MAX_LENGTH_PENALTY to MAX_LENGTH_PENALTY.
    early_stopping: bool = False


class EngineMemo(msgspec.Struct):
    """An engine's cache for the parameters that several requests share."""

    # The engine's form of the parameters. None: the engine has not checked any of these requests yet.
    checked: Any = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a prompt, the way in which the engine continues the prompt, and the data that the answer needs.

    The `want_*` fields and `top_tokens` ask the engine only for data that the answer shows, because log probabilities
    double the cost of a streamed token.
    """

    request_id: str = ""
    prompt: str | tuple[int, ...] = ""  # Text, or token ids.
    # Whether to put the model's special tokens around a text. False for a chat, whose template has already written
    # them.
    add_special_tokens: bool = True
    sampling: SamplingParameters = SamplingParameters()
    # True: each delta is sent as soon as it is generated. False: each finished sequence has a single delta.
    stream: bool = False
    sequences: int = 1  # The number of sequences that are returned.
    # The number of sequences that are generated. It is at least `sequences`. The most probable of them are returned.
    candidates: int = 1
    beam_search: BeamSearch | None = None
    pooling: Pooling | None = None  # If set, the answer is vectors or scores, and `sampling` has no effect.
    truncate_prompt_tokens: int | None = None  # The number of tokens to keep at the prompt's end. None: keep all.
    # The number of tokens at the prompt's end that earlier steps of a beam search have generated. `max_prompt_tokens`
    # ignores them.
    generated_before: int = 0
    # The number of new tokens that must fit into the context after the prompt: at least 1, or 0 for pooling. If they do
    # not fit, the request is refused. If `max_tokens` exceeds the rest of the context, it is reduced to that rest.
    room: int = 1
    want_tokens: bool = False  # Whether deltas have `tokens` in addition to their text.
    want_logprobs: bool = False  # Whether tokens have their log probability.
    want_ranks: bool = False  # Whether tokens also have their rank. Allowed only with `want_logprobs`.
    want_prompt_tokens: bool = False  # Whether the first delta has the prompt's tokens and their log probabilities.
    top_tokens: int = 0  # The number of alternatives of each token. The alternatives are the most probable tokens.
    # Whether tokens are independent: a token's text does not depend on its neighbours, and no token is held back
    # because its text may begin a stop string. So each step has a delta, possibly without text.
    tokens_apart: bool = False
    adapter: str | None = None
    trace_context: Mapping[str, str] | None = None  # `traceparent` and `tracestate` of the client's trace.
    # Requests share cached prompts only if their salts are equal.
    cache_salt: str = ""
    # Decoded images, in the order of their placeholders in the prompt (`ModelTexts.image_mark`). They are freed when
    # the engine has the prompt.
    images: Sequence[Any] = ()
    priority: int = 0  # With vLLM's scheduling policy `priority`, lower numbers run first.
    # The cache that requests with equal parameters share. These requests may differ in the prompt, adapter, images, id,
    # trace, salt and priority. None: the engine checks this request alone.
    memo: EngineMemo | None = None

    @property
    def sequences_in_engine(self) -> int:
        """The number of the request's sequences that the engine runs at a time."""
        return self.beam_search.width if self.beam_search is not None else self.candidates


def pooling_request(prompt: str | tuple[int, ...], pooling: Pooling, **fields: Any) -> GenerationRequest:
    """Return a request for vectors or scores. It needs no room for new tokens. `fields`: its other fields."""
    return GenerationRequest(prompt=prompt, pooling=pooling, room=0, **fields)


# A loaded model answers this request to prove that it works. A model that only transcribes gets silence instead.
WARM_UP = GenerationRequest(
    request_id="warm-up", prompt="Hello", sampling=SamplingParameters(max_tokens=2, ignore_eos=True)
)


class Token(msgspec.Struct, gc=False):
    """One token of the prompt or of the answer."""

    id: int
    # The text that this token adds. The joined texts of all tokens are the whole answer. The text is empty while a
    # character is incomplete. It is also empty for special tokens that are not shown.
    text: str
    logprob: float | None = None
    special: bool = False
    top: tuple[Token, ...] = ()  # The most probable tokens at this position, best first.
    rank: int | None = None  # The token's rank by probability, from 1. Set if the request wants ranks.


class TokenDelta(msgspec.Struct, gc=False):
    """The text and tokens that one or more engine steps add to one sequence of the answer."""

    text: str
    tokens: list[Token] = []  # Empty unless the request wants tokens.
    sequence: int = 0
    finish_reason: FinishReason | None = None
    prompt_token_count: int = 0  # Set on every delta.
    token_count: int = 0  # The number of tokens generated so far in this sequence.
    # Log probability of the sequence so far. Set if log probabilities were computed.
    cumulative_logprob: float | None = None
    prompt_tokens: list[Token] | None = None  # Set on the first delta, if the request wants them.
    last: bool = False  # Whether this is the last delta of the request.
    # Set with the finish reason: the stop string or the stop token that ended the sequence, or `DEADLINE`. If a model
    # has several end tokens, all but the first count as stop tokens here.
    stop_reason: int | str | None = None
    # The vector or the scores of a request with `pooling`, as an array of float32. Such a request has one delta. With
    # the tasks `token_embed` and `token_classify`, the array has a row for each token.
    numbers: Any = None
    # Set on the last delta of a sequence: the monotonic time at which the prompt went to the engine, and the seconds
    # that it waited in the queue. Both are 0 for a beam search.
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
