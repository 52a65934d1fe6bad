"""The entry point: loads a model with the handler and the engine that its settings ask for."""

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
from handlers.route_declarations import ContractSetting, GenerationRoute, takes
from handlers.tei.contracts import RerankContract, SimilarityContract

logger = logging.getLogger(__name__)

_LARGEST_BATCH = 2048  # Texts that one call for vectors may have at least, as with OpenAI.


async def load_service(settings: ModelConfig, limits: Limits, times: StartupTimes | None = None) -> Service:
    """Load a model with the handler and the engine that its settings ask for.

    Args:
        settings: The model's settings.
        limits: The server's settings that hold for every model.
        times: Takes the duration of each phase.

    Raises:
        EngineStartError: The model cannot be loaded.
    """
    times = times or StartupTimes()
    async with contextlib.AsyncExitStack() as held:
        if settings.handler_before_engine is not None:
            service = await _load_handler_before_engine(settings, limits, times, held)
        elif settings.handler is not None:
            with times.phase("workers"):
                service = await _load_custom(settings, limits, held)
        else:
            service = await _load_engine(settings, limits, times, held)
        return replace(service, held=held.pop_all())


async def _load_engine(
    settings: ModelConfig, limits: Limits, times: StartupTimes, held: contextlib.AsyncExitStack
) -> Service:
    imports = ModelImports()
    held.callback(imports.remove)
    await add_packages(settings, imports)
    formatters = await asyncio.to_thread(load_formatters, settings, imports)
    held.callback(formatters.thread.stop)
    sessions = await load_sessions(settings, limits.overload_status)
    held.push_async_callback(sessions.stop)
    settings = choose_engine(settings)
    if settings.enable_lora and not is_vllm(settings):
        raise EngineStartError(
            "option.enable_lora is true: adapters need the vLLM engine (option.rolling_batch=vllm), but this model "
            f"runs with option.rolling_batch={settings.rolling_batch}"
        )
    begin_import(settings)
    with times.phase("import"), importing():
        make_engine = await asyncio.to_thread(engine_factory, settings)
        await asyncio.to_thread(import_front_end, settings)
    with times.phase("engine"):
        engine = make_engine(settings)
        await engine.start()
    held.push_async_callback(engine.stop)
    with times.phase("front end"):
        return await _serving(settings, limits, engine, formatters, sessions, held)


async def _serving(
    settings: ModelConfig,
    limits: Limits,
    engine: Engine,
    formatters: Formatters,
    sessions: Sessions,
    held: contextlib.AsyncExitStack,
) -> Service:
    waiting = limits.queue_size if engine.pooling is None else max(limits.queue_size, _LARGEST_BATCH)
    queue = EngineQueue(engine, engine.max_sequences + waiting, limits.overload_status, settings.deadlines)
    openai = await openai_handler(queue, settings, limits.model_aliases)

    def formatted(given: Formatters) -> Handler:
        """Return the handler of `/invocations` with the formatters of the model or of an adapter."""
        if engine.pooling is not None:
            return pooling_invocations(settings, queue, engine.pooling, openai)
        contract = lmi_contract(settings, engine)
        if isinstance(contract, LmiAsyncContract):
            if given.output is not None and openai is None:
                raise EngineStartError("an output formatter with option.async_mode=true needs vLLM as the engine")
            lmi = EngineHandler(queue, contract, refuse_unread=overloaded)
            given = given.offering(tokenizer=engine.tokenizer)
            return InvocationsHandler(lmi, openai, settings, sessions, limits.overload_status, contract, given)
        thread = None
        if given.input is not None or given.output is not None:
            contract, thread = FormatterContract(contract, settings, given, engine.tokenizer), given.thread
        lmi = EngineHandler(queue, contract, refuse_unread=overloaded, thread=thread)
        if given.input is not None:
            return lmi  # it reads bodies of any form
        return InvocationsHandler(lmi, openai, settings, sessions, limits.overload_status)

    invocations = formatted(formatters)
    adapters = None
    if engine.adapters is not None:
        host = EngineAdapterHost(engine.adapters, invocations, formatted, formatters, settings.lmi.async_mode)
        adapters = await _adapters(settings, host, limits)
        invocations = host
    return Service(
        settings,
        invocations,
        engine,
        generation=generation_handlers(settings, queue, openai.images if openai is not None else None),
        openai=openai,
        queue=queue,
        engine=engine,
        adapters=adapters,
    )


def pooling_invocations(
    settings: ModelConfig, queue: EngineQueue, model: PoolingModel, openai: OpenAIHandler | None
) -> PoolingInvocations:
    """Return the handler of `/invocations` of a pooling model."""
    setting = ContractSetting(settings=settings, model=queue.engine)
    handler = partial(EngineHandler, queue, refuse_unread=overloaded)
    return PoolingInvocations(
        handler(pooling_contract(settings, model)),
        openai,
        model,
        ranks=None if settings.lmi.scores_in_order else handler(RerankContract(setting)),
        similarity=handler(SimilarityContract(setting)),
    )


async def _adapters(settings: ModelConfig, host: AdapterHost, limits: Limits) -> AdapterRegistry:
    names = {*limits.model_aliases, settings.name, *settings.public_names}
    registry = AdapterRegistry(host, settings.model_dir, names, limits.adapter_faults, limits.adapter_downloads)
    model = Path(settings.model_id)
    try:
        await registry.preload((settings.model_dir, *((model,) if model.is_absolute() else ())), settings.adapters)
    except RequestError as error:
        raise EngineStartError(error.message) from None
    return registry


def generation_handlers(
    settings: ModelConfig, queue: EngineQueue, images: ImageLoader | None = None
) -> dict[str, Handler]:
    """Return the handler of each generating route by its path. A contract that cannot serve the model is left out."""
    setting = ContractSetting(settings=settings, model=queue.engine)
    handlers: dict[str, Handler] = {}
    for contract in CONTRACTS:
        of_model = [route for route in contract.routes if takes(route, pooling=queue.engine.pooling is not None)]
        try:
            handlers |= {
                route.path: EngineHandler(
                    queue,
                    route.contract(setting),
                    refuse_unread=contract.refuse if route.queued else None,
                    images=images,
                )
                for route in of_model
                if isinstance(route, GenerationRoute) and route.contract is not None
            }
        except Exception:
            logger.exception("the %s routes cannot be served with this model", contract.name)
    return handlers


def _custom_handler(settings: ModelConfig, limits: Limits, load_engine: EngineLoader | None = None) -> CustomHandler:
    return CustomHandler(
        settings,
        # LMI counts a place for the call that a worker has.
        queue_size=limits.queue_size - 1,
        overload_status=limits.overload_status,
        unavailable_status=limits.unavailable_status,
        load_engine=load_engine,
    )


async def _load_handler_before_engine(
    settings: ModelConfig, limits: Limits, times: StartupTimes, held: contextlib.AsyncExitStack
) -> Service:
    engine_settings = replace(settings, handler_before_engine=None)
    handler_settings = replace(settings, handler=settings.handler_before_engine)
    both = EngineBehindHandler(
        partial(_custom_handler, handler_settings, limits), partial(load_service, engine_settings, limits, times)
    )
    held.push_async_callback(both.stop)
    engine = await both.start()
    if engine is None:
        return Service(handler_settings, both.custom, both, custom=both.custom)
    return replace(engine, invocations=both.custom, runtime=both, custom=both.custom)


async def _load_custom(settings: ModelConfig, limits: Limits, held: contextlib.AsyncExitStack) -> Service:
    custom = _custom_handler(settings, limits)
    await custom.start()
    held.push_async_callback(custom.stop)
    adapters = None
    if settings.enable_lora:
        custom.adapters = adapters = await _adapters(settings, custom.adapter_host, limits)
    return Service(settings, custom, custom, custom=custom, adapters=adapters)


def lmi_contract(settings: ModelConfig, engine: Engine) -> Contract:
    """Return the contract of `/invocations` that the settings select."""
    if settings.lmi.async_mode:
        return LmiAsyncContract(settings, getattr(engine, "default_sampling", None))
    if settings.rolling_batch == "disable":
        return LmiDynamicContract(settings, pad_text=engine.tokenizer.pad_token or "")
    return LmiRollingContract(settings)
