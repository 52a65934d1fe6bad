"""The weight files that an engine loads from a model directory.

A directory may hold the same weights in several formats (`.safetensors`, `.bin`, a consolidated file, folders such as
`original/`). vLLM and transformers load only one format, so estimates of memory count only that format.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.memory.parallelism import Layout, Weights

logger = logging.getLogger(__name__)

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_HEADER_LENGTH = 8  # A safetensors file begins with the length of its header, a number of 8 bytes.
_MOST_HEADER = 100_000_000  # The safetensors library's limit on the header's length, in bytes.
# Matches the tensor names of experts that only some tokens use. Experts that all tokens use are named `shared_experts`.
_EXPERT = re.compile(r"(^|\.)experts\.")
# Files that training writes next to the weights. vLLM skips the same names.
_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt"})


def weight_files(model: Path | str) -> tuple[Path, ...]:
    """Return the weight files, sorted by name. There are none if `model` is not a path (a hub id, for example).

    If an index lists files, they are returned. Otherwise the files of one format are returned: safetensors if there are
    any, else another format. Subdirectories are ignored.
    """
    path = Path(model)
    if path.is_file():
        return (path,)
    if not path.is_dir():
        return ()
    for index in _INDEXES:
        if files := _indexed(path / index):
            return files
    for pattern in _PATTERNS:
        files = tuple(sorted(file for file in path.glob(pattern) if file.name not in _NO_WEIGHTS))
        sharded_or_whole = tuple(file for file in files if not file.name.startswith("consolidated")) or files
        if sharded_or_whole:
            return sharded_or_whole
    return ()


def weight_bytes(model: Path | str) -> int:
    """Return the total size of the weight files; 0 if there are none."""
    return sum(file.stat().st_size for file in weight_files(model))


def is_expert(tensor: str) -> bool:
    """Return True if a tensor's name shows that it belongs to an expert that only some tokens use."""
    return _EXPERT.search(tensor) is not None


def expert_bytes(model: Path | str) -> int:
    """Return the size of the experts in the safetensors files, from their headers; 0 if there are none."""
    size = 0
    for path in weight_files(model):
        if path.suffix == ".safetensors":
            for name, tensor in _header(path).items():
                if is_expert(name):
                    begin, end = tensor["data_offsets"]
                    size += end - begin
    return size


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
        try:
            header = json.loads(file.read(length)) if length <= _MOST_HEADER else None
        except (ValueError, RecursionError):
            header = None
    return header if isinstance(header, dict) else {}  # If the file is broken, the engine reports that.


def draft_model(speculative_config: object) -> str:
    """Return the draft model that vLLM's `speculative_config` names, or "". The config may be JSON text."""
    if isinstance(speculative_config, str):
        try:
            speculative_config = json.loads(speculative_config)
        except (ValueError, RecursionError):
            return ""  # The engine reports the error.
    model = speculative_config.get("model") if isinstance(speculative_config, dict) else None
    return model if isinstance(model, str) else ""


def hub_weight_bytes(repository: str, revision: str | None, counts: Callable[[str], bool] = lambda tensor: True) -> int:
    """Return the size of the tensors in a repository's safetensors files on the Hugging Face hub.

    The result is 0 if the hub does not give the sizes.

    Args:
        counts: Takes a tensor's name, and returns True if the tensor is included.
    """
    from huggingface_hub import get_safetensors_metadata

    try:
        files = get_safetensors_metadata(repository, revision=revision).files_metadata.values()
    except Exception as error:  # An error of the hub, the HTTP client or the network. Loading reports it.
        logger.info("the size of the weights of %s is not known before they are downloaded: %s", repository, error)
        return 0
    spans = (tensor.data_offsets for file in files for name, tensor in file.tensors.items() if counts(name))
    return sum(end - start for start, end in spans)


def hub_file(repository: str, name: str, revision: str | None) -> Path | None:
    """Return a small file of a repository on the Hugging Face hub; None if it cannot be downloaded.

    If the cache has a copy, the hub is not asked.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        cached = try_to_load_from_cache(repository, name, revision=revision)
        if cached is not None and not isinstance(cached, str):
            return None  # The cache records that the repository does not have the file.
        return Path(cached if isinstance(cached, str) else hf_hub_download(repository, name, revision=revision))
    except RemoteEntryNotFoundError:
        return None
    except Exception as error:  # As in `hub_weight_bytes`.
        logger.info("%s of %s is not known before it is downloaded: %s", name, repository, error)
        return None


def weights_of(model: str, revision: str | None, speculative: Any, layout: Layout) -> Weights:
    """Return the sizes of the weights of a model and its draft model, from local files or from the hub."""
    total = weight_bytes(model) or hub_weight_bytes(model, revision)
    shared = layout.expert_ranks > 1  # Otherwise the size of the experts is not needed.
    experts = (expert_bytes(model) or hub_weight_bytes(model, revision, is_expert)) if shared else 0
    draft = draft_model(speculative)
    if not draft or draft == model:  # Some models contain their own draft layers.
        return Weights(total, experts)
    return Weights(total, experts, weight_bytes(draft) or hub_weight_bytes(draft, None))


def _indexed(index: Path) -> tuple[Path, ...]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        files = tuple(sorted(index.parent / name for name in names))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return ()  # The index does not exist, or cannot be read. In the second case, the engine reports it.
    return files if all(file.is_file() for file in files) else ()
