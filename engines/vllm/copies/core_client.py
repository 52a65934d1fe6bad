"""vLLM's client for the processes of one copy."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import signal
import uuid
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import zmq
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.pool.late_interaction import LATE_INTERACTION_MODE_SCORE_DOC

from engines.vllm.output_processor import LeanDecoder, SentOutputs


def start_processes(llm: AsyncLLM, config: VllmConfig) -> AsyncMPClient:
    """Start the processes of an engine, and return their client. Blocks until the model is loaded."""
    client: AsyncMPClient = EngineCoreClient.make_async_mp_client(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=llm.log_stats,
        renderer=llm.renderer,
    )
    return client


def engine_process_ids(client: EngineCoreClient) -> list[int]:
    """Return the ids of the engine's processes. Empty if Ray runs the engine."""
    manager = client.resources.engine_manager
    return [process.pid for process in getattr(manager, "processes", ())]


def engines_elsewhere(client: EngineCoreClient) -> tuple[str, ...]:
    """Describe how many of the client's engines are not processes of this server. Empty if all engines are."""
    parallel = client.vllm_config.parallel_config
    count = parallel.data_parallel_size - len(engine_process_ids(client))
    if count <= 0 or parallel.local_engines_only:
        return ()
    return (f"{count} of {parallel.data_parallel_size} data-parallel engines on other machines or in Ray",)


def end_of_processes(client: EngineCoreClient) -> str:
    """Describe, for people, how the engine's processes have ended. Empty if Ray runs the engine."""
    return "; ".join(
        f"process {process.pid} ({process.name}) {_end(process.exitcode)}"
        for process in getattr(client.resources.engine_manager, "processes", ())
    )


def _end(code: int | None) -> str:
    if code is None:
        return "still ran"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


@contextlib.contextmanager
def devices_kept(config: VllmConfig) -> Iterator[None]:
    """Restore the devices of a configuration after processes have started with it.

    vLLM writes the devices of each data-parallel rank into the configuration. At the next start, it would use the
    devices of the last rank for all ranks.
    """
    parallel = config.parallel_config
    devices = parallel.assigned_physical_gpu_ids
    try:
        yield
    finally:
        parallel.assigned_physical_gpu_ids = devices


def physical_gpus(engine_args: AsyncEngineArgs, gpus: Sequence[int]) -> list[int]:
    """Return the indices of GPUs in the machine. `gpus` are their indices among the GPUs that this process sees."""
    physical: list[int] | None = dataclasses.replace(engine_args, device_ids=list(gpus))._resolve_device_ids()
    assert physical is not None, "GPUs are named"
    return physical


def config_of_copy(config: VllmConfig, gpus: Sequence[int], physical_gpus: Sequence[int] | None) -> VllmConfig:
    """Return the configuration of a copy.

    Args:
        config: The configuration of the first copy.
        gpus: The GPUs of the copy, by their indices in this process.
        physical_gpus: The same GPUs, by their indices in the machine. None: the copy has the GPUs of `config`.
    """
    own = copy.copy(config)
    own.cache_config, own.parallel_config = copy.copy(config.cache_config), copy.copy(config.parallel_config)
    # vLLM's client adds the number of blocks of each process to this field. So the field must not start with the
    # number of the first copy.
    own.cache_config.num_gpu_blocks = None
    # Each copy needs its own ids: vLLM uses them in the names of shared memory, for example for `kv_offloading_size`.
    own.instance_id = uuid.uuid4().hex
    if config.kv_transfer_config is not None:
        own.kv_transfer_config = copy.copy(config.kv_transfer_config)
        own.kv_transfer_config.engine_id = own.instance_id
    if physical_gpus is not None:
        own.parallel_config.assigned_physical_gpu_ids = list(physical_gpus)
        # These lists have entries for all GPUs. Without a change, vLLM would read the first entries for every copy.
        for name in ("numa_bind_nodes", "numa_bind_cpus"):
            bindings = getattr(config.parallel_config, name)
            if bindings and max(gpus) < len(bindings):
                setattr(own.parallel_config, name, [bindings[gpu] for gpu in gpus])
    return own


def send_at_once(core: Any) -> None:
    """Make an engine's client send messages without pyzmq's futures. The futures would double the time of a send.

    Args:
        core: The client (`AsyncMPClient`).
    """
    send_later = core._send_input_message
    send = zmq.Socket.shadow(core.input_socket).send
    more, last = int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.DONTWAIT)
    sent = asyncio.get_running_loop().create_future()  # It can be awaited any number of times.
    sent.set_result(None)

    # This is not a coroutine: the call sends the message, and vLLM may await the result later.
    def send_message(message: Sequence[Any], engine: bytes) -> Awaitable[Any]:
        # vLLM's method sends large messages, and messages with further frames (large arrays). pyzmq does not copy them.
        if len(message) != 2 or len(message[1]) >= zmq.COPY_THRESHOLD:
            later: Awaitable[Any] = send_later(message, engine)
            return later
        core.ensure_alive()
        send(engine, more)  # vLLM sets SNDHWM to 0, so this never raises `zmq.Again`.
        send(message[0], more)
        send(message[1], last)
        return sent

    core._send_input_message = send_message


def read_messages(client: AsyncMPClient, queue: Any) -> None:
    """Begin to put the messages of a copy into `queue`.

    `queue.put_nowait` must also accept errors. An error means that the copy has died.
    """
    client.decoder = LeanDecoder(SentOutputs, oob_tensor_provider=client.decoder.oob_tensor_provider)
    client.outputs_queue = queue
    send_at_once(client)
    client._ensure_output_queue_task()


def cache_tokens(client: AsyncMPClient) -> int:
    """Return the size of a copy's KV cache, in tokens."""
    cache = client.vllm_config.cache_config
    return int((cache.num_gpu_blocks or 0) * cache.block_size)


def is_dead(client: AsyncMPClient) -> bool:
    """Return True if a process of the client has died."""
    dead: bool = client.resources.engine_dead
    return dead


def fail_utilities(client: AsyncMPClient) -> None:
    """Fail the method calls that wait for a dead process. vLLM would wait forever for their results."""
    for result in client.utility_results.values():
        if not result.done():
            result.set_exception(EngineDeadError())
    client.utility_results.clear()


def let_go(client: AsyncMPClient) -> None:
    """Break the reference cycle of `send_at_once`, so that ZeroMQ's threads are freed together with the client."""
    vars(client).pop("_send_input_message", None)


def query_key(request: EngineCoreRequest) -> str | None:
    """Return the key that a late-interaction query shares with its documents. None for any other request."""
    params = request.pooling_params and request.pooling_params.late_interaction_params
    key: str | None = None if params is None else params.query_key
    return key


def is_compared_with_query(request: EngineCoreRequest) -> bool:
    """Return True for a document that is compared with a late-interaction query.

    It must go to the engine that has the query's vectors. Any other engine would crash.
    """
    params = request.pooling_params and request.pooling_params.late_interaction_params
    return params is not None and params.mode == LATE_INTERACTION_MODE_SCORE_DOC
