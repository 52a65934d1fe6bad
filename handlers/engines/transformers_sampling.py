"""Chooses tokens from logits as vLLM's sampler does, one sequence at a time.

The order is vLLM's: allowed tokens, bad words, bias, minimum length, penalties, then temperature, min_p, typical_p,
top_k, top_p. Log probabilities are those of the logits as the model gave them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import torch

from handlers.engines.transformers_model import TransformersModel
from handlers.errors import GenerationFailed, InvalidParameter, RequestError
from handlers.request import GenerationRequest, SamplingParameters

logger = logging.getLogger(__name__)

MAX_BAD_WORD_TOKENS = 1024
"""Of all bad words together: they are compared one by one at each token."""
_LOWEST_TEMPERATURE = 0.01
"""Below it vLLM takes 0.01, since the quotients would overflow."""
_NUCLEUS = 256
"""So many of the most probable tokens are looked at before the whole vocabulary is sorted."""
_NEVER = -math.inf


class Choice(msgspec.Struct, gc=False):
    """The next token of a sequence."""

    token_id: int
    logprob: float | None
    """None unless the request needs it."""
    top: tuple[tuple[int, float], ...] = ()
    """Ids and log probabilities of the most probable tokens, best first."""


class TokenChooser:
    """Chooses the next token of one sequence; keeps the generated ids, the penalties' counts and the seed's generator.

    The random numbers come from a generator of its own, so that a seeded sequence is the same in any batch; the
    sequences of one request have different ones.

    Raises:
        InvalidParameter: the request asks for what cannot be done.
    """

    def __init__(
        self, request: GenerationRequest, prompt_ids: Sequence[int], model: TransformersModel, sequence: int = 0
    ) -> None:
        check_request(request, model)
        self._sampling = request.sampling
        self._model = model
        self._ids: list[int] = []
        self.top_tokens = request.top_tokens
        ranked = request.candidates > request.sequences or (request.candidates > 1 and not request.stream)
        self.wants_logprobs = request.want_logprobs or request.top_tokens > 0 or ranked
        self._generator = None if self._sampling.greedy else _generator(self._sampling.seed, sequence)
        self._bad_words = _bad_word_ids(self._sampling.bad_words, model.tokenizer)
        self._device = model.device
        self._ending = sorted({*self._sampling.stop_token_ids, *model.eos_token_ids})
        self._forbidden = self._forbidden_mask()
        self._bias = self._bias_vector()
        self._seen, self._counts = self._penalty_state(prompt_ids)
        self._adjusts = bool(
            self._bad_words
            or self._sampling.min_tokens
            or self._forbidden is not None
            or self._bias is not None
            or self._counts is not None
        )

    @property
    def plain(self) -> bool:
        """The choice is the most probable token and nothing else, so that many rows can be chosen at once."""
        return self._generator is None and not self._adjusts

    def choose(self, logits: Any) -> Choice:
        """Choose from the model's logits for the next place, a tensor of shape [vocabulary] of any float type.

        Raises:
            GenerationFailed: the logits are no numbers, or the parameters forbid every token.
        """
        raw = logits.float()
        adjusted = self._adjusted(raw) if self._adjusts else raw
        best, best_id = (value.item() for value in adjusted.max(dim=-1))
        if not math.isfinite(best):
            raise _no_choice(best)
        token_id = int(best_id) if self._generator is None else self._sample(adjusted)
        choice = Choice(token_id, None)
        if self.wants_logprobs:
            total = raw.logsumexp(dim=-1)
            choice.logprob = (raw[token_id] - total).item()
            choice.top = self._top(raw, total)
        self.remember(token_id)
        return choice

    def remember(self, token_id: int) -> None:
        """Take note of a token that was chosen."""
        self._ids.append(token_id)
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._seen is not None:
            self._seen[token_id] = True

    def _top(self, raw: Any, total: Any) -> tuple[tuple[int, float], ...]:
        if not self.top_tokens:
            return ()
        values, ids = raw.topk(self.top_tokens)
        return tuple(zip(ids.tolist(), (values - total).tolist(), strict=True))

    def _adjusted(self, raw: Any) -> Any:
        s = self._sampling
        logits = raw.clone()
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, _NEVER)
        for words in self._bad_words:
            begin = len(words) - 1
            if begin == 0 or self._ids[-begin:] == words[:-1]:
                logits[words[-1]] = _NEVER
        if self._bias is not None:
            logits += self._bias
        if len(self._ids) < s.min_tokens:
            logits[self._ending] = _NEVER
        if self._seen is not None:
            punished = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
            logits = torch.where(self._seen, punished, logits)
        if self._counts is not None:
            logits -= s.frequency_penalty * self._counts
            logits -= s.presence_penalty * (self._counts > 0)
        return logits

    def _sample(self, logits: Any) -> int:
        weights = _weights(logits, self._sampling)
        # In the order of the ids, not of the probabilities: rounding that differs between batches hardly moves it.
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        drawn = torch.rand((), generator=self._generator, dtype=torch.float64).item() * cumulative[-1].item()
        index = int((cumulative <= drawn).sum())
        return index if index < len(weights) else int(weights.argmax())

    def _forbidden_mask(self) -> Any:
        allowed = self._sampling.allowed_token_ids
        if allowed is None:
            return None
        mask = torch.ones(self._model.vocabulary_size, dtype=torch.bool)
        mask[list(allowed)] = False
        return mask.to(self._device)

    def _bias_vector(self) -> Any:
        if not self._sampling.logit_bias:
            return None
        bias = torch.zeros(self._model.vocabulary_size)
        for token_id, value in self._sampling.logit_bias.items():
            bias[token_id] = value
        return bias.to(self._device)

    def _penalty_state(self, prompt_ids: Sequence[int]) -> tuple[Any, Any]:
        s, size = self._sampling, self._model.vocabulary_size
        seen = counts = None
        if s.repetition_penalty != 1.0:
            seen = torch.zeros(size, dtype=torch.bool)
            seen[list(prompt_ids)] = True
            seen = seen.to(self._device)
        if seen is not None or s.presence_penalty or s.frequency_penalty:
            counts = torch.zeros(size, device=self._device)
        return seen, counts


def check_request(request: GenerationRequest, model: TransformersModel) -> None:
    """Refuse what cannot be done, or would be an index beyond the model's vocabulary.

    Raises:
        InvalidParameter: it names the parameter.
    """
    s = request.sampling
    if request.adapter is not None:
        raise InvalidParameter("adapter", "cannot be used: the transformers engines serve no adapters")
    if request.priority:
        raise InvalidParameter("priority", "cannot be used: the transformers engines serve requests in their order")
    if s.allowed_token_ids is not None and not s.allowed_token_ids:
        raise InvalidParameter("allowed_token_ids", "must not be empty")
    if request.top_tokens > model.vocabulary_size:
        raise InvalidParameter("top_n_tokens", f"must be at most {model.vocabulary_size}, got {request.top_tokens}")
    _check_ids("stop_token_ids", s.stop_token_ids, model)
    _check_ids("allowed_token_ids", s.allowed_token_ids or (), model)
    _check_ids("logit_bias", s.logit_bias or (), model)
    if isinstance(request.prompt, tuple):
        _check_ids("prompt", request.prompt, model)


def choose_rows(choosers: Sequence[TokenChooser], logits: Any) -> list[Choice | RequestError]:
    """Choose for each sequence from its row of `logits`, of shape [sequences, vocabulary].

    One sequence's failure is its own: it stands in the place of its choice.
    """
    choices: list[Choice | RequestError] = [GenerationFailed("no token was chosen")] * len(choosers)
    plain = [row for row, chooser in enumerate(choosers) if chooser.plain]
    if plain:
        some = logits if len(plain) == len(choosers) else logits[plain]
        for row, choice in zip(plain, _choose_plain([choosers[row] for row in plain], some.float()), strict=True):
            choices[row] = choice
    for row, chooser in enumerate(choosers):
        if not chooser.plain:
            choices[row] = _choose_one(chooser, logits[row])
    return choices


def _choose_one(chooser: TokenChooser, logits: Any) -> Choice | RequestError:
    try:
        return chooser.choose(logits)
    except RequestError as error:
        return error
    except Exception:
        # Beyond this lies the engine's loop, with every other request in it.
        logger.exception("internal error while choosing a token")
        return GenerationFailed("internal error while choosing a token")


def _choose_plain(choosers: Sequence[TokenChooser], raw: Any) -> list[Choice | RequestError]:
    best, best_ids = raw.max(dim=-1)
    values, ids = best.tolist(), best_ids.tolist()
    logprobs = [None] * len(ids)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(ids)
    if any(chooser.wants_logprobs for chooser in choosers):
        totals = raw.logsumexp(dim=-1)
        logprobs = (best - totals).tolist()
        if most := max(chooser.top_tokens for chooser in choosers):
            top_values, top_ids = raw.topk(most, dim=-1)
            pairs = zip(top_ids.tolist(), (top_values - totals[:, None]).tolist(), strict=True)
            tops = [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
    choices: list[Choice | RequestError] = []
    for row, chooser in enumerate(choosers):
        if not math.isfinite(values[row]):
            choices.append(_no_choice(values[row]))
            continue
        chooser.remember(ids[row])
        logprob = logprobs[row] if chooser.wants_logprobs else None
        choices.append(Choice(ids[row], logprob, tops[row][: chooser.top_tokens]))
    return choices


def _no_choice(best: float) -> GenerationFailed:
    if best == _NEVER:
        return GenerationFailed("the request's parameters forbid every token of the vocabulary")
    return GenerationFailed("the model's logits are not numbers")


def _weights(logits: Any, s: SamplingParameters) -> Any:
    """What the tokens are drawn by, not normalized; 0 for those that are cut off."""
    weights = (logits / max(s.temperature, _LOWEST_TEMPERATURE)).softmax(dim=-1)
    if s.min_p > 0.0:
        weights = weights.masked_fill(weights < s.min_p * weights.max(), 0.0)
    if s.typical_p < 1.0:
        weights = _typical(weights / weights.sum(), s.typical_p)
    if 0 < s.top_k < len(weights):
        weights = weights.masked_fill(weights < weights.topk(s.top_k).values[-1], 0.0)
    if s.top_p < 1.0:
        weights = _nucleus(weights / weights.sum(), s.top_p)
    return weights


def _nucleus(probabilities: Any, mass: float) -> Any:
    """The fewest tokens whose probabilities sum up to `mass`, most probable first; always one."""
    size = len(probabilities)
    values, ids = probabilities.topk(min(_NUCLEUS, size))
    if len(values) < size and values.sum().item() < mass:
        values, ids = probabilities.sort(descending=True)
    count = int((values.cumsum(dim=-1) < mass).sum()) + 1
    return torch.zeros_like(probabilities).index_copy_(0, ids[:count], values[:count])


def _typical(probabilities: Any, mass: float) -> Any:
    """The tokens whose information content is nearest to the entropy, up to a mass of `mass`.

    Meister et al., "Locally Typical Sampling" (2022).
    """
    entropy = torch.special.entr(probabilities).sum()
    order = torch.argsort((-probabilities.log() - entropy).abs())
    count = int((probabilities[order].cumsum(dim=-1) < mass).sum()) + 1
    kept = order[:count]
    return torch.zeros_like(probabilities).index_copy_(0, kept, probabilities[kept])


def _generator(seed: int | None, sequence: int) -> torch.Generator:
    generator = torch.Generator()
    if seed is None or seed == -1:  # vLLM takes -1 as none
        generator.seed()
    else:
        generator.manual_seed((seed + sequence) % 2**64)
    return generator


def _bad_word_ids(bad_words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Each word's token ids as vLLM finds them: at the beginning of a text, and after a blank where that differs."""
    words: list[list[int]] = []
    for word in bad_words:
        ids = list(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not ids:
            raise InvalidParameter("bad_words", f"must hold words of at least one token, got {word!r}")
        words.append(ids)
        after_blank = list(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if after_blank and after_blank[0] != ids[0] and len(after_blank) == len(ids):
            words.append(after_blank)
    count = sum(map(len, words))
    if count > MAX_BAD_WORD_TOKENS:
        raise InvalidParameter("bad_words", f"must have at most {MAX_BAD_WORD_TOKENS} tokens together, got {count}")
    return words


def _check_ids(name: str, token_ids: Collection[int], model: TransformersModel) -> None:
    wrong = next((i for i in token_ids if not 0 <= i < model.vocabulary_size), None)
    if wrong is not None:
        raise InvalidParameter(
            name, f"must hold token ids below the vocabulary's size ({model.vocabulary_size}), got {wrong}"
        )
