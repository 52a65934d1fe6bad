"""Calls of a handler, each with one request or with a dynamic batch of several."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from handlers.custom.batching.format import BatchMismatch, joined, prefixed, split_output
from handlers.custom.batching.idle_timeout import IdleTimeout
from handlers.custom.handler_reply import decode_part, reply_of
from handlers.custom.request import CallLimits, Request
from handlers.custom.worker import Worker
from handlers.custom.worker_process.socket_protocol import CREDIT_BYTES, Message, MessageKind
from handlers.djl_errors import FAILED_DEPENDENCY, front_end_reply, payload_error

logger = logging.getLogger("handlers.custom")

# Seconds. If a client reads no data of its stream for this long, its call is cancelled.
CLIENT_PATIENCE = 120.0
# The time limit, in seconds, for an async handler to end a cancelled call. After that, the worker counts as hung.
CANCEL_PATIENCE = 5.0


class DynamicBatcher:
    """Calls the handler of one worker, with up to `batch_size` requests in a call.

    A worker runs one call at a time, or up to `concurrency` calls in async mode. A call with one request is not sent as
    a batch.
    """

    def __init__(self, worker: Worker, limits: CallLimits, on_free: Callable[[], None]) -> None:
        """Create the batcher of one worker. `on_free` is called when a call has ended."""
        self.worker, self._limits, self._on_free = worker, limits, on_free
        self._calls: set[_Call] = set()

    @property
    def load(self) -> int:
        """The number of running calls. The batcher with the lowest load gets the next request."""
        return len(self._calls)

    @property
    def room(self) -> int:
        """The number of requests that `begin` accepts now."""
        if len(self._calls) >= self._limits.concurrency:
            return 0
        return self._limits.batch_size if self.worker.takes_batches else 1

    # The number of requests that `begin` would accept if no step were running. Only a `RollingBatcher` has steps.
    places = room

    def begin(self, requests: list[Request]) -> None:
        """Start a call. `requests` holds at most `room` requests."""
        kind = _Call if len(requests) == 1 else _BatchCall
        self._calls.add(kind(self.worker, requests, self._limits, self._finished))

    def _finished(self, call: _Call) -> None:
        self._calls.discard(call)
        self._on_free()


class _Call:
    """A call for one request."""

    def __init__(
        self, worker: Worker, requests: list[Request], limits: CallLimits, on_finished: Callable[[_Call], None]
    ) -> None:
        self._worker, self._requests, self._limits = worker, requests, limits
        self._on_finished = on_finished
        self._reply = requests[0].reply
        self._cancelled = False
        self._uncredited = 0  # The number of received bytes for which the worker has not got new credit yet.
        self._draining: asyncio.Task[None] | None = None
        self._call = worker.call(self._message(), self, requests[0].origin)
        self._timeout = IdleTimeout(limits.predict_timeout, self._on_timeout, self._waits_for_client)
        for request in requests:
            request.forget = self._forget

    def _forget(self, _: Request) -> None:
        self._cancel_if_unwanted()

    def _cancel_if_unwanted(self) -> None:
        """Cancel the call in the worker if no client waits for it."""
        if not any(request.reply.open for request in self._requests):
            self._cancelled = True
            self._worker.cancel(self._call)

    def on_message(self, message: Message) -> None:
        self._timeout.restart()
        if message.kind is MessageKind.OUTPUT:
            self._on_output(message)
        elif message.kind is MessageKind.CHUNK:
            self._reply.write(message.data)
        elif message.kind is MessageKind.STREAM_END or self._reply.started:
            self._reply.end()
        has_answered = message.kind is MessageKind.STREAM_END or (
            message.kind is MessageKind.OUTPUT and not message.streams
        )
        if has_answered and not self._limits.async_mode:
            self._timeout.stop()  # `finalize` may take any amount of time, as in LMI.
        if message.kind is MessageKind.DONE:
            # This has no effect on requests that already have their answer.
            self._fail(FAILED_DEPENDENCY, "the handler ended without an answer")
            self._close()
        else:
            self._received(message.size)

    def _on_output(self, output: Message) -> None:
        part = decode_part(output.data) if self._limits.async_mode and output.code == 200 else None
        if output.error is not None:
            self._reply.reply(reply_of(output), self._midway(output.code, output.error))
        elif part is not None:
            self._reply.accept(part, output.properties)
        elif output.streams:
            self._reply.prepare(output)
        elif self._reply.started:
            self._reply.write(output.data)
        else:
            self._reply.reply(reply_of(output))

    def on_lost(self, reason: str) -> None:
        self._fail(self._limits.unavailable_status, f"the handler's worker {reason} during the request")
        self._close()

    def _message(self) -> Message:
        return self._requests[0].message

    def _received(self, size: int) -> None:
        """Count received bytes. The worker gets credit for more bytes after the client has read the received bytes."""
        self._uncredited += size
        if self._uncredited >= CREDIT_BYTES and self._draining is None and not self._cancelled:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            while self._uncredited >= CREDIT_BYTES:
                async with asyncio.timeout(CLIENT_PATIENCE):
                    await self._reply.writer.drain()
                self._uncredited -= CREDIT_BYTES
                self._worker.credit(self._call)
                self._timeout.restart()  # Until now, the worker may have waited for this credit.
        except TimeoutError:
            # A client that does not read must not block the worker for other clients.
            message = f"the client took nothing for {CLIENT_PATIENCE:g} seconds"
            logger.warning("%s: %s", self._worker.name, message, extra={"worker": self._worker.name})
            self._fail(self._limits.unavailable_status, message)
            self._cancel_if_unwanted()
        finally:
            self._draining = None

    def _waits_for_client(self) -> bool:
        return self._draining is not None and not self._cancelled

    def _on_timeout(self) -> None:
        overdue = self._limits.overdue
        self._fail(self._limits.unavailable_status, f"the handler {overdue}")
        logger.warning("%s: a call %s", self._worker.name, overdue, extra={"worker": self._worker.name})
        if self._limits.async_mode and not self._cancelled:
            # The worker's other calls continue, unless the handler's event loop hangs.
            self._cancel_if_unwanted()
            self._timeout = IdleTimeout(CANCEL_PATIENCE, self._end_worker)
        else:
            self._end_worker()

    def _end_worker(self) -> None:
        self._worker.end_hung(f"was ended because it {self._limits.overdue}")

    def _fail(self, status: int, message: str, kind: str = "EngineException") -> None:
        for request in self._requests:
            request.reply.reply(front_end_reply(status, kind, message), self._midway(status, message))

    def _midway(self, status: int, message: str) -> bytes:
        """Return the last bytes of a body that has started: a line of JSON in async mode, otherwise text."""
        return payload_error(message, status) if self._limits.async_mode else message.encode("utf-8", "replace")

    def _close(self) -> None:
        self._timeout.stop()
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
        for request in self._requests:
            request.forget = None
        self._on_finished(self)


class _BatchCall(_Call):
    """A call for several requests. The handler cannot answer it with a stream."""

    def _on_output(self, output: Message) -> None:
        try:
            answers = split_output(output, len(self._requests))
        except BatchMismatch as error:
            self._fail(400, str(error), "TranslateException")
            self._cancel_if_unwanted()
            return
        for request, answer in zip(self._requests, answers, strict=True):
            request.reply.reply(reply_of(answer))

    def _message(self) -> Message:
        messages = (request.message for request in self._requests)
        return joined([prefixed(i, message.properties, message.contents) for i, message in enumerate(messages)])
