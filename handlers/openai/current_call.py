"""The resources of one HTTP call in vLLM's serving classes: places in the queue, and adapters.

These classes start and drop generators and tasks freely. The resources therefore belong to the call, and are freed when
the call ends, even if such tasks still run. Only a background response, which continues after its call, keeps the
resources.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from engines.errors import DeadlineExceeded, InvalidRequest
from engines.statistics import EngineStatistics
from handlers.contract import Call, not_held_header
from handlers.deadline import NO_DEADLINES, REACHED, Deadline, DeadlineConfig
from handlers.explanation import ExplainedPrompt
from handlers.openai.constraints import Form
from handlers.openai.media.limits import MediaMemory, RequestMedia
from handlers.queue import EngineQueue

if TYPE_CHECKING:
    from engines.vllm.lora import Claim

logger = logging.getLogger(__name__)


class OpenRequest(Protocol):
    """A call's request that is in the engine."""

    @property
    def begun(self) -> bool:
        """True if the request has a token."""

    def end_at_deadline(self) -> None:
        """Stop generating: each unfinished sequence ends with its tokens so far."""


class BeamSteps:
    """Counts the steps of a call's beam searches. Each step asks the engine for the next token of each beam."""

    def __init__(self, statistics: EngineStatistics) -> None:
        self._all = statistics
        self._first, self._later = statistics.of_beam_steps()
        self._beginning = 0  # The number of searches whose first step has not begun.

    def begin(self, prompt_tokens: int) -> None:
        """Count a search."""
        self._beginning += 1
        self._all.prompt(prompt_tokens)

    def of_step(self) -> EngineStatistics:
        """Return the statistics for a request of the next step."""
        if self._beginning:
            self._beginning -= 1
            return self._first
        return self._later

    def end(self) -> None:
        """Add the tokens of the steps to the engine's statistics."""
        for part in (self._first, self._later):
            self._all.tokens += part.tokens
            part.tokens = 0


class OpenAICall:
    """A call of vLLM's front end: its places in the queue, its adapters, and its state."""

    def __init__(
        self,
        queue: EngineQueue,
        any_model: bool = False,
        media: MediaMemory | None = None,
        call: Call | None = None,
        *,
        only_counts: bool = False,
    ) -> None:
        self._queue, self.statistics = queue, queue.statistics
        self._arrived_at, self._time_limit = (call.arrived_at, call.time_limit) if call is not None else (0.0, None)
        self._places = 0  # The number of the queue's places that the call still holds.
        self._closed = False
        self._background: asyncio.Task[None] | None = None
        self.any_model = any_model  # Whether any `model` in the body is accepted.
        self.only_counts = only_counts  # Whether the call only counts the prompt's tokens, and generates nothing.
        # The salt of prompts if the body has no salt.
        self.cache_salt = call.steering.get("cache_salt", "") if call is not None else ""
        self.uses_tools = False  # Whether the model may call the tools in the body.
        self.form = Form()  # The form of the text that the body asks for.
        self.request_id = ""  # The request's id, for the log.
        self.not_held: tuple[tuple[str, str], ...] = ()  # The header about unenforced parts of the JSON schema.
        self.reached: tuple[tuple[str, str], ...] = ()  # The header of an answer that ended at its deadline.
        self.streams = call is not None and call.from_handler  # Whether the stream deadline applies.
        self.deadline: Deadline | None = None
        self.open: set[OpenRequest] = set()  # The call's requests in the engine.
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._on_missed: Callable[[DeadlineExceeded], object] | None = None
        self.deadline_passed = False  # Whether the deadline has ended the call's requests or the call itself.
        # Adapters that are kept for the call, by name. A beam search asks for its adapter several times.
        self.adapters: dict[str, Claim] = {}
        self.media = RequestMedia(media) if media is not None else None
        self.generates = False  # Whether the call was admitted to the queue.
        self.steps: BeamSteps | None = None  # If set, all of the call's requests are beam-search steps.
        self.begun = False  # Whether the engine has begun an answer, and so no longer refuses any request of the call.
        self.on_begin: Callable[[], None] | None = None  # Called when `begun` is set.
        self.submitted = False  # Whether the body has been read and a prompt goes to the engine.
        self.explains_one = False  # Whether only the first prompt is explained.
        # For a call to be explained: a future for its prompts, set when they would go to the engine. None for other
        # calls.
        self.explained: asyncio.Future[Sequence[ExplainedPrompt]] | None = None
        self.asked: list[tuple[Any, Any, Any]] = []  # The prompts to explain, with vLLM's parameters and options.
        self.failed = ""  # Why one of the call's requests failed. Empty if none has failed.

    @property
    def most_sequences(self) -> int:
        """The maximum number of sequences that a call may have."""
        return self._queue.limit

    def take(self, sequences: int) -> None:
        """Take places for sequences of this call.

        Raises:
            InvalidRequest: The call needs more places than the queue has, or the call has ended.
            Overloaded: There are not enough free places now.
        """
        limit = self._queue.limit
        if self._closed:  # A task has outlived its call.
            raise InvalidRequest("the call has ended; nothing more can be generated for it")
        if self._places + sequences > limit:
            raise InvalidRequest(f"the request asks for too many sequences; at most {limit} can be served")
        self._queue.admit(sequences)
        self._places += sequences
        self.generates = True

    def on_not_held(self, places: Sequence[str]) -> None:
        """Record the parts of the JSON schema that the answer might violate."""
        if self.not_held:  # The requests of a call have the same schema.
            return
        logger.info("%d parts of the JSON schema are not held", len(places), extra={"request_id": self.request_id})
        self.not_held = not_held_header(places)

    def start_deadline(self, on_missed: Callable[[DeadlineExceeded], object]) -> None:
        """Start the timer of the call's deadline.

        Args:
            on_missed: Called at the deadline if no request has a token.
        """
        self._on_missed = on_missed
        self._set_deadline(self._queue.deadlines)

    def begin_stream(self) -> None:
        """Record that the answer is a stream, and apply the stream deadline.

        For a body with an audio file, this is known only when the reply begins.
        """
        self.streams = True
        self._set_deadline(self._queue.deadlines)

    def leave_client(self) -> None:
        """Drop the server's deadline, because no client waits for a background response. Keep the client's deadline."""
        self._set_deadline(NO_DEADLINES)

    def _set_deadline(self, deadlines: DeadlineConfig) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self.deadline = deadlines.of(self._arrived_at, self._time_limit, stream=self.streams)
        if self.deadline is not None:
            self._deadline_timer = self.deadline.call(self.end_at_deadline)

    def end_at_deadline(self, error: DeadlineExceeded) -> None:
        """If one of the requests has a token, end all requests. Otherwise end the call with the error."""
        if self.deadline_passed or self._on_missed is None:
            return
        self.deadline_passed = True
        if self.begun or any(request.begun for request in self.open):
            for request in list(self.open):
                request.end_at_deadline()
            return
        self.failed = error.message
        self._queue.count_deadline(self.request_id, begun=False)
        self._on_missed(error)

    def add(self, request: OpenRequest) -> None:
        """Record a request that the engine has received. After the deadline, the request ends at once."""
        self.open.add(request)
        if self.deadline_passed:
            request.end_at_deadline()

    def reach_deadline(self) -> None:
        """Record that the deadline has ended an unfinished request."""
        if not self.reached:
            self._queue.count_deadline(self.request_id, begun=True)
        self.reached = REACHED

    def begin(self) -> None:
        """Record that the engine has begun an answer."""
        self.begun = True
        if self.on_begin is not None:
            self.on_begin()

    def release(self, sequences: int) -> None:
        """Return places to the queue. Do nothing if the call has ended."""
        if not self._closed:
            self._places -= sequences
            self._queue.open_sequences -= sequences

    def keep(self, adapter: str, claim: Claim) -> Claim:
        """Keep an adapter until the call ends. Return the claim that all requests of the call share."""
        kept = claim if self._closed else self.adapters.setdefault(adapter, claim)
        if self._closed or kept is not claim:
            claim.release()
        return kept

    def goes_on_in(self, task: asyncio.Task[None]) -> None:
        """Keep the call's resources until the task has ended. The task makes a background response.

        A response that has no token at its deadline fails.
        """
        self._background = task
        self._on_missed = lambda _: task.cancel()

    def close(self) -> None:
        """Release all resources, but not before a background response has ended."""
        self.on_begin = None
        task, self._background = self._background, None
        if task is not None and not task.done():
            task.add_done_callback(lambda _: self.close())
            return
        self._on_missed = None
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self.release(self._places)
        if self.media is not None:
            self.media.close()
        for claim in self.adapters.values():
            claim.release()
        self.adapters.clear()
        self._closed = True


# The call that the running task works for. A new task inherits the call from the task that starts it.
current_call: ContextVar[OpenAICall] = ContextVar("current_call")
