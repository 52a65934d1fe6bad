"""Chooses tokens from logits, for a batch whose sequences have the same parameters.

The steps are in the same order as in vLLM's sampler: allowed tokens and bias, bad words, minimum length, penalties,
temperature, min_p, typical_p, top_k, top_p. Most steps are transformers' processors. Log probabilities are computed
from the model's original logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import transformers

from engines.errors import GenerationFailed, InvalidParameter, RequestError
from engines.request import GenerationRequest, SamplingParameters
from engines.tokenization import check_beams, check_token_ids
from engines.transformers.model import TransformersModel

MAX_TOP_TOKENS = 20
_MAX_STOP_TOKEN_IDS_OF_BEAMS = 64
# The maximum number of bad words, and of their characters together. A step looks for every word, so this limits its
# time.
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 1024, 16384
# As in vLLM, lower temperatures are raised to this value. Otherwise the logits, divided by the temperature, would
# overflow.
_LOWEST_TEMPERATURE = 0.01
_NEVER = -math.inf
# The limits of the random numbers. Within these limits, the logarithm of a number is finite and below 0.
_LEAST, _MOST = torch.finfo(torch.float32).tiny, 1.0 - 2.0**-24


def check_request(request: GenerationRequest, model: TransformersModel) -> None:
    """Refuse parameters that this engine does not support, and token ids beyond the model's vocabulary.

    Raises:
        InvalidParameter: A parameter is not allowed.
    """
    s, size = request.sampling, model.vocabulary_size
    if s.constraint is not None:
        raise InvalidParameter(s.constraint.parameter, "needs the vLLM engine (option.rolling_batch=vllm)")
    if request.beam_search is not None:
        check_beams(s)
    if request.adapter is not None:
        raise InvalidParameter("adapter", "cannot be used: the dynamic batch serves no adapters")
    if request.top_tokens > MAX_TOP_TOKENS:
        raise InvalidParameter("top_n_tokens", f"must be at most {MAX_TOP_TOKENS}, got {request.top_tokens}")
    if s.allowed_token_ids is not None and not s.allowed_token_ids:
        raise InvalidParameter("allowed_token_ids", "must not be empty")
    # In a beam search with N stop tokens, transformers keeps 1 + N candidates for each beam. Each candidate has all
    # tokens of a sequence.
    most = size if request.beam_search is None else _MAX_STOP_TOKEN_IDS_OF_BEAMS
    check_token_ids("stop_token_ids", s.stop_token_ids, most, size)
    check_token_ids("allowed_token_ids", s.allowed_token_ids or (), size, size)
    check_token_ids("logit_bias", s.logit_bias or (), size, size)
    if len(s.bad_words) > MAX_BAD_WORDS:
        raise InvalidParameter("bad_words", f"must hold at most {MAX_BAD_WORDS} words, got {len(s.bad_words)}")
    if (characters := sum(map(len, s.bad_words))) > MAX_BAD_WORD_CHARACTERS:
        raise InvalidParameter(
            "bad_words", f"must have at most {MAX_BAD_WORD_CHARACTERS} characters together, got {characters}"
        )
    if (blank := next((word for word in s.bad_words if not word.strip()), None)) is not None:
        raise InvalidParameter("bad_words", f"must hold words of at least one token, got {blank!r}")


class Choice(msgspec.Struct, gc=False):
    """The next token of a sequence."""

    token_id: int
    logprob: float | None = None  # None unless the request needs it.
    top: tuple[tuple[int, float], ...] = ()  # Ids and log probabilities of the most probable tokens, best first.
    rank: int | None = None  # The token's rank by probability, from 1. Set together with `logprob`.


class Sampler:
    """Chooses the next token of each sequence of a batch."""

    def __init__(
        self,
        request: GenerationRequest,
        model: TransformersModel,
        prompts: Sequence[Sequence[int]],
        generated: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
    ) -> None:
        """Create the sampler.

        Args:
            request: Any request of the batch. The requests differ only in prompt, seed and limit.
            generated: The tokens of each sequence so far. The caller adds the chosen tokens.
            generators: The source of random numbers for each sequence. A sequence with a seed draws the same numbers in
                every batch.
        """
        s = request.sampling
        self._request, self._sampling, self._model = request, s, model
        self._generated, self._generators = generated, generators
        self._bias = _bias(s, model)
        words = _bad_word_ids(s.bad_words, model)
        self._bad_words = transformers.NoBadWordsLogitsProcessor(words) if words else None
        # These tokens are forbidden before `min_tokens`.
        self._ending = sorted({*s.stop_token_ids, *(i for i in model.eos_token_ids if i < model.vocabulary_size)})
        self._in_prompt = self._counts(prompts) > 0 if s.repetition_penalty != 1.0 else None
        self._warpers = [] if s.greedy else _warpers(s)
        ranked = request.candidates > request.sequences or (request.candidates > 1 and not request.stream)
        self._wants_logprobs = request.want_logprobs or request.top_tokens > 0 or ranked

    def choose(self, input_ids: Any, logits: Any) -> list[Choice | RequestError]:
        """Choose the next token of each sequence. Both tensors have a row for each sequence.

        If a sequence's logits contain NaN or plus infinity, or the parameters forbid every token, its result is an
        error instead of a choice.
        """
        scores = self._adjusted(input_ids, logits)
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        best, chosen = scores.max(dim=-1)
        if not self._sampling.greedy:
            chosen = _draw(scores, self._generators)
        choices = self._with_logprobs(logits, chosen) if self._wants_logprobs else map(Choice, chosen.tolist())
        return [
            choice if math.isfinite(value) else _no_choice(value)
            for choice, value in zip(choices, best.tolist(), strict=True)
        ]

    def _adjusted(self, input_ids: Any, logits: Any) -> Any:
        s, scores = self._sampling, logits.clone()
        if self._bias is not None:
            scores += self._bias
        if self._bad_words is not None:
            scores = self._bad_words(input_ids, scores)
        # All unfinished sequences have the same number of tokens. No finished sequence has more tokens.
        if max(map(len, self._generated)) < s.min_tokens:
            scores[:, self._ending] = _NEVER
        if self._in_prompt is None and not s.presence_penalty and not s.frequency_penalty:
            return scores
        counts = self._counts(self._generated)
        if self._in_prompt is not None:
            penalized = torch.where(scores > 0, scores / s.repetition_penalty, scores * s.repetition_penalty)
            scores = torch.where(self._in_prompt | (counts > 0), penalized, scores)
        return scores - s.frequency_penalty * counts - s.presence_penalty * (counts > 0)

    def _counts(self, texts: Sequence[Sequence[int]]) -> Any:
        size, device = self._model.vocabulary_size, self._model.device
        ids = (torch.tensor(text, dtype=torch.long, device=device) for text in texts)
        return torch.stack([torch.bincount(row, minlength=size) for row in ids])

    def _with_logprobs(self, logits: Any, chosen: Any) -> list[Choice]:
        own, total = logits.gather(1, chosen[:, None]), logits.logsumexp(dim=-1, keepdim=True)
        logprobs = (own - total)[:, 0].tolist()
        ranks = ((logits > own).sum(dim=-1) + 1).tolist()
        values, ids = logits.topk(self._request.top_tokens, dim=-1)
        tops = zip(ids.tolist(), (values - total).tolist(), strict=True)
        return [
            Choice(token_id, logprob, tuple(zip(top_ids, top_logprobs, strict=True)), rank)
            for token_id, logprob, rank, (top_ids, top_logprobs) in zip(
                chosen.tolist(), logprobs, ranks, tops, strict=True
            )
        ]


def random_numbers(seed: int | None, sequence: int, device: Any) -> torch.Generator:
    """Return the random generator of one sequence. Each sequence of a request has its own."""
    generator = torch.Generator(device)
    if seed is None or seed == -1:  # For vLLM, -1 also means no seed.
        generator.seed()
    else:
        generator.manual_seed((seed + sequence) % 2**64)
    return generator


def _bias(s: SamplingParameters, model: TransformersModel) -> Any:
    """Return the bias that is added to the logits at every step; None if it is 0 for all tokens."""
    if s.allowed_token_ids is None and not s.logit_bias:
        return None
    bias = torch.zeros(model.vocabulary_size)
    if s.allowed_token_ids is not None:
        bias.fill_(_NEVER)
        bias[list(s.allowed_token_ids)] = 0.0
    if s.logit_bias:
        bias[list(s.logit_bias)] += torch.tensor(list(s.logit_bias.values()), dtype=torch.float32)
    return bias.to(model.device)


def _bad_word_ids(bad_words: Sequence[str], model: TransformersModel) -> list[list[int]]:
    """Return the token ids of each word as vLLM does: with and without a blank before the word."""
    words: list[list[int]] = []
    for word in bad_words:
        first, later = (
            model.tokenizer.encode(text, add_special_tokens=False) for text in (word.lstrip(), f" {word.lstrip()}")
        )
        words.append(first)
        if later[:1] != first[:1] and len(later) == len(first):
            words.append(later)
    return [word for word in words if word and max(word) < model.vocabulary_size]


def _warpers(s: SamplingParameters) -> list[transformers.LogitsProcessor]:
    warpers = [transformers.TemperatureLogitsWarper(float(max(s.temperature, _LOWEST_TEMPERATURE)))]
    if s.min_p > 0.0:
        warpers.append(transformers.MinPLogitsWarper(s.min_p))
    if s.typical_p < 1.0:
        warpers.append(transformers.TypicalLogitsWarper(s.typical_p))
    if s.top_k > 0:
        warpers.append(transformers.TopKLogitsWarper(s.top_k))
    if s.top_p < 1.0:
        warpers.append(transformers.TopPLogitsWarper(s.top_p))
    return warpers


def _draw(scores: Any, generators: Sequence[torch.Generator]) -> Any:
    """Draw tokens as vLLM does: each token gets a random time, and the token with the earliest time is chosen.

    The times are exponentially distributed, and the rate of each token is its probability. Rounding differs between
    batches. Because every token has its own random number, rounding changes the result only if it swaps the two tokens
    with the earliest times. In a draw from cumulative probabilities, rounding could affect every token.
    """
    weights = scores.softmax(dim=-1)
    # On a CPU, uniform numbers and their logarithms are several times as fast as `exponential_`.
    numbers = torch.empty_like(weights)
    for row, generator in zip(numbers, generators, strict=True):
        row.uniform_(generator=generator)
    return (weights / numbers.clamp_(_LEAST, _MOST).log_().neg_()).argmax(dim=-1)


def _no_choice(best: float) -> GenerationFailed:
    if best == _NEVER:
        return GenerationFailed("the request's parameters forbid every token of the vocabulary")
    return GenerationFailed("the model's logits are not numbers")
