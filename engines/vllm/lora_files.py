"""Checks the files of a LoRA adapter before an engine reads them.

Weights are safetensors files, or files that torch has pickled. From pickled files, only tensors are loaded, never code.

An engine reads the files again after it has dropped the adapter or has died. The files must still be the same, because
the tokens of running calls and the blocks in the prefix cache come from the adapter that was loaded first.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from safetensors import SafetensorError, safe_open

from engines.errors import SHOWN, AdapterFailed, AdapterMissing

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
Shapes = Mapping[str, tuple[int, ...]]  # The shapes of tensors by their names.
_LARGEST_CONFIG = 10_000_000
# In these types, weights have the shape of their matrix. Packed weights have another shape.
_PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_PREFIX = "base_model.model."
_HALVES = (".lora_A.weight", ".lora_B.weight")
_Rank = Annotated[int, msgspec.Meta(ge=1)]
CHANGED = "its files have changed since it was loaded; unregister it, and register it again"


class _Config(msgspec.Struct, frozen=True):
    """The fields of an adapter's configuration that vLLM uses. None of them can be NaN, because JSON has no NaN."""

    r: _Rank
    rank_pattern: dict[str, _Rank] | None = None
    lora_alpha: float | None = None
    alpha_pattern: dict[str, float | None] | None = None


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The state and content of the adapter's files that an engine reads."""

    states: tuple[tuple[str | int, ...], ...]  # Each file's name, inode, size, and the times of its last changes.
    digest: str  # The digest of the content of all files.


def check_adapter(directory: Path, max_rank: int) -> None:
    """Refuse a directory that is not an adapter, or whose rank is too large. May block.

    Raises:
        AdapterFailed: A file is missing or broken, or the rank is too large. The message names the file.
    """
    if not os.path.isdir(directory):
        raise AdapterMissing(f"src: there is no directory {directory}")
    config = _config(directory / CONFIG)
    patterns = {f"rank_pattern.{layer}": rank for layer, rank in (config.rank_pattern or {}).items()}
    for name, rank in {"r": config.r, **patterns}.items():
        if rank > max_rank:
            raise AdapterFailed(f"{CONFIG}: {name} {rank} is greater than max_lora_rank {max_rank}")
    _weights(directory)


def file_states(directory: Path) -> tuple[tuple[str | int, ...], ...]:
    """Return the states of the files (`AdapterFiles.states`). May block.

    Raises:
        AdapterFailed: A file is missing.
    """
    found: list[tuple[str | int, ...]] = []
    for path in (directory / CONFIG, _weights(directory)):
        try:
            state = path.stat()
        except OSError as error:
            raise AdapterFailed(f"{path} cannot be read: {error.strerror or error}") from None
        found.append((path.name, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    return tuple(found)


def read_ahead(directory: Path, max_rank: int, base: Shapes, before: AdapterFiles | None = None) -> AdapterFiles:
    """Check an adapter as `check_adapter` does. Also read and check its weights, so that they are in the page cache.

    May block for a long time. An engine makes no token while it loads an adapter. Without this function, it might read
    the files over a network, which can take a minute.

    Args:
        base: The result of `base_shapes` for the base model.
        before: The files when the adapter was loaded first. None if it was never loaded.

    Returns:
        The files. Their states were read first, so that a later comparison shows changes during the reading.

    Raises:
        AdapterFailed: As in `check_adapter`, or the weights cannot be used, or the content differs from `before`. If
            weights cannot be used, the message names the tensor.
    """
    check_adapter(directory, max_rank)
    states = file_states(directory)
    path = _weights(directory)
    weights = _content(path)
    tensors = _tensors(path, weights)
    _check_pairs(tensors)
    _check_shapes(tensors, max_rank, base)
    _check_finite(path, tensors)
    digest = hashlib.sha256(path.name.encode())
    for content in (weights, _content(directory / CONFIG)):
        digest.update(hashlib.sha256(content).digest())
    if before is not None and before.digest != digest.hexdigest():
        raise AdapterFailed(CHANGED)
    return AdapterFiles(states, digest.hexdigest())


def base_shapes(model: Path) -> Shapes:
    """Return the shapes of a model's plain weights; {} if `model` has no safetensors files. May block."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(model.glob("*.safetensors")) if model.is_dir() else ():
        try:
            found.update(_plain_shapes(path))
        except (OSError, SafetensorError):
            return {}  # The engine has loaded the model, so only this module cannot read the file.
    return found


def _config(path: Path) -> _Config:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_LARGEST_CONFIG), type=_Config)
    except OSError as error:
        raise AdapterFailed(f"{path} cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterFailed(f"{path} is not a configuration of LoRA: {error}") from None


def _check_shapes(tensors: Mapping[str, Tensor], max_rank: int, base: Shapes) -> None:
    """Compare each `lora_A` and `lora_B` with the base weight, because vLLM accepts weights that are too small."""
    for name, tensor in tensors.items():
        half = next((half for half in _HALVES if name.endswith(half)), None)
        if half is None or tensor.ndim != 2:
            continue
        rank, size = tensor.shape if half == _HALVES[0] else tensor.shape[::-1]
        if rank > max_rank:
            raise AdapterFailed(f"{name}: rank {rank} is greater than max_lora_rank {max_rank}")
        weight = base.get(name.removeprefix(_PREFIX).removesuffix(half) + ".weight")
        if weight is None or len(weight) != 2:
            continue
        wanted = weight[1] if half == _HALVES[0] else weight[0]
        if size != wanted:
            expected = [rank, wanted] if half == _HALVES[0] else [wanted, rank]
            raise AdapterFailed(
                f"{name} has shape {list(tensor.shape)}; the base model's weight asks for {expected}: "
                "the adapter is for another model"
            )


def _check_pairs(names: Collection[str]) -> None:
    """Refuse a `lora_A` or `lora_B` without the other, and files without tensors. vLLM's errors give no reason."""
    if not names:
        raise AdapterFailed("the adapter's weights hold no tensor")
    for name in names:
        for half, other in (_HALVES, _HALVES[::-1]):
            if name.endswith(half) and (wanted := name.removesuffix(half) + other) not in names:
                raise AdapterFailed(f"{name} has no other half: {wanted} is missing")


def _check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are NaN or infinite. A training run that diverges leaves such weights.

    On vLLM's CPU backend, one request with such an adapter caused empty answers to dozens of later requests, even to
    requests without the adapter, and after the adapter was removed. The cause is presumably the KV cache.
    """
    import torch

    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.to(torch.float32)).all():
            raise AdapterFailed(f"{path}: {name} has weights that are not finite (NaN or infinity)")


def _weights(directory: Path) -> Path:
    weights = next((directory / name for name in WEIGHTS if os.path.isfile(directory / name)), None)
    if weights is None:
        raise AdapterFailed(f"{directory} has no weights; expected {WEIGHTS[0]}")
    return weights


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterFailed(f"{path} cannot be read: {error.strerror or error}") from None


def _tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    import torch
    from safetensors.torch import load

    try:
        if path.suffix == ".safetensors":
            safe: dict[str, Tensor] = load(data)
            return safe
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise AdapterFailed(f"{path} is not a safetensors file: {error}") from None
    except pickle.UnpicklingError:  # torch's message also explains how to run the code in the file.
        raise AdapterFailed(f"{path} is damaged, or holds more than tensors; expected what peft saves") from None
    except Exception as error:  # For a damaged file, torch may raise almost any error.
        reason = str(error).partition("\n")[0]
        raise AdapterFailed(f"{path} cannot be read: {type(error).__name__}: {reason}") from None
    if not isinstance(content, dict):
        raise AdapterFailed(f"{path} must hold tensors by their names, got {type(content).__name__}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise AdapterFailed(f"{path}: {str(name)[:SHOWN]!r} is no plain tensor with a name")
        if tensor.numel() * tensor.element_size() > len(data):
            raise AdapterFailed(f"{path}: {name} is larger than the file")
    return content


def _plain_shapes(path: Path) -> Shapes:
    with safe_open(path, framework="np") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: tuple(t.get_shape()) for name, t in tensors.items() if t.get_dtype() in _PLAIN_TYPES}
