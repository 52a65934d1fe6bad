"""The memory that a model needs, the check that the machine has it, and the choice of the model's GPUs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.gpus import GpusUnknown, gpu_count
from container.models import memory
from container.models.memory import OutOfMemory, check_room, free_memory
from container.models.placement import placed
from container.settings import environment
from container.settings.settings import Settings
from engines.memory.cpu_memory import Limit
from handlers.model_config import ModelConfig
from tests.settings import load_settings
from tests.stand_ins.model_configs import LLAMA

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30
MAIN = 100 * MEBIBYTE
GPU = 100 * MEBIBYTE
EMPTY = 79 * GIBIBYTE
FULL = GIBIBYTE


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    sparse(tmp_path / "model.safetensors", 10 * MEBIBYTE - 2)
    return tmp_path


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    """Make a model with 100 GiB of weights. It needs two GPUs of 80 GiB. The weights take no room on the disk."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    sparse(tmp_path / "model.safetensors", 100 * GIBIBYTE)
    return tmp_path


def sparse(path: Path, size: int) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def load(model_dir: Path, properties: str = "") -> Settings:
    (model_dir / "serving.properties").write_text(properties)
    return load_settings(model_dir, {})


def needed(settings: Settings, gpus: int = 0) -> tuple[int, int]:
    """Return the number of GPUs that a model needs, and the MiB on each. No GPU has free memory here."""
    nothing = [0] * (gpus + 1)
    with pytest.raises(OutOfMemory) as caught:
        check_room(settings, nothing)
    found = re.search(r"needs (\d+) MiB of (GPU )?memory(?: on each of (\d+) GPUs)?", str(caught.value))
    assert found is not None
    return int(found[3] or (1 if found[2] else 0)), int(found[1])


@pytest.mark.parametrize(
    ("properties", "gpus", "expected"),
    [
        ("", 0, (0, 11)),  # The size of the files plus a fifth.
        ("required_memory_mb=3", 0, (0, 3)),
        ("required_memory_mb=3\noption.tensor_parallel_degree=2", 2, (2, 3)),
        (f"option.kv_cache_memory_bytes={MEBIBYTE}", 0, (0, 12)),
        (f"option.kv_cache_memory_bytes={MEBIBYTE}\noption.data_parallel_size=2", 0, (0, 25)),
        ("maxWorkers=3", 0, (0, 35)),
        ("maxWorkers=3\nrequired_memory_mb=4", 0, (0, 12)),
        ("maxWorkers=3\noption.rolling_batch=disable", 0, (0, 11)),
    ],
)
def test_a_model_needs_its_files_and_its_cache_unless_it_declares_more_or_less(
    model_dir: Path, properties: str, gpus: int, expected: tuple[int, int]
) -> None:
    assert needed(load(model_dir, properties), gpus) == expected


def test_the_declaration_for_the_device_goes_before_the_general_one(model_dir: Path) -> None:
    device = "gpu" if gpu_count() else "cpu"
    properties = f"required_memory_mb=3\n{device}.required_memory_mb=4\n{device}.reserved_memory_mb=0"
    settings = load(model_dir, properties)
    assert (needed(settings), settings.reserved_memory, settings.warnings) == ((0, 4), 0, ())


def test_weights_in_a_second_format_and_other_files_are_not_counted(model_dir: Path) -> None:
    alone = needed(load(model_dir))
    sparse(model_dir / "pytorch_model.bin", 10 * MEBIBYTE)
    sparse(model_dir / "original" / "consolidated.00.pth", 10 * MEBIBYTE)
    sparse(model_dir / ".git" / "pack", 10 * MEBIBYTE)
    assert needed(load(model_dir)) == alone


def test_a_custom_handlers_model_counts_all_its_files_where_none_is_known_to_hold_weights(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs): ...")
    sparse(tmp_path / "model.onnx", 10 * MEBIBYTE)
    sparse(tmp_path / ".git" / "pack", 50 * MEBIBYTE)
    assert needed(load(tmp_path)) == (0, 12)


@pytest.mark.parametrize(
    ("properties", "gpus", "count", "gibibytes"),
    [
        ("", 4, 4, 30),
        ("option.tensor_parallel_degree=4", 4, 4, 30),
        ("option.tensor_parallel_degree=1", 4, 1, 120),
        ("option.tensor_parallel_degree=max", 8, 8, 15),
        ("option.tensor_parallel_degree=2\noption.pipeline_parallel_degree=2", 4, 4, 30),
        ("option.tensor_parallel_degree=2\noption.data_parallel_size=2", 4, 4, 60),
        ("option.tensor_parallel_degree=2\noption.prefill_context_parallel_size=2", 4, 4, 60),
        ("option.prefill_context_parallel_size=2", 4, 4, 60),
        ("option.pipeline_parallel_degree=2\noption.nnodes=2", 4, 4, 15),
        ("option.tensor_parallel_degree=1\noption.data_parallel_size=4\noption.data_parallel_size_local=1", 4, 1, 120),
        ("option.rolling_batch=scheduler", 4, 4, 30),
        ("option.rolling_batch=disable", 4, 1, 120),
        ("option.rolling_batch=disable\noption.device_map=auto", 4, 4, 30),
    ],
)
def test_a_large_model_is_shared_out_to_the_gpus_that_it_takes(
    large_model: Path, properties: str, gpus: int, count: int, gibibytes: int
) -> None:
    assert needed(load(large_model, properties), gpus) == (count, gibibytes * 1024)


def test_experts_are_shared_out_to_data_parallel_ranks(model_dir: Path) -> None:
    experts, others = 640 * GIBIBYTE, 20 * GIBIBYTE
    tensors = {
        "__metadata__": {"format": "pt"},
        "model.layers.3.mlp.experts.0.up_proj.weight": {"dtype": "F8_E4M3", "data_offsets": [0, experts]},
        "model.layers.3.mlp.shared_experts.up_proj.weight": {"data_offsets": [experts, experts + others]},
    }
    header = json.dumps(tensors).encode()
    with (model_dir / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(experts + others)  # takes no room on the disk
    each = int(1.2 * (others + experts / 8)) // MEBIBYTE
    properties = "option.tensor_parallel_degree=1\noption.data_parallel_size=8\noption.enable_expert_parallel=true"
    assert needed(load(model_dir, properties), 8) == (8, each)
    assert needed(load(model_dir, "option.tensor_parallel_degree=8"), 8) == (8, int(1.2 * 660 * 1024 / 8))


@pytest.mark.parametrize(
    "properties",
    [
        "option.speculative_draft_model=draft",
        'option.speculative_config={"model": "draft", "num_speculative_tokens": 3}',
    ],
)
def test_a_draft_model_is_counted(model_dir: Path, properties: str) -> None:
    sparse(model_dir / "draft" / "model.safetensors", 5 * MEBIBYTE)
    (model_dir / "draft" / "config.json").write_text("{}")
    assert needed(load(model_dir, properties)) == (0, 17)
    assert needed(load(model_dir, properties + "\noption.tensor_parallel_degree=2"), 2) == (2, 8)


def test_what_has_to_stay_free_is_added(model_dir: Path) -> None:
    check_room(load(model_dir, "required_memory_mb=60\nreserved_memory_mb=40"), (MAIN,))
    with pytest.raises(OutOfMemory, match=r"60 MiB .*41 MiB .*100 MiB"):
        check_room(load(model_dir, "required_memory_mb=60\nreserved_memory_mb=41"), (MAIN,))
    with pytest.raises(OutOfMemory, match=r" 1 MiB .*500 MiB .*100 MiB of GPU 0$"):
        check_room(load(model_dir, "required_memory_mb=1"), (GPU, MAIN))


def test_a_model_larger_than_one_gpu_fits_on_two_with_room(large_model: Path) -> None:
    settings = load(large_model)
    check_room(settings, (FULL, EMPTY, EMPTY, MAIN))
    assert placed(settings.config, (FULL, EMPTY, EMPTY, MAIN)).devices == (1, 2, 0)
    with pytest.raises(OutOfMemory) as caught:
        check_room(settings, (FULL, EMPTY, FULL, MAIN))
    assert str(caught.value).split(" needs ")[1] == (
        "40960 MiB of memory on each of 3 GPUs and 500 MiB have to stay free (reserved_memory_mb); "
        "free are 1024 MiB of GPU 0, 80896 MiB of GPU 1, 1024 MiB of GPU 2"
    )


def test_a_model_stays_on_the_devices_that_it_may_use(large_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 4)
    room = (EMPTY, EMPTY, FULL, EMPTY, MAIN)
    settings = load(large_model, "load_on_devices=1;gpu3")
    assert settings.config.devices == (1, 3)
    check_room(settings, room)
    assert placed(settings.config, room).devices == (1, 3)
    with pytest.raises(OutOfMemory, match=r"2 GPUs .*80896 MiB of GPU 0, 1024 MiB of GPU 2$"):
        check_room(load(large_model, "load_on_devices=0;2"), room)


def test_each_copy_needs_its_gpus(large_model: Path) -> None:
    two = load(large_model, "maxWorkers=2\noption.tensor_parallel_degree=2")
    check_room(two, (EMPTY, EMPTY, EMPTY, EMPTY, FULL, MAIN))
    with pytest.raises(OutOfMemory, match=r"61440 MiB .*4 GPUs"):
        check_room(two, (EMPTY, EMPTY, EMPTY, FULL, FULL, MAIN))
    check_room(two, (EMPTY, EMPTY, EMPTY, MAIN))  # one copy fits, and the log says so
    without_degree = load(large_model, "maxWorkers=2")
    check_room(without_degree, (*[EMPTY] * 4, *[FULL] * 4, MAIN))
    with pytest.raises(OutOfMemory):
        check_room(without_degree, (*[EMPTY] * 3, *[FULL] * 5, MAIN))


def test_a_model_on_the_cpu_needs_main_memory(large_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 2)
    settings = load(large_model, "load_on_devices=cpu\noption.rolling_batch=disable")
    assert settings.config.devices == ()
    with pytest.raises(OutOfMemory, match=r"122880 MiB .*500 MiB .*100 MiB"):
        check_room(settings, (EMPTY, EMPTY, MAIN))
    assert placed(settings.config, (EMPTY, EMPTY, MAIN)).devices == ()


@pytest.mark.parametrize(
    "option", ["distributed_executor_backend=ray", "data_parallel_backend=ray", "nnodes=2", "device_ids=1"]
)
def test_where_vllm_or_ray_choose_the_gpus_they_go_on_to(model_dir: Path, option: str) -> None:
    config = load(model_dir, f"option.{option}").config
    assert placed(config, (FULL, EMPTY, MAIN)) is config


def test_a_custom_handlers_workers_keep_their_devices_and_all_of_them_need_room(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs): ...")
    settings = load(tmp_path, "required_memory_mb=2000")
    handler_config = settings.config.handler
    assert handler_config is not None
    on_gpus = replace(
        settings, config=replace(settings.config, handler=replace(handler_config, devices=("0,1", "3,4")))
    )
    room = (EMPTY, EMPTY, FULL, EMPTY, EMPTY, MAIN)
    check_room(on_gpus, room)
    assert placed(on_gpus.config, room) is on_gpus.config
    with pytest.raises(OutOfMemory, match=r"2000 MiB .*4 GPUs"):
        check_room(on_gpus, (EMPTY, EMPTY, FULL, FULL, EMPTY, MAIN))


@given(
    st.lists(st.integers(0, 80), max_size=8),
    st.one_of(st.none(), st.lists(st.integers(0, 9), unique=True)),
    st.integers(1, 8),
)
def test_the_gpus_that_are_taken_are_allowed_ones_and_none_left_has_more_room(
    gibibytes: list[int], allowed: list[int] | None, count: int
) -> None:
    room = (*(one * GIBIBYTE for one in gibibytes), MAIN)
    config = ModelConfig(
        name="m", model_dir=Path("/m"), model_id="/m", devices=None if allowed is None else tuple(allowed)
    )
    found = placed(config, room).devices
    may = set(range(len(gibibytes))) & (set(allowed) if allowed is not None else set(range(8)))
    if not may:
        assert found == config.devices
        return
    assert found is not None
    assert sorted(found) == sorted(may)
    taken, left = found[:count], found[count:]
    assert all(gibibytes[one] >= gibibytes[other] for one in taken for other in left)


def test_gpus_that_are_about_as_free_are_taken_in_their_order(model_dir: Path) -> None:
    room = [79 * GIBIBYTE + free for free in (3, 400 * MEBIBYTE, 0)]
    assert placed(load(model_dir).config, (*room, MAIN)).devices == (0, 1, 2)


def test_a_device_that_is_not_there_is_refused_by_name(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 2)
    with pytest.raises(Exception, match=r'load_on_devices is "0;5" .*: there is no device 5; allowed: .* from 0 to 1'):
        load(model_dir, "load_on_devices=0;5")
    monkeypatch.setattr(environment, "gpu_count", lambda: 0)
    assert load(model_dir, "load_on_devices=0;5").config.devices is None


def test_a_size_counts_every_file_once_and_a_hub_id_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"xx")
    (tmp_path / "y").write_bytes(b"yyy")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"xx")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert memory.size_of(str(tmp_path)) == 5
    assert memory.size_of("org/name") == 0


def test_without_a_gpu_main_memory_counts_within_its_smallest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_count", lambda: 0)
    assert 0 < free_memory()[0] <= psutil.virtual_memory().total
    found = [Limit("the machine", 9 * MEBIBYTE, 10 * MEBIBYTE), Limit("the control group /", MEBIBYTE, 4 * MEBIBYTE)]
    monkeypatch.setattr(memory, "machine_limits", lambda: found)
    assert free_memory() == (MEBIBYTE,)


def test_the_memory_of_each_gpu_comes_before_main_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "gpu_count", lambda: 2)
    monkeypatch.setattr(memory, "gpu_memory", lambda: (9, 1))
    first, second, main = free_memory()
    assert (first, second) == (9, 1)
    assert main > 9
    assert caplog.text == ""

    monkeypatch.setattr(memory, "gpu_memory", Mock(side_effect=GpusUnknown("there is no program nvidia-smi")))
    assert len(free_memory()) == 1
    assert "nvidia-smi" in caplog.text
