"""How much main memory there is, read from written-out trees, and the size of the KV cache that follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from handlers.engines import cpu_memory
from handlers.engines.cpu_memory import (
    Demand,
    Limit,
    engine_weights,
    kv_cache_size,
    machine_limits,
    memory_limits,
    node_limits,
    planned_size,
    smaller_size,
    worker_nodes,
)
from handlers.engines.protocol import EngineOutOfMemory
from handlers.model_settings import ModelSettings

MIB, GIB = 1 << 20, 1 << 30
DEMAND = Demand(model="m", weights=2 * GIB, context=4096, sequences=6, one_sequence=GIB, all_sequences=6 * GIB)
V1_MOUNT = "33 32 0:28 {top} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"
V2_MOUNT = "33 32 0:28 {top} /sys/fs/cgroup rw,nosuid shared:5 - cgroup2 cgroup2 rw"


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


def tree(root: Path, membership: str, mounts: list[str], groups: dict[str, dict[str, str]]) -> list[Limit]:
    """The limits of control groups alone."""
    files = {"proc/self/cgroup": f"{membership}\n", "proc/self/mountinfo": "\n".join(mounts) + "\n"}
    files |= {f"sys/fs/cgroup/{group}/{name}": text for group, own in groups.items() for name, text in own.items()}
    return [limit for limit in machine_limits(root=write(root, files)) if limit.name != "the machine"]


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    (limit,) = machine_limits(workers=2, root=tmp_path)
    assert (limit.name, limit.total, limit.workers) == ("the machine", psutil.virtual_memory().total, 2)
    assert 0 < limit.available <= limit.total


def test_version_2_limits_by_its_own_group_and_by_those_around_it(tmp_path: Path) -> None:
    groups = {
        ".": {},
        "pod": version_2(str(64 * MIB), 40 * MIB),
        "pod/container": version_2(str(32 * MIB), 10 * MIB),
        "pod/other": version_2(str(MIB), MIB),
    }
    found = tree(tmp_path, "0::/pod/container", [V2_MOUNT.format(top="/")], groups)
    assert found == [
        Limit("the control group /pod/container", 22 * MIB, 32 * MIB),
        Limit("the control group /pod", 24 * MIB, 64 * MIB),
    ]


def test_a_group_without_a_limit_of_its_own_has_that_of_the_group_around_it(tmp_path: Path) -> None:
    groups = {"pod": version_2(str(64 * MIB), 40 * MIB), "pod/container": version_2("max", 10 * MIB)}
    found = tree(tmp_path, "0::/pod/container", [V2_MOUNT.format(top="/")], groups)
    assert found == [Limit("the control group /pod", 24 * MIB, 64 * MIB)]


def test_in_a_container_the_root_of_what_is_mounted_is_its_group(tmp_path: Path) -> None:
    groups = {".": version_2(str(64 * MIB), 63 * MIB)}
    own_namespace = tree(tmp_path / "a", "0::/", [V2_MOUNT.format(top="/")], groups)
    hosts_namespace = tree(tmp_path / "b", "0::/docker/12", [V2_MOUNT.format(top="/docker/12")], groups)
    (tmp_path / "c/sys/elsewhere").mkdir(parents=True)
    unseen = tree(tmp_path / "c", "0::/../../elsewhere", [V2_MOUNT.format(top="/")], groups)
    assert own_namespace == hosts_namespace == unseen == [Limit("the control group /", MIB, 64 * MIB)]


def test_pages_of_files_are_available_in_either_version(tmp_path: Path) -> None:
    two = {".": version_2(str(64 * MIB), 63 * MIB, inactive_file=40 * MIB, active_file=2 * MIB, shmem=9 * MIB)}
    one = {
        "memory": version_1(64 * MIB, 63 * MIB, inactive_file=MIB, total_inactive_file=40 * MIB, active_file=2 * MIB)
    }
    (limit_2,) = tree(tmp_path / "2", "0::/", [V2_MOUNT.format(top="/")], two)
    (limit_1,) = tree(tmp_path / "1", "4:memory:/", [V1_MOUNT.format(top="/")], one)
    assert limit_2.available == limit_1.available == 43 * MIB


def test_version_1_limits_by_its_own_group_and_by_those_around_it(tmp_path: Path) -> None:
    groups = {
        "memory": version_1(0x7FFFFFFFFFFFF000, 50 * MIB),  # what the kernel writes for no limit
        "memory/a": version_1(64 * MIB, 40 * MIB),
        "memory/a/b": version_1(32 * MIB, 10 * MIB),
    }
    found = tree(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/a/b", [V1_MOUNT.format(top="/")], groups)
    assert [limit.available for limit in found] == [22 * MIB, 24 * MIB]


def test_in_a_hybrid_tree_memory_is_limited_by_version_1(tmp_path: Path) -> None:
    mounts = [
        "30 23 0:25 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755",
        V1_MOUNT.format(top="/docker/12"),
        "31 30 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        "34 30 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
    ]
    groups = {"memory": version_1(64 * MIB, 40 * MIB), "unified/docker/12": {"cgroup.procs": "1\n"}}
    found = tree(tmp_path, "4:memory:/docker/12\n0::/docker/12", mounts, groups)
    assert found == [Limit("the control group /", 24 * MIB, 64 * MIB)]


def test_of_mounts_in_one_place_the_last_counts(tmp_path: Path) -> None:
    mounts = [V1_MOUNT.format(top="/"), V1_MOUNT.format(top="/a")]
    found = tree(tmp_path, "4:memory:/a", mounts, {"memory": version_1(64 * MIB, 40 * MIB)})
    assert found == [Limit("the control group /", 24 * MIB, 64 * MIB)]


def test_a_limit_above_the_machine_and_one_without_a_count_are_none(tmp_path: Path) -> None:
    above = version_2(str(psutil.virtual_memory().total), 0)
    assert tree(tmp_path / "a", "0::/", [V2_MOUNT.format(top="/")], {".": above}) == []
    assert tree(tmp_path / "b", "0::/", [V2_MOUNT.format(top="/")], {".": {"memory.max": "1048576\n"}}) == []


def meminfo(node: int, *, total: int, free: int, **parts: int) -> str:
    """As Linux writes it, in KiB."""
    lines = {"MemTotal": total, "MemFree": free, "Active": 999, "Active(anon)": 999} | parts
    text = "".join(f"Node {node} {name}:{number:>12} kB\n" for name, number in lines.items())
    return f"{text}Node {node} HugePages_Total:     0\n"


def nodes(root: Path, allowed: str = "0-1") -> Path:
    files = {"Active(file)": 10, "Inactive(file)": 20, "SReclaimable": 30}
    return write(
        root,
        {
            "proc/self/status": f"Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n",
            "sys/devices/system/node/node0/meminfo": meminfo(0, total=4000, free=1000, **files),
            "sys/devices/system/node/node0/cpulist": "0-1,4\n",
            "sys/devices/system/node/node1/meminfo": meminfo(1, total=8000, free=5000, **files),
            "sys/devices/system/node/node1/cpulist": "2-3,5-7\n",
        },
    )


def test_a_node_has_what_is_free_and_what_the_kernel_can_drop(tmp_path: Path) -> None:
    root = nodes(tmp_path)
    first, second = Limit("NUMA node 0", 1060 * 1024, 4000 * 1024, 2), Limit("NUMA node 1", 5060 * 1024, 8000 * 1024)
    assert node_limits([0, 1, 0], root) == [first, second]
    assert node_limits([7], root) == []


@pytest.mark.parametrize(
    ("workers", "engines", "environ", "expected"),
    [
        (1, 1, {}, [0]),
        (2, 1, {}, [0, 1]),
        (1, 2, {}, [0, 0]),
        (1, 1, {"CPU_VISIBLE_MEMORY_NODES": "1"}, [1]),
        (2, 1, {"CPU_VISIBLE_MEMORY_NODES": "1,0"}, [1, 0]),
        (1, 1, {"CPU_VISIBLE_MEMORY_NODES": "3,1"}, [1]),
        (1, 1, {"CPU_VISIBLE_MEMORY_NODES": ""}, [0]),
        (1, 1, {"VLLM_CPU_OMP_THREADS_BIND": "5,2-3"}, [1]),
        (2, 1, {"VLLM_CPU_OMP_THREADS_BIND": "2-3|0-1"}, [1, 0]),
        (2, 1, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, [0, 0]),
        (2, 1, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, [1, 1]),
        (1, 1, {"VLLM_CPU_OMP_THREADS_BIND": "nonsense"}, []),
    ],
)
def test_workers_are_on_the_nodes_that_vllm_binds_them_to(
    workers: int, engines: int, environ: dict[str, str], expected: list[int], tmp_path: Path
) -> None:
    assert worker_nodes(workers, engines, environ, [2, 3, 4], nodes(tmp_path)) == expected


def test_nodes_that_the_process_may_not_use_do_not_count(tmp_path: Path) -> None:
    assert worker_nodes(1, 1, {}, [0], nodes(tmp_path, allowed="1")) == [1]


def test_a_machine_without_numa_is_limited_all_the_same(tmp_path: Path) -> None:
    assert [limit.name for limit in memory_limits(1, 1, {}, tmp_path)] == ["the machine"]


def limits(*available: int) -> list[Limit]:
    return [Limit(f"limit {number}", size, 2 * size) for number, size in enumerate(available)]


def test_the_smallest_limit_decides_and_is_named() -> None:
    chosen = kv_cache_size(DEMAND, limits(12 * GIB, 8 * GIB, 10 * GIB))
    assert chosen.limit == "limit 1"
    assert chosen.bytes == (8 * GIB - 2 * GIB - 1200 * MIB) // 2
    assert "limit 1 has 8.00 GiB of 16.00 GiB available" in str(chosen)
    assert "option.kv_cache_memory_bytes" in str(chosen)


def test_no_more_than_all_sequences_can_fill() -> None:
    chosen = kv_cache_size(DEMAND, limits(100 * GIB))
    assert (chosen.bytes, chosen.limit) == (6 * GIB, "max_num_seqs")
    assert "all that 6 sequences of 4096 tokens can fill" in str(chosen)


def test_no_more_than_four_times_the_weights() -> None:
    chosen = kv_cache_size(replace(DEMAND, weights=GIB), limits(100 * GIB))
    assert (chosen.bytes, chosen.limit) == (4 * GIB, "weights")
    assert "4 times the weights" in str(chosen)
    assert kv_cache_size(replace(DEMAND, weights=MIB), limits(100 * GIB)).bytes == GIB, "not even one sequence"
    assert kv_cache_size(replace(DEMAND, weights=0), limits(100 * GIB)).bytes == 6 * GIB, "not known yet"


def test_where_memory_is_short_it_is_what_one_sequence_needs() -> None:
    chosen = kv_cache_size(DEMAND, limits(4300 * MIB))
    assert (chosen.bytes, chosen.limit) == (GIB, "limit 0")
    assert "as much as one sequence of 4096 tokens needs" in str(chosen)


def test_a_machine_that_is_too_small_is_told_in_one_sentence_with_the_figures() -> None:
    with pytest.raises(EngineOutOfMemory) as refused:
        kv_cache_size(DEMAND, limits(3 * GIB))
    assert str(refused.value) == (
        "too little memory for m: it needs 4.17 GiB (1.17 GiB for vLLM's processes, 2.00 GiB for weights, 1.00 GiB for "
        "the KV cache of one sequence of 4096 tokens), and limit 0 has 3.00 GiB of 6.00 GiB available; a smaller "
        "option.max_model_len needs less"
    )


sizes = st.integers(0, 1 << 44)


@given(
    available=st.lists(st.tuples(sizes, st.integers(1, 4)), min_size=1, max_size=4),
    weights=st.integers(0, 1 << 38),
    working=st.integers(0, 1 << 32),
    one=st.none() | st.integers(1, 1 << 36),
    sequences=st.integers(1, 1024),
)
def test_whatever_the_figures_the_cache_fits_each_limit_and_is_of_use(
    available: list[tuple[int, int]], weights: int, working: int, one: int | None, sequences: int
) -> None:
    every = None if one is None else one * sequences
    demand = replace(DEMAND, weights=weights, working=working, one_sequence=one, all_sequences=every)
    given_limits = [Limit(f"limit {n}", size, size, workers) for n, (size, workers) in enumerate(available)]
    try:
        chosen = kv_cache_size(demand, given_limits)
    except EngineOutOfMemory:
        least = min(limit.available // limit.workers for limit in given_limits)
        assert least < weights + demand.least + 1200 * MIB
        return
    assert chosen.bytes >= demand.least
    assert every is None or chosen.bytes <= every
    assert not weights or chosen.bytes <= max(4 * weights, demand.least)
    assert chosen.limit in {"max_num_seqs", "weights", *(limit.name for limit in given_limits)}
    for limit in given_limits:
        assert (chosen.bytes + weights) * limit.workers <= limit.available
    more = [replace(limit, available=limit.available + GIB) for limit in given_limits]
    assert kv_cache_size(demand, more).bytes >= chosen.bytes


def refusal(offered: float) -> str:
    return (
        f"vLLM cannot load m: Available memory on node 0 ({offered}/7.21 GiB) on kv cache allocation is less than "
        "requested memory for kv (6.63 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU "
        "memory used by other processes."
    )


@given(st.floats(1.01, 4096).map(lambda size: round(size, 2)))
def test_a_second_try_is_below_what_vllm_offers_and_enough_for_one_sequence(offered: float) -> None:
    size = smaller_size(DEMAND, refusal(offered))
    assert size is not None
    assert DEMAND.least <= size < offered * GIB


def test_there_is_no_second_try_for_another_reason() -> None:
    assert smaller_size(DEMAND, "vLLM cannot load m: No available memory for the cache blocks.") is None


def test_where_vllm_offers_too_little_for_one_sequence_it_is_said_with_the_figures() -> None:
    with pytest.raises(
        EngineOutOfMemory, match=r"0\.80 GiB available for the KV cache, and one sequence of 4096 tokens"
    ):
        smaller_size(DEMAND, refusal(0.8))


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much memory, whatever this one has free."""
    monkeypatch.setattr(cpu_memory, "memory_limits", lambda *_: limits(100 * GIB))


CONFIG = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def settings(directory: Path, arguments: dict[str, str] | None = None, **config: object) -> ModelSettings:
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(256 * MIB)
    given_arguments = {"max_model_len": "1000"} if arguments is None else arguments
    return ModelSettings(
        name="m",
        model_dir=directory,
        model_id=str(directory),
        max_rolling_batch_size=2,
        engine_arguments=given_arguments,
    )


TOKEN = 30 * 3 * 64 * 2 * 2
"""Bytes in the KV cache."""


@pytest.mark.usefixtures("plenty")
@pytest.mark.usefixtures("plenty")
@pytest.mark.parametrize(
    ("config", "arguments", "token"),
    [
        ({}, {}, TOKEN),
        ({"head_dim": 128}, {}, 2 * TOKEN),
        ({"num_key_value_heads": None}, {}, 3 * TOKEN),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}, TOKEN // 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {}, 30 * 576 * 2),
        ({"text_config": {"num_hidden_layers": 15}}, {}, TOKEN // 2),
    ],
)
def test_what_can_be_used_follows_from_the_models_dimensions(
    config: dict[str, object], arguments: dict[str, str], token: int, tmp_path: Path
) -> None:
    chosen = planned_size(settings(tmp_path, {"max_model_len": "1000", **arguments}, **config), {})
    assert chosen is not None
    assert (chosen.bytes, chosen.limit) == ((2 * 8 + 1) * 128 * token, "max_num_seqs")


@pytest.mark.usefixtures("plenty")
def test_float32_doubles_the_cache(tmp_path: Path) -> None:
    chosen = planned_size(replace(settings(tmp_path), dtype="fp32"), {})
    assert chosen is not None
    assert chosen.bytes == (2 * 8 + 1) * 128 * TOKEN * 2


def test_weights_that_are_stored_in_float32_take_half_in_memory(tmp_path: Path) -> None:
    model = settings(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 800)
    weights = {
        dtype: engine_weights(model, {"dtype": dtype} if dtype else {}, 2) for dtype in ("float32", "bfloat16", "")
    }
    assert weights == {"float32": 400, "bfloat16": 800, "": 800}


def test_a_cache_of_one_sequence_says_how_much_full_batches_lack() -> None:
    gib = 1 << 30
    demand = Demand(model="m", weights=2 * gib, working=2 * gib, context=1000, one_sequence=gib)
    chosen = kv_cache_size(demand, [Limit("the machine", int(4.9 * gib), 8 * gib)])
    assert chosen.bytes == gib
    assert "too little for full batches" in chosen.reason


def test_a_size_that_is_set_by_hand_stands(tmp_path: Path) -> None:
    assert planned_size(settings(tmp_path, {"kv_cache_memory_bytes": "1"}), {}) is None
    assert planned_size(settings(tmp_path), {"VLLM_CPU_KVCACHE_SPACE": "4"}) is None


@pytest.mark.parametrize(
    "config",
    [{"sliding_window": 512}, {"layer_types": ["full_attention", "sliding_attention"]}, {"mamba_d_state": 128}],
)
def test_a_model_whose_layers_differ_is_not_refused_for_a_long_context(
    config: dict[str, object], tmp_path: Path
) -> None:
    long = {"max_model_len": str(1 << 40)}
    assert planned_size(settings(tmp_path, long, **config), {}) is not None
    with pytest.raises(EngineOutOfMemory, match="one sequence of 1099511627776 tokens"):
        planned_size(settings(tmp_path, long), {})


@pytest.mark.usefixtures("plenty")
def test_a_model_that_is_not_there_yet_and_one_of_unknown_kind_have_a_cache_too(tmp_path: Path) -> None:
    unknown = settings(tmp_path)
    (tmp_path / "config.json").write_text('{"n_layer": 12}')
    for one in (unknown, replace(unknown, model_id="org/name-that-is-nowhere")):
        chosen = planned_size(one, {})
        assert chosen is not None
        assert chosen.limit != "max_num_seqs"


@given(st.lists(st.integers(0, 300), min_size=1, unique=True))
def test_processors_of_a_node_are_read_as_linux_writes_them(cpus: list[int]) -> None:
    assume(len(cpus) < 50)
    # The tree is written by hand: hypothesis and tmp_path do not go together.
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        root = write(Path(name), {"sys/devices/system/node/node3/cpulist": ",".join(map(str, sorted(cpus))) + "\n"})
        bind = {"VLLM_CPU_OMP_THREADS_BIND": str(cpus[0])}
        assert worker_nodes(1, 1, bind, cpus, root) == [3]
