"""From a model's settings to what serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from handlers.contracts.family import ContractSetting, Generates
from handlers.contracts.lmi.asynchronous import LmiAsyncContract
from handlers.contracts.lmi.dynamic_batch import LmiDynamicContract
from handlers.contracts.lmi.formatters import FormatterContract
from handlers.contracts.lmi.rolling_batch import LmiContract
from handlers.contracts.protocol import Contract
from handlers.custom_handler import CustomHandler
from handlers.engine_choice import chosen, engine_factory
from handlers.engine_handler import ContractHandler, EngineHandler
from handlers.engines.protocol import Engine, EngineHealth
from handlers.families import FAMILIES
from handlers.formatter_thread import FormatterThread
from handlers.formatters import Formatters, add_packages, load_formatters
from handlers.invocations import InvocationsHandler
from handlers.model_settings import ModelSettings
from handlers.openai.handler import OpenAIHandler, openai_handler
from handlers.reply import Handler
from handlers.sessions import Sessions, load_sessions

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


class Runtime(Protocol):
    """What lives as long as the model is loaded: an engine, or the workers of a custom handler."""

    def health(self) -> EngineHealth:
        """Whether it can serve."""

    async def stop(self) -> None:
        """Free everything."""


@dataclass(frozen=True, slots=True)
class Service:
    """A loaded model."""

    settings: ModelSettings
    invocations: Handler
    """Answers `/invocations` and `/predictions`."""
    runtime: Runtime
    generation: Mapping[str, Handler] = field(default_factory=dict)
    """What answers each `Generates` route of the families, by its path; empty where a custom handler generates."""
    openai: OpenAIHandler | None = None
    """vLLM's own OpenAI server; None where something else generates."""
    engine_handler: EngineHandler | None = None
    engine: Engine | None = None
    """None where a custom handler generates."""
    custom: CustomHandler | None = None

    def abort(self, request_id: str) -> None:
        """End the calls with this id, if there are any; their clients get an aborted answer."""
        if self.engine_handler is not None:
            self.engine_handler.abort(request_id)
        if self.openai is not None:
            self.openai.abort(request_id)


async def load_service(settings: ModelSettings, limits: Limits) -> Service:
    """Choose the handler and the engine that the settings ask for, and load the model.

    Raises:
        EngineStartError: the model cannot be loaded.
    """
    if settings.handler is not None:
        return await _load_custom(settings, limits)
    await add_packages(settings)
    formatters = await asyncio.to_thread(load_formatters, settings)
    sessions = await load_sessions(settings, limits.overload_status)
    settings = await asyncio.to_thread(chosen, settings)
    make_engine = await asyncio.to_thread(engine_factory, settings)
    engine = make_engine(settings)
    await engine.start()
    try:
        return await _with_engine(settings, limits, engine, formatters, sessions)
    except BaseException:
        await engine.stop()
        raise


async def _with_engine(
    settings: ModelSettings, limits: Limits, engine: Engine, formatters: Formatters | None, sessions: Sessions
) -> Service:
    handler = EngineHandler(engine, _running(settings) + limits.queue_size)
    openai = await openai_handler(engine, handler, settings, limits.model_aliases)
    return Service(
        settings,
        _invocations(settings, limits, handler, formatters, openai, sessions),
        engine,
        generation=_generation(settings, handler),
        openai=openai,
        engine_handler=handler,
        engine=engine,
    )


def _invocations(
    settings: ModelSettings,
    limits: Limits,
    handler: EngineHandler,
    formatters: Formatters | None,
    openai: OpenAIHandler | None,
    sessions: Sessions,
) -> Handler:
    contract = _contract(settings, limits, handler.engine)
    if formatters is None:
        return InvocationsHandler(
            ContractHandler(handler, contract), openai, settings, sessions, limits.overload_status
        )
    formatted = FormatterContract(
        contract,
        settings,
        read=formatters.input,
        write=formatters.output,
        writes_tokens=formatters.output_takes_tokens,
        tokenizer=handler.engine.tokenizer,
        overload_status=limits.overload_status,
    )
    return ContractHandler(handler, formatted, FormatterThread(settings.predict_timeout))


def _generation(settings: ModelSettings, handler: EngineHandler) -> dict[str, Handler]:
    """Handlers by path. A family that cannot serve this model is left out and takes no other with it."""
    setting = ContractSetting(settings=settings, model=handler.engine)
    handlers: dict[str, Handler] = {}
    for family in FAMILIES:
        routes = [route for route in family.routes if isinstance(route, Generates)]
        try:
            handlers |= {
                route.path: ContractHandler(handler, route.contract(setting), long_body=route.long_body)
                for route in routes
            }
        except Exception:
            logger.exception("the %s routes cannot be served with this model", family.name)
    return handlers


async def _load_custom(settings: ModelSettings, limits: Limits) -> Service:
    custom = CustomHandler(
        settings,
        # LMI counts a place for the call that is handed to a worker (contracts/lmi.md section 1.8).
        queue_size=limits.queue_size - 1,
        overload_status=limits.overload_status,
        unavailable_status=limits.unavailable_status,
    )
    await custom.start()
    return Service(settings, custom, custom, custom=custom)


def _contract(settings: ModelSettings, limits: Limits, engine: Engine) -> Contract:
    if settings.rolling_batch == "disable":
        return LmiDynamicContract(settings, limits.overload_status, pad_text=engine.tokenizer.pad_token or "")
    if settings.async_mode:
        return LmiAsyncContract(settings, limits.overload_status, getattr(engine, "default_sampling", None))
    return LmiContract(settings, limits.overload_status)


def _running(settings: ModelSettings) -> int:
    return settings.batch_size if settings.rolling_batch == "disable" else settings.max_rolling_batch_size
