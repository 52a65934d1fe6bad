"""The adapters of a model that an engine runs. The engine has their weights, this process their formatters."""

from __future__ import annotations

from engines.adapters import Adapter
from engines.interface import EngineAdapters
from handlers.lmi.adapter_formatters import AdapterFormatters


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
        """Release the formatters. The engine releases its adapters when it stops."""
        for name in self._current:
            self._formatters.put(name, None)
