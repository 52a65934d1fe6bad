"""vLLM as an engine, on CPU and CUDA alike: `AsyncLLM`, with Slipway's states for the requests (`output`)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import vllm.platforms
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.renderers.chat_utils import load_chat_template

from engines.errors import EngineDead, GenerationFailed, InvalidRequest, NotServed, UnknownAdapter
from engines.interface import (
    EngineCopy,
    EngineHealth,
    EngineStartError,
    Generation,
    SequenceGroup,
    Sink,
    Watchdog,
    give_turn,
    unless_dead,
)
from engines.loaded_model import EngineStatus, ModelTexts
from engines.model_settings import ModelSettings
from engines.pooling import Pooling
from engines.request import WARM_UP, GenerationRequest, Token
from engines.statistics import EngineStatistics
from engines.tokenization import PromptTokenizer, end_token_ids, split_text
from engines.vllm import fork_server, internals
from engines.vllm.arguments import EMPTY_SLOTS_ON_CPU
from engines.vllm.beam_search import BeamSearchTask
from engines.vllm.constraints.translator import CheckedConstraint, ConstraintTranslator
from engines.vllm.copies.client import Copy
from engines.vllm.copies.life_cycle import Copies
from engines.vllm.internals import AsyncLLM, EngineCoreRequest, EngineDeadError, TriedOutputs
from engines.vllm.loading import StartedEngine, VllmLoader, image_mark, own_tokenizer
from engines.vllm.lora import Claim, VllmAdapters
from engines.vllm.output import OwnState, PooledState, PushedState, Siblings, TokensApart
from engines.vllm.pooling import cannot_pool, model_of, pooling_params
from engines.vllm.sampling import SamplingTranslator, check_bad_words, prompt_logprobs_refusal, sibling
from engines.vllm.sent_media import SentMedia
from engines.vllm.speech import silence

logger = logging.getLogger(__name__)

REMEMBERED_REQUESTS = 256
_ONLY_SPEECH = "this model only writes down sounds: send them to /v1/audio/transcriptions or /v1/audio/translations"
_REMEMBERED_CHARACTERS = 256  # Of stop strings.


class VllmEngine:
    """One model on vLLM. Its engine core runs in a separate process."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._ids = itertools.count()
        self.statistics = EngineStatistics()
        self._watchdog = Watchdog(self._look)
        self._stopped = False
        self.adapters: VllmAdapters | None = None
        # Requests that vLLM has checked, without their prompts, by what others may have in common with them.
        self._checked: dict[Hashable, EngineCoreRequest] = {}

    async def start(self) -> None:
        fork_server.start()
        first = Copy(1)
        try:
            loaded = await VllmLoader(self._settings, first.threads).load()
        except BaseException:
            first.threads.end()
            raise
        self._copies = Copies(loaded, first, self._settings, self.statistics, lambda: self.waits)
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
        self.statistics.vllm = loaded.reports
        self._traced = llm.vllm_config.observability_config.otlp_traces_endpoint is not None
        self._stream_interval: int = llm.vllm_config.scheduler_config.stream_interval
        internals.keep_eos_token_id(llm)
        self.sent_media = SentMedia(llm)
        try:
            self.tasks = await unless_dead(llm.get_supported_tasks(), lambda: llm.errored)
        except EngineDead:
            raise EngineStartError("the engine has died right after its start; the log has its error") from None
        self.pooling = model_of(llm.model_config, self.tasks, self.frontend_arguments, self._settings)
        self._answers_prompts = "generate" in self.tasks or self.pooling is not None
        media = llm.renderer.mm_processor  # None if the model, or its limits, allow texts only.
        self.takes_images = media is not None and media.info.allowed_mm_limits.get("image", 0) > 0
        self.tokenizer = llm.get_tokenizer()  # vLLM's pool
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
        # The model's own generation config, as far as it differs from vLLM's defaults.
        self.default_sampling: dict[str, Any] = llm.model_config.get_diff_sampling_param()
        config = llm.vllm_config
        self.max_model_len: int = llm.model_config.max_model_len
        self.max_sequences = self._copies.sequences
        vocabulary_size = self._vocabulary_size = llm.model_config.get_vocab_size()
        most = llm.model_config.max_logprobs
        self.max_top_tokens: int = vocabulary_size if most < 0 else most
        self._prompts = PromptTokenizer(self.texts, self.max_model_len, self._settings.max_prompt_tokens)
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
            partial_schemas=self._settings.partial_schemas,
        )
        if config.lora_config is not None:
            empty_slots = EMPTY_SLOTS_ON_CPU if vllm.platforms.current_platform.is_cpu() else 0
            self.adapters = VllmAdapters(llm, self._settings.predict_timeout, empty_slots)
        self._copies.begin(self.adapters)
        self._up = self._copies.up
        self._watchdog.start()

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        await self.wait_until_ready()
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
        if (refusal := cannot_pool(request, self.pooling)) is not None:
            raise refusal
        if request.pooling is not None:
            return await self._pool(request, request.pooling, sink, adapter)
        if request.beam_search is not None:
            if request.images:
                raise InvalidRequest("beam search takes text only; this request has images")
            self.sampling.check(request)
            prompt_ids = await self.prompt_token_ids(request)
            return BeamSearchTask(self, request, sink, prompt_ids, partial(self._submit, adapter=adapter))
        prompt = await self._prompt(request)
        token_ids = (prompt.get("decoder_prompt") or prompt)["prompt_token_ids"]
        core_request, constraint = self._known_request(request, token_ids, adapter), None
        if core_request is None:
            core_request, constraint = await self._checked_request(request, prompt, token_ids, adapter)
        # A long prompt was tokenized in a thread, and a constraint was compiled for a trial.
        await self.wait_until_ready()
        generation = VllmGeneration(self.async_llm, request.candidates)
        target = sink
        if request.candidates > 1:
            target = SequenceGroup(sink, request.sequences, request.candidates, request.stream)
        if constraint is not None and constraint.not_held:
            target.on_not_held(constraint.not_held)
            generation.check_answer = partial(self.constraints.check_answer, constraint, self.statistics)
        with _cancelled_if_it_fails(generation):
            for index in range(request.candidates):
                await give_turn(index)
                await self._add(request, sibling(core_request, index), index, target, statistics, generation)
        self.sent_media.engine_got(prompt)
        statistics.prompt(len(token_ids))
        self.statistics.partial_requests += generation.check_answer is not None
        return generation

    async def _pool(
        self, request: GenerationRequest, pooling: Pooling, sink: Sink, adapter: LoRARequest | None
    ) -> VllmGeneration:
        """Submit a prompt of which the model makes numbers."""
        boundary: int | None = None
        if isinstance(request.prompt, str) and (pooling.second is not None or pooling.cut is not None):
            token_ids, boundary = await self._prompts.pair(request.prompt, pooling, special=request.add_special_tokens)
        else:
            token_ids = await self.prompt_token_ids(request)
        core_request = self._known_pooling(request, pooling, token_ids, boundary, adapter)
        await self.wait_until_ready()  # a long prompt is tokenized in a thread
        generation = VllmGeneration(self.async_llm, 1)
        with _cancelled_if_it_fails(generation):
            self._identify(core_request, request)
            await self._send(core_request, PooledState(core_request, sink, self.statistics), generation)
        self.statistics.prompt(len(token_ids))
        return generation

    def _known_pooling(
        self,
        request: GenerationRequest,
        pooling: Pooling,
        token_ids: list[int],
        boundary: int | None,
        adapter: LoRARequest | None,
    ) -> EngineCoreRequest:
        """Return vLLM's request for a pooled prompt. vLLM checks the first one with such parameters.

        Raises:
            InvalidRequest: vLLM refuses it.
        """
        key = (pooling.task, pooling.activation)
        if not isinstance(request.prompt, str) and (largest := max(token_ids)) >= self._vocabulary_size:
            raise InvalidRequest(f"Token id {largest} is out of vocabulary")
        known = self._checked.get(key)
        if known is None:
            prompt = TokensPrompt(type="token", prompt_token_ids=token_ids)
            checked = self._processed(request, prompt, pooling_params(pooling), adapter)
            known = self._remember(key, checked)
        params: Any = known.pooling_params
        if pooling.second is not None and boundary is not None:
            params = copy.copy(params)
            params.extra_kwargs = {"compressed_token_type_ids": boundary}
        return _with_prompt(known, request, token_ids, adapter, pooling_params=params)

    def _identify(self, core_request: EngineCoreRequest, request: GenerationRequest) -> None:
        """Give vLLM's request an id that no other one has, and the fields that steer the engine."""
        core_request.request_id = f"{next(self._ids)}-{request.request_id}"
        if self._traced:
            core_request.trace_headers = request.trace_context
        core_request.cache_salt, core_request.priority = request.cache_salt or None, request.priority

    async def wait_until_ready(self) -> None:
        """Wait while the engine is started again. It takes requests after that.

        Raises:
            EngineDead: The engine is gone.
            GenerationFailed: It was not started again within `predict_timeout`.
        """
        if not self._up.is_set():
            limit = self._settings.predict_timeout
            try:
                async with asyncio.timeout(limit):
                    while not self._up.is_set():  # it may die again before this task has its turn
                        await self._up.wait()
            except TimeoutError:
                raise GenerationFailed(
                    f"the engine was not started again within predict_timeout ({limit:g} s)"
                ) from None
        if self._stopped or self._copies.gave_up or self._watchdog.failure:
            raise EngineDead

    async def claim(self, adapter: str) -> Claim:
        """Return a claim on an adapter, as `VllmAdapters.claim`. If the engine dies, the next one loads it."""
        if self.adapters is None:
            raise UnknownAdapter(adapter)
        while True:
            try:
                return await self.adapters.claim(adapter)
            except EngineDead:
                if not self.waits:
                    raise
                await self.wait_until_ready()

    async def _prompt(self, request: GenerationRequest) -> Any:
        """Return vLLM's prompt.

        Raises:
            InvalidRequest: It is empty, or too long for the model, or does not fit its images.
        """
        if not self._answers_prompts:
            return await silence(self.async_llm)
        token_ids = await self.prompt_token_ids(request)
        if request.images:
            return await self._with_images(request, token_ids)
        return TokensPrompt(type="token", prompt_token_ids=token_ids)

    async def _with_images(self, request: GenerationRequest, token_ids: list[int]) -> Any:
        """Return vLLM's prompt of text and images. Each mark in the text becomes the tokens of its image.

        Raises:
            InvalidRequest: The marks and the images do not match, or the prompt is too long.
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
        self._prompts.check(ids, request)
        return prompt

    async def _checked_request(
        self, request: GenerationRequest, prompt: Any, token_ids: list[int], adapter: LoRARequest | None
    ) -> tuple[EngineCoreRequest, CheckedConstraint | None]:
        """Return vLLM's request for the first sequence, checked by vLLM, and its constraint.

        Args:
            prompt: vLLM's, which has the token ids.

        Raises:
            InvalidRequest: vLLM refuses it, or it would harm the engine.
        """
        constraint = await self.constraints.structured_outputs(request.sampling)
        outputs = constraint.outputs if constraint is not None else None
        params = self.sampling.sampling_params(request, len(token_ids), outputs)
        processed = partial(self._processed, request, prompt, params, adapter)
        if outputs is None or isinstance(outputs, TriedOutputs):
            core_request = processed()
        else:  # vLLM compiles the constraint, which may take tenths of a second.
            core_request = await asyncio.to_thread(processed)
        check_bad_words(core_request.sampling_params)
        # With a reasoning parser, vLLM constrains an answer once its reasoning has ended. These prompts are no chats of
        # such a model, so their answers have no reasoning.
        core_request.reasoning_ended = True
        core_request.external_req_id = request.request_id
        if (key := _repeated(request)) is not None:
            self._remember(key, core_request)
        return core_request, constraint

    def _processed(
        self, request: GenerationRequest, prompt: Any, params: Any, adapter: LoRARequest | None
    ) -> EngineCoreRequest:
        """Return vLLM's request, checked by vLLM.

        Raises:
            InvalidRequest: vLLM refuses it.
        """
        try:
            return self.async_llm.input_processor.process_inputs(
                request.request_id, prompt, params, supported_tasks=self.tasks, lora_request=adapter
            )
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(str(error)) from error

    def _remember(self, key: Hashable, checked: EngineCoreRequest) -> EngineCoreRequest:
        """Keep a checked request without its prompt, for others that are like it. Returns the kept one."""
        if len(self._checked) >= REMEMBERED_REQUESTS:
            self._checked.clear()
        known = self._checked[key] = msgspec.structs.replace(checked, prompt_token_ids=None, lora_request=None)
        return known

    def _known_request(
        self, request: GenerationRequest, token_ids: list[int], adapter: LoRARequest | None
    ) -> EngineCoreRequest | None:
        """Return vLLM's request for the first sequence, if one like it has been checked; None if not.

        vLLM's checks and additions to the parameters depend on these and on the model. The prompt is a text, whose
        tokens the model has, and `prompt_token_ids` has seen to it that the context has room for them.
        """
        known = self._checked.get(_repeated(request))
        if known is None:
            return None
        params: Any = known.sampling_params
        limit = self.sampling.max_tokens(request.sampling, len(token_ids))
        if params.max_tokens != limit:
            params = copy.copy(params)
            params.max_tokens = limit
        return _with_prompt(known, request, token_ids, adapter, sampling_params=params)

    async def _add(
        self,
        request: GenerationRequest,
        core_request: EngineCoreRequest,
        index: int,
        sink: Sink,
        statistics: EngineStatistics,
        generation: VllmGeneration,
    ) -> None:
        self._identify(core_request, request)
        state = PushedState(
            core_request,
            request,
            index,
            sink,
            statistics,
            self.texts,
            self._apart,
            siblings=generation.siblings,
            interval=self._stream_interval,
            check_answer=generation.check_answer,
        )
        await self._send(core_request, state, generation)

    async def _send(self, core_request: EngineCoreRequest, state: OwnState, generation: VllmGeneration) -> None:
        state.core_request = internals.kept(core_request)
        internals.register(self.async_llm, state)
        generation.states.append(state)
        await internals.send(self.async_llm, core_request)

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        return await self._prompts.token_ids(request)

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        texts = self.texts
        return split_text(texts.tokenizer, token_ids, texts.special_ids, skip_special_tokens, prompt_ids)

    async def _look(self) -> bool:
        """End requests that would wait for ever: all when the engine is gone, and each that gets no token."""
        self._copies.look()
        if self._copies.gave_up:
            self._copies.fail_all(EngineDead())
            if self.adapters is not None:
                await self.adapters.stop()
            return False
        await self._end_overdue()
        return True

    async def _end_overdue(self) -> None:
        limit = self._settings.predict_timeout
        overdue = time.monotonic() - limit
        states = internals.request_states(self.async_llm).values()
        own = [state for state in states if isinstance(state, OwnState)]
        stalled = [state for state in own if state.reader.last_at < overdue and not state.ended]
        for state in stalled:
            what = "answer" if isinstance(state, PooledState) else "token"
            state.fail(GenerationFailed(f"no {what} within predict_timeout ({limit:g} s)"))
        if stalled:
            await internals.abort(self.async_llm, [state.request_id for state in stalled])

    @property
    def waits(self) -> bool:
        over = self._stopped or self._copies.gave_up or bool(self._watchdog.failure)
        return self._settings.continue_calls > 0 and not over

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

    async def stop(self, why: str = "the server is stopping") -> None:
        if self._stopped:
            return
        self._stopped = True
        self._watchdog.stop()
        if self.adapters is not None:
            await self.adapters.stop()
        await self.constraints.stop()
        await self._copies.stop(EngineDead(f"{why}; the request was not completed"))


@contextlib.contextmanager
def _cancelled_if_it_fails(generation: VllmGeneration) -> Iterator[None]:
    """Cancel the sequences that were registered before a failure. vLLM's errors become Slipway's."""
    try:
        yield
    except BaseException as error:
        generation.cancel()
        if isinstance(error, EngineDeadError):
            raise EngineDead from None
        if isinstance(error, VLLMClientError | ValueError):
            raise InvalidRequest(str(error)) from error
        raise


def _with_prompt(
    known: EngineCoreRequest,
    request: GenerationRequest,
    token_ids: list[int],
    adapter: LoRARequest | None,
    **params: Any,
) -> EngineCoreRequest:
    """Return a kept request with a prompt."""
    return msgspec.structs.replace(
        known,
        external_req_id=request.request_id,
        prompt_token_ids=token_ids,
        arrival_time=time.time(),
        lora_request=adapter,
        **params,
    )


def _repeated(request: GenerationRequest) -> Hashable:
    """Return the key of requests that are alike for vLLM's checks, with any prompts; None for one that is not
    remembered.

    Left out are those that are rarely repeated, whose parameters may be large, or whose prompt is not a text alone.
    """
    s = request.sampling
    if request.images or not isinstance(request.prompt, str):
        return None
    if s.min_tokens or s.seed is not None or s.constraint is not None:
        return None
    if s.bad_words or s.logit_bias is not None or s.allowed_token_ids is not None:
        return None
    if s.stop and sum(map(len, s.stop)) > _REMEMBERED_CHARACTERS:
        return None
    sequences = (request.sequences, request.candidates, request.stream)
    return s, *sequences, request.want_logprobs, request.top_tokens, request.want_prompt_tokens


class VllmGeneration:
    """The sequences of one request."""

    def __init__(self, llm: AsyncLLM, sequences: int) -> None:
        self._llm = llm
        self.siblings = Siblings(sequences) if sequences > 1 else None
        self.states: list[OwnState] = []
        # Takes the text of each sequence that has ended. None unless a part of its JSON schema is not held.
        self.check_answer: Callable[[str], None] | None = None

    def cancel(self) -> None:
        self._stop(lambda state: state.cancel())

    def abort(self) -> None:
        self._stop(lambda state: state.abort())

    def _stop(self, end: Callable[[OwnState], None]) -> None:
        """End the sequences that vLLM still has, once."""
        known = internals.request_states(self._llm)
        running = [state for state in self.states if state.request_id in known]
        self.states = []
        for state in running:
            end(state)
        if running:
            work = internals.abort(self._llm, [state.request_id for state in running])
            self._task = asyncio.ensure_future(work)
