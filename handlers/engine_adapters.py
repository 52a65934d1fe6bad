"""The adapters of a model that an engine runs: in the engine, and their formatters beside it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from djl_python.service_loader import MODEL_FILE, find_decorated_function, load_model_service
from handlers.adapters import Adapter
from handlers.contracts.lmi.adapters import named_adapter
from handlers.contracts.protocol import Call
from handlers.daemon_thread import in_daemon_thread
from handlers.engines.protocol import EngineAdapter, EngineAdapters
from handlers.errors import AdapterFailed
from handlers.formatters import Formatters, described
from handlers.reply import Handler, ReplyWriter, Running

logger = logging.getLogger(__name__)

_SHOWN = 200

Loaded = tuple[Handler, str]
"""What answers with an adapter's formatters, and the name of their module."""


class AdapterFormatters:
    """What answers `/invocations` for adapters with a `model.py` of their own."""

    def __init__(self, make: Callable[[Formatters], Handler], base: Formatters | None, time_limit: float) -> None:
        """`make`: what answers with these formatters. `base`: the model's own, where an adapter has none of a kind.
        `time_limit`: seconds that running a `model.py` may take."""
        self._make, self._base, self._time_limit = make, base, time_limit
        self._handlers: dict[str, Loaded] = {}

    def __bool__(self) -> bool:
        return bool(self._handlers)

    def get(self, adapter: str) -> Handler | None:
        """What answers for this adapter; None if it has no formatters."""
        found = self._handlers.get(adapter)
        return found[0] if found is not None else None

    async def load(self, adapter: str, directory: Path) -> Loaded | None:
        """Run the adapter's `model.py`, if it has one; None if it has no formatters. They count after `put`.

        Raises:
            AdapterFailed: it cannot be run; the message has its file and line.
        """
        try:
            found = await asyncio.wait_for(in_daemon_thread(lambda: _load(adapter, directory)), self._time_limit)
        except TimeoutError:
            raise AdapterFailed(f"{MODEL_FILE} of the adapter took longer than {self._time_limit:g} s") from None
        if found is None:
            return None
        formatters, module = found
        return self._make(self._completed(formatters)), module

    def put(self, adapter: str, loaded: Loaded | None) -> None:
        """Have an adapter's formatters count, in the place of those that it had."""
        former = self._handlers.pop(adapter, None)
        if loaded is not None:
            self._handlers[adapter] = loaded
        self.drop(adapter, former)

    def forget(self, adapter: str) -> None:
        """The adapter is not there any more, and its module neither."""
        self.put(adapter, None)

    def drop(self, adapter: str, loaded: Loaded | None) -> None:
        """Let go of a module that does not count, unless one that does has its name: the same file, run once more."""
        current = self._handlers.get(adapter)
        if loaded is not None and (current is None or current[1] != loaded[1]):
            sys.modules.pop(loaded[1], None)

    def _completed(self, own: Formatters) -> Formatters:
        base = self._base or Formatters(None, None)
        return Formatters(own.input or base.input, own.output or base.output)


class AdapterInvocations:
    """`/invocations`, where adapters may have formatters of their own; see `handlers.reply.Handler`."""

    def __init__(self, otherwise: Handler, formatters: AdapterFormatters) -> None:
        self._otherwise, self._formatters = otherwise, formatters

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        handler: Handler | None = None
        if self._formatters and (name := named_adapter(call)):
            handler = self._formatters.get(name)
        return await (handler or self._otherwise).handle(call, writer)


def _load(adapter: str, directory: Path) -> tuple[Formatters, str] | None:
    """The formatters, and the name of their module; None if there are none. Each load runs the file anew."""
    try:
        if not (directory / MODEL_FILE).is_file():
            return None
    except OSError as error:  # such as a name that is too long
        raise AdapterFailed(f"src: {str(directory)[:_SHOWN]!r} cannot be read: {error.strerror}") from None
    try:
        module = load_model_service(str(directory), MODEL_FILE, namespace=adapter).module
    except BaseException as error:
        logger.exception("%s of the adapter %s cannot be run", MODEL_FILE, adapter)
        raise AdapterFailed(f"{MODEL_FILE} of the adapter cannot be run: {described(error, directory)}") from error
    found = Formatters(
        find_decorated_function(module, "is_input_formatter"), find_decorated_function(module, "is_output_formatter")
    )
    if found.input is None and found.output is None:
        sys.modules.pop(module.__name__, None)
        return None
    return found, module.__name__


class EngineAdapterHost:
    """See `handlers.adapters.AdapterHost`."""

    def __init__(self, engine: EngineAdapters, formatters: AdapterFormatters) -> None:
        self._engine, self._formatters = engine, formatters
        self._current: dict[str, int] = {}
        """Ids by names."""

    async def register(self, adapter: Adapter) -> str:
        formatters = await self._formatters.load(adapter.name, adapter.path)
        try:
            await self._engine.add(_for_engine(adapter), preload=adapter.preload)
        except BaseException:
            self._formatters.drop(adapter.name, formatters)
            raise
        self._formatters.put(adapter.name, formatters)
        former, self._current[adapter.name] = self._current.get(adapter.name), adapter.id
        if former is not None:
            await self._engine.remove(former, wait=False)
        return ""

    async def update(self, adapter: Adapter) -> str:
        await self._engine.change(_for_engine(adapter), preload=adapter.preload)
        return ""

    async def unregister(self, adapter: Adapter) -> str:
        self._current.pop(adapter.name, None)
        self._formatters.forget(adapter.name)
        await self._engine.remove(adapter.id)
        return ""

    async def stop(self) -> None:
        """Let go of the formatters; the engine ends what it has begun when it stops."""
        for name in self._current:
            self._formatters.forget(name)


def _for_engine(adapter: Adapter) -> EngineAdapter:
    return EngineAdapter(adapter.name, adapter.id, adapter.path, adapter.pin)
