"""Which files of a model directory count as its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.memory.weight_files import draft_model, expert_bytes, is_expert, weight_bytes, weight_files


def write(directory: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"x" * size)


@pytest.mark.parametrize(
    ("files", "counted"),
    [
        (
            {"model.safetensors": 1, "pytorch_model.bin": 9, "consolidated.safetensors": 9, "original/x.pth": 9},
            ["model.safetensors"],
        ),
        ({"pytorch_model.bin": 8, "training_args.bin": 50, "config.json": 7}, ["pytorch_model.bin"]),
        ({"consolidated.safetensors": 9}, ["consolidated.safetensors"]),
    ],
)
def test_the_weights_count_in_one_format_alone(tmp_path: Path, files: dict[str, int], counted: list[str]) -> None:
    write(tmp_path, files)
    assert [file.name for file in weight_files(tmp_path)] == counted
    assert weight_bytes(tmp_path) == files[counted[0]]


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_the_files_of_an_index_count(tmp_path: Path, index: str) -> None:
    write(tmp_path, {"a.weights": 10, "b.weights": 20, "stray.safetensors": 40})
    (tmp_path / index).write_text(json.dumps({"weight_map": {"x": "a.weights", "y": "b.weights", "z": "a.weights"}}))
    assert weight_bytes(tmp_path) == 30


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"x": "missing.safetensors"}}', '{"weight_map": 1}'])
def test_an_unusable_index_does_not_count(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"model.safetensors": 5})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert weight_bytes(tmp_path) == 5


def test_a_single_file_is_its_own_weights_and_a_hub_id_has_none(tmp_path: Path) -> None:
    write(tmp_path, {"model.gguf": 3})
    assert weight_bytes(tmp_path / "model.gguf") == 3
    assert weight_bytes("meta-llama/Llama-3.1-8B") == 0


@pytest.mark.parametrize(
    ("tensor", "expert"),
    [
        ("model.layers.3.mlp.experts.0.gate_proj.weight", True),
        ("model.layers.0.block_sparse_moe.experts.7.w1.weight", True),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", True),
        ("experts.0.w", True),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.self_attn.q_proj.weight", False),
    ],
)
def test_experts_are_known_by_their_names(tensor: str, expert: bool) -> None:
    assert is_expert(tensor) == expert


def test_the_size_of_experts_is_that_of_the_headers(tmp_path: Path) -> None:
    tensors = {"__metadata__": {}, "a.experts.1.w": {"data_offsets": [4, 10]}, "b": {"data_offsets": [0, 4]}}
    header = json.dumps(tensors).encode()
    (tmp_path / "1.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0123456789")
    (tmp_path / "2.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0123456789")
    assert expert_bytes(tmp_path) == 12


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x05\0\0\0\0\0\0\0{not}", b"\2\0\0\0\0\0\0\0[]", b"\xff" * 8])
def test_a_broken_file_has_no_experts(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert expert_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ({"model": "/m/draft", "num_speculative_tokens": 2}, "/m/draft"),
        ('{"model": "a/draft"}', "a/draft"),
        ({"method": "ngram", "num_speculative_tokens": 2}, ""),
        ("ngram", ""),
        ({"model": 3}, ""),
        ("[]", ""),
        (None, ""),
    ],
)
def test_the_draft_model_of_a_speculative_config(given: object, model: str) -> None:
    assert draft_model(given) == model
