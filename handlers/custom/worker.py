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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

import djl_python
from engines.daemon_thread import in_daemon_thread
from engines.errors import RequestError
from engines.interface import EngineStartError
from handlers.contract import Call, ContractError, Handler, Reply, Running
from handlers.custom import runtime
from handlers.custom.metrics import HandlerMetrics
from handlers.custom.runtime.channel import CREDIT, SIZES, Kind, LoadOrder, Message
from handlers.djl_errors import JSON, front_end_reply, payload_error

logger = logging.getLogger("handlers.custom")

_LAUNCH = str(Path(runtime.__path__[0]) / "launch.py")
_SDK = str(Path(djl_python.__path__[0]).absolute())
_EXIT_PATIENCE = 1.0  # Seconds between the end of a worker's connection and the end of its process.
_TERMINATION_PATIENCE = 2.0  # Seconds between SIGTERM and SIGKILL.
_PIPE_PATIENCE = 0.5  # Seconds for the rest of the output after the process has ended.
_TAIL_LINES = 20
_MAX_LINE = 32 * 1024  # Bytes after which a line is logged although it has not ended.


# What answers a call; loads the engine if that is not loaded, and may raise EngineStartError.
LoadedEngine = Callable[[], Awaitable[Handler]]
_NO_ENGINE = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service puts an engine behind a handler; this has none"
_TEXT, _FORM = "text/plain", "application/x-www-form-urlencoded"
_NO_HEADERS = frozenset({"content-type", "requestid", "handler", "model_dir", "device_id"})


class EngineCall:
    """A call of the worker to the engine. Implements `ReplyWriter`: the reply goes to the worker. A handler that reads
    its stream slowly holds back nobody; what waits for it is at most one answer."""

    def __init__(
        self,
        engine: LoadedEngine | None,
        message: Message,
        send: Callable[[Message], None],
        on_end: Callable[[], object],
    ) -> None:
        """`engine`: None where the model has none. `on_end` is called when it has been answered."""
        self._message, self._send_message, self._on_end = message, send, on_end
        self._running: Running | None = None
        self._task = asyncio.create_task(self._answer(engine))

    def cancel(self) -> None:
        self._task.cancel()
        if self._running is not None:
            self._running.cancel()

    async def _answer(self, engine: LoadedEngine | None) -> None:
        loading = not self._message.contents
        try:
            if engine is None:
                raise EngineStartError(_NO_ENGINE)
            handler = await engine()
            if loading:
                self.reply(Reply(200, "", b""))
                return
            self._running = await handler.handle(_call_of(self._message), self)
        except ContractError as error:
            self.reply(error.reply)
        except (RequestError, EngineStartError) as error:
            text = str(error)
            self.reply(Reply(424, _TEXT, text.encode()) if loading else Reply(424, JSON, payload_error(text)))
        except Exception as error:
            logger.exception("a handler's call to the engine failed")
            self.reply(front_end_reply(500, "InternalServerException", f"internal error: {error}"))

    def reply(self, reply: Reply) -> None:
        self._head(Message(code=reply.status, contents=(("data", reply.body),)), reply.content_type, reply.headers)
        self._on_end()

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self._head(Message(code=status, streams=True), content_type, headers)

    def write(self, data: bytes) -> None:
        self._send(Message(kind=Kind.CHUNK, contents=(("data", data),)))

    def write_latest(self, part: Callable[[], bytes]) -> None:
        self.write(part())

    def end(self, data: bytes) -> None:
        self._send(Message(kind=Kind.STREAM_END, contents=(("data", data),)))
        self._on_end()

    async def drain(self) -> None:
        return

    def _head(self, head: Message, content_type: str, headers: tuple[tuple[str, str], ...]) -> None:
        properties = (*headers, ("Content-Type", content_type)) if content_type else headers
        self._send(replace(head, properties=properties))

    def _send(self, message: Message) -> None:
        self._send_message(replace(message, call=self._message.call))


def _call_of(message: Message) -> Call:
    """The call that an `Input` stands for: its properties are headers, and content beside the body is the query."""
    named = {name.lower(): value for name, value in message.properties}
    fields = tuple((key or "data", value.decode("utf-8", "replace")) for key, value in message.contents)
    query = tuple(field for field in fields if field[0] != "data")
    body, content_type = message.data, named.get("content-type", "")
    if query == fields:  # those of a form, which has no body of its own
        body, content_type, query = urlencode(fields).encode(), _FORM, ()
    return Call(
        body=body,
        content_type=content_type,
        request_id=named.get("requestid") or str(uuid.uuid4()),
        headers=tuple((name, value) for name, value in message.properties if name.lower() not in _NO_HEADERS),
        query=query,
    )


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """How to start a worker's process, and what it is to serve."""

    python: str
    environment: Mapping[str, str]
    order: LoadOrder
    load_timeout: float  # Seconds.
    engine: LoadedEngine | None = None  # The model's engine, where the handler may call one.
    metrics: HandlerMetrics = field(default_factory=HandlerMetrics)  # What the handler prints of them.


class Receiver(Protocol):
    """Takes what a worker sends for one call."""

    def on_message(self, message: Message) -> None:
        """An output, a part of its stream, the stream's end, or the end of the call has come."""

    def on_lost(self, reason: str) -> None:
        """The worker has ended before it finished the call."""


class Worker:
    """A worker, from before its start to after its end."""

    def __init__(self, id_: int, device: str, plan: WorkerPlan, on_end: Callable[[str], None]) -> None:
        """`on_end` gets the reason when a worker that was ready ends by itself or is killed."""
        self.id = id_
        self.name = f"worker {id_}"
        self.device = device
        self.ready = False  # It has loaded the handler, and neither ends nor is to end.
        self.started = time.time()  # Seconds since the epoch.
        self.pid: int | None = None
        self._plan = plan
        self._on_end = on_end
        self._receivers: dict[int, Receiver] = {}
        self._engine_calls: dict[int, EngineCall] = {}
        self.calls = 0  # How many calls it has been sent.
        # Why the handler could not be loaded; empty if it was.
        self._loaded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ended = False
        self._patience = _EXIT_PATIENCE
        self._reason = ""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)  # The last lines of its output.
        self._writer: asyncio.StreamWriter | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and have it load the handler. If this fails or is cancelled, the worker is to be killed.
        Raises EngineStartError: that failed, or took too long."""
        await self._spawn()
        self._send(
            Message(kind=Kind.LOAD, contents=((None, json.dumps(dataclasses.asdict(self._plan.order)).encode()),))
        )
        await asyncio.wait({self._loaded}, timeout=self._plan.load_timeout)
        if not self._loaded.done():
            seconds = f"{self._plan.load_timeout:g} seconds (model_loading_timeout)"
            raise EngineStartError(f"the handler did not load within {seconds}")
        if failure := self._loaded.result():
            raise EngineStartError(failure)
        self.ready = True

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        output, pipe = os.pipe()
        # A thread reads it, as asyncio would wait for the end of all that the handler has started.
        log = asyncio.ensure_future(in_daemon_thread(partial(self._log_output, output)))
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=CREDIT)
            process = await asyncio.create_subprocess_exec(
                *(self._plan.python, "-u", "-X", "faulthandler", _LAUNCH, str(theirs.fileno()), _SDK),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                cwd=self._plan.order.model_dir,
                env=dict(self._plan.environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            self._close_connection()
            raise EngineStartError(f"cannot run {self._plan.python}: {error}") from error
        except BaseException:
            self._close_connection()
            raise
        finally:
            theirs.close()
            os.close(pipe)
        self.pid = process.pid
        self._watching = asyncio.create_task(self._watch(process, reader, log))

    def call(self, message: Message, receiver: Receiver) -> int:
        self.calls += 1
        self._receivers[self.calls] = receiver
        self._send(replace(message, kind=Kind.CALL, call=self.calls))
        return self.calls

    def credit(self, call: int) -> None:
        """Allow the worker to send CREDIT more bytes of a call's answer."""
        self._send(Message(kind=Kind.CREDIT, call=call))

    def cancel(self, call: int) -> None:
        """Cancel a call; DONE follows as soon as the handler ends it."""
        self._send(Message(kind=Kind.CANCEL, call=call))

    def end(self, reason: str) -> None:
        """Kill the process and all that it started; its receivers and `on_end` are called soon after."""
        self._reason = self._reason or reason
        self._signal_group(signal.SIGKILL)

    async def kill(self, reason: str) -> None:
        self.end(reason)
        if self._watching is not None:
            await asyncio.shield(self._watching)

    async def stop(self, grace: float) -> None:
        """Let the worker finish its calls for up to `grace` seconds, then end it."""
        if self._watching is None or self._watching.done():
            return
        self.ready = False
        self._reason = "was stopped"
        self._patience = grace + _EXIT_PATIENCE
        self._send(Message(kind=Kind.STOP))
        await asyncio.wait({self._watching}, timeout=grace)
        if not self._watching.done():
            self._signal_group(signal.SIGTERM)
            await asyncio.wait({self._watching}, timeout=_TERMINATION_PATIENCE)
        await self.kill("was stopped")

    async def _read(self, stream: asyncio.StreamReader) -> None:
        try:
            while True:
                header, contents = SIZES.unpack(await stream.readexactly(SIZES.size))
                message = Message.decode(await stream.readexactly(header), await stream.readexactly(contents))
                try:
                    self._on_message(message)
                except Exception:
                    # Our own mistake: it must not end the connection, and with it all calls of the worker.
                    logger.exception("%s: an answer could not be passed on", self.name, extra={"worker": self.name})
                    self.cancel(message.call)
        except (asyncio.IncompleteReadError, OSError):
            return  # the connection is closed

    def _on_message(self, message: Message) -> None:
        if message.kind is Kind.LOADED:
            self._settle_load(message.error or "")
        elif message.kind is Kind.CALL:
            on_end = partial(self._engine_calls.pop, message.call, None)
            self._engine_calls[message.call] = EngineCall(self._plan.engine, message, self._send, on_end)
        elif message.kind is Kind.CANCEL:
            if (call := self._engine_calls.pop(message.call, None)) is not None:
                call.cancel()
        elif (receiver := self._receivers.get(message.call)) is not None:
            if message.kind is Kind.DONE:
                del self._receivers[message.call]
            receiver.on_message(message)

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(message.encode())

    def _close_connection(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    def _signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all that it started and that stayed in its group."""
        if self.pid is not None and not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _settle_load(self, failure: str) -> None:
        if not self._loaded.done():
            self._loaded.set_result(failure)

    async def _watch(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, log: asyncio.Future[None]
    ) -> None:
        """Wait until the process has ended or closed its connection, clean up, and report."""
        exit_ = asyncio.create_task(process.wait())
        reading = asyncio.create_task(self._read(reader))
        await asyncio.wait({exit_, reading}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({exit_}, timeout=self._patience)
        self._signal_group(signal.SIGKILL)  # what it started must not outlive it
        code = await exit_
        await asyncio.wait({reading}, timeout=_EXIT_PATIENCE)  # its last answers may still be unread
        reading.cancel()
        # A process that has left the group may still hold the pipe.
        await asyncio.wait({log}, timeout=_PIPE_PATIENCE)
        self._close_connection()
        self._finish(f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}")

    def _finish(self, ending: str) -> None:
        was_ready, self.ready, self._ended = self.ready, False, True
        reason = self._reason or ending
        output = "".join(f"\n  {line}" for line in self._tail)
        self._settle_load(
            f"the worker {reason} before the handler was loaded{'; its last output:' if output else ''}{output}"
        )
        if was_ready:
            logger.error("%s (pid %s) %s", self.name, self.pid, reason, extra={"worker": self.name})
            self._on_end(reason)  # first, so that this worker gets no more requests
        for call in self._engine_calls.values():
            call.cancel()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.on_lost(reason)

    def _log_output(self, pipe: int) -> None:
        """Log what the worker prints, by line. It is always read, so that printing never blocks it for good."""
        with open(pipe, "rb") as stream:
            while line := stream.readline(_MAX_LINE):
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                self._tail.append(text)
                self._plan.metrics.read(text)
                logger.info("%s: %s", self.name, text, extra={"worker": self.name})
