"""Jobs that go to the worker one by one: one at a time, or in async mode many together."""

from __future__ import annotations

import logging
from collections.abc import Callable

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, front_end_reply, payload_error
from handlers.workers.delivery import Delivery, reply_of
from handlers.workers.flow import Flow
from handlers.workers.job import Job
from handlers.workers.lane_settings import LaneSettings
from handlers.workers.parts import decode_part
from handlers.workers.runtime.messages import OutputMessage
from handlers.workers.watch import Watch
from handlers.workers.worker import Worker

logger = logging.getLogger("handlers.workers")


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
