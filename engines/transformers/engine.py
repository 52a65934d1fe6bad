"""Dynamic batching on transformers: requests are collected, and a batch is usually one call of `model.generate`.

The event loop accepts requests, and passes deltas to the sinks. `BatchQueue` decides which requests run together. The
model runs in a daemon thread (`generate.BatchRunner`), on a GPU or on the CPU. One batch runs at a time. LMI documents
the requests and answers as "Dynamic Batch/Static Batch Schema".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec

from engines.daemon_thread import in_daemon_thread
from engines.errors import EngineDead, GenerationFailed, InvalidRequest, RequestError
from engines.interface import (
    CopyState,
    EngineCopy,
    EngineHealth,
    EngineStartError,
    ExplainedRequest,
    Generation,
    Progress,
    SequenceGroup,
    Sink,
    Watchdog,
)
from engines.loaded_model import EngineStatus, ModelTexts, RunningSequence, copied
from engines.memory.garbage_collection import release_memory
from engines.pooling import PoolingModel
from engines.request import FinishReason, GenerationRequest, Token, TokenDelta
from engines.settings.engine_config import EngineConfig
from engines.start_failure import failure_of
from engines.statistics import EngineStatistics
from engines.tokenization import PromptTokenizer, split_text
from engines.transformers.generate import Batch, BatchRunner, BatchSequence, Job, Row, beam_deltas
from engines.transformers.model import load_model, warn_of_arguments_without_effect
from engines.transformers.sampling import MAX_TOP_TOKENS, check_request, random_numbers

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)

# The minimum batch size if answers are streamed. A client's list of prompts is answered in one stream, so its prompts
# should run together.
STREAMED_TOGETHER = 32
# When a batch makes no progress, its requests fail. If the batch itself does not end within this time (or within
# `predict_timeout`, if that is shorter), the engine counts as dead.
_STUCK_SECONDS = 30.0
_STOP_SECONDS = 1.0
# Fields in which the requests of one batch may differ.
_NOT_SHARED = {
    name: getattr(GenerationRequest(), name)
    for name in (
        *("request_id", "prompt", "room", "truncate_prompt_tokens", "trace_context", "cache_salt", "priority", "memo"),
    )
}


class _Waiting(NamedTuple):
    key: Hashable
    weight: int
    deadline: float  # The item waits for other items until this time.


class BatchQueue(Generic[T]):
    """A queue of items that run in batches. All items of a batch have the same key. Not thread-safe.

    The next batch contains the oldest item. The batch is due when it is full, or when the oldest item has waited for
    `delay` seconds. `size` is the weight of a full batch. A heavier item runs alone.
    """

    def __init__(self, size: int, delay: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._delay, self._clock = size, delay, clock
        # In order of arrival. This is also the order of the deadlines.
        self._waiting: OrderedDict[T, _Waiting] = OrderedDict()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._waiting))

    def put(self, item: T, key: Hashable, weight: int = 1) -> None:
        """Add an item. `weight` counts towards the size of its batch."""
        self._waiting[item] = _Waiting(key, weight, self._clock() + self._delay)
        self._changed.set()

    def discard(self, item: T) -> bool:
        """Remove an item. Return False if it was not in the queue."""
        return self._waiting.pop(item, None) is not None

    def drain(self) -> list[T]:
        items = list(self._waiting)
        self._waiting.clear()
        return items

    async def take(self) -> list[T]:
        """Wait until the next batch is due, and return it. Only one caller may wait at a time."""
        while not (batch := self.take_due()):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self.due_in())
        return batch

    def take_due(self) -> list[T]:
        """Return the batch that is due now; [] if none is due."""
        if not self._waiting:
            return []
        batch: list[T] = []
        first, room = next(iter(self._waiting.values())), self._size
        for item, waiting in self._waiting.items():
            if waiting.key != first.key:
                continue
            if batch and waiting.weight > room:
                room = 0
                break
            batch.append(item)
            room -= waiting.weight
        if room > 0 and first.deadline > self._clock():
            return []
        for item in batch:
            del self._waiting[item]
        return batch

    def due_in(self) -> float | None:
        """Return the seconds until the next batch is due, even if it is not full; None if the queue is empty."""
        if not self._waiting:
            return None
        return max(0.0, next(iter(self._waiting.values())).deadline - self._clock())


class _BatchThread(threading.Thread):
    """The engine's thread. When it ends, it frees the memory of an engine that was stopped during a long step."""

    def run(self) -> None:
        super().run()  # Afterwards, this thread does not refer to the engine.
        release_memory()


class BatchEngine:
    """One model on transformers, which runs batch by batch."""

    adapters = None

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        streams = config.enable_streaming != "false"
        size = max(config.batch_size, STREAMED_TOGETHER) if streams else config.batch_size
        self._waiting = BatchQueue[Job](size, config.max_batch_delay if config.batch_size > 1 else 0.0)
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._free = asyncio.Event()  # Set when the engine's thread has ended its batch.
        self._running: Batch | None = None
        self._progress = Progress(config.stall_timeout)
        self._given_up_at: float | None = None
        self._dead: str | None = None
        self._abandoned = False  # Whether a thread still loads the model although nothing waits for it.
        self._stopped = False
        self._watchdog = Watchdog(self._look)
        self._dispatcher: asyncio.Task[None] | None = None
        self.statistics = EngineStatistics()
        self.max_sequences = config.batch_size
        self.max_top_tokens = MAX_TOP_TOKENS
        self.pooling: PoolingModel | None = None  # This engine generates text only.
        self.takes_images = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        limit = self._config.model_loading_timeout
        try:
            await asyncio.wait_for(in_daemon_thread(self._load), limit)
        except asyncio.CancelledError:
            self._abandoned = True
            raise
        except TimeoutError:
            self._abandoned = True
            raise EngineStartError(f"loading took longer than model_loading_timeout ({limit:g} s)") from None
        self._thread = _BatchThread(target=self._serve, name="batches", daemon=True)
        self._thread.start()
        self._dispatcher = asyncio.create_task(self._dispatch())
        self._watchdog.start()
        self._started_at = time.time()

    def _load(self) -> None:
        warn_of_arguments_without_effect(self._config)
        model = load_model(self._config)
        if self._abandoned:
            del model
            release_memory()
            raise TimeoutError
        runner = BatchRunner(model, partial(self._call, self._deliver))
        try:
            runner.try_out()
        except Exception as error:
            raise failure_of(error).error(f"transformers cannot run {self._config.model_id}") from error
        self._model, self._runner, self.tokenizer = model, runner, copied(model.tokenizer)
        self.texts = ModelTexts(model.tokenizer)
        self._prompts = PromptTokenizer(self.texts, model.max_model_len, self._config.max_prompt_tokens)
        self.max_model_len, self.eos_token_ids = model.max_model_len, model.eos_token_ids

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        """Check a request completely, and queue it. A later error would affect the other requests of its batch."""
        self._check_alive()
        check_request(request, self._model)
        job = self._job(request, await self.prompt_token_ids(request), sink)
        self._check_alive()
        self.statistics.prompt(len(job.prompt_ids))
        self._waiting.put(job, self._key(job), request.sequences_in_engine)
        return _Generation(self, job)

    async def explain(self, request: GenerationRequest) -> ExplainedRequest:
        self._check_alive()
        check_request(request, self._model)
        token_ids = await self.prompt_token_ids(request)
        room = self.max_model_len - len(token_ids)
        fields = msgspec.structs.asdict(request.sampling) | {
            "max_tokens": min(request.sampling.max_tokens or room, room),
            "sequences": request.candidates,
            "beam_search": request.beam_search,
        }
        parameters = msgspec.to_builtins({name: value for name, value in fields.items() if name != "constraint"})
        return ExplainedRequest(token_ids=token_ids, parameters=parameters, copy=1)

    def _check_alive(self) -> None:
        if not self.health().alive:
            raise EngineDead

    def _job(self, request: GenerationRequest, prompt_ids: list[int], sink: Sink) -> Job:
        if request.candidates > 1:
            sink = SequenceGroup(sink, request.sequences, request.candidates, request.stream)
        job = Job(request, prompt_ids, sink, request.sequences_in_engine)
        for index in range(request.candidates):
            numbers = random_numbers(request.sampling.seed, index, self._model.device)
            job.rows.append(Row(job, BatchSequence(request, prompt_ids, self._model, index), numbers))
        return job

    def _key(self, job: Job) -> bytes:
        """Return the parameters that all jobs of a batch share.

        The prompt, seed and limit are omitted, because each sequence has its own. The other omitted fields have no
        effect here. Prompts, for example, are already truncated.
        """
        sampling = msgspec.structs.replace(job.request.sampling, seed=None, max_tokens=None)
        request = msgspec.structs.replace(job.request, sampling=sampling, **_NOT_SHARED)
        return msgspec.msgpack.encode((request, None if self._runner.pads else len(job.prompt_ids)))

    async def _dispatch(self) -> None:
        """Pass one batch after the other to the engine's thread."""
        while True:
            batch = self._running = Batch(await self._waiting.take())
            for job in batch.jobs:
                self.statistics.queue_time.observe(batch.moved_at - job.arrived_at)
            self._free.clear()
            self._batches.put(batch)
            await self._free.wait()
            for job in batch.jobs:
                self.fail(job, GenerationFailed("generation ended without an answer"))
            self._running = self._given_up_at = None

    def _serve(self) -> None:
        """Run batches in the engine's thread, until the queue returns None.

        There is only one such thread, because PyTorch starts further threads for each thread that calls it.
        """
        while (batch := self._batches.get()) is not None:
            try:
                self._runner.run(batch)
            except BaseException as error:
                logger.exception("the engine's thread ends")
                self._call(self._die, f"the engine has died: {error}")
                return
            self._call(self._free.set)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if self._stopped:
            return  # Nothing waits for the call. Until the loop runs it, it would keep the engine in memory.
        with contextlib.suppress(RuntimeError):  # The loop is closed, so nothing waits for the call.
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(
        self, at: float, rows: Sequence[Row], outcomes: Sequence[tuple[Job, TokenDelta | RequestError]]
    ) -> None:
        for row in rows:
            self.statistics.tokens += 1
            if row.last_at:
                self.statistics.inter_token.observe(at - row.last_at)
            else:
                self.statistics.time_to_first_token.observe(at - row.job.arrived_at)
            row.last_at = at
        for job, outcome in outcomes:
            if isinstance(outcome, RequestError):
                self.fail(job, outcome)
            elif not job.ended:
                self._push(job, outcome)

    def _push(self, job: Job, delta: TokenDelta) -> None:
        if job.request.beam_search is not None:
            self.statistics.tokens += delta.token_count
        if delta.finish_reason is not None:
            delta.submitted_at = job.arrived_at
            if self._running is not None:
                delta.queued_seconds = max(self._running.began_at - job.arrived_at, 0.0)
            if delta.finish_reason is FinishReason.ABORT:
                self.statistics.aborted_requests += 1
            else:
                self.statistics.finished_requests += 1
                if self._running is not None:
                    self.statistics.ended(delta.token_count, time.monotonic() - self._running.began_at)
            job.open_sequences -= 1
            job.ended = job.open_sequences == 0
        try:
            job.sink.on_delta(delta)
        except Exception:
            logger.exception("request %s: internal error while handling a token", job.request.request_id)
            job.ended = False  # `ended` is already True if the last delta failed.
            job.open_sequences = max(job.open_sequences, 1)
            self.fail(job, GenerationFailed("internal error while handling a token"))

    def fail(self, job: Job, error: RequestError) -> None:
        if not job.ended:
            job.ended = True
            self.statistics.failed_requests += job.open_sequences
            try:
                job.sink.on_error(error)
            except Exception:  # The other jobs must still get their errors.
                logger.exception("request %s: internal error while handling an error", job.request.request_id)

    def cancel(self, job: Job) -> None:
        """Remove a cancelled request from the queue, or from its batch before the next step."""
        if not job.ended:
            job.ended = True
            self.statistics.aborted_requests += job.open_sequences
            self._waiting.discard(job)

    def abort(self, job: Job, *, at_deadline: bool = False) -> None:
        """End a request early. The answer has the text so far.

        A queued request ends at once. A running request ends before the next step of its batch.
        """
        if job.ended:
            return
        job.at_deadline = at_deadline  # Set this before `aborted`, because the engine's thread reads `aborted` first.
        job.aborted = True
        if not self._waiting.discard(job):
            return
        if job.request.beam_search is not None:
            found = beam_deltas(job, (), self._model)
        else:
            found = [delta for row in job.rows if (delta := row.sequence.abort(at_deadline)) is not None]
        for delta in found:
            self._push(job, delta)

    async def _look(self) -> bool:
        """Fail the requests of a batch that makes no progress. Fail all requests if the engine has died."""
        if self._dead is not None:
            return False
        batch, now, limit = self._running, time.monotonic(), self._config.predict_timeout
        self._progress.look(batch is not None, now if batch is None else batch.moved_at)
        if self._dispatcher is not None and self._dispatcher.done():
            error = None if self._dispatcher.cancelled() else self._dispatcher.exception()
            logger.error("batches are no longer put together", exc_info=error)
            self._die("the engine has died: its queue is no longer served")
        elif batch is None:
            return True
        elif self._given_up_at is not None:
            if now - self._given_up_at > min(limit, _STUCK_SECONDS):
                self._die("the engine has died: a batch does not end")
        elif now - batch.moved_at > limit:
            self._given_up_at = now
            for job in batch.jobs:
                self.fail(job, GenerationFailed(f"no token within predict_timeout ({limit:g} s)"))
        return True

    def _die(self, reason: str) -> None:
        self._dead = reason
        self._fail_all(EngineDead())

    def _fail_all(self, error: EngineDead) -> None:
        for job in [*(self._running.jobs if self._running else ()), *self._waiting.drain()]:
            self.fail(job, error)

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        token_ids = await self._prompts.token_ids(request)
        size = self._model.vocabulary_size
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < size), None)
        if wrong is not None:  # A tokenizer may have more tokens than its model.
            raise InvalidRequest(
                f"the prompt has the token id {wrong}, which is not below the vocabulary's size of the model ({size})"
            )
        return token_ids

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        model = self._model
        return split_text(model.tokenizer, token_ids, model.special_ids, skip_special_tokens, prompt_ids)

    def health(self) -> EngineHealth:
        fault = "the engine is stopped" if self._stopped else self._dead or self._watchdog.failure
        if fault:
            return EngineHealth(False, fault)
        progress = self._progress
        return EngineHealth(True, "", progress.quiet_seconds, "the engine" if progress.is_stalled else "")

    def status(self) -> EngineStatus:
        running = 0 if self._running is None else sum(not job.ended for job in self._running.jobs)
        return EngineStatus(running, len(self._waiting), 0.0)

    def sequences(self) -> Sequence[RunningSequence]:
        batch, now = self._running, time.monotonic()
        running = [] if batch is None else [(job, now - batch.moved_at) for job in batch.jobs if not job.ended]
        return [
            RunningSequence(
                request_id=job.request.request_id,
                seconds=now - job.arrived_at,
                quiet_seconds=quiet,
                prompt_tokens=len(job.prompt_ids),
                tokens=max((len(row.sequence.token_ids) for row in job.rows), default=0),
            )
            for job, quiet in (*running, *((job, None) for job in self._waiting))
        ]

    @property
    def waits(self) -> bool:
        return False

    async def restart(self) -> None:
        raise EngineStartError("this engine cannot be started again")

    def give_up(self) -> None: ...

    @property
    def copies(self) -> Sequence[EngineCopy]:
        return [EngineCopy(1, CopyState.READY if self.health().alive else CopyState.DEAD, self._started_at)]

    def scale(self, least: int, most: int) -> None:
        if (least, most) != (1, 1):
            raise InvalidRequest("a model with dynamic batch has one worker")

    async def stop(self, why: str = "the server is stopping") -> None:
        if self._stopped:
            return
        self._stopped = True
        self._watchdog.stop()
        self._fail_all(EngineDead(f"{why}; the request was not completed"))
        self._batches.put(None)
        if self._dispatcher is not None:
            self._dispatcher.cancel()
            await asyncio.to_thread(self._thread.join, _STOP_SECONDS)  # The batch ends before its next step.


class _Generation:
    def __init__(self, engine: BatchEngine, job: Job) -> None:
        self._engine, self._job = engine, job

    def cancel(self) -> None:
        self._engine.cancel(self._job)

    def abort(self, *, at_deadline: bool = False) -> None:
        self._engine.abort(self._job, at_deadline=at_deadline)

    @property
    def begun(self) -> bool:
        return self._job.searched or any(row.sequence.token_ids for row in self._job.rows)
