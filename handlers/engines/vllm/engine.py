"""vLLM as an engine, on CPU and CUDA alike: `AsyncLLM` with our own output states."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import vllm.platforms
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from handlers.daemon_thread import LastingThread
from handlers.engines.beam_search import BeamSearchTask, submit_beam_search
from handlers.engines.protocol import EngineHealth, EngineStatus, Generation, Progress, Sink
from handlers.engines.sequences import SequenceGroup
from handlers.engines.texts import ModelTexts, PromptTokenizer, split_text
from handlers.engines.vllm import fork_server as vllm_fork_server
from handlers.engines.vllm.arguments import EMPTY_SLOTS_ON_CPU
from handlers.engines.vllm.constraints import ConstraintTranslator, in_thread
from handlers.engines.vllm.loading import LoadedModel, VllmLoader, end_token_ids, own_tokenizer, shut_down
from handlers.engines.vllm.lora import VllmAdapters, has_prompt_logprobs
from handlers.engines.vllm.output import PushedState, check_seam, remember_end_token, use_lean_decoder
from handlers.engines.vllm.sampling import NO_TYPICAL, SamplingTranslator, check_bad_words, sibling
from handlers.errors import EngineDead, GenerationFailed, InvalidRequest, UnknownAdapter
from handlers.meter import Meter
from handlers.model_settings import ModelSettings
from handlers.request import GenerationRequest, Token

logger = logging.getLogger(__name__)


class VllmGeneration:
    """The sequences of one request; see `Generation`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.states: list[PushedState] = []

    def cancel(self) -> None:
        running = self._running()
        for state in running:
            if not state.ended:
                state.end()
                state.meter.aborted_requests += 1
        self._stop(running)

    def abort(self) -> None:
        running = self._running()
        for state in running:
            state.abort()
        self._stop(running)

    def _running(self) -> list[PushedState]:
        """The sequences that vLLM still has; whoever asks ends them."""
        known = self._llm.output_processor.request_states
        states, self.states = self.states, []
        return [state for state in states if state.request_id in known]

    def _stop(self, states: list[PushedState]) -> None:
        if states and not self._llm.errored:
            self._task = asyncio.ensure_future(self._abort([state.request_id for state in states]))

    async def _abort(self, request_ids: list[str]) -> None:
        try:
            await self._llm.abort(request_ids, internal=True)
        except EngineDeadError:
            logger.debug("nothing to abort: the engine has died")


SUBMITS_PER_TURN = 16
"""After so many sequences others get their turn on the event loop."""
_WATCH_SECONDS = 0.25


class VllmEngine:
    """One model on vLLM. Its engine core runs in a process of its own."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._ids = itertools.count()
        self.meter = Meter()
        self._status = EngineStatus(0, 0, 0.0)
        self._thread = LastingThread("engine")
        """Starts vLLM's processes; the kernel kills those that are spawned with it."""
        self._progress = Progress()
        self.reports = 0
        """Messages of the engine's process: steps with tokens and steps without, as of a long prompt."""
        self._stopped = False
        self.adapters: VllmAdapters | None = None

    async def start(self) -> None:
        """See `Engine.start`. Takes half a minute and more; other tasks go on meanwhile."""
        check_seam()
        vllm_fork_server.start()
        try:
            loaded = await VllmLoader(self._settings, self._thread).load()
        except BaseException:
            self._thread.end()
            raise
        try:
            await self._attach(loaded)
        except BaseException:
            await shut_down(loaded.llm)
            self._thread.end()
            raise

    async def _attach(self, loaded: LoadedModel) -> None:
        llm = self._llm = loaded.llm
        self.frontend_arguments = loaded.frontend_arguments
        # The scheduler goes on reporting, but the per-token bookkeeping in this process is ours.
        llm.log_stats = llm.output_processor.log_stats = False
        llm.logger_manager = _SchedulerReports(self)
        use_lean_decoder(llm.engine_core)
        remember_end_token(llm.renderer)
        llm._run_output_handler()
        self._processor, self._core = llm.output_processor, llm.engine_core
        self._input = llm.input_processor
        self._tasks = await llm.get_supported_tasks()
        self.tokenizer = llm.get_tokenizer()  # vLLM's pool
        self.texts = ModelTexts(own_tokenizer(llm.model_config))
        self.max_model_len: int = llm.model_config.max_model_len
        replicas = llm.vllm_config.parallel_config.data_parallel_size
        self.max_sequences = llm.vllm_config.scheduler_config.max_num_seqs * replicas
        vocabulary_size = llm.model_config.get_vocab_size()
        most = llm.model_config.max_logprobs
        self.max_top_tokens: int = vocabulary_size if most < 0 else most
        self._prompts = PromptTokenizer(self.texts, self.max_model_len, self._settings.max_prompt_tokens)
        self._translator = SamplingTranslator(
            max_model_len=self.max_model_len,
            max_top_tokens=self.max_top_tokens,
            vocabulary_size=vocabulary_size,
            typical_refusal=loaded.typical_refusal,
            prompt_logprobs=has_prompt_logprobs(llm),
            prefix_cache=bool(llm.vllm_config.cache_config.enable_prefix_caching),
        )
        backend = llm.vllm_config.structured_outputs_config.backend
        self._constraints = llm.constraints = ConstraintTranslator(self.tokenizer, vocabulary_size, backend)
        llm.typical_refusal = "" if loaded.typical_refusal == NO_TYPICAL else loaded.typical_refusal
        self.eos_token_ids = end_token_ids(llm)
        self.default_sampling: dict[str, Any] = llm.model_config.get_diff_sampling_param()
        """Where the model's own generation config differs from vLLM's defaults."""
        if llm.vllm_config.lora_config is not None:
            empty_slots = EMPTY_SLOTS_ON_CPU if vllm.platforms.current_platform.is_cpu() else 0
            self.adapters = VllmAdapters(llm, self._settings.predict_timeout, empty_slots)
        self._watchdog = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """See to it that no client waits for ever: not for a dead engine, nor for one that gives it no token.

        vLLM tells pending requests of a crash, but not of an engine process that was killed.
        """
        while not self._llm.errored:
            await asyncio.sleep(_WATCH_SECONDS)
            # Whose requests they are does not matter: AsyncLLM's own, of OpenAI's front end, are among them.
            self._progress.look(bool(self._processor.request_states), self.reports)
            await self._end_overdue()
        self._fail_all(EngineDead())
        self._status = EngineStatus(0, 0, 0.0)
        if self.adapters is not None:
            await self.adapters.stop()

    async def _end_overdue(self) -> None:
        limit = self._settings.predict_timeout
        overdue = time.monotonic() - limit
        stalled = [s for s in self._own_states() if s.last_at < overdue and not s.ended]
        for state in stalled:
            state.fail(GenerationFailed(f"no token within predict_timeout ({limit:g} s)"))
        if stalled:
            with contextlib.suppress(EngineDeadError):
                await self._llm.abort([state.request_id for state in stalled], internal=True)

    def _fail_all(self, error: EngineDead) -> None:
        for state in self._own_states():
            state.fail(error)
        self._processor.propagate_error(EngineDeadError())  # to requests that were given to AsyncLLM itself

    def _own_states(self) -> list[PushedState]:
        return [state for state in self._processor.request_states.values() if isinstance(state, PushedState)]

    @property
    def async_llm(self) -> AsyncLLM:
        """vLLM's engine, for requests beside ours; known once it has started."""
        return self._llm

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        self._check_alive()
        if request.adapter is None:
            return await self._submit(request, sink, None)
        if self.adapters is None:
            raise UnknownAdapter(request.adapter)
        claim = await self.adapters.claim(request.adapter)
        try:
            generation = await self._submit(request, sink, claim.request)
        except BaseException:
            claim.release()
            raise
        if isinstance(generation, VllmGeneration):
            claim.release()
        else:
            generation.when_done(claim.release)
        return generation

    async def _submit(
        self, request: GenerationRequest, sink: Sink, adapter: LoRARequest | None
    ) -> VllmGeneration | BeamSearchTask:
        if request.beam_search is not None:
            self._translator.check(request)
            return await submit_beam_search(
                self, request, request.beam_search, sink, partial(self._submit, adapter=adapter)
            )
        token_ids = await self.prompt_token_ids(request)
        structured_outputs = await self._constraints.structured_outputs(request.sampling)
        params = self._translator.sampling_params(request, len(token_ids), structured_outputs)
        self._check_alive()  # a long prompt is tokenized elsewhere meanwhile, and a constraint tried out
        generation = VllmGeneration(self._llm)
        target = sink
        if request.candidates > 1:
            target = SequenceGroup(sink, request.sequences, request.candidates, request.stream)
        try:
            for index in range(request.candidates):
                if index % SUBMITS_PER_TURN == SUBMITS_PER_TURN - 1:
                    await asyncio.sleep(0)
                own = params if index == 0 else sibling(params, index)
                await self._add(request, token_ids, own, index, target, generation, adapter)
        except EngineDeadError:
            raise EngineDead from None
        except (VLLMClientError, ValueError) as error:
            generation.cancel()
            raise InvalidRequest(str(error)) from error
        except BaseException:
            generation.cancel()
            raise
        self.meter.started_requests += 1
        self.meter.prompt_tokens += len(token_ids)
        return generation

    def _check_alive(self) -> None:
        if self._stopped or self._llm.errored:
            raise EngineDead

    async def _add(
        self,
        request: GenerationRequest,
        token_ids: list[int],
        params: SamplingParams,
        index: int,
        sink: Sink,
        generation: VllmGeneration,
        adapter: LoRARequest | None,
    ) -> None:
        processed = partial(
            self._input.process_inputs,
            request.request_id,
            TokensPrompt(type="token", prompt_token_ids=token_ids),
            params,
            supported_tasks=self._tasks,
            lora_request=adapter,
            priority=request.priority,
        )
        constrained = params.structured_outputs is not None
        core_request = await in_thread(self._constraints.threads, processed) if constrained else processed()
        check_bad_words(core_request.sampling_params)
        core_request.external_req_id = request.request_id
        core_request.request_id = f"{next(self._ids)}-{request.request_id}"
        state = PushedState.from_new_request(
            tokenizer=self.texts.tokenizer,
            request=core_request,
            prompt=None,
            parent_req=None,
            request_index=index,
            queue=None,
            log_stats=False,
            stream_interval=1,
        )
        state.attach(request, index, sink, self.meter, self.texts.tokenizer, self.texts.special_ids, core_request)
        # Registered before the engine hears of it, so that no output can come before its state.
        self._processor.request_states[core_request.request_id] = state
        self._processor.external_req_ids[request.request_id].append(core_request.request_id)
        generation.states.append(state)
        await self._core.add_request_async(core_request)

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        return await self._prompts.token_ids(request)

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        texts = self.texts
        return split_text(texts.tokenizer, token_ids, texts.special_ids, skip_special_tokens, prompt_ids)

    def health(self) -> EngineHealth:
        if self._stopped:
            return EngineHealth(False, "the engine is stopped")
        if self._llm.errored:
            return EngineHealth(False, "the engine has died")
        return EngineHealth(True, quiet_seconds=self._progress.quiet_seconds, mark=self._progress.mark)

    def status(self) -> EngineStatus:
        return self._status

    def report(self, running: int, waiting: int, kv_cache_usage: float) -> None:
        """Take the account of the last step: of the scheduler, or of those of all data-parallel replicas together."""
        self._status = EngineStatus(running, waiting, kv_cache_usage)

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._watchdog.cancel()
        if self.adapters is not None:
            await self.adapters.stop()
        self._fail_all(EngineDead("the server is stopping; the request was not completed"))
        await self._constraints.stop()
        await shut_down(self._llm)
        self._thread.end()


class _SchedulerReports:
    """Stands where vLLM's stat loggers stand, and keeps only the schedulers' gauges."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._latest: dict[int, Any] = {}
        """What each data-parallel replica reported last, by its number."""

    def record(self, scheduler_stats: Any, *_: Any, engine_idx: int = 0, **__: Any) -> None:
        self._engine.reports += 1
        if scheduler_stats is None:
            return
        self._latest[engine_idx] = scheduler_stats
        latest = self._latest.values()
        self._engine.report(
            sum(stats.num_running_reqs for stats in latest),
            sum(stats.num_waiting_reqs for stats in latest),
            # Their caches are equally large, so this is the share of all of them together.
            sum(stats.kv_cache_usage for stats in latest) / len(latest),
        )

    def log(self) -> None:
        """vLLM asks for its periodic log line here; ours is /metrics."""

    def record_admission_rejection(self, reason: str) -> None:
        """vLLM's own admission limits are off; the queue is bounded before the engine."""
