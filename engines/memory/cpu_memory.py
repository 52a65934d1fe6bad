"""Finds out how much main memory is available, and how much of it the KV cache of vLLM's CPU backend gets.

By default, vLLM would reserve nearly all memory of a NUMA node, and would refuse to start if less is available. Each
worker binds its memory to one NUMA node, which may have far less memory than the machine. A control group (a
container's limit) may allow even less. This module does not import vLLM.
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
# The memory of vLLM's engine process, and the memory of a worker. The worker's part of the model and its KV cache are
# not included.
_PROCESS_BYTES, _WORKER_BYTES = 500 << 20, 700 << 20
_LEAST_BYTES = 64 << 20  # The smallest useful KV cache.
# The KV cache's share of the memory that weights and processes leave free. Activations, cached files and other programs
# need the rest.
_SHARE = 0.5
_LARGEST_SHARE = 0.9  # The maximum share if one sequence would not fit otherwise.
# The largest KV cache, as a multiple of the weights. Each step of the engine reads all weights once, and the cache of
# every sequence. So with a cache of this size, the throughput is four fifths of the throughput with an unlimited cache.
# A larger cache would delay the start, because vLLM writes the whole cache at the start.
_TIMES_WEIGHTS = 4
# The names of a control group's files for its memory limit and its memory use.
_VERSION_1, _VERSION_2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
# The parts of a NUMA node's memory that vLLM counts as available (`utils/cpu_resource_utils.py`).
_NODE_PARTS = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
# The message of `CPUWorker.determine_available_memory`.
_REFUSED = re.compile(r"Available memory on node \S+ \(([\d.]+)/[\d.]+ GiB\) on kv cache allocation is less than")


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on the memory of processes, in bytes."""

    name: str
    available: int  # Memory for new allocations. It includes cached files, which the kernel can drop.
    total: int

    def __str__(self) -> str:
        return f"{self.name} has {_gib(self.available)} of {_gib(self.total)} available"


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that vLLM needs. Sizes are in bytes."""

    model: str
    weights: int  # The weights in each worker. 0 if the size is unknown.
    sequence: int  # The KV cache of the longest sequence in each worker. 0 if the size is unknown.
    workers: int = 1  # The number of workers.


def kv_cache_size(demand: Demand, limits: Collection[Limit]) -> int:
    """Choose the size of each worker's KV cache, and log it. The strictest limit decides.

    If memory allows, the cache holds at least one sequence of the longest context. vLLM refuses a smaller cache.

    Raises:
        EngineOutOfMemory: The memory is too small for the model. The message has the figures.
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
    """Choose a smaller size after vLLM has refused the KV cache. Return None if no smaller size is possible.

    Args:
        demand: The memory that vLLM needs.
        message: vLLM's message, which names the available memory.
    """
    found = _REFUSED.search(message)
    offered = int(float(found[1]) * _GIB) if found is not None else 0
    size = max(int(offered * _SHARE), demand.sequence, _LEAST_BYTES)
    return size if size < offered else None


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"


def memory_limits(workers: int, root: Path = _ROOT) -> list[Limit]:
    """Return the limits of `machine_limits`, and the memory of the NUMA nodes that `workers` workers use.

    vLLM binds each worker to a node. This function assumes that vLLM uses the nodes with the most available memory. If
    vLLM uses other nodes, it may refuse the size of the KV cache. Its message then names the memory of these nodes.
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
    """Return the memory of the machine, and the limits of this process's control groups (versions 1 and 2)."""
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

    The nearest group that has this number is used, because parent groups also count the processes of other containers.
    """
    for _, group in _control_groups(root):
        for file in ("memory.events", "memory.oom_control"):  # Version 2, version 1.
            counts = dict(line.partition(" ")[::2] for line in _lines(group / file))
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def page_cache(group: Path) -> int:
    """Return the size of a control group's files in the page cache. The weights are in such files.

    These pages count as used memory, but the kernel drops them if memory is needed.
    """
    stat = dict(line.partition(" ")[::2] for line in _lines(group / "memory.stat"))
    # In version 1, `inactive_file` counts only a group's own pages. `total_inactive_file` includes the groups below it.
    return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("inactive_file", "active_file"))


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None  # The file does not exist in this version of control groups, or the limit is "max".


def _control_groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield this process's memory control group and its visible parent groups, with their names.

    In a container, only the container's own group may be visible, and it looks like the root group.
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
