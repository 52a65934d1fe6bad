"""What there has to be before TensorRT-LLM can load a model: the package, a GPU, and the model's configuration."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from handlers.engines.protocol import EngineStartError
from handlers.model_settings import ModelSettings

OLDEST, NEWEST = (1, 2), (1, 4)
"""Versions of TensorRT-LLM."""
_ADVICE = "or set option.rolling_batch=auto"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model's own configuration says."""

    context: int | None
    """Tokens of prompt and answer together."""
    vocabulary_size: int | None
    eos_token_ids: frozenset[int]


def import_tensorrt_llm() -> tuple[Any, tuple[int, ...]]:
    """The module `tensorrt_llm.llmapi` and the package's version.

    Raises:
        EngineStartError: it is not there, or cannot be imported.
    """
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise EngineStartError(
            f"option.rolling_batch=trtllm needs the package tensorrt_llm, which is not installed: use an image that "
            f"has it, {_ADVICE}"
        )
    gpu_count()  # without one, importing fails with less to go on
    try:
        package = importlib.import_module("tensorrt_llm")
        api = importlib.import_module("tensorrt_llm.llmapi")
    except (ImportError, OSError) as error:
        raise EngineStartError(
            f"tensorrt_llm is installed but cannot be imported: {error}; the image's CUDA libraries and the machine's "
            f"driver must fit it; use another image, {_ADVICE}"
        ) from error
    version = tuple(map(int, re.findall(r"\d+", package.__version__)[:2]))
    if not OLDEST <= version <= NEWEST:
        raise EngineStartError(
            f"TensorRT-LLM {package.__version__} is not served: versions {_dotted(OLDEST)} to {_dotted(NEWEST)} are; "
            f"use an image with one of them, {_ADVICE}"
        )
    return api, version


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def gpu_count() -> int:
    """How many GPUs there are.

    Raises:
        EngineStartError: none.
    """
    import torch

    count: int = torch.cuda.device_count()
    if count == 0:
        raise EngineStartError(
            f"option.rolling_batch=trtllm needs an NVIDIA GPU, and this machine shows none: use a GPU instance, "
            f"{_ADVICE}"
        )
    return count


def read_model(settings: ModelSettings) -> ModelFacts:
    """Read the model's configuration; it is fetched if the model is on the hub."""
    from transformers import AutoConfig, GenerationConfig

    source = {"revision": settings.revision} if settings.revision else {}
    config = AutoConfig.from_pretrained(settings.model_id, trust_remote_code=settings.trust_remote_code, **source)
    text = config.get_text_config()
    try:
        eos = GenerationConfig.from_pretrained(settings.model_id, **source).eos_token_id
    except OSError:
        eos = getattr(text, "eos_token_id", None)  # the model has no such file
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    context, vocabulary = getattr(text, "max_position_embeddings", None), getattr(text, "vocab_size", None)
    return ModelFacts(context, vocabulary, frozenset(ids))
