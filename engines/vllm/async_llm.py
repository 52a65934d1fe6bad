"""Access to vLLM's front end `AsyncLLM`: to its loop that handles the engine's messages, and to its sequences."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm import envs
from vllm.exceptions import GenerationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.loggers import PrometheusStatLogger

from engines.loaded_model import RunningSequence
from engines.statistics import EngineStatistics
from engines.vllm.metrics import public_name
from engines.vllm.output_processor import LeanOutputProcessor


def begin_output(
    llm: AsyncLLM, client: EngineCoreClient, reports: PrometheusStatLogger, statistics: EngineStatistics
) -> None:
    """Begin to handle the messages of the copies.

    Args:
        client: The client of all copies, which replaces vLLM's client.
        reports: The logger of statistics, which replaces vLLM's loggers.
        statistics: Counts the tokens.
    """
    # The output loop reads this variable for each output. Without this line, vLLM looks the variable up in the
    # environment each time. vLLM 0.33 reads the variable once a step, so this line can then be removed.
    envs.VLLM_COMPUTE_NANS_IN_LOGITS = envs.VLLM_COMPUTE_NANS_IN_LOGITS
    llm.logger_manager = reports
    llm.output_processor.__class__ = LeanOutputProcessor
    llm.output_processor.client = llm.engine_core = client
    llm.output_processor.statistics = statistics
    run_output(llm)


def run_output(llm: AsyncLLM) -> None:
    """Start vLLM's loop that handles the messages of the copies."""
    llm.output_handler = None
    llm._run_output_handler()


def output_has_failed(llm: AsyncLLM) -> bool:
    """Return True if vLLM's loop that handles messages has failed."""
    return llm.output_handler is not None and llm.output_handler.done()


async def end_output(llm: AsyncLLM) -> None:
    """Stop handling messages. Otherwise the loop would log the engine's end as a crash."""
    if (loop := llm.output_handler) is not None:
        loop.cancel()
        await asyncio.wait([loop])


def stat_loggers(llm: AsyncLLM) -> Sequence[Any]:
    """Return vLLM's loggers of statistics."""
    loggers: Sequence[Any] = llm.logger_manager.stat_loggers
    return loggers


def keep_eos_token_id(llm: AsyncLLM) -> None:
    """Cache the id of the end token. Otherwise the tokenizer searches its whole vocabulary for each request."""
    eos_token_id = llm.renderer.get_eos_token_id()
    llm.renderer.get_eos_token_id = lambda: eos_token_id


def request_states(llm: AsyncLLM) -> dict[str, RequestState]:
    """Return the engine's sequences by their ids, including sequences of vLLM's front end."""
    states: dict[str, RequestState] = llm.output_processor.request_states
    return states


def request_ids(llm: AsyncLLM) -> Collection[str]:
    """Return the ids of the engine's requests, as their callers gave them."""
    ids: Collection[str] = llm.output_processor.external_req_ids
    return ids


def sequence_ids(llm: AsyncLLM, request_id: str) -> Sequence[str]:
    """Return the ids of a request's sequences that have not ended."""
    ids: Sequence[str] = llm.output_processor.external_req_ids.get(request_id, ())
    return ids


def seconds_in_queue(state: RequestState) -> float:
    """Return the seconds between a sequence's arrival in the engine and its first step."""
    assert state.stats is not None  # Slipway and `AsyncLLM` create all states with `log_stats`.
    seconds: float = state.stats.scheduled_ts - state.stats.queued_ts
    return max(seconds, 0.0)


def seconds_in_engine(state: RequestState) -> float:
    """Return the seconds between a sequence's first step and its last token."""
    assert state.stats is not None
    seconds: float = state.stats.last_token_ts - state.stats.scheduled_ts
    return max(seconds, 0.0)


_CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")  # vLLM's names.


def running_sequence(state: RequestState, copy: int | None) -> RunningSequence:
    """Return the description of a sequence. `copy` is the number of the copy that has the sequence."""
    stats, request = state.stats, getattr(state, "core_request", None)
    assert stats is not None
    outputs = getattr(getattr(request, "sampling_params", None), "structured_outputs", None)
    return RunningSequence(
        request_id=state.external_req_id or "",
        seconds=time.time() - stats.arrival_time,
        quiet_seconds=time.monotonic() - stats.last_token_ts if stats.last_token_ts else None,
        prompt_tokens=state.prompt_len,
        tokens=stats.num_generation_tokens,
        adapter=public_name(state.lora_request.lora_name) if state.lora_request is not None else None,
        constraint=next((name for name in _CONSTRAINTS if getattr(outputs, name, None)), None),
        copy=copy,
    )


def register(llm: AsyncLLM, state: RequestState) -> None:
    """Register a sequence. Call this before the engine gets the request, so that no output arrives earlier."""
    llm.output_processor.request_states[state.request_id] = state
    llm.output_processor.external_req_ids[state.external_req_id].append(state.request_id)


async def abort(llm: AsyncLLM, ids: Iterable[str], *, internal: bool = True) -> None:
    """End sequences. If the engine has died, the sequences are only removed from the front end.

    Args:
        ids: The ids of the sequences or of their requests.
        internal: Whether `ids` are ids of sequences.
    """
    with contextlib.suppress(EngineDeadError):
        await llm.abort(ids, internal=internal)


def fail(state: RequestState, message: str) -> None:
    """Give an error to a sequence of vLLM's front end."""
    state.queue.put(GenerationError(message))


def fail_all(llm: AsyncLLM, message: str) -> None:
    """Give an error to each sequence of the engine."""
    OutputProcessor.propagate_error(llm.output_processor, GenerationError(message))


def forget_tokenizers() -> None:
    """Clear vLLM's caches, which keep the tokenizers of unloaded models."""
    from vllm.tokenizers import registry as tokenizer_registry
    from vllm.transformers_utils import processor
    from vllm.utils import func_utils

    tokenizer_registry.cached_get_tokenizer.cache_clear()
    processor.cached_get_processor.cache_clear()
    func_utils._supports_kw.cache_clear()
