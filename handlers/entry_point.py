"""From a model's settings to the service that answers its calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from handlers.adapters import AdapterHost, AdapterRegistry
from handlers.contracts.families import FAMILIES
from handlers.contracts.family import ContractSetting, Generates
from handlers.contracts.lmi.asynchronous import LmiAsyncContract
from handlers.contracts.lmi.dynamic_batch import LmiDynamicContract
from handlers.contracts.lmi.formatters import FormatterContract
from handlers.contracts.lmi.rolling_batch import LmiContract
from handlers.contracts.protocol import Contract, Handler
from handlers.engine_adapters import AdapterFormatters, AdapterInvocations, EngineAdapterHost
from handlers.engine_handler import EngineHandler, EngineQueue
from handlers.engines.choice import begin_import, choose_engine, engine_factory, is_vllm
from handlers.engines.protocol import Engine, EngineStartError
from handlers.errors import RequestError
from handlers.formatters import Formatters, FormatterThread, ModelImports, add_packages, load_formatters
from handlers.invocations import InvocationsHandler
from handlers.memory_release import importing
from handlers.meter import StartupTimes
from handlers.model_settings import ModelSettings
from handlers.openai.handler import OpenAIHandler, import_front_end, openai_handler
from handlers.sessions import Sessions, load_sessions
from handlers.workers.custom_handler import CustomHandler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server sets for every model."""

    queue_size: int
    """Requests that may wait beyond those that run."""
    overload_status: int
    """What a client gets beyond that."""
    unavailable_status: int
    """What a client gets while no worker of a custom handler lives."""
    model_aliases: tuple[str, ...] = ()
    """Names that stand for the model on OpenAI's routes, beside its own."""
    adapter_faults: Callable[[Path], Sequence[str]] | None = None
    """Why a directory may not be that of an adapter; may block. None: any may."""


@dataclass(frozen=True, slots=True)
class Service:
    """A loaded model."""

    settings: ModelSettings
    invocations: Handler
    """Answers `/invocations` and `/predictions`."""
    runtime: Engine | CustomHandler
    """What runs it as long as it is loaded."""
    generation: Mapping[str, Handler] = field(default_factory=dict)
    """What answers each `Generates` route of the families, by its path; empty where a custom handler generates."""
    openai: OpenAIHandler | None = None
    """vLLM's own OpenAI server; None where something else generates."""
    queue: EngineQueue | None = None
    engine: Engine | None = None
    """None where a custom handler generates."""
    custom: CustomHandler | None = None
    adapters: AdapterRegistry | None = None
    """None where `option.enable_lora` is off."""
    sessions: Sessions | None = None
    """None where a custom handler has its own."""
    imports: ModelImports | None = None
    """What the model's own code is from, where an engine generates."""
    formatter_thread: FormatterThread | None = None
    """Where they run, and those of its adapters."""

    async def stop(self, why: str = "the server is stopping") -> None:
        """Free the engine or end the workers. Requests that still run on the engine end with an error that says why."""
        if self.adapters is not None:
            await self.adapters.stop()
        await (self.runtime.stop() if self.engine is None else self.engine.stop(why))
        if self.sessions is not None:
            await self.sessions.stop()
        if self.formatter_thread is not None:
            self.formatter_thread.stop()
        if self.imports is not None:
            self.imports.remove()

    def abort(self, request_id: str) -> None:
        """End the calls with this id, if there are any; their clients get an aborted answer."""
        if self.queue is not None:
            self.queue.abort(request_id)
        if self.openai is not None:
            self.openai.abort(request_id)


async def load_service(settings: ModelSettings, limits: Limits, times: StartupTimes | None = None) -> Service:
    """Choose the handler and the engine that the settings ask for, and load the model; `times` takes each phase.

    Raises:
        EngineStartError: the model cannot be loaded.
    """
    times = times or StartupTimes()
    async with contextlib.AsyncExitStack() as undo:
        if settings.handler is not None:
            with times.phase("workers"):
                service = await _load_custom(settings, limits, undo)
        else:
            service = await _load_engine(settings, limits, times, undo)
        undo.pop_all()
    return service


async def _load_engine(
    settings: ModelSettings, limits: Limits, times: StartupTimes, undo: contextlib.AsyncExitStack
) -> Service:
    imports = ModelImports()
    undo.callback(imports.remove)
    await add_packages(settings, imports)
    formatters = await asyncio.to_thread(load_formatters, settings, imports)
    sessions = await load_sessions(settings, limits.overload_status)
    undo.push_async_callback(sessions.stop)
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
    undo.push_async_callback(engine.stop)
    with times.phase("front end"):
        return await _serving(settings, limits, engine, formatters, sessions, imports)


async def _serving(
    settings: ModelSettings,
    limits: Limits,
    engine: Engine,
    formatters: Formatters | None,
    sessions: Sessions,
    imports: ModelImports,
) -> Service:
    """The service of an engine that has started."""
    queue = EngineQueue(engine, engine.max_sequences + limits.queue_size)
    openai = await openai_handler(queue, settings, limits.model_aliases)
    thread = FormatterThread(settings.predict_timeout)

    def formatted(given: Formatters) -> Handler:
        contract = FormatterContract(
            _contract(settings, limits, engine),
            settings,
            read=given.input,
            write=given.output,
            writes_tokens=given.output_takes_tokens,
            tokenizer=engine.tokenizer,
            overload_status=limits.overload_status,
        )
        return EngineHandler(queue, contract, thread)

    invocations: Handler
    if formatters is None:
        lmi = EngineHandler(queue, _contract(settings, limits, engine))
        invocations = InvocationsHandler(lmi, openai, settings, sessions, limits.overload_status)
    else:
        invocations = formatted(formatters)
    adapters = None
    if engine.adapters is not None:
        own = AdapterFormatters(formatted, formatters, settings.predict_timeout)
        invocations = AdapterInvocations(invocations, own)
        adapters = await _adapters(settings, EngineAdapterHost(engine.adapters, own), limits)
    return Service(
        settings,
        invocations,
        engine,
        generation=_generation(settings, queue),
        openai=openai,
        queue=queue,
        engine=engine,
        adapters=adapters,
        sessions=sessions,
        imports=imports,
        formatter_thread=thread,
    )


async def _adapters(settings: ModelSettings, host: AdapterHost, limits: Limits) -> AdapterRegistry:
    """The registry, with the adapters that come with the model.

    Raises:
        EngineStartError: one of them cannot be used.
    """
    names = {*limits.model_aliases, settings.name, *settings.public_names}
    registry = AdapterRegistry(host, settings.model_dir, names, limits.adapter_faults)
    model = Path(settings.model_id)
    try:
        await registry.preload((settings.model_dir, *((model,) if model.is_absolute() else ())))
    except RequestError as error:
        raise EngineStartError(error.message) from None
    return registry


def _generation(settings: ModelSettings, queue: EngineQueue) -> dict[str, Handler]:
    """Handlers by path. A family that cannot serve this model is left out and takes no other with it."""
    setting = ContractSetting(settings=settings, model=queue.engine)
    handlers: dict[str, Handler] = {}
    for family in FAMILIES:
        routes = [route for route in family.routes if isinstance(route, Generates)]
        try:
            handlers |= {
                route.path: EngineHandler(queue, route.contract(setting), long_body=route.long_body) for route in routes
            }
        except Exception:
            logger.exception("the %s routes cannot be served with this model", family.name)
    return handlers


async def _load_custom(settings: ModelSettings, limits: Limits, undo: contextlib.AsyncExitStack) -> Service:
    custom = CustomHandler(
        settings,
        # LMI counts a place for the call that is handed to a worker.
        queue_size=limits.queue_size - 1,
        overload_status=limits.overload_status,
        unavailable_status=limits.unavailable_status,
    )
    await custom.start()
    undo.push_async_callback(custom.stop)
    adapters = None
    if settings.enable_lora:
        custom.adapters = adapters = await _adapters(settings, custom.adapter_host, limits)
    return Service(settings, custom, custom, custom=custom, adapters=adapters)


def _contract(settings: ModelSettings, limits: Limits, engine: Engine) -> Contract:
    if settings.async_mode:
        return LmiAsyncContract(settings, limits.overload_status, getattr(engine, "default_sampling", None))
    if settings.rolling_batch == "disable":
        return LmiDynamicContract(settings, limits.overload_status, pad_text=engine.tokenizer.pad_token or "")
    return LmiContract(settings, limits.overload_status)
