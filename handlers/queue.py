"""The queue of an engine, with a limited number of places for sequences. The calls of all contracts share it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engines.errors import InvalidRequest, Overloaded
from engines.interface import Engine
from handlers.contract import Call, Exchange
from handlers.deadline import NO_DEADLINES, Deadline, DeadlineConfig

logger = logging.getLogger(__name__)


class EngineQueue:
    """The calls of one engine.

    At most `limit` sequences are in the engine at the same time, running or waiting. Further calls are refused at once.
    """

    def __init__(
        self, engine: Engine, limit: int, overload_status: int = 503, deadlines: DeadlineConfig = NO_DEADLINES
    ) -> None:
        """Create the engine queue.

        Args:
            overload_status: The status for LMI's clients if the queue is full.
            deadlines: The deadlines of the calls.
        """
        self.engine, self.limit, self.overload_status, self.deadlines = engine, limit, overload_status, deadlines
        self.statistics = engine.statistics
        self.sets_deadlines = deadlines != NO_DEADLINES  # If False, a call has a deadline only if it asks for one.
        self.open_sequences = 0  # The number of places that are taken.
        self.running: dict[str, Callable[[], None]] = {}  # `RunningCall.abort` of each call, keyed by request id.

    def admit(self, sequences: int) -> None:
        """Take places for a call.

        Raises:
            InvalidRequest: The call needs more places than the queue has.
            Overloaded: There are not enough free places now.
        """
        if sequences > self.limit:
            raise InvalidRequest(f"the request asks for {sequences} sequences; at most {self.limit} can be served")
        if self.open_sequences + sequences > self.limit:
            raise self.overloaded()
        self.open_sequences += sequences

    def refuse_if_full(self) -> None:
        """Refuse a call if no place is free. A refusal counts as a failed call.

        Raises:
            Overloaded: No place is free.
        """
        if self.open_sequences >= self.limit:
            self.statistics.calls.count(0.0, failed=True)
            raise self.overloaded()

    def overloaded(self) -> Overloaded:
        """Return the error of a call that gets no place."""
        message = f"the queue is full: {self.open_sequences} of {self.limit} places are taken; try again later"
        return Overloaded(message, self.overload_status)

    def deadline_of(self, exchange: Exchange, call: Call) -> Deadline | None:
        """Return the deadline of a call, or None."""
        stream = exchange.requests[0].stream or call.from_handler
        return self.deadlines.of(call.arrived_at, call.time_limit, stream=stream)

    def count_deadline(self, request_id: str, *, begun: bool) -> None:
        """Count and log a call that ends at its deadline. `begun` is True if the call has a part of its answer."""
        self.statistics.deadlines["partial" if begun else "nothing"] += 1
        had = "a part of its answer" if begun else "no token"
        logger.info("the call ended at its deadline with %s", had, extra={"request_id": request_id})

    def abort(self, request_id: str) -> None:
        """End the call with this id, if it is running. Its client gets the answer so far, marked as aborted."""
        if (abort := self.running.get(request_id)) is not None:
            abort()
