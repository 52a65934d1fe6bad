"""Sizes the paged KV cache and the steps of transformers' continuous batching."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from transformers import ContinuousBatchingConfig

from handlers.engines.cpu_memory import machine_limits
from handlers.engines.protocol import EngineOutOfMemory, EngineStartError
from handlers.engines.transformers_model import TransformersModel, boolean_argument, integer_argument, source
from handlers.model_settings import ModelSettings

logger = logging.getLogger(__name__)

CACHE_ARGUMENTS = frozenset(
    {
        *("max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_memory_bytes", "block_size"),
        "enable_prefix_caching",
    }
)
"""The engine arguments that are read here."""

_GIB = 1 << 30
_SHARE_OF_FREE_MEMORY = 0.3
"""Of the memory that is free once the weights are loaded, for the KV cache on a CPU."""
_PAGE_TOKENS = 32
_MAX_TOP_TOKENS = 20
"""As vLLM's `max_logprobs`, and by the same option."""
_STEP_TOKENS_ON_CPU = 128
"""Small steps keep the others' next tokens coming while a long prompt is read."""
_STEP_TOKENS_ON_GPU = 2048


def batching_config(settings: ModelSettings, model: TransformersModel) -> ContinuousBatchingConfig:
    """The cache's size, tokens and requests in a step, and everything that our way of sampling rules out switched off.

    Raises:
        EngineStartError: a setting has a value that does not fit.
    """
    on_cpu = model.device.type == "cpu"
    page = integer_argument(settings, "block_size", 4) or _PAGE_TOKENS
    step = integer_argument(settings, "max_num_batched_tokens", 1)
    if step is None:
        step = _STEP_TOKENS_ON_CPU if on_cpu else _STEP_TOKENS_ON_GPU
    step = max(step, settings.rolling_batch_size)
    sharing = "enable_prefix_caching" not in settings.engine_arguments
    config = ContinuousBatchingConfig(
        page_size=page,
        max_batch_tokens=step,
        max_requests_per_batch=settings.rolling_batch_size,
        max_memory_percent=_memory_share(settings, on_cpu),
        allow_block_sharing=sharing or boolean_argument(settings, "enable_prefix_caching"),
        # Tokens are chosen in Python, between the model's pass and the next; a recorded graph would leave that out.
        use_async_batching=False,
        use_cuda_graph=False,
        max_blocks_per_request=0 if on_cpu else None,
        # It would fetch kernels from the hub; option.attn_implementation chooses.
        auto_switch_to_flash=False,
    )
    if (tokens := _cached_tokens(settings, model, step, on_cpu)) is not None:
        config.num_blocks = max(1, tokens // page)
    return config


def _memory_share(settings: ModelSettings, on_cpu: bool) -> float | None:
    text = settings.engine_arguments.get("gpu_memory_utilization")
    if on_cpu:
        return 1.0  # the number of blocks is the limit there
    if text is None:
        return None
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise EngineStartError(
            f"{source(settings, 'gpu_memory_utilization')}: {text!r} is not a number above 0 and at most 1"
        )
    return share


def _cached_tokens(settings: ModelSettings, model: TransformersModel, step: int, on_cpu: bool) -> int | None:
    """Tokens that the cache is to hold; None leaves it to transformers, which knows the GPU's memory."""
    per_token = _bytes_per_token(model)
    given = integer_argument(settings, "kv_cache_memory_bytes", 1)
    if given is not None:
        return given // per_token
    if not on_cpu:
        return None
    free = min(limit.available for limit in machine_limits())
    budget = int(free * _SHARE_OF_FREE_MEMORY)
    # Beside the cache itself each token in it costs a column of the attention mask and its copy while it is read.
    item = model.model.dtype.itemsize
    heads = model.model.config.get_text_config().num_attention_heads
    overhead = step * item + (2 * heads + 1) * _head_size(model) * item
    affordable = max(budget - step * step * item, 0) // (per_token + overhead)
    useful = settings.rolling_batch_size * model.max_model_len
    tokens = min(affordable, useful)
    logger.info(
        "KV cache: %d tokens, %.1f GiB of the %.1f GiB that are free in main memory; option.kv_cache_memory_bytes "
        "sets it by hand",
        tokens,
        tokens * per_token / _GIB,
        free / _GIB,
    )
    return int(tokens)


def _bytes_per_token(model: TransformersModel) -> int:
    config = model.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size: int = 2 * config.num_hidden_layers * heads * _head_size(model) * model.model.dtype.itemsize
    return size


def _head_size(model: TransformersModel) -> int:
    config: Any = model.model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def check_one_device(model: TransformersModel) -> None:
    """Refuse a model that is spread over several devices.

    Raises:
        EngineStartError: it names them.
    """
    places = set(map(str, (getattr(model.model, "hf_device_map", None) or {}).values()))
    if len(places) > 1:
        raise EngineStartError(
            f"option.device_map put the model on {', '.join(sorted(places))}: continuous batching keeps its KV cache "
            "on one device; option.rolling_batch=disable can use several"
        )


def fitted(model: TransformersModel, capacity: int, settings: ModelSettings) -> TransformersModel:
    """The model with a context that the KV cache can hold.

    Raises:
        EngineOutOfMemory: a longer one was asked for.
    """
    if capacity >= model.max_model_len:
        return model
    if "max_model_len" in settings.engine_arguments:
        raise EngineOutOfMemory(
            f"{source(settings, 'max_model_len')}: the KV cache holds {capacity} tokens, fewer than "
            f"{model.max_model_len}; lower it, or give the cache more memory"
        )
    logger.warning("the KV cache holds %d tokens: the context is cut to that from %d", capacity, model.max_model_len)
    return dataclasses.replace(model, max_model_len=capacity)


def max_top_tokens(settings: ModelSettings, vocabulary_size: int) -> int:
    """How many alternatives a token may carry.

    Raises:
        EngineStartError: option.max_logprobs is no number.
    """
    wanted = integer_argument(settings, "max_logprobs", -1)
    if wanted is None:
        return _MAX_TOP_TOKENS
    return vocabulary_size if wanted < 0 else min(wanted, vocabulary_size)
