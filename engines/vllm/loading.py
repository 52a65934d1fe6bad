"""Starts vLLM's engine processes with a model's settings, and loads the model into them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import vllm.platforms
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader import get_model_cls
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient

from engines.daemon_thread import LastingThreads
from engines.interface import EngineOutOfMemory, EngineStartError
from engines.loaded_model import copied
from engines.memory.cpu_memory import Demand, kv_cache_size, memory_limits, smaller_size
from engines.memory.parallelism import Layout, ModelMemory, Weights
from engines.memory.weight_files import hub_weight_bytes, weight_bytes
from engines.settings.engine_config import EngineConfig
from engines.start_failure import failure_of
from engines.vllm.arguments.from_settings import engine_arguments, frontend_arguments, serve_defaults
from engines.vllm.async_llm import forget_tokenizers, stat_loggers
from engines.vllm.constraints.translator import choose_backend
from engines.vllm.copies.core_client import config_of_copy, devices_kept, start_processes
from engines.vllm.copies.places import Place, gpu_places, processor_places
from engines.vllm.internals import check_names
from engines.vllm.metrics import EngineReports
from engines.vllm.parsers.choice import with_parsers
from engines.vllm.patches.grammars import patch_checks
from engines.vllm.patches.media import patch_sounds, send_whole_media
from engines.vllm.pooling import pool_as_djl
from engines.vllm.processes.contexts import (
    end_processes,
    first_failure,
    kill_started,
    tied_to_this_thread,
    told_elsewhere,
    use_fork_server,
)
from engines.vllm.sampling import load_typical

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.0  # If vLLM's processes do not end within this time, they are killed.
_ABANDONED_SECONDS = 10.0  # The maximum time to wait until an abandoned load fails, after its processes are killed.
_KILL_SECONDS = 0.1  # After this time, processes are killed again, because the load may have started another.
_T = TypeVar("_T")
_SWITCH = "TORCH_COMPILE_DISABLE"
_COMPILER = "g++"
_INSTALLS_ONE = "TORCH_INDUCTOR_INSTALL_GXX"


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """The result of loading the first copy of a model: vLLM's engine, and values that describe this engine."""

    llm: AsyncLLM
    reports: EngineReports
    frontend_arguments: dict[str, Any]
    typical_refusal: str  # Why `typical_p` is refused. "" if it is allowed.
    places: Sequence[Place]  # The GPUs or processors of each copy that fits on the machine.
    elsewhere: Sequence[str]  # The workers that Ray or another machine runs.


class VllmLoader:
    """Loads one copy of a model. A loader is used only once."""

    def __init__(self, config: EngineConfig, threads: LastingThreads) -> None:
        """Create the vLLM loader.

        Args:
            config: The settings of the model.
            threads: The threads that start vLLM's processes. The kernel kills spawned processes together with the
                thread that spawned them.
        """
        self._config = config
        self._threads = threads
        self._started: list[BaseProcess] | None = None  # vLLM's processes. None until vLLM begins to start them.
        self._abandoned = False  # Whether nothing waits for the copy any longer.
        self.elsewhere: Sequence[
            str
        ] = ()  # The workers that Ray or another machine runs. Known when the copy is loaded.
        # vLLM's errors do not always name the argument that causes them.
        given = config.engine_options
        self._cannot = f"vLLM cannot load {config.model_id}" + (f" with {given}" if given else "")

    async def load(self) -> StartedEngine:
        """Load the first copy in a thread. This takes half a minute or more.

        Raises:
            EngineStartError: vLLM cannot load the model, or loading exceeds `model_loading_timeout`.
        """
        return await self._in_time(self._load)

    async def load_copy(self, llm: AsyncLLM, place: Place) -> AsyncMPClient:
        """Load a further copy, or the replacement of a copy that has died or stalled. Returns the copy's client.

        Raises:
            EngineStartError: As in `load`.
        """

        def load() -> AsyncMPClient:
            vllm_config = config_of_copy(llm.vllm_config, place.gpus, place.physical_gpus)
            client = self._start_processes(vllm_config, lambda: start_processes(llm, vllm_config), place)
            if self._abandoned:
                client.shutdown(SHUTDOWN_SECONDS)
            return client

        return await self._in_time(load)

    async def _in_time(self, load: Callable[[], _T]) -> _T:
        loading = asyncio.ensure_future(self._threads.run(load))
        try:
            # In Python 3.11, an error in `wait_for` leaves a reference cycle, which would keep vLLM's client in memory.
            async with asyncio.timeout(self._config.model_loading_timeout):
                await asyncio.wait([loading])
            return loading.result()
        except TimeoutError:
            limit = self._config.model_loading_timeout
            raise EngineStartError(f"loading took longer than model_loading_timeout ({limit:g} s)") from None
        except EngineStartError:
            raise
        except Exception as error:
            raise failure_of(error).error(self._cannot) from error
        finally:
            self._abandoned = True
            # The processes of an abandoned load are killed. The load then fails, and its memory is free.
            deadline = time.monotonic() + _ABANDONED_SECONDS
            while self._started is not None and not loading.done() and time.monotonic() < deadline:
                kill_started(self._started)
                with contextlib.suppress(asyncio.CancelledError):  # A second cancellation does not shorten the wait.
                    await asyncio.wait([loading], timeout=_KILL_SECONDS)
            if not loading.cancel():
                loading.exception()  # Otherwise asyncio logs the error of an abandoned load.
            del loading  # Its error references this frame.

    def _load(self) -> StartedEngine:
        check_names()
        patch_sounds()
        patch_checks()
        use_fork_server()
        on_cpu = vllm.platforms.current_platform.is_cpu()
        if on_cpu:
            go_without_compiler(os.environ)
        config = with_parsers(self._config)
        arguments = engine_arguments(config, on_cpu)
        # Parsed here, so that errors are reported before the model is loaded.
        frontend = frontend_arguments(config)
        engine_args = AsyncEngineArgs(**serve_defaults() | arguments)
        most = self._config.max_copies
        places = processor_places(most or 1) if on_cpu else gpu_places(engine_args, self._config)
        if len(places[:most]) > 1:
            send_whole_media(engine_args)
        # The usage context selects the default batch sizes, here those of `vllm serve`.
        vllm_config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        choose_backend(vllm_config, self._config.engine_arguments.get("structured_outputs_config", ""))
        if self._config.djl_engine and self._config.pooling is None:
            pool_as_djl(vllm_config.model_config)
        is_pooling = vllm_config.model_config.runner_type == "pooling"
        refusal = "the model generates no text" if is_pooling else load_typical(vllm_config)
        if on_cpu and vllm_config.cache_config.kv_cache_memory_bytes is None:
            llm = self._start_on_cpu(vllm_config, places)
        else:
            llm = self._start(vllm_config, places[0])
        if self._abandoned:
            end_processes(llm.engine_core, SHUTDOWN_SECONDS)
            free(llm)
        reports = next(one for one in stat_loggers(llm) if isinstance(one, EngineReports))
        return StartedEngine(llm, reports, frontend, refusal, places, self.elsewhere)

    def _start(self, vllm_config: VllmConfig, place: Place) -> AsyncLLM:
        llm: AsyncLLM = self._start_processes(
            vllm_config, lambda: AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[EngineReports]), place
        )
        return llm

    def _start_processes(self, vllm_config: VllmConfig, start: Callable[[], _T], place: Place) -> _T:
        started: list[BaseProcess] = []
        # Set before `_abandoned` is read, because `_in_time`, in the event loop, sets `_abandoned` before it reads
        # `_started`. So this thread sees that the load is abandoned, or `_in_time` sees the processes and kills them.
        self._started = started
        if self._abandoned:
            raise EngineStartError(self._cannot)
        tie = tied_to_this_thread(place.processors, spawned=vllm_config.parallel_config.numa_bind, started=started)
        with tie as reports, devices_kept(vllm_config):
            try:
                result = start()
            except Exception as error:  # vLLM's error says only that a process has failed.
                if (failure := first_failure(reports)) is None:
                    raise
                raise failure.error(self._cannot) from error
            self.elsewhere = told_elsewhere(reports)
            return result

    def _start_on_cpu(self, vllm_config: VllmConfig, places: Sequence[Place]) -> AsyncLLM:
        """Choose the size of the KV cache, and start vLLM.

        If vLLM refuses the size and names the available memory, retry with a smaller size.
        """
        demand = cache_demand(vllm_config, len(places))
        limits = memory_limits(vllm_config.parallel_config.local_world_size)
        vllm_config.cache_config.kv_cache_memory_bytes = kv_cache_size(demand, limits)
        try:
            return self._start(vllm_config, places[0])
        except EngineOutOfMemory as error:
            smaller = smaller_size(demand, str(error))
            if smaller is None or self._abandoned:
                raise
            logger.warning("%s; trying once more with a KV cache of %.2f GiB", error, smaller / (1 << 30))
        vllm_config.cache_config.kv_cache_memory_bytes = smaller
        return self._start(vllm_config, places[0])


def free(llm: AsyncLLM) -> None:
    """Free the model's resources in this process. Blocks."""
    llm.shutdown()
    forget_tokenizers()


def own_tokenizer(config: ModelConfig) -> Any:
    """Return a tokenizer of the model. Neither vLLM nor its pool of tokenizers changes this tokenizer."""
    return copied(cached_tokenizer_from_config(config))


def image_mark(llm: AsyncLLM) -> Callable[[int], str] | None:
    """Return a function that takes the number of an image, and returns its placeholder in a prompt.

    None if prompts cannot have images.
    """
    config = llm.model_config
    if not config.is_multimodal_model or config.is_encoder_decoder:
        return None
    if "image" not in llm.renderer.get_mm_processor().info.supported_mm_limits:
        return None
    # If a model has no such placeholders, vLLM itself finds the positions of the images.
    return lambda number: get_model_cls(config).get_placeholder_str("image", number) or ""


def go_without_compiler(environ: MutableMapping[str, str]) -> bool:
    """Switch torch's compilation off if no compiler is installed. Returns True if it was switched off.

    vLLM compiles some of its functions at their first call, even if it runs the model eagerly. If compilation fails,
    the process dies. torch reads the variable when torch is imported, so the variable affects only processes that start
    later. If the variable is already set, it stays.
    """
    compiler = environ.get("CXX", _COMPILER)  # torch looks for the same program.
    if _SWITCH in environ or environ.get(_INSTALLS_ONE) or shutil.which(compiler, path=environ.get("PATH", os.defpath)):
        return False
    environ[_SWITCH] = "1"
    logger.info("there is no C++ compiler (%s), so torch.compile is off (%s=1)", compiler, _SWITCH)
    return True


def cache_demand(config: VllmConfig, copies: int) -> Demand:
    """Return the memory that vLLM's workers on a CPU need if there are `copies` copies."""
    model, parallel = config.model_config, config.parallel_config
    item = model.dtype.itemsize
    stored = getattr(getattr(model.hf_config, "dtype", None), "itemsize", item)
    files = weight_bytes(model.model) or hub_weight_bytes(model.model, model.revision)
    weights = files if model.quantization else files * item // stored
    draft = config.speculative_config.model if config.speculative_config is not None else None
    draft_bytes = weight_bytes(draft) if draft is not None and draft != model.model else 0
    memory = ModelMemory(
        model.hf_config.to_dict(),
        Weights(weights),
        Layout(stages=parallel.pipeline_parallel_size),
        max_model_len=model.max_model_len,
        cache_element_bytes=1 if config.cache_config.cache_dtype.startswith("fp8") else item,
    )
    return Demand(
        model.model,
        weights // parallel.world_size + draft_bytes // parallel.tensor_parallel_size,
        memory.sequence_bytes(parallel.tensor_parallel_size),
        parallel.local_world_size * max(parallel.data_parallel_size_local, 1) * copies,
    )
