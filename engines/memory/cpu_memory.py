"""Main memory: the available part, and the part for the KV cache of vLLM's CPU backend.

vLLM would take nearly all memory for its cache, and refuse to start where another limit allows less: each of its
workers binds its memory to one NUMA node, which may report far less than the machine has, and a control group (a
container's limit) may allow less still. Nothing here imports vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from engines.interface import EngineOutOfMemory

logger = logging.getLogger(__name__)

_ROOT = Path("/")
_GIB = 1 << 30
# The memory of a vLLM engine process, and of a worker without its model and KV cache.
_PROCESS_BYTES, _WORKER_BYTES = 500 << 20, 700 << 20
_LEAST_BYTES = 64 << 20  # The smallest KV cache worth a try.
# The share of the rest that the KV cache gets; activations, files that are read again and other programs need memory
# too.
_SHARE = 0.5
_LARGEST_SHARE = 0.9  # The same where one sequence would not fit otherwise.
# A step of the engine reads all weights once, and the cache of every sequence. With a cache of this size it gets four
# fifths of the throughput that any cache could give it; a larger one takes longer to start, as vLLM writes all of it.
_TIMES_WEIGHTS = 4
# Files of a control group: its limit and its use.
_VERSION_1, _VERSION_2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
# The memory that vLLM counts as available on a NUMA node (`utils/cpu_resource_utils.py`).
_NODE_PARTS = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
# The message of `CPUWorker.determine_available_memory`.
_REFUSED = re.compile(r"Available memory on node \S+ \(([\d.]+)/[\d.]+ GiB\) on kv cache allocation is less than")


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on the memory that processes get. Bytes."""

    name: str
    available: int  # Memory for new allocations, with the files that the kernel can drop from memory.
    total: int

    def __str__(self) -> str:
        return f"{self.name} has {_gib(self.available)} of {_gib(self.total)} available"


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that vLLM needs. In bytes, unless noted otherwise."""

    model: str
    weights: int  # Of each worker; 0 where they are not known.
    sequence: int  # KV cache of the longest sequence, of each worker; 0 if it is not known.
    workers: int = 1  # Number of workers.


def kv_cache_size(demand: Demand, limits: Collection[Limit]) -> int:
    """Choose the size of each worker's KV cache by the limit that leaves the least, and log it.

    It is not less than one sequence needs, as long as there is that much; vLLM refuses a smaller one.

    Raises:
        EngineOutOfMemory: There is too little memory for the model; the message has the figures.
    """
    processes = _PROCESS_BYTES + demand.workers * _WORKER_BYTES
    limit = min(limits, key=lambda limit: limit.available)
    left = (limit.available - processes) // demand.workers - demand.weights
    if left < _LEAST_BYTES:
        needed = processes + demand.workers * (demand.weights + _LEAST_BYTES)
        raise EngineOutOfMemory(
            f"too little memory for {demand.model}: it needs {_gib(needed)} ({_gib(processes)} for vLLM's processes, "
            f"{_gib(demand.weights)} for the weights and {_gib(_LEAST_BYTES)} for the KV cache of each of "
            f"{demand.workers} workers), and {limit}"
        )
    size, reason = int(left * _SHARE), "half of what is left beside weights and processes"
    if 0 < _TIMES_WEIGHTS * demand.weights < size:
        size, reason = _TIMES_WEIGHTS * demand.weights, f"{_TIMES_WEIGHTS} times the weights"
    if size < demand.sequence:
        size, reason = min(demand.sequence, int(left * _LARGEST_SHARE)), "for one sequence of the longest context"
    logger.info("KV cache: %s, %s; %s; option.kv_cache_memory_bytes sets it by hand", _gib(size), reason, limit)
    return size


def smaller_size(demand: Demand, message: str) -> int | None:
    """Choose a size below the figure that vLLM names when it refuses one; None if no smaller size is possible."""
    found = _REFUSED.search(message)
    offered = int(float(found[1]) * _GIB) if found is not None else 0
    size = max(int(offered * _SHARE), demand.sequence, _LEAST_BYTES)
    return size if size < offered else None


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"


def memory_limits(workers: int, root: Path = _ROOT) -> list[Limit]:
    """Read the limits of `machine_limits`, and the memory that NUMA nodes have for an engine with `workers` workers.

    vLLM binds each worker to a node. Here the workers get the nodes with the most memory. If vLLM binds to other nodes,
    it refuses the size and names their memory.
    """
    nodes = []
    for path in root.glob("sys/devices/system/node/node[0-9]*/meminfo"):
        sizes = {}
        for line in _lines(path):
            _, _, name, kibibytes, *_ = line.split()
            sizes[name.rstrip(":")] = int(kibibytes) << 10
        nodes.append((sum(sizes.get(part, 0) for part in _NODE_PARTS), sizes["MemTotal"], path.parent.name))
    limits = machine_limits(root)
    if nodes:
        available, totals, names = zip(*sorted(nodes, reverse=True)[:workers], strict=True)
        limits.append(Limit("NUMA " + ", ".join(names), sum(available), sum(totals)))
    return limits


def machine_limits(root: Path = _ROOT) -> list[Limit]:
    """Read the memory of the machine, and the rest that each control group of this process allows (v1 and v2)."""
    memory = psutil.virtual_memory()
    limits = [Limit("the machine", int(memory.available), int(memory.total))]
    for name, group in _control_groups(root):
        for limit_file, use_file in (_VERSION_2, _VERSION_1):
            limit, use = _number(group / limit_file), _number(group / use_file)
            if limit is not None and use is not None and limit < memory.total:
                available = min(max(limit - use + page_cache(group), 0), limit)
                limits.append(Limit(f"the control group {name}", available, limit))
    return limits


def killed_for_memory(root: Path = _ROOT) -> int:
    """Return the number of processes that the kernel has killed because this process's control group was full.

    Groups above it count the processes of other containers as well.
    """
    for _, group in _control_groups(root):
        for file in ("memory.events", "memory.oom_control"):  # Version 2, version 1.
            counts = dict(line.partition(" ")[::2] for line in _lines(group / file))
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def page_cache(group: Path) -> int:
    """Return the bytes of a control group that are pages of files, such as weights that were read or downloaded.

    They count as used, but the kernel drops them where memory is needed.
    """
    stat = dict(line.partition(" ")[::2] for line in _lines(group / "memory.stat"))
    # In version 1, `inactive_file` counts a group's own pages, and `total_` includes the groups below it.
    return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("inactive_file", "active_file"))


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None  # no such version of control groups, or no limit ("max")


def _control_groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Find this process's memory control groups, each from its own up to the outermost in sight.

    In a container only its own group may be in sight, mounted as if it were the outermost.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = mount / path.strip("/")
        if ".." in group.parts or not group.is_dir():
            group = mount
        for directory in (group, *group.parents):
            yield "/" + os.path.relpath(directory, mount).lstrip("."), directory
            if directory == mount:
                break


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []
