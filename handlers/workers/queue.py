"""The jobs of one model that wait for a worker."""

from __future__ import annotations

import bisect

from handlers.workers.job import Job


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
