"""Caches of vLLM's that outlive a model and hold its tokenizers, tens of megabytes for each time one is loaded.

Written for vLLM 0.32. They find again what is loaded from the same place, and whether a chat template takes an
argument; a model that goes on fills them anew. tests/live/test_vllm_seam.py looks for what a model leaves behind.
"""

from __future__ import annotations

from typing import Any

from vllm.tokenizers import registry
from vllm.transformers_utils import processor
from vllm.utils import func_utils

from handlers.engines.protocol import EngineStartError


def _cache(module: Any, name: str) -> Any:
    function = getattr(module, name, None)
    if not hasattr(function, "cache_clear"):
        raise EngineStartError(f"this vLLM is not one that Slipway knows: {module.__name__}.{name} is no cache")
    return function


_CACHES = (
    _cache(registry, "cached_get_tokenizer"),
    _cache(processor, "cached_get_processor"),
    _cache(func_utils, "_supports_kw"),
)


def forget_tokenizers() -> None:
    """Let go of the tokenizers of models that are gone."""
    for cache in _CACHES:
        cache.cache_clear()
