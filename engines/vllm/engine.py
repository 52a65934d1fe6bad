"""The vLLM engine, for CPU and CUDA: vLLM's `AsyncLLM`, with Slipway's own request states (`engines.vllm.output`)."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import msgspec
import vllm.platforms
from vllm import PoolingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.renderers.chat_utils import load_chat_template
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engines.errors import EngineDead, GenerationFailed, InvalidRequest, NotServed, UnknownAdapter
from engines.interface import (
    EngineCopy,
    EngineHealth,
    EngineStartError,
    ExplainedRequest,
    Generation,
    SequenceGroup,
    Sink,
    Watchdog,
    give_turn,
    unless_dead,
)
from engines.loaded_model import EngineStatus, ModelTexts, RunningSequence
from engines.pooling import Pooling
from engines.request import WARM_UP, GenerationRequest, Token
from engines.settings.engine_config import EngineConfig
from engines.statistics import EngineStatistics
from engines.tokenization import PromptTokenizer, end_token_ids, split_text
from engines.vllm import async_llm
from engines.vllm.arguments.from_settings import EMPTY_SLOTS_ON_CPU
from engines.vllm.beam_search import BeamSearchTask
from engines.vllm.constraints.translator import CheckedConstraint, ConstraintTranslator
from engines.vllm.copies.client import Copy
from engines.vllm.copies.life_cycle import Copies
from engines.vllm.explanation import explained_request, explained_search, model_defaults
from engines.vllm.loading import StartedEngine, VllmLoader, image_mark, own_tokenizer
from engines.vllm.lora import Claim, VllmAdapters
from engines.vllm.output import OwnState, PooledState, PushedState, Siblings, TokensApart
from engines.vllm.patches.grammars import TriedOutputs
from engines.vllm.patches.sent_media import SentMedia
from engines.vllm.pooling import check_pooling, model_of
from engines.vllm.processes import fork_server
from engines.vllm.sampling import SamplingTranslator, check_bad_words, prompt_logprobs_refusal
from engines.vllm.speech import silence

logger = logging.getLogger(__name__)

_ONLY_SPEECH = "this model only writes down sounds: send them to /v1/audio/transcriptions or /v1/audio/translations"


class _Prepared(msgspec.Struct, frozen=True):
    """A request in vLLM's form, without the ids of its sequences."""

    token_ids: list[int]
    checked: EngineCoreRequest | None = None  # None for a beam search, whose steps are separate requests.
    params: Any = None  # vLLM's `SamplingParams`. None for a pooling request.
    pooling_params: Any = None
    constraint: CheckedConstraint | None = None
    prompt: Any = None  # vLLM's form of the prompt. None if it is not needed.
    arrived_at: float = 0.0


class VllmEngine:
    """One model on vLLM. The engine core of each copy of the model runs in a separate process.

    With data parallelism, a copy has an engine core for each replica.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ids = itertools.count()
        self.statistics = EngineStatistics()
        self._watchdog = Watchdog(self._look)
        self._stopped = False
        self.adapters: VllmAdapters | None = None
        # Pooling requests that vLLM has checked. The keys are the requests' parameters. The prompts are removed.
        self._known_pooling: dict[tuple[str, bool | None], EngineCoreRequest] = {}

    async def start(self) -> None:
        fork_server.start()
        first = Copy(1, stall_timeout=self._config.stall_timeout)
        try:
            loaded = await VllmLoader(self._config, first.threads).load()
        except BaseException:
            first.threads.end()
            raise
        self._copies = Copies(loaded, first, self._config, self.statistics, lambda: self.waits)
        try:
            await self._attach(loaded)
            await self._copies.start_others()
        except BaseException:
            await self._copies.stop(EngineDead())
            raise

    async def _attach(self, loaded: StartedEngine) -> None:
        llm = self.async_llm = loaded.llm
        self.frontend_arguments = loaded.frontend_arguments
        self._reports = loaded.reports
        self.statistics.vllm, self.statistics.steps = loaded.reports, loaded.reports.steps
        self._traced = llm.vllm_config.observability_config.otlp_traces_endpoint is not None
        self._stream_interval: int = llm.vllm_config.scheduler_config.stream_interval
        async_llm.keep_eos_token_id(llm)
        self._registered = async_llm.request_states(llm)
        self.sent_media = SentMedia(llm)
        try:
            self.tasks = await unless_dead(llm.get_supported_tasks(), lambda: llm.errored)
        except EngineDead:
            raise EngineStartError("the engine has died right after its start; the log has its error") from None
        self.pooling = model_of(llm.model_config, self.tasks, self.frontend_arguments, self._config)
        self._answers_prompts = "generate" in self.tasks or self.pooling is not None
        media = llm.renderer.mm_processor  # None if the model or its limits allow only texts.
        self.takes_images = media is not None and media.info.allowed_mm_limits.get("image", 0) > 0
        self.tokenizer = llm.get_tokenizer()  # vLLM's pool of tokenizers.
        tokenizer, given = own_tokenizer(llm.model_config), loaded.frontend_arguments
        try:
            template = load_chat_template(given.get("chat_template"))
        except (VLLMClientError, ValueError, OSError) as error:
            raise EngineStartError(f"option.chat_template: {error}") from None
        if template is not None:
            tokenizer.chat_template = template
        self.texts = ModelTexts(tokenizer, image_mark(llm))
        self._apart = TokensApart(self.texts.tokenizer)
        generation_config = llm.model_config.try_get_generation_config() or {}
        self.eos_token_ids = end_token_ids(generation_config.get("eos_token_id"), self.tokenizer)
        # The part of the model's generation config that differs from vLLM's defaults.
        self.default_sampling: dict[str, Any] = llm.model_config.get_diff_sampling_param()
        self._model_defaults = model_defaults(llm.model_config, self.default_sampling)
        config = llm.vllm_config
        self.max_model_len: int = llm.model_config.max_model_len
        self.max_sequences = self._copies.sequences
        vocabulary_size = self._vocabulary_size = llm.model_config.get_vocab_size()
        most = llm.model_config.max_logprobs
        self.max_top_tokens: int = vocabulary_size if most < 0 else most
        self._prompts = PromptTokenizer(self.texts, self.max_model_len, self._config.max_prompt_tokens)
        self.sampling = SamplingTranslator(
            max_model_len=self.max_model_len,
            max_top_tokens=self.max_top_tokens,
            vocabulary_size=vocabulary_size,
            typical_refusal=loaded.typical_refusal,
            prompt_logprobs_refusal=prompt_logprobs_refusal(config),
            prefix_cache=bool(config.cache_config.enable_prefix_caching),
        )
        structured = config.structured_outputs_config
        drafts = config.speculative_config is not None
        self.constraints = ConstraintTranslator(
            self.tokenizer,
            vocabulary_size,
            structured,
            drafts=drafts,
            partial_schemas=self._config.partial_schemas,
        )
        if config.lora_config is not None:
            empty_slots = EMPTY_SLOTS_ON_CPU if vllm.platforms.current_platform.is_cpu() else 0
            self.adapters = VllmAdapters(llm, self._config.predict_timeout, empty_slots)
        self._copies.begin(self.adapters)
        self._watchdog.start()

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        if not self._answers_prompts and request is not WARM_UP:
            raise NotServed(_ONLY_SPEECH)
        if request.adapter is None:
            return await self._submit(request, sink, self.statistics, None)
        claim = await self.claim(request.adapter)
        try:
            generation = await self._submit(request, sink, self.statistics, claim.request)
        except BaseException:
            claim.release()
            raise
        if isinstance(generation, VllmGeneration):
            claim.release()
        else:
            generation.when_done(claim.release)
        return generation

    async def _submit(
        self, request: GenerationRequest, sink: Sink, statistics: EngineStatistics, adapter: LoRARequest | None
    ) -> VllmGeneration | BeamSearchTask:
        """Prepare a request, and send each of its sequences.

        Args:
            request: The request.
            sink: Receives the answer.
            statistics: Counts the prompt, the sequences and their tokens.
            adapter: vLLM's form of the request's adapter.
        """
        prepared = await self._prepared(request, adapter)
        if prepared.checked is None:
            return BeamSearchTask(self, request, sink, prepared.token_ids, partial(self._submit, adapter=adapter))
        pooling, constraint, params = request.pooling, prepared.constraint, prepared.params
        # Copies may have died during the preparation, which tokenizes the prompt and may compile a constraint.
        if not self._copies.client.ready or self._stopped or self._watchdog.failure:
            await self.wait_until_ready()
        target, siblings, check_answer = sink, None, None
        if request.candidates > 1:
            siblings = Siblings(request.candidates)
            target = SequenceGroup(sink, request.sequences, request.candidates, request.stream)
        generation = VllmGeneration(self.async_llm, self._registered)
        if constraint is not None and constraint.not_held:
            target.on_not_held(constraint.not_held)
            check_answer = partial(self.constraints.check_answer, constraint, self.statistics)
        unsent: list[tuple[OwnState, EngineCoreRequest]] = []
        try:
            for index in range(request.candidates):
                if index:
                    await give_turn(index)  # The call may be cancelled here, so no sequence has been sent yet.
                    if params.seed is not None:  # Each sequence has its own seed.
                        params = copy.copy(params)
                        params.seed = (params.seed + 1 + 2**63) % 2**64 - 2**63
                core_request = msgspec.structs.replace(
                    prepared.checked,
                    request_id=f"{next(self._ids)}-{request.request_id}",
                    external_req_id=request.request_id,
                    prompt_token_ids=prepared.token_ids,
                    sampling_params=params,
                    pooling_params=prepared.pooling_params,
                    arrival_time=prepared.arrived_at,
                    lora_request=adapter,
                    cache_salt=request.cache_salt or None,
                    priority=request.priority,
                    trace_headers=request.trace_context if self._traced else None,
                )
                if pooling is not None:
                    state: OwnState = PooledState(core_request, sink, statistics)
                else:
                    state = PushedState(
                        core_request,
                        request,
                        index,
                        target,
                        statistics,
                        self.texts,
                        self._apart,
                        siblings=siblings,
                        interval=self._stream_interval,
                        check_answer=check_answer,
                    )
                unsent.append((state, core_request))
            for state, core_request in unsent:
                async_llm.register(self.async_llm, state)
                generation.states.append(state)
                await self._copies.client.add_request_async(core_request)
        except BaseException as error:
            generation.cancel()
            if isinstance(error, EngineDeadError):
                raise EngineDead from None
            if isinstance(error, VLLMClientError | ValueError):
                raise InvalidRequest(str(error)) from error
            raise
        if prepared.prompt is not None:
            self.sent_media.engine_got(prepared.prompt)
        statistics.prompt(len(prepared.token_ids))
        self.statistics.partial_requests += check_answer is not None
        return generation

    async def _prepared(self, request: GenerationRequest, adapter: LoRARequest | None) -> _Prepared:
        """Tokenize the prompt, and let vLLM check the parameters, unless vLLM has checked them before.

        Args:
            request: The request.
            adapter: vLLM's form of the request's adapter.

        Raises:
            InvalidRequest: The request is refused.
        """
        pooling, constraint, boundary = request.pooling, None, None
        prompt: Any = None  # vLLM's form of the prompt. None if it is not needed.
        if pooling is not None or self.pooling is not None:
            check_pooling(pooling, self.pooling)
        if not self._answers_prompts:
            prompt = await silence(self.async_llm)
            token_ids: list[int] = (prompt.get("decoder_prompt") or prompt)["prompt_token_ids"]
        elif pooling is not None and isinstance(request.prompt, str) and (pooling.second is not None or pooling.cut):
            token_ids, boundary = await self._prompts.pair(request.prompt, pooling, special=request.add_special_tokens)
        elif request.beam_search is not None:
            if request.images:
                raise InvalidRequest("beam search takes text only; this request has images")
            self.sampling.check(request)
            token_ids = await self._prompts.token_ids(request)
            return _Prepared(token_ids)
        else:
            token_ids = await self._prompts.token_ids(request)
            if request.images:
                await self.wait_until_ready()  # The renderer omits images of earlier prompts. A new process has none.
                prompt = await self._with_images(request, token_ids)
                token_ids = prompt["prompt_token_ids"]
        arrived_at, memo = time.time(), None if request.images else request.memo
        if pooling is not None:
            checked = self._checked_pooling(request, pooling, token_ids)
        elif (
            memo is not None
            and memo.checked is not None
            and (isinstance(request.prompt, str) or self._has_tokens(request.prompt))
        ):
            # vLLM's earlier checks and additions are still right, because the parameters and the model are the same.
            # Other checks replace vLLM's checks of the prompt: `PromptTokenizer` checks the length, and `_has_tokens`
            # checks the tokens. The tokens of a text are always tokens of the model.
            checked = memo.checked
        else:
            prompt = prompt or TokensPrompt(type="token", prompt_token_ids=token_ids)
            checked, constraint = await self._checked(request, prompt, len(token_ids), adapter)
            arrived_at = checked.arrival_time
            # Requests with a constraint or with `min_tokens` are checked each time. A constraint is translated for each
            # request, and `min_tokens` is limited by the room after the prompt.
            if memo is not None and constraint is None and not request.sampling.min_tokens:
                memo.checked = msgspec.structs.replace(checked, prompt_token_ids=None, lora_request=None)
        params, pooling_params = checked.sampling_params, checked.pooling_params
        if params is not None:
            room = self.max_model_len - len(token_ids)
            if params.max_tokens != (most := min(request.sampling.max_tokens or room, room)):
                params = copy.copy(params)
                params.max_tokens = most
        elif boundary is not None and pooling is not None and pooling.second is not None:
            pooling_params = copy.copy(pooling_params)
            pooling_params.extra_kwargs = {"compressed_token_type_ids": boundary}
        return _Prepared(token_ids, checked, params, pooling_params, constraint, prompt, arrived_at)

    def _has_tokens(self, prompt: tuple[int, ...]) -> bool:
        """Return True if a prompt fits into the context and all its ids are in the vocabulary.

        A longer prompt gets this far only if the request truncates it. Then vLLM checks the truncated ids.
        """
        return len(prompt) <= self.max_model_len and min(prompt) >= 0 and max(prompt) < self._vocabulary_size

    def _checked_pooling(self, request: GenerationRequest, pooling: Pooling, token_ids: list[int]) -> EngineCoreRequest:
        """Return vLLM's request for a pooled prompt.

        vLLM checks only the first request with the same task and activation. Later requests reuse the result.

        Raises:
            InvalidRequest: vLLM refuses the request.
        """
        if not isinstance(request.prompt, str) and (largest := max(token_ids)) >= self._vocabulary_size:
            raise InvalidRequest(f"Token id {largest} is out of vocabulary")
        key = (pooling.task, pooling.activation)
        if (known := self._known_pooling.get(key)) is None:
            prompt = TokensPrompt(type="token", prompt_token_ids=token_ids)
            params = PoolingParams(task=pooling.task, use_activation=pooling.activation)
            known = self._known_pooling[key] = self._processed(request, prompt, params, None)
            known.prompt_token_ids = None
        return known

    async def wait_until_ready(self) -> None:
        """Wait until the engine accepts requests, if it is being restarted.

        Raises:
            EngineDead: The engine has died for good, or was stopped.
            GenerationFailed: The engine was not restarted within `predict_timeout`.
        """
        if not (up := self._copies.up).is_set():
            limit = self._config.predict_timeout
            try:
                async with asyncio.timeout(limit):
                    while not up.is_set():  # The engine may die again before this task runs.
                        await up.wait()
            except TimeoutError:
                raise GenerationFailed(
                    f"the engine was not started again within predict_timeout ({limit:g} s)"
                ) from None
        if self._stopped or self._copies.gave_up or self._watchdog.failure:
            raise EngineDead

    async def claim(self, adapter: str) -> Claim:
        """Return a claim on an adapter, as `VllmAdapters.claim` does. If the engine dies, wait for its restart."""
        if self.adapters is None:
            raise UnknownAdapter(adapter)
        while True:
            try:
                return await self.adapters.claim(adapter)
            except EngineDead:
                if not self.waits:
                    raise
                await self.wait_until_ready()

    async def _with_images(self, request: GenerationRequest, token_ids: list[int]) -> Any:
        """Return vLLM's prompt for text with images. The tokens of an image replace its placeholder in the text.

        Raises:
            InvalidRequest: The placeholders and the images do not match, or the prompt is too long.
        """
        marked = TokensPrompt(prompt_token_ids=token_ids, multi_modal_data={"image": list(request.images)})
        try:
            prompt: Any = await self.async_llm.renderer.process_for_engine_async(marked, time.time())
        except (VLLMClientError, ValueError, RuntimeError, AssertionError) as error:
            raise InvalidRequest(f"the prompt does not fit its images: {error}") from error
        ids, most = prompt["prompt_token_ids"], request.truncate_prompt_tokens
        if most is not None and len(ids) > most:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens with its images; a prompt with images cannot be cut to {most} tokens"
            )
        self._prompts.check(ids, request.generated_before, request.room)
        return prompt

    async def _checked(
        self, request: GenerationRequest, prompt: Any, tokens: int, adapter: LoRARequest | None
    ) -> tuple[EngineCoreRequest, CheckedConstraint | None]:
        """Let vLLM check a request. Return vLLM's form of the request, and the constraint.

        Args:
            request: The request.
            prompt: vLLM's form of the prompt.
            tokens: The number of tokens in the prompt.
            adapter: vLLM's form of the request's adapter.

        Raises:
            InvalidRequest: vLLM refuses the request, or the request would harm the engine.
        """
        constraint = await self.constraints.structured_outputs(request.sampling)
        outputs = constraint.outputs if constraint is not None else None
        params = self.sampling.sampling_params(request, self.max_model_len - tokens, outputs)
        processed = partial(self._processed, request, prompt, params, adapter)
        if outputs is None or isinstance(outputs, TriedOutputs):
            checked = processed()
        else:  # vLLM compiles the constraint, which may take tenths of a second.
            checked = await asyncio.to_thread(processed)
        check_bad_words(checked.sampling_params)
        # With a reasoning parser, vLLM constrains an answer only after its reasoning. These prompts are not chats, so
        # their answers have no reasoning.
        checked.reasoning_ended = True
        return checked, constraint

    def _processed(
        self, request: GenerationRequest, prompt: Any, params: Any, adapter: LoRARequest | None
    ) -> EngineCoreRequest:
        """Let vLLM check a request, and return vLLM's form of the request.

        Raises:
            InvalidRequest: vLLM refuses the request.
        """
        try:
            return self.async_llm.input_processor.process_inputs(
                request.request_id, prompt, params, supported_tasks=self.tasks, lora_request=adapter
            )
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(str(error)) from error

    async def explain(self, request: GenerationRequest) -> ExplainedRequest:
        if not self._answers_prompts:
            raise NotServed(_ONLY_SPEECH)
        adapter = None
        if request.adapter is not None:
            adapter = self.adapters.public.get(request.adapter) if self.adapters is not None else None
            if adapter is None:
                raise UnknownAdapter(request.adapter)
        prepared = await self._prepared(request, adapter)
        await self.wait_until_ready()  # A dead engine refuses an explanation, as it refuses a call.
        if prepared.checked is None:
            assert request.beam_search is not None
            room = self.max_model_len - len(prepared.token_ids)
            return explained_search(request, request.beam_search, prepared.token_ids, room)
        core_request = msgspec.structs.replace(
            prepared.checked,
            prompt_token_ids=prepared.token_ids,
            sampling_params=prepared.params,
            pooling_params=prepared.pooling_params,
            lora_request=adapter,
            cache_salt=request.cache_salt or None,
        )
        return self._explained(core_request, prepared.constraint, request.candidates)

    def explain_prompt(
        self, prompt: Any, params: Any, constraint: CheckedConstraint | None, adapter: LoRARequest | None
    ) -> ExplainedRequest:
        """Return the explanation of a request from vLLM's front end.

        Args:
            prompt: vLLM's form of the prompt.
            params: vLLM's parameters.
            constraint: The request's constraint.
            adapter: vLLM's form of the request's adapter.

        Raises:
            VLLMClientError: vLLM refuses the request.
        """
        processed = self.async_llm.input_processor.process_inputs(
            "", prompt, params, supported_tasks=self.tasks, lora_request=adapter
        )
        return self._explained(processed, constraint, getattr(params, "n", 1))

    def _explained(
        self, request: EngineCoreRequest, constraint: CheckedConstraint | None, sequences: int
    ) -> ExplainedRequest:
        not_held = constraint.not_held if constraint is not None else ()
        return explained_request(request, self._copies.client, self._model_defaults, sequences, not_held)

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        return await self._prompts.token_ids(request)

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        texts = self.texts
        return split_text(texts.tokenizer, token_ids, texts.special_ids, skip_special_tokens, prompt_ids)

    async def _look(self) -> bool:
        """End requests that would wait forever.

        These are requests without progress, or all requests if no copy runs and no copy will be started.
        """
        self._copies.look()
        if self._copies.gave_up:
            self._copies.fail_all(EngineDead())
            if self.adapters is not None:
                await self.adapters.stop()
            return False
        limit = self._config.predict_timeout
        overdue = time.monotonic() - limit
        states = async_llm.request_states(self.async_llm).values()
        own = [state for state in states if isinstance(state, OwnState)]
        stalled = [state for state in own if state.last_at < overdue and not state.ended]
        for state in stalled:
            what = "answer" if isinstance(state, PooledState) else "token"
            state.fail(GenerationFailed(f"no {what} within predict_timeout ({limit:g} s)"))
        if stalled:
            await async_llm.abort(self.async_llm, [state.request_id for state in stalled])
        return True

    @property
    def waits(self) -> bool:
        over = self._stopped or self._copies.gave_up or bool(self._watchdog.failure)
        return self._config.continue_calls > 0 and not over

    async def restart(self) -> None:
        await self._copies.restart()

    def give_up(self) -> None:
        self._copies.give_up()

    @property
    def copies(self) -> Sequence[EngineCopy]:
        return self._copies.listed

    def scale(self, least: int, most: int) -> None:
        self._copies.scale(least, most)
        self.max_sequences = self._copies.sequences

    def health(self) -> EngineHealth:
        if self._stopped:
            return EngineHealth(False, "the engine is stopped")
        if self._watchdog.failure:
            return EngineHealth(False, self._watchdog.failure)
        return self._copies.health()

    def status(self) -> EngineStatus:
        return self._reports.status

    def sequences(self) -> Sequence[RunningSequence]:
        placed = self._copies.client.placed
        found = []
        for state in list(async_llm.request_states(self.async_llm).values()):
            place = placed.get(state.request_id)
            found.append(async_llm.running_sequence(state, place.copy.number if place is not None else None))
        return found

    async def stop(self, why: str = "the server is stopping") -> None:
        if self._stopped:
            return
        self._stopped = True
        self._watchdog.stop()
        if self.adapters is not None:
            await self.adapters.stop()
        await self.constraints.stop()
        await self._copies.stop(EngineDead(f"{why}; the request was not completed"))


class VllmGeneration(msgspec.Struct):
    """The sequences of one request. `states` is filled after the object is created."""

    _llm: AsyncLLM
    _registered: Container[str]  # The ids of all sequences in vLLM.
    states: list[OwnState] = []
    _task: asyncio.Future[None] | None = None  # Ends the sequences.

    def cancel(self) -> None:
        self._stop(methodcaller("cancel"))

    def abort(self, *, at_deadline: bool = False) -> None:
        self._stop(methodcaller("abort", at_deadline=at_deadline))

    @property
    def begun(self) -> bool:
        return any(state.token_count for state in self.states)

    def _stop(self, end: Callable[[OwnState], None]) -> None:
        """End the sequences that are still in vLLM. A second call does nothing."""
        states, self.states = self.states, []
        running: list[str] = []
        for state in states:
            if state.request_id in self._registered:
                running.append(state.request_id)
                end(state)
        if running:
            self._task = asyncio.ensure_future(async_llm.abort(self._llm, running))
