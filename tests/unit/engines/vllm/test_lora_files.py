"""Faults of an adapter's files and weights, which are found before an engine reads them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import load_file

from engines.errors import AdapterFailed
from engines.vllm.lora_files import base_shapes, check_adapter, read_ahead

LAYER = "model.layers.0.self_attn.q_proj"
BASE = {f"{LAYER}.weight": (6, 4)}


FIRST, SECOND = (f"base_model.model.{LAYER}.lora_{half}.weight" for half in "AB")
FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def weights(rank: int = 2, inner: int = 4, outer: int = 6, kind: Any = np.float32) -> dict[str, Any]:
    return {FIRST: np.zeros((rank, inner), dtype=kind), SECOND: np.zeros((outer, rank), dtype=kind)}


def write_weights(directory: Path, tensors: dict[str, Any], name: str, *, zipped: bool = True) -> Path:
    """Write an adapter of rank 2, and return its file of weights."""
    (directory / "adapter_config.json").write_text('{"r": 2}')
    path = directory / name
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        content = {key: torch.from_numpy(tensor) for key, tensor in tensors.items()}
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def write(directory: Path, config: Any = None, **shape: int) -> Path:
    directory.mkdir(exist_ok=True)
    write_weights(directory, weights(**shape), FILES[0])
    if config is not None:
        (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def test_an_adapter_that_fits_passes(tmp_path: Path) -> None:
    read_ahead(write(tmp_path / "a", {"r": 8, "rank_pattern": {"q_proj": 8}}), 8, BASE)
    read_ahead(write(tmp_path / "b", inner=3), 8, {})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "missing required field `r`"),
        ({"r": 0}, r"Expected `int` >= 1 - at `\$\.r`"),
        ({"r": True}, "got `bool`"),
        ({"r": "8"}, "got `str`"),
        ({"r": 2, "rank_pattern": {"q_proj": 0}}, "rank_pattern"),
        ({"r": 9}, "r 9 .*max_lora_rank 8"),
        ({"r": 2, "rank_pattern": {"q_proj": 32}}, "rank_pattern.q_proj 32"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_a_rank_that_the_engine_has_no_room_for_is_refused(tmp_path: Path, config: Any, why: str) -> None:
    with pytest.raises(AdapterFailed, match=why):
        read_ahead(write(tmp_path / "a", config), 8, BASE)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    for missing in ("none", "x" * 5000):
        with pytest.raises(AdapterFailed):
            read_ahead(tmp_path / missing, 8, {})
    adapter = write(tmp_path / "a")
    (adapter / FILES[0]).unlink()
    with pytest.raises(AdapterFailed, match=r"adapter_model\.safetensors"):
        read_ahead(adapter, 8, {})
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterFailed, match="Input data was truncated"):
        read_ahead(adapter, 8, {})
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(AdapterFailed, match="No such file"):
        read_ahead(adapter, 8, {})


def _in_place(adapter: Path) -> None:
    """Write other weights of the same size, and restore the file's time."""
    path = adapter / "adapter_model.safetensors"
    state, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + b"\x3f")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def _config(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 9}))


def _other_directory(adapter: Path) -> None:
    shutil.copytree(adapter, adapter.with_name("other"))
    _config(adapter.with_name("other"))
    adapter.rename(adapter.with_name("former"))
    adapter.symlink_to(adapter.with_name("other"))


def _another_kind(adapter: Path) -> None:
    """Replace the safetensors file by a PyTorch file with the same weights."""
    path = adapter / "adapter_model.safetensors"
    torch.save(load_file(path), adapter / "adapter_model.bin")
    path.unlink()


@pytest.mark.parametrize("change", [_in_place, _config, _other_directory, _another_kind])
def test_an_adapter_whose_files_have_changed_is_refused_until_they_are_as_before(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    adapter = write(tmp_path / "a")
    shutil.copytree(adapter, tmp_path / "kept")
    loaded = read_ahead(adapter, 8, BASE)
    assert read_ahead(adapter, 8, BASE, loaded) == loaded
    change(adapter)
    with pytest.raises(AdapterFailed, match="changed since it was loaded"):
        read_ahead(adapter, 8, BASE, loaded)
    read_ahead(tmp_path / "kept", 8, BASE, loaded)


def test_shapes_of_the_base_model_are_those_of_its_plain_weights(tmp_path: Path) -> None:
    half, packed = np.zeros((6, 4), dtype=np.float16), np.zeros((6, 1), dtype=np.uint8)
    save_file({"a.weight": half, "b.weight": packed}, tmp_path / "model-1.safetensors")
    assert base_shapes(tmp_path) == {"a.weight": (6, 4)}
    assert base_shapes(Path("owner/name")) == {}
    (tmp_path / "model-2.safetensors").write_bytes(b"nonsense")
    assert base_shapes(tmp_path) == {}


@given(st.binary(max_size=300))
def test_no_file_of_weights_makes_the_check_fail_in_another_way(tmp_path_factory: Any, content: bytes) -> None:
    adapter = write(tmp_path_factory.mktemp("any"))
    (adapter / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterFailed):
        read_ahead(adapter, 8, BASE)


HEADERS = st.dictionaries(
    st.text(max_size=8),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "U8", 3]),
            "shape": st.lists(st.integers(-3, 9), max_size=3) | st.text(max_size=2),
            "data_offsets": st.lists(st.integers(-3, 9), max_size=3) | st.none(),
        },
    )
    | st.none()
    | st.integers(),
    max_size=3,
)


@given(HEADERS)
def test_no_header_makes_the_check_fail_in_another_way(tmp_path_factory: Any, header: dict[str, Any]) -> None:
    adapter = write(tmp_path_factory.mktemp("any"))
    text = json.dumps(header).encode()
    (adapter / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with contextlib.suppress(AdapterFailed):
        read_ahead(adapter, 8, BASE)


def test_tensors_that_are_no_halves_of_a_pair_are_left_to_the_engine(tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": np.zeros(3), f"{LAYER}.weight": np.zeros((99, 99))}, FILES[0])
    read_ahead(tmp_path, 8, BASE)


def test_an_adapter_that_is_loaded_later_is_checked_without_its_weights(tmp_path: Path) -> None:
    check_adapter(write(tmp_path / "a", inner=3), 8)
    with pytest.raises(AdapterFailed, match=r"r 2 .*max_lora_rank 1"):
        check_adapter(tmp_path / "a", 1)
    (tmp_path / "a" / FILES[0]).unlink()
    with pytest.raises(AdapterFailed):
        check_adapter(tmp_path / "a", 8)


@pytest.mark.parametrize("scale", ["NaN", "Infinity", "-1e999", '"8"', "true", "[8]"])
@pytest.mark.parametrize("where", ["lora_alpha", "alpha_pattern"])
def test_a_scaling_that_is_no_finite_number_is_refused(tmp_path: Path, scale: str, where: str) -> None:
    adapter = write(tmp_path / "a")
    given = scale if where == "lora_alpha" else f'{{"q_proj": {scale}}}'
    (adapter / "adapter_config.json").write_text(f'{{"r": 2, "{where}": {given}}}')
    with pytest.raises(AdapterFailed):
        read_ahead(adapter, 8, BASE)


@pytest.mark.parametrize(("name", "zipped"), [*((name, True) for name in FILES), ("adapter_model.bin", False)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64])
def test_weights_that_are_not_finite_are_refused_by_the_name_of_their_tensor(
    tmp_path: Path, name: str, zipped: bool, value: float, kind: Any
) -> None:
    tensors = weights(kind=kind)
    write_weights(tmp_path, tensors, name, zipped=zipped)
    read_ahead(tmp_path, 8, BASE)
    tensors[SECOND][5, 1] = value
    path = write_weights(tmp_path, tensors, name, zipped=zipped)
    with pytest.raises(AdapterFailed) as refused:
        read_ahead(tmp_path, 8, BASE)
    assert f"{path}: {SECOND} " in refused.value.message


def test_weights_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_weights(tmp_path, weights(), FILES[0])

    def fails(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(AdapterFailed, match=f"{path} .*Input/output error"):
        read_ahead(tmp_path, 8, BASE)


@pytest.mark.parametrize("name", FILES[:2])
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"inner": 3}, r"lora_A\.weight .*\[2, 3\].*\[2, 4\]"),
        ({"inner": 5}, r"lora_A\.weight .*\[2, 5\]"),
        ({"outer": 5}, r"lora_B\.weight .*\[5, 2\].*\[6, 2\]"),
        ({"rank": 16}, "rank 16 .*max_lora_rank 8"),
    ],
)
def test_weights_for_another_model_are_refused_though_vllm_would_take_them(
    tmp_path: Path, name: str, shape: dict[str, int], why: str
) -> None:
    write_weights(tmp_path, weights(**shape), name)
    with pytest.raises(AdapterFailed, match=why):
        read_ahead(tmp_path, 8, BASE)


class Code:
    """An object that makes a directory when its pickle is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    mark = tmp_path / "ran"
    content: dict[str, Any] = {FIRST: torch.zeros(2, 4), "more": Code(mark)}
    (tmp_path / "adapter_config.json").write_text('{"r": 2}')
    torch.save(content, tmp_path / "adapter_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(AdapterFailed) as refused:
        read_ahead(tmp_path, 8, BASE)
    assert str(tmp_path / "adapter_model.bin") in refused.value.message
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([torch.zeros(2)], "list"),
        ({"r": 8}, "'r'"),
        ({1: torch.zeros(2)}, "'1'"),
        ({"wide": torch.zeros(1).expand(1 << 40)}, "wide"),
    ],
)
def test_a_pickle_of_other_things_is_refused(tmp_path: Path, content: Any, why: str) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 2}')
    torch.save(content, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFailed, match=why):
        read_ahead(tmp_path, 8, BASE)


@pytest.mark.parametrize("name", FILES)
def test_a_half_that_is_alone_and_no_tensor_at_all_are_refused(tmp_path: Path, name: str) -> None:
    tensors = weights()
    write_weights(tmp_path, {SECOND: tensors[SECOND]}, name)
    with pytest.raises(AdapterFailed, match=f"{SECOND} .*{FIRST}"):
        read_ahead(tmp_path, 8, BASE)
    write_weights(tmp_path, {}, name)
    with pytest.raises(AdapterFailed):
        read_ahead(tmp_path, 8, BASE)


@pytest.mark.parametrize("name", FILES)
def test_weights_that_end_early_or_are_nothing_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_weights(tmp_path, weights(), name)
    whole = path.read_bytes()
    for content in (whole[:-4], whole[: len(whole) // 2], b"", b"nonsense", bytes(100)):
        path.write_bytes(content)
        with pytest.raises(AdapterFailed) as refused:
            read_ahead(tmp_path, 8, BASE)
        assert refused.value.message.startswith(str(path))
        assert "\n" not in refused.value.message
    path.unlink()
    with pytest.raises(AdapterFailed):
        read_ahead(tmp_path, 8, BASE)
