"""Stands in for the package `tensorrt_llm`, which needs CUDA to be imported: its LLM API as documented for 1.2 to 1.4.

It refuses what the real classes refuse (names, types, ranges), and answers with what a test says. What it does with
end tokens, stop tokens and limits is what the real one does; it computes nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal

import pydantic
import pytest


@dataclass(frozen=True)
class End:
    """A last response without tokens."""

    reason: str


Step = Sequence[int] | Exception | End
"""Tokens of one response, or the error that it carries, or the end."""
HANG: Step = RuntimeError("never")
"""No response ever comes."""


class RequestError(RuntimeError):
    """One request has failed."""


class EngineDeadError(RuntimeError):
    """All have."""


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class CapacitySchedulerPolicy(Enum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class SchedulerConfig(_Strict):
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


class KvCacheConfig(_Strict):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = pydantic.Field(default=0.9, ge=0, le=1)
    host_cache_size: int | None = None
    dtype: str = "auto"
    tokens_per_block: int = 32


class TorchLlmArgs(_Strict):
    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    enable_chunked_prefill: bool = False
    max_batch_size: int | None = 2048
    max_input_len: int | None = 1024
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    max_num_tokens: int | None = 8192
    num_postprocess_workers: int = 0
    cuda_graph_config: dict[str, Any] | None = None
    sampler_type: Literal["TRTLLMSampler", "TorchSampler", "auto"] = "auto"
    stream_interval: int = pydantic.Field(default=1, gt=0)
    backend: Literal["pytorch"] = "pytorch"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        integers = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs")
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in integers and value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{one.name} must be an int, got {value!r}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise TypeError(f"seed is an unsigned number of 64 bits, got {self.seed}")
        if self.max_tokens < 1:
            raise ValueError(f"require max_tokens >= 1, got {self.max_tokens}")


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams, steps: Sequence[Step]) -> None:
        self._llm, self.prompt_token_ids, self.sampling_params = llm, prompt, params
        self._steps = iter(steps)
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.aborted = False
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        assert not self._llm.is_shutdown(), "the executor is gone"
        self.aborted = True

    def die(self) -> None:
        if not self._death.done():
            self._death.set_result(None)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        step = HANG if self._death.done() else next(self._steps, HANG)
        if step is HANG:
            await self._death
            raise EngineDeadError("the executor has died")
        if isinstance(step, Exception):
            raise step
        if isinstance(step, End):
            self.finished, self.outputs[0].finish_reason = True, step.reason
            return self
        for token_id in step:
            if not self.finished:
                self._take(token_id)
        return self

    def _take(self, token_id: int) -> None:
        output, params = self.outputs[0], self.sampling_params
        output.token_ids.append(token_id)
        if params.logprobs:
            output.logprobs.append(self._llm.logprobs(self.prompt_token_ids, output.token_ids, params.logprobs))
        if token_id == params.end_id and not params.ignore_eos:
            self.finished, output.finish_reason = True, "stop"
        elif token_id in (params.stop_token_ids or ()):
            self.finished, output.finish_reason, output.stop_reason = True, "stop", token_id
            if not params.include_stop_str_in_output:
                output.token_ids.pop()
        elif len(output.token_ids) >= params.max_tokens:
            self.finished, output.finish_reason = True, "length"


class _WrappedTokenizer:
    """As TensorRT-LLM wraps that of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]


class LLM:
    instances: list[LLM]
    answer: Callable[[list[int], SamplingParams], Sequence[Step]]
    """What is generated; a test sets it on the instance."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        from transformers import AutoTokenizer

        for name in kwargs:
            if name not in TorchLlmArgs.model_fields:
                raise ValueError(f"LLM got invalid argument: {name}")
        self.args = TorchLlmArgs(model=model, **kwargs)
        self.tokenizer = _WrappedTokenizer(AutoTokenizer.from_pretrained(model))
        self.results: list[RequestOutput] = []
        self._dead = self._shutdown = False
        self._executor = self  # in the real package an object of its own
        LLM.instances.append(self)

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams,
        lora_request: Any = None,
        streaming: bool = False,
    ) -> RequestOutput:
        if self.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        if len(inputs) > (self.args.max_num_tokens or 0) and not self.args.enable_chunked_prefill:
            raise ValueError(f"The sum of prompt length ({len(inputs)}) should not exceed max_num_tokens")
        assert streaming
        assert all(isinstance(token_id, int) for token_id in inputs)
        if sampling_params.end_id is None:
            sampling_params.end_id = self.tokenizer.eos_token_id
        result = RequestOutput(self, inputs, sampling_params, self.answer(inputs, sampling_params))
        self.results.append(result)
        return result

    def logprobs(self, prompt: list[int], token_ids: list[int], count: int) -> dict[int, Logprob]:
        """Of the last token: the chosen one, and others that are less likely."""
        chosen = token_ids[-1]
        others = [i for i in range(count + 1) if i != chosen][: count - 1]
        return {token_id: Logprob(-0.5 * rank, rank) for rank, token_id in enumerate([chosen, *others], 1)}

    def die(self, quietly: bool = False) -> None:
        """The executor is killed; quietly: as by versions that do not tell pending requests."""
        self._dead = True
        if not quietly:
            for result in self.results:
                result.die()

    def is_shutdown(self) -> bool:
        return self._dead or self._shutdown

    def _check_health(self) -> bool:
        """Versions before 1.3 have none."""
        return not self.is_shutdown()

    def shutdown(self) -> None:
        self._shutdown = True


def install(patch: pytest.MonkeyPatch, version: str = "1.4.0", gpus: int = 1) -> None:
    """Make `import tensorrt_llm` find this, on a machine that has GPUs."""
    import torch

    package, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    package.__spec__ = ModuleSpec("tensorrt_llm", None, is_package=True)
    package.__dict__.update(__version__=version, __path__=[], llmapi=api)
    LLM.instances = []
    for one in (LLM, SamplingParams, KvCacheConfig, SchedulerConfig, CapacitySchedulerPolicy, TorchLlmArgs):
        setattr(api, one.__name__, one)
    api.RequestError = RequestError  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "tensorrt_llm", package)
    patch.setitem(sys.modules, "tensorrt_llm.llmapi", api)
    patch.setattr(torch.cuda, "device_count", lambda: gpus)
