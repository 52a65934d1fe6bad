"""One worker: its process, the connection to it, the calls that it runs, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, cast

import djl_python
from handlers.engines.protocol import EngineStartError
from handlers.workers import runtime
from handlers.workers.runtime.channel import (
    Frame,
    FrameError,
    FrameReader,
    InputMessage,
    Kind,
    LoadOrder,
    OutputMessage,
    decode_output,
    encode_credit,
    encode_frame,
    encode_message,
    encode_order,
)

logger = logging.getLogger("handlers.workers")

_LAUNCH = str(Path(runtime.__path__[0]) / "launch.py")
_SDK = str(Path(djl_python.__path__[0]).absolute())
_EXIT_PATIENCE = 1.0
"""Seconds between the end of a worker's connection and the end of its process."""
_TERMINATION_PATIENCE = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_PIPE_PATIENCE = 0.5
"""Seconds for the rest of the output after the process has ended."""
_REAPINGS, _REAPING_SECONDS = 100, 0.02
_TAIL_LINES = 20
_MAX_LINE = 32 * 1024
"""Bytes after which a line is logged although it has not ended."""


class WorkerState(StrEnum):
    """The phase of a worker's life."""

    STARTING = "STARTING"
    READY = "READY"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """How to start a worker's process."""

    python: str
    directory: Path
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What all workers of a model have in common."""

    process: ProcessPlan
    order: LoadOrder
    load_timeout: float
    """Seconds."""


class Receiver(Protocol):
    """Takes what a worker sends for one call."""

    def on_output(self, output: OutputMessage, size: int) -> None:
        """An output has come, which counts as `size` bytes of the call's window."""

    def on_chunk(self, chunk: bytes) -> None:
        """A part of the last output's stream has come."""

    def on_stream_end(self, failure: OutputMessage | None) -> None:
        """The stream has ended; `failure` describes the exception that ended it."""

    def on_done(self) -> None:
        """The worker has finished the call."""

    def on_lost(self, reason: str) -> None:
        """The worker has ended before it finished the call."""


class Worker:
    """A worker, from before its start to after its end."""

    def __init__(self, number: int, plan: WorkerPlan, on_end: Callable[[str], None]) -> None:
        """`on_end` gets the reason when a worker that was ready ends by itself or is killed."""
        self.number = number
        self.name = f"worker {number}"
        self.state = WorkerState.STARTING
        self.started = time.time()
        """Seconds since the epoch."""
        self.pid: int | None = None
        self._plan = plan
        self._on_end = on_end
        self._receivers: dict[int, Receiver] = {}
        self._last_call = 0
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self._patience = _EXIT_PATIENCE
        self._reason = ""
        self._connection: _Connection | None = None
        self._process: _Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and have it load the handler.

        Raises:
            EngineStartError: that failed, or took too long; no process is left.
        """
        try:
            self._process = await _Process.spawn(self._plan.process, self.name)
        except OSError as error:
            self.state = WorkerState.ENDED
            raise EngineStartError(f"cannot run {self._plan.process.python}: {error}") from error
        self.pid = self._process.pid
        self._watching = asyncio.create_task(self._watch(self._process))
        try:
            self._connection = await _Connection.open(self._process.socket, self._on_frame, self._on_closed)
            self._connection.send(Kind.LOAD, 0, encode_order(self._plan.order))
            await asyncio.wait_for(asyncio.shield(self._loaded), self._plan.load_timeout)
        except TimeoutError:
            await self.kill("took too long to load")
            raise EngineStartError(
                f"the handler did not load within {self._plan.load_timeout:g} seconds (model_loading_timeout)"
            ) from None
        except BaseException:
            await self.kill("was not needed any more")
            raise
        self.state = WorkerState.READY

    def call(self, message: InputMessage, receiver: Receiver) -> int:
        """Have the worker run a call; returns the call's number."""
        self._last_call += 1
        self._receivers[self._last_call] = receiver
        self._send(Kind.CALL, self._last_call, encode_message(message))
        return self._last_call

    def credit(self, call: int, size: int) -> None:
        """Allow the worker to send `size` more bytes of a call's stream."""
        self._send(Kind.CREDIT, call, encode_credit(size))

    def cancel(self, call: int) -> None:
        """Cancel a call; `on_done` follows as soon as the handler ends it."""
        self._send(Kind.CANCEL, call)

    def end(self, reason: str) -> None:
        """Kill the process and all that it started; its receivers and `on_end` are called soon after."""
        self._reason = self._reason or reason
        if self._process is not None and self.state is not WorkerState.ENDED:
            self._process.signal_group(signal.SIGKILL)

    async def kill(self, reason: str) -> None:
        """Kill the process, and wait for its end."""
        self.end(reason)
        if self._watching is not None:
            await asyncio.shield(self._watching)

    async def stop(self, grace: float) -> None:
        """Let the worker finish its calls for up to `grace` seconds, then end it."""
        if self._watching is None or self._process is None or self.state is WorkerState.ENDED:
            return
        self.state = WorkerState.STOPPING
        self._reason = "was stopped"
        self._patience = grace + _EXIT_PATIENCE
        self._send(Kind.STOP)
        await asyncio.wait({self._watching}, timeout=grace)
        if not self._watching.done():
            self._process.signal_group(signal.SIGTERM)
            await asyncio.wait({self._watching}, timeout=_TERMINATION_PATIENCE)
        await self.kill("was stopped")

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is Kind.LOADED:
            self._settle_load(None)
        elif frame.kind is Kind.LOAD_FAILED:
            self._settle_load(frame.body.decode())
        elif frame.call in self._receivers:
            try:
                self._pass_on(frame, self._receivers[frame.call])
            except Exception:
                # Our own mistake: it must not end the connection, and with it all calls of the worker.
                logger.exception("%s: an answer could not be passed on", self.name, extra={"worker": self.name})
                self.cancel(frame.call)

    def _on_closed(self, problem: str) -> None:
        self._reason = self._reason or problem
        self._closed.set()

    def _pass_on(self, frame: Frame, receiver: Receiver) -> None:
        if frame.kind is Kind.OUTPUT:
            receiver.on_output(decode_output(frame.body), len(frame.body))
        elif frame.kind is Kind.CHUNK:
            receiver.on_chunk(frame.body)
        elif frame.kind is Kind.STREAM_END:
            receiver.on_stream_end(decode_output(frame.body) if frame.body else None)
        elif frame.kind is Kind.DONE:
            del self._receivers[frame.call]
            receiver.on_done()

    def _send(self, kind: Kind, call: int = 0, body: bytes = b"") -> None:
        if self._connection is not None:
            self._connection.send(kind, call, body)

    def _settle_load(self, failure: str | None) -> None:
        if self._loaded.done():
            return
        if failure is None:
            self._loaded.set_result(None)
        else:
            self._loaded.set_exception(EngineStartError(failure))

    async def _watch(self, process: _Process) -> None:
        """Wait until the process has ended or closed its connection, clean up, and report."""
        exit_ = asyncio.create_task(process.wait())
        silence = asyncio.create_task(self._closed.wait())
        await asyncio.wait({exit_, silence}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({exit_}, timeout=self._patience)
        process.signal_group(signal.SIGKILL)  # what it started must not outlive it
        ending = await exit_
        await asyncio.wait({silence}, timeout=_EXIT_PATIENCE)  # its last answers may still be unread
        silence.cancel()
        await process.finish_output()
        await process.reap_orphans()
        if self._connection is not None:
            self._connection.close()
        else:
            process.socket.close()
        self._finish(process, ending)

    def _finish(self, process: _Process, ending: str) -> None:
        was_ready, self.state = self.state is WorkerState.READY, WorkerState.ENDED
        reason = self._reason or ending
        output = "".join(f"\n  {line}" for line in process.tail)
        self._settle_load(
            f"the worker {reason} before the handler was loaded{'; its last output:' if output else ''}{output}"
        )
        with contextlib.suppress(EngineStartError):
            self._loaded.result()  # mark it as retrieved: `start` may have been cancelled
        if was_ready:
            logger.error("%s (pid %s) %s", self.name, self.pid, reason, extra={"worker": self.name})
            self._on_end(reason)  # first, so that this worker gets no more requests
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.on_lost(reason)


class _Process:
    """A worker's process, and the pipes of its output; made by `spawn`."""

    def __init__(
        self, process: asyncio.subprocess.Process, sock: socket.socket, relays: list[_LogRelay], tail: deque[str]
    ) -> None:
        self._process = process
        self._relays = relays
        self.socket = sock
        self.pid = process.pid
        self.tail = tail
        """The last lines that it printed."""

    @classmethod
    async def spawn(cls, plan: ProcessPlan, name: str) -> _Process:
        """Start a process, from the event loop's own thread: the kernel ends a worker together with that thread.

        Raises:
            OSError: the interpreter cannot be run.
        """
        ours, theirs = socket.socketpair()
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        relays: list[_LogRelay] = []
        writers: list[int] = []
        try:
            for _ in ("stdout", "stderr"):
                relay, writer = await _LogRelay.open(name, tail)
                relays.append(relay)
                writers.append(writer)
            process = await asyncio.create_subprocess_exec(
                *(plan.python, "-u", "-X", "faulthandler", _LAUNCH, str(theirs.fileno()), str(os.getpid()), _SDK),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writers[0],
                stderr=writers[1],
                cwd=plan.directory,
                env=dict(plan.environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            _close(theirs, writers)
            for relay in relays:
                await relay.finish()
            raise
        _close(theirs, writers)
        return cls(process, ours, relays, tail)

    async def wait(self) -> str:
        """Wait for the end; returns how it came about, as the end of a sentence."""
        code = await self._process.wait()
        if code >= 0:
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all that it started and that stayed in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def reap_orphans(self) -> None:
        """Reap the killed children of the ended process, which would stay as zombies.

        They are ours only where this is the first process of a container.
        """
        with contextlib.suppress(ChildProcessError):  # none is ours
            for _ in range(_REAPINGS):
                if os.waitpid(-self.pid, os.WNOHANG)[0] == 0:  # noqa: ASYNC222 - it does not wait
                    await asyncio.sleep(_REAPING_SECONDS)

    async def finish_output(self) -> None:
        """Log the last lines, and close the pipes."""
        for relay in self._relays:
            await relay.finish()


def _close(sock: socket.socket, descriptors: list[int]) -> None:
    sock.close()
    for descriptor in descriptors:
        os.close(descriptor)


class _Connection(asyncio.Protocol):
    """The server's end of the connection. Callbacks get the frames, then once what was wrong, or ""."""

    def __init__(self, on_frame: Callable[[Frame], None], on_closed: Callable[[str], None]) -> None:
        self._on_frame, self._on_closed = on_frame, on_closed
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._closed = False

    @classmethod
    async def open(
        cls, sock: socket.socket, on_frame: Callable[[Frame], None], on_closed: Callable[[str], None]
    ) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(lambda: cls(on_frame, on_closed), sock=sock)
        return connection

    def send(self, kind: Kind, call: int = 0, body: bytes = b"") -> None:
        """Send a frame, unless the worker has gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(kind, call, body))

    def close(self) -> None:
        """Close it at once. A worker takes that for the server's end, and ends."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        try:
            for frame in self._reader.feed(data):
                self._on_frame(frame)
        except FrameError as error:
            self._end(f"sent something that is no frame: {error}")

    def eof_received(self) -> bool:
        self._end("")
        return True  # the other direction stays open while the worker shuts down

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("")

    def _end(self, problem: str) -> None:
        if not self._closed:
            self._closed = True
            self._on_closed(problem)


class _LogRelay(asyncio.Protocol):
    """Logs the lines of one pipe. It is always read, so that a worker that prints is never blocked for good."""

    def __init__(self, worker: str, tail: deque[str]) -> None:
        self._worker = worker
        self._tail = tail
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None
        self._closed = asyncio.Event()

    @classmethod
    async def open(cls, worker: str, tail: deque[str]) -> tuple[_LogRelay, int]:
        """A relay, and the descriptor to write to."""
        relay = cls(worker, tail)
        reader, writer = os.pipe()
        await asyncio.get_running_loop().connect_read_pipe(lambda: relay, os.fdopen(reader, "rb", 0))
        return relay, writer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log(line)
        while len(self._rest) > _MAX_LINE:
            self._log(self._rest[:_MAX_LINE])
            self._rest = self._rest[_MAX_LINE:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._log(self._rest)
            self._rest = b""
        self._closed.set()

    async def finish(self) -> None:
        """Close the pipe once all is read, or after a moment."""
        try:
            await asyncio.wait_for(self._closed.wait(), _PIPE_PATIENCE)
        except TimeoutError:  # a process that has left the group still holds it
            cast(asyncio.BaseTransport, self._transport).close()
            await self._closed.wait()

    def _log(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self._tail.append(text)
        logger.info("%s: %s", self._worker, text, extra={"worker": self._worker})
