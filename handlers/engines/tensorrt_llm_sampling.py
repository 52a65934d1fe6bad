"""From our sampling parameters to TensorRT-LLM's, and what of them it cannot do.

TensorRT-LLM takes parameters that its sampler then ignores without a word; those are refused here. Which they are
depends on the sampler: that of PyTorch (`TorchSampler`, the usual one) applies penalties, bad words and a request's own
seed since version 1.4, the older one (`TRTLLMSampler`, gone since 1.4) always, but it knows the probability of the
chosen token alone.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from handlers.engines.token_ids import check_token_ids
from handlers.errors import InvalidParameter, InvalidRequest
from handlers.request import GenerationRequest, SamplingParameters

OLD_SAMPLER = "TRTLLMSampler"
FULL_TORCH_SAMPLER = (1, 4)
"""The first version whose usual sampler applies everything."""
DEFAULT_MAX_LOGPROBS = 20
MAX_LISTED_TOKENS = 1024
MAX_STOP_TOKENS = 100
_SEEDS = 2**63


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the sampler in use does."""

    history: bool
    """It applies penalties, bad words and seeds."""
    max_top_tokens: int
    """How many alternatives it gives for a token."""


def abilities(version: tuple[int, ...], sampler: str, max_logprobs: int | None) -> Abilities:
    """Of a version of TensorRT-LLM with a given `sampler_type`."""
    old = sampler == OLD_SAMPLER
    return Abilities(
        history=old or version >= FULL_TORCH_SAMPLER,
        max_top_tokens=0 if old else max_logprobs or DEFAULT_MAX_LOGPROBS,
    )


@dataclass(frozen=True, slots=True)
class SamplingTranslator:
    """Makes `SamplingParams` for one model."""

    make: Any
    """TensorRT-LLM's class."""
    max_model_len: int
    vocabulary_size: int
    abilities: Abilities
    further_eos_token_ids: tuple[int, ...]
    """The model's end tokens beside that of its tokenizer, which is the only one that TensorRT-LLM knows of itself."""

    def sampling_params(self, request: GenerationRequest, prompt_length: int, sequence: int = 0) -> Any:
        """What one sequence of the request asks of TensorRT-LLM.

        Texts and stop strings are made and looked for here, so they do not appear in it.

        Raises:
            InvalidRequest: TensorRT-LLM would refuse it, or cannot do it.
        """
        self.check(request)
        s = request.sampling
        room = self.max_model_len - prompt_length
        ranked = request.candidates > request.sequences or (request.candidates > 1 and not request.stream)
        want_logprobs = request.want_logprobs or request.top_tokens > 0 or ranked
        stop_ids = s.stop_token_ids if s.ignore_eos else (*s.stop_token_ids, *self.further_eos_token_ids)
        try:
            return self.make(
                max_tokens=room if s.max_tokens is None else min(s.max_tokens, room),
                min_tokens=min(s.min_tokens, room) or None,
                stop_token_ids=list(stop_ids) or None,
                # Otherwise a stop token is taken away from the tokens again, some of which have been sent by then.
                include_stop_str_in_output=True,
                ignore_eos=s.ignore_eos,
                bad=_spellings(s.bad_words) or None,
                repetition_penalty=_unless(s.repetition_penalty, 1.0),
                presence_penalty=_unless(s.presence_penalty, 0.0),
                frequency_penalty=_unless(s.frequency_penalty, 0.0),
                # At least 1: 0 switches them off.
                logprobs=max(request.top_tokens, 1) if want_logprobs else None,
                embedding_bias=self._bias(s),
                detokenize=False,
                **self._choice(s, sequence),
            )
        except (ValueError, TypeError) as error:
            raise InvalidRequest(str(error)) from error

    def check(self, request: GenerationRequest) -> None:
        """Refuse what TensorRT-LLM cannot do, and token ids that the model does not have.

        Raises:
            InvalidRequest: naming what and why.
        """
        s = request.sampling
        if s.constraint is not None:
            raise InvalidParameter(s.constraint.parameter, "needs the vLLM engine (option.rolling_batch=vllm)")
        check_token_ids("stop_token_ids", s.stop_token_ids, MAX_STOP_TOKENS, self.vocabulary_size)
        check_token_ids("allowed_token_ids", s.allowed_token_ids or (), MAX_LISTED_TOKENS, self.vocabulary_size)
        check_token_ids("logit_bias", s.logit_bias or (), MAX_LISTED_TOKENS, self.vocabulary_size)
        if isinstance(request.prompt, tuple):
            check_token_ids("prompt", request.prompt, self.max_model_len, self.vocabulary_size)
        if s.typical_p < 1.0:
            raise InvalidParameter(
                "typical_p", "needs option.rolling_batch=lmi-dist or scheduler: TensorRT-LLM has none"
            )
        if request.adapter is not None:
            raise InvalidRequest("adapters are not served with option.rolling_batch=trtllm")
        if request.priority:
            raise InvalidParameter("priority", "must be 0: TensorRT-LLM takes requests in their order")
        most = self.abilities.max_top_tokens
        if request.top_tokens > most:
            raise InvalidParameter(
                "top_n_tokens", f"must be at most {most} (option.max_logprobs), got {request.top_tokens}"
            )
        if s.min_tokens > 1 and s.stop_token_ids:
            raise InvalidParameter("min_tokens", "cannot be had together with `stop_token_ids` on TensorRT-LLM")
        self._check_history(s)

    def _check_history(self, s: SamplingParameters) -> None:
        if self.abilities.history:
            return
        wanted = {
            "repetition_penalty": s.repetition_penalty != 1.0,
            "presence_penalty": s.presence_penalty != 0.0,
            "frequency_penalty": s.frequency_penalty != 0.0,
            "bad_words": bool(s.bad_words),
            "seed": s.seed is not None and not s.greedy,
        }
        for name, asked in wanted.items():
            if asked:
                raise InvalidParameter(
                    name, f"is ignored by this version of TensorRT-LLM; option.sampler_type={OLD_SAMPLER} applies it"
                )

    def _choice(self, s: SamplingParameters, sequence: int) -> dict[str, Any]:
        if s.greedy:
            return {"top_k": 1}
        # All of them said: the samplers differ in what they take for one that is absent.
        return {
            "temperature": s.temperature,
            "top_k": min(s.top_k, self.vocabulary_size),
            "top_p": s.top_p,
            "min_p": _unless(s.min_p, 0.0),
            # Without a seed every request would get the same one, and the sequences of one request the same text.
            "seed": random.getrandbits(63) if s.seed is None else (s.seed + sequence) % _SEEDS,
        }

    def _bias(self, s: SamplingParameters) -> Any:
        """What is added to the logits; None where nothing is."""
        if not s.logit_bias and s.allowed_token_ids is None:
            return None
        import torch

        bias = torch.zeros(self.vocabulary_size, dtype=torch.float32)
        if s.allowed_token_ids is not None:
            bias.fill_(float("-inf"))
            bias[list(s.allowed_token_ids)] = 0.0
        for token_id, value in (s.logit_bias or {}).items():
            bias[token_id] += value
        return bias


def _unless(value: float, neutral: float) -> float | None:
    return None if value == neutral else value


def _spellings(words: Collection[str]) -> list[str]:
    """Each word as it begins a text and as it follows a blank, which are different tokens."""
    return list(dict.fromkeys(spelling for word in words for spelling in (word, f" {word.lstrip()}")))
