"""A customer's input and output formatters: found in `model.py`, and imported into this process.

Source: contracts/lmi.md sections 8.1 and 8.2.
"""

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

_imported_from: list[str] = []
"""The directories of models that are loaded; one that several models share is there for each of them."""


class ModelImports:
    """The places on `sys.path` that one model adds, and the modules that come from its own directory.

    A directory is on `sys.path` once for each model that has it, so that it stays until the last of them is gone.
    """

    def __init__(self) -> None:
        self._own: list[str] = []
        self._packages: list[str] = []

    def add_own(self, directory: Path) -> None:
        """Import from the model's directory before anything else.

        Modules beside `model.py` have names that any model may use: those of other models are forgotten, so that this
        one gets its own. Whoever has imported them goes on with them.
        """
        place = str(directory)
        for name, module in list(sys.modules.items()):
            came_from = _directory_of(module)
            if came_from is not None and came_from != place and _is_there(name, directory):
                sys.modules.pop(name, None)
        sys.path.insert(0, place)
        _imported_from.append(place)
        self._own.append(place)

    def add_packages(self, directory: Path) -> None:
        """Import from there what is nowhere else, so that no package of ours is replaced under the engine."""
        place = str(directory)
        sys.path.append(place)
        self._packages.append(place)

    def remove(self) -> None:
        """Import from there no more, and let go of the modules of the model's own directory, with all that they keep.

        Packages stay imported: many cannot be imported a second time.
        """
        for place in self._packages:
            if place in sys.path:
                del sys.path[len(sys.path) - 1 - sys.path[::-1].index(place)]
        for place in self._own:
            if place in sys.path:
                sys.path.remove(place)
            if _imported_from.count(place) == 1:
                sys.path_importer_cache.pop(place, None)
                for name, module in list(sys.modules.items()):
                    if _directory_of(module) == place:
                        sys.modules.pop(name, None)
            _imported_from.remove(place)
        self._packages, self._own = [], []


def _directory_of(module: ModuleType | None) -> str | None:
    """The loaded model's directory that a module is from; None for all others."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    places = (place for place in _imported_from if file.startswith(place + os.sep) and not __file__.startswith(place))
    return max(places, key=len, default=None)  # one may lie in another


def _is_there(name: str, directory: Path) -> bool:
    top = name.partition(".")[0]
    return (directory / f"{top}.py").is_file() or (directory / top).is_dir()


T = TypeVar("T")
_CHECK_SECONDS = 0.5


class _Job:
    __slots__ = ("abandoned", "done", "started", "work")

    def __init__(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.work, self.done = work, done
        self.started: float | None = None
        self.abandoned = False


class FormatterThread:
    """A thread of its own for formatters, which LMI also calls one at a time.

    A call that takes longer than `time_limit` seconds fails; its thread cannot be stopped, so it is left behind and
    another one goes on with the calls that wait.
    """

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._open: deque[_Job] = deque()
        """Jobs that are not done, in order; for the event loop alone."""
        self._waiting: deque[_Job] = deque()
        """Jobs that no thread has begun; guarded by `_changed`, as is `_thread`."""
        self._changed = threading.Condition()
        self._thread = 0
        """The number of the thread that is to work; those with lower numbers are left behind."""
        self._stopped = False
        """Guarded by `_changed`: a thread that finds nothing to do ends."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching = False

    def stop(self) -> None:
        """Let the thread end once it has done what waits; what comes later has one of its own."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def submit(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        """Have `work` run after what was submitted before; `done` gets its result or error on the event loop."""
        idle = self._loop is None
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        job = _Job(work, done)
        self._open.append(job)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
        if idle or self._stopped:
            self._begin(self._loop)
        if not self._watching:
            self._watching = True
            self._loop.call_later(_CHECK_SECONDS, self._check, self._loop)

    async def run(self, work: Callable[[], T]) -> T:
        """Have `work` run, and wait for it.

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

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            self._thread += 1
            self._changed.notify_all()
        threading.Thread(target=self._work, args=(self._thread, loop), name="formatters", daemon=True).start()

    def _work(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._next(number)) is not None:
            try:
                outcome = job.work()
            except Exception as error:
                outcome = error if not isinstance(error, StopIteration) else _failure(error)
            except BaseException as error:
                # A formatter must neither end the server nor cancel one of its tasks.
                outcome = _failure(error)
            try:
                loop.call_soon_threadsafe(self._finish, job, outcome)
            except RuntimeError:  # the loop is closed: the process is ending, and nobody waits
                return

    def _next(self, number: int) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped or number != self._thread)
            if number != self._thread or not self._waiting:
                return None
            job = self._waiting.popleft()
            job.started = time.monotonic()
            return job

    def _finish(self, job: _Job, outcome: Any) -> None:
        if job.abandoned:
            return
        self._open.remove(job)  # the first one, as the thread keeps the order
        job.done(outcome)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._open and self._overdue(self._open[0]):
            self._replace(loop)
        self._watching = bool(self._open)
        if self._watching:
            loop.call_later(_CHECK_SECONDS, self._check, loop)

    def _overdue(self, job: _Job) -> bool:
        return job.started is not None and time.monotonic() - job.started > self._time_limit

    def _replace(self, loop: asyncio.AbstractEventLoop) -> None:
        stuck = self._open.popleft()
        stuck.abandoned = True
        logger.error("a formatter did not return within predict_timeout (%g s); going on without it", self._time_limit)
        self._begin(loop)
        stuck.done(GenerationFailed(f"the formatter did not return within predict_timeout ({self._time_limit:g} s)"))


def _failure(error: BaseException) -> GenerationFailed:
    return GenerationFailed(f"Custom formatter failed: {type(error).__name__}: {error}")


Formatter = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Formatters:
    """What was found; at least one of both."""

    input: Formatter | None
    output: Formatter | None

    @property
    def output_takes_tokens(self) -> bool:
        """Whether the output formatter is of the older kind, which is called with each token."""
        return self.output is not None and not takes_request_output(self.output)


async def add_packages(settings: ModelSettings, imports: ModelImports) -> None:
    """Install the model's `requirements.txt`, and let this process import from there what it does not have itself.

    Raises:
        EngineStartError: no environment for them can be made, or pip fails.
    """
    own = HandlerSettings(
        entry_point=str(settings.formatters or ""),
        offline=settings.offline,
        install_requirements=settings.install_requirements,
        pip_arguments=settings.pip_arguments,
    )
    if not needs_packages(settings.model_dir, own):
        return
    python = Path(await prepare_interpreter(settings.model_dir, own))
    for directory in (python.parents[1] / "lib").glob("python*/site-packages"):
        imports.add_packages(directory)


def load_formatters(settings: ModelSettings, imports: ModelImports) -> Formatters | None:
    """Import the model's `model.py`; None where it has no formatters.

    They can be used until `imports` are removed.

    Raises:
        EngineStartError: it cannot be imported, with file and line; or `option.output_formatter` names no function
            of it.
    """
    path = settings.formatters
    if path is None:
        return None
    imports.add_own(path.parent)
    module = _import(path, settings.name)
    output = find_decorated_function(module, "is_output_formatter")
    if settings.formatter_function is not None:
        output = getattr(module, settings.formatter_function, None)
        if not callable(output):
            raise EngineStartError(
                f"option.output_formatter is {settings.formatter_function}: {path.name} has no such function"
            )
    elif settings.output_formatter is not None:  # a built-in one was asked for
        output = None
    found = Formatters(find_decorated_function(module, "is_input_formatter"), output)
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
    sys.dont_write_bytecode = True  # the model's directory is not ours to write to
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
    """The error with the file and line below `directory` where it was raised."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text  # says where it is
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(directory))]
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
