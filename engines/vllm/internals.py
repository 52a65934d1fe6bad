"""vLLM's private names, and every patch of vLLM's engine.

No other module of Slipway imports from `vllm.v1`, reads a name of vLLM that begins with an underscore, or replaces a
function or a method of vLLM. These modules are exceptions:

- `sampling` implements the interface of logits processors, which vLLM documents.
- `parsers` has subclasses of vLLM's parsers.
- `handlers.openai.media_connector` has subclasses of vLLM's loaders of media.
- `handlers.openai.vllm_app` has the names of vLLM's HTTP front end.

The names belong to the release `engines.vllm.RELEASE`. The import of this module fails if a class or a function has
moved. `check_names` fails at the start of an engine if an attribute has moved. tests/live/test_vllm_internals.py and
the other tests named `*_internals.py` hold the meaning of the names.

This module is imported in the server and in all processes of vLLM. The fork server has imported vLLM's modules by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
import os
import struct
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from vllm import envs
from vllm.config import CacheConfig, ParallelConfig, VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GenerationError
from vllm.model_executor.models import registry
from vllm.multimodal.cache.base import MultiModalProcessorCacheItemMetadata
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.multimodal.media import MediaConnector
from vllm.renderers import chat_utils
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils import cpu_resource_utils
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    coordinator,
)
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources, EngineCoreClient
from vllm.v1.engine.detokenizer import (
    FastIncrementalDetokenizer,
    IncrementalDetokenizer,
    SlowIncrementalDetokenizer,
    uses_fast_detokenizer,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.executor import Executor, multiproc_executor, uniproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.pool.late_interaction import LATE_INTERACTION_MODE_SCORE_DOC
from vllm.v1.serial_utils import MsgpackDecoder
from vllm.v1.structured_output import StructuredOutputManager, backend_guidance

from engines.interface import EngineStartError
from engines.statistics import EngineStatistics
from engines.vllm import RELEASE

__all__ = [
    "AsyncLLM",
    "AsyncMPClient",
    "EngineCoreClient",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreRequest",
    "EngineDeadError",
    "FastIncrementalDetokenizer",
    "FinishReason",
    "GenerationError",
    "IncrementalDetokenizer",
    "LruKeyReplicatedSenderCache",
    "ParentRequest",
    "PrometheusStatLogger",
    "RequestState",
    "SchedulerStats",
    "SlowIncrementalDetokenizer",
    "TokenTaker",
    "TriedOutputs",
    "uses_fast_detokenizer",
]

METRICS_PARTS = ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls")
"""The attributes of `PrometheusStatLogger` with further classes that make metrics."""

_NAMES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (AsyncLLM, ("_run_output_handler", "abort", "add_lora", "errored", "from_vllm_config", "remove_lora", "shutdown")),
    (AsyncEngineArgs, ("_api_process_count", "_resolve_device_ids", "device_ids")),
    (ParallelConfig, ("_api_process_count", "assigned_physical_gpu_ids")),
    (CacheConfig, ("num_gpu_blocks",)),
    (EngineCoreClient, ("make_async_mp_client",)),
    (AsyncMPClient, ("_ensure_output_queue_task", "_send_input_message", "ensure_alive")),
    (AsyncMPClient, ("abort_requests_async", "add_request_async", "dp_engines_running", "get_kv_event_sources")),
    (AsyncMPClient, ("add_lora_async", "call_utility_all_async", "call_utility_async", "get_output_async", "shutdown")),
    (BackgroundResources, ("engine_dead", "engine_manager", "output_queue_task")),
    (EngineCoreOutputs, ("engine_index", "outputs")),
    (OutputProcessor, ("_update_stats_from_output", "abort_requests", "propagate_error", "process_outputs")),
    (ParentRequest, ("n", "observe_num_generation_tokens")),
    (RequestState, ("make_request_output",)),
    (MsgpackDecoder, ("_decode_tensor",)),
    (LogprobsProcessor, ("_correct_decoded_token", "update_from_output")),
    (FastIncrementalDetokenizer, ("decode_next", "get_next_output_text", "update")),
    (SlowIncrementalDetokenizer, ("decode_next", "get_next_output_text", "update")),
    (MultiprocExecutor, ("_ensure_worker_termination",)),
    (multiproc_executor, ("get_mp_context", "get_file_store_init_method")),
    (uniproc_executor, ("get_file_store_init_method",)),
    (engine_utils, ("get_mp_context",)),
    (coordinator, ("get_mp_context",)),
    (registry, ("_run_in_subprocess",)),
    (chat_utils, ("_resolve_items",)),
    (AsyncMultiModalItemTracker, ("resolve_items",)),
    (LruKeyReplicatedSenderCache, ("cache_if_fits", "get_and_update_item")),
    (MediaConnector, ("_assert_url_in_allowed_media_domains", "load_from_url", "load_from_url_async")),
    (StructuredOutputManager, ("_create_grammar",)),
    (backend_guidance, ("validate_guidance_grammar",)),
    (shm_broadcast, ("sched_yield",)),
    (cpu_resource_utils, ("DEVICE_CONTROL_ENV_VAR", "get_visible_memory_node")),
    (cpu_resource_utils, ("get_allowed_cpu_list", "get_cgroup_memory_usage")),
    (PrometheusStatLogger, ("_counter_cls", "_gauge_cls", "_histogram_cls", "record", *METRICS_PARTS)),
    (PrometheusStatLogger, ("log_engine_initialized",)),
)
"""The attributes that Slipway reads, replaces or overrides. The live tests have those of instances."""


def check_names() -> None:
    """Look for vLLM's private attributes.

    Raises:
        EngineStartError: This vLLM lacks one.
    """
    for owner, names in _NAMES:
        for name in names:
            if not hasattr(owner, name):
                place = f"{owner.__name__}.{name}"
                raise EngineStartError(f"this vLLM {RELEASE} is not one that Slipway knows: it has no {place}")


# The state of an engine's client, in the server's process.


class SentLogprobs:
    """The log probabilities of one output, as the engine sent them.

    They are three arrays. A common token shows one number of them, and needs no array.
    """

    __slots__ = ("_buffers", "_parts")

    def __init__(self, parts: Sequence[Any], buffers: Sequence[Any]) -> None:
        """Keep the parts.

        Args:
            parts: The fields of `LogprobsLists`. An array has its data type, its shape, and its data or their index.
            buffers: The data of large arrays.
        """
        self._parts, self._buffers = parts, buffers

    def chosen(self) -> float:
        """Return the log probability of the first chosen token."""
        dtype, _, data = self._parts[1]
        if dtype == "<f4" and not isinstance(data, int):
            number: float = _FLOAT32.unpack_from(data)[0]
            return number
        return float(self.arrays().logprobs[0, 0])

    def arrays(self) -> LogprobsLists:
        """Return vLLM's own object."""
        ids, logprobs, ranks, *rest = self._parts
        arrays = [_array(part, self._buffers) for part in (ids, logprobs, ranks)]
        return LogprobsLists(*arrays, *rest)


_FLOAT32 = struct.Struct("<f")


class SentNumbers:
    """The numbers of a pooled prompt, as the engine sent them: a data type, a shape, and the data."""

    __slots__ = ("_buffers", "_decoder", "_part")

    def __init__(self, part: Sequence[Any], decoder: MsgpackDecoder) -> None:
        """Keep the parts. Of large data the engine sends the index of a frame."""
        self._part, self._decoder, self._buffers = part, decoder, decoder.aux_buffers

    def array(self) -> np.ndarray:
        """Return an array of float32."""
        if self._part[0] != "float32":
            converted: np.ndarray = self.tensor().float().numpy()
            return converted
        array = _array(self._part, self._buffers)
        return array if array.flags.aligned else array.copy()  # The data may have any address.

    def tensor(self) -> torch.Tensor:
        """Return vLLM's own object."""
        self._decoder.aux_buffers = self._buffers
        try:
            return self._decoder._decode_tensor(self._part)
        finally:
            self._decoder.aux_buffers = ()


def _array(part: Sequence[Any], buffers: Sequence[Any]) -> np.ndarray:
    """Return an array of a message. Small data are in the message, and large data are one of its frames."""
    dtype, shape, data = part
    return np.ndarray(shape, dtype, buffers[data] if isinstance(data, int) else data)


class SentOutput(EngineCoreOutput, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]
    """An output as the engine sent it."""

    new_logprobs: SentLogprobs | None = None
    pooling_output: SentNumbers | None = None


class SentOutputs(EngineCoreOutputs, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]
    """The outputs of one step, as the engine sent them."""

    outputs: list[SentOutput] = msgspec.field(default_factory=list)


class LeanDecoder(MsgpackDecoder):
    """vLLM's decoder of engine messages. It keeps log probabilities and pooled numbers as they were sent."""

    def dec_hook(self, t: type, obj: Any) -> Any:
        if t is SentLogprobs:
            return SentLogprobs(obj, self.aux_buffers)
        if t is SentNumbers:
            return SentNumbers(obj, self)
        return super().dec_hook(t, obj)


class TokenTaker(RequestState):
    """A sequence that can take a common token itself: a single token within an answer, with nothing beside it."""

    takes_tokens: bool  # False: vLLM's output processor handles all its tokens.
    statistics: EngineStatistics  # Counts the tokens that are not common.

    def take(self, token_id: int, logprob: float | None) -> None:
        """Take a token.

        Args:
            token_id: The token.
            logprob: Its log probability. None if the request wants none.
        """
        raise NotImplementedError


class LeanOutputProcessor(OutputProcessor):
    """vLLM's output processor, with a short way for common tokens (`TokenTaker`).

    Each sequence keeps the request that the engine had, as `core_request`: it is sent again if the engine dies.
    """

    client: Any  # The client of all copies (`copies.client`).
    statistics: EngineStatistics

    def process_outputs(
        self,
        engine_core_outputs: list[SentOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        weight_version: str | None = None,
    ) -> Any:
        """Give common tokens to their sequences, and leave the other outputs of the step to vLLM."""
        states, placed = self.request_states, self.client.placed
        gaps: list[float] = []  # Seconds between each common token and the token before it.
        others: list[SentOutput] = []
        for output in engine_core_outputs:
            state, logprobs = states.get(output.request_id), output.new_logprobs
            if (
                isinstance(state, TokenTaker)
                and state.takes_tokens
                and output.finish_reason is None
                and len(output.new_token_ids) == 1
                and not state.is_prefilling
                and output.events is None
                and not output.num_nans_in_logits
            ):
                stats: Any = state.stats
                gaps.append(engine_core_timestamp - stats.last_token_ts)
                stats.last_token_ts = engine_core_timestamp
                stats.num_generation_tokens += 1
                state.take(output.new_token_ids[0], None if logprobs is None else logprobs.chosen())
                continue
            if output.finish_reason is not None and (place := placed.pop(output.request_id, None)) is not None:
                place.copy.work -= place.work
            if logprobs is not None:
                output.new_logprobs = logprobs.arrays()
            if output.pooling_output is not None and state is not None and not isinstance(state, TokenTaker):
                output.pooling_output = output.pooling_output.tensor()  # for vLLM's front end
            others.append(output)
        if gaps:  # Counted once, for vLLM's series and for Slipway's.
            iteration_stats.num_generation_tokens += len(gaps)
            iteration_stats.inter_token_latencies_iter += gaps
            self.statistics.tokens += len(gaps)
            self.statistics.inter_token.observe_all(gaps)
        return super().process_outputs(others, engine_core_timestamp, iteration_stats, weight_version)

    def add_request(self, request: EngineCoreRequest, *arguments: Any, **options: Any) -> None:
        super().add_request(request, *arguments, **options)
        if (state := self.request_states.get(request.request_id)) is not None:
            state.core_request = kept(request)

    def propagate_error(self, error: Exception) -> None:
        if not self.client.holds():
            super().propagate_error(error)

    def _update_stats_from_output(self, state: Any, output: Any, timestamp: float, iteration: Any) -> None:
        """Count an output that is not common. Slipway's series are made of the numbers of vLLM."""
        gap = timestamp - state.stats.last_token_ts
        super()._update_stats_from_output(state, output, timestamp, iteration)
        if state.detokenizer is None:
            return  # It is a pooled prompt.
        statistics = getattr(state, "statistics", self.statistics)  # Steps of beam searches have their own.
        queued_at = None
        for event in output.events or ():
            if event.type == EngineCoreEventType.QUEUED:
                queued_at = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED and queued_at is not None:
                statistics.queue_time.observe(event.timestamp - queued_at)
                queued_at = None
        if count := len(output.new_token_ids):
            statistics.tokens += count
            if state.stats.num_generation_tokens == count:
                seconds = iteration.iteration_timestamp - state.stats.arrival_time
                statistics.time_to_first_token.observe(seconds)
            else:
                statistics.inter_token.observe(gap / count)


def kept(request: EngineCoreRequest) -> EngineCoreRequest | None:
    """Return the request to keep while it runs; None if it has images or sounds, which take too much memory."""
    return None if request.mm_features else request


def send_at_once(core: Any) -> None:
    """Have an engine's client send messages without pyzmq's futures, which take as long as the sending.

    Args:
        core: The client (`AsyncMPClient`).
    """
    send_later = core._send_input_message
    send = zmq.Socket.shadow(core.input_socket).send
    more, last = int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.DONTWAIT)
    sent = asyncio.get_running_loop().create_future()  # To be awaited any number of times.
    sent.set_result(None)

    # It is no coroutine: vLLM sends at the call, and may await later.
    def send_message(message: Sequence[Any], engine: bytes) -> Awaitable[Any]:
        # Large arrays follow as frames, and pyzmq sends large frames without a copy.
        if len(message) != 2 or len(message[1]) >= zmq.COPY_THRESHOLD:
            later: Awaitable[Any] = send_later(message, engine)
            return later
        core.ensure_alive()
        send(engine, more)  # vLLM sets SNDHWM to 0, so this never raises `zmq.Again`.
        send(message[0], more)
        send(message[1], last)
        return sent

    core._send_input_message = send_message


def begin_output(
    llm: AsyncLLM, client: EngineCoreClient, reports: PrometheusStatLogger, statistics: EngineStatistics
) -> None:
    """Begin to handle the messages of the copies.

    Args:
        client: The client of all copies, which replaces the client that vLLM has made.
        reports: The logger of statistics that replaces those of vLLM.
        statistics: Counts the tokens.
    """
    # The output loop reads this variable for each request, and vLLM asks the environment each time.
    envs.VLLM_COMPUTE_NANS_IN_LOGITS = envs.VLLM_COMPUTE_NANS_IN_LOGITS
    llm.logger_manager = reports
    llm.output_processor.__class__ = LeanOutputProcessor
    llm.output_processor.client = llm.engine_core = client
    llm.output_processor.statistics = statistics
    run_output(llm)


def run_output(llm: AsyncLLM) -> None:
    """Begin vLLM's loop that handles the messages of the copies."""
    llm.output_handler = None
    llm._run_output_handler()


def output_has_failed(llm: AsyncLLM) -> bool:
    """Return True if vLLM's loop that handles messages has ended, with an error."""
    return llm.output_handler is not None and llm.output_handler.done()


def read_messages(client: AsyncMPClient, queue: Any) -> None:
    """Begin to read the messages of a copy, into a queue that takes errors as well (`put_nowait`).

    An error says that the copy is gone.
    """
    client.decoder = LeanDecoder(SentOutputs, oob_tensor_provider=client.decoder.oob_tensor_provider)
    client.outputs_queue = queue
    send_at_once(client)
    client._ensure_output_queue_task()


def cache_tokens(client: AsyncMPClient) -> int:
    """Return the tokens that the KV cache of a copy holds."""
    cache = client.vllm_config.cache_config
    return int((cache.num_gpu_blocks or 0) * cache.block_size)


def is_dead(client: AsyncMPClient) -> bool:
    """Return True if a process of the client has died."""
    dead: bool = client.resources.engine_dead
    return dead


def fail_utilities(client: AsyncMPClient) -> None:
    """End the calls of methods in a process that has died. vLLM would wait for their results for ever."""
    for result in client.utility_results.values():
        if not result.done():
            result.set_exception(EngineDeadError())
    client.utility_results.clear()


def let_go(client: AsyncMPClient) -> None:
    """Break the reference cycle of `send_at_once`, so that ZeroMQ's threads and descriptors are freed with a client."""
    vars(client).pop("_send_input_message", None)


def query_key(request: EngineCoreRequest) -> str | None:
    """Return the name of a query whose vectors its engine keeps for the query's documents. None for other requests."""
    params = request.pooling_params and request.pooling_params.late_interaction_params
    key: str | None = None if params is None else params.query_key
    return key


def is_compared_with_query(request: EngineCoreRequest) -> bool:
    """Return True for a document whose query's vectors its engine has. Another engine would die of it."""
    params = request.pooling_params and request.pooling_params.late_interaction_params
    return params is not None and params.mode == LATE_INTERACTION_MODE_SCORE_DOC


async def end_output(llm: AsyncLLM) -> None:
    """Stop handling messages: the loop would take the engine's end for a crash, and log it as one."""
    if (loop := llm.output_handler) is not None:
        loop.cancel()
        await asyncio.wait([loop])


def stat_loggers(llm: AsyncLLM) -> Sequence[Any]:
    """Return the loggers of statistics that vLLM has made."""
    loggers: Sequence[Any] = llm.logger_manager.stat_loggers
    return loggers


def keep_eos_token_id(llm: AsyncLLM) -> None:
    """Keep the id of the end token. vLLM asks for it with each request, and the tokenizer searches its vocabulary."""
    eos_token_id = llm.renderer.get_eos_token_id()
    llm.renderer.get_eos_token_id = lambda: eos_token_id


def request_states(llm: AsyncLLM) -> dict[str, RequestState]:
    """Return the sequences that the engine has, by their ids. vLLM's front end has some of them."""
    states: dict[str, RequestState] = llm.output_processor.request_states
    return states


def request_ids(llm: AsyncLLM) -> Collection[str]:
    """Return the ids of the requests that the engine has, as their callers named them."""
    ids: Collection[str] = llm.output_processor.external_req_ids
    return ids


def sequence_ids(llm: AsyncLLM, request_id: str) -> Sequence[str]:
    """Return the ids of a request's sequences that have not ended."""
    ids: Sequence[str] = llm.output_processor.external_req_ids.get(request_id, ())
    return ids


def seconds_in_queue(state: RequestState) -> float:
    """Return the time between a sequence's arrival in the engine and its first step."""
    assert state.stats is not None  # The states of Slipway and of `AsyncLLM` have `log_stats`.
    seconds: float = state.stats.scheduled_ts - state.stats.queued_ts
    return max(seconds, 0.0)


def seconds_in_engine(state: RequestState) -> float:
    """Return the time between a sequence's first step and its last token."""
    assert state.stats is not None
    seconds: float = state.stats.last_token_ts - state.stats.scheduled_ts
    return max(seconds, 0.0)


def register(llm: AsyncLLM, state: RequestState) -> None:
    """Register a sequence. It has to be done before the engine gets the request, so that no output comes earlier."""
    llm.output_processor.request_states[state.request_id] = state
    llm.output_processor.external_req_ids[state.external_req_id].append(state.request_id)


async def abort(llm: AsyncLLM, ids: Iterable[str], *, internal: bool = True) -> None:
    """End sequences. Those of an engine that has died are forgotten.

    Args:
        ids: The ids of the sequences, or of their requests if they are not `internal`.
    """
    with contextlib.suppress(EngineDeadError):
        await llm.abort(ids, internal=internal)


def fail(state: RequestState, message: str) -> None:
    """Give an error to a sequence that vLLM's front end has."""
    state.queue.put(GenerationError(message))


def fail_all(llm: AsyncLLM, message: str) -> None:
    """Give an error to each sequence that the engine has."""
    OutputProcessor.propagate_error(llm.output_processor, GenerationError(message))


def end_processes(client: EngineCoreClient, seconds: float) -> None:
    """End a client's processes within so many seconds. The engine's objects in the server's process stay."""
    client.shutdown(seconds)


@contextlib.contextmanager
def devices_kept(config: VllmConfig) -> Iterator[None]:
    """Keep the devices of a configuration while processes start with it.

    vLLM writes each data-parallel rank's devices into it, and would take the last rank's for all at the next start.
    """
    parallel = config.parallel_config
    devices = parallel.assigned_physical_gpu_ids
    try:
        yield
    finally:
        parallel.assigned_physical_gpu_ids = devices


def physical_gpus(engine_args: AsyncEngineArgs, gpus: Sequence[int]) -> list[int]:
    """Return the numbers of GPUs in the machine. `gpus` are numbers among those that this process sees."""
    physical: list[int] | None = dataclasses.replace(engine_args, device_ids=list(gpus))._resolve_device_ids()
    assert physical is not None, "GPUs are named"
    return physical


def config_of_copy(config: VllmConfig, gpus: Sequence[int], physical_gpus: Sequence[int] | None) -> VllmConfig:
    """Return the configuration of a copy.

    Args:
        config: The configuration of the first copy.
        gpus: The GPUs of the copy, as this process numbers them.
        physical_gpus: The same GPUs, as the machine numbers them. None: those of the configuration.
    """
    own = copy.copy(config)
    own.cache_config, own.parallel_config = copy.copy(config.cache_config), copy.copy(config.parallel_config)
    own.cache_config.num_gpu_blocks = None  # the processes report it, and the client adds it up
    # vLLM names shared memory by these, such as that of `kv_offloading_size`.
    own.instance_id = uuid.uuid4().hex
    if config.kv_transfer_config is not None:
        own.kv_transfer_config = copy.copy(config.kv_transfer_config)
        own.kv_transfer_config.engine_id = own.instance_id
    if physical_gpus is not None:
        own.parallel_config.assigned_physical_gpu_ids = list(physical_gpus)
        # These lists have all GPUs. vLLM reads their first entries, also for a copy on other GPUs.
        for name in ("numa_bind_nodes", "numa_bind_cpus"):
            bindings = getattr(config.parallel_config, name)
            if bindings and max(gpus) < len(bindings):
                setattr(own.parallel_config, name, [bindings[gpu] for gpu in gpus])
    return own


def start_processes(llm: AsyncLLM, config: VllmConfig) -> AsyncMPClient:
    """Start processes of an engine, and return their client. It takes as long as loading the model."""
    client: AsyncMPClient = EngineCoreClient.make_async_mp_client(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=llm.log_stats,
        renderer=llm.renderer,
    )
    return client


def engine_process_ids(client: EngineCoreClient) -> list[int]:
    """Return the ids of the engine's processes; Ray's engine has none here."""
    manager = client.resources.engine_manager
    return [process.pid for process in getattr(manager, "processes", ())]


def processors() -> list[int]:
    """Return the processors that this process may use. Those of a NUMA node and of a core are neighbours."""
    allowed = cpu_resource_utils.get_allowed_cpu_list()
    return [one.id for one in sorted(allowed, key=lambda one: (one.numa_node, one.physical_core, one.id))]


def use_processors(processors: Collection[int]) -> None:
    """Let vLLM bind the threads of its workers to these processors, and use their memory. For the engine process.

    vLLM binds the threads of a worker to processors of the first memory node that it sees. Its other threads run on any
    processor: the front end would have none left if each copy kept to its own.
    """
    find = cpu_resource_utils.get_allowed_cpu_list
    allowed = [one for one in find() if one.id in processors]
    nodes = {one.numa_node for one in allowed}
    if seen := [str(node) for node in cpu_resource_utils.get_visible_memory_node() if node in nodes]:
        os.environ[cpu_resource_utils.DEVICE_CONTROL_ENV_VAR] = ",".join(seen)
    cpu_resource_utils.get_allowed_cpu_list = lambda: allowed


def send_whole_media(engine_args: Any) -> None:
    """Send media with each request, so that any copy can take it.

    By default vLLM leaves media out that it sent before. It sends all where several front ends share an engine.
    """
    engine_args._api_process_count = 2


def forget_tokenizers() -> None:
    """Clear vLLM's caches, which hold tokenizers of models that are gone."""
    from vllm.tokenizers import registry as tokenizer_registry
    from vllm.transformers_utils import processor
    from vllm.utils import func_utils

    tokenizer_registry.cached_get_tokenizer.cache_clear()
    processor.cached_get_processor.cache_clear()
    func_utils._supports_kw.cache_clear()


def text_corrector(tokenizer: Any) -> Callable[[int, list[int]], str]:
    """Return a function that takes a token and those before it, and returns the text of a token that ends a character.

    The token alone has no text then, since a character may have several tokens.
    """
    correct: Callable[[int, list[int]], str] = LogprobsProcessor(
        tokenizer, None, None, None, None, None
    )._correct_decoded_token
    return correct


# Patches for the start and the end of vLLM's processes. Each keeps vLLM's own function for its replacement.

default_context: Callable[[], BaseContext] = engine_utils.get_mp_context
run_in_subprocess: Callable[[Callable[[], Any]], Any] = registry._run_in_subprocess
await_workers: Callable[[Sequence[BaseProcess]], None] = MultiprocExecutor._ensure_worker_termination
cgroup_usage: Callable[[], int | None] = cpu_resource_utils.get_cgroup_memory_usage


def patch_server(context: Callable[[], BaseContext], run: Callable[[Callable[[], Any]], Any]) -> None:
    """Patch the server's process.

    Args:
        context: Returns the context that starts the engine process, and the coordinator of data-parallel ranks.
        run: Calls a function in another process. vLLM looks at model classes there.
    """
    for module in (engine_utils, coordinator):
        module.get_mp_context = context
    registry._run_in_subprocess = run


def patch_sounds() -> None:
    """Have sounds resampled by soxr, and read without torchcodec, of which PyPI has no CPU build.

    torchaudio, vLLM's choice, takes gigabytes of memory for a rate such as 44101 Hz. soundfile and PyAV decode sounds;
    vLLM would log a warning for each.
    """
    from vllm.multimodal.parse import MultiModalDataParser

    MultiModalDataParser.__init__.__kwdefaults__["audio_resample_method"] = "soxr"
    if find_spec("torchcodec") is None:
        logging.getLogger("vllm.multimodal.media.audio").addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def patch_engine_process(
    context: Callable[[], BaseContext],
    end_workers: Callable[[Sequence[BaseProcess]], None],
    meeting_place: Callable[[], str],
) -> None:
    """Patch the engine process.

    Args:
        context: Returns the context that starts workers.
        end_workers: Waits for the end of the workers.
        meeting_place: Returns the URL of the file in which workers find each other.
    """
    multiproc_executor.get_mp_context = context
    MultiprocExecutor._ensure_worker_termination = staticmethod(end_workers)
    for executor in (multiproc_executor, uniproc_executor):
        executor.get_file_store_init_method = meeting_place


# The compilers of constraints.


class TriedOutputs(StructuredOutputsParams):
    """A constraint that a trial has compiled."""


def tried(outputs: StructuredOutputsParams, **changes: Any) -> TriedOutputs:
    """Return structured outputs that vLLM does not compile for a check (`patch_checks`), with these changes."""
    fields = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs) if field.init}
    return TriedOutputs(**fields | changes)


validate_guidance_grammar: Callable[..., None] = backend_guidance.validate_guidance_grammar


def patch_checks() -> None:
    """Patch the server's process: vLLM does not check a constraint that a trial has compiled.

    It would compile the constraint once more for each request, on the event loop.
    """

    def validate(params: SamplingParams, tokenizer: Any = None) -> None:
        if not isinstance(params.structured_outputs, TriedOutputs):
            validate_guidance_grammar(params, tokenizer)

    backend_guidance.validate_guidance_grammar = validate


def patch_grammars(advance: Callable[[Any, Any], None]) -> None:
    """Patch the engine process: `advance` gets each grammar when it is compiled, and vLLM's request."""
    create = StructuredOutputManager._create_grammar

    def created(self: StructuredOutputManager, request: Any) -> Any:
        grammar = create(self, request)
        advance(grammar, request)
        return grammar

    StructuredOutputManager._create_grammar = created


def patch_worker(wrap_start: Callable[[Callable[..., None]], Callable[..., None]], memory_used: Any) -> None:
    """Patch a worker process.

    Args:
        wrap_start: Takes the method that starts the worker, and returns the one that takes its place.
        memory_used: Returns the bytes of memory that the container uses, None without a limit.
    """
    cpu_resource_utils.get_cgroup_memory_usage = memory_used
    WorkerProc.__init__ = wrap_start(WorkerProc.__init__)


def patch_waiting(pause: Callable[[], None]) -> None:
    """Replace the pause between two looks of the engine process, or of a worker, for messages from the other."""
    shm_broadcast.sched_yield = pause


def patch_token_ranks(token_ranks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Replace the sampler's function that ranks the chosen tokens."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = token_ranks


def socket_directory() -> str:
    """Return the directory in which vLLM makes sockets."""
    directory: str = envs.VLLM_RPC_BASE_PATH
    return directory


# Media in prompts.

_resolve_items = chat_utils._resolve_items
_load_media = AsyncMultiModalItemTracker.resolve_items


def patch_media_ids(rename: Callable[[str], str]) -> None:
    """Replace the ids that clients give their media. vLLM's caches find media by them.

    Args:
        rename: Takes an id, and returns the one that takes its place. It runs in the task of the call.
    """

    def resolve(items: dict[str, list[tuple[Any, str | None]]], *others: Any) -> Any:
        renamed = {
            kind: [(data, None if uuid is None else rename(uuid)) for data, uuid in some]
            for kind, some in items.items()
        }
        return _resolve_items(renamed, *others)

    chat_utils._resolve_items = resolve


def drop_two_frames(error: BaseException) -> None:
    """Drop the frames of the caller and of the function of vLLM that it called from an error's traceback.

    That function has a variable that holds the error: a reference cycle, with the variables of both frames.
    """
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error.__traceback__ = error.__traceback__.tb_next.tb_next


def free_loaded_media() -> None:
    """Have vLLM forget where a prompt's media came from when they are loaded, or one cannot be.

    Its tracker of a prompt's media would stay in a reference cycle, with the media in the body of the request.
    """

    async def resolve(self: AsyncMultiModalItemTracker) -> Any:
        try:
            return await _load_media(self)
        except Exception as error:
            drop_two_frames(error)
            raise
        finally:
            self._items_by_modality.clear()

    AsyncMultiModalItemTracker.resolve_items = resolve


def media_cache(llm: AsyncLLM) -> LruKeyReplicatedSenderCache | None:
    """Return the renderer's record of the media in earlier prompts. None if options choose another cache."""
    cache = llm.renderer.mm_processor_cache
    return cache if isinstance(cache, LruKeyReplicatedSenderCache) else None


def patch_media_cache(cache: LruKeyReplicatedSenderCache, item: Callable[[Any, str], Any]) -> None:
    """Replace the method that returns the part of a prompt for one item. It gets the item and its hash."""
    cache.get_and_update_item = item


def cached_media(cache: LruKeyReplicatedSenderCache, media_hash: str) -> MultiModalProcessorCacheItemMetadata | None:
    """Return the record of an item of an earlier prompt. None if there is none."""
    return cache._cache.get(media_hash)


def cache_media(
    cache: LruKeyReplicatedSenderCache, media_hash: str, item: Sequence[Any]
) -> MultiModalProcessorCacheItemMetadata:
    """Make the record of an item, and return it."""
    record = MultiModalProcessorCacheItemMetadata(*item)
    cache.cache_if_fits(cache._cache, media_hash, record)
    return record


# Patches for parsers of tool calls.


def patch_parsers(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have the server choose how tools are called for each model; vLLM chooses when the class of a parser is made.

    Args:
        wrap: Takes the function that finds the class of a model's parser, and returns the one that takes its place.
    """
    from vllm.parser.parser_manager import ParserManager
    from vllm.tool_parsers import ToolParser

    ToolParser.__init_subclass__ = object.__init_subclass__
    ParserManager.get_parser = staticmethod(wrap(ParserManager.get_parser))


def patch_call_schemas(finish: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Have the server finish the JSON schema of required calls.

    vLLM would merge the `$defs` of the tools, and refuse tools with different ones of the same name.

    Args:
        finish: Takes vLLM's schema, in which each tool's schema stands as it came, and returns the one that takes its
            place.
    """
    from vllm.tool_parsers import utils

    schema_of_calls = utils._get_json_schema_from_tools
    utils._get_tool_schema_defs = lambda _: {}
    utils._get_json_schema_from_tools = lambda *arguments: finish(schema_of_calls(*arguments))
