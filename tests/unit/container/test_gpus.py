from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container import gpus as container_devices
from container.gpus import (
    GpusUnknown,
    SliceNotChosen,
    described_gpus,
    device_groups,
    gpu_count,
    gpu_figures,
    gpu_memory,
    machine_gpus,
    visible_memory,
)
from handlers.custom.worker import WorkerPlan
from handlers.custom.worker_pool import least_used, on_device
from handlers.custom.worker_process.socket_protocol import LoadRequest


@pytest.mark.parametrize(
    ("gpus", "each", "load_on", "groups"),
    [
        (0, 1, "*", ()),
        (4, 1, "*", ("0", "1", "2", "3")),
        (4, 2, "*", ("0,1", "2,3")),
        (3, 2, "*", ("0,1",)),
        (4, 1, "1;gpu3;1", ("1", "3")),
        (4, 2, "0", ("0,1",)),
        (4, 2, "2;0", ("2,3", "0,1")),
        (4, 2, "0;1", ("0,1",)),
        (4, 2, "1;3", ("1,3",)),
        (4, 1, "cpu", ()),
        (4, 1, "-1", ()),
        (0, 1, "0", ()),
    ],
)
def test_workers_get_the_devices_that_the_settings_name(
    gpus: int, each: int, load_on: str, groups: tuple[str, ...]
) -> None:
    assert device_groups(gpus, each, load_on) == groups


@pytest.mark.parametrize(("each", "load_on"), [(3, "*"), (1, "2"), (1, "x"), (2, "1")])
def test_devices_that_are_not_there_are_an_error(each: int, load_on: str) -> None:
    with pytest.raises(ValueError):
        device_groups(2, each, load_on)


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that adds device files to an empty /dev."""
    directory = tmp_path / "dev"
    directory.mkdir()
    monkeypatch.setattr(container_devices, "_DEVICE_FILES", directory)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def add(*names: str) -> None:
        for name in names:
            (directory / name).touch()

    return add


def test_gpus_are_counted_by_their_files_and_by_what_is_visible(
    dev: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    dev("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null")
    assert gpu_count() == 2
    # A MIG slice counts as the one GPU that CUDA shows.
    for visible, count in (("1", 1), ("", 0), ("-1", 0), (",".join(SLICES), 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_count() == count


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the driver's tool by a shell script."""

    def write(script: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)

    container_devices._listed_gpus.cache_clear()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return write


def test_under_wsl2_the_drivers_tool_counts_the_gpus(
    dev: Callable[..., None],
    nvidia_smi: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dev("dxg")
    nvidia_smi("echo 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA T400 (UUID: GPU-b)'")
    assert gpu_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_count() == 1
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert caplog.text == ""
    container_devices._listed_gpus.cache_clear()
    nvidia_smi("echo 'Failed to initialize NVML: GPU access blocked'; exit 17")
    assert gpu_count() == 0
    assert "WSL2 with /dev/dxg, but no NVIDIA GPU is used: nvidia-smi -L failed with 17: Failed to ini" in caplog.text


SLICES = ("MIG-11111111-aaaa", "MIG-22222222-bbbb")


def usage(free: str, total: str) -> str:
    return f"<fb_memory_usage><total>{total}</total><used>5 MiB</used><free>{free}</free></fb_memory_usage>"


def gpu(uuid: str, free: str, total: str, mig: str = "N/A", slices: str = "None") -> str:
    return (
        f"<gpu id='0'><mig_mode><current_mig>{mig}</current_mig></mig_mode><mig_devices>{slices}</mig_devices>"
        f"<uuid>{uuid}</uuid>{usage(free, total)}</gpu>"
    )


def report(*gpus: str) -> str:
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>'
        f"<attached_gpus>{len(gpus)}</attached_gpus>{''.join(gpus)}</nvidia_smi_log>"
    )


MIG_DEVICES = "".join(
    f"<mig_device><index>{index}</index>{usage(free, total)}</mig_device>"
    for index, (free, total) in enumerate([("19000 MiB", "20096 MiB"), ("9000 MiB", "9984 MiB")])
)
DIVIDED = gpu("GPU-abbb", "N/A", "81559 MiB", "Enabled", MIG_DEVICES)
WHOLE = gpu("GPU-aaaa", "80000 MiB", "81559 MiB", "Disabled")
OLDER = gpu("GPU-cccc", "100 MiB", "23034 MiB")
MEBIBYTE = 1 << 20


@pytest.mark.parametrize(
    ("gpus", "visible", "free"),
    [
        ((WHOLE, OLDER), None, (80000, 100)),
        ((WHOLE, OLDER), "1,0", (100, 80000)),
        ((WHOLE, OLDER), " 1", (100,)),
        ((WHOLE, OLDER), "GPU-c,GPU-aaaa", (100, 80000)),
        ((WHOLE, OLDER), "0,7,1", (80000,)),
        ((WHOLE, OLDER), "", ()),
        ((WHOLE, OLDER), "-1", ()),
        ((WHOLE, DIVIDED), "0", (80000,)),
        ((WHOLE, DIVIDED), "1", (19000,)),
        ((DIVIDED,), None, (19000,)),
        ((), None, ()),
    ],
)
def test_the_memory_of_what_is_visible_is_read_in_the_order_of_cuda(
    gpus: tuple[str, ...], visible: str | None, free: tuple[int, ...]
) -> None:
    found = visible_memory(report(*gpus), visible, "free")
    assert tuple(one // MEBIBYTE for one in found) == free


@pytest.mark.parametrize("visible", [None, "0,1", "GPU-abbb,GPU-aaaa"])
def test_a_divided_gpu_beside_others_has_to_be_chosen(visible: str | None) -> None:
    with pytest.raises(SliceNotChosen, match=r"2 GPUs .*1 .*CUDA_VISIBLE_DEVICES"):
        visible_memory(report(WHOLE, DIVIDED), visible, "free")


@pytest.mark.parametrize(
    ("text", "visible", "message"),
    [
        ("NVIDIA-SMI has failed", None, "is not XML"),
        (report(gpu("GPU-a", "N/A", "N/A")), None, "does not tell the memory of GPU 0: N/A"),
        (report(gpu("GPU-a", "[Insufficient Permissions]", "1 MiB")), None, "GPU 0: .Insufficient Permissions"),
        (report(gpu("GPU-a", "N/A", "9 MiB", "Enabled")), None, "MIG is on, but the GPU has no MIG slice"),
        (report(WHOLE, DIVIDED), "MIG-3", "does not tell the memory of the slice MIG-3"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, visible: str | None, message: str) -> None:
    with pytest.raises(GpusUnknown, match=message):
        visible_memory(text, visible, "free")


def test_the_drivers_tool_is_asked_and_its_failures_are_said(
    tmp_path: Path, nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GpusUnknown, match="nvidia-smi"):
        gpu_memory()
    nvidia_smi("echo 'No devices were found'; exit 6")
    with pytest.raises(GpusUnknown, match=r"nvidia-smi .*6: No devices were found"):
        gpu_memory()
    (tmp_path / "report").write_text(report(WHOLE, DIVIDED))
    nvidia_smi(f"cat {tmp_path}/report")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu_memory() == (80000 * MEBIBYTE,)


def test_a_machine_is_known_by_all_of_its_memory(
    tmp_path: Path, dev: Callable[..., None], nvidia_smi: Callable[[str], None]
) -> None:
    assert machine_gpus() == ()
    dev("nvidia0", "nvidia1")
    assert machine_gpus() == (0, 0), "there is no nvidia-smi"
    (tmp_path / "report").write_text(report(WHOLE, OLDER))
    nvidia_smi(f"cat {tmp_path}/report")
    assert machine_gpus() == (81559 * MEBIBYTE, 23034 * MEBIBYTE)
    (tmp_path / "report").write_text(report(WHOLE, DIVIDED))
    assert machine_gpus() == (0, 0), "it is unclear which GPU is meant"


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("4x24GiB", (24 << 30,) * 4),
        ("1x24GB", (24 * 10**9,)),
        (" 2 X 22.5 gib ", (int(22.5 * (1 << 30)),) * 2),
        ("4", (0,) * 4),
    ],
)
def test_a_machine_is_described_by_a_number_and_the_memory_of_each(text: str, gpus: tuple[int, ...]) -> None:
    assert described_gpus(text) == gpus


@given(st.one_of(st.text(max_size=20), st.from_regex(r"[0-9]{0,5}[xX]?[0-9.]{0,8}(GiB|gb|T)?", fullmatch=True)))
def test_a_text_describes_a_machine_or_is_refused_with_an_example(text: str) -> None:
    try:
        gpus = described_gpus(text)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = "4x24GiB" if 1 <= len(gpus) <= 128 else ""
    assert "4x24GiB" in refusal


@given(st.lists(st.sampled_from(["0", "1", "2"]), unique=True, min_size=1), st.integers(1, 12), st.data())
def test_workers_are_spread_over_the_devices_also_after_some_have_ended(
    groups: list[str], workers: int, data: st.DataObject
) -> None:
    running: list[str] = []
    for _ in range(workers):
        running.append(least_used(groups, running))
    ended = data.draw(st.lists(st.sampled_from(range(workers)), unique=True))
    running = [device for index, device in enumerate(running) if index not in ended]
    for _ in ended:
        running.append(least_used(groups, running))
    counts = [running.count(group) for group in groups]
    assert max(counts) - min(counts) <= 1 + len(ended)
    assert len(running) == workers


def test_a_worker_is_told_its_device_and_sees_only_its_own_of_several() -> None:
    assert least_used((), []) == "-1"
    request = LoadRequest(model_dir="/m", entry_point="x", function="handle", async_mode=False, properties={})
    plan = WorkerPlan(python="python", environment={"A": "1"}, load_request=request, load_timeout=1)
    assert on_device(plan, "2", False).load_request.device_id == "2"
    assert on_device(plan, "2", False).environment == {"A": "1"}
    alone = on_device(plan, "2", True)
    assert (alone.load_request.device_id, alone.environment) == ("0", {"A": "1", "CUDA_VISIBLE_DEVICES": "2"})
    assert on_device(plan, "-1", True).environment == {"A": "1"}
    several = on_device(plan, "2,3", False)
    assert several.environment == {"A": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert several.load_request.device_id == "0"
    hidden = replace(plan, environment={"CUDA_VISIBLE_DEVICES": "4, 5,GPU-a,GPU-b"})
    assert on_device(hidden, "2,3", False).environment == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}


def test_the_figures_of_gpus_have_the_names_of_the_drivers_tool(
    dev: Callable[..., None], nvidia_smi: Callable[[str], None]
) -> None:
    assert gpu_figures(60.0) == []
    dev("nvidia0")
    nvidia_smi("echo '0, NVIDIA H200, 570.1, 9000 MiB, 143771 MiB, 97 %, 61'")
    (gpu,) = gpu_figures(60.0)
    assert (gpu["name"], gpu["memory.used"], gpu["utilization.gpu"]) == ("NVIDIA H200", "9000 MiB", "97 %")
    nvidia_smi("exec sleep 60")
    with pytest.raises(GpusUnknown, match=r"timed out after 0\.1 seconds"):
        gpu_figures(0.1)
