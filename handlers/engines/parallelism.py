"""The number of GPUs that share each layer of a model: the sizes that vLLM accepts, and the GPUs that a model needs.

All of it is arithmetic on a model's config.json, so that it is known before an engine, and vLLM itself, is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

_GIB = 1 << 30
MEMORY_SHARE = 0.92
"""Of a GPU's memory, what vLLM takes by default (`gpu_memory_utilization`)."""
_CACHE_SHARE = 0.2
"""Of what vLLM takes, what the KV cache is to have at least. With less, few sequences run together."""
_OVERHEAD_BYTES = 2 << 30
_OVERHEAD_SHARE = 0.04
"""Of a GPU's memory, for activations, CUDA graphs and the CUDA context: vLLM's batches are larger on larger GPUs."""
_VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it is shared out."""

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_WIDTHS = ("intermediate_size", "ffn_hidden_size", "n_inner", "moe_intermediate_size")


def read_config(model: Path | str) -> dict[str, Any]:
    """Return the config.json of a local directory; {} where there is none, such as for a hub id."""
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def tensor_parallel_sizes(config: Config, gpus: int) -> tuple[int, ...]:
    """Return the sizes from 1 to `gpus` among which a model with this config.json can be divided, ascending.

    They divide the attention heads, the widths of the feed-forward layers, and the vocabulary; so they do the KV heads,
    or each of those is copied to equally many GPUs. vLLM may still refuse one, as for blocks of quantized weights.
    """
    text = _text(config)
    heads, kv_heads = _first(text, _HEADS), _kv_heads(text)
    vocabulary = -(-_first(text, ("vocab_size",)) // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    shared = [heads, vocabulary, *(_first(text, (name,)) for name in _WIDTHS)]

    def accepted(size: int) -> bool:
        copied = 0 < kv_heads < size and size % kv_heads == 0
        return (copied or kv_heads % size == 0) and all(count % size == 0 for count in shared)

    return tuple(size for size in range(1, gpus + 1) if accepted(size))


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory that a model needs on each of the GPUs that share its layers.

    A KV cache is useful if it holds one sequence of the context length, without which vLLM does not start, and is at
    least a fifth of the memory that vLLM takes.
    """

    config: Config
    """The model's config.json."""
    weight_bytes: int
    """Size of all weights; 0 if unknown."""
    stages: int = 1
    """Pipeline stages."""
    memory_share: float = MEMORY_SHARE
    """Of a GPU's memory, what vLLM may take."""
    max_model_len: int | None = None
    """The longest sequence; None: the model's own context length."""
    cache_element_bytes: int = 2
    """Bytes of one number in the KV cache."""

    def fewest(self, sizes: Sequence[int], gpu_bytes: int) -> tuple[int, str]:
        """Return the first of these sizes that holds the model, or else the last, and the reason in words.

        `gpu_bytes`: total memory of the smallest GPU; 0 if unknown.
        """
        if not self.weight_bytes or not gpu_bytes:
            unknown = "the GPUs' memory" if self.weight_bytes else "the size of its weights"
            return sizes[-1], f"the most that the model allows, since {unknown} is not known"
        weights = f"the weights ({self.weight_bytes / _GIB:.1f} GiB) and a useful KV cache"
        for size in sizes:
            if self.fits(size, gpu_bytes):
                return size, f"the fewest that hold {weights}"
        return sizes[-1], f"the most that the model allows, which may be too few for {weights}"

    def fits(self, size: int, gpu_bytes: int) -> bool:
        """Tell whether so many GPUs of this memory hold the weights and a useful KV cache."""
        taken = int(gpu_bytes * self.memory_share)
        overhead = max(_OVERHEAD_BYTES, int(gpu_bytes * _OVERHEAD_SHARE))
        left = taken - overhead - self.weight_bytes // (size * self.stages)
        return left >= max(self.sequence_bytes(size), int(taken * _CACHE_SHARE))

    def sequence_bytes(self, size: int) -> int:
        """Return the bytes of KV cache of the longest sequence, on each of `size` GPUs; 0 if unknown.

        Layers with a sliding window hold that much of it, layers with a recurrent state nothing, where the config lists
        its layers.
        """
        text = _text(self.config)
        length = _first(text, _CONTEXT) if self.max_model_len is None else self.max_model_len
        if (rank := text.get("kv_lora_rank")) is not None:
            per_layer = rank + (text.get("qk_rope_head_dim") or 0)  # latent attention: the same on every GPU
        else:
            per_layer = 2 * -(-_kv_heads(text) // size) * _head_size(text)
        window = min(length, text.get("sliding_window") or text.get("attention_chunk_size") or length)
        kinds = text.get("layer_types") or ["full_attention"] * _first(text, _LAYERS)
        kept = {"sliding_attention": window, "chunked_attention": window, "linear_attention": 0, "mamba": 0}
        tokens = sum(kept.get(kind, length) for kind in kinds)
        return int(per_layer * self.cache_element_bytes * tokens) // self.stages


def _text(config: Config) -> Config:
    """Return the part of the config that is about the language model."""
    for name in _TEXT:
        if isinstance(config.get(name), Mapping):
            return _text(config[name])
    return config


def _kv_heads(text: Config) -> int:
    return _first(text, _KV_HEADS) or _first(text, _HEADS)


def _head_size(text: Config) -> int:
    return int(text.get("head_dim") or _first(text, _HIDDEN) // max(1, _first(text, _HEADS)))


def _first(part: Config, names: tuple[str, ...]) -> int:
    """Return the first whole number above 0 that one of these keys has; 0 if none has."""
    values = (part.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
