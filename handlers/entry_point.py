"""From a model's settings to the service that answers its calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engines.adapters import AdapterDownloads, AdapterHost, AdapterRegistry
from engines.choice import begin_import, choose_engine, engine_factory, is_vllm
from engines.errors import RequestError
from engines.interface import Engine, EngineHealth, EngineStartError
from engines.memory_release import importing
from engines.model_settings import ModelSettings
from engines.statistics import StartupTimes
from handlers.contract import Contract, Handler
from handlers.contract_routes import ContractSetting, GenerationRoute
from handlers.contracts import CONTRACTS
from handlers.custom.custom_handler import CustomHandler
from handlers.custom.formatter_thread import FormatterThread
from handlers.custom.formatters import Formatters, ModelImports, add_packages, load_formatters
from handlers.custom.worker import LoadedEngine
from handlers.djl_errors import overloaded
from handlers.engine_handler import EngineHandler
from handlers.lmi.asynchronous import LmiAsyncContract
from handlers.lmi.dynamic_batch import LmiDynamicContract
from handlers.lmi.engine_adapters import AdapterFormatters, EngineAdapterHost
from handlers.lmi.formatted_call import FormattingHandler
from handlers.lmi.formatted_reply import Formatting
from handlers.lmi.formatters import FormatterContract, PayloadFormatters
from handlers.lmi.invocations import InvocationsHandler
from handlers.lmi.rolling_batch import LmiContract
from handlers.lmi.sessions import Sessions, load_sessions
from handlers.openai.handler import OpenAIHandler, import_front_end, openai_handler
from handlers.queue import EngineQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server sets for every model."""

    queue_size: int  # Requests that may wait beyond those that run.
    overload_status: int  # What a client gets beyond that.
    unavailable_status: int  # What a client gets while no worker of a custom handler lives.
    model_aliases: tuple[str, ...] = ()  # Names that stand for the model on OpenAI's routes, beside its own.
    # Why a directory may not be that of an adapter; may block. None: any may.
    adapter_faults: Callable[[Path], Sequence[str]] | None = None
    adapter_downloads: AdapterDownloads | None = None  # Fetches adapters from S3; None: they are refused.


@dataclass(frozen=True, slots=True)
class Service:
    """A loaded model."""

    settings: ModelSettings
    invocations: Handler  # Answers `/invocations` and `/predictions`.
    runtime: Engine | CustomHandler | _EngineBehindHandler  # What runs it as long as it is loaded.
    # What answers each `GenerationRoute` route of the families, by its path; empty where a custom handler generates.
    generation: Mapping[str, Handler] = field(default_factory=dict)
    openai: OpenAIHandler | None = None  # vLLM's own OpenAI server; None where something else generates.
    queue: EngineQueue | None = None
    engine: Engine | None = None  # None where a custom handler generates.
    custom: CustomHandler | None = None
    adapters: AdapterRegistry | None = None  # None where `option.enable_lora` is off.
    held: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)  # Frees what loading has taken.

    @property
    def running_engine(self) -> Engine | None:
        """The engine, also one that a custom handler has loaded with one of its calls."""
        behind = self.runtime.service if isinstance(self.runtime, _EngineBehindHandler) else None
        return behind.engine if behind is not None else self.engine

    async def stop(self, why: str = "the server is stopping") -> None:
        """Free the engine or end the workers. Requests that still run on the engine end with an error that says why."""
        if self.adapters is not None:
            await self.adapters.stop()
        if self.engine is not None:
            await self.engine.stop(why)
        await self.held.aclose()

    def check_place(self) -> None:
        """Raise Overloaded or ContractError if no further call would get a place now."""
        if self.custom is not None:
            self.custom.pool.check_place()
        elif self.queue is not None:
            self.queue.check_place()

    def abort(self, request_id: str) -> None:
        """End the calls with this id, if there are any; their clients get an aborted answer."""
        if self.queue is not None:
            self.queue.abort(request_id)
        if self.openai is not None:
            self.openai.abort(request_id)


async def load_service(settings: ModelSettings, limits: Limits, times: StartupTimes | None = None) -> Service:
    """Choose the handler and the engine that the settings ask for, and load the model; `times` takes each phase. Raises
    EngineStartError: the model cannot be loaded."""
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
    settings: ModelSettings, limits: Limits, times: StartupTimes, held: contextlib.AsyncExitStack
) -> Service:
    imports = ModelImports()
    held.callback(imports.remove)
    await add_packages(settings, imports)
    formatters = await asyncio.to_thread(load_formatters, settings, imports)
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
    settings: ModelSettings,
    limits: Limits,
    engine: Engine,
    formatters: Formatters | None,
    sessions: Sessions,
    held: contextlib.AsyncExitStack,
) -> Service:
    queue = EngineQueue(engine, engine.max_sequences + limits.queue_size, limits.overload_status)
    openai = await openai_handler(queue, settings, limits.model_aliases)
    thread = FormatterThread(settings.predict_timeout)
    held.callback(thread.stop)

    def formatted(given: Formatters | None) -> Handler:
        """What answers `/invocations` with these formatters, which are the model's or an adapter's."""
        contract = _contract(settings, engine)
        lmi, formatting = EngineHandler(queue, contract, refuse_unread=overloaded), None
        if given is not None and isinstance(contract, LmiAsyncContract):
            formatting = _formatting(contract, given, engine, openai, thread)
        elif given is not None:
            contract = FormatterContract(
                contract,
                settings,
                read=given.input,
                write=given.output,
                writes_tokens=given.output_takes_tokens,
                tokenizer=engine.tokenizer,
            )
            lmi = FormattingHandler(queue, contract, thread, refuse_unread=overloaded)
            if given.input is not None:
                return lmi  # it reads bodies of any form
        return InvocationsHandler(lmi, openai, settings, sessions, limits.overload_status, formatting)

    invocations = formatted(formatters)
    adapters = None
    if engine.adapters is not None:
        invocations = own = AdapterFormatters(
            invocations, formatted, formatters, settings.predict_timeout, settings.async_mode
        )
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
    )


def _formatting(
    contract: LmiAsyncContract,
    given: Formatters,
    engine: Engine,
    openai: OpenAIHandler | None,
    thread: FormatterThread,
) -> Formatting:
    formatters = PayloadFormatters(contract, read=given.input, write=given.output, tokenizer=engine.tokenizer)
    if openai is None:
        if formatters.writes:
            raise EngineStartError("an output formatter with option.async_mode=true needs vLLM as the engine")
        return Formatting(formatters, thread)
    from handlers.openai.vllm_app import answer_object

    return Formatting(formatters, thread, answer_object)


async def _adapters(settings: ModelSettings, host: AdapterHost, limits: Limits) -> AdapterRegistry:
    names = {*limits.model_aliases, settings.name, *settings.public_names}
    registry = AdapterRegistry(host, settings.model_dir, names, limits.adapter_faults, limits.adapter_downloads)
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
    for family in CONTRACTS:
        routes = [route for route in family.routes if isinstance(route, GenerationRoute)]
        try:
            handlers |= {
                route.path: EngineHandler(
                    queue,
                    route.contract(setting),
                    long_body=route.long_body,
                    refuse_unread=None if route.streams_refusals else family.refuse,
                )
                for route in routes
            }
        except Exception:
            logger.exception("the %s routes cannot be served with this model", family.name)
    return handlers


def _custom_handler(settings: ModelSettings, limits: Limits, engine: LoadedEngine | None = None) -> CustomHandler:
    return CustomHandler(
        settings,
        # LMI counts a place for the call that is handed to a worker.
        queue_size=limits.queue_size - 1,
        overload_status=limits.overload_status,
        unavailable_status=limits.unavailable_status,
        engine=engine,
    )


class _EngineBehindHandler:
    """The engine of a model whose `handle` comes first, and that handler: the model's `runtime`. The engine is loaded
    when the handler first calls it: with a handler that has a model of its own there would not be room for both."""

    def __init__(self, settings: ModelSettings, limits: Limits, times: StartupTimes) -> None:
        self._engine = replace(settings, handler_before_engine=None)
        self._limits, self._times = limits, times
        self._loading: asyncio.Task[Service] | None = None
        self.handler_settings = replace(settings, handler=settings.handler_before_engine)
        self.custom = _custom_handler(self.handler_settings, limits, self._invocations)

    async def start(self) -> Service | None:
        """Start the handler; returns the engine's service if the handler's first call has loaded it. Raises
        EngineStartError: the handler or the engine cannot be loaded."""
        try:
            await self.custom.start()
        except EngineStartError:
            if self._loading is not None and self._loading.done():
                await self._loading  # its error says more
            raise
        return self.service

    @property
    def service(self) -> Service | None:
        loading = self._loading
        if loading is None or not loading.done() or loading.cancelled() or loading.exception() is not None:
            return None
        return loading.result()

    async def _invocations(self) -> Handler:
        """What answers a call with the engine alone. A failure to load it is final."""
        if self._loading is None:
            self._loading = asyncio.create_task(load_service(self._engine, self._limits, self._times))
        return (await asyncio.shield(self._loading)).invocations

    def health(self) -> EngineHealth:
        """The handler's where it has failed, else the engine's if a call has needed it."""
        health = self.custom.health()
        if not health.alive:
            return health
        if self.service is not None:
            return self.service.runtime.health()
        loading = self._loading
        if loading is not None and loading.done() and not loading.cancelled():
            return EngineHealth(False, f"the engine that the handler calls cannot be loaded: {loading.exception()}")
        return health

    async def stop(self) -> None:
        await self.custom.stop()
        if self._loading is None:
            return
        self._loading.cancel()
        await asyncio.wait({self._loading})
        if self.service is not None:
            await self.service.stop()


async def _load_handler_before_engine(
    settings: ModelSettings, limits: Limits, times: StartupTimes, held: contextlib.AsyncExitStack
) -> Service:
    both = _EngineBehindHandler(settings, limits, times)
    held.push_async_callback(both.stop)
    engine = await both.start()
    if engine is None:
        return Service(both.handler_settings, both.custom, both, custom=both.custom)
    return replace(engine, invocations=both.custom, runtime=both, custom=both.custom)


async def _load_custom(settings: ModelSettings, limits: Limits, held: contextlib.AsyncExitStack) -> Service:
    custom = _custom_handler(settings, limits)
    await custom.start()
    held.push_async_callback(custom.stop)
    adapters = None
    if settings.enable_lora:
        custom.adapters = adapters = await _adapters(settings, custom.adapter_host, limits)
    return Service(settings, custom, custom, custom=custom, adapters=adapters)


def _contract(settings: ModelSettings, engine: Engine) -> Contract:
    if settings.async_mode:
        return LmiAsyncContract(settings, getattr(engine, "default_sampling", None))
    if settings.rolling_batch == "disable":
        return LmiDynamicContract(settings, pad_text=engine.tokenizer.pad_token or "")
    return LmiContract(settings)
