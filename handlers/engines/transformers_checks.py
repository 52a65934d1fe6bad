"""Models that the dynamic batch refuses, because they would answer wrongly without any error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from handlers.engines.protocol import EngineStartError
from handlers.model_settings import ModelSettings

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Kinds of RoPE scaling that change for a whole batch as soon as one of its sequences is long."""
_SHOWN_WEIGHTS = 3


def check_kind(settings: ModelSettings, config: Any) -> None:
    """Refuse what is no causal language model, though transformers would load a part of it as one.

    Raises:
        EngineStartError: it is an encoder-decoder model, or an encoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise EngineStartError(
            f"{settings.model_id} is an encoder-decoder model ({config.model_type}); only causal language models "
            "are served"
        )
    encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is False
    if encoder:
        raise EngineStartError(
            f"{settings.model_id} is an encoder ({config.model_type} without `is_decoder`); only causal language "
            "models are served"
        )


def check_weights(settings: ModelSettings, loading: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks weights: transformers fills them with random numbers.

    `loading`: what `from_pretrained` gives with `output_loading_info`; it counts tied weights as loaded.

    Raises:
        EngineStartError: it names some of the weights.
    """
    mismatched = [key if isinstance(key, str) else key[0] for key in loading.get("mismatched_keys") or ()]
    for what, names in (
        ("lacks weights", loading.get("missing_keys") or ()),
        ("has weights of a wrong shape", mismatched),
    ):
        if names:
            raise EngineStartError(f"{settings.model_id} {what}: {_shown(names)}")


def check_rope(settings: ModelSettings, config: Any, max_model_len: int) -> None:
    """Refuse a context in which a text would depend on how long its batch mates are.

    Raises:
        EngineStartError: it says which context can be served.
    """
    for rope in _rope_parameters(config):
        if rope.get("rope_type") not in _LENGTH_DEPENDENT_ROPE:
            continue
        trained = (
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if max_model_len > trained:
            raise EngineStartError(
                f"{settings.model_id}: with {rope['rope_type']} RoPE scaling, sequences of more than {trained} tokens "
                f"would change the answers of others in their batch; set option.max_model_len={trained}, or use "
                "option.rolling_batch=vllm"
            )


def _rope_parameters(config: Any) -> Iterable[Mapping[str, Any]]:
    """One mapping, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return ()
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or (rope,)


def _shown(names: Collection[str]) -> str:
    first = sorted(names)[:_SHOWN_WEIGHTS]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")
