"""The engine as vLLM's serving classes see it: vLLM's own `AsyncLLM`, under the rules that apply to every contract.

Requests of the serving classes are ordinary requests of `AsyncLLM`. They run alongside the requests of
`engines.vllm.engine`, take places in the same queue, count in the same statistics, and fail after the same wait for a
token.

`AsyncLLM.add_request` returns a request's queue. From then on, vLLM keeps one state for each unfinished sequence of the
request. Each of these states refers to the request's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError, VLLMNotFoundError, VLLMValidationError
from vllm.outputs import STREAM_FINISHED, CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams

from engines.errors import (
    AdapterUnusable,
    DeadlineExceeded,
    EngineDead,
    EngineFault,
    GenerationFailed,
    InvalidParameter,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    UnknownAdapter,
)
from engines.interface import ExplainedRequest, give_turn
from engines.request import DEADLINE
from engines.statistics import EngineStatistics
from engines.vllm.async_llm import (
    EngineDeadError,
    abort,
    request_states,
    seconds_in_engine,
    seconds_in_queue,
    sequence_ids,
)
from engines.vllm.constraints.translator import CheckedConstraint, no_token_left
from engines.vllm.engine import VllmEngine
from engines.vllm.explanation import shown_parameters
from engines.vllm.parsers.classes import constrained_text, tells_end_of_reasoning
from handlers.explanation import ExplainedPrompt
from handlers.model_config import ModelConfig
from handlers.openai.current_call import BeamSteps, OpenAICall, current_call
from handlers.openai.vllm.parameter_checks import TRANSFERS, check_id, check_parameters, check_prompt_logprobs

CheckAnswer = Callable[[Any], None]  # The argument is the state of a sequence that has ended.
# Options that vLLM's serving classes pass only for chats. The answer to a chat is constrained after its reasoning has
# ended, or from the first token if vLLM cannot detect that end. Other answers have no reasoning, and are constrained
# from the first token.
_OF_CHATS = frozenset({"reasoning_ended", "reasoning_parser_kwargs"})


class EngineClient:
    """The engine for vLLM's serving classes. All other attributes are those of `AsyncLLM`."""

    def __init__(self, engine: VllmEngine, config: ModelConfig) -> None:
        self._engine, self._config = engine, config
        self._llm = engine.async_llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    @property
    def errored(self) -> bool:
        """See `AsyncLLM.errored`. False while calls wait for an engine that is being restarted."""
        return self._llm.errored and not self._engine.waits

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a call if the queue has no room for it. This happens before the call's prompt is rendered.

        Raises the same errors as `generate`.
        """
        call = current_call.get()
        if call.only_counts:  # vLLM's `count_tokens` also calls this
            return
        with _vllms_errors():
            call.take(n)
        call.release(n)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """See `AsyncLLM.generate`.

        This is not a coroutine, so that a call is refused before its reply has begun.

        Raises:
            VLLMValidationError: The parameters would harm the engine, the prompt is too long, or there are too many
                sequences.
            GracefulHTTPError: The queue has no room. The status is 503.
        """
        check_id(request_id, options)
        call = current_call.get()
        if call.steps is not None:
            return self._generate(call, _submitted(call, prompt), sampling_params, request_id, options, places=0)
        with _vllms_errors():
            check_parameters(sampling_params, self._engine.sampling, self._engine.tokenizer)
            sampling_params.extra_args = self._read_args(sampling_params.extra_args)
            self._check_length(prompt)
            check_prompt_logprobs(sampling_params, len(prompt.get("prompt_token_ids") or ()))
            call.take(sampling_params.n)
        if call.explained is not None:
            return self._explained(call, prompt, sampling_params, options)
        places = sampling_params.n
        return self._generate(call, _submitted(call, prompt), sampling_params, request_id, options, places=places)

    def _read_args(self, args: dict[str, Any] | None) -> dict[str, Any] | None:
        """Remove the arguments for connectors that the engine does not have.

        Otherwise, vLLM's usage and metrics would show token counts that a client can invent in these arguments.
        """
        config = self._llm.vllm_config
        connectors = (config.kv_transfer_config, config.ec_transfer_config)
        absent = {name for name, connector in zip(TRANSFERS, connectors, strict=True) if connector is None}
        return {name: value for name, value in (args or {}).items() if name not in absent} or None

    def searching(self, beam_search: Callable[..., AsyncGenerator[Any, None]]) -> Any:
        """Wrap vLLM's `beam_search`, so that a search counts as one prompt, and takes a place for each of its beams.

        The steps of the search take no further places, and do not count as prompts.
        """

        def search(prompt: Any, request_id: str, params: Any, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
            call = current_call.get()
            with _vllms_errors():
                self._check_length(prompt)
                call.take(params.beam_width)
            if call.explained is not None:
                return self._explained(call, prompt, params, options)
            return self._search(
                call, params.beam_width, prompt, beam_search(prompt, request_id, params, *args, **options)
            )

        return search

    async def _search(
        self, call: OpenAICall, width: int, prompt: Any, found: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        statistics = self._engine.statistics
        call.steps = call.steps or BeamSteps(statistics)
        call.steps.begin(len((prompt.get("decoder_prompt") or prompt).get("prompt_token_ids", ())))
        try:
            async for output in found:
                _cut(call, output)
                yield output
            statistics.finished_requests += width
        except (asyncio.CancelledError, GeneratorExit):
            statistics.aborted_requests += width
            raise
        except Exception as error:
            if not isinstance(error, VLLMClientError):
                statistics.failed_requests += width
            raise _failure(error) from None
        finally:
            call.steps.end()
            call.release(width)

    def encode(self, prompt: Any, pooling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """See `AsyncLLM.encode`.

        This is not a coroutine, so that a call is refused before anything was submitted.

        Raises:
            VLLMValidationError: The prompt is too long, or the call has too many prompts.
            GracefulHTTPError: The queue has no room. The status is 503.
        """
        check_id(request_id, options)
        call = current_call.get()
        with _vllms_errors():
            self._check_length(prompt)
            call.take(1)
        if call.explained is not None:
            return self._explained(call, prompt, pooling_params, options)
        return self._encode(call, _submitted(call, prompt), pooling_params, request_id, options)

    async def _encode(
        self, call: OpenAICall, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        statistics, limit, began = self._engine.statistics, self._config.predict_timeout, time.monotonic()
        queue: Any = None
        timer: asyncio.TimerHandle | None = None
        has_ended = False
        try:
            queue = await self._added(call, prompt, params, request_id, options)
            states = _states(self._llm, request_id, queue)
            statistics.prompt(len(prompt["prompt_token_ids"]))
            late = GenerationError(f"no answer within predict_timeout ({limit:g} s)")
            timer = asyncio.get_running_loop().call_later(limit, queue.put, late)
            output = queue.get_nowait() or await queue.get()
            has_ended = True
            statistics.pooled(time.monotonic() - began, sum(map(seconds_in_queue, states)))
            yield output
        except (asyncio.CancelledError, GeneratorExit):
            if queue is not None and not has_ended:
                statistics.aborted_requests += 1
                await abort(self._llm, [queue.request_id])
            raise
        except Exception as error:
            failure = _failure(error)
            if queue is not None:
                statistics.failed_requests += 1
                call.failed = str(failure)
                await abort(self._llm, [queue.request_id])
            raise failure from None
        finally:
            if timer is not None:
                timer.cancel()
            call.release(1)

    def _check_length(self, prompt: Any) -> None:
        most = self._config.max_prompt_tokens
        if most is not None and (tokens := len(prompt.get("prompt_token_ids", ()))) > most:  # Audio has no ids.
            raise VLLMValidationError(PromptTooLong(tokens, most).message, parameter="input_tokens", value=tokens)

    def _explained(
        self, call: OpenAICall, prompt: Any, params: Any, options: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Return a generator that yields nothing, for the front end to read in place of an answer.

        The generator ends with CancelledError. The front end calls this method for all prompts of a call before it
        reads the first generator. So the first generator that runs explains all prompts, and the others wait for it.
        """
        call.asked.append((_submitted(call, prompt), params, options))
        return self._explain(call)

    async def _explain(self, call: OpenAICall) -> AsyncGenerator[Any, None]:
        assert call.explained is not None
        asked, call.asked = call.asked, []
        if asked:
            prompts = []
            for place, one in enumerate(asked[:1] if call.explains_one else asked):
                await give_turn(place)
                prompts.append(await self._explained_prompt(call, *one))
            if not call.explained.done():
                call.explained.set_result(prompts)
        else:  # If this generator ended first, the front end would cancel the generator that explains.
            await asyncio.wait({call.explained})
        raise asyncio.CancelledError  # Only this error ends the application's work on the call.
        yield  # Makes this function a generator.

    async def _explained_prompt(
        self, call: OpenAICall, prompt: Any, params: Any, options: Mapping[str, Any]
    ) -> ExplainedPrompt:
        with _vllms_errors():
            await self._engine.wait_until_ready()
        inner, adapter = prompt.get("decoder_prompt") or prompt, options.get("lora_request")
        token_ids = inner.get("prompt_token_ids") or ()
        if isinstance(params, BeamSearchParams):
            salt = prompt.get("cache_salt")
            found = ExplainedRequest(token_ids=list(token_ids), parameters=shown_parameters(params), cache_salt=salt)
        else:
            constraint = None
            if getattr(params, "structured_outputs", None) is not None:
                constraint = await self._constrained(call, params)
            found = self._engine.explain_prompt(prompt, params, constraint, adapter)
        return ExplainedPrompt(
            inner.get("prompt"),
            found,
            adapter and adapter.lora_name,
            options.get("priority", 0),
            call.deadline,
            call.streams,
        )

    async def _generate(
        self, call: OpenAICall, prompt: Any, params: Any, request_id: str, options: dict[str, Any], *, places: int
    ) -> AsyncGenerator[Any, None]:
        request: _Request | None = None
        statistics = self._engine.statistics if call.steps is None else call.steps.of_step()
        try:
            preparing = self._prepared(call, prompt, params, request_id, options)
            queue, check_answer = await (preparing if call.deadline is None else call.deadline.limit(preparing))
            self._engine.statistics.partial_requests += check_answer is not None
            request = _Request(self._llm, queue, statistics, self._config.predict_timeout, check_answer)
            request.watch(request_id)
            call.add(request)
            finished = False
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                if finished:
                    if call.steps is None:
                        _cut(call, output)
                    _check_end(output, params)
                    request.succeeded()
                if not call.begun:
                    call.begin()
                if output is not STREAM_FINISHED:
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            if request is not None:
                await request.give_up(failed=False)
            raise
        except Exception as error:
            if isinstance(error, DeadlineExceeded):  # the engine has not received the request
                call.end_at_deadline(error)
                if call.failed:
                    raise asyncio.CancelledError from None  # As in `_explain`. The client already has its error.
                output = _nothing(request_id, prompt, params)
                if call.steps is None:
                    _cut(call, output)
                yield output
                return
            failure = _failure(error)
            if request is not None:
                if not isinstance(error, VLLMClientError):
                    call.failed = str(failure)
                await request.give_up(failed=True)
            raise failure from None
        finally:
            if request is not None:
                call.open.discard(request)
            call.release(places)

    async def _prepared(
        self, call: OpenAICall, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
    ) -> tuple[Any, CheckAnswer | None]:
        """Pass a request to the engine. Return the request's queue, and the function that checks its answer."""
        check_answer: CheckAnswer | None = None
        if params.structured_outputs is not None:
            constraint = await self._constrained(call, params)
            if not (options.keys() & _OF_CHATS and tells_end_of_reasoning(self._llm.vllm_config)):
                options = {**options, "reasoning_ended": True}
            if constraint.not_held:
                check_answer = partial(self._check_answer, constraint, options)
        return await self._added(call, prompt, params, request_id, options), check_answer

    async def _constrained(self, call: OpenAICall, params: Any) -> CheckedConstraint:
        """Return the constraint of a request.

        In vLLM's parameters, replace the constraint with the form that the engine enforces.
        """
        outputs = params.structured_outputs
        with _vllms_errors():
            parts = call.form.parts(outputs.json)
            constraint = await self._engine.constraints.checked(call.form.name, outputs, params, parts)
        params.structured_outputs = constraint.outputs
        if constraint.not_held:
            call.on_not_held(constraint.not_held)
        return constraint

    def _check_answer(self, constraint: CheckedConstraint, options: Mapping[str, Any], state: Any) -> None:
        answer = constrained_text(self._llm.vllm_config, self._engine.tokenizer, state, options)
        self._engine.constraints.check_answer(constraint, self._engine.statistics, answer)

    async def _added(self, call: OpenAICall, prompt: Any, params: Any, request_id: str, options: dict[str, Any]) -> Any:
        """Pass a request to the engine. Return the request's queue."""
        with _vllms_errors():
            await self._engine.wait_until_ready()
            if self._engine.adapters is not None and options.get("lora_request") is not None:
                options = {**options, "lora_request": await self._adapter(call, options["lora_request"].lora_name)}
        known = {*sequence_ids(self._llm, request_id)}  # clients choose ids, and may use one twice
        try:
            queue = await self._llm.add_request(request_id, prompt, params, **options)
        except BaseException as error:
            # vLLM registers a request before sending it to the engine, and leaves it registered if the sending fails.
            registered = [sequence for sequence in sequence_ids(self._llm, request_id) if sequence not in known]
            await abort(self._llm, registered)
            if isinstance(error, OverflowError):  # A number is too large for the message to the engine.
                raise VLLMValidationError(str(error)) from None
            raise
        self._engine.sent_media.engine_got(prompt)
        return queue

    async def _adapter(self, call: OpenAICall, name: str) -> Any:
        """Return vLLM's request for the adapter of this name. The adapter stays in vLLM's memory until the call ends.

        The adapter is looked up again, because another adapter may have replaced it since the front end's look-up.
        """
        assert self._engine.adapters is not None
        claim = call.adapters.get(name) or call.keep(name, await self._engine.claim(name))
        return claim.request


def _submitted(call: OpenAICall, prompt: Any) -> Any:
    """Add the call's salt to a prompt, and release the memory of the prompt's source media."""
    call.submitted = True
    if "encoder_prompt" in prompt:  # An audio clip.
        # Further clips of the file may follow, so the memory is not released. vLLM caches no clips: no salt is needed.
        return prompt
    if call.media is not None:
        call.media.release()
    if call.cache_salt and not prompt.get("cache_salt"):
        return {**prompt, "cache_salt": call.cache_salt}
    return prompt


def _states(llm: Any, request_id: str, queue: Any) -> list[Any]:
    """Return the states of the unfinished sequences of the request with this queue."""
    known = request_states(llm)
    states: list[Any] = [known[sequence] for sequence in sequence_ids(llm, request_id)]
    return [state for state in states if state.queue is queue]  # clients choose ids, and may use one twice


class _Request:
    """One request in the engine. Counts the request's tokens, and ends the request if no token comes for too long."""

    def __init__(
        self,
        llm: Any,
        queue: Any,
        statistics: EngineStatistics,
        predict_timeout: float,
        check_answer: CheckAnswer | None,
    ) -> None:
        self._llm, self._queue, self._statistics, self._limit = llm, queue, statistics, predict_timeout
        self._check_answer = check_answer
        self._ending: asyncio.Task[None] | None = None  # The task that aborts the request at the deadline.
        self._states: list[Any] = []  # The states of the request's sequences.
        self._began = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(predict_timeout, self._check)
        self._open = True

    def watch(self, request_id: str) -> None:
        """Find the request's sequences.

        Raises:
            RuntimeError: vLLM does not keep the sequences where they are expected.
        """
        own = _states(self._llm, request_id, self._queue)
        output = self._queue.output
        has_ended = output is not None and (isinstance(output, Exception) or output.finished)
        if not own and not has_ended:
            raise RuntimeError("vLLM's output processor does not know a request that it was given just now")
        self._statistics.prompt(own[0].prompt_len if own else 0)
        for state in own:
            state.statistics = self._statistics
        self._states = own

    @property
    def begun(self) -> bool:
        return any(state.stats.num_generation_tokens for state in self._states)

    def end_at_deadline(self) -> None:
        if self._open:
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        try:
            await abort(self._llm, [self._queue.request_id])
        except Exception as error:
            self._queue.put(error)  # This ends the call.

    def _check(self) -> None:
        idle = time.monotonic() - max([self._began, *(state.stats.last_token_ts for state in self._states)])
        if idle >= self._limit:
            self._queue.put(GenerationError(f"no token within predict_timeout ({self._limit:g} s)"))
        else:
            self._timer = asyncio.get_running_loop().call_later(self._limit - idle, self._check)

    def succeeded(self) -> None:
        if self._open:
            self._statistics.finished_requests += 1
            for state in self._states:
                self._statistics.ended(state.stats.num_generation_tokens, seconds_in_engine(state))
                if self._check_answer is not None:
                    self._check_answer(state)
            self._close()

    async def give_up(self, *, failed: bool) -> None:
        """Abort the request, unless it has ended. `failed` is False if the caller no longer waits for the request."""
        if self._open:
            if failed:
                self._statistics.failed_requests += 1
            else:
                self._statistics.aborted_requests += 1
            self._close()
            await abort(self._llm, [self._queue.request_id])

    def _close(self) -> None:
        self._open = False
        self._timer.cancel()


def _check_end(output: Any, params: Any) -> None:
    """Raise an error if the engine has ended a request with an error.

    Raises:
        VLLMValidationError: The request's parameters forbid every token.
        GenerationError: The engine failed for another reason.
    """
    if output is STREAM_FINISHED or all(sequence.finish_reason != "error" for sequence in output.outputs):
        return
    if params.structured_outputs is not None and (error := no_token_left(params)) is not None:
        raise VLLMValidationError(error.message, parameter=error.parameter)
    raise GenerationError(EngineFault().message)


def _cut(call: OpenAICall, output: Any) -> None:
    """Set the finish reason `length` for the sequences that were aborted at the call's deadline."""
    if not call.deadline_passed or output is STREAM_FINISHED:
        return
    aborted = [sequence for sequence in output.outputs if sequence.finish_reason == "abort"]
    for sequence in aborted:
        sequence.finish_reason, sequence.stop_reason = "length", DEADLINE
        sequence.text = sequence.text or _NO_TEXT
    if aborted:
        call.reach_deadline()
    if aborted and output.prompt_logprobs is not None:  # vLLM's front end expects one item for each prompt token
        output.prompt_logprobs += [None] * (len(output.prompt_token_ids) - len(output.prompt_logprobs))


class _NoText(str):
    """The empty text of a sequence that has ended without a token.

    The text is truthy, because vLLM's streams leave out a chunk whose text is falsy, and would lose the finish reason.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        return True


_NO_TEXT = _NoText()


def _nothing(request_id: str, prompt: Any, params: Any) -> RequestOutput:
    """Return the aborted output of a request that the engine has not received. This output ends vLLM's beam search."""
    logprobs: Any = None if params.logprobs is None else []
    nothing = [CompletionOutput(index, "", [], None, logprobs, finish_reason="abort") for index in range(params.n)]
    inner = prompt.get("decoder_prompt") or prompt
    prompt_logprobs: Any = None if params.prompt_logprobs is None else []
    ids = list(inner.get("prompt_token_ids") or ())
    return RequestOutput(request_id, inner.get("prompt"), ids, prompt_logprobs, nothing, finished=True)


def _failure(error: Exception) -> Exception:
    """Return the error for vLLM's front end."""
    if isinstance(error, EngineDeadError):
        # vLLM's message for a dead engine mentions a stack trace, and vLLM logs a trace for each request.
        error = GenerationError(EngineDead().message)
    return error


@contextlib.contextmanager
def _vllms_errors() -> Iterator[None]:
    """Raise Slipway's errors as errors that vLLM's front end can answer."""
    try:
        yield
    except UnknownAdapter as error:  # The adapter was removed after the front end had found it.
        raise VLLMNotFoundError(error.message) from None
    except AdapterUnusable as error:
        raise VLLMValidationError(error.message, parameter="model") from None
    except InvalidParameter as error:
        raise VLLMValidationError(error.message, parameter=error.parameter) from None
    except InvalidRequest as error:  # from `OpenAICall.take`
        raise VLLMValidationError(error.message, parameter="n") from None
    except Overloaded as error:
        raise GracefulHTTPError(error.message, HTTPStatus.SERVICE_UNAVAILABLE) from None
    except (EngineDead, GenerationFailed) as error:
        raise GenerationError(error.message) from None
