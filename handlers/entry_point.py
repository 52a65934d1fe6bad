"""The entry point of this package: loads a model with the handler and the engine that its settings ask for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from engines.adapters import AdapterHost, AdapterRegistry
from engines.engine_choice import begin_import, choose_engine, engine_factory, is_vllm
from engines.errors import RequestError
from engines.interface import Engine, EngineStartError
from engines.memory.garbage_collection import importing
from engines.pooling import PoolingModel
from engines.statistics import StartupTimes
from handlers.all_contracts import CONTRACTS
from handlers.contract import Contract, Handler
from handlers.custom.custom_handler import CustomHandler
from handlers.custom.engine_call import EngineLoader
from handlers.custom.formatters import Formatters, load_formatters
from handlers.custom.model_imports import ModelImports, add_packages
from handlers.djl_errors import overloaded
from handlers.engine_handler import EngineHandler
from handlers.lmi.asynchronous import LmiAsyncContract
from handlers.lmi.dynamic_batch import LmiDynamicContract
from handlers.lmi.formatters.formatter_contract import FormatterContract
from handlers.lmi.invocations import InvocationsHandler
from handlers.lmi.management.engine_adapters import EngineAdapterHost
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.lmi.sessions import Sessions, load_sessions
from handlers.lmi.vectors.contracts import pooling_contract
from handlers.lmi.vectors.invocations import PoolingInvocations
from handlers.loaded_service import EngineBehindHandler, Limits, Service
from handlers.model_config import ModelConfig
from handlers.openai.handler import OpenAIHandler, import_front_end, openai_handler
from handlers.parsing.images import ImageLoader
from handlers.queue import EngineQueue
from handlers.route_declarations import GenerationRoute, takes
from handlers.tei.contracts import RerankContract, SimilarityContract

logger = logging.getLogger(__name__)

_LARGEST_BATCH = 2048  # A call for vectors may always have this many texts, as with OpenAI.


async def load_service(config: ModelConfig, limits: Limits, times: StartupTimes | None = None) -> Service:
    """Load a model with the handler and the engine that its settings ask for.

    Args:
        config: The model's settings.
        limits: The server's settings that apply to every model.
        times: Records the duration of each phase.

    Raises:
        EngineStartError: The model cannot be loaded.
    """
    times = times or StartupTimes()
    async with contextlib.AsyncExitStack() as held:
        if config.handler_before_engine is not None:
            service = await _load_handler_before_engine(config, limits, times, held)
        elif config.handler is not None:
            with times.phase("workers"):
                service = await _load_custom(config, limits, held)
        else:
            service = await _load_engine(config, limits, times, held)
        return replace(service, held=held.pop_all())


async def _load_engine(
    config: ModelConfig, limits: Limits, times: StartupTimes, held: contextlib.AsyncExitStack
) -> Service:
    imports = ModelImports()
    held.callback(imports.remove)
    await add_packages(config, imports)
    formatters = await asyncio.to_thread(load_formatters, config, imports)
    held.callback(formatters.thread.stop)
    sessions = await load_sessions(config, limits.overload_status)
    held.push_async_callback(sessions.stop)
    config = choose_engine(config)
    if config.enable_lora and not is_vllm(config):
        raise EngineStartError(
            "option.enable_lora is true: adapters need the vLLM engine (option.rolling_batch=vllm), but this model "
            f"runs with option.rolling_batch={config.rolling_batch}"
        )
    begin_import(config)
    with times.phase("import"), importing():
        make_engine = await asyncio.to_thread(engine_factory, config)
        await asyncio.to_thread(import_front_end, config)
    with times.phase("engine"):
        engine = make_engine(config)
        await engine.start()
    held.push_async_callback(engine.stop)
    with times.phase("front end"):
        return await _serving(config, limits, engine, formatters, sessions)


async def _serving(
    config: ModelConfig, limits: Limits, engine: Engine, formatters: Formatters, sessions: Sessions
) -> Service:
    waiting = limits.queue_size if engine.pooling is None else max(limits.queue_size, _LARGEST_BATCH)
    queue = EngineQueue(engine, engine.max_sequences + waiting, limits.overload_status, config.deadlines)
    openai = await openai_handler(queue, config, limits.model_aliases)

    def formatted(given: Formatters) -> Handler:
        """Return a handler of `/invocations` that uses the formatters of the model or of an adapter."""
        if engine.pooling is not None:
            return pooling_invocations(config, queue, engine.pooling, openai)
        contract = lmi_contract(config, engine)
        if isinstance(contract, LmiAsyncContract):
            if given.output is not None and openai is None:
                raise EngineStartError("an output formatter with option.async_mode=true needs vLLM as the engine")
            lmi = EngineHandler(queue, contract, refuse_unread=overloaded)
            given = given.offering(tokenizer=engine.tokenizer)
            return InvocationsHandler(lmi, openai, config, queue, sessions, contract, given)
        thread = None
        if given.input is not None or given.output is not None:
            contract, thread = FormatterContract(contract, config, given, engine.tokenizer), given.thread
        lmi = EngineHandler(queue, contract, refuse_unread=overloaded, thread=thread)
        if given.input is not None:
            return lmi  # the formatter reads bodies of any format
        return InvocationsHandler(lmi, openai, config, queue, sessions)

    invocations = formatted(formatters)
    adapters = None
    if engine.adapters is not None:
        host = EngineAdapterHost(engine.adapters, invocations, formatted, formatters, config.lmi.async_mode)
        adapters = await _adapters(config, host, limits)
        invocations = host
    return Service(
        config,
        invocations,
        engine,
        generation=generation_handlers(config, queue, openai.images if openai is not None else None),
        openai=openai,
        queue=queue,
        engine=engine,
        adapters=adapters,
    )


def pooling_invocations(
    config: ModelConfig, queue: EngineQueue, model: PoolingModel, openai: OpenAIHandler | None
) -> PoolingInvocations:
    """Return the handler of `/invocations` of a pooling model."""
    handler = partial(EngineHandler, queue, refuse_unread=overloaded)
    return PoolingInvocations(
        handler(pooling_contract(config, model)),
        openai,
        model,
        ranks=None if config.lmi.scores_in_order else handler(RerankContract(config, queue.engine)),
        similarity=handler(SimilarityContract(config, queue.engine)),
    )


async def _adapters(config: ModelConfig, host: AdapterHost, limits: Limits) -> AdapterRegistry:
    names = {*limits.model_aliases, config.name, *config.public_names}
    registry = AdapterRegistry(host, config.model_dir, names, limits.adapter_faults, limits.adapter_downloads)
    model = Path(config.model_id)
    try:
        await registry.preload((config.model_dir, *((model,) if model.is_absolute() else ())), config.adapters)
    except RequestError as error:
        raise EngineStartError(error.message) from None
    return registry


def generation_handlers(
    config: ModelConfig, queue: EngineQueue, images: ImageLoader | None = None
) -> dict[str, Handler]:
    """Return the handlers of the `GenerationRoute`s that have a `contract` and serve this kind of model, keyed by path.

    If a handler cannot be created, all routes of its `ContractRoutes` are left out.
    """
    handlers: dict[str, Handler] = {}
    for contract in CONTRACTS:
        of_model = [route for route in contract.routes if takes(route, pooling=queue.engine.pooling is not None)]
        try:
            handlers |= {
                route.path: EngineHandler(
                    queue,
                    route.contract(config, queue.engine),
                    refuse_unread=contract.refuse if route.queued else None,
                    images=images,
                )
                for route in of_model
                if isinstance(route, GenerationRoute) and route.contract is not None
            }
        except Exception:
            logger.exception("the %s routes cannot be served with this model", contract.name)
    return handlers


def _custom_handler(config: ModelConfig, limits: Limits, load_engine: EngineLoader | None = None) -> CustomHandler:
    return CustomHandler(
        config,
        # LMI's queue size includes the call that a worker is running.
        queue_size=limits.queue_size - 1,
        overload_status=limits.overload_status,
        unavailable_status=limits.unavailable_status,
        load_engine=load_engine,
    )


async def _load_handler_before_engine(
    config: ModelConfig, limits: Limits, times: StartupTimes, held: contextlib.AsyncExitStack
) -> Service:
    for_engine = replace(config, handler_before_engine=None)
    for_handler = replace(config, handler=config.handler_before_engine)
    both = EngineBehindHandler(
        partial(_custom_handler, for_handler, limits), partial(load_service, for_engine, limits, times)
    )
    held.push_async_callback(both.stop)
    engine = await both.start()
    if engine is None:
        return Service(for_handler, both.custom, both, custom=both.custom)
    return replace(engine, invocations=both.custom, runtime=both, custom=both.custom)


async def _load_custom(config: ModelConfig, limits: Limits, held: contextlib.AsyncExitStack) -> Service:
    custom = _custom_handler(config, limits)
    await custom.start()
    held.push_async_callback(custom.stop)
    adapters = None
    if config.enable_lora:
        custom.adapters = adapters = await _adapters(config, custom.adapter_host, limits)
    return Service(config, custom, custom, custom=custom, adapters=adapters)


def lmi_contract(config: ModelConfig, engine: Engine) -> Contract:
    """Return the contract of `/invocations` that the settings select."""
    if config.lmi.async_mode:
        return LmiAsyncContract(config, getattr(engine, "default_sampling", None))
    if config.rolling_batch == "disable":
        return LmiDynamicContract(config, pad_text=engine.tokenizer.pad_token or "")
    return LmiRollingContract(config)
