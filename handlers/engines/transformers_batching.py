"""The seam with transformers' continuous batching: the one file that touches what transformers does not document.

Its `ContinuousBatchingManager` schedules, keeps the paged KV cache and runs the model, in a thread of its own. What it
lacks is done from a logits processor of ours, which it calls once a step with the logits of all requests that get a
token: there we choose the tokens, hand them over, and end requests. The manager is made to take our choice by raising
its logit above all others. Its own way of handing over results copies all tokens of a request at each of them; it is
left unused.

Written for transformers 5.19 to 5.23. What it relies on is checked by `check_seam` and when the manager is made, and by
tests/live/test_scheduler_engine.py:
- the manager asks `model._get_logits_processor` for its processors, and `logit_processor.tensors_required` says how
  many rows of arguments there are;
- without `use_async_batching`, `prepare_tensor_args` is called with the requests of a step, in the order of the rows
  of logits that the processor is then called with;
- a request ends once it has `RequestState._new_tokens_limit` tokens;
- `output_router` takes whatever a request ends with;
- `_generation_loop_body` calls `_generation_step`, and goes on after `batch_processor.handle_batch_error`;
- `batch_processor` has `scheduler.active_requests`, `scheduler.waiting_requests` and `cache`;
- the manager's thread is made by `start`, and so is a daemon where the thread that calls it is one.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from handlers.engines.protocol import EngineStartError, EngineStatus
from handlers.engines.transformers_memory import free_memory, out_of_memory
from handlers.engines.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

_WANTED_PARAMETERS: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
    (
        continuous_api.ContinuousMixin.init_continuous_batching,
        ("generation_config", "continuous_batching_config"),
    ),
    (
        continuous_api.ContinuousBatchingManager.add_request,
        ("input_ids", "request_id", "max_new_tokens", "streaming", "eos_token_id"),
    ),
    (continuous_api.ContinuousBatchingManager.cancel_request, ("request_id",)),
    (continuous_api.ContinuousBatchingManager.stop, ("block", "timeout", "hard_stop")),
    (ContinuousBatchingLogitsProcessor.prepare_tensor_args, ("requests_with_new_token",)),
    (ContinuousBatchingLogitsProcessor.__call__, ("scores", "tensor_arg")),
    (continuous_api.ContinuousBatchingManager._generation_loop_body, ("batch_processor", "bootstrapping")),
    (continuous_api.ContinuousBatchingManager._generation_step, ()),
    (continuous_api.ContinuousBatchProcessor.handle_batch_error, ("error",)),
    (continuous_api.OutputRouter.deliver, ("output",)),
    (continuous_api.OutputRouter.deliver_batch, ("outputs",)),
)
_WANTED_FIELDS = ("request_id", "_new_tokens_limit", "generated_tokens", "created_time", "lifespan", "position_offset")


NO_MEMORY = "memory ran out while the request was running"
"""What requests fail with that were in such a step."""


class Steps(Protocol):
    """What happens in the manager's thread; must not raise."""

    def on_step(self, requests: Sequence[Row], logits: Any) -> list[int | None]:
        """Choose a token for each request from its row of logits; None where the request has ended with it."""

    def on_failure(self, request_id: str, error: str) -> None:
        """The manager has given up on a request."""


class Row:
    """One request at one step."""

    __slots__ = ("_state",)

    def __init__(self, state: Any) -> None:
        self._state = state

    @property
    def request_id(self) -> str:
        """As it was given to `ContinuousBatching.add`."""
        name: str = self._state.request_id
        return name

    @property
    def queue_seconds(self) -> float:
        """How long it waited for its first step."""
        return float(self._state.lifespan[0] - self._state.created_time)

    def end(self) -> None:
        """Make the token of this step its last."""
        self._state._new_tokens_limit = len(self._state.generated_tokens) + 1


def check_seam() -> None:
    """Refuse to start on a transformers whose internals have moved.

    Raises:
        EngineStartError: naming what is missing.
    """
    for function, wanted in _WANTED_PARAMETERS:
        missing = [name for name in wanted if name not in inspect.signature(function).parameters]
        if missing:
            raise _moved(f"{function.__qualname__} has no parameter {', '.join(missing)}")
    missing = sorted(set(_WANTED_FIELDS) - {field.name for field in fields(RequestState)})
    if missing:
        raise _moved(f"RequestState has no field {', '.join(missing)}")


def _moved(what: str) -> EngineStartError:
    return EngineStartError(f"this transformers is not one that Slipway knows: {what}")


class _StepProcessor(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Called by the manager once a step, between the model and the choice of tokens."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - the base class declares it so
    ignored_kwargs = ()

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._rows: list[Row] = []
        self.stepped_at = time.monotonic()
        """When the last step began."""

    def fill_defaults(self, int32_tensor: Any) -> None:
        """We have no arguments; the manager keeps a row for them all the same."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Any:
        """Called before the model runs: who gets a token in this step."""
        self.stepped_at = time.monotonic()
        self._rows = [Row(request.state) for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: Any, tensor_arg: Any) -> Any:
        """Choose, and raise the chosen tokens' logits above all others.

        There are more rows than `_rows` where a part of a prompt was read and no token is due; those come last.
        """
        rows, self._rows = self._rows, []
        if not rows:
            return scores
        chosen = self._steps.on_step(rows, scores[: len(rows)])
        for row, token_id in zip(rows, chosen, strict=True):
            if token_id is None:
                row.end()
        ids = torch.tensor([token_id or 0 for token_id in chosen], device=scores.device)
        scores[torch.arange(len(rows), device=scores.device), ids] = math.inf
        return scores


class _FailureRouter(continuous_api.OutputRouter):  # type: ignore[misc]
    """Stands where the manager's results are handed over; ours have been already, so that only failures matter."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps

    def deliver(self, output: Any) -> None:
        if output.status == RequestStatus.FAILED:
            self._steps.on_failure(output.request_id, str(output.error))

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)


class ContinuousBatching:
    """A running manager. All methods may be called from any thread."""

    def __init__(self, model: TransformersModel, config: ContinuousBatchingConfig, steps: Steps) -> None:
        """Allocate the KV cache.

        Raises:
            EngineStartError: transformers is not one that we know, or cannot run the model so.
        """
        check_seam()
        _check_attention(model.model)
        self._processor = _StepProcessor(steps)
        self._manager = _make_manager(model.model, config, self._processor)
        self._manager.output_router = _FailureRouter(steps)
        self._between_steps: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.rounds = 0
        """How often the manager's thread has come by: before each step, and ten times a second while it has nothing to
        do."""
        _guard_loop(self._manager, model.device, self._between_steps, self._count_round)
        # Makes the cache here, where failing is reported, and not in the manager's thread.
        self._manager.warmup()
        self.capacity: int = infer_max_single_request_tokens(self._manager.batch_processor.cache)
        """Tokens that the KV cache holds of a single request."""
        self.cached_tokens: int = self._manager.batch_processor.cache.max_tokens_read
        """Tokens that it holds of all."""

    def _count_round(self) -> None:
        self.rounds += 1

    def start(self) -> None:
        """Start the manager's thread; to be called from a daemon thread, since the process shall not wait for it."""
        self._manager.start()

    def add(self, request_id: str, prompt_ids: Sequence[int], limit: int) -> bool:
        """Hand a request over; False if nothing is taken any more."""
        # The last token is ours to announce; one more keeps the manager from ending the request by itself.
        added = self._manager.add_request(
            list(prompt_ids), request_id=request_id, max_new_tokens=limit + 1, streaming=False, eos_token_id=-1
        )
        return added is not None

    def between_steps(self, work: Callable[[], None]) -> None:
        """Have the manager's thread do `work`, which must not raise, before its next step.

        The model has its own attention then, without the paged KV cache. No other thread may run it: transformers keeps
        arguments of a pass in the model's configuration.
        """
        self._between_steps.put(work)
        self._manager._wake_up_loop.set()

    def cancel(self, request_id: str) -> None:
        """Free what a request has, before the next step. Harmless where there is none such."""
        self._manager.cancel_request(request_id)

    @property
    def failure(self) -> str | None:
        """Why the manager takes nothing any more; None while it does."""
        status = self._manager.background_thread_status
        if status.fatal_error is not None:
            return f"{type(status.fatal_error).__name__}: {status.fatal_error}"
        if status.can_accept_new_requests() is not None or not self._manager.is_running():
            return "its thread has ended"
        return None

    def cause(self, seconds: float) -> str:
        """Why it has failed, once its thread has ended; the cause is known only then. Waits for at most `seconds`."""
        self._manager.join(time.perf_counter(), seconds)
        return self.failure or "its thread has ended"

    @property
    def stepped_at(self) -> float:
        """When the last step began (monotonic seconds)."""
        return self._processor.stepped_at

    def status(self) -> EngineStatus:
        """The scheduler's queues and the share of the KV cache that running requests have."""
        processor = self._manager.batch_processor
        if processor is None:
            return EngineStatus(0, 0, 0.0)
        scheduler = processor.scheduler
        active = list(scheduler.active_requests.values())
        waiting = len(scheduler.waiting_requests) + self._manager.input_queue.qsize()
        used = sum(state.position_offset for state in active) / max(self.cached_tokens, 1)
        return EngineStatus(len(active), waiting, min(used, 1.0))

    def held_requests(self) -> set[str]:
        """The requests that have blocks of the KV cache."""
        allocators = self._manager.batch_processor.cache.cache_allocators.values()
        return {name for allocator in allocators for name in list(allocator.block_table)}

    def stop(self, seconds: float) -> None:
        """End the thread, whatever runs; waits for the step in progress, for at most `seconds`."""
        self._manager.stop(block=True, timeout=seconds, hard_stop=True)


def _check_attention(model: Any) -> None:
    """A model with attention of its own would take no notice of the paged KV cache, and answer with nonsense."""
    if not model._can_set_attn_implementation():
        raise EngineStartError(
            f"transformers' continuous batching cannot run {type(model).__name__}: its attention is its own, and knows "
            "no paged KV cache; option.rolling_batch=disable runs it"
        )


class _NoMemory(Exception):
    """Stands for the exception of a step that ran out of memory, without the tensors in its traceback."""


@contextlib.contextmanager
def _own_attention(manager: Any) -> Iterator[None]:
    """The model's attention as it was before the manager changed it, for a pass without the paged KV cache."""
    model, own = manager.model, manager._original_attn_impl
    if own is None:
        yield
        return
    paged = model.config._attn_implementation
    model.set_attn_implementation(own)
    try:
        yield
    finally:
        model.set_attn_implementation(paged)


def _guard_loop(
    manager: Any, device: Any, between_steps: queue.SimpleQueue[Callable[[], None]], on_round: Callable[[], None]
) -> None:
    """Have our own work done between steps, and a step for which memory runs out end its own requests alone.

    `on_round` is told in the manager's thread that it is alive.
    """
    step, body = manager._generation_step, manager._generation_loop_body

    def guarded_step() -> None:
        try:
            step()
            return
        except Exception as error:
            if not out_of_memory(error):
                raise
            logger.warning("memory ran out in a step, its requests fail: %s", error)
        # Here the exception is gone, and with it the tensors that its traceback held.
        raise _NoMemory(NO_MEMORY)

    def guarded_body(batch_processor: Any, bootstrapping: bool) -> bool:
        on_round()
        with contextlib.suppress(queue.Empty):
            work = between_steps.get_nowait()
            with _own_attention(manager):
                work()
        scheduler = batch_processor.scheduler
        if not scheduler.active_requests:
            # It waits for a request to end after room was made; one that is cancelled does not count as ended.
            scheduler.block_new_requests = False
        try:
            go_on: bool = body(batch_processor, bootstrapping)
            return go_on
        except _NoMemory as error:
            free_memory(device)
            batch_processor.handle_batch_error(error)
            scheduler.block_new_requests = False
            return True

    manager._generation_step, manager._generation_loop_body = guarded_step, guarded_body


def _make_manager(model: Any, config: ContinuousBatchingConfig, processor: _StepProcessor) -> Any:
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
    model._get_logits_processor = lambda generation_config: LogitsProcessorList([processor])
    try:
        manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    finally:
        del model._get_logits_processor
    wanted = (
        *("logit_processor", "output_router", "batch_processor", "input_queue", "background_thread_status"),
        *("_wake_up_loop", "_generation_loop_body", "_generation_step", "_original_attn_impl"),
    )
    missing = [name for name in wanted if not hasattr(manager, name)]
    if missing:
        raise _moved(f"ContinuousBatchingManager has no {', '.join(missing)}")
    if list(manager.logit_processor.logits_processor) != [processor]:
        raise _moved("it does not take our logits processor")
    manager.logit_processor.tensors_required = 1
    return manager
