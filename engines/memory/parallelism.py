"""The GPUs of a model: how many share each layer, how many the model needs, and how many copies of the model fit.

The numbers are computed from the model's files. So they are known before an engine starts, and before vLLM is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines.settings.parsers import TRUE

Config = Mapping[str, Any]

_GIB = 1 << 30
MEMORY_SHARE = 0.92  # The share of a GPU's memory that vLLM uses by default (`gpu_memory_utilization`).
# The smallest useful KV cache, as a share of the memory that vLLM uses. With a smaller cache, few sequences run
# together.
_CACHE_SHARE = 0.2
# The memory for activations, CUDA graphs and the CUDA context is the larger of this size and this share of a GPU's
# memory. A fixed size alone is not enough, because vLLM's batches are larger on larger GPUs.
_OVERHEAD_BYTES = 2 << 30
_OVERHEAD_SHARE = 0.04
_VOCABULARY_PADDING = 64  # vLLM pads the vocabulary to a multiple of this size, and divides the result among the GPUs.
# If blocks of the experts' FP8 scales straddle two GPUs, vLLM splits them into blocks of at least this size.
_LEAST_REFINED_BLOCK = 32

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_VISION = ("vision_config", "vit_config")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_WIDTHS = ("intermediate_size", "ffn_hidden_size", "n_inner", "moe_intermediate_size", "expert_dim")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_STATE_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "linear_num_key_heads", "linear_num_value_heads")
_STATE_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
_WINDOWED = frozenset({"sliding_attention", "chunked_attention"})
# Kinds of layers that keep a state of fixed size for each sequence, or no state.
_WITHOUT_CACHE = frozenset({"linear_attention", "mamba", "recurrent", "conv", "moe", "mlp"})
# In these model families, config.json does not list the kinds of layers. The number N means that one in N layers sees
# the whole context.
_SLIDING_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}


@dataclass(frozen=True, slots=True)
class Layout:
    """How an engine uses its GPUs, apart from tensor parallelism. The values are as in vLLM's ParallelConfig."""

    stages: int = 1  # The number of pipeline stages.
    # The number of GPUs that share a prompt's prefill. Each has a copy of all weights except the experts.
    context: int = 1
    replicas: int = 1  # The number of data-parallel replicas, including those on other machines.
    replicas_here: int = 1
    nodes: int = 1  # The number of machines. Each has the same number of the engine's GPUs.

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Layout:
        """Read vLLM's engine arguments, which are numbers or texts. Missing arguments have vLLM's defaults."""
        replicas = _size(arguments, "data_parallel_size")
        external = arguments.get("data_parallel_rank") is not None
        return cls(
            stages=_size(arguments, "pipeline_parallel_size"),
            context=_size(arguments, "prefill_context_parallel_size"),
            replicas=replicas,
            replicas_here=1 if external else _size(arguments, "data_parallel_size_local", replicas),
            nodes=_size(arguments, "nnodes"),
        )

    @property
    def expert_ranks(self) -> int:
        """The number of processes that share a layer's experts, divided by the number that share its other weights."""
        return self.context * self.replicas

    def gpus(self, size: int) -> int:
        """Return how many GPUs of this machine the engine uses if `size` GPUs share each layer."""
        each = size * self.stages * self.context
        return each * self.replicas_here if self.nodes == 1 else -(-each * self.replicas // self.nodes)

    def most(self, gpus: int) -> int:
        """Return how many GPUs can share each layer if every machine has `gpus` GPUs. The result is at least 1."""
        return max(gpus * self.nodes // (self.gpus(1) if self.nodes == 1 else self.stages * self.expert_ranks), 1)


def _size(arguments: Mapping[str, Any], name: str, default: int = 1) -> int:
    text = str(arguments.get(name) or "").strip()
    return int(text) if text.isdecimal() and int(text) else default


@dataclass(frozen=True, slots=True)
class Weights:
    """The sizes of weights, in bytes. 0 if a size is unknown."""

    total: int  # The whole model.
    experts: int = 0  # The part of the model that replicas divide among themselves.
    draft: int = 0  # The draft model, which is on the last pipeline stage.

    def each(self, size: int, layout: Layout) -> int:
        """Return the bytes of weights on the fullest GPU if `size` GPUs share each layer."""
        ranks = size * layout.stages
        everywhere = -(-(self.total - self.experts) // ranks)
        return everywhere - (-self.experts // (ranks * layout.expert_ranks)) - (-self.draft // size)


def copies_that_fit(gpus: int, per_copy: int, most: int | None) -> int:
    """Return how many copies fit on this number of GPUs. The result is at least 1, even if there are too few GPUs.

    Args:
        gpus: The number of GPUs that the model may use.
        per_copy: The number of GPUs that each copy uses.
        most: The limit on copies. None: no limit.
    """
    fit = max(gpus // per_copy, 1)
    return fit if most is None else min(fit, most)


def _is_above_one(value: Any) -> bool:
    text = str(value).strip()
    return text.isdecimal() and int(text) > 1


def _is_given(value: Any) -> bool:
    return value not in (None, "", [])


def _is_elsewhere(value: Any) -> bool:
    """Return True for an executor that runs processes on several machines, unlike vLLM's `mp` and `uni`."""
    return bool(value) and str(value).strip() not in ("mp", "uni")


def _is_on(value: Any) -> bool:
    return str(value).strip().lower() in TRUE


# Engine arguments that limit a model to one copy, each with a check of its value. With such an argument, vLLM itself
# distributes the model, or opens fixed ports.
_OF_ONE_COPY: Mapping[str, Callable[[Any], bool]] = {
    "data_parallel_size": _is_above_one,
    "nnodes": _is_above_one,
    "data_parallel_rank": _is_given,
    "device_ids": _is_given,
    "ec_transfer_config": _is_given,
    "kv_transfer_config": _is_given,
    "kv_events_config": _is_given,
    "distributed_executor_backend": _is_elsewhere,
    "data_parallel_backend": _is_elsewhere,
    "enable_expert_parallel": _is_on,
    "enable_fault_tolerance": _is_on,
}
# If one of these arguments of `_OF_ONE_COPY` is in use, Slipway does not choose the GPUs.
_OF_CHOSEN_GPUS = frozenset({"nnodes", "device_ids", "distributed_executor_backend", "data_parallel_backend"})


def why_one_copy(arguments: Mapping[str, Any]) -> str:
    """Return the engine argument that limits the model to one copy; "" if there may be several copies.

    Args:
        arguments: vLLM's engine arguments, as typed values or as text.
    """
    return next((name for name, counts in _OF_ONE_COPY.items() if counts(arguments.get(name))), "")


def chooses_gpus(arguments: Mapping[str, Any]) -> bool:
    """Return True if vLLM or an argument chooses the GPUs instead of Slipway. `arguments`: as in `why_one_copy`."""
    return any(_OF_ONE_COPY[name](arguments.get(name)) for name in _OF_CHOSEN_GPUS)


def tensor_parallel_sizes(config: Config, gpus: int) -> tuple[int, ...]:
    """Return the tensor-parallel sizes from 1 to `gpus` that vLLM accepts for this config.json, in ascending order.

    If the config has no relevant values, vLLM is assumed to accept every size.
    """
    return tuple(size for size in range(1, gpus + 1) if size == 1 or _accepted(config, size))


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory that a model needs on each of the GPUs that share its layers.

    A useful KV cache holds one sequence of the context length, because vLLM does not start otherwise. Its size is at
    least a fifth of the memory that vLLM may use.
    """

    config: Config  # The model's config.json.
    weights: Weights
    layout: Layout = Layout()
    memory_share: float = MEMORY_SHARE  # The share of a GPU's memory that vLLM may use.
    max_model_len: int | None = None  # The length of the longest sequence. None: the model's own context length.
    cache_element_bytes: int = 2  # The size of one element of the KV cache.
    given_cache_bytes: int | None = None  # The size of the KV cache on each GPU, if a setting gives it.

    def fewest(self, sizes: Sequence[int], gpu_bytes: int) -> tuple[int, str]:
        """Return the first size at which the model fits, and the reason in words.

        If the model fits at no size, return the last size.

        Args:
            sizes: Numbers of GPUs that share each layer.
            gpu_bytes: The total memory of the smallest GPU. 0 if unknown.
        """
        if not self.weights.total or not gpu_bytes:
            unknown = "the GPUs' memory" if self.weights.total else "the size of its weights"
            return sizes[-1], f"the most that the model allows, since {unknown} is not known"
        draft = f", {self.weights.draft / _GIB:.1f} GiB of a draft model" if self.weights.draft else ""
        weights = f"the weights ({self.weights.total / _GIB:.1f} GiB{draft}) and a useful KV cache"
        for size in sizes:
            if self.fits(size, gpu_bytes):
                return size, f"the fewest that hold {weights}"
        return sizes[-1], f"the most that the model allows, which may be too few for {weights}"

    def fits(self, size: int, gpu_bytes: int) -> bool:
        """Return True if `size` GPUs with this memory hold the weights and a useful KV cache."""
        least = int(int(gpu_bytes * self.memory_share) * _CACHE_SHARE)
        return self.cache_bytes(size, gpu_bytes) >= max(self.sequence_bytes(size), least)

    def cache_bytes(self, size: int, gpu_bytes: int) -> int:
        """Return the number of bytes that remain for each GPU's KV cache. It is negative if the weights do not fit."""
        overhead = max(_OVERHEAD_BYTES, int(gpu_bytes * _OVERHEAD_SHARE))
        return int(gpu_bytes * self.memory_share) - overhead - self.weights.each(size, self.layout)

    def cache_tokens(self, size: int, gpu_bytes: int) -> int | None:
        """Return approximately how many tokens the KV cache of a replica holds; None if unknown.

        The estimate assumes sequences of the full length. If layers have a sliding window, fewer tokens of short
        sequences fit, because such layers keep short sequences whole.
        """
        length = self.max_model_len or _first(_text(self.config), _CONTEXT)
        sequence = replace(self, max_model_len=length).sequence_bytes(size)
        free = self.cache_bytes(size, gpu_bytes) if self.given_cache_bytes is None else self.given_cache_bytes
        if not sequence or not self.weights.total or not gpu_bytes:
            return None
        return max(free, 0) * length // sequence

    def sequence_bytes(self, size: int) -> int:
        """Return how many bytes the longest sequence takes in the KV cache of each GPU; 0 if unknown.

        `size` GPUs share each layer. Layers with a sliding window keep only the window. Layers with a recurrent state
        keep nothing in the cache.
        """
        text = _text(self.config)
        length = _first(text, _CONTEXT) if self.max_model_len is None else self.max_model_len
        if (rank := text.get("kv_lora_rank")) is not None:
            per_layer = rank + (text.get("qk_rope_head_dim") or 0)  # Latent attention is not divided among GPUs.
        else:
            per_layer = 2 * -(-_kv_heads(text) // size) * _head_size(text)
        tokens = sum(_tokens(text, _first(text, _LAYERS), length))
        return int(per_layer * self.cache_element_bytes * tokens) // self.layout.stages


def _tokens(text: Config, layers: int, length: int) -> Iterator[int]:
    window = min(length, text.get("sliding_window") or text.get("attention_chunk_size") or length)
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if kinds:
        for kind in kinds:
            yield window if kind in _WINDOWED else 0 if kind in _WITHOUT_CACHE else length
        return
    sliding = text.get("sliding_window_pattern") or _SLIDING_EVERY.get(text.get("model_type", ""))
    recurrent = text.get("full_attention_interval")
    every, others = (recurrent, 0) if recurrent else (sliding, window)
    for layer in range(1, layers + 1):
        yield others if isinstance(every, int) and layer % every else length


def _accepted(config: Config, size: int) -> bool:
    text = _text(config)
    heads, kv_heads = _first(text, _HEADS), _kv_heads(text)
    if heads % size:
        return False
    # If there are fewer KV heads than GPUs, each KV head must have the same number of copies.
    if kv_heads and (kv_heads % size if kv_heads >= size else size % kv_heads):
        return False
    # The widths of feed-forward layers (dense layers, experts, shared experts), and the heads of recurrent layers.
    divided = _numbers([text.get(name) for name in (*_WIDTHS, *_SHARED_WIDTHS, *_STATE_HEADS)])
    groups = _first(text, _STATE_GROUPS)
    if groups > 1:
        divided.append(groups)
    for name in _VISION:
        if isinstance(vision := config.get(name), Mapping):
            divided += [_first(vision, _HEADS), *_numbers([vision.get("intermediate_size")])]
    blocks = -(-_first(text, ("vocab_size", "padded_vocab_size")) // _VOCABULARY_PADDING)
    divided.append(blocks * _VOCABULARY_PADDING)
    return not any(count % size for count in divided) and _blocks_fit(text, _quantization(config), size)


def _blocks_fit(text: Config, quantization: Config, size: int) -> bool:
    """Return True if each block of quantized weights is on one GPU. A block has a single scale."""
    block = _scale_block(quantization)
    if block <= 1:
        return True
    hidden = _first(text, _HIDDEN)
    experts = _first(text, _EXPERTS)
    attention = _first(text, _HEADS) * (text.get("v_head_dim") or _head_size(text))
    has_dense_layers = not experts or text.get("first_k_dense_replace") or text.get("mlp_only_layers")
    rows = [*_numbers([text.get("intermediate_size")] if has_dense_layers else []), attention]
    if any((width // size) % block for width in rows if width > block):
        return False
    widths = _numbers([text.get("moe_intermediate_size") or text.get("intermediate_size")]) or [0]
    least = min(block, _LEAST_REFINED_BLOCK)
    return not experts or all(math.gcd(block, width // size, hidden) >= least for width in widths)


def _scale_block(quantization: Config) -> int:
    """Return how many inputs of a layer share one scale; 0 if the scales have no blocks."""
    if blocks := quantization.get("weight_block_size"):
        return int(blocks[-1])
    sizes = [quantization.get("group_size"), quantization.get("q_group_size")]
    for group in (quantization.get("config_groups") or {}).values():
        weights = (group.get("weights") if isinstance(group, Mapping) else None) or {}
        sizes += [weights.get("group_size"), *(weights.get("block_structure") or [])]
    return max(_numbers(sizes), default=0)


def _quantization(config: Config) -> Config:
    for part in (config, _text(config)):
        for name in ("quantization_config", "compression_config"):
            if isinstance(part.get(name), Mapping):
                return dict(part[name])
    return {}


def _text(config: Config) -> Config:
    for name in _TEXT:
        if isinstance(config.get(name), Mapping):
            return _text(config[name])
    return config


def _kv_heads(text: Config) -> int:
    heads = _first(text, _HEADS)
    attention = text.get("attn_config")
    if isinstance(attention, Mapping) and "kv_n_heads" in attention:
        return int(attention["kv_n_heads"])
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return _first(text, _KV_HEADS) or heads


def _head_size(text: Config) -> int:
    return int(text.get("head_dim") or _first(text, _HIDDEN) // max(1, _first(text, _HEADS)))


def _first(part: Config, names: tuple[str, ...]) -> int:
    return next(iter(_numbers([part.get(name) for name in names])), 0)


def _numbers(values: list[Any]) -> list[int]:
    """Return the positive integers among the values. A value may also be a list of numbers."""
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, int) and not isinstance(item, bool) and item > 0]
