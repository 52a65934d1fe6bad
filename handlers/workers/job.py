"""A call that waits for a worker or is with one, and who works on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from handlers.workers.delivery import Delivery
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
