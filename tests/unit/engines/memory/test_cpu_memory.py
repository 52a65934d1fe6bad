"""The size of main memory, read from files that the tests write, and the KV cache size that follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.interface import EngineOutOfMemory
from engines.memory.cpu_memory import (
    Demand,
    Limit,
    killed_for_memory,
    kv_cache_size,
    machine_limits,
    memory_limits,
    smaller_size,
)

MIB, GIB = 1 << 20, 1 << 30
DEMAND = Demand("m", weights=2 * GIB, sequence=GIB)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def version_2(limit: str, use: int, **stat: int) -> dict[str, str]:
    lines = "".join(f"{name} {number}\n" for name, number in stat.items())
    return {"memory.max": f"{limit}\n", "memory.current": f"{use}\n", "memory.stat": f"anon 1\n{lines}"}


def version_1(limit: int, use: int, **stat: int) -> dict[str, str]:
    lines = "".join(f"{name} {number}\n" for name, number in stat.items())
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{use}\n", "memory.stat": lines}


def tree(root: Path, membership: str, groups: dict[str, dict[str, str]]) -> list[Limit]:
    """Return only the limits of control groups."""
    files = {"proc/self/cgroup": f"{membership}\n"}
    files |= {f"sys/fs/cgroup/{group}/{name}": text for group, own in groups.items() for name, text in own.items()}
    return [limit for limit in machine_limits(write(root, files)) if limit.name != "the machine"]


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    (limit,) = machine_limits(tmp_path)
    assert (limit.name, limit.total) == ("the machine", psutil.virtual_memory().total)
    assert 0 < limit.available <= limit.total


@pytest.mark.parametrize(
    ("membership", "groups", "limits"),
    [
        (
            "0::/pod/container",
            {
                ".": {},
                "pod": version_2(str(64 * MIB), 40 * MIB),
                "pod/container": version_2(str(32 * MIB), 10 * MIB),
                "pod/other": version_2(str(MIB), MIB),
            },
            [("/pod/container", 22 * MIB, 32 * MIB), ("/pod", 24 * MIB, 64 * MIB)],
        ),
        (
            "0::/pod/container",
            {"pod": version_2(str(64 * MIB), 40 * MIB), "pod/container": version_2("max", 10 * MIB)},
            [("/pod", 24 * MIB, 64 * MIB)],
        ),
        # In a container, the mounted root is its own group.
        *[
            (membership, {".": version_2(str(64 * MIB), 63 * MIB)}, [("/", MIB, 64 * MIB)])
            for membership in ("0::/", "0::/docker/12", "0::/../../elsewhere")
        ],
        (
            "5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/a/b",
            {
                "memory": version_1(0x7FFFFFFFFFFFF000, 50 * MIB),  # the kernel's number for "no limit"
                "memory/a": version_1(64 * MIB, 40 * MIB),
                "memory/a/b": version_1(32 * MIB, 10 * MIB),
                "unified/a/b": {"cgroup.procs": "1\n"},
            },
            [("/a/b", 22 * MIB, 32 * MIB), ("/a", 24 * MIB, 64 * MIB)],
        ),
        ("0::/", {".": version_2(str(psutil.virtual_memory().total), 0)}, []),  # a limit above the machine
        ("0::/", {".": {"memory.max": "1048576\n"}}, []),  # a limit without a count
    ],
)
def test_a_process_is_limited_by_its_own_group_and_by_those_around_it(
    tmp_path: Path, membership: str, groups: dict[str, dict[str, str]], limits: list[tuple[str, int, int]]
) -> None:
    (tmp_path / "sys/elsewhere").mkdir(parents=True)
    found = tree(tmp_path, membership, groups)
    assert found == [Limit(f"the control group {name}", available, total) for name, available, total in limits]


def test_pages_of_files_are_available_in_either_version(tmp_path: Path) -> None:
    two = {".": version_2(str(64 * MIB), 63 * MIB, inactive_file=40 * MIB, active_file=2 * MIB, shmem=9 * MIB)}
    one = {
        "memory": version_1(64 * MIB, 63 * MIB, inactive_file=MIB, total_inactive_file=40 * MIB, active_file=2 * MIB)
    }
    (limit_2,) = tree(tmp_path / "2", "0::/", two)
    (limit_1,) = tree(tmp_path / "1", "4:memory:/", one)
    assert limit_2.available == limit_1.available == 43 * MIB


def meminfo(node: int, *, total: int, free: int) -> str:
    """Return the text of /proc/meminfo as Linux writes it, in KiB."""
    lines = {"MemTotal": total, "MemFree": free, "Active": 999, "Active(anon)": 999}
    lines |= {"Active(file)": 10, "Inactive(file)": 20, "SReclaimable": 30}
    text = "".join(f"Node {node} {name}:{number:>12} kB\n" for name, number in lines.items())
    return f"{text}Node {node} HugePages_Total:     0\n"


def test_a_node_has_what_is_free_and_what_the_kernel_can_drop_and_workers_get_the_roomiest(tmp_path: Path) -> None:
    sizes = ((4000, 1000), (8000, 5000), (4000, 2000))
    files = {
        f"sys/devices/system/node/node{number}/meminfo": meminfo(number, total=total, free=free)
        for number, (total, free) in enumerate(sizes)
    }
    write(tmp_path, files)
    assert memory_limits(1, tmp_path)[1:] == [Limit("NUMA node1", 5060 * 1024, 8000 * 1024)]
    assert memory_limits(2, tmp_path)[1:] == [Limit("NUMA node1, node2", 7120 * 1024, 12000 * 1024)]
    assert memory_limits(4, tmp_path)[1:] == [Limit("NUMA node1, node2, node0", 8180 * 1024, 16000 * 1024)]


def limits(*available: int) -> list[Limit]:
    return [Limit(f"limit {number}", size, 2 * size) for number, size in enumerate(available)]


def test_the_smallest_limit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    kv_cache_size(DEMAND, limits(12 * GIB, 8 * GIB, 10 * GIB))
    assert "limit 1 has 8.00 GiB of 16.00 GiB available" in caplog.text
    assert "option.kv_cache_memory_bytes" in caplog.text


@pytest.mark.parametrize(
    ("demand", "available", "size"),
    [
        (DEMAND, (12 * GIB, 8 * GIB, 10 * GIB), (8 * GIB - 2 * GIB - 1200 * MIB) // 2),
        (DEMAND, (100 * GIB,), 8 * GIB),  # no more than four times the weights
        (replace(DEMAND, weights=MIB), (100 * GIB,), GIB),  # four times the weights is too little for one sequence
        (replace(DEMAND, weights=0), (100 * GIB,), (100 * GIB - 1200 * MIB) // 2),  # the weights are not known
        (DEMAND, (4500 * MIB,), GIB),  # one sequence of the longest context
        (replace(DEMAND, workers=2), (10 * GIB,), ((10 * GIB - 1900 * MIB) // 2 - 2 * GIB) // 2),
    ],
)
def test_the_cache_has_this_size(demand: Demand, available: tuple[int, ...], size: int) -> None:
    assert kv_cache_size(demand, limits(*available)) == size


def test_a_machine_that_is_too_small_is_told_in_one_sentence_with_the_figures() -> None:
    with pytest.raises(EngineOutOfMemory) as refused:
        kv_cache_size(DEMAND, limits(3 * GIB))
    assert str(refused.value) == (
        "too little memory for m: it needs 3.23 GiB (1.17 GiB for vLLM's processes, 2.00 GiB for the weights and 0.06 "
        "GiB for the KV cache of each of 1 workers), and limit 0 has 3.00 GiB of 6.00 GiB available"
    )


sizes = st.integers(0, 1 << 44)


@given(
    available=st.lists(sizes, min_size=1, max_size=4),
    weights=st.integers(0, 1 << 38),
    sequence=st.integers(0, 1 << 36),
    workers=st.integers(1, 4),
)
def test_whatever_the_figures_the_cache_fits_each_limit_and_is_of_use(
    available: list[int], weights: int, sequence: int, workers: int
) -> None:
    demand = Demand("m", weights, sequence, workers)
    least = min(available)
    try:
        chosen = kv_cache_size(demand, limits(*available))
    except EngineOutOfMemory:
        assert least < workers * (weights + 800 * MIB) + 500 * MIB
        return
    assert (chosen + weights) * workers + 1200 * MIB <= least
    assert not weights or chosen <= max(4 * weights, sequence)
    assert chosen >= min(sequence, 32 * MIB, 4 * weights or 32 * MIB)
    assert kv_cache_size(demand, limits(*(size + GIB for size in available))) >= chosen


@given(st.floats(1.01, 4096).map(lambda size: round(size, 2)))
def test_a_second_try_is_below_what_vllm_offers_and_enough_for_one_sequence(offered: float) -> None:
    refusal = (
        f"vLLM cannot load m: Available memory on node 0 ({offered}/7.21 GiB) on kv cache allocation is less than "
        "requested memory for kv (6.63 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU "
        "memory used by other processes."
    )
    size = smaller_size(DEMAND, refusal)
    assert size is not None
    assert DEMAND.sequence <= size < offered * GIB


def test_there_is_no_second_try_for_another_reason_or_with_next_to_nothing() -> None:
    assert smaller_size(DEMAND, "vLLM cannot load m: No available memory for the cache blocks.") is None
    assert (
        smaller_size(DEMAND, "Available memory on node 0 (0.1/7 GiB) on kv cache allocation is less than requested")
        is None
    )


def test_kills_for_lack_of_memory_are_counted_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    assert killed_for_memory(tmp_path) == 0
    second = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.events": "low 0\noom 3\noom_kill 2\n"}
    assert killed_for_memory(write(tmp_path / "second", second)) == 2
    first = {
        "proc/self/cgroup": "4:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 1\n",
    }
    assert killed_for_memory(write(tmp_path / "first", first)) == 1
