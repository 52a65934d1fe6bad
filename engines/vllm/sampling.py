"""Converts Slipway's sampling parameters to vLLM's, with checks that protect the engine process.

The module also implements locally typical sampling. TGI and lmi-dist have `typical_p`, but vLLM does not. So Slipway
has custom logits processors, which run inside vLLM's engine process. vLLM has two model runners, each with its own
interface for such processors. On a GPU, the newer runner is the default. Both processors here drop the same tokens.
They handle all rows of a step at once, without waiting for the device. The results differ only if `min_p` is also
given: the older runner applies `min_p` before the processor, and the newer runner applies it after the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as NewLogitsProcessor

from engines.errors import InvalidParameter, InvalidRequest
from engines.request import BeamSearch, GenerationRequest, SamplingParameters
from engines.tokenization import check_beams, check_token_ids

# The limits of vLLM's newer model runner. If they are exceeded, the engine dies with all its requests.
_LISTED_TOKENS = {"stop_token_ids": 100, "allowed_token_ids": 1024, "logit_bias": 1024}
MAX_BAD_WORD_TOKENS = 1024
_CHARACTERS_PER_TOKEN = 64  # A token of the bad words may have at most this many characters on average.
TYPICAL_P = "typical_p"
_PROMPT_LOGPROBS = "log probabilities of the prompt (prompt_logprobs, decoder_input_details, echo with logprobs)"


@dataclass(frozen=True, slots=True)
class SamplingTranslator:
    """Makes `SamplingParams` for one model."""

    max_model_len: int
    max_top_tokens: int
    vocabulary_size: int
    typical_refusal: str = ""  # Why `typical_p` is refused, as a sentence without its subject. "" if it is allowed.
    prompt_logprobs_refusal: str = ""  # Why log probabilities of the prompt are refused. "" if they are allowed.
    prefix_cache: bool = True  # Whether the engine has a prefix cache, which beam search needs.

    def sampling_params(
        self, request: GenerationRequest, room: int, structured_outputs: StructuredOutputsParams | None = None
    ) -> SamplingParams:
        """Return the parameters of the request's first sequence.

        Args:
            request: The request.
            room: The number of new tokens that fit into the context.
            structured_outputs: The request's constraint.

        Raises:
            InvalidRequest: vLLM would refuse the request, or the request would harm the engine.
        """
        self.check(request)
        s = request.sampling
        check_bad_texts(s.bad_words)
        typical = None if s.typical_p >= 1.0 else {TYPICAL_P: s.typical_p}
        if typical is not None and self.typical_refusal:
            raise InvalidParameter(TYPICAL_P, self.typical_refusal)
        ranked = request.candidates > request.sequences or (request.candidates > 1 and not request.stream)
        want_logprobs = request.want_logprobs or request.top_tokens > 0 or ranked
        try:
            return SamplingParams(
                max_tokens=min(s.max_tokens or room, room),
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
                extra_args=typical,
                skip_clone=True,
            )
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(str(error)) from error

    def check(self, request: GenerationRequest) -> None:
        """Check the parameters that sampling and beam search share.

        Raises:
            InvalidParameter: A token id is not in the vocabulary, there are too many token ids or alternatives, or a
                beam search has no prefix cache.
            InvalidRequest: The request wants log probabilities of the prompt, and the engine would not survive that.
        """
        s = request.sampling
        if request.want_prompt_tokens and self.prompt_logprobs_refusal:
            raise InvalidRequest(self.prompt_logprobs_refusal)
        if request.beam_search is not None:
            self._check_beam_search(request.beam_search, s)
        self.check_listed_tokens(s)
        if isinstance(request.prompt, tuple):
            check_token_ids("prompt", request.prompt, self.max_model_len, self.vocabulary_size)
        if request.top_tokens > self.max_top_tokens:
            raise InvalidParameter(
                "top_n_tokens", f"must be at most {self.max_top_tokens} (option.max_logprobs), got {request.top_tokens}"
            )

    def check_listed_tokens(self, params: SamplingParameters | SamplingParams) -> None:
        """Check the token ids in parameters of Slipway or of vLLM.

        Raises:
            InvalidParameter: A token id is not in the vocabulary, or there are too many token ids.
        """
        for name, most in _LISTED_TOKENS.items():
            token_ids = getattr(params, name) or ()
            check_token_ids(name, token_ids, most, self.vocabulary_size)
            if min(token_ids, default=0) < 0:
                raise InvalidParameter(name, "must hold no negative token ids")

    def _check_beam_search(self, beam_search: BeamSearch, sampling: SamplingParameters) -> None:
        check_beams(sampling)
        if not self.prefix_cache:  # Each step would compute every beam from its beginning.
            raise InvalidParameter(
                "num_beams", "needs the prefix cache, which is off for this model (option.enable_prefix_caching)"
            )
        if 2 * beam_search.width > self.max_top_tokens:
            raise InvalidParameter(
                "num_beams", f"must be at most {self.max_top_tokens // 2} with this model's option.max_logprobs"
            )


def check_bad_texts(words: Sequence[str]) -> None:
    """Refuse bad words that take a long time to tokenize. Call it before vLLM tokenizes them on the event loop.

    Raises:
        InvalidParameter: There are too many bad words, or their total length is too large.
    """
    most = MAX_BAD_WORD_TOKENS * _CHARACTERS_PER_TOKEN
    if len(words) > MAX_BAD_WORD_TOKENS or sum(map(len, words)) > most:
        raise InvalidParameter(
            "bad_words", f"may hold {MAX_BAD_WORD_TOKENS} texts of {most} characters together at most"
        )


def check_bad_words(params: SamplingParams) -> None:
    """Refuse bad words with more tokens than the engine has room for. Call it after vLLM has tokenized them.

    Raises:
        InvalidParameter: There are too many tokens.
    """
    count = sum(len(token_ids) for token_ids in params.bad_words_token_ids or ())
    if count > MAX_BAD_WORD_TOKENS:
        raise InvalidParameter("bad_words", f"must have at most {MAX_BAD_WORD_TOKENS} tokens together, got {count}")


def load_typical(config: VllmConfig) -> str:
    """Make the engine load the processor for `typical_p` that fits its model runner.

    Returns "", or the reason why the engine cannot load it. The reason continues a sentence that begins with the
    parameter's name.
    """
    if config.speculative_config is not None:
        return "cannot be used together with speculative decoding"
    if config.model_config.return_sampling_mask:
        return "cannot be used together with option.return_sampling_mask"
    processor = TypicalProcessor if config.use_v2_model_runner else TypicalLogitsProcessor
    own = f"{processor.__module__}:{processor.__qualname__}"
    config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), own]
    return ""


def prompt_logprobs_refusal(config: VllmConfig) -> str:
    """Return why the engine would not survive requests for log probabilities of the prompt; "" if it would.

    With adapters, `LogitsProcessorWithLoRA` passes a row for each token of the prompt to `add_lora_logits`, which
    expects a row for each sequence of the step. On a CPU, this function fails if the step has several sequences, and
    the engine process ends. On a GPU, the function changes the wrong rows. If there are more sequences than rows, it
    writes beyond the end of the rows.

    With `kv_sharing_fast_prefill`, vLLM's model runner asserts that no request asks for these log probabilities. vLLM
    itself refuses such a request only if it also asks for alternatives.
    """
    if config.lora_config is not None:
        return f"{_PROMPT_LOGPROBS} are not served with option.enable_lora=true"
    if config.cache_config.kv_sharing_fast_prefill:
        return f"{_PROMPT_LOGPROBS} are not served with option.kv_sharing_fast_prefill=true"
    return ""


def is_atypical(logits: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """Return which tokens locally typical sampling removes. `masses` has the probability mass to keep in each row.

    Locally typical sampling keeps the tokens whose information content is nearest to the distribution's entropy, up to
    this mass (Meister et al., "Locally Typical Sampling", 2022). transformers' `TypicalLogitsWarper` removes the same
    tokens.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(dim=-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    nearest, order = distance.sort(dim=-1)
    cumulative = probabilities.gather(-1, order).cumsum(dim=-1)
    last = (cumulative < masses.unsqueeze(-1)).sum(dim=-1, keepdim=True).clamp_(max=logits.shape[-1] - 1)
    return distance > nearest.gather(-1, last)


class TypicalLogitsProcessor(LogitsProcessor):
    """The processor for the older model runner, which also runs on CPUs."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._device = device
        self._wanted: dict[int, float] = {}
        self._rows = self._masses = torch.empty(0)

    def is_argmax_invariant(self) -> bool:
        """Return True. So vLLM skips the processor for greedy requests, which do not sample."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Record which rows of the batch have a `typical_p`."""
        if process_dict_updates(self._wanted, batch_update, lambda params, _, __: _mass(params)):
            self._rows = async_tensor_h2d(list(self._wanted), self._device, torch.int64)
            self._masses = async_tensor_h2d(list(self._wanted.values()), self._device, torch.float32)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Drop tokens in the rows that have a `typical_p`. The logits have been divided by the temperature."""
        if self._wanted:
            _cut(logits, self._rows, logits[self._rows], self._masses)
        return logits


class TypicalProcessor(NewLogitsProcessor):
    """The processor for the newer model runner. This runner has not divided the logits by the temperature yet."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._device = req_states.device
        self._masses = np.ones(req_states.max_num_reqs, np.float32)
        self._temperatures = np.ones(req_states.max_num_reqs, np.float32)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Set the parameters of the request in this row. A greedy request needs no processing."""
        mass = _mass(sampling_params) if sampling_params.temperature > 0 else None
        self._masses[req_idx] = 1.0 if mass is None else mass
        self._temperatures[req_idx] = sampling_params.temperature
        return mass is not None

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Drop tokens in the rows that have a `typical_p`. Without speculative decoding, each request has one row."""
        rows = np.flatnonzero(self._masses[ctx.idx_mapping_np] < 1.0)
        if rows.size:
            places = ctx.idx_mapping_np[rows]
            masses, temperatures = async_tensor_h2d(
                np.stack((self._masses[places], self._temperatures[places])), self._device
            )
            on_device = async_tensor_h2d(rows, self._device)
            _cut(logits, on_device, logits[on_device] / temperatures.unsqueeze(-1), masses)
        return logits


def _cut(logits: torch.Tensor, rows: torch.Tensor, scaled: torch.Tensor, masses: torch.Tensor) -> None:
    logits.index_copy_(0, rows, logits[rows].masked_fill(is_atypical(scaled, masses), float("-inf")))


def _mass(params: Any) -> float | None:
    value = (params.extra_args or {}).get(TYPICAL_P)
    return None if value is None or value >= 1.0 else float(value)
