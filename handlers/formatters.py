"""A customer's input and output formatters: imported from `model.py` into this process, and run in a thread."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from djl_python.output_formatter import takes_request_output
from djl_python.service_loader import find_decorated_function
from handlers.engines.protocol import EngineStartError
from handlers.errors import GenerationFailed
from handlers.model_settings import HandlerSettings, ModelSettings
from handlers.workers.packages import needs_packages, prepare_interpreter

logger = logging.getLogger(__name__)

T = TypeVar("T")
Formatter = Callable[..., Any]

_CHECK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Formatters:
    """The formatters of a model or of an adapter."""

    input: Formatter | None
    output: Formatter | None

    @property
    def output_takes_tokens(self) -> bool:
        """Whether the output formatter is of the older kind, which is called with each token."""
        return self.output is not None and not takes_request_output(self.output)


def formatters_of(module: ModuleType) -> Formatters:
    """The decorated formatters of a module."""
    return Formatters(
        find_decorated_function(module, "is_input_formatter"), find_decorated_function(module, "is_output_formatter")
    )


async def add_packages(settings: ModelSettings, imports: ModelImports) -> None:
    """Install the model's `requirements.txt`, and make the packages importable that this process does not have itself.

    Raises:
        EngineStartError: the environment for them cannot be made, or pip fails.
    """
    handler = HandlerSettings(
        entry_point=str(settings.formatters or ""),
        offline=settings.offline,
        install_requirements=settings.install_requirements,
        pip_arguments=settings.pip_arguments,
    )
    if not needs_packages(settings.model_dir, handler):
        return
    python = Path(await prepare_interpreter(settings.model_dir, handler))
    for directory in (python.parents[1] / "lib").glob("python*/site-packages"):
        imports.add_packages(directory)


def load_formatters(settings: ModelSettings, imports: ModelImports) -> Formatters | None:
    """Import the model's `model.py`; None where it has no formatters. They can be used until `imports` are removed.

    Raises:
        EngineStartError: it cannot be imported, with file and line; or it has no function of the name in
            `option.output_formatter`.
    """
    path = settings.formatters
    if path is None:
        return None
    imports.add_own(path.parent)
    module = _import(path, settings.name)
    found = formatters_of(module)
    if settings.formatter_function is not None:
        output = getattr(module, settings.formatter_function, None)
        if not callable(output):
            raise EngineStartError(
                f"option.output_formatter is {settings.formatter_function}: {path.name} has no such function"
            )
        found = Formatters(found.input, output)
    elif settings.output_formatter is not None:  # a built-in one was asked for
        found = Formatters(found.input, None)
    if found.input is None and found.output is None:
        logger.info("%s has neither a handler nor formatters; the engine serves the model without it", path.name)
        return None
    for kind, formatter in (("input", found.input), ("output", found.output)):
        if formatter is not None:
            logger.info("%s formatter: %s of %s", kind, getattr(formatter, "__name__", formatter), path.name)
    return found


def _import(path: Path, model: str) -> ModuleType:
    """The module, under a name of the model's own."""
    name = f"slipway_model_{model}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EngineStartError(f"{path.name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # nothing is written into the model's directory
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        logger.exception("%s cannot be imported", path.name)
        raise EngineStartError(f"{path.name} cannot be imported: {described(error, path.parent)}") from error
    finally:
        sys.dont_write_bytecode = writes
    return module


def described(error: BaseException, directory: Path) -> str:
    """The error, with the file and line below `directory` where it was raised."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text  # has file and line already
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(directory))]
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


_own_directories: list[str] = []
"""The directories of all loaded models, each once for each model that has it."""


class ModelImports:
    """The entries of `sys.path` that one model adds, and the modules that come from its own directory.

    A directory of several models is on `sys.path` once for each, so that it stays until the last of them is unloaded.
    """

    def __init__(self) -> None:
        self._own: list[str] = []
        self._packages: list[str] = []

    def add_own(self, directory: Path) -> None:
        """Import from the model's directory before anything else.

        Modules beside `model.py` may have the same names in several models. Those of other models are removed from
        `sys.modules`, so that this model imports its own; whoever has imported them keeps them.
        """
        place = str(directory)
        for name, module in list(sys.modules.items()):
            came_from = _own_directory_of(module)
            if came_from is not None and came_from != place and _is_there(name, directory):
                sys.modules.pop(name, None)
        sys.path.insert(0, place)
        _own_directories.append(place)
        self._own.append(place)

    def add_packages(self, directory: Path) -> None:
        """Import from there what is nowhere else; packages of the server keep their versions."""
        place = str(directory)
        sys.path.append(place)
        self._packages.append(place)

    def remove(self) -> None:
        """Undo the additions, and remove the modules of the model's own directory from `sys.modules`.

        Packages stay imported, because many cannot be imported a second time.
        """
        for place in self._packages:
            if place in sys.path:
                del sys.path[len(sys.path) - 1 - sys.path[::-1].index(place)]
        for place in self._own:
            if place in sys.path:
                sys.path.remove(place)
            if _own_directories.count(place) == 1:
                sys.path_importer_cache.pop(place, None)
                for name, module in list(sys.modules.items()):
                    if _own_directory_of(module) == place:
                        sys.modules.pop(name, None)
            _own_directories.remove(place)
        self._packages, self._own = [], []


def _own_directory_of(module: ModuleType | None) -> str | None:
    """The loaded model's directory that a module is from; None for all others."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    places = (place for place in _own_directories if file.startswith(place + os.sep) and not __file__.startswith(place))
    return max(places, key=len, default=None)  # the innermost


def _is_there(name: str, directory: Path) -> bool:
    top = name.partition(".")[0]
    return (directory / f"{top}.py").is_file() or (directory / top).is_dir()


class FormatterThread:
    """A thread that calls formatters one at a time, as LMI does.

    A call that takes longer than `time_limit` seconds fails. Its thread cannot be stopped; it is abandoned, and another
    one continues with the calls that wait.
    """

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._open: deque[_FormatterCall] = deque()
        """Calls that are not done, in order; for the event loop alone."""
        self._waiting: deque[_FormatterCall] = deque()
        """Calls that have not begun; guarded by `_changed`, as are `_thread` and `_stopped`."""
        self._changed = threading.Condition()
        self._thread = 0
        """The number of the current thread; those with lower numbers are abandoned."""
        self._stopped = False
        """A thread without work ends."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checking = False

    def stop(self) -> None:
        """End the thread once it has done the calls that wait; a later call gets a thread of its own."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def submit(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        """Run `work` after all that was submitted before; `done` gets its result or error on the event loop."""
        needs_thread = self._loop is None or self._stopped
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        call = _FormatterCall(work, done)
        self._open.append(call)
        with self._changed:
            self._waiting.append(call)
            self._changed.notify()
        if needs_thread:
            self._start_thread(self._loop)
        if not self._checking:
            self._checking = True
            self._loop.call_later(_CHECK_SECONDS, self._check, self._loop)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work`, and wait for its result.

        Raises:
            GenerationFailed: it took too long.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(outcome: T | BaseException) -> None:
            if future.cancelled():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.submit(work, done)
        return await future

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            self._thread += 1
            self._changed.notify_all()
        threading.Thread(target=self._work, args=(self._thread, loop), name="formatters", daemon=True).start()

    def _work(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        while (call := self._next(number)) is not None:
            try:
                outcome = call.work()
            except Exception as error:
                # A future cannot hold a StopIteration.
                outcome = error if not isinstance(error, StopIteration) else _failure(error)
            except BaseException as error:
                # A formatter must neither end the server nor cancel one of its tasks.
                outcome = _failure(error)
            try:
                loop.call_soon_threadsafe(self._finish, call, outcome)
            except RuntimeError:  # the loop is closed: the process is ending
                return

    def _next(self, number: int) -> _FormatterCall | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped or number != self._thread)
            if number != self._thread or not self._waiting:
                return None
            call = self._waiting.popleft()
            call.started = time.monotonic()
            return call

    def _finish(self, call: _FormatterCall, outcome: Any) -> None:
        if call.abandoned:
            return
        self._open.remove(call)  # the first one, as the thread keeps the order
        call.done(outcome)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Replace the thread if its call has taken too long."""
        started = self._open[0].started if self._open else None
        if started is not None and time.monotonic() - started > self._time_limit:
            self._replace_thread(loop)
        self._checking = bool(self._open)
        if self._checking:
            loop.call_later(_CHECK_SECONDS, self._check, loop)

    def _replace_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        stuck = self._open.popleft()
        stuck.abandoned = True
        logger.error("a formatter did not return within predict_timeout (%g s); going on without it", self._time_limit)
        self._start_thread(loop)
        stuck.done(GenerationFailed(f"the formatter did not return within predict_timeout ({self._time_limit:g} s)"))


class _FormatterCall:
    __slots__ = ("abandoned", "done", "started", "work")

    def __init__(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.work, self.done = work, done
        self.started: float | None = None
        self.abandoned = False


def _failure(error: BaseException) -> GenerationFailed:
    return GenerationFailed(f"Custom formatter failed: {type(error).__name__}: {error}")
