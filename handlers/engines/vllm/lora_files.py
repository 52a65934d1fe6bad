"""Checks of a LoRA adapter's files, which are read before an engine reads them.

Weights are safetensors, or what torch has pickled; of the latter only tensors are ever loaded, never code.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handlers.errors import AdapterFailed

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
Shapes = Mapping[str, tuple[int, ...]]
"""Names of tensors to their shapes."""
_SIZE = struct.Struct("<Q")
_LARGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""
_LARGEST_CONFIG = 10_000_000
_READ_AHEAD = 1 << 20
"""Bytes at a time."""
_PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Types of weights that have the shape of the matrix; packed ones have another."""
_PREFIX = "base_model.model."
_HALVES = (".lora_A.weight", ".lora_B.weight")


def check_adapter(directory: Path, max_rank: int, base: Shapes) -> None:
    """Refuse what an engine could not use, naming the file or the tensor. Reads files; may block.

    `base`: shapes of the base model's weights, as far as they are known.

    Raises:
        AdapterFailed: there is no such directory, a file is missing or broken, or it does not fit the model.
    """
    if os.path.isfile(directory):
        raise AdapterFailed(
            f"src: {directory} is a file; expected the directory of an adapter, and an archive is not unpacked"
        )
    if not os.path.isdir(directory):
        raise AdapterFailed(f"src: there is no directory {directory}")
    config = _config(directory / CONFIG)
    check_rank(config, max_rank)
    check_scaling(config)
    weights = _weights(directory)
    if weights.suffix == ".safetensors":
        try:
            shapes = dict(_plain_shapes(weights))
        except (OSError, ValueError) as error:
            raise AdapterFailed(f"{weights} is not a safetensors file: {error}") from None
        check_shapes(shapes, max_rank, base)


def read_ahead(directory: Path, max_rank: int, base: Shapes) -> None:
    """Read an adapter's weights, so that the engine finds them in memory, and check them. May block for long.

    An engine makes no token while it loads an adapter; where files come over a network that may take a minute.

    `max_rank`, `base`: as of `check_adapter`, which sees no shapes in what torch has pickled.

    Raises:
        AdapterFailed: they cannot be read, are not finite, or do not fit the model; the tensor is named.
    """
    path = _weights(directory)
    try:
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_AHEAD):
                pass
        size = path.stat().st_size
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


def base_shapes(model: Path) -> Shapes:
    """Return shapes of a model's plain weights; {} where `model` holds no safetensors files. May block."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(model.glob("*.safetensors")) if model.is_dir() else ():
        try:
            found.update(_plain_shapes(path))
        except (OSError, ValueError):
            return {}  # the engine has loaded the model, so the file is of a kind that we do not know
    return found


def _config(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_LARGEST_CONFIG))
    except FileNotFoundError as error:
        raise AdapterFailed(f"{path} cannot be read: {error.strerror}{_elsewhere(path.parent)}") from None
    except OSError as error:
        raise AdapterFailed(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterFailed(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise AdapterFailed(f"{path} must hold a JSON object, got {type(document).__name__}")
    return document


def _elsewhere(directory: Path) -> str:
    """Name the folder that holds the adapter instead: an archive may have been made of the adapter's directory."""
    inner = next(iter(sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))), None)
    return "" if inner is None else f"; there is one in {inner}"


def check_rank(config: Mapping[str, Any], max_rank: int) -> None:
    """Refuse a rank that the engine has no room for.

    Raises:
        AdapterFailed: it is no positive integer, or above `max_rank`.
    """
    for name, rank in _with_patterns(config, "r", "rank_pattern"):
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise AdapterFailed(f"{CONFIG}: {name} must be a positive integer, got {rank!r}")
        if rank > max_rank:
            raise AdapterFailed(f"{CONFIG}: {name} is {rank}; option.max_lora_rank is {max_rank}")


def check_scaling(config: Mapping[str, Any]) -> None:
    """Refuse a scaling that makes NaN of every answer.

    Raises:
        AdapterFailed: `lora_alpha` or one of `alpha_pattern` is no finite number.
    """
    for name, scale in _with_patterns(config, "lora_alpha", "alpha_pattern"):
        if scale is None:
            continue
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) < math.inf:
            raise AdapterFailed(f"{CONFIG}: {name} must be a finite number, got {scale!r}")


def _with_patterns(config: Mapping[str, Any], name: str, patterns: str) -> Iterator[tuple[str, Any]]:
    """Yield a value of the config with its name, and those that some layers have instead."""
    yield name, config.get(name)
    others = config.get(patterns)
    for layer, value in others.items() if isinstance(others, dict) else ():
        yield f"{patterns}.{layer}", value


def check_shapes(tensors: Shapes, max_rank: int, base: Shapes) -> None:
    """Compare the two halves of each pair with the weight that they change.

    Raises:
        AdapterFailed: naming the tensor, its shape and the one that was expected.
    """
    for name, shape in tensors.items():
        half = next((half for half in _HALVES if name.endswith(half)), None)
        if half is None or len(shape) != 2:
            continue
        rank, size = shape if half == _HALVES[0] else shape[::-1]
        if rank > max_rank:
            raise AdapterFailed(f"{name} has rank {rank}; option.max_lora_rank is {max_rank}")
        weight = base.get(name.removeprefix(_PREFIX).removesuffix(half) + ".weight")
        if weight is None or len(weight) != 2:
            continue
        wanted = weight[1] if half == _HALVES[0] else weight[0]
        if size != wanted:
            expected = [rank, wanted] if half == _HALVES[0] else [wanted, rank]
            raise AdapterFailed(
                f"{name} has shape {list(shape)}; the base model's weight asks for {expected}: "
                "the adapter is for another model"
            )


def check_pairs(names: Collection[str]) -> None:
    """Refuse half of a pair without the other, and files without tensors: vLLM fails on them without saying why.

    Raises:
        AdapterFailed: naming the one that is there, and the one that is not.
    """
    if not names:
        raise AdapterFailed("the adapter's weights hold no tensor")
    for name in names:
        for half, other in (_HALVES, _HALVES[::-1]):
            if name.endswith(half) and (wanted := name.removesuffix(half) + other) not in names:
                raise AdapterFailed(f"{name} has no other half: {wanted} is missing")


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


def _weights(directory: Path) -> Path:
    weights = next((directory / name for name in WEIGHTS if os.path.isfile(directory / name)), None)
    if weights is None:
        raise AdapterFailed(f"{directory} has no weights; expected {WEIGHTS[0]}")
    return weights


def _safe_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = file.keys()
        check_pairs(names)
        for name in names:
            yield name, file.get_tensor(name)


def _pickled_tensors(path: Path) -> dict[str, Tensor]:
    """Load tensors by their names. Raises AdapterFailed."""
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


def _plain_shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes. Raises OSError, and ValueError for what is no safetensors file."""
    with path.open("rb") as file:
        head = file.read(_SIZE.size)
        if len(head) < _SIZE.size:
            raise ValueError("it is too short")
        (size,) = _SIZE.unpack(head)
        if size > _LARGEST_HEADER:
            raise ValueError(f"its header would have {size} bytes")
        text = file.read(size)
        end = path.stat().st_size - _SIZE.size - size
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("its header is nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        shape, offsets, kind = _described(tensor)
        if offsets[1] > end:
            raise ValueError(f"it ends before tensor {name} does")
        if kind in _PLAIN_TYPES:
            yield name, shape


def _described(tensor: Any) -> tuple[tuple[int, ...], tuple[int, int], str]:
    try:
        first, last = tensor["data_offsets"]
        return tuple(int(size) for size in tensor["shape"]), (int(first), int(last)), str(tensor["dtype"])
    except (TypeError, KeyError, ValueError, OverflowError):
        raise ValueError("its header does not describe tensors") from None
