"""The adapters of a model that an engine runs.

The engine holds the weights, and this process holds the formatters.
"""

from __future__ import annotations

from collections.abc import Callable

from engines.adapters import Adapter
from engines.interface import EngineAdapters
from handlers.contract import Call, Handler, ReplyWriter, Running
from handlers.custom.formatters import Formatters, load_adapter_formatters
from handlers.lmi.adapter_choice import named_adapter
from handlers.parsing.json_limits import off_the_loop


class EngineAdapterHost:
    """Implements `engines.adapters.AdapterHost`, and handles `/invocations` of a model with adapters."""

    reads_src = False

    def __init__(
        self,
        engine: EngineAdapters,
        otherwise: Handler,
        make: Callable[[Formatters], Handler],
        base: Formatters,
        async_mode: bool = False,
    ) -> None:
        """Create the host.

        Args:
            engine: Loads the weights.
            otherwise: The handler of calls whose adapter has no formatters.
            make: Returns a handler with the given formatters.
            base: The model's formatters.
            async_mode: The value of option.async_mode.
        """
        self._engine, self._otherwise, self._make = engine, otherwise, make
        self._base, self._async_mode = base, async_mode
        self._current: dict[str, int] = {}  # The adapters' ids, by name.
        self._formatted: dict[str, tuple[Handler, Formatters]] = {}  # Adapters with formatters, by name.

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        handler = self._otherwise
        if self._formatted:
            name = await off_the_loop(call.body, named_adapter, call)
            if (formatted := self._formatted.get(name or "")) is not None:
                handler = formatted[0]
        return await handler.handle(call, writer)

    async def register(self, adapter: Adapter) -> str:
        loaded = await load_adapter_formatters(adapter, self._base, async_mode=self._async_mode)
        try:
            formatted = (self._make(loaded), loaded) if loaded is not None else None
            await self._engine.add(adapter)
        except BaseException:
            if loaded is not None:
                loaded.forget()
            raise
        self._forget(adapter.name)
        if formatted is not None:
            self._formatted[adapter.name] = formatted
        former, self._current[adapter.name] = self._current.get(adapter.name), adapter.id
        if former is not None:
            await self._engine.remove(former, wait=False)
        return ""

    async def update(self, adapter: Adapter) -> str:
        await self._engine.change(adapter)
        return ""

    async def unregister(self, adapter: Adapter) -> str:
        self._current.pop(adapter.name, None)
        self._forget(adapter.name)
        await self._engine.remove(adapter.id)
        return ""

    async def stop(self) -> None:
        """Release the formatters. The engine releases its adapters when it stops."""
        for name in list(self._formatted):
            self._forget(name)

    def _forget(self, name: str) -> None:
        if (formatted := self._formatted.pop(name, None)) is not None:
            formatted[1].forget()
