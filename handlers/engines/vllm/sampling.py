"""From our sampling parameters to vLLM's, with the checks that keep its engine process safe."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from handlers.engines.texts import check_token_ids
from handlers.engines.vllm.beam_search import NEEDS_PREFIX_CACHE
from handlers.errors import InvalidParameter, InvalidRequest
from handlers.request import GenerationRequest, SamplingParameters

# What vLLM's newest model runner has room for; beyond it, it fails inside the engine and takes all requests with it.
MAX_LISTED_TOKENS = 1024
MAX_STOP_TOKENS = 100
MAX_BAD_WORD_TOKENS = 1024
TYPICAL = ("lmi-dist", "scheduler")
"""Values of `option.rolling_batch` with locally typical sampling."""
NO_TYPICAL = "needs option.rolling_batch=lmi-dist or scheduler"
NO_PROMPT_LOGPROBS = (
    "log probabilities of the prompt (prompt_logprobs, decoder_input_details, echo with logprobs) are not served on a "
    "CPU with option.enable_lora=true"
)


@dataclass(frozen=True, slots=True)
class SamplingTranslator:
    """Makes `SamplingParams` for one model."""

    max_model_len: int
    max_top_tokens: int
    vocabulary_size: int
    typical_refusal: str = ""
    """Why `typical_p` is refused, after its name; "" if it is not."""
    prompt_logprobs: bool = True
    """The engine survives them; see `has_prompt_logprobs`."""
    prefix_cache: bool = True
    """Without it there is no beam search."""

    def sampling_params(
        self, request: GenerationRequest, prompt_length: int, structured_outputs: StructuredOutputsParams | None = None
    ) -> SamplingParams:
        """What one sequence of the request asks of vLLM; `structured_outputs`: its constraint.

        Raises:
            InvalidRequest: vLLM would refuse it, or it would harm the engine.
        """
        self.check(request)
        s = request.sampling
        room = self.max_model_len - prompt_length
        ranked = request.candidates > request.sequences or (request.candidates > 1 and not request.stream)
        want_logprobs = request.want_logprobs or request.top_tokens > 0 or ranked
        try:
            return SamplingParams(
                max_tokens=room if s.max_tokens is None else min(s.max_tokens, room),
                min_tokens=min(s.min_tokens, room),
                temperature=s.temperature,
                top_k=min(s.top_k, self.vocabulary_size),
                top_p=s.top_p,
                min_p=s.min_p,
                repetition_penalty=s.repetition_penalty,
                presence_penalty=s.presence_penalty,
                frequency_penalty=s.frequency_penalty,
                seed=s.seed,
                stop=list(s.stop),
                stop_token_ids=list(s.stop_token_ids),
                include_stop_str_in_output=s.include_stop_str_in_output,
                ignore_eos=s.ignore_eos,
                skip_special_tokens=s.skip_special_tokens,
                spaces_between_special_tokens=s.spaces_between_special_tokens,
                bad_words=list(s.bad_words),
                logit_bias=dict(s.logit_bias) if s.logit_bias else None,
                allowed_token_ids=list(s.allowed_token_ids) if s.allowed_token_ids is not None else None,
                logprobs=request.top_tokens if want_logprobs else None,
                prompt_logprobs=0 if request.want_prompt_tokens else None,
                structured_outputs=structured_outputs,
                output_kind=RequestOutputKind.DELTA,
                extra_args=self._extra_args(s),
                skip_clone=True,
            )
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(str(error)) from error

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidParameter for a token id that the vocabulary does not have, or too many of them.

        Raises InvalidRequest where log probabilities of the prompt are asked for and the engine would die of them, and
        for a beam search without a prefix cache.
        """
        s = request.sampling
        if request.want_prompt_tokens and not self.prompt_logprobs:
            raise InvalidRequest(NO_PROMPT_LOGPROBS)
        if request.beam_search is not None and not self.prefix_cache:
            raise InvalidParameter("num_beams", NEEDS_PREFIX_CACHE)
        check_token_ids("stop_token_ids", s.stop_token_ids, MAX_STOP_TOKENS, self.vocabulary_size)
        check_token_ids("allowed_token_ids", s.allowed_token_ids or (), MAX_LISTED_TOKENS, self.vocabulary_size)
        check_token_ids("logit_bias", s.logit_bias or (), MAX_LISTED_TOKENS, self.vocabulary_size)
        if isinstance(request.prompt, tuple):
            check_token_ids("prompt", request.prompt, self.max_model_len, self.vocabulary_size)
        if request.top_tokens > self.max_top_tokens:
            raise InvalidParameter(
                "top_n_tokens", f"must be at most {self.max_top_tokens} (option.max_logprobs), got {request.top_tokens}"
            )

    def _extra_args(self, sampling: SamplingParameters) -> dict[str, Any] | None:
        if sampling.typical_p >= 1.0:
            return None
        if self.typical_refusal:
            raise InvalidParameter("typical_p", self.typical_refusal)
        return {"typical_p": sampling.typical_p}


def sibling(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of a further sequence of the same request; a seed gives each its own."""
    further = copy.copy(params)
    if params.seed is not None:
        further.seed = (params.seed + index + 2**63) % 2**64 - 2**63
    return further


def check_bad_words(params: SamplingParams) -> None:
    """Refuse bad words of more tokens than the engine has room for; to be called once vLLM has tokenized them.

    Raises:
        InvalidParameter: there are too many.
    """
    count = sum(len(token_ids) for token_ids in params.bad_words_token_ids or ())
    if count > MAX_BAD_WORD_TOKENS:
        raise InvalidParameter("bad_words", f"must have at most {MAX_BAD_WORD_TOKENS} tokens together, got {count}")
