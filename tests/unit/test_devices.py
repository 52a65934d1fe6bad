from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container import devices as container_devices
from container.devices import device_groups, gpu_count
from handlers.workers.devices import Devices, on_device
from handlers.workers.process import ProcessPlan
from handlers.workers.runtime.messages import LoadOrder
from handlers.workers.worker import WorkerPlan


@pytest.mark.parametrize(
    ("gpus", "each", "load_on", "groups"),
    [
        (0, 1, "*", ()),
        (4, 1, "*", ("0", "1", "2", "3")),
        (4, 2, "*", ("0,1", "2,3")),
        (3, 2, "*", ("0,1",)),
        (4, 1, "1;gpu3", ("1", "3")),
        (4, 1, "cpu", ()),
        (4, 1, "-1", ()),
        (0, 1, "0", ()),
    ],
)
def test_workers_get_the_devices_that_the_settings_name(
    gpus: int, each: int, load_on: str, groups: tuple[str, ...]
) -> None:
    assert device_groups(gpus, each, load_on) == groups


@pytest.mark.parametrize(("each", "load_on"), [(3, "*"), (1, "2"), (1, "x"), (2, "0")])
def test_devices_that_are_not_there_are_an_error(each: int, load_on: str) -> None:
    with pytest.raises(ValueError, match=r"there (is|are)"):
        device_groups(2, each, load_on)


def test_gpus_are_counted_by_their_files_and_by_what_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(container_devices, "_DEVICE_FILES", tmp_path)
    assert gpu_count({}) == 2
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert gpu_count({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


@given(st.lists(st.sampled_from(["0", "1", "2"]), unique=True, min_size=1), st.integers(1, 12), st.data())
def test_workers_are_spread_over_the_devices_also_after_some_have_ended(
    groups: list[str], workers: int, data: st.DataObject
) -> None:
    devices = Devices(groups)
    running = [devices.take() for _ in range(workers)]
    ended = data.draw(st.lists(st.sampled_from(range(workers)), unique=True))
    for index in ended:
        devices.give_back(running[index])
    for index in ended:
        running[index] = devices.take()
    counts = [Counter(running)[group] for group in groups]
    assert max(counts) - min(counts) <= 1 + len(ended)
    assert len(running) == workers


def test_a_worker_is_told_its_device_and_sees_only_its_own_of_several() -> None:
    order = LoadOrder(
        model_dir="/m", entry_point="x", function="handle", async_mode=False, properties=(), standing_properties=()
    )
    plan = WorkerPlan(
        process=ProcessPlan(python="python", directory=Path("/m"), environment={"A": "1"}), order=order, load_timeout=1
    )
    assert on_device(plan, "2").order.standing_properties == (("device_id", "2"),)
    assert on_device(plan, "2").process.environment == {"A": "1"}
    several = on_device(plan, "2,3")
    assert several.process.environment == {"A": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert several.order.standing_properties == (("device_id", "0"),)
    hidden = replace(plan, process=replace(plan.process, environment={"CUDA_VISIBLE_DEVICES": "4, 5,GPU-a,GPU-b"}))
    assert on_device(hidden, "2,3").process.environment == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
