"""The main function of a worker process: loads the customer's module, initializes the handler and serves calls."""

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

from . import handler_calls
from .load_error import LoadError, describe_error
from .script_mode import LOADS, SageMakerScript
from .socket_protocol import ONE_BY_ONE, LoadRequest, Message, MessageKind, ServerConnection

_FAILED = 300
_IMPORTABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "importable")
_HANDLE = "handle"  # A module in SageMaker's script mode does not have this function.


def serve(descriptor: int) -> None:
    """Serve over the inherited socket `descriptor` until the server sends STOP or closes the connection."""
    os.set_inheritable(descriptor, False)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    connection = ServerConnection(socket.socket(fileno=descriptor))
    if (first := connection.receive()) is None:
        return
    request = LoadRequest(**json.loads(first.data))
    if request.sets_python_path:
        _set_python_path(request.model_dir)
    try:
        caller = handler_calls.HandlerCaller(load_module(request), request)
        if request.async_mode:
            _run(_serve_async(connection, caller, request))
        else:
            _serve_sync(connection, caller, request)
    except LoadError as error:
        connection.send(Message(kind=MessageKind.LOADED, error=sendable(str(error))))
    finally:
        connection.close()


def _set_python_path(model_dir: str) -> None:
    """Let the handler's child processes import `djl_python` and the model's modules, as in LMI.

    This process itself does not import from the model directory yet, because a module there could replace a module that
    this process needs to start.
    """
    places = (os.environ.get("PYTHONPATH"), _IMPORTABLE, model_dir)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    sys.path.append(_IMPORTABLE)  # Child processes that `multiprocessing` spawns inherit `sys.path`.


def _run(serving: Coroutine[None, None, None]) -> None:
    with asyncio.Runner() as runner:
        try:
            runner.run(serving)
        except (SystemExit, KeyboardInterrupt) as error:
            # The process must end before the runner cancels the other calls. Otherwise the clients of these calls would
            # be told that their calls ended.
            handler_calls.end_at_once(error)


def _serve_sync(connection: ServerConnection, caller: handler_calls.HandlerCaller, request: LoadRequest) -> None:
    mode = handler_calls.SyncMode(connection, caller)
    connection.listen(mode.take)
    with _initializing(request):
        output = handler_calls.output_of(caller.initialize())
    _check(output)
    connection.send(Message(kind=MessageKind.LOADED, properties=() if caller.takes_batches else ONE_BY_ONE))
    mode.serve()


async def _serve_async(connection: ServerConnection, caller: handler_calls.HandlerCaller, request: LoadRequest) -> None:
    mode, loop = handler_calls.AsyncMode(connection, caller), asyncio.get_running_loop()
    vllm_async_service.connect(mode.engine, {**request.properties, "model_dir": request.model_dir})

    def take(message: Message) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed, because the process is ending.
            loop.call_soon_threadsafe(mode.take, message)

    connection.listen(take)
    with _initializing(request):
        result = await handler_calls.awaited(caller.initialize())
        output = handler_calls.output_of(await handler_calls.first_output(result))
    _check(output)
    connection.send(Message(kind=MessageKind.LOADED))
    await mode.serve()


@contextlib.contextmanager
def _initializing(request: LoadRequest) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        kind = "ran out of memory" if handler_calls.is_out_of_memory(error) else "failed"
        raise LoadError(f"the handler's initialization {kind}: {describe_error(error, request.model_dir)}") from error


def _check(output: Output) -> None:
    if output.code < _FAILED:
        return
    body = b"".join(map(output.encode_value, output.content.get_values())).decode("utf-8", "replace")
    raise LoadError(f"the handler's initialization answered {output.code} {output.message}: {body}".rstrip(": "))


def load_module(request: LoadRequest) -> ModuleType:
    """Import the entry point, with the model's directory first on the import path.

    Raises:
        LoadError: The entry point cannot be imported, or it does not define the handler function.
    """
    sys.path.insert(0, request.model_dir)
    try:
        module = _import(request)
        if request.function == _HANDLE and not hasattr(module, _HANDLE) and callable(getattr(module, LOADS, None)):
            setattr(module, _HANDLE, SageMakerScript(module, request))
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise LoadError(f"cannot import the handler: {describe_error(error, request.model_dir)}") from error
    if not callable(getattr(module, request.function, None)):
        file = getattr(module, "__file__", None) or request.entry_point
        raise LoadError(f"{file} does not define the handler function `{request.function}`")
    return module


def _import(request: LoadRequest) -> ModuleType:
    if not request.entry_point.endswith(".py"):
        return importlib.import_module(request.entry_point)
    path = os.path.join(request.model_dir, request.entry_point)
    if (directory := os.path.dirname(path)) != request.model_dir:
        sys.path.insert(0, directory)
    if not os.path.isfile(path):
        raise LoadError(f"the handler file {path} does not exist")
    # Pickled objects, and other modules in the directory, refer to this module by its file name. If that name is in
    # use, the module gets another name.
    stem = os.path.basename(path)[: -len(".py")]
    if not stem.isidentifier() or stem in sys.modules or os.path.dirname(path) != request.model_dir:
        stem = "model_" + hashlib.sha256(path.encode()).hexdigest()[:8]
    return run_file(path, stem)
