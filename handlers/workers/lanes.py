"""Dynamic batches: jobs are gathered, then run as one call. Source: contracts/lmi.md section 5.1."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, front_end_reply, payload_error
from handlers.reply import ReplyWriter
from handlers.workers.batch_messages import BatchMismatch, batch_input, split_output
from handlers.workers.job import Job
from handlers.workers.reply import Delivery, decode_part, reply_of
from handlers.workers.runtime.frames import WINDOW
from handlers.workers.runtime.messages import OutputMessage
from handlers.workers.worker import Worker

logger = logging.getLogger("handlers.workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """Durations are in seconds."""

    predict_timeout: float
    client_patience: float
    """Seconds that a client may take nothing of its stream."""
    unavailable_status: int
    async_mode: bool = False
    concurrency: int = 1
    """Calls that one worker has at a time."""
    batch_size: int = 1
    max_batch_delay: float = 0.0
    max_rolling_batch_size: int = 32
    cancel_patience: float = 5.0
    """An async handler that does not let go of a cancelled call within this time is taken to hang."""


class Watch:
    """Calls `expired` once `seconds` have passed since the last `touch`, not counting pauses.

    A touch costs an assignment, so that every part of a stream may be one.
    """

    def __init__(self, seconds: float, expired: Callable[[], None], paused: Callable[[], bool] = lambda: False) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._expired, self._paused = seconds, expired, paused
        self._touched = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check)

    def touch(self) -> None:
        """There was a sign of life."""
        self._touched = self._loop.time()

    def stop(self) -> None:
        """Nothing more is expected."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._paused():
            self.touch()
        left = self._touched + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._expired()


_ENOUGH = WINDOW // 2


class Flow:
    """Counts what a call's worker has sent, and gives it credit."""

    __slots__ = ("_call", "_draining", "_ended", "_on_stalled", "_patience", "_uncredited", "_worker", "_writer")

    def __init__(
        self, worker: Worker, call: int, writer: ReplyWriter, patience: float, on_stalled: Callable[[], None]
    ) -> None:
        """`on_stalled` is called when the client has taken nothing for `patience` seconds."""
        self._worker, self._call, self._writer = worker, call, writer
        self._patience, self._on_stalled = patience, on_stalled
        self._uncredited = 0
        self._ended = False
        self._draining: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> bool:
        """Whether it is the client that holds up the call."""
        return self._draining is not None

    def received(self, size: int) -> None:
        """So many bytes have come; now and then the worker is given credit for them."""
        self._uncredited += size
        if self._uncredited >= _ENOUGH and self._draining is None and not self._ended:
            self._draining = asyncio.create_task(self._drain())

    def stop(self) -> None:
        """Nobody waits for the call any more, or it has ended."""
        self._ended = True
        if self._draining is not None and self._draining is not asyncio.current_task():
            self._draining.cancel()

    async def _drain(self) -> None:
        try:
            while self._uncredited >= _ENOUGH:
                size, self._uncredited = self._uncredited, 0
                async with asyncio.timeout(self._patience):
                    await self._writer.drain()
                self._worker.credit(self._call, size)
        except TimeoutError:
            self._ended = True
            self._on_stalled()
        finally:
            self._draining = None


class SingleLane:
    """Implements `handlers.workers.job.Lane`."""

    def __init__(self, worker: Worker, settings: LaneSettings, on_free: Callable[[], None]) -> None:
        self.worker = worker
        self._settings = settings
        self._on_free = on_free
        self._runs: dict[Job, _Run] = {}

    @property
    def free(self) -> int:
        """How many more jobs it takes now."""
        return self._settings.concurrency - len(self._runs)

    @property
    def busy(self) -> bool:
        """Whether it has any job."""
        return bool(self._runs)

    @property
    def reluctance(self) -> int:
        """The lane with the fewest jobs is the best."""
        return len(self._runs)

    def take(self, job: Job) -> None:
        """Begin with a job."""
        self._runs[job] = _Run(self.worker, job, self._settings, lambda: self._finished(job))

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job any more; its place is free when the handler lets go of it."""
        if job in self._runs:
            self._runs[job].cancel()

    def recall(self) -> list[Job]:
        """Every job has been sent at once."""
        return []

    def _finished(self, job: Job) -> None:
        del self._runs[job]
        self._on_free()


class _Run:
    """One job with its worker; implements `handlers.workers.worker.Receiver`."""

    def __init__(self, worker: Worker, job: Job, settings: LaneSettings, on_finished: Callable[[], None]) -> None:
        self._worker, self._settings = worker, settings
        self._delivery: Delivery = job.delivery
        self._on_finished = on_finished
        self._call = worker.call(job.message, self)
        self._flow = Flow(worker, self._call, job.delivery.writer, settings.client_patience, self._stalled)
        self._cancelled = False
        self._watch = Watch(settings.predict_timeout, self._expired, lambda: self._flow.waiting)

    def cancel(self) -> None:
        """The client has gone."""
        self._delivery.drop()
        self._cancelled = True
        self._flow.stop()
        self._worker.cancel(self._call)

    def on_output(self, output: OutputMessage, size: int) -> None:
        """Called by the worker."""
        self._watch.touch()
        if not self._settings.async_mode:
            self._take(output)
            return
        self._flow.received(size)
        part = decode_part(output.data) if output.code == 200 and not output.streams else None
        if part is None:
            self._take(output)
        else:
            self._delivery.accept(part, output.properties, self._delivery.write)

    def on_chunk(self, chunk: bytes) -> None:
        """Called by the worker."""
        self._watch.touch()
        self._delivery.write(chunk)
        self._flow.received(len(chunk))

    def on_stream_end(self, failure: OutputMessage | None) -> None:
        """Called by the worker."""
        if failure is None:
            self._delivery.end()
        else:
            self._delivery.fail(reply_of(failure), self._midway(failure.code, failure.error))

    def on_done(self) -> None:
        """Called by the worker."""
        if self._delivery.started:
            self._delivery.end()
        self._fail(FAILED_DEPENDENCY, "the handler ended without an answer")  # unless it has answered
        self._close()

    def on_lost(self, reason: str) -> None:
        """Called by the worker."""
        self._fail(self._settings.unavailable_status, f"the handler's worker {reason} during the request")
        self._close()

    def _take(self, output: OutputMessage) -> None:
        if output.streams:
            self._delivery.prepare(output)
        elif self._delivery.started:
            self._delivery.write(output.data)
        else:
            self._delivery.reply(reply_of(output))

    def _stalled(self) -> None:
        """A client that reads no more must not keep the worker from others."""
        message = f"the client took nothing for {self._settings.client_patience:g} seconds"
        logger.warning("%s: %s", self._worker.name, message, extra={"worker": self._worker.name})
        self._fail(self._settings.unavailable_status, message)
        self.cancel()

    def _expired(self) -> None:
        seconds = f"{self._settings.predict_timeout:g}"
        reason = f"did not answer within {seconds} seconds (predict_timeout)"
        self._fail(self._settings.unavailable_status, f"the handler {reason}")
        logger.warning("%s: a call %s", self._worker.name, reason, extra={"worker": self._worker.name})
        if self._settings.async_mode and not self._cancelled:
            # Other calls go on, unless the handler's event loop itself hangs.
            self.cancel()
            self._watch = Watch(self._settings.cancel_patience, self._hung)
        else:
            self._hung()

    def _hung(self) -> None:
        seconds = f"{self._settings.predict_timeout:g}"
        self._worker.end(f"was ended because it did not answer within {seconds} seconds (predict_timeout)")

    def _fail(self, status: int, message: str) -> None:
        self._delivery.fail(front_end_reply(status, "EngineException", message), self._midway(status, message))

    def _midway(self, status: int, message: str) -> bytes:
        """The last bytes of a body that has begun: raw text, or E2 where a stream is one of lines of JSON."""
        return payload_error(message, status) if self._settings.async_mode else message.encode("utf-8", "replace")

    def _close(self) -> None:
        self._watch.stop()
        self._flow.stop()
        self._on_finished()


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
