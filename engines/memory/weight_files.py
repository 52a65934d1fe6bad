"""The weight files that an engine loads from a model directory.

A directory may hold the same weights in several formats (`.safetensors`, `.bin`, a consolidated file, folders such as
`original/`). vLLM and transformers load one of them; so only that one counts where memory is estimated.
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
_HEADER_LENGTH = 8  # Bytes of a safetensors file's first number, the length of its header.
_MOST_HEADER = 100_000_000  # Bytes, as the safetensors library has it.
_EXPERT = re.compile(r"(^|\.)experts\.")  # In a tensor's name. Experts that all tokens use are `shared_experts`.
# Files of trainers beside the weights; vLLM skips the same names.
_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt"})


def weight_files(model: Path | str) -> tuple[Path, ...]:
    """Return the files in the order of their names; none where `model` is no directory or file, such as a hub id.

    The files of an index come first, then the files of one format: safetensors before pickles. Subdirectories do not
    count.
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
    """Return the total size of `weight_files`; 0 if none exist."""
    return sum(file.stat().st_size for file in weight_files(model))


def is_expert(tensor: str) -> bool:
    """Tell by its name whether a tensor belongs to experts of which each token uses some."""
    return _EXPERT.search(tensor) is not None


def expert_bytes(model: Path | str) -> int:
    """Return the size of the experts in the safetensors among `weight_files`, by their headers; 0 without any."""
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
    return header if isinstance(header, dict) else {}  # a broken file: the engine says so when it loads the model


def draft_model(speculative_config: object) -> str:
    """Return the draft model that vLLM's `speculative_config` names, an object or its JSON; "" if it names none."""
    if isinstance(speculative_config, str):
        try:
            speculative_config = json.loads(speculative_config)
        except (ValueError, RecursionError):
            return ""  # the engine reports the fault
    model = speculative_config.get("model") if isinstance(speculative_config, dict) else None
    return model if isinstance(model, str) else ""


def hub_weight_bytes(repository: str, revision: str | None, counts: Callable[[str], bool] = lambda tensor: True) -> int:
    """Return the size of the tensors in a repository's safetensors on the Hugging Face hub.

    `counts` tells by a name whether a tensor counts. 0 where they cannot be looked up.
    """
    from huggingface_hub import get_safetensors_metadata

    try:
        files = get_safetensors_metadata(repository, revision=revision).files_metadata.values()
    except Exception as error:  # the hub's, of its HTTP client, of the network: loading reports what matters of it
        logger.info("the size of the weights of %s is not known before they are downloaded: %s", repository, error)
        return 0
    spans = (tensor.data_offsets for file in files for name, tensor in file.tensors.items() if counts(name))
    return sum(end - start for start, end in spans)


def hub_file(repository: str, name: str, revision: str | None) -> Path | None:
    """Return a small file of a repository on the Hugging Face hub; None where it cannot be looked up.

    A copy in the cache counts without a look at the hub.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        cached = try_to_load_from_cache(repository, name, revision=revision)
        if cached is not None and not isinstance(cached, str):
            return None  # the cache knows that the repository does not have it
        return Path(cached if isinstance(cached, str) else hf_hub_download(repository, name, revision=revision))
    except RemoteEntryNotFoundError:
        return None
    except Exception as error:  # As in `hub_weight_bytes`.
        logger.info("%s of %s is not known before it is downloaded: %s", name, repository, error)
        return None


def weights_of(model: str, revision: str | None, speculative: Any, layout: Layout) -> Weights:
    """Return the sizes of a model's weights and of its draft model's; the hub is asked where they are not here."""
    total = weight_bytes(model) or hub_weight_bytes(model, revision)
    shared = layout.expert_ranks > 1  # otherwise the size is not needed
    experts = (expert_bytes(model) or hub_weight_bytes(model, revision, is_expert)) if shared else 0
    draft = draft_model(speculative)
    if not draft or draft == model:  # some models have layers that draft
        return Weights(total, experts)
    return Weights(total, experts, weight_bytes(draft) or hub_weight_bytes(draft, None))


def _indexed(index: Path) -> tuple[Path, ...]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        files = tuple(sorted(index.parent / name for name in names))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return ()  # no index, or not a usable one: the engine says so when it loads the model
    return files if all(file.is_file() for file in files) else ()
