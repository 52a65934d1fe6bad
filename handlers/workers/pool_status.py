"""What a pool of workers tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker."""

    id: int
    state: str
    """STARTING, READY, STOPPING or ENDED."""
    pid: int | None
    started: float
    """Seconds since the epoch."""
    busy: bool


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """All workers of a model."""

    workers: tuple[WorkerStatus, ...]
    min_workers: int
    max_workers: int
    queue_length: int
    """Calls that wait."""
    queue_size: int
    failures: int
    """Crashes, hangs and failed restarts since the start."""
    failed: str
    """Why the model counts as failed; empty while it does not."""

    @property
    def busy(self) -> int:
        """Workers that have a call."""
        return sum(worker.busy for worker in self.workers)

    @property
    def ready(self) -> int:
        """Workers that can serve."""
        return sum(worker.state == "READY" for worker in self.workers)
