"""transformers' continuous batching as an engine, `option.rolling_batch=scheduler`.

It runs in this process: the manager's thread runs the model, chooses tokens and makes deltas; the event loop hands them
to the sinks, once for each step of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

from handlers.daemon_thread import in_daemon_thread
from handlers.engines.beam_search import submit_beam_search
from handlers.engines.prompt import PromptTokenizer
from handlers.engines.protocol import EngineHealth, EngineStartError, EngineStatus, Generation, Sink
from handlers.engines.sequences import SequenceGroup
from handlers.engines.token_text import split_text
from handlers.engines.transformers_batching import ContinuousBatching, Row
from handlers.engines.transformers_cache import CACHE_ARGUMENTS, batching_config
from handlers.engines.transformers_model import (
    TransformersModel,
    integer_argument,
    load_model,
    source,
    warn_of_arguments_without_effect,
)
from handlers.engines.transformers_running import Progress, RunningSequence, SharedPrompt
from handlers.engines.transformers_sampling import choose_rows
from handlers.errors import EngineDead, GenerationFailed, InvalidParameter, RequestError
from handlers.meter import Meter
from handlers.model_settings import ModelSettings
from handlers.request import GenerationRequest, SamplingParameters, Token, TokenDelta

logger = logging.getLogger(__name__)

_SUBMITS_PER_TURN = 16
"""After so many sequences others get their turn on the event loop."""
_MAX_TOP_TOKENS = 20
"""As vLLM's `max_logprobs`, and by the same option."""
_WATCH_SECONDS = 0.25
_STOP_SECONDS = 5.0
"""What the step in progress may take when the engine is stopped; its thread does not hold up the process."""


class SchedulerEngine:
    """One model on transformers' continuous batching."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._ids = itertools.count()
        self._running: dict[str, RunningSequence] = {}
        self.meter = Meter()
        self._stopped = False

    async def start(self) -> None:
        """See `Engine.start`. Ends with a first token, so that a model that cannot be run is found here."""
        started = time.monotonic()
        self._loop = asyncio.get_running_loop()
        limit = self._settings.model_loading_timeout
        try:
            await asyncio.wait_for(in_daemon_thread(self._load), limit)
            await self._try_out(limit)
        except TimeoutError:
            raise EngineStartError(f"loading took longer than model_loading_timeout ({limit:g} s)") from None
        except EngineStartError:
            raise
        except Exception as error:
            raise EngineStartError(f"transformers cannot serve {self._settings.model_id}: {error}") from error
        self.meter = Meter()
        self._watchdog = asyncio.create_task(self._watch())
        logger.info("engine ready after %.1f s", time.monotonic() - started)

    def _load(self) -> None:
        warn_of_arguments_without_effect(self._settings, CACHE_ARGUMENTS | {"max_logprobs"})
        model = load_model(self._settings)
        _check_one_device(model)
        self._batching = ContinuousBatching(model, batching_config(self._settings, model), self)
        self._model = _fitted(model, self._batching.capacity, self._settings)
        self._prompts = PromptTokenizer(model.tokenizer, self._model.max_model_len)
        self.max_model_len = self._model.max_model_len
        self.max_top_tokens = _max_top_tokens(self._settings, model.vocabulary_size)
        self.eos_token_ids = model.eos_token_ids
        self.tokenizer = model.tokenizer
        # The manager's thread inherits being a daemon from this one.
        self._batching.start()

    async def _try_out(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._generate_one(), seconds)
        except BaseException:
            self._batching.stop(0.0)
            raise

    async def _generate_one(self) -> None:
        token_id = min(self._model.eos_token_ids, default=0)
        request = GenerationRequest(
            request_id="start", prompt=(token_id,), sampling=SamplingParameters(max_tokens=1, ignore_eos=True)
        )
        first = _FirstToken(self._loop.create_future())
        await self.submit(request, first)
        while not first.done.done():
            await asyncio.wait([first.done], timeout=_WATCH_SECONDS)
            if (failure := self._batching.failure) is not None:
                raise EngineStartError(f"transformers cannot run {self._settings.model_id}: {failure}")
        await first.done

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        """See `Engine.submit`."""
        self._check_alive()
        if request.beam_search is not None:
            return await submit_beam_search(self, request, request.beam_search, sink)
        if request.top_tokens > self.max_top_tokens:
            raise InvalidParameter(
                "top_n_tokens", f"must be at most {self.max_top_tokens} (option.max_logprobs), got {request.top_tokens}"
            )
        prompt = SharedPrompt(self._model, await self.prompt_token_ids(request))
        generation = _SchedulerGeneration(self)
        target = sink
        if request.candidates > 1:
            target = SequenceGroup(sink, request.sequences, request.candidates, request.stream)
        try:
            for index in range(request.candidates):
                if index % _SUBMITS_PER_TURN == _SUBMITS_PER_TURN - 1:
                    await asyncio.sleep(0)
                generation.sequences.append(self._add(request, prompt, index, target))
        except BaseException:
            generation.cancel()
            raise
        self.meter.started_requests += 1
        self.meter.prompt_tokens += len(prompt.ids)
        return generation

    def _add(self, request: GenerationRequest, prompt: SharedPrompt, index: int, sink: Sink) -> RunningSequence:
        name = f"{next(self._ids)}-{request.request_id}"
        sequence = RunningSequence(name, request, prompt, index, sink, self.meter)
        # Registered first: the manager's thread may choose its first token before `add` returns.
        self._running[name] = sequence
        if not self._batching.add(name, prompt.ids, sequence.limit):
            self._running.pop(name, None)
            raise EngineDead
        return sequence

    def _check_alive(self) -> None:
        if self._stopped or self._batching.failure is not None:
            raise EngineDead

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
        if self._batching.failure is not None:
            sequence.fail(EngineDead())
            return
        logger.error("request %s: transformers has given up on it: %s", request_id, error)
        sequence.fail(GenerationFailed("the engine reported an internal error for this request"))

    def discard(self, sequence: RunningSequence) -> None:
        """Free what a sequence has in the engine, if it has not ended there."""
        if self._running.pop(sequence.name, None) is not None:
            self._batching.cancel(sequence.name)

    async def _watch(self) -> None:
        """See to it that no client waits for ever: not for a dead engine, nor for one that gives it no token."""
        while (failure := self._batching.failure) is None:
            await asyncio.sleep(_WATCH_SECONDS)
            self._end_overdue()
        logger.error("transformers' continuous batching has died: %s", failure)
        self._fail_all(EngineDead())

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

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        """See `Engine.prompt_token_ids`."""
        return await self._prompts.token_ids(request)

    def tokenize(self, text: str) -> Sequence[int]:
        """See `Engine.tokenize`."""
        return self._prompts.tokenize(text)

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
        if self._batching.failure is not None:
            return EngineHealth(False, "the engine has died")
        return EngineHealth(True)

    def status(self) -> EngineStatus:
        """See `Engine.status`."""
        return self._batching.status()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._stopped:
            return
        self._stopped = True
        self._watchdog.cancel()
        self._fail_all(EngineDead("the server is stopping; the request was not completed"))
        await in_daemon_thread(lambda: self._batching.stop(_STOP_SECONDS))


class _SchedulerGeneration:
    def __init__(self, engine: SchedulerEngine) -> None:
        self._engine = engine
        self.sequences: list[RunningSequence] = []

    def cancel(self) -> None:
        for sequence in self.sequences:
            if sequence.abort():
                self._engine.discard(sequence)
        self.sequences.clear()


class _FirstToken:
    """Waits for the token that the engine starts with."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done

    def on_delta(self, delta: TokenDelta) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_error(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def _check_one_device(model: TransformersModel) -> None:
    places = set(map(str, (getattr(model.model, "hf_device_map", None) or {}).values()))
    if len(places) > 1:
        raise EngineStartError(
            f"option.device_map put the model on {', '.join(sorted(places))}: continuous batching keeps its KV cache "
            "on one device; option.rolling_batch=disable can use several"
        )


def _fitted(model: TransformersModel, capacity: int, settings: ModelSettings) -> TransformersModel:
    """The model with a context that the KV cache can hold."""
    if capacity >= model.max_model_len:
        return model
    if "max_model_len" in settings.engine_arguments:
        raise EngineStartError(
            f"{source(settings, 'max_model_len')}: the KV cache holds {capacity} tokens, fewer than "
            f"{model.max_model_len}; lower it, or give the cache more memory"
        )
    logger.warning("the KV cache holds %d tokens: the context is cut to that from %d", capacity, model.max_model_len)
    return dataclasses.replace(model, max_model_len=capacity)


def _max_top_tokens(settings: ModelSettings, vocabulary_size: int) -> int:
    wanted = integer_argument(settings, "max_logprobs", -1)
    if wanted is None:
        return _MAX_TOP_TOKENS
    return vocabulary_size if wanted < 0 else min(wanted, vocabulary_size)
