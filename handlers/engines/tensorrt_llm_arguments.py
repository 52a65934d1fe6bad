"""From a model's settings to the arguments of TensorRT-LLM's `LLM` (contracts/lmi.md section 2.14).

LMI's options were made for compiled engines. `LLM` runs models on PyTorch: what concerned compiling has no counterpart,
and quantized models are recognized from their checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers.engines.protocol import EngineStartError
from handlers.model_settings import ModelSettings

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_TOKENS = 16384
"""Of one step; LMI's default."""

_RENAMED = {
    "max_output_len": "max_seq_len",
    "max_model_len": "max_seq_len",
    "max_num_sequences": "max_batch_size",
    "max_num_batched_tokens": "max_num_tokens",
}
_RENAMED_KV_CACHE = {
    "kv_cache_free_gpu_mem_fraction": "free_gpu_memory_fraction",
    "enable_kv_cache_reuse": "enable_block_reuse",
    "kv_cache_dtype": "dtype",
}
_POLICIES = {"max_utilization": "MAX_UTILIZATION", "guaranteed_no_evict": "GUARANTEED_NO_EVICT"}
_OURS = frozenset({"backend", "batch_scheduler_policy", "max_logprobs"})
"""Options that are not passed on as they are."""
_WITHOUT_EFFECT = frozenset(
    {
        *("model", "revision", "trust_remote_code", "dtype", "tensor_parallel_size", "pipeline_parallel_size"),
        *("kv_cache_config", "scheduler_config"),  # set from their own options
        *("skip_tokenizer_init", "num_postprocess_workers", "postprocess_tokenizer_dir"),  # texts are made here
        # `LLM` then takes no request without beam search; beams are searched by way of log probabilities instead.
        "max_beam_width",
    }
)
_SIZES = ("max_batch_size", "max_input_len", "max_num_tokens", "max_seq_len")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What to load a model with, and what of it the engine needs to know itself."""

    llm: Mapping[str, Any]
    """Keyword arguments of `LLM`."""
    max_model_len: int
    max_input_len: int | None
    """Longest prompt; None: as long as the context allows."""
    max_batch_size: int
    max_logprobs: int | None
    sampler: str
    """`option.sampler_type`, or "auto"."""


def engine_arguments(settings: ModelSettings, api: Any, gpus: int, context: int | None) -> Arguments:
    """Translate the settings.

    `api`: the module `tensorrt_llm.llmapi`; `context`: tokens that the model was made for, if its configuration says.

    Raises:
        EngineStartError: an option has a value that cannot be; the option is named.
    """
    reader = _Options(settings, api)
    given = reader.arguments
    sizes = {name: _positive(settings, name, given.get(name), reader.source_of(name)) for name in _SIZES}
    max_model_len = sizes["max_seq_len"] or context
    if max_model_len is None:
        raise EngineStartError(f"{settings.model_id} does not say how long its context is; set option.max_model_len")
    max_batch_size = sizes["max_batch_size"] or settings.rolling_batch_size
    arguments = {
        **given,
        "model": settings.model_id,
        "revision": settings.revision,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "tensor_parallel_size": _tensor_parallel_size(settings, gpus),
        "pipeline_parallel_size": settings.pipeline_parallel_degree,
        "max_batch_size": max_batch_size,
        "max_seq_len": max_model_len,
        "max_num_tokens": sizes["max_num_tokens"] or DEFAULT_MAX_NUM_TOKENS,
        "kv_cache_config": reader.kv_cache_config(),
    }
    if "max_input_len" in api.TorchLlmArgs.model_fields:
        # Its default, 1024, is below what the model can take.
        arguments["max_input_len"] = sizes["max_input_len"] or max_model_len
    if (policy := reader.scheduler_config()) is not None:
        arguments["scheduler_config"] = policy
    return Arguments(
        llm=arguments,
        max_model_len=max_model_len,
        max_input_len=sizes["max_input_len"],
        max_batch_size=max_batch_size,
        max_logprobs=_positive(settings, "max_logprobs", _value(settings.engine_arguments.get("max_logprobs"))),
        sampler=str(given.get("sampler_type", "auto")),
    )


class _Options:
    """Sorts the engine's options into arguments of `LLM`, of its KV cache, and those that have no counterpart."""

    def __init__(self, settings: ModelSettings, api: Any) -> None:
        self._settings, self._api = settings, api
        self.arguments: dict[str, Any] = {}
        self._kv_cache: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        unknown = [name for name in settings.engine_arguments if not self._place(name)]
        _check_backend(settings)
        if unknown:
            named = ", ".join(_source(settings, name) for name in unknown)
            hint = "; a quantized checkpoint is recognized without it" if "quantization" in unknown else ""
            logger.warning("%s: no counterpart in TensorRT-LLM here, no effect%s", named, hint)

    def _place(self, name: str) -> bool:
        value = _value(self._settings.engine_arguments[name])
        if name in _OURS:
            return True
        argument = _RENAMED.get(name, name)
        if argument in self._api.TorchLlmArgs.model_fields and argument not in _WITHOUT_EFFECT:
            self._put(self.arguments, argument, name, value)
            return True
        argument = _RENAMED_KV_CACHE.get(name, name)
        if argument in self._api.KvCacheConfig.model_fields:
            self._put(self._kv_cache, argument, name, value)
            return True
        return False

    def _put(self, target: dict[str, Any], argument: str, name: str, value: Any) -> None:
        if target.setdefault(argument, value) != value:
            other, this = _source(self._settings, self._names[argument]), _source(self._settings, name)
            raise EngineStartError(f"{other} and {this} are the same option with different values: give one of them")
        self._names.setdefault(argument, name)

    def source_of(self, argument: str) -> str:
        """Where the argument was set."""
        return _source(self._settings, self._names.get(argument, argument))

    def kv_cache_config(self) -> Any:
        """The KV cache's settings as TensorRT-LLM's own type."""
        try:
            return self._api.KvCacheConfig(**self._kv_cache)
        except ValueError as error:
            sources = ", ".join(map(self.source_of, self._kv_cache))
            raise EngineStartError(f"{sources}: TensorRT-LLM refuses the KV cache's settings: {error}") from None

    def scheduler_config(self) -> Any:
        """What becomes of running requests when the KV cache is full; None: as TensorRT-LLM decides."""
        text = self._settings.engine_arguments.get("batch_scheduler_policy")
        if text is None:
            return None
        policy = _POLICIES.get(text.strip().lower())
        if policy is None:
            raise EngineStartError(
                f"{_source(self._settings, 'batch_scheduler_policy')}: {text!r} is none of {', '.join(_POLICIES)}"
            )
        policies = self._api.CapacitySchedulerPolicy
        return self._api.SchedulerConfig(capacity_scheduler_policy=getattr(policies, policy))


def _check_backend(settings: ModelSettings) -> None:
    backend = settings.engine_arguments.get("backend", "pytorch").strip().lower()
    if backend != "pytorch":
        raise EngineStartError(
            f"{_source(settings, 'backend')}: {backend!r} is not served; pytorch is, which needs no compiled engine"
        )


def _tensor_parallel_size(settings: ModelSettings, gpus: int) -> int:
    stages = settings.pipeline_parallel_degree
    degree = settings.tensor_parallel_degree
    if degree is None:
        degree = max(1, gpus // stages) if settings.tensor_parallel_max else 1
    if degree * stages > gpus:
        raise EngineStartError(
            f"option.tensor_parallel_degree ({degree}) times option.pipeline_parallel_degree ({stages}) is more than "
            f"this machine's GPUs ({gpus})"
        )
    return degree


def _positive(settings: ModelSettings, name: str, value: Any, source: str | None = None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EngineStartError(f"{source or _source(settings, name)}: {value!r} is not an integer of at least 1")
    return value


def _value(text: str | None) -> Any:
    """Numbers, switches, lists and objects are written as JSON; anything else is a string."""
    if text is None:
        return None
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        return text


def _source(settings: ModelSettings, name: str) -> str:
    return settings.engine_argument_sources.get(name, f"option.{name}")
