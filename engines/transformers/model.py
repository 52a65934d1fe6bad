"""Loads a causal language model with transformers for the dynamic batch. The model runs in this process.

This package uses only documented parts of transformers: `from_pretrained`, `generate` with a logits processor and a
stopping criterion, the processors themselves, and configurations. One exception: in the result of a beam search,
`beam_indices` is -1 after a beam's last token. tests/unit/engines/transformers/test_engine.py checks that.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from engines.interface import EngineStartError
from engines.settings.engine_config import EngineConfig
from engines.start_failure import failure_of
from engines.tokenization import end_token_ids

logger = logging.getLogger(__name__)

_BITS = {"bitsandbytes": "load_in_4bit", "bitsandbytes4": "load_in_4bit", "bitsandbytes8": "load_in_8bit"}
# Kinds of RoPE scaling whose factor extends the context beyond the length that the model was trained on.
_STRETCHED_ROPE = frozenset({"linear", "dynamic", "yarn"})


class LoadingArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The engine arguments that `load_model` reads."""

    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    attn_implementation: str = ""
    device_map: str = ""
    tokenizer: str = ""
    quantization: str = ""
    load_in_8bit: bool = False
    load_in_4bit: bool = False


def loading_arguments(config: EngineConfig) -> LoadingArguments:
    """Read the engine arguments.

    Raises:
        EngineStartError: An argument has a wrong value. The message names it.
    """
    given = {name: text.strip() for name, text in config.engine_arguments.items() if text.strip()}
    try:
        return msgspec.convert(given, LoadingArguments, strict=False)
    except msgspec.ValidationError as error:
        why, _, name = str(error).removesuffix("`").partition(" - at `$.")
        raise EngineStartError(f"{source(config, name)}: {given[name]!r}: {why}") from None


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """A model on its device, with values that the sampler and the detokenizer often need."""

    model: Any
    tokenizer: Any
    device: Any  # The `torch.device` of the token ids and the logits.
    max_model_len: int  # The limit on the tokens of prompt and answer together.
    vocabulary_size: int  # The width of the logits. The tokenizer may have fewer tokens.
    eos_token_ids: frozenset[int]
    special_ids: frozenset[int]
    pad_token_id: int


def load_model(config: EngineConfig) -> TransformersModel:
    """Load the model and its tokenizer. The call blocks until both are loaded.

    Raises:
        EngineStartError: The model cannot be loaded, or a setting does not fit. The message gives the reason.
    """
    arguments = model_arguments(config)
    device = _device(config)
    disable_progress_bar()  # In a log, each step of a progress bar would be a line.
    try:
        if config.devices and device.type == "cuda":
            # transformers uses the thread's current device if a device has no index, for example `cuda`.
            torch.cuda.set_device(device)
        name = loading_arguments(config).tokenizer
        tokenizer = AutoTokenizer.from_pretrained(
            name or config.model_id,
            revision=None if name else config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        hf_config = AutoConfig.from_pretrained(
            config.model_id, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        check_kind(config, hf_config)
        model, loading = AutoModelForCausalLM.from_pretrained(config.model_id, output_loading_info=True, **arguments)
        check_weights(config, loading)
        check_quantization(config, model.config)
        if "device_map" not in arguments and "quantization_config" not in arguments:
            model = model.to(device)
    except EngineStartError:
        raise
    except Exception as error:
        raise failure_of(error).error(f"transformers cannot load {config.model_id}") from error
    model.eval()
    hf_config = model.config.get_text_config()
    return TransformersModel(
        model=model,
        tokenizer=tokenizer,
        device=model.device,
        max_model_len=max_model_len(config, hf_config),
        vocabulary_size=int(hf_config.vocab_size),
        eos_token_ids=end_token_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer),
        special_ids=frozenset(tokenizer.all_special_ids),
        pad_token_id=pad_token_id(tokenizer, int(hf_config.vocab_size)),
    )


def warn_of_arguments_without_effect(config: EngineConfig) -> None:
    """Log one warning that names the engine arguments that this engine does not read."""
    unknown = [name for name in config.engine_arguments if name not in LoadingArguments.__struct_fields__]
    if unknown:
        sources = ", ".join(source(config, name) for name in unknown)
        logger.warning("%s: no effect with option.rolling_batch=%s", sources, config.rolling_batch)


def model_arguments(config: EngineConfig) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained`."""
    given = loading_arguments(config)
    arguments: dict[str, Any] = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype,
    }
    if given.attn_implementation:
        arguments["attn_implementation"] = given.attn_implementation
    if given.device_map:
        arguments["device_map"] = text = given.device_map
        if text.startswith("{"):
            try:
                arguments["device_map"] = json.loads(text)
            except ValueError as error:
                raise EngineStartError(f"{source(config, 'device_map')}: {text!r} is not JSON: {error}") from None
    # Slipway lets only bitsandbytes quantize weights while they are loaded (`check_quantization`). The configuration of
    # a model that is already quantized names its quantization, so `quantization` is passed on only for bitsandbytes.
    bits = _BITS.get(given.quantization.lower())
    bits = "load_in_8bit" if given.load_in_8bit else "load_in_4bit" if given.load_in_4bit else bits
    if bits:
        from transformers import BitsAndBytesConfig

        arguments["quantization_config"] = BitsAndBytesConfig(**{bits: True})
        if config.devices:
            arguments.setdefault("device_map", {"": _device(config)})
    if (config.tensor_parallel_degree or 1) * config.pipeline_parallel_degree > 1 and not given.device_map:
        raise EngineStartError(
            "option.tensor_parallel_degree: transformers runs a model on one device here; option.device_map spreads "
            "its layers over several, option.rolling_batch=vllm shares each layer"
        )
    return arguments


def _device(config: EngineConfig) -> Any:
    if config.devices == () or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", config.devices[0] if config.devices else 0)


def source(config: EngineConfig, name: str) -> str:
    """Return where an engine argument was set, for messages: "environment: OPTION_QUANTIZE", for example."""
    return config.engine_argument_sources.get(name, f"option.{name}")


def check_kind(config: EngineConfig, hf_config: Any) -> None:
    """Refuse a model that is not a causal language model, even if transformers would load a part of it as one.

    Raises EngineStartError: the model is an encoder-decoder model, or an encoder.
    """
    if getattr(hf_config, "is_encoder_decoder", False):
        kind = "an encoder-decoder model"
    elif type(hf_config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(hf_config, "is_decoder", None) is False:
        kind = "an encoder without `is_decoder`"
    else:
        return
    raise EngineStartError(
        f"{config.model_id} is {kind} ({hf_config.model_type}); only causal language models are served"
    )


def check_weights(config: EngineConfig, loading: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks weights, because transformers would fill them with random numbers.

    Args:
        loading: The second result of `from_pretrained` with `output_loading_info`. It counts tied weights as loaded.

    Raises:
        EngineStartError: Weights are missing, or have a wrong shape. The message names some of them.
    """
    mismatched = [key if isinstance(key, str) else key[0] for key in loading.get("mismatched_keys") or ()]
    for what, names in (
        ("lacks weights", loading.get("missing_keys") or ()),
        ("has weights of a wrong shape", mismatched),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise EngineStartError(f"{config.model_id} {what}: {shown}{more}")


def check_quantization(config: EngineConfig, hf_config: Any) -> None:
    """Refuse to quantize weights while they are loaded. Only quantization with bitsandbytes is allowed."""
    wanted = loading_arguments(config).quantization.lower()
    if not wanted or wanted in _BITS or getattr(hf_config, "quantization_config", None) is not None:
        return
    raise EngineStartError(
        f"{source(config, 'quantization')}: {wanted!r} is only for weights that were quantized so beforehand, which "
        "these were not; while loading, transformers quantizes with bitsandbytes here"
    )


def max_model_len(config: EngineConfig, hf_config: Any) -> int:
    """Return the limit on the tokens of prompt and answer together. `hf_config`: the model's text configuration."""
    longest = longest_context(hf_config)
    wanted = loading_arguments(config).max_model_len
    if wanted is None:
        if longest is None:
            raise EngineStartError(f"{config.model_id} does not say how long its context is; set option.max_model_len")
        return longest
    if longest is not None and wanted > longest:
        raise EngineStartError(
            f"{source(config, 'max_model_len')}: {wanted} is more than the model's context of {longest} tokens"
        )
    return wanted


def longest_context(hf_config: Any) -> int | None:
    """Return the length of the model's context in tokens; None if the configuration does not have it."""
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len"):
        if isinstance(length := getattr(hf_config, name, None), int):
            break
    else:
        return None
    rope = getattr(hf_config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") not in _STRETCHED_ROPE:
        return length
    trained = rope.get("original_max_position_embeddings") or length
    return max(length, int(trained * float(rope.get("factor") or 1.0)))


def pad_token_id(tokenizer: Any, vocabulary_size: int) -> int:
    """Return a padding token that has an embedding. A token that was added only to the tokenizer has none."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None and 0 <= token_id < vocabulary_size:
            return int(token_id)
    return 0
