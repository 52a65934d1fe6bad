"""The jobs of one model that wait for a worker."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Protocol

from handlers.workers.reply import Delivery
from handlers.workers.runtime.messages import InputMessage
from handlers.workers.worker import Worker


@dataclass(slots=True, eq=False)
class Job:
    """One call."""

    message: InputMessage
    delivery: Delivery
    priority: int
    """Lower ones leave the queue earlier."""
    number: int
    """Order of arrival."""
    lane: Lane | None = None
    """Where it is, once it has left the queue."""


class Lane(Protocol):
    """What one worker has to do."""

    worker: Worker

    @property
    def free(self) -> int:
        """How many more jobs it takes now."""

    @property
    def busy(self) -> bool:
        """Whether it has any job."""

    @property
    def reluctance(self) -> int:
        """The lane with the least gets the next job."""

    def take(self, job: Job) -> None:
        """Begin with a job."""

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job of this lane any more."""

    def recall(self) -> list[Job]:
        """Give back the jobs that the worker has not been told of: it has ended."""


def _order(job: Job) -> tuple[int, int]:
    return job.priority, job.number


class JobQueue:
    """Ordered by priority, then by arrival."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Have a job wait."""
        bisect.insort(self._jobs, job, key=_order)

    def pop(self) -> Job:
        """Take the first job out."""
        return self._jobs.pop(0)

    def remove(self, job: Job) -> bool:
        """Take a job out, if it is there."""
        at = bisect.bisect_left(self._jobs, _order(job), key=_order)
        if at == len(self._jobs) or self._jobs[at] is not job:
            return False
        del self._jobs[at]
        return True

    def clear(self) -> list[Job]:
        """Take all jobs out."""
        jobs, self._jobs = self._jobs, []
        return jobs
