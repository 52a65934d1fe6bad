"""The adapters of a model that an engine runs: in the engine, and their formatters beside it."""

from __future__ import annotations

from handlers.adapter_formatters import AdapterFormatters
from handlers.adapters import Adapter
from handlers.engines.protocol import EngineAdapter, EngineAdapters


class EngineAdapterHost:
    """See `handlers.adapters.AdapterHost`."""

    def __init__(self, engine: EngineAdapters, formatters: AdapterFormatters) -> None:
        self._engine, self._formatters = engine, formatters
        self._current: dict[str, int] = {}
        """Ids by names."""

    async def register(self, adapter: Adapter) -> str:
        """See `AdapterHost.register`."""
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
        """See `AdapterHost.update`."""
        await self._engine.change(_for_engine(adapter), preload=adapter.preload)
        return ""

    async def unregister(self, adapter: Adapter) -> str:
        """See `AdapterHost.unregister`."""
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
