"""The engine as vLLM's serving classes see it: vLLM's own `AsyncLLM`, under the rules that hold for every contract.

Requests of the serving classes are ordinary ones of `AsyncLLM`. They run beside those of
`handlers.engines.vllm.engine`, take places in the same queue, count in the same meter and fail after the same wait for
a token. For each step of a request vLLM's output processor calls `logprobs_processor.update_from_output`; that is
where its tokens are counted, at the price of one call.

It relies on internals of vLLM (`handlers.engines.vllm.seam`, tests/live/test_openai_seam.py):
- `AsyncLLM.add_request(request_id, prompt, params)` gives a `RequestOutputCollector` with the `output` that waits;
- `output_processor.request_states` has a state for each sequence by then, unless it has ended, and `external_req_ids`
  names them by the request's id; a state has `queue`, the collector, `logprobs_processor` and `prompt_len`;
- `OutputProcessor.process_outputs` calls `logprobs_processor.update_from_output` for each sequence of a step;
- `AsyncLLM.abort(request_id, internal)`.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import AsyncGenerator, Iterable
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMNotFoundError, VLLMValidationError
from vllm.outputs import STREAM_FINISHED
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.exceptions import EngineDeadError

from handlers.contracts.json_fields import MAX_STRING_LENGTH, MAX_STRINGS
from handlers.engines.texts import check_token_ids
from handlers.engines.vllm.lora import Claim, VllmAdapters, has_prompt_logprobs
from handlers.engines.vllm.sampling import (
    MAX_LISTED_TOKENS,
    MAX_STOP_TOKENS,
    NO_PROMPT_LOGPROBS,
    TYPICAL_P,
    check_bad_words,
)
from handlers.errors import (
    AdapterUnusable,
    EngineDead,
    InvalidParameter,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    UnknownAdapter,
)
from handlers.meter import Meter
from handlers.openai.current_call import OpenAICall, current_call

_INT64 = 2**63
_LISTS = {
    "stop_token_ids": MAX_STOP_TOKENS,
    "allowed_token_ids": MAX_LISTED_TOKENS,
    "logit_bias": MAX_LISTED_TOKENS,
}
_MOST_NESTED = 32
"""Levels of `kv_transfer_params` and of `vllm_xargs`."""
_WHOLE_NUMBERS = ("min_tokens", "max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
"""What goes to the engine process as 64-bit numbers."""


def check_parameters(
    params: Any, vocabulary_size: int, tokenizer: Any, prompt_logprobs: bool = True, typical_refusal: str = ""
) -> None:
    """Refuse sampling parameters that would harm the engine or have no effect; `params`: vLLM's `SamplingParams`.

    `prompt_logprobs`: see `handlers.engines.vllm.lora.has_prompt_logprobs`; `typical_refusal`: see `CheckingLLM`.

    Raises:
        InvalidParameter: the parameter is named.
    """
    if params.prompt_logprobs is not None and not prompt_logprobs:
        raise InvalidParameter("prompt_logprobs", f"cannot be given: {NO_PROMPT_LOGPROBS}")
    for name, limit in _LISTS.items():
        token_ids = getattr(params, name) or ()
        check_token_ids(name, token_ids, limit, vocabulary_size)
        if min(token_ids, default=0) < 0:
            raise InvalidParameter(name, "must hold no negative token ids")
    if not all(map(math.isfinite, (params.logit_bias or {}).values())):
        raise InvalidParameter("logit_bias", "must hold finite numbers")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    if len(stop) > MAX_STRINGS or any(len(text) > MAX_STRING_LENGTH for text in stop):
        raise InvalidParameter("stop", f"may hold {MAX_STRINGS} strings of {MAX_STRING_LENGTH} characters at most")
    for name in _WHOLE_NUMBERS:
        value = getattr(params, name, None)
        if value is not None and not -_INT64 <= value < _INT64:
            raise InvalidParameter(name, "must be a 64-bit number")
    for name, value in (params.extra_args or {}).items():
        _check_depth(name, value)
    _check_typical_p((params.extra_args or {}).get(TYPICAL_P), typical_refusal)
    if params.bad_words:
        tokenized = copy.copy(params)
        tokenized.update_from_tokenizer(tokenizer)
        check_bad_words(tokenized)


def _check_depth(name: str, value: Any) -> None:
    """The engine process pickles it, which ends the process where it is nested as deep as JSON may be."""
    level = [value]
    for _ in range(_MOST_NESTED):
        level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return
    raise InvalidParameter(name, f"may be nested {_MOST_NESTED} levels deep at most")


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _check_typical_p(value: Any, refusal: str) -> None:
    """It comes in vLLM's `vllm_xargs`, which are passed on as they are."""
    if value is None:
        return
    if refusal:
        raise InvalidParameter(TYPICAL_P, refusal)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and 0.0 < value <= 1.0):
        raise InvalidParameter(TYPICAL_P, "must be a number above 0 and at most 1")


class EngineClient:
    """What vLLM's serving classes take for their engine; whatever is not here is `AsyncLLM`'s.

    `predict_timeout`: seconds without a new token after which a request fails. `max_prompt_tokens`: longer prompts are
    refused.
    """

    def __init__(
        self,
        llm: Any,
        meter: Meter,
        predict_timeout: float,
        max_prompt_tokens: int | None = None,
        adapters: VllmAdapters | None = None,
    ) -> None:
        self._llm, self._meter, self._predict_timeout = llm, meter, predict_timeout
        self._max_prompt_tokens, self._adapters = max_prompt_tokens, adapters
        self._tokenizer = llm.get_tokenizer()
        self._vocabulary_size: int = llm.model_config.get_vocab_size()
        self._prompt_logprobs = has_prompt_logprobs(llm)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a call before its prompt is rendered, where it is clear that it gets no places.

        Raises:
            VLLMValidationError: it would never fit.
            GracefulHTTPError: 503, there are not enough places now.
        """
        call = current_call.get()
        _take(call, n)
        call.release(n)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """See `AsyncLLM.generate`. Not a coroutine: what is refused is refused before a reply has begun.

        Raises:
            VLLMValidationError: the parameters would harm the engine, or there are too many sequences.
            GracefulHTTPError: 503, the queue has no place.
        """
        try:
            check_parameters(
                sampling_params,
                self._vocabulary_size,
                self._tokenizer,
                self._prompt_logprobs,
                self._llm.typical_refusal,
            )
        except InvalidParameter as error:
            raise VLLMValidationError(error.message, parameter=error.parameter) from None
        self._check_length(prompt)
        call = current_call.get()
        _take(call, sampling_params.n)
        return self._generate(call, prompt, sampling_params, request_id, options)

    def _check_length(self, prompt: Any) -> None:
        if self._max_prompt_tokens is None:
            return
        tokens = len(prompt["prompt_token_ids"])
        if tokens > self._max_prompt_tokens:
            raise VLLMValidationError(
                PromptTooLong(tokens, self._max_prompt_tokens).message, parameter="input_tokens", value=tokens
            )

    async def _generate(
        self, call: OpenAICall, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        queue: Any = None
        request: _Request | None = None
        try:
            queue = await self._added(call, prompt, params, request_id, options)
            request = _Request(self._llm, request_id, queue, self._meter, self._predict_timeout)
            finished = False
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                if finished:
                    request.succeeded()
                if output is not STREAM_FINISHED:
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            if request is not None:
                await request.abandon()
            raise
        except Exception:
            if request is not None:
                call.failed = True
                await request.give_up()
            elif queue is not None and not self._llm.errored:
                call.failed = True
                await self._llm.abort(queue.request_id, internal=True)
            raise
        finally:
            call.release(params.n)

    async def _added(self, call: OpenAICall, prompt: Any, params: Any, request_id: str, options: dict[str, Any]) -> Any:
        if self._adapters is not None and options.get("lora_request") is not None:
            options = {**options, "lora_request": await self._adapter(call, options["lora_request"].lora_name)}
        try:
            return await self._llm.add_request(request_id, prompt, params, **options)
        except OverflowError as error:  # a number that the engine's message cannot hold
            raise VLLMValidationError(str(error)) from None

    async def _adapter(self, call: OpenAICall, name: str) -> Any:
        """What vLLM is told of the adapter of this name, which is in its memory until the call ends.

        It is looked up anew: another one may have taken its place since the front end did.
        """
        assert self._adapters is not None
        hold = call.adapters.get(name)
        if hold is None:
            hold = call.keep(name, await _claim(self._adapters, name))
        return hold.request


class _Request:
    """One request in the engine: counts its tokens, and ends it when none comes for too long."""

    def __init__(self, llm: Any, request_id: str, queue: Any, meter: Meter, predict_timeout: float) -> None:
        self._llm, self._queue, self._meter, self._limit = llm, queue, meter, predict_timeout
        output_processor = llm.output_processor
        states = [output_processor.request_states[i] for i in output_processor.external_req_ids.get(request_id, ())]
        own = [state for state in states if state.queue is queue]  # ids are the clients', who may use one twice
        if not own and not _ended(queue.output):
            raise RuntimeError("vLLM's output processor does not know a request that it was given just now")
        self._processors = [state.logprobs_processor for state in own]
        meter.prompt_tokens += own[0].prompt_len if own else 0
        meter.started_requests += 1
        self._open = True
        self._last_at = time.monotonic()
        for processor in self._processors:
            processor.update_from_output = _StepCounter(self, processor, meter)
        self._timer = asyncio.get_running_loop().call_later(predict_timeout, self._check)

    def step(self) -> None:
        """The engine has made a token."""
        self._last_at = time.monotonic()

    def _check(self) -> None:
        idle = time.monotonic() - self._last_at
        if idle >= self._limit:
            self._queue.put(GenerationError(f"no token within predict_timeout ({self._limit:g} s)"))
        else:
            self._timer = asyncio.get_running_loop().call_later(self._limit - idle, self._check)

    def succeeded(self) -> None:
        """Its last output has come."""
        if self._open:
            self._meter.finished_requests += 1
            self._close()

    async def abandon(self) -> None:
        """Nobody waits for it any more."""
        if self._open:
            self._meter.aborted_requests += 1
            self._close()
            await self._abort()

    async def give_up(self) -> None:
        """It has failed."""
        if self._open:
            self._meter.failed_requests += 1
            self._close()
            await self._abort()

    def _close(self) -> None:
        self._open = False
        self._timer.cancel()
        for processor in self._processors:
            vars(processor).pop("update_from_output", None)  # it refers back to the processor
        self._processors.clear()

    async def _abort(self) -> None:
        if not self._llm.errored:
            await self._llm.abort(self._queue.request_id, internal=True)


def _ended(output: Any) -> bool:
    """Whether the output that waits for us says that a request has ended already."""
    return output is not None and (isinstance(output, Exception) or output.finished)


class _StepCounter:
    """Takes the place of a sequence's `update_from_output`, and counts its tokens."""

    __slots__ = ("_begun_at", "_last_at", "_meter", "_queued_at", "_request", "_update")

    def __init__(self, request: _Request, processor: Any, meter: Meter) -> None:
        self._request, self._update, self._meter = request, processor.update_from_output, meter
        self._begun_at = time.monotonic()
        self._last_at = 0.0
        self._queued_at: float | None = None

    def __call__(self, output: Any) -> None:
        count = len(output.new_token_ids)
        if output.events:
            self._read(output.events)
        if count:
            self._count(count)
        self._update(output)

    def _count(self, count: int) -> None:
        now, meter = time.monotonic(), self._meter
        meter.tokens += count
        if self._last_at:
            meter.inter_token.observe((now - self._last_at) / count)
        else:
            meter.time_to_first_token.observe(now - self._begun_at)
        self._last_at = now
        self._request.step()

    def _read(self, events: Any) -> None:
        for event in events:
            if event.type == EngineCoreEventType.QUEUED:
                self._queued_at = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED and self._queued_at is not None:
                self._meter.queue_time.observe(event.timestamp - self._queued_at)
                self._queued_at = None


async def _claim(adapters: VllmAdapters, name: str) -> Claim:
    try:
        return await adapters.claim(name)
    except UnknownAdapter as error:  # it was there when the front end looked
        raise VLLMNotFoundError(error.message) from None
    except Overloaded as error:
        raise GracefulHTTPError(error.message, HTTPStatus.SERVICE_UNAVAILABLE) from None
    except AdapterUnusable as error:
        raise VLLMValidationError(error.message, parameter="model") from None
    except EngineDead:
        raise EngineDeadError from None


def _take(call: OpenAICall, sequences: int) -> None:
    try:
        call.take(sequences)
    except InvalidRequest as error:
        raise VLLMValidationError(error.message, parameter="n") from None
    except Overloaded as error:
        raise GracefulHTTPError(error.message, HTTPStatus.SERVICE_UNAVAILABLE) from None
