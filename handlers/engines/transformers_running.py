"""A sequence in the scheduler engine: chosen and put into words in the engine's thread, delivered on the event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from handlers.engines.protocol import Generation, Sink
from handlers.engines.transformers_batching import Row
from handlers.engines.transformers_parameters import PreparedSampling
from handlers.engines.transformers_sampling import Choice, TokenChooser
from handlers.engines.transformers_sequence import GeneratedSequence
from handlers.errors import GenerationFailed, RequestError
from handlers.meter import Meter
from handlers.request import FinishReason, TokenDelta

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step of the engine brought for one sequence."""

    sequence: RunningSequence
    token_id: int | None
    """None: the sequence has ended."""
    delta: TokenDelta | None = None
    error: RequestError | None = None
    queue_seconds: float = 0.0


class RunningSequence:
    """One sequence of one request.

    `advance` and `abort` are called in the engine's thread, everything else on the event loop; what one of them changes
    the other only reads, and only in the `Progress` that is handed over.
    """

    def __init__(
        self, name: str, prepared: PreparedSampling, prompt_ids: list[int], index: int, sink: Sink, meter: Meter
    ) -> None:
        self.name = name
        self.chooser = TokenChooser(prepared, index)
        self.text = GeneratedSequence(prepared.request, prompt_ids, prepared.model, index)
        self.prompt_ids = prompt_ids
        self.want_ranks = prepared.request.want_ranks
        self._sink, self._meter = sink, meter
        self.ended = False
        """Nothing more reaches the sink."""
        self._has_token = False
        self._started_at = self.last_at = time.monotonic()

    def advance(self, choice: Choice | RequestError, row: Row) -> Progress:
        """Take the step's choice; whatever fails here fails this sequence alone."""
        if isinstance(choice, RequestError):
            return Progress(self, None, error=choice)
        try:
            delta = self.text.add(choice)
        except Exception:
            # An exception here would end the engine's loop and with it every other request.
            logger.exception("request %s: internal error while handling a token", self.name)
            return Progress(self, None, error=GenerationFailed("internal error while handling a token"))
        token_id = choice.token_id if self.text.finish_reason is None else None
        return Progress(self, token_id, delta, queue_seconds=row.queue_seconds)

    def abort(self) -> Progress:
        """End it with what there is of it."""
        try:
            return Progress(self, None, self.text.abort())
        except Exception:
            logger.exception("request %s: internal error while it was aborted", self.name)
            return Progress(self, None, error=GenerationFailed("internal error while the request was aborted"))

    def deliver(self, progress: Progress, now: float) -> None:
        """Hand over what a step brought at `now` (monotonic seconds)."""
        if self.ended:
            return
        if progress.error is not None:
            self.fail(progress.error)
            return
        delta = progress.delta
        aborted = delta is not None and delta.finish_reason is FinishReason.ABORT
        if not aborted:
            self._count(now, progress.queue_seconds)
        if delta is None:
            return
        if delta.last:
            self.ended = True
            if aborted:
                self._meter.aborted_requests += 1
            else:
                self._meter.finished_requests += 1
        try:
            self._sink.on_delta(delta)
        except Exception:
            logger.exception("request %s: internal error while handling a token", self.name)
            self.ended = False
            self.fail(GenerationFailed("internal error while handling a token"))

    def fail(self, error: RequestError) -> None:
        """End the sequence with an error."""
        if not self.ended:
            self.ended = True
            self._meter.failed_requests += 1
            self._sink.on_error(error)

    def cancel(self) -> bool:
        """End it without a word; False if it had ended already."""
        if self.ended:
            return False
        self.ended = True
        self._meter.aborted_requests += 1
        return True

    def _count(self, now: float, queue_seconds: float) -> None:
        meter = self._meter
        meter.tokens += 1
        if self._has_token:
            meter.inter_token.observe(now - self.last_at)
        else:
            self._has_token = True
            meter.time_to_first_token.observe(now - self._started_at)
            meter.queue_time.observe(queue_seconds)
        self.last_at = now


class SchedulerGeneration:
    """The sequences of one request; see `Generation`."""

    def __init__(
        self, discard: Callable[[RunningSequence], None], abort: Callable[[Sequence[RunningSequence]], None]
    ) -> None:
        """`discard` and `abort`: the engine's."""
        self._discard, self._abort = discard, abort
        self.sequences: list[RunningSequence] = []

    def cancel(self) -> None:
        """See `Generation`."""
        for sequence in self.sequences:
            if sequence.cancel():
                self._discard(sequence)
        self.sequences.clear()

    def abort(self) -> None:
        """See `Generation`."""
        self._abort([sequence for sequence in self.sequences if not sequence.ended])


class CountedBeams:
    """A beam search as a client sees it, for the meter: one prompt, and a sequence for each beam."""

    def __init__(self, sink: Sink, width: int, meter: Meter) -> None:
        self._sink, self._open, self._meter = sink, width, meter
        self.search: Generation | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        """See `Sink`."""
        if delta.sequence == 0:
            self._meter.prompt_tokens += delta.prompt_token_count
        self._open -= 1
        if delta.finish_reason is FinishReason.ABORT:
            self._meter.aborted_requests += 1
        else:
            self._meter.finished_requests += 1
        self._meter.tokens += delta.token_count
        self._sink.on_delta(delta)

    def on_error(self, error: RequestError) -> None:
        """See `Sink`."""
        self._meter.failed_requests += self._open
        self._open = 0
        self._sink.on_error(error)

    def cancel(self) -> None:
        """See `Generation`."""
        self._meter.aborted_requests += self._open
        self._open = 0
        if self.search is not None:
            self.search.cancel()

    def abort(self) -> None:
        """See `Generation`."""
        if self.search is not None:
            self.search.abort()
