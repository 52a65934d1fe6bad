"""One worker: its process, the connection to it, the calls that it runs, those that it makes, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlencode

import djl_python
from handlers.contracts.lmi.errors import JSON, front_end_reply, payload_error
from handlers.contracts.protocol import Call, ContractError, Handler, Reply, Running
from handlers.engines.protocol import EngineStartError
from handlers.errors import RequestError
from handlers.workers import runtime
from handlers.workers.runtime.channel import (
    HEADER_SIZE,
    WINDOW,
    Frame,
    InputMessage,
    Kind,
    LoadOrder,
    OutputMessage,
    data_of,
    decode_header,
    decode_message,
    encode_message,
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


LoadedEngine = Callable[[], Awaitable[Handler]]
"""What answers a call; loads the engine if that is not loaded, and may raise EngineStartError."""
_NO_ENGINE = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service puts an engine behind a handler; this has none"
_TEXT, _FORM = "text/plain", "application/x-www-form-urlencoded"
_NO_HEADERS = frozenset({"content-type", "requestid", "handler", "model_dir", "device_id"})


class EngineCalls:
    """The calls of one worker to the engine."""

    def __init__(self, engine: LoadedEngine | None, send: Callable[[Kind, int, bytes], None]) -> None:
        """`engine`: None where the model has none. `send`: sends a frame to the worker."""
        self._engine, self._send = engine, send
        self._open: dict[int, asyncio.Task[None]] = {}
        """Calls that have not reached the engine."""
        self._running: dict[int, Running] = {}

    def take(self, frame: Frame) -> None:
        """Take a frame: a call, or the cancellation of one."""
        if frame.kind is Kind.CALL:
            task = asyncio.create_task(self._answer(frame.call, decode_message(InputMessage, frame.body)))
            self._open[frame.call] = task
            task.add_done_callback(lambda _: self._open.pop(frame.call, None))
        else:
            self._cancel(frame.call)

    def stop(self) -> None:
        """Cancel all calls: the worker has ended."""
        for number in (*self._open, *self._running):
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        if (task := self._open.get(number)) is not None:
            task.cancel()
        if (running := self._running.pop(number, None)) is not None:
            running.cancel()

    async def _answer(self, number: int, message: InputMessage) -> None:
        writer = _FrameWriter(
            lambda kind, body: self._send(kind, number, body), lambda: self._running.pop(number, None)
        )
        try:
            if self._engine is None:
                raise EngineStartError(_NO_ENGINE)
            handler = await self._engine()
            if not message.contents:
                writer.reply(Reply(200, "", b""))
                return
            running = await handler.handle(_call_of(message), writer)
            if running is not None and not writer.ended:
                self._running[number] = running
        except ContractError as error:
            writer.reply(error.reply)
        except (RequestError, EngineStartError) as error:
            text = str(error)
            loading = not message.contents
            writer.reply(Reply(424, _TEXT, text.encode()) if loading else Reply(424, JSON, payload_error(text)))
        except Exception as error:
            logger.exception("a handler's call to the engine failed")
            writer.reply(front_end_reply(500, "InternalServerException", f"internal error: {error}"))


class _FrameWriter:
    """Implements `ReplyWriter`: sends a reply to the worker.

    A handler that reads its stream slowly holds back nobody; what waits for it is at most one answer.
    """

    def __init__(self, send: Callable[[Kind, bytes], None], on_end: Callable[[], object]) -> None:
        self._send, self._on_end = send, on_end
        self.ended = False

    def reply(self, reply: Reply) -> None:
        contents = (("data", reply.body),)
        self._head(OutputMessage(code=reply.status, contents=contents), reply.content_type, reply.headers)
        self._end()

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self._head(OutputMessage(code=status, streams=True), content_type, headers)

    def write(self, data: bytes) -> None:
        self._send(Kind.CHUNK, data)

    def write_latest(self, part: Callable[[], bytes]) -> None:
        self.write(part())

    def end(self, data: bytes) -> None:
        self._send(Kind.STREAM_END, data)
        self._end()

    async def drain(self) -> None:
        return

    def _head(self, output: OutputMessage, content_type: str, headers: tuple[tuple[str, str], ...]) -> None:
        properties = (*headers, ("Content-Type", content_type)) if content_type else headers
        self._send(Kind.OUTPUT, encode_message(replace(output, properties=properties)))

    def _end(self) -> None:
        self.ended = True
        self._on_end()


def _call_of(message: InputMessage) -> Call:
    """The call that an `Input` stands for: its properties are headers, and content beside the body is the query."""
    named = {name.lower(): value for name, value in message.properties}
    fields = tuple((key or "data", value.decode("utf-8", "replace")) for key, value in message.contents)
    query = tuple(field for field in fields if field[0] != "data")
    body, content_type = data_of(message.contents), named.get("content-type", "")
    if query == fields:  # those of a form, which has no body of its own
        body, content_type, query = urlencode(fields).encode(), _FORM, ()
    return Call(
        body=body,
        content_type=content_type,
        request_id=named.get("requestid") or str(uuid.uuid4()),
        headers=tuple((name, value) for name, value in message.properties if name.lower() not in _NO_HEADERS),
        query=query,
    )


class WorkerState(StrEnum):
    """The phase of a worker's life."""

    STARTING = "STARTING"
    READY = "READY"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """How to start a worker's process, and what it is to serve."""

    python: str
    environment: Mapping[str, str]
    order: LoadOrder
    load_timeout: float
    """Seconds."""
    engine: LoadedEngine | None = None
    """The model's engine, where the handler may call one."""


class Receiver:
    """Takes what a worker sends for one call; ignores what is not overridden."""

    def on_output(self, output: OutputMessage, size: int) -> None:
        """An output has come, which counts as `size` bytes of the call's window."""

    def on_chunk(self, chunk: bytes) -> None:
        """A part of the last output's stream has come."""

    def on_stream_end(self) -> None:
        """The stream has ended; an output with an error has come before, if it has failed."""

    def on_done(self) -> None:
        """The worker has finished the call."""

    def on_lost(self, reason: str) -> None:
        """The worker has ended before it finished the call."""


class Worker:
    """A worker, from before its start to after its end."""

    def __init__(self, id_: int, device: str, plan: WorkerPlan, on_end: Callable[[str], None]) -> None:
        """`on_end` gets the reason when a worker that was ready ends by itself or is killed."""
        self.id = id_
        self.name = f"worker {id_}"
        self.device = device
        self.state = WorkerState.STARTING
        self.started = time.time()
        """Seconds since the epoch."""
        self.pid: int | None = None
        self._plan = plan
        self._on_end = on_end
        self._receivers: dict[int, Receiver] = {}
        self._engine_calls = EngineCalls(plan.engine, self._send)
        self._last_call = 0
        self._loaded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the handler could not be loaded; empty if it was."""
        self._patience = _EXIT_PATIENCE
        self._reason = ""
        self._process: _Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and have it load the handler. If this fails or is cancelled, the worker is to be killed.

        Raises:
            EngineStartError: that failed, or took too long.
        """
        try:
            self._process = await _Process.spawn(self._plan, self.name)
        except OSError as error:
            raise EngineStartError(f"cannot run {self._plan.python}: {error}") from error
        self.pid = self._process.pid
        self._watching = asyncio.create_task(self._watch(self._process))
        self._send(Kind.LOAD, body=json.dumps(dataclasses.asdict(self._plan.order)).encode())
        await asyncio.wait({self._loaded}, timeout=self._plan.load_timeout)
        if not self._loaded.done():
            seconds = f"{self._plan.load_timeout:g} seconds (model_loading_timeout)"
            raise EngineStartError(f"the handler did not load within {seconds}")
        if failure := self._loaded.result():
            raise EngineStartError(failure)
        self.state = WorkerState.READY

    def call(self, message: InputMessage, receiver: Receiver) -> int:
        """Have the worker run a call; returns the call's number."""
        self._last_call += 1
        self._receivers[self._last_call] = receiver
        self._send(Kind.CALL, self._last_call, encode_message(message))
        return self._last_call

    def credit(self, call: int, size: int) -> None:
        """Allow the worker to send `size` more bytes of a call's answer."""
        self._send(Kind.CREDIT, call, b"%d" % size)

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

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Take what the worker sends, until it sends nothing more."""
        try:
            while True:
                length, kind, call = decode_header(await stream.readexactly(HEADER_SIZE))
                self._on_frame(Frame(kind, call, await stream.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            return  # the connection is closed
        except ValueError as error:
            self._reason = self._reason or f"sent something that is no frame: {error}"

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is Kind.LOADED:
            self._settle_load("")
        elif frame.kind is Kind.LOAD_FAILED:
            self._settle_load(frame.body.decode())
        elif frame.kind in (Kind.CALL, Kind.CANCEL):
            self._engine_calls.take(frame)
        elif frame.call in self._receivers:
            try:
                self._pass_on(frame, self._receivers[frame.call])
            except Exception:
                # Our own mistake: it must not end the connection, and with it all calls of the worker.
                logger.exception("%s: an answer could not be passed on", self.name, extra={"worker": self.name})
                self.cancel(frame.call)

    def _pass_on(self, frame: Frame, receiver: Receiver) -> None:
        if frame.kind is Kind.OUTPUT:
            receiver.on_output(decode_message(OutputMessage, frame.body), len(frame.body))
        elif frame.kind is Kind.CHUNK:
            receiver.on_chunk(frame.body)
        elif frame.kind is Kind.STREAM_END:
            receiver.on_stream_end()
        elif frame.kind is Kind.DONE:
            del self._receivers[frame.call]
            receiver.on_done()

    def _send(self, kind: Kind, call: int = 0, body: bytes = b"") -> None:
        if self._process is not None:
            self._process.send(Frame(kind, call, body))

    def _settle_load(self, failure: str) -> None:
        if not self._loaded.done():
            self._loaded.set_result(failure)

    async def _watch(self, process: _Process) -> None:
        """Wait until the process has ended or closed its connection, clean up, and report."""
        exit_ = asyncio.create_task(process.wait())
        reading = asyncio.create_task(self._read(process.reader))
        await asyncio.wait({exit_, reading}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({exit_}, timeout=self._patience)
        process.signal_group(signal.SIGKILL)  # what it started must not outlive it
        ending = await exit_
        await asyncio.wait({reading}, timeout=_EXIT_PATIENCE)  # its last answers may still be unread
        reading.cancel()
        await process.close()
        self._finish(process, ending)

    def _finish(self, process: _Process, ending: str) -> None:
        was_ready, self.state = self.state is WorkerState.READY, WorkerState.ENDED
        reason = self._reason or ending
        output = "".join(f"\n  {line}" for line in process.output.tail)
        self._settle_load(
            f"the worker {reason} before the handler was loaded{'; its last output:' if output else ''}{output}"
        )
        if was_ready:
            logger.error("%s (pid %s) %s", self.name, self.pid, reason, extra={"worker": self.name})
            self._on_end(reason)  # first, so that this worker gets no more requests
        self._engine_calls.stop()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.on_lost(reason)


class _Process:
    """A worker's process, the connection to it, and the pipe of its output; made by `spawn`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        output: _OutputLog,
    ) -> None:
        self.pid = process.pid
        self.reader, self._writer = connection
        self.output = output
        self._process = process

    @classmethod
    async def spawn(cls, plan: WorkerPlan, name: str) -> _Process:
        """Start a process.

        Raises:
            OSError: the interpreter cannot be run.
        """
        ours, theirs = socket.socketpair()
        command = (plan.python, "-u", "-X", "faulthandler", _LAUNCH, str(theirs.fileno()), str(os.getpid()), _SDK)
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=WINDOW)
            try:
                output = _OutputLog(name)
                pipe = await output.open()
                try:
                    process = await asyncio.create_subprocess_exec(
                        *command,
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=pipe,
                        stderr=pipe,
                        cwd=plan.order.model_dir,
                        env=dict(plan.environment),
                        pass_fds=(theirs.fileno(),),
                        start_new_session=True,
                    )
                finally:
                    os.close(pipe)
            except BaseException:
                writer.transport.abort()
                raise
        return cls(process, (reader, writer), output)

    def send(self, frame: Frame) -> None:
        """Send a frame, unless the process has gone."""
        if not self._writer.is_closing():
            self._writer.write(frame.encode())

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

    async def close(self) -> None:
        """Log the last lines, and free everything, after the end of the process."""
        await self.output.finish()
        await self._reap_orphans()
        self._writer.transport.abort()

    async def _reap_orphans(self) -> None:
        """Reap the killed children of the ended process, which would stay as zombies.

        They are ours only where this is the first process of a container.
        """
        with contextlib.suppress(ChildProcessError):  # none is ours
            for _ in range(_REAPINGS):
                if os.waitpid(-self.pid, os.WNOHANG)[0] == 0:  # noqa: ASYNC222 - it does not wait
                    await asyncio.sleep(_REAPING_SECONDS)


class _OutputLog:
    """Logs what a worker prints, by line. The pipe is always read, so that printing never blocks it for good."""

    def __init__(self, worker: str) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines."""
        self._worker = worker
        self._stream = asyncio.StreamReader()

    async def open(self) -> int:
        """Begin to read; returns the descriptor to write to."""
        reader, writer = os.pipe()
        protocol = asyncio.StreamReaderProtocol(self._stream)
        loop = asyncio.get_running_loop()
        try:
            self._pipe, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(reader, "rb", 0))
        except BaseException:  # such as the end of a load that is given up
            os.close(writer)
            raise
        self._reading = asyncio.create_task(self._read())
        return writer

    async def finish(self) -> None:
        """Close the pipe once all is read, or after a moment: a process that has left the group may still hold it."""
        await asyncio.wait({self._reading}, timeout=_PIPE_PATIENCE)
        self._pipe.close()
        await self._reading

    async def _read(self) -> None:
        rest = b""
        while data := await self._stream.read(_MAX_LINE):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._log(line)
        if rest:
            self._log(rest)

    def _log(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self.tail.append(text)
        logger.info("%s: %s", self._worker, text, extra={"worker": self._worker})
