"""From logits to tokens, as vLLM's sampler chooses them, one sequence at a time.

The order is vLLM's: allowed tokens, bad words, bias, minimum length, penalties, then temperature, min_p, typical_p,
top_k, top_p. Log probabilities are those of the logits as the model gave them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import torch

from handlers.engines.texts import fast_tokenizer
from handlers.engines.transformers.model import TransformersModel
from handlers.errors import GenerationFailed, InvalidParameter, InvalidRequest, RequestError
from handlers.request import GenerationRequest, SamplingParameters

logger = logging.getLogger(__name__)

MAX_BAD_WORD_TOKENS = 1024
"""Of all bad words together: they are compared one by one at each token."""
_MAX_BAD_WORD_CHARACTERS = 16 * MAX_BAD_WORD_TOKENS
"""Beyond it the words are refused without being tokenized, which would take long."""
_LOWEST_TEMPERATURE = 0.01
"""Below it vLLM takes 0.01, since the quotients would overflow."""
_NUCLEI = (256, 8192)
"""So many of the most probable tokens are looked at before the whole vocabulary is sorted."""
_NEVER = -math.inf
_LEAST, _MOST = torch.finfo(torch.float32).tiny, 1.0 - 2.0**-24
"""Of a random number whose logarithm is taken: neither infinite nor 0."""


def check_request(request: GenerationRequest, model: TransformersModel) -> None:
    """Refuse what cannot be done, or would be an index beyond the model's vocabulary.

    Raises:
        InvalidParameter: it names the parameter.
    """
    s = request.sampling
    if s.constraint is not None:
        raise InvalidParameter(s.constraint.parameter, "needs the vLLM engine (option.rolling_batch=vllm)")
    if request.adapter is not None:
        raise InvalidParameter("adapter", "cannot be used: the dynamic batch serves no adapters")
    if request.priority:
        raise InvalidParameter("priority", "cannot be used: the dynamic batch serves requests in their order")
    if s.allowed_token_ids is not None and not s.allowed_token_ids:
        raise InvalidParameter("allowed_token_ids", "must not be empty")
    if request.top_tokens > model.vocabulary_size:
        raise InvalidParameter("top_n_tokens", f"must be at most {model.vocabulary_size}, got {request.top_tokens}")
    _check_ids("stop_token_ids", s.stop_token_ids, model)
    _check_ids("allowed_token_ids", s.allowed_token_ids or (), model)
    _check_ids("logit_bias", s.logit_bias or (), model)
    _check_bad_words(s.bad_words)


def _check_ids(name: str, token_ids: Collection[int], model: TransformersModel) -> None:
    wrong = next((i for i in token_ids if not 0 <= i < model.vocabulary_size), None)
    if wrong is not None:
        raise InvalidParameter(
            name, f"must hold token ids below the vocabulary's size ({model.vocabulary_size}), got {wrong}"
        )


def _check_bad_words(bad_words: Sequence[str]) -> None:
    if len(bad_words) > MAX_BAD_WORD_TOKENS:
        raise InvalidParameter("bad_words", f"must hold at most {MAX_BAD_WORD_TOKENS} words, got {len(bad_words)}")
    characters = sum(map(len, bad_words))
    if characters > _MAX_BAD_WORD_CHARACTERS:
        raise InvalidParameter(
            "bad_words", f"must have at most {_MAX_BAD_WORD_CHARACTERS} characters together, got {characters}"
        )


def check_prompt(prompt_ids: Sequence[int], model: TransformersModel) -> None:
    """Refuse a prompt with a token that the model cannot embed; a tokenizer may have more tokens than its model.

    Raises:
        InvalidRequest: it names the token id.
    """
    wrong = next((i for i in prompt_ids if not 0 <= i < model.vocabulary_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"the prompt has the token id {wrong}, which is not below the vocabulary's size of the model "
            f"({model.vocabulary_size})"
        )


async def prepare(request: GenerationRequest, prompt_ids: Sequence[int], model: TransformersModel) -> PreparedSampling:
    """Make `PreparedSampling`, in a thread where that takes more than a moment.

    Raises:
        InvalidParameter: the request asks for what cannot be done.
    """
    if request.sampling.bad_words:
        return await asyncio.to_thread(PreparedSampling, request, prompt_ids, model)
    return PreparedSampling(request, prompt_ids, model)


class PreparedSampling:
    """What the sequences of one request share; making it may take milliseconds, since bad words are tokenized.

    Raises:
        InvalidParameter: the request asks for what cannot be done.
    """

    def __init__(self, request: GenerationRequest, prompt_ids: Sequence[int], model: TransformersModel) -> None:
        check_request(request, model)
        s = request.sampling
        self.request, self.model = request, model
        self.bad_words = _bad_word_ids(s.bad_words, model.tokenizer)
        self.ending = sorted({*s.stop_token_ids, *(i for i in model.eos_token_ids if i < model.vocabulary_size)})
        """No such token before `min_tokens`."""
        self.forbidden: Any = None
        self.in_prompt: Any = None
        self.bias: Any = None
        if s.allowed_token_ids is not None:
            self.forbidden = ~self._mask(s.allowed_token_ids)
        if s.repetition_penalty != 1.0:
            self.in_prompt = self._mask(prompt_ids)
        if s.logit_bias:
            bias = torch.zeros(model.vocabulary_size)
            bias[list(s.logit_bias)] = torch.tensor(list(s.logit_bias.values()), dtype=torch.float32)
            self.bias = bias.to(model.device)

    def _mask(self, token_ids: Sequence[int]) -> Any:
        mask = torch.zeros(self.model.vocabulary_size, dtype=torch.bool)
        mask[list(token_ids)] = True
        return mask.to(self.model.device)


def _bad_word_ids(bad_words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Each word's token ids as vLLM finds them: at the beginning of a text, and after a blank where that differs."""
    fast = fast_tokenizer(tokenizer)

    def encoded(text: str) -> list[int]:
        # The wrapper around `tokenizers` costs more than the tokenizing of a word.
        encoding = fast.encode(text, add_special_tokens=False).ids if fast is not None else None
        return list(encoding if encoding is not None else tokenizer.encode(text, add_special_tokens=False))

    words: list[list[int]] = []
    for word in bad_words:
        ids = encoded(word.lstrip())
        if not ids:
            raise InvalidParameter("bad_words", f"must hold words of at least one token, got {word!r}")
        words.append(ids)
        after_blank = encoded(f" {word.lstrip()}")
        if after_blank and after_blank[0] != ids[0] and len(after_blank) == len(ids):
            words.append(after_blank)
    count = sum(map(len, words))
    if count > MAX_BAD_WORD_TOKENS:
        raise InvalidParameter("bad_words", f"must have at most {MAX_BAD_WORD_TOKENS} tokens together, got {count}")
    return words


class Choice(msgspec.Struct, gc=False):
    """The next token of a sequence."""

    token_id: int
    logprob: float | None
    """None unless the request needs it."""
    top: tuple[tuple[int, float], ...] = ()
    """Ids and log probabilities of the most probable tokens, best first."""
    rank: int | None = None
    """Place among all tokens by probability, from 1; None unless the request wants it."""


class TokenChooser:
    """Chooses the next token of one sequence; keeps the generated ids, the penalties' counts and the seed's generator.

    The random numbers come from a generator of its own, so that a seeded sequence draws the same ones in any batch; the
    sequences of one request have different ones.
    """

    def __init__(self, prepared: PreparedSampling, sequence: int = 0) -> None:
        request, s = prepared.request, prepared.request.sampling
        self._sampling, self._prepared = s, prepared
        self._ids: list[int] = []
        self.top_tokens = request.top_tokens
        ranked = request.candidates > request.sequences or (request.candidates > 1 and not request.stream)
        self.wants_logprobs = request.want_logprobs or request.top_tokens > 0 or ranked
        self.wants_ranks = request.want_ranks
        device = prepared.model.device
        self._generator = None if s.greedy else _generator(s.seed, sequence, device)
        self._seen = None if prepared.in_prompt is None else prepared.in_prompt.clone()
        counting = self._seen is not None or s.presence_penalty or s.frequency_penalty
        self._counts = torch.zeros(prepared.model.vocabulary_size, device=device) if counting else None
        self._adjusts = bool(
            prepared.bad_words
            or s.min_tokens
            or prepared.forbidden is not None
            or prepared.bias is not None
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
            if self.wants_ranks:
                choice.rank = _rank(raw, token_id)
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
        s, prepared = self._sampling, self._prepared
        logits = raw.clone()
        if prepared.forbidden is not None:
            logits.masked_fill_(prepared.forbidden, _NEVER)
        for words in prepared.bad_words:
            begin = len(words) - 1
            if begin == 0 or self._ids[-begin:] == words[:-1]:
                logits[words[-1]] = _NEVER
        if prepared.bias is not None:
            logits += prepared.bias
        if len(self._ids) < s.min_tokens:
            logits[prepared.ending] = _NEVER
        if self._seen is not None:
            punished = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
            logits = torch.where(self._seen, punished, logits)
        if self._counts is not None:
            logits -= s.frequency_penalty * self._counts
            logits -= s.presence_penalty * (self._counts > 0)
        return logits

    def _sample(self, logits: Any) -> int:
        """Draw a token as vLLM does, in a race of exponentially distributed times, whose rates are the probabilities.

        Every token has a random number of its own, so that rounding, which differs between batches, matters
        only where it changes the order of the first two; in a walk over the summed probabilities it would move all.
        """
        weights = _weights(logits, self._sampling)
        # Several times as fast on a CPU as `exponential_`.
        times = torch.empty_like(weights).uniform_(generator=self._generator).clamp_(_LEAST, _MOST).log_().neg_()
        return int((weights / times).argmax())


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
        # Nothing has changed the logits: the most probable token is the one chosen.
        rank = 1 if chooser.wants_ranks else None
        choices.append(Choice(ids[row], logprob, tops[row][: chooser.top_tokens], rank))
    return choices


def _rank(logits: Any, token_id: int) -> int:
    """Return the place by probability, from 1; of equally probable tokens all have the best."""
    return int((logits > logits[token_id]).sum()) + 1


def _no_choice(best: float) -> GenerationFailed:
    if best == _NEVER:
        return GenerationFailed("the request's parameters forbid every token of the vocabulary")
    return GenerationFailed("the model's logits are not numbers")


def _weights(logits: Any, s: SamplingParameters) -> Any:
    """Return what the tokens are drawn by, not normalized; 0 for those that are cut off."""
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
    """Keep the fewest tokens whose probabilities sum up to `mass`, most probable first; always one."""
    values, ids = _most_probable(probabilities, mass)
    count = int((values.cumsum(dim=-1) < mass).sum()) + 1
    return torch.zeros_like(probabilities).index_copy_(0, ids[:count], values[:count])


def _most_probable(probabilities: Any, mass: float) -> tuple[Any, Any]:
    """Return enough of the most probable tokens, best first, for their probabilities to sum up to `mass`."""
    for size in _NUCLEI:
        if size >= len(probabilities):
            break
        values, ids = probabilities.topk(size)
        if values.sum().item() >= mass:
            return values, ids
    values, ids = probabilities.sort(descending=True)
    return values, ids


def _typical(probabilities: Any, mass: float) -> Any:
    """Keep the tokens whose information content is nearest to the entropy, up to a mass of `mass`.

    Meister et al., "Locally Typical Sampling" (2022).
    """
    entropy = torch.special.entr(probabilities).sum()
    order = torch.argsort((-probabilities.log() - entropy).abs())
    count = int((probabilities[order].cumsum(dim=-1) < mass).sum()) + 1
    kept = order[:count]
    return torch.zeros_like(probabilities).index_copy_(0, kept, probabilities[kept])


def _generator(seed: int | None, sequence: int, device: Any) -> torch.Generator:
    generator = torch.Generator(device)
    if seed is None or seed == -1:  # vLLM takes -1 as none
        generator.seed()
    else:
        generator.manual_seed((seed + sequence) % 2**64)
    return generator
