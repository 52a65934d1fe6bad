"""Whether a further model fits: what is declared, what is estimated, and what is free."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from container import memory
from container.devices import gpu_count
from container.memory import Free, OutOfMemory, check_room, free_memory, needed_bytes
from container.settings import Settings, load_settings
from handlers.engines.cpu_memory import Limit

MEBIBYTE = 1 << 20
MAIN = Free(100 * MEBIBYTE, 1000 * MEBIBYTE, gpu=False)
GPU = Free(100 * MEBIBYTE, 1000 * MEBIBYTE, gpu=True)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10 * MEBIBYTE - 2)
    return tmp_path


def load(model_dir: Path, properties: str = "") -> Settings:
    (model_dir / "serving.properties").write_text(properties)
    return load_settings(model_dir, {})


def test_without_a_declaration_it_is_the_files_and_a_fifth_more(model_dir: Path) -> None:
    (model_dir / "serving.properties").touch()
    assert needed_bytes(load(model_dir), MAIN) == 12 * MEBIBYTE


def test_a_declaration_goes_before_the_estimate_and_that_of_the_device_before_the_general(model_dir: Path) -> None:
    assert needed_bytes(load(model_dir, "required_memory_mb=3"), MAIN) == 3 * MEBIBYTE
    device = "gpu" if gpu_count() else "cpu"
    properties = f"required_memory_mb=3\n{device}.required_memory_mb=4\n{device}.reserved_memory_mb=0"
    settings = load(model_dir, properties)
    assert needed_bytes(settings, MAIN) == 4 * MEBIBYTE
    assert settings.memory.reserved == 0
    assert settings.warnings == ()


def test_the_kv_cache_is_added_where_its_size_is_known(model_dir: Path) -> None:
    settings = load(model_dir, f"option.kv_cache_memory_bytes={MEBIBYTE}")
    assert needed_bytes(settings, MAIN) - settings_size(model_dir) in (MEBIBYTE, MEBIBYTE - 1)


def settings_size(model_dir: Path) -> int:
    return int(1.2 * memory.size_of(str(model_dir)))


def test_on_a_gpu_it_is_what_vllm_will_ask_for(model_dir: Path) -> None:
    assert needed_bytes(load(model_dir), GPU) == 900 * MEBIBYTE
    assert needed_bytes(load(model_dir, "option.gpu_memory_utilization=0.5"), GPU) == 500 * MEBIBYTE
    assert needed_bytes(load(model_dir, "option.gpu_memory_utilization=x"), GPU) == settings_size(model_dir)
    assert needed_bytes(load(model_dir, "option.rolling_batch=disable"), GPU) == settings_size(model_dir)


def test_what_has_to_stay_free_is_added(model_dir: Path) -> None:
    check_room(load(model_dir, "required_memory_mb=60\nreserved_memory_mb=40"), MAIN)
    with pytest.raises(OutOfMemory, match=r"needs 60 MiB of memory and 41 MiB have to stay free .* 100 MiB are free"):
        check_room(load(model_dir, "required_memory_mb=60\nreserved_memory_mb=41"), MAIN)
    with pytest.raises(OutOfMemory, match="of GPU memory and 500 MiB"):
        check_room(load(model_dir, "required_memory_mb=1"), GPU)


def test_a_size_counts_every_file_once_and_a_hub_id_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"xx")
    (tmp_path / "y").write_bytes(b"yyy")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert memory.size_of(str(tmp_path)) == 5
    assert memory.size_of("org/name") == 0


def test_without_a_gpu_main_memory_counts_within_its_smallest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_count", lambda: 0)
    assert 0 < free_memory().free <= psutil.virtual_memory().total
    found = [Limit("the machine", 9 * MEBIBYTE, 10 * MEBIBYTE), Limit("the control group /", MEBIBYTE, 4 * MEBIBYTE)]
    monkeypatch.setattr(memory, "machine_limits", lambda: found)
    assert free_memory() == Free(MEBIBYTE, 4 * MEBIBYTE, gpu=False)


def test_the_fullest_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '900, 1000\\n100, 1000\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(memory, "gpu_count", lambda: 2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert free_memory() == Free(100 * MEBIBYTE, 1000 * MEBIBYTE, gpu=True)
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert free_memory().gpu is False
