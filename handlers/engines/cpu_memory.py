"""Main memory: how much of it there is, and how much of it the KV cache of vLLM's CPU backend gets.

Each of vLLM's CPU workers binds its memory to one NUMA node, and refuses a KV cache that is larger than what that node
has available. A node may report far less than the machine has, and a control group (a container's limit) may allow less
still. So the size is chosen from the smallest of them, as vLLM reads them (`v1/worker/cpu_worker.py`,
`utils/cpu_resource_utils.py`, `utils/ompmultiprocessing.py`); tests/live/test_cpu_memory_seam.py compares.

Nothing here imports vLLM, so that `slipway config` can tell the size as well.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from handlers.engines.parallelism import read_config
from handlers.engines.protocol import EngineOutOfMemory
from handlers.engines.weight_files import weight_bytes
from handlers.model_settings import DEFAULT_MAX_LORAS, ModelSettings

_ROOT = Path("/")
_GIB = 1 << 30
_PROCESS_BYTES, _WORKER_BYTES = 500 << 20, 700 << 20
"""Memory of a process that has imported vLLM, and of a worker beside its model and KV cache."""
_SHARE = 0.5
"""Of what is left, for the KV cache; files that are read again, further models and other programs need memory too."""
_TIMES_WEIGHTS = 4
"""A step of the engine reads all weights once, and the cache of every sequence. With a cache of this size it gets four
fifths of the throughput that any cache could give it; a larger one takes longer to start, as vLLM writes all of it."""
_LEAST_BYTES = 64 << 20
"""The smallest KV cache where it is not known what one sequence needs."""
_BLOCK_TOKENS = 128
"""Tokens in a block of the KV cache, unless it is set."""
_STEP_TOKENS = 2048
"""Tokens in one step of the engine, unless it is set."""
_SEQUENCES = 128
"""Sequences that run together on each worker, unless it is set."""
_LORA_RANK = 16
"""Rank of adapters, unless it is set."""
_DTYPE_BYTES = {"float32": 4, "fp32": 4, "float": 4}
"""Bytes of a number; the other types have two, and `auto` makes two of four."""
_UNEVEN = ("sliding_window", "attn_layer_period", "attn_layer_indices", "hybrid_override_pattern", "block_configs")
"""Keys of a config.json where some layers keep fewer tokens than others, or none."""
_VERSION_1, _VERSION_2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
"""Files of a control group: its limit and its use."""
_REFUSED = re.compile(r"Available memory on node \S+ \(([\d.]+)/[\d.]+ GiB\) on kv cache allocation is less than")
"""The message of `CPUWorker.determine_available_memory`."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on the memory that processes get. Bytes."""

    name: str
    available: int
    """Memory for new allocations, with the files that the kernel can drop from memory."""
    total: int
    workers: int = 1
    """Workers of the engine that share it."""

    def __str__(self) -> str:
        return f"{self.name} has {_gib(self.available)} of {_gib(self.total)} available"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The memory that one of vLLM's workers needs. Bytes, except where it says otherwise."""

    model: str
    weights: int
    working: int = 0
    """Activations, logits and LoRA adapters when the engine is busy."""
    processes: int = 1
    """Processes without a model that are started beside the workers."""
    context: int | None = None
    """Tokens of the longest sequence."""
    sequences: int = 1
    """Sequences that run together."""
    one_sequence: int | None = None
    """KV cache of one sequence that is as long as the context; None where it is not known, as layers differ."""
    all_sequences: int | None = None
    """KV cache that is never full; None where it is not known."""

    @property
    def least(self) -> int:
        """The smallest KV cache that vLLM accepts."""
        if self.one_sequence is not None:
            return self.one_sequence
        return _LEAST_BYTES if self.all_sequences is None else min(_LEAST_BYTES, self.all_sequences)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """A size of the KV cache of each worker, and why."""

    bytes: int
    limit: str
    """The name of the `Limit` that decided, or `max_num_seqs` or `weights`."""
    reason: str

    def __str__(self) -> str:
        return f"{_gib(self.bytes)}, {self.reason}; option.kv_cache_memory_bytes sets it by hand"


def kv_cache_size(demand: Demand, limits: Collection[Limit]) -> CacheSize:
    """Choose the size from the limit that leaves the least.

    Raises:
        EngineOutOfMemory: there is too little memory for the model; the message has the figures.
    """
    room, limit = min(((_room(demand, limit), limit) for limit in limits), key=lambda pair: pair[0])
    if room < demand.least:
        raise EngineOutOfMemory(_too_small(demand, limit))
    sizes = [(int((room - demand.working) * _SHARE), limit.name, "half of what is left beside weights and processes")]
    if demand.all_sequences is not None:
        every = f"all that {demand.sequences} sequences of {demand.context} tokens can fill (max_num_seqs)"
        sizes.append((demand.all_sequences, "max_num_seqs", every))
    if demand.weights:
        sizes.append((_TIMES_WEIGHTS * demand.weights, "weights", f"{_TIMES_WEIGHTS} times the weights"))
    size, name, reason = min(sizes)
    if size < demand.least:
        size, reason = demand.least, f"as much as {_least_of(demand)} {_needs(demand)}"
        if (short := demand.least + demand.working - room) > 0:
            reason += f", which leaves {_gib(short)} too little for full batches"
    return CacheSize(size, name, f"{reason}; {limit}")


def smaller_size(demand: Demand, message: str) -> int | None:
    """Choose a size below the figure that vLLM names where it refuses one; None where `message` names none.

    Raises:
        EngineOutOfMemory: not even one sequence fits below it.
    """
    found = _REFUSED.search(message)
    if found is None:
        return None
    offered = int(float(found[1]) * _GIB)
    if offered <= demand.least:
        raise EngineOutOfMemory(
            f"too little memory for {demand.model}: beside its weights vLLM has {_gib(offered)} available for the KV "
            f"cache, and {_least_of(demand)} {_needs(demand)} {_gib(demand.least)}{_hint(demand)}"
        )
    return max(demand.least, int(offered * _SHARE))


def _room(demand: Demand, limit: Limit) -> int:
    """Return what is left for one worker's KV cache."""
    return (limit.available - demand.processes * _PROCESS_BYTES) // limit.workers - _WORKER_BYTES - demand.weights


def _too_small(demand: Demand, limit: Limit) -> str:
    workers = "" if limit.workers == 1 else f" for each of {limit.workers} workers"
    processes = demand.processes * _PROCESS_BYTES + limit.workers * _WORKER_BYTES
    needed = processes + limit.workers * (demand.weights + demand.least)
    return (
        f"too little memory for {demand.model}: it needs {_gib(needed)} ({_gib(processes)} for vLLM's processes, "
        f"{_gib(demand.weights)} for weights, {_gib(demand.least)} for the KV cache of {_least_of(demand)}{workers}), "
        f"and {limit}{_hint(demand)}"
    )


def _least_of(demand: Demand) -> str:
    return f"one sequence of {demand.context} tokens" if demand.one_sequence is not None else "a few sequences"


def _needs(demand: Demand) -> str:
    return "needs" if demand.one_sequence is not None else "need"


def _hint(demand: Demand) -> str:
    return "; a smaller option.max_model_len needs less" if demand.one_sequence is not None else ""


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"


def demand_of(
    *,
    model: str,
    weights: int,
    item: int,
    kv_item: int,
    context: int | None,
    sequences: int,
    kv_elements: int = 0,
    uniform: bool = True,
    layers: int = 0,
    hidden: int = 0,
    intermediate: int = 0,
    vocabulary: int = 0,
    step_tokens: int = _STEP_TOKENS,
    block: int = _BLOCK_TOKENS,
    lora: tuple[int, int] | None = None,
    processes: int = 1,
) -> Demand:
    """Compute a worker's demand from the dimensions of the model as that worker has it; 0 where they are not known.

    `item`, `kv_item`: bytes of a number in weights and in the KV cache. `kv_elements`: numbers that the KV cache keeps
    for one token. `uniform`: every layer keeps every token, so that the size for one sequence is known. `lora`: slots
    for adapters, and their rank.
    """
    working = step_tokens * (4 * hidden + 3 * intermediate) * item
    working += 4 * sequences * vocabulary * 4  # float32 logits, and what sampling makes of them
    if lora is not None:
        slots, rank = lora
        # Each slot is kept twice. Four projections of attention and three of the MLP have two matrices each.
        working += 2 * slots * rank * layers * (11 * hidden + 3 * intermediate) * item
    one_sequence = all_sequences = None
    if context is not None and kv_elements:
        block_bytes = block * kv_elements * kv_item
        blocks = -(-context // block)
        one_sequence = blocks * block_bytes if uniform else None
        all_sequences = (sequences * blocks + 1) * block_bytes  # vLLM keeps one block empty
    return Demand(
        model=model,
        weights=weights,
        working=working,
        processes=processes,
        context=context,
        sequences=sequences,
        one_sequence=one_sequence,
        all_sequences=all_sequences,
    )


def planned_size(settings: ModelSettings, environ: Mapping[str, str]) -> CacheSize | None:
    """Tell what would be chosen for a model now, by its config.json; None where the size is set by hand.

    Raises:
        EngineOutOfMemory: there is too little memory for the model.
    """
    arguments = settings.engine_arguments
    if "kv_cache_memory_bytes" in arguments or environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return None
    config = _text_config(model_directory(settings))
    tensor, pipeline = settings.tensor_parallel_degree or 1, settings.pipeline_parallel_degree
    engines = _integer(arguments, "data_parallel_size", 1)
    item = _DTYPE_BYTES.get(settings.dtype, 2)
    kv_item = 1 if arguments.get("kv_cache_dtype", "").startswith("fp8") else item
    demand = demand_of(
        **_dimensions(config, tensor, pipeline),
        model=settings.model_id,
        weights=engine_weights(settings, config, item) // (tensor * pipeline),
        item=item,
        kv_item=kv_item,
        context=_integer(arguments, "max_model_len", config.get("max_position_embeddings")),
        sequences=settings.max_rolling_batch_size or _SEQUENCES * tensor * pipeline,
        step_tokens=_integer(arguments, "max_num_batched_tokens", _STEP_TOKENS),
        block=_integer(arguments, "block_size", _BLOCK_TOKENS),
        lora=_lora(arguments) if settings.enable_lora else None,
        processes=engines + 1,  # the server itself has not imported vLLM yet
    )
    return kv_cache_size(demand, memory_limits(tensor * pipeline, engines, environ))


def _integer(arguments: Mapping[str, str], name: str, default: Any) -> Any:
    text = arguments.get(name, "").strip()
    return int(text) if text.isdecimal() and int(text) else default


def _lora(arguments: Mapping[str, str]) -> tuple[int, int]:
    # One slot stays empty.
    slots = max(_integer(arguments, "max_loras", DEFAULT_MAX_LORAS), _integer(arguments, "max_cpu_loras", 0)) + 1
    return slots, _integer(arguments, "max_lora_rank", _LORA_RANK)


def model_directory(settings: ModelSettings) -> Path | None:
    """Find where a model's files are; None where they are yet to be downloaded."""
    if os.path.exists(settings.model_id):
        return Path(settings.model_id)
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(ValueError):  # no hub id either: the engine says so
        cache = settings.engine_arguments.get("download_dir")
        found = try_to_load_from_cache(settings.model_id, "config.json", cache, settings.revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


def engine_weights(settings: ModelSettings, config: Mapping[str, Any], item: int) -> int:
    """Return the bytes that a model's weights take in memory, with `item` bytes each; 0 where they are not known."""
    directory = model_directory(settings)
    files = weight_bytes(directory) if directory is not None else 0
    quantized = "quantization_config" in config or "quantization" in settings.engine_arguments
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    stored = _DTYPE_BYTES.get(dtype, 2) if dtype else item
    return files if quantized else files * item // stored


def _text_config(directory: Path | None) -> Mapping[str, Any]:
    """Read a config.json, with its part about text brought to the top; empty where there is none that can be read."""
    config = read_config(directory) if directory is not None else {}
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def _dimensions(config: Mapping[str, Any], tensor: int, pipeline: int) -> dict[str, Any]:
    """Read what `demand_of` takes under the names that nearly all models have for it; {} where they are others."""
    try:
        heads, hidden, layers = (int(config[k]) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
        latent = config.get("kv_lora_rank")
        if latent:  # multi-head latent attention keeps one vector for all heads
            width = int(latent) + int(config.get("qk_rope_head_dim") or 0)
        else:
            kv_heads = int(config.get("num_key_value_heads") or heads)
            width = 2 * max(1, kv_heads // tensor) * int(config.get("head_dim") or hidden // heads)
        kinds = config.get("layer_types") or ()
        window = any(config.get(key) for key in _UNEVEN) and config.get("use_sliding_window") is not False
        uniform = not window and "mamba" not in str(list(config)) and all(kind == "full_attention" for kind in kinds)
        return {
            "kv_elements": width * -(-layers // pipeline),
            "uniform": uniform,
            "layers": layers,
            "hidden": hidden,
            "intermediate": int(config.get("intermediate_size") or 4 * hidden),
            "vocabulary": int(config.get("vocab_size") or 0),
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return {}


def memory_limits(workers: int, engines: int, environ: Mapping[str, str], root: Path = _ROOT) -> list[Limit]:
    """Read all limits for an engine with `workers` workers, or several such engines (data parallel)."""
    nodes = worker_nodes(workers, engines, environ, sorted(os.sched_getaffinity(0)), root)
    return [*node_limits(nodes, root), *machine_limits(workers * engines, root)]


def machine_limits(workers: int = 1, root: Path = _ROOT) -> list[Limit]:
    """Read what the machine has, and what each control group of this process still allows (version 1 and 2)."""
    memory = psutil.virtual_memory()
    limits = [Limit("the machine", int(memory.available), int(memory.total), workers)]
    for name, group in _control_groups(root):
        for limit_file, use_file in (_VERSION_2, _VERSION_1):
            limit, use = _number(group / limit_file), _number(group / use_file)
            if limit is not None and use is not None and limit < memory.total:
                available = min(max(limit - use + page_cache(group), 0), limit)
                limits.append(Limit(f"the control group {name}", available, limit, workers))
    return limits


def page_cache(group: Path) -> int:
    """Return the bytes of a control group that are pages of files, such as weights that were read or downloaded.

    They count as used, but the kernel drops them where memory is needed.
    """
    stat = dict(line.partition(" ")[::2] for line in _lines(group / "memory.stat"))
    # Version 1 tells a group's own pages (`inactive_file`) from those of the groups below it too (`total_`).
    return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("inactive_file", "active_file"))


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None  # no such version of control groups, or no limit ("max")


def _control_groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Find the directories of this process's memory control groups, each from its own up to the outermost in sight."""
    own: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            own["cgroup" if controllers else "cgroup2"] = path
    mounts: dict[str, tuple[str, str]] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, tail = line.partition(" - ")
        _, _, _, top, place, *_ = fields.split(" ")
        kind, _, options = (*tail.split(" ", 2), "", "")[:3]
        usable = kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))
        mounts[place] = (kind if usable else "", top)  # a later mount hides an earlier one
    for place, (kind, top) in mounts.items():
        if kind not in own:
            continue
        mount = root / place.lstrip("/")
        path = own[kind] if top == "/" else own[kind].removeprefix(top)
        directory = mount / path.strip("/")
        if ".." in directory.parts or not directory.is_dir():
            directory = mount  # the group is one outside this container
        while True:
            yield "/" + str(directory.relative_to(mount)).lstrip("."), directory
            if directory == mount:
                break
            directory = directory.parent


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []


def node_limits(nodes: Sequence[int], root: Path = _ROOT) -> list[Limit]:
    """Read what NUMA nodes have, as vLLM's worker does; `nodes` is that of each worker.

    A machine without NUMA has none: its memory is the limit.
    """
    limits = []
    for node, workers in sorted(Counter(nodes).items()):
        kilobytes = {}
        for line in _lines(root / f"sys/devices/system/node/node{node}/meminfo"):
            _, _, name, number, *_ = line.split()
            kilobytes[name.rstrip(":")] = int(number)
        if kilobytes:
            parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
            available = sum(kilobytes.get(part, 0) for part in parts)
            limits.append(Limit(f"NUMA node {node}", available * 1024, kilobytes["MemTotal"] * 1024, workers))
    return limits


def worker_nodes(
    workers: int, engines: int, environ: Mapping[str, str], cpus: Sequence[int], root: Path = _ROOT
) -> list[int]:
    """Tell the NUMA node that vLLM binds each worker to: that of the first processor it is given.

    `cpus` are the processors that this process may run on.
    """
    node_of = _node_of_cpus(root)
    bound = environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if bound == "auto":
        visible = _visible_nodes(environ, root)
        # With data parallel, each engine begins with the first node again.
        return [visible[min(rank, len(visible) - 1)] for rank in range(workers) if visible] * engines
    if bound == "nobind":
        return [node_of.get(cpus[0], 0)] * workers * engines
    try:
        lists = [_numbers(part) for part in bound.split("|")]
    except ValueError:
        return []  # vLLM refuses it
    return [node_of.get(numbers[0], 0) for numbers in lists if numbers]


def _visible_nodes(environ: Mapping[str, str], root: Path) -> list[int]:
    allowed: list[int] = []
    for line in _lines(root / "proc/self/status"):
        if line.startswith("Mems_allowed_list:"):
            allowed = _numbers(line.partition(":")[2])
    if not (named := environ.get("CPU_VISIBLE_MEMORY_NODES")):
        return allowed
    return [int(part) for part in named.split(",") if part.strip().isdecimal() and int(part) in allowed]


def _node_of_cpus(root: Path) -> dict[int, int]:
    found: dict[int, int] = {}
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for line in _lines(directory / "cpulist"):
            found |= dict.fromkeys(_numbers(line), int(directory.name.removeprefix("node")))
    return found


def _numbers(text: str) -> list[int]:
    """Read a list such as `0-2,4`, sorted."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if part else set()
    return sorted(found)
