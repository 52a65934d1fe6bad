"""A worker's life: load, initialize, serve, end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import traceback
from collections.abc import Coroutine, Iterator
from types import ModuleType

from djl_python.outputs import Output

from .async_mode import AsyncMode, end_at_once
from .calling import Caller, is_out_of_memory
from .channel import Channel, die_with_parent
from .frames import Frame, Kind
from .guardian import guard_group
from .loading import LoadError, describe, load_module
from .messages import LoadOrder, decode_order
from .sync_mode import SyncMode

_FAILED = 300


def serve(descriptor: int, parent: int) -> None:
    """Serve over the inherited socket until the server says that it is enough."""
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
            end_at_once(error)  # before the other calls are cancelled, and their clients told that they have ended


def _serve_sync(channel: Channel, frames: Iterator[Frame], module: ModuleType, order: LoadOrder) -> None:
    mode = SyncMode(channel, Caller(module, order))
    try:
        _check(mode.initialize())
    except Exception as error:
        raise _not_initialized(error, order) from error
    channel.send((Kind.LOADED, 0, b""))
    mode.serve(frames)


async def _serve_async(channel: Channel, frames: Iterator[Frame], module: ModuleType, order: LoadOrder) -> None:
    mode = AsyncMode(channel, Caller(module, order))
    try:
        _check(await mode.initialize())
    except Exception as error:
        raise _not_initialized(error, order) from error
    channel.send((Kind.LOADED, 0, b""))
    await mode.serve(frames)


def _check(output: Output) -> None:
    """The initializing call has failed if its status says so."""
    if output.code < _FAILED:
        return
    body = b"".join(map(bytes, output.content.get_values())).decode("utf-8", "replace")
    raise LoadError(f"the handler's initialization answered {output.code} {output.message}: {body}".rstrip(": "))


def _not_initialized(error: Exception, order: LoadOrder) -> LoadError:
    if isinstance(error, LoadError):
        return error
    traceback.print_exc()
    kind = "ran out of memory" if is_out_of_memory(error) else "failed"
    return LoadError(f"the handler's initialization {kind}: {describe(error, order)}")
