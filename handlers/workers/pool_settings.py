"""What the pool needs to know of a model's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Numbers of workers and of calls."""

    min_workers: int
    max_workers: int
    queue_size: int
    """Calls that may wait while every worker is busy."""
    scale_up_above: int
    """More calls than these in the queue start another worker."""
    retry_threshold: int
    """So many crashes, hangs and failed restarts are survived."""
    max_idle_time: float
    """Seconds."""
    overload_status: int
    unavailable_status: int
    devices: tuple[str, ...] = ()
    """Those of a worker each; without any, the CPU."""
    parallel_loading: bool = False
    """Workers load at the same time."""
