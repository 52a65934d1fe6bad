"""transformers' continuous batching as an engine, `option.rolling_batch=scheduler`.

It runs in this process: the manager's thread runs the model, chooses tokens and makes deltas; the event loop hands them
to the sinks, once for each step of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from handlers.daemon_thread import in_daemon_thread
from handlers.engines import transformers_tryout
from handlers.engines.beam_search import NEEDS_PREFIX_CACHE, submit_beam_search
from handlers.engines.loading_thread import load_in_thread
from handlers.engines.model_texts import ModelTexts, copied
from handlers.engines.progress import Progress as EngineProgress
from handlers.engines.prompt import PromptTokenizer
from handlers.engines.protocol import EngineHealth, EngineStartError, EngineStatus, Generation, Sink
from handlers.engines.sequences import SequenceGroup
from handlers.engines.start_failure import failure_of
from handlers.engines.token_text import split_text
from handlers.engines.transformers_batching import NO_MEMORY, ContinuousBatching, Row
from handlers.engines.transformers_cache import (
    CACHE_ARGUMENTS,
    batching_config,
    check_one_device,
    fitted,
    max_top_tokens,
)
from handlers.engines.transformers_model import load_model, warn_of_arguments_without_effect
from handlers.engines.transformers_parameters import PreparedSampling, check_prompt, check_request, prepare
from handlers.engines.transformers_reading import PromptReader
from handlers.engines.transformers_running import CountedBeams, Progress, RunningSequence, SchedulerGeneration
from handlers.engines.transformers_sampling import choose_rows
from handlers.errors import EngineDead, GenerationFailed, InvalidParameter
from handlers.meter import Meter
from handlers.model_settings import ModelSettings
from handlers.request import BeamSearch, GenerationRequest, Token

logger = logging.getLogger(__name__)

_SUBMITS_PER_TURN = 16
"""After so many sequences others get their turn on the event loop."""
_WATCH_SECONDS = 0.25
_STUCK_SECONDS = 30.0
"""What a step may take beyond predict_timeout; then the thread counts as lost."""
_STOP_SECONDS = 5.0
"""What the step in progress may take when the engine is stopped; its thread does not hold up the process."""


class SchedulerEngine:
    """One model on transformers' continuous batching."""

    adapters = None

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._ids = itertools.count()
        self._running: dict[str, RunningSequence] = {}
        self._batching: ContinuousBatching | None = None
        self._reader: PromptReader | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._progress = EngineProgress()
        self._dead: str | None = None
        self._stopped = False
        self.meter = Meter()

    async def start(self) -> None:
        """See `Engine.start`. Ends with first tokens, so that a model that cannot be run is found here."""
        self._loop = asyncio.get_running_loop()
        limit = self._settings.model_loading_timeout
        try:
            await asyncio.wait_for(self._load_and_try_out(), limit)
        except BaseException as error:
            if (batching := self._batching) is not None:
                await in_daemon_thread(lambda: batching.stop(_STOP_SECONDS))
            if isinstance(error, TimeoutError):
                raise EngineStartError(f"loading took longer than model_loading_timeout ({limit:g} s)") from None
            if isinstance(error, EngineStartError) or not isinstance(error, Exception):
                raise
            raise failure_of(error).error(f"transformers cannot serve {self._settings.model_id}") from error
        self._watchdog = asyncio.create_task(self._watch())

    async def _load_and_try_out(self) -> None:
        self._batching = batching = await load_in_thread(self._load)
        if self._stopped:
            raise EngineStartError("the engine was stopped while it was loading")
        self._reader = PromptReader(self._model, batching, self._add, self.discard)
        # The manager's thread inherits being a daemon from the one that starts it.
        await in_daemon_thread(batching.start)
        submit = partial(self._submit, meter=Meter())  # what is tried out is no request of a client
        await transformers_tryout.try_out(self._reference, batching, submit, self._settings.model_id)

    def _load(self) -> ContinuousBatching:
        warn_of_arguments_without_effect(self._settings, CACHE_ARGUMENTS | {"max_logprobs"})
        model = load_model(self._settings)
        check_one_device(model)
        # Before the manager changes the model's attention.
        self._reference = transformers_tryout.reference(model)
        config = batching_config(self._settings, model)
        self._prefix_cache = config.allow_block_sharing
        batching = ContinuousBatching(model, config, self)
        self._model = fitted(model, batching.capacity, self._settings)
        self.texts = ModelTexts(model.tokenizer)
        self._prompts = PromptTokenizer(self.texts, self._model.max_model_len, self._settings.max_prompt_tokens)
        self.max_model_len = self._model.max_model_len
        self.max_sequences = self._settings.rolling_batch_size
        self.max_top_tokens = max_top_tokens(self._settings, model.vocabulary_size)
        self.eos_token_ids = model.eos_token_ids
        self.tokenizer = copied(model.tokenizer)
        return batching

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        """See `Engine.submit`."""
        self._check_alive()
        check_request(request, self._model)
        if request.beam_search is not None:
            if not self._prefix_cache:
                raise InvalidParameter("num_beams", NEEDS_PREFIX_CACHE)
            return await self._submit_beam_search(request, request.beam_search, sink)
        generation = await self._submit(request, sink, self.meter)
        self.meter.started_requests += 1
        self.meter.prompt_tokens += len(generation.sequences[0].prompt_ids)
        return generation

    async def _submit_beam_search(self, request: GenerationRequest, beam_search: BeamSearch, sink: Sink) -> Generation:
        counted = CountedBeams(sink, beam_search.width, self.meter)
        submit = partial(self._submit, meter=Meter())  # what the search asks of the engine is no prompt of a client
        counted.search = await submit_beam_search(self, request, beam_search, counted, submit)
        self.meter.started_requests += 1
        return counted

    async def _submit(self, request: GenerationRequest, sink: Sink, meter: Meter) -> SchedulerGeneration:
        if request.top_tokens > self.max_top_tokens:
            raise InvalidParameter(
                "top_n_tokens", f"must be at most {self.max_top_tokens} (option.max_logprobs), got {request.top_tokens}"
            )
        prompt_ids = await self.prompt_token_ids(request)
        prepared = await prepare(request, prompt_ids, self._model)
        self._check_alive()
        if (reader := self._reader) is None:
            raise EngineDead
        generation = SchedulerGeneration(self.discard, self.abort)
        target = sink
        if request.candidates > 1:
            target = SequenceGroup(sink, request.sequences, request.candidates, request.stream)
        try:
            for index in range(request.candidates):
                if index % _SUBMITS_PER_TURN == _SUBMITS_PER_TURN - 1:
                    await asyncio.sleep(0)
                sequence = self._sequence(prepared, prompt_ids, index, target, meter)
                generation.sequences.append(sequence)
                if not request.want_prompt_tokens:
                    self._add(sequence)
        except BaseException:
            generation.cancel()
            raise
        if request.want_prompt_tokens:
            reader.start(list(generation.sequences))
        return generation

    def _sequence(
        self, prepared: PreparedSampling, prompt_ids: list[int], index: int, sink: Sink, meter: Meter
    ) -> RunningSequence:
        name = f"{next(self._ids)}-{prepared.request.request_id}"
        sequence = RunningSequence(name, prepared, prompt_ids, index, sink, meter)
        # Registered first: the manager's thread may choose its first token before `add` returns.
        self._running[name] = sequence
        return sequence

    def _add(self, sequence: RunningSequence) -> None:
        if self._batching is None or not self._batching.add(sequence.name, sequence.prompt_ids, sequence.text.limit):
            self._running.pop(sequence.name, None)
            raise EngineDead

    def _check_alive(self) -> None:
        if self._stopped or self._failure() is not None:
            raise EngineDead

    def _failure(self) -> str | None:
        if self._dead is not None or self._batching is None:
            return self._dead
        return self._batching.failure

    # ------------------------------------------------------------------ in the manager's thread

    def on_step(self, requests: Sequence[Row], logits: Any) -> list[int | None]:
        """See `Steps`: choose tokens, and send what came of it to the event loop."""
        chosen: list[int | None] = [None] * len(requests)
        known = [self._running.get(request.request_id) for request in requests]
        rows = [row for row, sequence in enumerate(known) if sequence is not None]  # the others were cancelled
        sequences = [sequence for sequence in known if sequence is not None]
        if not sequences:
            return chosen
        some = logits if len(rows) == len(requests) else logits[rows]
        choices = choose_rows([sequence.chooser for sequence in sequences], some)
        step: list[Progress] = []
        for row, sequence, choice in zip(rows, sequences, choices, strict=True):
            progress = sequence.advance(choice, requests[row])
            step.append(progress)
            if progress.token_id is None:
                self._running.pop(sequence.name, None)
            chosen[row] = progress.token_id
        self._on_loop(self._deliver, step, time.monotonic())
        return chosen

    def on_failure(self, request_id: str, error: str) -> None:
        """See `Steps`."""
        self._on_loop(self._fail, request_id, error)

    def _on_loop(self, function: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *arguments)

    # ------------------------------------------------------------------ on the event loop

    def _deliver(self, step: list[Progress], now: float) -> None:
        for progress in step:
            progress.sequence.deliver(progress, now)
            if progress.sequence.ended:
                self.discard(progress.sequence)

    def _fail(self, request_id: str, error: str) -> None:
        sequence = self._running.pop(request_id, None)
        if sequence is None:
            return
        if self._failure() is not None:
            sequence.fail(EngineDead())
            return
        if error == NO_MEMORY:
            sequence.fail(GenerationFailed(error))
            return
        logger.error("request %s: transformers has given up on it: %s", request_id, error)
        sequence.fail(GenerationFailed("the engine reported an internal error for this request"))

    def discard(self, sequence: RunningSequence) -> None:
        """Free what a sequence has in the engine, if it has not ended there."""
        if self._running.pop(sequence.name, None) is not None and self._batching is not None:
            self._batching.cancel(sequence.name)

    def abort(self, sequences: Sequence[RunningSequence]) -> None:
        """End sequences with what there is of them: in the manager's thread, which alone knows how far they are."""

        batching = self._batching
        if batching is None:
            return

        def run() -> None:
            running = [sequence for sequence in sequences if self._running.pop(sequence.name, None) is not None]
            for sequence in running:
                batching.cancel(sequence.name)
            self._on_loop(self._deliver, [sequence.abort() for sequence in running], time.monotonic())

        batching.between_steps(run)

    async def _watch(self) -> None:
        """See to it that no client waits for ever: not for a dead engine, nor for one that gives it no token."""
        moved_at = time.monotonic()
        while (failure := self._failure()) is None:
            await asyncio.sleep(_WATCH_SECONDS)
            if self._batching is not None:
                self._progress.look(bool(self._running), self._batching.rounds)
            self._end_overdue()
            moved_at = self._moved_at(moved_at)
            if time.monotonic() - moved_at > self._settings.predict_timeout + _STUCK_SECONDS:
                self._dead = "the engine has died: a step does not end"
        logger.error("transformers' continuous batching has died: %s", failure)
        self._fail_all(EngineDead())

    def _moved_at(self, before: float) -> float:
        """When the manager last had nothing to do, or began a step."""
        if self._batching is None:
            return before
        status = self._batching.status()
        idle = status.running_requests == status.waiting_requests == 0
        return time.monotonic() if idle else max(before, self._batching.stepped_at)

    def _end_overdue(self) -> None:
        limit = self._settings.predict_timeout
        overdue = time.monotonic() - limit
        for sequence in list(self._running.values()):
            if sequence.last_at < overdue:
                self.discard(sequence)
                sequence.fail(GenerationFailed(f"no token within predict_timeout ({limit:g} s)"))

    def _fail_all(self, error: EngineDead) -> None:
        for sequence in list(self._running.values()):
            sequence.fail(error)
        self._running.clear()
        if self._reader is not None:
            self._reader.cancel()

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        """See `Engine.prompt_token_ids`."""
        token_ids = await self._prompts.token_ids(request)
        check_prompt(token_ids, self._model)
        return token_ids

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        """See `Engine.detokenize`."""
        model = self._model
        return split_text(model.tokenizer, token_ids, model.special_ids, skip_special_tokens, prompt_ids)

    def health(self) -> EngineHealth:
        """See `Engine.health`."""
        if self._stopped:
            return EngineHealth(False, "the engine is stopped")
        if self._dead is not None:
            return EngineHealth(False, self._dead)
        if self._failure() is not None:
            return EngineHealth(False, "the engine has died")
        return EngineHealth(True, quiet_seconds=self._progress.quiet_seconds, mark=self._progress.mark)

    def status(self) -> EngineStatus:
        """See `Engine.status`."""
        return EngineStatus(0, 0, 0.0) if self._batching is None else self._batching.status()

    async def stop(self) -> None:
        """See `Engine.stop`. While the model is being loaded, `start` ends with an error once that is done."""
        if self._stopped:
            return
        self._stopped = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._fail_all(EngineDead("the server is stopping; the request was not completed"))
        if (batching := self._batching) is not None:
            await in_daemon_thread(lambda: batching.stop(_STOP_SECONDS))
