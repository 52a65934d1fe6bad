"""Which files of a model directory count as its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from handlers.engines.weight_files import weight_bytes, weight_files


def write(directory: Path, **sizes: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        (directory / name.replace("__", ".")).write_bytes(b"x" * size)


def test_safetensors_count_and_the_same_weights_in_other_formats_do_not(tmp_path: Path) -> None:
    write(tmp_path, model__safetensors=100, pytorch_model__bin=100, consolidated__safetensors=100, config__json=7)
    write(tmp_path / "original", consolidated__pth=100)
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    assert weight_bytes(tmp_path) == 100


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_the_files_of_an_index_count(tmp_path: Path, index: str) -> None:
    write(tmp_path, a__weights=10, b__weights=20, stray__safetensors=40)
    (tmp_path / index).write_text(json.dumps({"weight_map": {"x": "a.weights", "y": "b.weights", "z": "a.weights"}}))
    assert weight_bytes(tmp_path) == 30


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"x": "missing.safetensors"}}', '{"weight_map": 1}'])
def test_an_unusable_index_does_not_count(tmp_path: Path, text: str) -> None:
    write(tmp_path, model__safetensors=5)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert weight_bytes(tmp_path) == 5


def test_pickles_count_where_there_are_no_safetensors_but_not_what_trainers_leave(tmp_path: Path) -> None:
    write(tmp_path, pytorch_model__bin=8, training_args__bin=50)
    assert weight_bytes(tmp_path) == 8


def test_only_a_consolidated_file(tmp_path: Path) -> None:
    write(tmp_path, consolidated__safetensors=9)
    assert weight_bytes(tmp_path) == 9


def test_a_single_file_is_its_own_weights_and_a_hub_id_has_none(tmp_path: Path) -> None:
    write(tmp_path, model__gguf=3)
    assert weight_bytes(tmp_path / "model.gguf") == 3
    assert weight_bytes("meta-llama/Llama-3.1-8B") == 0
