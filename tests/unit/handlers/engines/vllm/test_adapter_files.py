"""What is wrong with an adapter's files, found before an engine reads them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from handlers.engines.vllm.lora_files import base_shapes, check_adapter, check_rank, check_shapes
from handlers.errors import AdapterFailed

LAYER = "model.layers.0.self_attn.q_proj"
BASE = {f"{LAYER}.weight": (6, 4)}


def tensors(rank: int = 2, inner: int = 4, outer: int = 6) -> dict[str, Any]:
    name = f"base_model.model.{LAYER}"
    return {
        f"{name}.lora_A.weight": np.zeros((rank, inner), dtype=np.float32),
        f"{name}.lora_B.weight": np.zeros((outer, rank), dtype=np.float32),
    }


def write(directory: Path, config: Any = None, **shape: int) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": 2} if config is None else config))
    save_file(tensors(**shape), directory / "adapter_model.safetensors")
    return directory


def test_an_adapter_that_fits_passes(tmp_path: Path) -> None:
    check_adapter(write(tmp_path / "a"), 8, BASE)
    check_adapter(write(tmp_path / "b", inner=3), 8, {})


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"inner": 3}, r"lora_A.weight has shape \[2, 3\]; the base model's weight asks for \[2, 4\]"),
        ({"inner": 5}, r"lora_A.weight has shape \[2, 5\]"),
        ({"outer": 5}, r"lora_B.weight has shape \[5, 2\]; the base model's weight asks for \[6, 2\]"),
        ({"rank": 16}, "has rank 16; option.max_lora_rank is 8"),
    ],
)
def test_weights_for_another_model_are_refused_though_vllm_would_take_them(
    tmp_path: Path, shape: dict[str, int], why: str
) -> None:
    with pytest.raises(AdapterFailed, match=why):
        check_adapter(write(tmp_path / "a", **shape), 8, BASE)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "r must be a positive integer, got None"),
        ({"r": 0}, "r must be a positive integer, got 0"),
        ({"r": True}, "got True"),
        ({"r": "8"}, "got '8'"),
        ({"r": 9}, "r is 9; option.max_lora_rank is 8"),
        ({"r": 2, "rank_pattern": {"q_proj": 32}}, "rank_pattern.q_proj is 32"),
        ([], "must hold a JSON object, got list"),
    ],
)
def test_a_rank_that_the_engine_has_no_room_for_is_refused(tmp_path: Path, config: Any, why: str) -> None:
    with pytest.raises(AdapterFailed, match=why):
        check_adapter(write(tmp_path / "a", config), 8, BASE)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterFailed, match="there is no directory"):
        check_adapter(tmp_path / "none", 8, {})
    with pytest.raises(AdapterFailed, match="there is no directory"):
        check_adapter(tmp_path / ("x" * 5000), 8, {})
    adapter = write(tmp_path / "a")
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(AdapterFailed, match="ends before tensor"):
        check_adapter(adapter, 8, {})
    weights.write_bytes(b"\xff" * 100)
    with pytest.raises(AdapterFailed, match="is not a safetensors file: its header would have"):
        check_adapter(adapter, 8, {})
    weights.unlink()
    with pytest.raises(AdapterFailed, match=r"has no weights; expected adapter_model\.safetensors"):
        check_adapter(adapter, 8, {})
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterFailed, match="is not valid JSON"):
        check_adapter(adapter, 8, {})
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(AdapterFailed, match="cannot be read: No such file"):
        check_adapter(adapter, 8, {})


def test_an_archive_and_an_adapter_one_folder_further_down_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").touch()
    with pytest.raises(
        AdapterFailed, match=r"a\.tar\.gz is a file; expected the directory .* an archive is not unpacked"
    ):
        check_adapter(tmp_path / "a.tar.gz", 8, {})
    write(tmp_path / "a")
    with pytest.raises(
        AdapterFailed, match=f"cannot be read: No such file or directory; there is one in {tmp_path}/a$"
    ):
        check_adapter(tmp_path, 8, {})


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
        check_adapter(adapter, 8, BASE)


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
        check_adapter(adapter, 8, BASE)


@given(st.dictionaries(st.text(max_size=20), st.lists(st.integers(0, 9), max_size=3).map(tuple)))
def test_tensors_that_are_no_halves_of_a_pair_are_left_to_the_engine(shapes: dict[str, tuple[int, ...]]) -> None:
    check_shapes({name: shape for name, shape in shapes.items() if "lora" not in name}, 8, BASE)


@given(st.integers(1, 8))
def test_any_rank_up_to_the_limit_will_do(rank: int) -> None:
    check_rank({"r": rank, "rank_pattern": {"q_proj": rank}}, 8)


@pytest.mark.parametrize("scale", ["NaN", "Infinity", "-1e999", '"8"', "true", "[8]"])
@pytest.mark.parametrize("where", ["lora_alpha", "alpha_pattern"])
def test_a_scaling_that_is_no_finite_number_is_refused(tmp_path: Path, scale: str, where: str) -> None:
    adapter = write(tmp_path / "a")
    given, name = (scale, where) if where == "lora_alpha" else (f'{{"q_proj": {scale}}}', f"{where}.q_proj")
    (adapter / "adapter_config.json").write_text(f'{{"r": 2, "{where}": {given}}}')
    with pytest.raises(AdapterFailed, match=f"{name} must be a finite number"):
        check_adapter(adapter, 8, BASE)
