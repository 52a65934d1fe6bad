"""The workers of an engine that are not processes of the server, because they run in Ray or on other machines.

The server cannot ask these workers for their stacks. So the engine process tells the server which workers these are,
and on which machines they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.executor.abstract import Executor

# The limit on a message. Nobody reads the pipe during the start, so messages must fit into the pipe. The kernel never
# mixes messages of this size from several processes.
_MOST_BYTES = 2048


def workers_elsewhere(executor: Executor) -> str:
    """Return the workers that are not children of the engine process, and their machines; "" if all are children."""
    ranks_of: dict[str, list[int]] = {}
    for rank, place in enumerate(_places(executor)):
        if place:
            ranks_of.setdefault(place, []).append(rank)
    found = "; ".join(
        f"{'workers' if len(ranks) > 1 else 'worker'} {', '.join(map(str, ranks))} {place}"
        for place, ranks in ranks_of.items()
    )
    return found if len(found) <= _MOST_BYTES else f"{found[:_MOST_BYTES]}..."


def _places(executor: Executor) -> Iterator[str]:
    """Yield the place of each worker, in the order of ranks: "" for a child of the engine process."""
    if executor.uses_ray:
        yield from _places_in_ray(executor)
        return
    parallel = executor.parallel_config
    here = parallel.node_rank_within_dp
    for rank in range(parallel.world_size):
        node = rank // parallel.local_world_size
        yield "" if node == here else f"on the machine with node_rank {parallel.node_rank - here + node}"


def _places_in_ray(executor: Any) -> Iterator[str]:
    # The older executor (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0) does not record on which nodes its workers run.
    handles = getattr(executor, "ray_worker_handles", None)
    if handles is None:
        yield from ["in Ray"] * executor.parallel_config.world_size
        return
    import ray

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for handle in handles:
        yield f"in Ray on {addresses.get(handle.node_id, 'an unknown address')} (node {handle.node_id})"
