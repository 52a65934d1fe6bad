"""The interface of engines, and their shared parts: signs of life, a watchdog, and several sequences as one answer."""

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
# Seconds between two looks that count at most: time in which this process itself stood still is not the engine's.
_LONGEST_LOOK = 2.0


class Progress:
    """The signs of life of an engine, or of a copy. For the event loop."""

    __slots__ = ("_clock", "_looked_at", "mark", "quiet_seconds", "worked_seconds")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked_at = clock, clock()
        self.mark = 0.0  # The number that the last look saw; it changes with every sign of life.
        # Seconds with work since the last sign of life. Time without work does not count, nor is it a sign of life: the
        # work may have been given up by its clients, or for its time limit.
        self.quiet_seconds = 0.0
        self.worked_seconds = 0.0  # Seconds with work, in all, up to the last sign of life.

    def look(self, busy: bool, mark: float) -> None:
        """Record whether the engine has moved.

        Args:
            busy: It has work.
            mark: Any number that changes whenever it gives a sign of life.
        """
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK), now
        if mark != self.mark:
            self.worked_seconds += self.quiet_seconds + passed
            self.quiet_seconds = 0.0
        elif busy:
            self.quiet_seconds += passed
        self.mark = mark


class Watchdog:
    """Looks at an engine four times a second, for as long as it can be watched.

    A look that raises is logged once and makes the engine unhealthy (`failure`); it keeps looking.
    """

    def __init__(self, look: Callable[[], Awaitable[bool]]) -> None:
        """Create the watchdog.

        Args:
            look: Ends work that would wait for ever. Returns False when nothing is left to watch.
        """
        self._look = look
        self._task: asyncio.Task[None] | None = None
        self.failure = ""  # The reason why the engine must no longer serve; "" while it may.

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """End it; harmless when it was never started."""
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
    """Receives one request's answer. Called on the event loop; must neither block nor raise."""

    def on_not_held(self, places: Sequence[str]) -> None:
        """Take the parts of the request's JSON schema that the engine does not enforce. The answer may break them.

        Called before the first delta, and only if there are such parts.

        Args:
            places: Of the parts, in the client's body (`SchemaPart.name`).
        """

    def on_delta(self, delta: TokenDelta) -> None:
        """Take the next part of the answer. Nothing follows if `delta.last` is True."""

    def on_error(self, error: RequestError) -> None:
        """The request has ended with `error`; nothing follows."""


class Generation(Protocol):
    """A running request."""

    def cancel(self) -> None:
        """Stop generating. Nothing more reaches the sink. Harmless when the request has ended."""

    def abort(self, *, at_deadline: bool = False) -> None:
        """Stop generating. Each unfinished sequence soon ends as aborted, or for its length at a deadline.

        Its last delta has the tokens that were not passed on yet, and true counts. Its finish reason is
        `FinishReason.ABORT`; at a deadline it is `FinishReason.LENGTH`, with `DEADLINE` as stop reason. Harmless when
        the request has ended.
        """

    @property
    def begun(self) -> bool:
        """True if a sequence has a token. A request with `pooling` never has one."""


Submit = Callable[[GenerationRequest, Sink], Awaitable[Generation]]  # A function with the signature of `Engine.submit`.


async def give_turn(index: int) -> None:
    """Give other tasks a turn on the event loop before every 16th sequence or prompt of a call.

    Args:
        index: The position of the sequence or prompt in the call.
    """
    if index % _SUBMITS_PER_TURN == _SUBMITS_PER_TURN - 1:
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The ability of an engine to serve."""

    alive: bool
    reason: str = ""
    quiet_seconds: float = 0.0  # Seconds with work since the last sign of life (`Progress`), of the quietest copy.
    mark: float = 0.0  # A number that changes with every sign of life.
    worked_seconds: float = 0.0  # Seconds with work, in all, up to the last sign of life.
    ready_copies: int = 1  # Copies that take requests.
    missing: str = ""  # The copies that have died while others serve. `restart` starts them again.
    lost: str = ""  # Why fewer copies serve than the least number, and will not come back. Others still serve.


class CopyState(Enum):
    """The state of a copy of the model."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # It takes no new requests, and ends when its last one has ended.
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineCopy:
    """A copy of the model, with its own processes. LMI calls it a worker."""

    number: int  # From 1.
    state: CopyState
    started_at: float  # Seconds since the epoch.
    gpus: tuple[int, ...] = ()  # Empty: it runs in main memory.
    end: str = ""  # How its processes have ended. Empty if it has not died.


class ExplainedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as an engine would get it."""

    token_ids: list[int]  # Of the prompt.
    parameters: Mapping[str, Any]  # By the engine's names, as values of JSON.
    not_held: Sequence[str] = ()  # The parts of the JSON schema that the engine does not enforce.
    media: bool = False  # The prompt has images, sounds or videos.
    cache_salt: str | None = None  # The request shares cached prompts only with requests of the same salt.
    # The number of the copy that would get it now. None: no copy takes requests, or its steps go to all copies.
    copy: int | None = None
    cached_tokens: int | None = None  # Tokens of the prompt that this copy's prefix cache may have. None: not known.
    # The parameters whose default is the model's own, by the engine's names: the value, and the place that has it.
    model_defaults: Mapping[str, tuple[Any, str]] = {}


class EngineAdapters(Protocol):
    """The adapters of one engine.

    A submitted request keeps its adapter to its end, even if the adapter is unregistered.
    """

    async def add(self, adapter: Adapter) -> None:
        """Let requests name an adapter; one of the same name is replaced.

        One to `preload` is loaded first. The files of others are checked; they are loaded for their first request.

        Raises:
            AdapterFailed: It cannot be used with this model; the message says why. Nothing is left of it.
            NoRoomForAdapter: Every adapter that is loaded is pinned or in use.
        """

    async def change(self, adapter: Adapter) -> None:
        """Pin an adapter that was added, or load it now, as `pin` and `preload` say.

        Raises AdapterFailed, NoRoomForAdapter: as in `add`; it stays as it was.
        """

    async def remove(self, adapter_id: int, *, wait: bool = True) -> None:
        """Refuse the adapter to new requests, and free it when its running requests have ended.

        Args:
            wait: Return when it is free, or after half a minute, while it is being freed as soon as may be.
        """


class Engine(LoadedModel, Protocol):
    """A model runtime with one model."""

    max_sequences: int  # Sequences that run together; known once it has started.
    # The model's tokenizer, of Hugging Face's kind, for code that is not ours; known once it has started. `texts` has a
    # copy of it.
    tokenizer: Any

    @property
    def adapters(self) -> EngineAdapters | None:
        """None if the engine has none, or `option.enable_lora` is off; known once it has started."""

    async def start(self) -> None: ...

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        """Begin generating; the answer goes to `sink`.

        Raises:
            InvalidRequest: The engine would refuse it (too long, bad value); nothing was started.
            UnknownAdapter: It names an adapter that was not added.
            AdapterUnusable: Its adapter can no longer be loaded.
            Overloaded: The engine has no room for its adapter.
            EngineDead: The engine is gone.
        """

    async def explain(self, request: GenerationRequest) -> ExplainedRequest:
        """Prepare a request as `submit` does, and send nothing. Loads no adapter.

        Raises:
            InvalidRequest: The engine would refuse it.
            UnknownAdapter: It names an adapter that was not added.
        """

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        """Return the request's prompt as token ids, truncated as it asks.

        Raises:
            InvalidRequest: It is empty, or too long for the model.
        """

    def health(self) -> EngineHealth:
        """Tell whether the engine can serve. Cheap: asks no other process."""

    @property
    def waits(self) -> bool:
        """True if requests wait for `restart` when the engine has died. False: they get an error."""

    async def restart(self) -> None:
        """Start the engine again after it has died or stalled. The requests that wait continue.

        Of several copies, it restarts the dead copies, or else the quietest copy. Only for an engine that `waits`, or
        while a copy serves.

        Raises:
            EngineStartError: It, or a copy, cannot be started. The requests still wait.
        """

    def give_up(self) -> None:
        """Give an error to the requests that wait for `restart`. The copies that are dead now are not restarted."""

    @property
    def copies(self) -> Sequence[EngineCopy]:
        """The copies of the model, by their numbers."""

    def scale(self, least: int, most: int) -> None:
        """Begin to add or to remove copies. A copy that is removed drains first.

        Args:
            least: The copies without which the engine counts as broken.
            most: The copies that are to serve, at least 1.

        Raises:
            InvalidRequest: The machine has no room for this number of copies, or the engine supports only one.
        """

    async def stop(self, why: str = "the server is stopping") -> None:
        """Free everything. Requests that still run end with an error that says why."""


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


async def first_delta(submit: Submit, request: GenerationRequest) -> TokenDelta:
    """Return the first delta of an answer, which ends there; the only one of a single sequence without a stream.

    Raises RequestError: the request was refused or has failed.
    """
    sink = _FirstDelta()
    generation = await submit(request, sink)
    try:
        return await sink.delta
    finally:
        generation.cancel()
        del sink  # It holds an error, whose traceback holds this frame.


async def unless_dead(work: Coroutine[Any, Any, _T], is_dead: Callable[[], bool]) -> _T:
    """Wait for an answer from an engine that is not restarted if it dies.

    Raises:
        EngineDead: It has died.
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

    If more candidates are generated than returned, or the answer is not streamed, the sequences come when all have
    finished, the most probable first (by cumulative log probability); `sequence` is then the rank. In a stream of all
    candidates the deltas pass as they come.
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
        if self._open == 0:
            self._emit()

    def on_error(self, error: RequestError) -> None:
        if not self._failed:
            self._failed = True
            self._sink.on_error(error)

    def _emit(self) -> None:
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


def _join(deltas: list[TokenDelta]) -> TokenDelta:
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[-1], text="".join(d.text for d in deltas), tokens=[token for d in deltas for token in d.tokens]
    )


def _probability(delta: TokenDelta) -> float:
    return delta.cumulative_logprob if delta.cumulative_logprob is not None else -math.inf
