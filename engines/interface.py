"""The interface of engines, and code that engines share: stall detection, a watchdog, and the joining of sequences."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import msgspec

from engines.adapters import Adapter
from engines.errors import EngineDead, RequestError
from engines.loaded_model import LoadedModel
from engines.request import GenerationRequest, TokenDelta

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_DEATH_POLL_SECONDS = 0.2

_SUBMITS_PER_TURN = 16
_WATCH_SECONDS = 0.25
# One call of `Progress.look` adds at most this many seconds. If more time has passed since the last call, this process
# itself was stalled, so the time does not count against the engine.
_LONGEST_LOOK = 2.0
STALL_SECONDS = 60.0
# The stall limit of a new engine, which compiles a GPU's kernels during the first requests that need them.
NEW_ENGINE_STALL_SECONDS = 300.0
NEW_ENGINE_SECONDS = 600.0  # An engine counts as new during this many seconds of work.


class Progress:
    """Records the signs of life of an engine, or of one copy of the model. Not thread-safe."""

    __slots__ = ("_clock", "_limit", "_looked_at", "_mark", "_worked_seconds", "quiet_seconds")

    def __init__(self, limit: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to record.

        Args:
            limit: The seconds without a sign of life after which the engine is stalled. 0: no limit. None:
                `STALL_SECONDS`, or `NEW_ENGINE_STALL_SECONDS` for a new engine.
            clock: Returns the time in seconds.
        """
        self._limit, self._clock, self._looked_at = limit, clock, clock()
        self._mark = 0.0  # The `mark` of the last call of `look`.
        # Seconds with work since the last sign of life. Time without work adds nothing. It also does not reset the
        # seconds, because work can end without progress: clients leave, or a time limit is reached.
        self.quiet_seconds = 0.0
        self._worked_seconds = 0.0  # Total seconds with work, up to the last sign of life.

    def look(self, busy: bool, mark: float) -> None:
        """Record whether the engine has made progress.

        Args:
            busy: True if the engine has work.
            mark: A number that changes with every sign of life of the engine.
        """
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK), now
        if mark != self._mark:
            self._worked_seconds += self.quiet_seconds + passed
            self.quiet_seconds = 0.0
        elif busy:
            self.quiet_seconds += passed
        self._mark = mark

    @property
    def is_stalled(self) -> bool:
        """True if there was work, but no sign of life, for too long. False again after the next sign of life."""
        limit = self._limit
        if limit is None:
            limit = NEW_ENGINE_STALL_SECONDS if self._worked_seconds < NEW_ENGINE_SECONDS else STALL_SECONDS
        return 0 < limit < self.quiet_seconds


class Watchdog:
    """Calls `look` four times a second, until `look` returns False.

    If `look` raises, the first error is logged and makes the engine unhealthy (`failure`). The calls continue.
    """

    def __init__(self, look: Callable[[], Awaitable[bool]]) -> None:
        """Create the watchdog.

        Args:
            look: A function that fails requests without progress, and all requests if the engine is dead and will not
                be restarted. So no request waits forever. It returns False if nothing is left to watch.
        """
        self._look = look
        self._task: asyncio.Task[None] | None = None
        self.failure = ""  # The reason why the engine must no longer serve. "" if it may serve.

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Stop the calls. This has no effect if the watchdog was never started."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        going_on = True
        while going_on:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                going_on = await self._look()
            except Exception as error:
                if not self.failure:
                    logger.exception("watching the engine has failed; it is unhealthy from now on")
                    self.failure = f"watching the engine has failed: {error!r}"


class Sink(Protocol):
    """Receives one request's answer. Its methods are called on the event loop, and must neither block nor raise."""

    def on_not_held(self, places: Sequence[str]) -> None:
        """Receive the parts of the request's JSON schema that the engine does not enforce.

        The answer may violate these parts. The engine calls this method before the first delta, and only if there are
        such parts.

        Args:
            places: The location of each part in the client's body (`SchemaPart.name`).
        """

    def on_delta(self, delta: TokenDelta) -> None:
        """Receive the next part of the answer. Nothing follows if `delta.last` is True."""

    def on_error(self, error: RequestError) -> None:
        """Receive the error that ended the request. Nothing follows."""


class Generation(Protocol):
    """A running request."""

    def cancel(self) -> None:
        """Stop generating. Nothing more reaches the sink. This has no effect if the request has ended."""

    def abort(self, *, at_deadline: bool = False) -> None:
        """Stop generating. Each unfinished sequence soon ends with a last delta.

        The last delta has the tokens that the sink has not received yet, and the final counts. Its finish reason is
        `FinishReason.ABORT`. At a deadline, the finish reason is `FinishReason.LENGTH` and the stop reason is
        `DEADLINE`. `abort` has no effect if the request has ended.
        """

    @property
    def begun(self) -> bool:
        """Whether a token has been generated. It is always False for a request with `pooling`."""


async def give_turn(index: int) -> None:
    """Let other tasks run on the event loop before every 16th sequence or prompt of a call.

    Args:
        index: The position of the sequence or prompt in the call.
    """
    if index % _SUBMITS_PER_TURN == _SUBMITS_PER_TURN - 1:
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether an engine can serve."""

    alive: bool
    reason: str = ""
    quiet_seconds: float = 0.0  # `Progress.quiet_seconds` of the copy with the most quiet seconds.
    stalled: str = ""  # Names the stalled copies, or "the engine" if there is one copy. Empty if none is stalled.
    ready_copies: int = 1  # The number of copies that accept requests.
    # A text that names the dead copies that `restart` restarts. Empty if none is to be restarted, or if no copy runs.
    missing: str = ""
    # A text about copies that are missing for good: fewer copies than the minimum are left, and dead copies will not be
    # restarted. Otherwise empty.
    lost: str = ""


class CopyState(Enum):
    """The state of a copy of the model."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # The copy accepts no new requests, and ends when its last request has ended.
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineCopy:
    """A copy of the model, with its own processes. LMI calls it a worker."""

    number: int  # The copy's number, counted from 1.
    state: CopyState
    started_at: float  # Seconds since the epoch.
    gpus: tuple[int, ...] = ()  # Empty: the engine chooses the devices itself.
    end: str = ""  # How the copy's processes have ended. Empty if the copy has not died.
    elsewhere: Sequence[str] = ()  # Descriptions of the copy's processes that run in Ray or on other machines.
    faulty: bool = False  # Whether `Engine.restart` would restart this copy now.


class ExplainedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as an engine would get it."""

    token_ids: list[int]  # The prompt.
    parameters: Mapping[str, Any]  # The parameters as JSON values, keyed by the engine's names.
    not_held: Sequence[str] = ()  # The parts of the JSON schema that the engine does not enforce.
    media: bool = False  # Whether the prompt has images, audio or videos.
    cache_salt: str | None = None  # The request shares cached prompts only with requests that have the same salt.
    # The number of the copy that would get the request now. None: no copy accepts requests, or the request is a beam
    # search, whose steps may go to any copy.
    copy: int | None = None
    # The number of prompt tokens that this copy's prefix cache probably holds. None: unknown.
    cached_tokens: int | None = None
    # The model's own defaults: the default and its source, keyed by the engine's name of the parameter.
    model_defaults: Mapping[str, tuple[Any, str]] = {}


class EngineAdapters(Protocol):
    """The adapters of one engine.

    A submitted request keeps its adapter until it ends, even if the adapter is unregistered.
    """

    async def add(self, adapter: Adapter) -> None:
        """Make an adapter available to requests. It replaces an adapter of the same name.

        If the adapter has `preload`, it is loaded first. Otherwise its files are checked, and its first request loads
        it.

        Raises:
            AdapterFailed: The adapter cannot be used with this model. The message gives the reason. The adapter leaves
                no trace.
            NoRoomForAdapter: Every loaded adapter is pinned or in use.
        """

    async def change(self, adapter: Adapter) -> None:
        """Apply `pin` and `preload` to an adapter that was added: pin it, or load it now.

        Raises AdapterFailed, NoRoomForAdapter: as in `add`. The adapter stays unchanged.
        """

    async def remove(self, adapter_id: int, *, wait: bool = True) -> None:
        """Refuse new requests for the adapter, and free it when its running requests have ended.

        Args:
            wait: Whether to wait until the adapter is freed, for at most half a minute. The adapter is freed even if
                that takes longer.
        """


class Engine(LoadedModel, Protocol):
    """A model runtime with one model."""

    max_sequences: int  # The number of sequences that run together. Set by `start`.
    # The model's Hugging Face tokenizer, for code outside Slipway. `texts` has a copy of it. Set by `start`.
    tokenizer: Any

    @property
    def adapters(self) -> EngineAdapters | None:
        """The adapters. None if the engine supports none, or `option.enable_lora` is off. Set by `start`."""

    async def start(self) -> None: ...

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        """Begin generating. The answer goes to `sink`.

        Raises:
            InvalidRequest: The engine would refuse the request, for example because of its length.
            UnknownAdapter: The request names an adapter that was not added.
            AdapterUnusable: The request's adapter can no longer be loaded.
            Overloaded: The engine has no room for the request's adapter.
            EngineDead: The engine has died or was stopped.
        """

    async def explain(self, request: GenerationRequest) -> ExplainedRequest:
        """Prepare a request as `submit` does, but do not send it, and load no adapter.

        Raises:
            InvalidRequest: The engine would refuse the request.
            UnknownAdapter: The request names an adapter that was not added.
            EngineDead: The engine has died.
        """

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        """Return the request's prompt as token ids. They are truncated if the request asks for that.

        Raises:
            InvalidRequest: The prompt is empty, or too long for the model.
        """

    def health(self) -> EngineHealth:
        """Return whether the engine can serve. The call is cheap, because it asks no other process."""

    @property
    def waits(self) -> bool:
        """Whether requests wait for `restart` after the engine has died. If False, they get an error."""

    async def restart(self) -> None:
        """Restart the engine after it has died or stalled. The waiting requests then continue.

        This restarts the dead copies. If no copy is dead, this restarts the stalled copies (`EngineCopy.faulty`). Call
        `restart` only if the engine `waits`, or if another copy still serves.

        Raises:
            EngineStartError: The engine or a copy cannot be started. The requests still wait.
        """

    def give_up(self) -> None:
        """Give an error to the requests that wait for `restart`. Copies that are dead now are never restarted."""

    @property
    def copies(self) -> Sequence[EngineCopy]:
        """The copies of the model, sorted by number."""

    def scale(self, least: int, most: int) -> None:
        """Begin to add or to remove copies. A copy that is removed drains first.

        Args:
            least: The minimum number of copies. With fewer copies, the engine counts as broken.
            most: The number of copies that should serve, at least 1.

        Raises:
            InvalidRequest: The machine has no room for this number of copies, or the engine supports only one copy.
        """

    async def stop(self, why: str = "the server is stopping") -> None:
        """Free everything. Running requests end with an error that includes `why`."""


class EngineStartError(Exception):
    """The engine could not load the model."""


class EngineOutOfMemory(EngineStartError):
    """There is not enough memory for the model, on the device or in the machine."""


class _FirstDelta:
    def __init__(self) -> None:
        self.delta: asyncio.Future[TokenDelta] = asyncio.get_running_loop().create_future()

    def on_not_held(self, places: Sequence[str]) -> None: ...

    def on_delta(self, delta: TokenDelta) -> None:
        if not self.delta.done():
            self.delta.set_result(delta)

    def on_error(self, error: RequestError) -> None:
        if not self.delta.done():
            self.delta.set_exception(error)


async def first_delta(
    submit: Callable[[GenerationRequest, Sink], Awaitable[Generation]], request: GenerationRequest
) -> TokenDelta:
    """Return the first delta of an answer, and cancel the rest of the answer. `submit`: as `Engine.submit`.

    Raises RequestError: the request was refused or has failed.
    """
    sink = _FirstDelta()
    generation = await submit(request, sink)
    try:
        return await sink.delta
    finally:
        generation.cancel()
        del sink  # The sink references an error, whose traceback references this frame.


async def unless_dead(work: Coroutine[Any, Any, _T], is_dead: Callable[[], bool]) -> _T:
    """Return the result of `work`, which waits for an engine.

    Raises:
        EngineDead: The engine has died.
    """
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_DEATH_POLL_SECONDS)
            if not task.done() and is_dead():
                raise EngineDead
        return task.result()
    finally:
        task.cancel()


class SequenceGroup:
    """Joins the sequences of one request into one answer.

    If the answer is streamed and every candidate is returned, each delta goes to the sink at once. Otherwise the
    sequences go to the sink when all have finished. They are sorted by cumulative log probability, the most probable
    sequence first. In this case, `TokenDelta.sequence` is the rank.
    """

    def __init__(self, sink: Sink, sequences: int, candidates: int, stream: bool) -> None:
        self._sink = sink
        self._sequences = sequences
        self._open = candidates
        self._pass_through = stream and sequences == candidates
        self._finished: list[TokenDelta] = []
        self._failed = False

    def on_not_held(self, places: Sequence[str]) -> None:
        self._sink.on_not_held(places)

    def on_delta(self, delta: TokenDelta) -> None:
        if self._failed:
            return
        if delta.last:
            self._open -= 1
        if self._pass_through:
            delta.last = self._open == 0
            self._sink.on_delta(delta)
            return
        self._finished.append(delta)
        if self._open != 0:
            return
        parts: dict[int, list[TokenDelta]] = {}
        for delta in self._finished:
            parts.setdefault(delta.sequence, []).append(delta)
        ranked = sorted(map(_join, parts.values()), key=_probability, reverse=True)[: self._sequences]
        prompt_tokens = next((d.prompt_tokens for d in self._finished if d.prompt_tokens is not None), None)
        for rank, delta in enumerate(ranked):
            delta.sequence = rank
            delta.prompt_tokens = prompt_tokens if rank == 0 else None
            delta.last = rank == len(ranked) - 1
            self._sink.on_delta(delta)

    def on_error(self, error: RequestError) -> None:
        if not self._failed:
            self._failed = True
            self._sink.on_error(error)


def _join(deltas: list[TokenDelta]) -> TokenDelta:
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[-1], text="".join(d.text for d in deltas), tokens=[token for d in deltas for token in d.tokens]
    )


def _probability(delta: TokenDelta) -> float:
    return delta.cumulative_logprob if delta.cumulative_logprob is not None else -math.inf
