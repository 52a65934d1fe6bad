"""The adapters of a model that an engine runs: their weights in the engine, their formatters in this process."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from djl_python.service_loader import MODEL_FILE, load_model_service
from engines.adapters import Adapter
from engines.daemon_thread import in_daemon_thread
from engines.errors import AdapterFailed
from engines.interface import EngineAdapters
from handlers.contract import Call, Handler, ReplyWriter, Running
from handlers.custom.formatters import Formatters, formatters_of, signature_fault
from handlers.custom.worker_process.load_error import describe_error
from handlers.json_cost import off_the_loop
from handlers.lmi.adapters import named_adapter

logger = logging.getLogger(__name__)

_SHOWN = 200


class EngineAdapterHost:
    """Implements `engines.adapters.AdapterHost`."""

    reads_src = False

    def __init__(self, engine: EngineAdapters, formatters: AdapterFormatters) -> None:
        self._engine, self._formatters = engine, formatters
        self._current: dict[str, int] = {}  # Ids by names.

    async def register(self, adapter: Adapter) -> str:
        loaded = await self._formatters.load(adapter)
        try:
            await self._engine.add(adapter)
        except BaseException:
            if loaded is not None:
                loaded.forget()
            raise
        self._formatters.put(adapter.name, loaded)
        former, self._current[adapter.name] = self._current.get(adapter.name), adapter.id
        if former is not None:
            await self._engine.remove(former, wait=False)
        return ""

    async def update(self, adapter: Adapter) -> str:
        await self._engine.change(adapter)
        return ""

    async def unregister(self, adapter: Adapter) -> str:
        self._current.pop(adapter.name, None)
        self._formatters.put(adapter.name, None)
        await self._engine.remove(adapter.id)
        return ""

    async def stop(self) -> None:
        """Release the formatters; the engine releases its adapters when it stops."""
        for name in self._current:
            self._formatters.put(name, None)


@dataclass(frozen=True, slots=True)
class LoadedFormatters:
    """A handler with an adapter's formatters, and the name of their module."""

    handler: Handler
    module: str

    def forget(self) -> None:
        sys.modules.pop(self.module, None)


class AdapterFormatters:
    """Answers `/invocations` if adapters may have a `model.py` with formatters."""

    def __init__(
        self,
        otherwise: Handler,
        make: Callable[[Formatters], Handler],
        base: Formatters | None,
        time_limit: float,
        async_mode: bool = False,
    ) -> None:
        """Create the adapter formatters.

        Args:
            otherwise: Answers all other calls.
            make: Makes a handler with these formatters.
            base: The model's own, for a kind that an adapter lacks.
            time_limit: Seconds that running a `model.py` may take.
            async_mode: The mode that they have to fit.
        """
        self._otherwise, self._make, self._base = otherwise, make, base or Formatters(None, None)
        self._time_limit, self._async_mode = time_limit, async_mode
        self._loaded: dict[str, LoadedFormatters] = {}

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        loaded: LoadedFormatters | None = None
        if self._loaded:
            name = await off_the_loop(call.body, named_adapter, call)
            loaded = self._loaded.get(name or "")
        return await (self._otherwise if loaded is None else loaded.handler).handle(call, writer)

    async def load(self, adapter: Adapter) -> LoadedFormatters | None:
        """Run the adapter's `model.py`; None if it has no formatters.

        `put` makes them current.

        Raises:
            AdapterFailed: It cannot be run, and the message has its file and line; or a formatter does not fit the
                model's mode.
        """
        try:
            module = await asyncio.wait_for(in_daemon_thread(lambda: _run(adapter)), self._time_limit)
        except TimeoutError:
            raise AdapterFailed(f"{MODEL_FILE} of the adapter took longer than {self._time_limit:g} s") from None
        if module is None:
            return None
        own = formatters_of(module)
        fault = signature_fault(own, async_mode=self._async_mode)
        if fault or own.input is own.output is None:
            sys.modules.pop(module.__name__, None)
            if fault:
                raise AdapterFailed(f"{MODEL_FILE} of the adapter: {fault}")
            return None
        formatters = Formatters(own.input or self._base.input, own.output or self._base.output)
        return LoadedFormatters(self._make(formatters), module.__name__)

    def put(self, adapter: str, loaded: LoadedFormatters | None) -> None:
        """Make an adapter's formatters current, in the place of its former ones; None: it no longer has any."""
        if (former := self._loaded.pop(adapter, None)) is not None:
            former.forget()
        if loaded is not None:
            self._loaded[adapter] = loaded


def _run(adapter: Adapter) -> ModuleType | None:
    """Return the module of the adapter's `model.py`, under a name that no other has; None if it has no such file."""
    directory = str(adapter.path)
    try:
        if not (adapter.path / MODEL_FILE).is_file():
            return None
    except OSError as error:  # such as a name that is too long
        raise AdapterFailed(f"src: {directory[:_SHOWN]!r} cannot be read: {error.strerror}") from None
    try:
        return load_model_service(directory, MODEL_FILE, namespace=f"{adapter.name}_{adapter.id}").module
    except BaseException as error:
        logger.exception("%s of the adapter %s cannot be run", MODEL_FILE, adapter.name)
        raise AdapterFailed(f"{MODEL_FILE} of the adapter cannot be run: {describe_error(error, directory)}") from error
