"""What a request asks of the sampler: checked, and made ready once for all its sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import torch

from handlers.engines.model_texts import fast_tokenizer
from handlers.engines.transformers_model import TransformersModel
from handlers.errors import InvalidParameter, InvalidRequest
from handlers.request import GenerationRequest

MAX_BAD_WORD_TOKENS = 1024
"""Of all bad words together: they are compared one by one at each token."""
_MAX_BAD_WORD_CHARACTERS = 16 * MAX_BAD_WORD_TOKENS
"""Beyond it the words are refused without being tokenized, which would take long."""


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
        self.forbidden = self._forbidden_mask()
        self.bias = self._bias_vector()
        self.in_prompt = self._prompt_mask(prompt_ids)
        """None unless there is a repetition penalty."""

    def _forbidden_mask(self) -> Any:
        allowed = self.request.sampling.allowed_token_ids
        if allowed is None:
            return None
        mask = torch.ones(self.model.vocabulary_size, dtype=torch.bool)
        mask[list(allowed)] = False
        return mask.to(self.model.device)

    def _bias_vector(self) -> Any:
        biases = self.request.sampling.logit_bias
        if not biases:
            return None
        bias = torch.zeros(self.model.vocabulary_size)
        bias[list(biases)] = torch.tensor(list(biases.values()), dtype=torch.float32)
        return bias.to(self.model.device)

    def _prompt_mask(self, prompt_ids: Sequence[int]) -> Any:
        if self.request.sampling.repetition_penalty == 1.0:
            return None
        mask = torch.zeros(self.model.vocabulary_size, dtype=torch.bool)
        mask[list(prompt_ids)] = True
        return mask.to(self.model.device)


async def prepare(request: GenerationRequest, prompt_ids: Sequence[int], model: TransformersModel) -> PreparedSampling:
    """Make `PreparedSampling`, in a thread where that takes more than a moment.

    Raises:
        InvalidParameter: the request asks for what cannot be done.
    """
    if request.sampling.bad_words:
        return await asyncio.to_thread(PreparedSampling, request, prompt_ids, model)
    return PreparedSampling(request, prompt_ids, model)


def _check_bad_words(bad_words: Sequence[str]) -> None:
    if len(bad_words) > MAX_BAD_WORD_TOKENS:
        raise InvalidParameter("bad_words", f"must hold at most {MAX_BAD_WORD_TOKENS} words, got {len(bad_words)}")
    characters = sum(map(len, bad_words))
    if characters > _MAX_BAD_WORD_CHARACTERS:
        raise InvalidParameter(
            "bad_words", f"must have at most {_MAX_BAD_WORD_CHARACTERS} characters together, got {characters}"
        )


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


def _check_ids(name: str, token_ids: Collection[int], model: TransformersModel) -> None:
    wrong = next((i for i in token_ids if not 0 <= i < model.vocabulary_size), None)
    if wrong is not None:
        raise InvalidParameter(
            name, f"must hold token ids below the vocabulary's size ({model.vocabulary_size}), got {wrong}"
        )
