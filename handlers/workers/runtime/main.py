"""A worker's life: load the customer's module, initialize the handler, serve calls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import socket
import sys
import traceback
from collections.abc import Coroutine, Iterator
from types import ModuleType

from djl_python.outputs import Output

from .calls import AsyncMode, Caller, SyncMode, end_at_once, is_out_of_memory
from .channel import Channel, Frame, Kind, LoadOrder, decode_order
from .guardian import die_with_parent, guard_group

_FAILED = 300


class LoadError(Exception):
    """The handler cannot be used; the message is for its author."""


def serve(descriptor: int, parent: int) -> None:
    """Serve over the inherited socket `descriptor` until the server, whose process is `parent`, sends STOP."""
    os.set_inheritable(descriptor, False)
    die_with_parent(parent)
    guard_group()
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    channel = Channel(socket.socket(fileno=descriptor))
    frames = channel.read()
    order = decode_order(next(frames).body)
    try:
        module = load_module(order)
        if order.async_mode:
            _run(_serve_async(channel, frames, module, order))
        else:
            _serve_sync(channel, frames, module, order)
    except LoadError as error:
        channel.send((Kind.LOAD_FAILED, 0, str(error).encode(errors="replace")))
    finally:
        channel.close()


def _run(serving: Coroutine[None, None, None]) -> None:
    with asyncio.Runner() as runner:
        try:
            runner.run(serving)
        except (SystemExit, KeyboardInterrupt) as error:
            end_at_once(error)  # before the runner cancels the other calls, whose clients would be told that they ended


def _serve_sync(channel: Channel, frames: Iterator[Frame], module: ModuleType, order: LoadOrder) -> None:
    mode = SyncMode(channel, Caller(module, order))
    with _initializing(order):
        _check(mode.initialize())
    channel.send((Kind.LOADED, 0, b""))
    mode.serve(frames)


async def _serve_async(channel: Channel, frames: Iterator[Frame], module: ModuleType, order: LoadOrder) -> None:
    mode = AsyncMode(channel, Caller(module, order))
    with _initializing(order):
        _check(await mode.initialize())
    channel.send((Kind.LOADED, 0, b""))
    await mode.serve(frames)


@contextlib.contextmanager
def _initializing(order: LoadOrder) -> Iterator[None]:
    """Make a LoadError of any other error."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        traceback.print_exc()
        kind = "ran out of memory" if is_out_of_memory(error) else "failed"
        raise LoadError(f"the handler's initialization {kind}: {_described(error, order)}") from error


def _check(output: Output) -> None:
    """Raise LoadError if the initializing call answered with an error status."""
    if output.code < _FAILED:
        return
    body = b"".join(map(bytes, output.content.get_values())).decode("utf-8", "replace")
    raise LoadError(f"the handler's initialization answered {output.code} {output.message}: {body}".rstrip(": "))


def load_module(order: LoadOrder) -> ModuleType:
    """Import the entry point, with the model's folder first on the import path.

    Raises:
        LoadError: it cannot be imported, or does not define the function.
    """
    sys.path.insert(0, order.model_dir)
    try:
        module = _import(order)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise LoadError(f"cannot import the handler {_described(error, order)}") from error
    if not callable(getattr(module, order.function, None)):
        where = getattr(module, "__file__", None) or order.entry_point
        raise LoadError(f"{where} does not define the handler function `{order.function}`{_defined(module)}")
    return module


def _import(order: LoadOrder) -> ModuleType:
    if not order.entry_point.endswith(".py"):
        return importlib.import_module(order.entry_point)
    path = os.path.join(order.model_dir, order.entry_point)
    if not os.path.isfile(path):
        raise LoadError(f"the handler file {path} does not exist")
    name = _module_name(path, order.model_dir)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"the handler file {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module_name(path: str, model_dir: str) -> str:
    """The file's own name, by which siblings and pickles find the module; another one if that name is taken."""
    stem = os.path.basename(path)[: -len(".py")]
    if stem.isidentifier() and stem not in sys.modules and os.path.dirname(path) == model_dir:
        return stem
    return "model_" + hashlib.sha256(path.encode()).hexdigest()[:8]


def _defined(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return f"; it defines {', '.join(f'`{name}`' for name in names)}" if names else ""


def _described(error: BaseException, order: LoadOrder) -> str:
    """The error, with the customer's file and line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    text = f"{type(error).__name__}: {error}"
    folder = os.path.realpath(order.model_dir) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.realpath(frame.filename).startswith(folder)]
    if not own:
        return f"{order.entry_point}: {text}"
    return f"{own[-1].filename}, line {own[-1].lineno}: {text}"
