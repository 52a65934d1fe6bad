"""The formatters of adapters, from each adapter's `model.py`, for a model that an engine runs."""

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
from handlers.contract import Call, Handler, ReplyWriter, Running
from handlers.custom.formatters import Formatters, formatters_of, signature_fault
from handlers.custom.worker_process.load_error import describe_error
from handlers.json_cost import off_the_loop
from handlers.lmi.adapter_choice import named_adapter

logger = logging.getLogger(__name__)

_SHOWN = 200  # Characters of a path in a message.


@dataclass(frozen=True, slots=True)
class LoadedFormatters:
    """A handler with an adapter's formatters, and the name of their module."""

    handler: Handler
    module: str

    def forget(self) -> None:
        sys.modules.pop(self.module, None)


class AdapterFormatters:
    """The handler of `/invocations` if adapters may have a `model.py` with formatters."""

    def __init__(
        self,
        otherwise: Handler,
        make: Callable[[Formatters], Handler],
        base: Formatters | None,
        time_limit: float,
        async_mode: bool = False,
    ) -> None:
        """Create the handler.

        Args:
            otherwise: The handler of calls whose adapter has no formatters.
            make: Returns a handler with the given formatters.
            base: The model's formatters. An adapter with only one kind of formatter uses the other kind from here.
            time_limit: Seconds that running a `model.py` may take.
            async_mode: The value of option.async_mode, which decides the formatters' signatures.
        """
        self._otherwise, self._make, self._base = otherwise, make, base or Formatters(None, None)
        self._time_limit, self._async_mode = time_limit, async_mode
        self._loaded: dict[str, LoadedFormatters] = {}  # By the adapters' names.

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        loaded: LoadedFormatters | None = None
        if self._loaded:
            name = await off_the_loop(call.body, named_adapter, call)
            loaded = self._loaded.get(name or "")
        return await (self._otherwise if loaded is None else loaded.handler).handle(call, writer)

    async def load(self, adapter: Adapter) -> LoadedFormatters | None:
        """Run the adapter's `model.py` and return its formatters, or None if it has none.

        Calls use them only after `put`.

        Raises:
            AdapterFailed: The file cannot be run; the message has the file and the line. Or the model's mode cannot
                call a formatter.
        """
        running = asyncio.ensure_future(in_daemon_thread(lambda: _run(adapter)))
        try:
            module = await asyncio.wait_for(asyncio.shield(running), self._time_limit)
        except TimeoutError:
            raise AdapterFailed(f"{MODEL_FILE} of the adapter took longer than {self._time_limit:g} s") from None
        finally:
            if not running.done():
                running.add_done_callback(_forget)
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
        """Replace the formatters of an adapter. None removes them."""
        if (former := self._loaded.pop(adapter, None)) is not None:
            former.forget()
        if loaded is not None:
            self._loaded[adapter] = loaded


def _forget(late: asyncio.Future[ModuleType | None]) -> None:
    """Remove the module of a `model.py` whose end nobody waited for."""
    if not late.cancelled() and late.exception() is None and (module := late.result()) is not None:
        sys.modules.pop(module.__name__, None)


def _run(adapter: Adapter) -> ModuleType | None:
    """Return the module of the adapter's `model.py`, or None if it has no such file.

    The module has a unique name.
    """
    directory = str(adapter.path)
    try:
        if not (adapter.path / MODEL_FILE).is_file():
            return None
    except OSError as error:  # For example, the name is too long.
        raise AdapterFailed(f"src: {directory[:_SHOWN]!r} cannot be read: {error.strerror}") from None
    try:
        return load_model_service(directory, MODEL_FILE, namespace=f"{adapter.name}_{adapter.id}").module
    except BaseException as error:
        logger.exception("%s of the adapter %s cannot be run", MODEL_FILE, adapter.name)
        raise AdapterFailed(f"{MODEL_FILE} of the adapter cannot be run: {describe_error(error, directory)}") from error
