"""The weights of a LoRA adapter, read once before an engine reads them, and refused where they would spoil its answers.

They are safetensors, or what torch has pickled; of the latter only tensors are ever loaded, never code.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from handlers.engines.adapter_files import WEIGHTS, Shapes, check_pairs, check_shapes
from handlers.errors import AdapterFailed

if TYPE_CHECKING:
    from torch import Tensor

_READ_AHEAD = 1 << 20
"""Bytes at a time."""


def read_ahead(directory: Path, max_rank: int, base: Shapes) -> None:
    """Read an adapter's weights, so that whoever reads them next finds them in memory. May block for long.

    An engine makes no token while it loads an adapter; where files come over a network that may take a minute.

    `max_rank`, `base`: as of `check_adapter`, which sees no shapes in what torch has pickled.

    Raises:
        AdapterFailed: they cannot be read, are not finite, or do not fit the model; the tensor is named.
    """
    path = directory
    try:
        path = next(directory / name for name in WEIGHTS if (directory / name).is_file())
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_AHEAD):
                pass
        size = path.stat().st_size
    except StopIteration:
        raise AdapterFailed(f"{directory} has no weights; expected {WEIGHTS[0]}") from None
    except OSError as error:
        raise AdapterFailed(f"{path} cannot be read: {error.strerror or error}") from None
    if path.suffix == ".safetensors":
        _check_finite(path, _safe_tensors(path))
        return
    tensors = _pickled_tensors(path)
    for name, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() > size:
            raise AdapterFailed(f"{path}: {name} is larger than the file")
    check_pairs(tensors)
    check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, max_rank, base)
    _check_finite(path, iter(tensors.items()))


def _check_finite(path: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Refuse weights that are NaN or infinite, such as a training that diverged leaves.

    On vLLM's CPU backend one request with such an adapter spoils those after it, of other adapters and of none, even
    when the adapter is gone: dozens of them answered nothing, presumably for what it had left in the KV cache.
    """
    import torch
    from safetensors import SafetensorError

    try:
        for name, tensor in tensors:
            if tensor.is_floating_point() and not torch.isfinite(tensor.to(torch.float32)).all():
                raise AdapterFailed(f"{path}: {name} has weights that are not finite (NaN or infinity)")
    except (SafetensorError, RuntimeError, OSError) as error:
        raise AdapterFailed(f"{path} cannot be read: {error}") from None


def _safe_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = file.keys()
        check_pairs(names)
        for name in names:
            yield name, file.get_tensor(name)


def _pickled_tensors(path: Path) -> dict[str, Tensor]:
    """Raises AdapterFailed."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's text goes on to say how to run the code in the file
        raise AdapterFailed(f"{path} is damaged, or holds more than tensors; expected what peft saves") from None
    except Exception as error:  # a damaged file has torch raise nearly anything
        reason = str(error).partition("\n")[0]
        raise AdapterFailed(f"{path} cannot be read: {type(error).__name__}: {reason}") from None
    if not isinstance(content, dict):
        raise AdapterFailed(f"{path} must hold tensors by their names, got {type(content).__name__}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise AdapterFailed(f"{path}: {str(name)[:200]!r} is no tensor with a name")
    return content
