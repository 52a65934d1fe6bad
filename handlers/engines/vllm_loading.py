"""From a model's settings to vLLM's engine process with that model in it."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any

import vllm.platforms
from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from handlers.daemon_thread import LastingThread
from handlers.engines.compiler import go_without_compiler
from handlers.engines.model_texts import copied
from handlers.engines.parallelism import ModelMemory, tensor_parallel_sizes
from handlers.engines.protocol import EngineStartError
from handlers.engines.start_failure import failure_of
from handlers.engines.vllm_arguments import engine_arguments, serve_defaults
from handlers.engines.vllm_caches import forget_tokenizers
from handlers.engines.vllm_children import tied_to_this_thread, use_fork_server
from handlers.engines.vllm_constraints import CheckingLLM, choose_backend
from handlers.engines.vllm_frontend_arguments import frontend_arguments
from handlers.engines.vllm_output import end_output_loop
from handlers.engines.vllm_sampling import NO_TYPICAL
from handlers.engines.vllm_typical import load_typical
from handlers.engines.weight_files import hub_weight_bytes, weight_bytes
from handlers.model_settings import ModelSettings

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.0
"""What vLLM's processes have to end by themselves; by then nothing runs in them."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """vLLM with a model, and what its OpenAI front end is to be told."""

    llm: CheckingLLM
    frontend_arguments: dict[str, Any]
    typical_refusal: str
    """Why `typical_p` is refused; "" if it is not."""


class VllmLoader:
    """Loads one model, once."""

    def __init__(self, settings: ModelSettings, thread: LastingThread) -> None:
        """`thread`: starts vLLM's processes, which the kernel ends with it."""
        self._settings = settings
        self._thread = thread
        self._abandoned = False
        self._cannot = f"vLLM cannot load {settings.model_id}"

    async def load(self) -> LoadedModel:
        """Takes half a minute and more; other tasks go on meanwhile.

        Raises:
            EngineStartError: vLLM cannot load the model, or not within `model_loading_timeout`.
        """
        try:
            return await asyncio.wait_for(self._thread.run(self._load), self._settings.model_loading_timeout)
        except asyncio.CancelledError:
            self._abandoned = True
            raise
        except TimeoutError:
            self._abandoned = True
            limit = self._settings.model_loading_timeout
            raise EngineStartError(f"loading took longer than model_loading_timeout ({limit:g} s)") from None
        except EngineStartError:
            raise
        except Exception as error:
            raise failure_of(error).error(self._cannot) from error

    def _load(self) -> LoadedModel:
        use_fork_server()
        on_cpu = vllm.platforms.current_platform.is_cpu()
        if on_cpu:
            go_without_compiler(os.environ)
        arguments = engine_arguments(self._settings, on_cpu)
        # Read here, so that what is wrong is said before the model is loaded.
        frontend = frontend_arguments(self._settings)
        engine_args = AsyncEngineArgs(**serve_defaults() | arguments)
        if self._settings.tensor_parallel_degree is None and not on_cpu:
            share_layers(engine_args, self._settings.tensor_parallel_max)
        # Batch sizes depend on it: these are the defaults of `vllm serve`.
        config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        choose_backend(config)
        refusal = load_typical(config) if self._settings.rolling_batch == "lmi-dist" else NO_TYPICAL
        with tied_to_this_thread(spawned=config.parallel_config.numa_bind) as reports:
            try:
                llm: CheckingLLM = CheckingLLM.from_vllm_config(config)
            except Exception as error:  # vLLM's own says that a process has failed, and not why
                if (failure := reports.first()) is None:
                    raise
                raise failure.error(self._cannot) from error
        if self._abandoned:
            # Nobody waits for it any more, and the server may go on with others.
            llm.shutdown(SHUTDOWN_SECONDS)
            forget_tokenizers()
        return LoadedModel(llm, frontend, refusal)


async def shut_down(llm: AsyncLLM) -> None:
    """End vLLM's processes, and keep nothing of the model's."""
    await end_output_loop(llm)
    await asyncio.to_thread(llm.shutdown, SHUTDOWN_SECONDS)
    forget_tokenizers()


def share_layers(engine_args: AsyncEngineArgs, most: bool) -> None:
    """Set the tensor-parallel size: the fewest GPUs that hold the model or, with `most`, as many as it allows."""
    platform = vllm.platforms.current_platform
    gpus = platform.device_count()
    stages = engine_args.pipeline_parallel_size
    replicas = engine_args.data_parallel_size_local or engine_args.data_parallel_size
    if gpus // (stages * replicas) <= 1:
        return
    model = engine_args.create_model_config()
    config = model.hf_config.to_dict()
    sizes = tensor_parallel_sizes(config, gpus // (stages * replicas))
    if most:
        engine_args.tensor_parallel_size, why = sizes[-1], "the most that the model allows"
    else:
        memory = ModelMemory(
            config,
            weight_bytes(model.model) or hub_weight_bytes(model.model, model.revision),
            stages=stages,
            memory_share=engine_args.gpu_memory_utilization,
            # With -1 vLLM itself fits the length to the memory.
            max_model_len=0 if engine_args.max_model_len == -1 else model.max_model_len,
            cache_element_bytes=1 if "fp8" in engine_args.kv_cache_dtype else model.dtype.itemsize,
        )
        smallest = min(platform.get_device_total_memory(gpu) for gpu in range(gpus))
        engine_args.tensor_parallel_size, why = memory.fewest(sizes, smallest)
    logger.info(
        "%d of %d GPUs share each layer (%d pipeline stages, %d replicas): %s; the model allows %s; "
        "option.tensor_parallel_degree sets it by hand",
        engine_args.tensor_parallel_size,
        gpus,
        stages,
        replicas,
        why,
        ", ".join(map(str, sizes)),
    )


def own_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer, outside vLLM's pool, and a copy of the one from which that copies."""
    return copied(cached_tokenizer_from_config(config))


def end_token_ids(llm: AsyncLLM) -> frozenset[int]:
    """The tokens that end a text, by the model's generation config and by its tokenizer."""
    configured = (llm.model_config.try_get_generation_config() or {}).get("eos_token_id") or []
    ids = configured if isinstance(configured, list) else [configured]
    own = llm.get_tokenizer().eos_token_id
    return frozenset(ids if own is None else [*ids, own])
