"""A request for a custom handler, and the limits of the queue and of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from handlers.custom.engine_call import NO_ORIGIN, Origin
from handlers.custom.handler_reply import HandlerReply
from handlers.custom.worker_process.socket_protocol import Message


@dataclass(slots=True, eq=False)
class Request:
    """A request for a custom handler. Implements `Running`."""

    message: Message
    reply: HandlerReply
    request_id: str
    priority: int  # Requests with lower numbers leave the queue earlier.
    origin: Origin = NO_ORIGIN  # The origin of the handler's calls to the engine.
    number: int = 0  # The request's place in the order of arrival.
    arrived_at: float = 0.0  # Seconds on the event loop's clock.
    # Removes the request from the queue or from its call. None if a cancelled request stays in its batch.
    forget: Callable[[Request], None] | None = None

    def cancel(self) -> None:
        if self.reply.open:
            self.reply.open = False
            if self.forget is not None:
                self.forget(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The limits of the queue and of the calls of one model. Durations are in seconds."""

    queue_size: int  # The number of requests that may wait while all workers are busy.
    overload_status: int
    unavailable_status: int
    predict_timeout: float
    async_mode: bool
    concurrency: int  # The number of calls that one worker runs at the same time.
    batch_size: int
    max_batch_delay: float
    max_rolling_batch_size: int

    @property
    def overdue(self) -> str:
        """The second half of the message about a handler that exceeded `predict_timeout`."""
        return f"did not answer within {self.predict_timeout:g} seconds (predict_timeout)"
