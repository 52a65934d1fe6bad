"""What is wrong with an adapter's weights, found when they are read, before an engine has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from handlers.engines.vllm import lora_files as adapter_weights
from handlers.engines.vllm.lora_files import read_ahead
from handlers.errors import AdapterFailed

LAYER = "model.layers.0.self_attn.q_proj"
BASE = {f"{LAYER}.weight": (6, 4)}
FIRST, SECOND = (f"base_model.model.{LAYER}.lora_{half}.weight" for half in "AB")
FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def weights(rank: int = 2, inner: int = 4, outer: int = 6, kind: Any = np.float32) -> dict[str, Any]:
    return {FIRST: np.zeros((rank, inner), dtype=kind), SECOND: np.zeros((outer, rank), dtype=kind)}


def write(directory: Path, tensors: dict[str, Any], name: str, *, zipped: bool = True) -> Path:
    path = directory / name
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        content = {key: torch.from_numpy(tensor) for key, tensor in tensors.items()}
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64])
def test_weights_that_are_not_finite_are_refused_by_the_name_of_their_tensor(
    tmp_path: Path, name: str, value: float, kind: Any
) -> None:
    tensors = weights(kind=kind)
    write(tmp_path, tensors, name)
    read_ahead(tmp_path, 8, BASE)
    tensors[SECOND][5, 1] = value
    path = write(tmp_path, tensors, name)
    with pytest.raises(AdapterFailed) as refused:
        read_ahead(tmp_path, 8, BASE)
    assert refused.value.message == f"{path}: {SECOND} has weights that are not finite (NaN or infinity)"


def test_weights_that_vanish_while_they_are_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, weights(), FILES[0])
    whole = adapter_weights._safe_tensors

    def vanished(path: Path) -> Iterator[tuple[str, Any]]:
        path.unlink()
        return whole(path)

    monkeypatch.setattr(adapter_weights, "_safe_tensors", vanished)
    with pytest.raises(AdapterFailed, match=f"{path} cannot be read: "):
        read_ahead(tmp_path, 8, BASE)


def test_weights_that_torch_has_saved_in_its_old_format_are_checked_as_well(tmp_path: Path) -> None:
    tensors = weights()
    write(tmp_path, tensors, "adapter_model.bin", zipped=False)
    read_ahead(tmp_path, 8, BASE)
    tensors[FIRST][0, 0] = np.nan
    write(tmp_path, tensors, "adapter_model.bin", zipped=False)
    with pytest.raises(AdapterFailed, match="not finite"):
        read_ahead(tmp_path, 8, BASE)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"inner": 3}, r"lora_A.weight has shape \[2, 3\]; the base model's weight asks for \[2, 4\]"),
        ({"outer": 5}, r"lora_B.weight has shape \[5, 2\]; the base model's weight asks for \[6, 2\]"),
        ({"rank": 16}, "has rank 16; option.max_lora_rank is 8"),
    ],
)
def test_pickled_weights_for_another_model_are_refused_though_vllm_would_take_them(
    tmp_path: Path, shape: dict[str, int], why: str
) -> None:
    write(tmp_path, weights(**shape), "adapter_model.bin")
    with pytest.raises(AdapterFailed, match=why):
        read_ahead(tmp_path, 8, BASE)


class Code:
    """What a pickle runs when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    mark = tmp_path / "ran"
    content: dict[str, Any] = {FIRST: torch.zeros(2, 4), "more": Code(mark)}
    torch.save(content, tmp_path / "adapter_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(AdapterFailed) as refused:
        read_ahead(tmp_path, 8, BASE)
    path = tmp_path / "adapter_model.bin"
    assert refused.value.message == f"{path} is damaged, or holds more than tensors; expected what peft saves"
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([torch.zeros(2)], "must hold tensors by their names, got list"),
        ({"r": 8}, "'r' is no tensor with a name"),
        ({1: torch.zeros(2)}, "'1' is no tensor with a name"),
        ({"wide": torch.zeros(1).expand(1 << 40)}, "wide is larger than the file"),
    ],
)
def test_a_pickle_of_other_things_is_refused(tmp_path: Path, content: Any, why: str) -> None:
    torch.save(content, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFailed, match=why):
        read_ahead(tmp_path, 8, BASE)


@pytest.mark.parametrize("name", FILES)
def test_a_half_that_is_alone_and_no_tensor_at_all_are_refused(tmp_path: Path, name: str) -> None:
    tensors = weights()
    write(tmp_path, {SECOND: tensors[SECOND]}, name)
    with pytest.raises(AdapterFailed, match=f"{SECOND} has no other half: {FIRST} is missing"):
        read_ahead(tmp_path, 8, BASE)
    write(tmp_path, {}, name)
    with pytest.raises(AdapterFailed, match="the adapter's weights hold no tensor"):
        read_ahead(tmp_path, 8, BASE)


@pytest.mark.parametrize("name", FILES)
def test_weights_that_end_early_or_are_nothing_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, weights(), name)
    whole = path.read_bytes()
    for content in (whole[:-4], whole[: len(whole) // 2], b"", b"nonsense", bytes(100)):
        path.write_bytes(content)
        with pytest.raises(AdapterFailed) as refused:
            read_ahead(tmp_path, 8, BASE)
        assert refused.value.message.startswith(str(path))
        assert "\n" not in refused.value.message
    path.unlink()
    with pytest.raises(AdapterFailed, match="has no weights"):
        read_ahead(tmp_path, 8, BASE)
