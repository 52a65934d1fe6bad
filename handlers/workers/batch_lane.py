"""Dynamic batches: jobs are gathered, then run as one call. Source: contracts/lmi.md section 5.1."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from handlers.contracts.lmi.errors import front_end_reply
from handlers.workers.batch_messages import BatchMismatch, batch_input, split_output
from handlers.workers.delivery import reply_of
from handlers.workers.job import Job
from handlers.workers.lane_settings import LaneSettings
from handlers.workers.runtime.messages import OutputMessage
from handlers.workers.single_lane import SingleLane
from handlers.workers.watch import Watch
from handlers.workers.worker import Worker

logger = logging.getLogger("handlers.workers")


class BatchLane:
    """Implements `handlers.workers.job.Lane`. A batch of one runs as it would without batching."""

    def __init__(self, worker: Worker, settings: LaneSettings, on_free: Callable[[], None]) -> None:
        self.worker = worker
        self._settings = settings
        self._on_free = on_free
        self._single = SingleLane(worker, settings, on_free)
        self._gathered: list[Job] = []
        self._timer: asyncio.TimerHandle | None = None
        self._run: _BatchRun | None = None

    @property
    def free(self) -> int:
        """Places in the batch that is being gathered."""
        return 0 if self._running else self._settings.batch_size - len(self._gathered)

    @property
    def busy(self) -> bool:
        """Whether it has any job."""
        return self._running or bool(self._gathered)

    @property
    def reluctance(self) -> int:
        """The batch that is fullest is the best."""
        return -len(self._gathered)

    def take(self, job: Job) -> None:
        """Add a job to the batch, which runs when it is full or has waited long enough."""
        self._gathered.append(job)
        if len(self._gathered) == self._settings.batch_size:
            self._begin()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settings.max_batch_delay, self._begin)

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job any more."""
        job.delivery.drop()
        self._single.cancel(job)
        if self._run is not None:
            self._run.cancel_if_unwanted()
        if job in self._gathered:
            self._gathered.remove(job)
            if not self._gathered:
                self._stop_timer()
                self._on_free()

    def recall(self) -> list[Job]:
        """The jobs of the batch that was being gathered."""
        self._stop_timer()
        gathered, self._gathered = self._gathered, []
        return gathered

    @property
    def _running(self) -> bool:
        return self._run is not None or self._single.busy

    def _begin(self) -> None:
        jobs = self.recall()
        if len(jobs) == 1:
            self._single.take(jobs[0])
        else:
            self._run = _BatchRun(self.worker, jobs, self._settings, self._finished)

    def _finished(self) -> None:
        self._run = None
        self._on_free()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _BatchRun:
    """One batch with its worker; implements `handlers.workers.worker.Receiver`."""

    def __init__(
        self, worker: Worker, jobs: list[Job], settings: LaneSettings, on_finished: Callable[[], None]
    ) -> None:
        self._worker, self._jobs, self._settings = worker, jobs, settings
        self._on_finished = on_finished
        self._call = worker.call(batch_input([job.message for job in jobs]), self)
        self._watch = Watch(settings.predict_timeout, self._expired)

    def cancel_if_unwanted(self) -> None:
        """Once no client waits any more the worker need not answer."""
        if not any(job.delivery.open for job in self._jobs):
            self._worker.cancel(self._call)

    def on_output(self, output: OutputMessage, size: int) -> None:
        """Called by the worker."""
        if output.streams:
            self._worker.cancel(self._call)
            self._fail(400, "TranslateException", "a batch of requests cannot be answered with a stream")
            return
        try:
            answers = split_output(output, len(self._jobs))
        except BatchMismatch as error:
            self._fail(400, "TranslateException", str(error))
            return
        for job, answer in zip(self._jobs, answers, strict=True):
            job.delivery.reply(reply_of(answer))

    def on_chunk(self, chunk: bytes) -> None:
        """Called by the worker: rest of a stream that was refused."""

    def on_stream_end(self, failure: OutputMessage | None) -> None:
        """Called by the worker: end of a stream that was refused."""

    def on_done(self) -> None:
        """Called by the worker."""
        self._fail(424, "EngineException", "the handler ended without an answer")  # unless it has answered
        self._close()

    def on_lost(self, reason: str) -> None:
        """Called by the worker."""
        self._fail(
            self._settings.unavailable_status,
            "EngineException",
            f"the handler's worker {reason} during the request",
        )
        self._close()

    def _expired(self) -> None:
        reason = f"did not answer within {self._settings.predict_timeout:g} seconds (predict_timeout)"
        self._fail(self._settings.unavailable_status, "EngineException", f"the handler {reason}")
        logger.warning("%s: a batch %s", self._worker.name, reason, extra={"worker": self._worker.name})
        self._worker.end(f"was ended because it {reason}")

    def _fail(self, status: int, kind: str, message: str) -> None:
        refuse = partial(front_end_reply, status, kind, message)
        for job in self._jobs:
            job.delivery.reply(refuse())

    def _close(self) -> None:
        self._watch.stop()
        self._on_finished()
