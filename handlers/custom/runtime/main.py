"""A worker's life: load the customer's module, initialize the handler, serve calls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Coroutine, Iterator
from types import ModuleType

from djl_python.lmi_vllm import vllm_async_service
from djl_python.outputs import Output
from djl_python.service_loader import run_file
from djl_python.wire import sendable

from . import calls
from .channel import Channel, Kind, LoadOrder, Message
from .script import LOADS, Script

_FAILED = 300
_HANDLE = "handle"  # The function that scripts of SageMaker's script mode lack.


class LoadError(Exception):
    """The handler cannot be used; the message is for its author."""


def serve(descriptor: int) -> None:
    """Serve over the inherited socket `descriptor` until the server says STOP, or has gone."""
    os.set_inheritable(descriptor, False)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    channel = Channel(socket.socket(fileno=descriptor))
    if (first := channel.receive()) is None:
        return
    order = LoadOrder(**json.loads(first.data))
    try:
        caller = calls.Caller(load_module(order), order)
        if order.async_mode:
            _run(_serve_async(channel, caller, order))
        else:
            _serve_sync(channel, caller, order)
    except LoadError as error:
        channel.send(Message(kind=Kind.LOADED, error=sendable(str(error))))
    finally:
        channel.close()


def _run(serving: Coroutine[None, None, None]) -> None:
    with asyncio.Runner() as runner:
        try:
            runner.run(serving)
        except (SystemExit, KeyboardInterrupt) as error:
            # Before the runner cancels the other calls, whose clients would be told that they ended.
            calls.end_at_once(error)


def _serve_sync(channel: Channel, caller: calls.Caller, order: LoadOrder) -> None:
    mode = calls.SyncMode(channel, caller)
    channel.listen(mode.take)
    with _initializing(order):
        output = calls.output_of(caller.initialize())
    _check(output)
    channel.send(Message(kind=Kind.LOADED))
    mode.serve()


async def _serve_async(channel: Channel, caller: calls.Caller, order: LoadOrder) -> None:
    mode, loop = calls.AsyncMode(channel, caller), asyncio.get_running_loop()
    vllm_async_service.connect(mode.engine)

    def take(message: Message) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(mode.take, message)

    channel.listen(take)
    with _initializing(order):
        output = calls.output_of(await calls.first_of(await calls.settled(caller.initialize())))
    _check(output)
    channel.send(Message(kind=Kind.LOADED))
    await mode.serve()


@contextlib.contextmanager
def _initializing(order: LoadOrder) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        kind = "ran out of memory" if calls.is_out_of_memory(error) else "failed"
        raise LoadError(f"the handler's initialization {kind}: {described(error, order.model_dir)}") from error


def _check(output: Output) -> None:
    if output.code < _FAILED:
        return
    body = b"".join(map(output.encode_value, output.content.get_values())).decode("utf-8", "replace")
    raise LoadError(f"the handler's initialization answered {output.code} {output.message}: {body}".rstrip(": "))


def load_module(order: LoadOrder) -> ModuleType:
    """Import the entry point, with the model's folder first on the import path. Raises LoadError: it cannot be
    imported, or does not define the function."""
    sys.path.insert(0, order.model_dir)
    try:
        module = _import(order)
        if order.function == _HANDLE and not hasattr(module, _HANDLE) and callable(getattr(module, LOADS, None)):
            setattr(module, _HANDLE, Script(module).handle)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise LoadError(f"cannot import the handler: {described(error, order.model_dir)}") from error
    if not callable(getattr(module, order.function, None)):
        where = getattr(module, "__file__", None) or order.entry_point
        raise LoadError(f"{where} does not define the handler function `{order.function}`")
    return module


def _import(order: LoadOrder) -> ModuleType:
    if not order.entry_point.endswith(".py"):
        return importlib.import_module(order.entry_point)
    path = os.path.join(order.model_dir, order.entry_point)
    if (directory := os.path.dirname(path)) != order.model_dir:
        sys.path.insert(0, directory)
    if not os.path.isfile(path):
        raise LoadError(f"the handler file {path} does not exist")
    # The file's own name, by which siblings and pickles find the module; another one if that name is taken.
    stem = os.path.basename(path)[: -len(".py")]
    if not stem.isidentifier() or stem in sys.modules or os.path.dirname(path) != order.model_dir:
        stem = "model_" + hashlib.sha256(path.encode()).hexdigest()[:8]
    return run_file(path, stem)


def described(error: BaseException, directory: str) -> str:
    """The error, with the file and line below `directory` where it was raised."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text  # has file and line already
    folder = os.path.realpath(directory)
    places = [(os.path.realpath(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(os.path.relpath(file, folder), line) for file, line in places if file.startswith(folder + os.sep)]
    return f"{text} ({own[-1][0]}, line {own[-1][1]})" if own else text
