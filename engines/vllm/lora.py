"""LoRA adapters on vLLM: which adapters are in memory, and which requests use them.

If a step needs an adapter that is not in memory, vLLM reads it from its directory. If that fails, the engine process
dies. vLLM also treats all adapters with the same name as one adapter. So:

- This module decides which adapters are in memory. It never loads more adapters than vLLM's cache holds, so vLLM never
  drops an adapter. No adapter is dropped while a request uses it. So vLLM never reads a file within a step, and a
  failed load is only an error for the request.
- Each registration gets a new name in vLLM, which no later registration reuses. If an adapter is registered again, its
  requests never share a batch with requests of the former adapter. They never use the former adapter's blocks in the
  prefix cache.

vLLM's own pinning is not used. With it, a pinned adapter occupies one of the slots of a batch, but vLLM's scheduler
still fills batches with as many adapters as there are slots.

If an adapter cannot be loaded, `AsyncLLM.add_lora` raises the error. tests/live/test_adapters_live.py checks that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engines.adapters import Adapter
from engines.errors import AdapterFailed, AdapterUnusable, EngineDead, NoRoomForAdapter, Overloaded, UnknownAdapter
from engines.vllm.async_llm import request_states
from engines.vllm.background_tasks import BackgroundTasks
from engines.vllm.lora_files import CHANGED, AdapterFiles, Shapes, base_shapes, check_adapter, file_states, read_ahead

logger = logging.getLogger(__name__)

# Seconds between two checks of the running requests, and the wait after the last check. An aborted request disappears
# from vLLM's list before the abort reaches the engine process. After this wait, the abort has arrived, and the adapter
# can be removed.
_POLL = 0.05
_REMOVE_SECONDS = 30.0  # The maximum time that `remove` waits for requests.
_FAILURE = "Call to add_lora method failed: "  # vLLM puts this text before an error from its engine process.
# vLLM's text around an error from a worker.
_WORKER_FAILURE = re.compile(r"Worker failed with error '(.*)', please check the stack trace above .*", re.DOTALL)


class PublicAdapters(dict[str, LoRARequest]):
    """The adapters by their public names. vLLM's front end looks them up here.

    vLLM iterates over `values` only to match content types such as "text" with names of adapters. Slipway selects
    adapters only by name, so `values` is empty.
    """

    def values(self) -> Any:
        return ()


class Claim:
    """Keeps an adapter in memory for a request until the engine has the request."""

    __slots__ = ("_held", "_open", "request")

    def __init__(self, held: _Held) -> None:
        held.claims += 1
        self._held, self._open = held, True
        self.request = held.request  # vLLM's form of the adapter.

    def release(self) -> None:
        """Release the claim. Harmless if it was released before."""
        if self._open:
            self._open = False
            self._held.claims -= 1


class _Held:
    __slots__ = ("adapter", "claims", "files", "loading", "request", "resident", "used")

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.files: AdapterFiles | None = None  # None until the adapter is loaded for the first time.
        self.request = LoRARequest(f"{adapter.name}#{adapter.id}", adapter.id, str(adapter.path))
        self.claims = 0
        self.resident = False
        self.used = 0.0
        self.loading: asyncio.Task[None] | None = None

    def end_loading(self, _: asyncio.Task[None]) -> None:
        self.loading = None  # The error of a failed task refers to the content of the files.


def _replaces(held: _Held, other: _Held) -> bool:
    """Return True if both adapters have the same name. Then one replaces the other, or both are the same adapter."""
    return held.adapter.name == other.adapter.name


class VllmAdapters:
    """The adapters of a model. Each is in the memory of all copies, or of none."""

    def __init__(self, llm: AsyncLLM, patience: float, empty_slots: int = 0) -> None:
        """Create the vLLM adapters.

        Args:
            patience: The limit in seconds for loading an adapter, and for waiting for a place in memory.
            empty_slots: The number of vLLM's slots that stay empty.
        """
        lora: Any = llm.vllm_config.lora_config
        self._llm, self._patience = llm, patience
        self._places: int = (lora.max_cpu_loras or lora.max_loras) - empty_slots
        # The end of an error message. It gives the number of places, and names the settings that decide this number.
        self._limit = f"({self._places}: option.max_cpu_loras, or else option.max_loras)"
        self._max_rank: int = lora.max_lora_rank
        self._held: dict[int, _Held] = {}
        self.public = PublicAdapters()
        # Adapters are loaded one by one, because the engine makes no steps during a load.
        self._turn = asyncio.Lock()
        self._tasks = BackgroundTasks(_log_error)

    @cached_property
    def _base(self) -> Shapes:
        return base_shapes(Path(self._llm.model_config.model))

    async def add(self, adapter: Adapter) -> None:
        await asyncio.to_thread(check_adapter, adapter.path, self._max_rank)
        held = self._held[adapter.id] = _Held(adapter)
        try:
            if adapter.pin:
                self._check_pins(held)
            if adapter.preload:
                await self._loaded(held)
        except asyncio.CancelledError:
            await self.remove(adapter.id, wait=False)  # The cancellation must not wait for the load.
            raise
        except BaseException:
            await self.remove(adapter.id)
            raise
        self.public[adapter.name] = LoRARequest(adapter.name, adapter.id, str(adapter.path))

    async def change(self, adapter: Adapter) -> None:
        held = self._held[adapter.id]
        before, held.adapter = held.adapter, adapter
        try:
            if adapter.pin:
                self._check_pins(held)
            if adapter.preload or adapter.pin:
                await self._loaded(held)
        except BaseException:
            held.adapter = before
            raise

    async def remove(self, adapter_id: int, *, wait: bool = True) -> None:
        held = self._held.get(adapter_id)
        if held is None:
            return
        if (public := self.public.get(held.adapter.name)) is not None and public.lora_int_id == adapter_id:
            del self.public[held.adapter.name]
        freeing = self._tasks.begin(self._free(held))
        if wait:
            await asyncio.wait({freeing}, timeout=_REMOVE_SECONDS)

    async def claim(self, name: str) -> Claim:
        """Return a claim on the adapter of this name. The adapter stays in memory until the claim is released.

        Raises:
            UnknownAdapter: No adapter has this name.
            AdapterUnusable: The adapter can no longer be loaded.
            Overloaded: No place in memory becomes free in time.
            EngineDead: The engine has died.
        """
        if (public := self.public.get(name)) is None:
            raise UnknownAdapter(name, self.public)
        held = self._held[public.lora_int_id]
        held.used = time.monotonic()
        claim = Claim(held)
        try:
            await self._loaded(held)
        except BaseException as error:
            claim.release()
            if isinstance(error, NoRoomForAdapter):
                raise Overloaded(error.message) from None
            if isinstance(error, AdapterFailed):
                raise AdapterUnusable(name, error.message) from None
            raise
        return claim

    async def load_into(self, add: Callable[[LoRARequest], Awaitable[Any]], *, is_only: bool) -> None:
        """Load the adapters into a newly started copy of the model.

        Args:
            add: Loads an adapter into the copy.
            is_only: Whether no other copy serves. If so, an adapter that is not preloaded, pinned or in use is loaded
                only when a request needs it.

        Raises:
            EngineDeadError: The copy has died.
        """
        async with self._turn:
            lost = [held for held in self._held.values() if held.resident]
            idle = self._idle(lost) if is_only else ()
            for held in lost:
                held.resident = held.adapter.pin or held.adapter.preload or held not in idle
                # An adapter that is not in `_held` was unregistered while the adapters before it were loaded.
                if not held.resident or held.adapter.id not in self._held:
                    continue
                try:
                    await asyncio.to_thread(read_ahead, held.adapter.path, self._max_rank, self._base, held.files)
                    async with asyncio.timeout(self._patience):
                        await add(held.request)
                except EngineDeadError:
                    raise
                except Exception as error:  # Only the adapter's own requests fail.
                    held.resident = False
                    logger.error("adapter %s cannot be loaded into a copy: %s", held.adapter.name, _reason(error))

    def is_loaded(self, adapter_id: int) -> bool:
        held = self._held.get(adapter_id)
        return held is not None and held.resident

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _loaded(self, held: _Held) -> None:
        """Wait until the adapter is in memory. If a waiting call is cancelled, loading continues for other calls."""
        if held.resident:
            return
        loading = held.loading
        if loading is None or loading.done():
            loading = held.loading = self._tasks.begin(self._load(held))
            loading.add_done_callback(held.end_loading)
        await asyncio.wait({loading}, timeout=self._patience)
        if not loading.done():
            raise NoRoomForAdapter(f"it was not loaded within {self._patience:g} s {self._limit}")
        if loading.cancelled():
            raise EngineDead
        try:
            loading.result()
        finally:
            del loading  # Otherwise a cycle of its error and this frame keeps the content of the files in memory.

    async def _load(self, held: _Held) -> None:
        async with self._turn:
            path = held.adapter.path
            found = await asyncio.to_thread(lambda: read_ahead(path, self._max_rank, self._base, held.files))
            await self._make_place(held)
            started = time.monotonic()
            try:
                async with asyncio.timeout(self._patience):
                    await self._llm.add_lora(held.request)
                if found.states != await asyncio.to_thread(file_states, path):  # The engine may have read other files.
                    raise AdapterFailed(CHANGED)
            except AdapterFailed:
                await self._drop_failed(held)
                raise
            except EngineDeadError:
                raise EngineDead from None
            except TimeoutError:
                await self._drop_failed(held)
                raise AdapterFailed(f"loading took longer than {self._patience:g} s") from None
            except Exception as error:
                await self._drop_failed(held)  # The adapter may be partly loaded.
                raise AdapterFailed(_reason(error)) from None
            held.files, held.resident, held.used = found, True, time.monotonic()
        logger.info("adapter %s loaded in %.2f s", held.adapter.name, time.monotonic() - started)

    def _check_pins(self, held: _Held) -> None:
        pinned = sum(other.adapter.pin and not _replaces(held, other) for other in self._held.values())
        if pinned >= self._places:
            raise NoRoomForAdapter(f"{pinned} adapters are pinned, as many as fit into memory {self._limit}")

    async def _make_place(self, wanted: _Held) -> None:
        """If no place is free, drop the least recently used adapter.

        Raises:
            NoRoomForAdapter: All adapters in memory are pinned, or stay in use until the time limit.
        """
        deadline = time.monotonic() + self._patience
        while len(resident := [held for held in self._held.values() if held.resident]) >= self._places:
            movable = [held for held in resident if not held.adapter.pin or _replaces(wanted, held)]
            if not movable:
                raise NoRoomForAdapter(f"every adapter in memory is pinned {self._limit}")
            if time.monotonic() > deadline:
                raise NoRoomForAdapter(f"every adapter in memory is in use {self._limit}")
            idle = self._idle(movable)
            await asyncio.sleep(_POLL)
            if still_idle := self._idle(held for held in idle if held.resident):
                await self._drop(min(still_idle, key=lambda held: held.used))

    def _idle(self, some: Iterable[_Held]) -> list[_Held]:
        running = self._running()
        return [held for held in some if not held.claims and held.adapter.id not in running]

    def _running(self) -> set[int]:
        """Return the ids of the adapters that the engine's requests use."""
        states = request_states(self._llm).values()
        return {state.lora_request.lora_int_id for state in states if state.lora_request is not None}

    async def _drop_failed(self, held: _Held) -> None:
        """Drop an adapter that may be partly loaded, unless requests use it on another copy."""
        if held.adapter.id not in self._running():
            await self._drop(held)

    async def _drop(self, held: _Held) -> None:
        held.resident = False  # Set first, so that the next claim loads the adapter again.
        with contextlib.suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(self._patience):
                await self._llm.remove_lora(held.adapter.id)

    async def _free(self, held: _Held) -> None:
        """Drop an unregistered adapter when nothing uses it."""
        while not self._idle([held]):  # Requests that wait for a new engine process also use it.
            await asyncio.sleep(_POLL)
        await asyncio.sleep(_POLL)
        if held.loading is not None:
            await asyncio.wait({held.loading})
        if held.resident:
            await self._drop(held)
        self._held.pop(held.adapter.id, None)


def _log_error(error: BaseException) -> None:
    logger.info("an adapter could not be loaded: %s", error)


def _reason(error: Exception) -> str:
    text = str(error).removeprefix(_FAILURE)
    found = _WORKER_FAILURE.fullmatch(text)
    return (text if found is None else found[1]) or "vLLM refuses it and does not say why; the log has more"
