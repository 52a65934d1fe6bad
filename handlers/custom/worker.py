"""A worker process as the server sees it: its start, its connection, its calls, its output and its end."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import djl_python
from engines import stacks
from engines.daemon_thread import in_daemon_thread
from engines.interface import EngineStartError
from engines.stacks import Stack, stacks_of
from handlers.custom import worker_process
from handlers.custom.engine_call import NO_ORIGIN, EngineCall, EngineLoader, Origin
from handlers.custom.metrics import HandlerMetrics
from handlers.custom.worker_process.socket_protocol import (
    CREDIT_BYTES,
    ONE_BY_ONE,
    SIZES,
    LoadRequest,
    Message,
    MessageKind,
)

logger = logging.getLogger("handlers.custom")

_LAUNCH = str(Path(worker_process.__path__[0]) / "launch.py")
_SDK = str(Path(djl_python.__path__[0]).absolute())
_EXIT_PATIENCE = 1.0  # Maximum seconds between the end of a worker's connection and the end of its process.
_TERMINATION_PATIENCE = 2.0  # Seconds between SIGTERM and SIGKILL.
_PIPE_PATIENCE = 0.5  # Seconds to read the rest of the output after the process has ended.
_STACK_SECONDS = 1.5  # The time limit, in seconds, for a hung worker to write its stacks.
_TAIL_LINES = 20  # The number of lines of a worker's output that an error message repeats.
_MAX_LINE = 32 * 1024  # Bytes. A longer line is logged in pieces.


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The command, the environment and the handler of a worker's process."""

    python: str
    environment: Mapping[str, str]
    load_request: LoadRequest
    load_timeout: float  # Seconds.
    load_engine: EngineLoader | None = None  # None if the handler cannot call an engine.
    metrics: HandlerMetrics = field(default_factory=HandlerMetrics)  # Metrics that the handler prints.


class AnswerReceiver(Protocol):
    """Receives the messages that a worker sends for one call."""

    def on_message(self, message: Message) -> None:
        """Handle an OUTPUT, a CHUNK, a STREAM_END or a DONE."""

    def on_lost(self, reason: str) -> None:
        """Handle the loss of the call: `reason` says why the worker ended before it finished the call."""


class Worker:
    """A worker process, from before its start until after its end."""

    def __init__(self, id_: int, device: str, plan: WorkerPlan, on_end: Callable[[Worker, str], None]) -> None:
        """Prepare the worker without starting it.

        Args:
            id_: The worker's number.
            device: The worker's devices, such as `0` or `0,1`. `-1` for none.
            plan: The command, the environment and the handler.
            on_end: Called with this worker and the reason if the worker ends or is killed while it is ready.
        """
        self.id = id_
        self.name = f"worker {id_}"
        self.device = device
        self.ready = False  # True from the end of the load until the worker ends or is stopped.
        self.takes_batches = True  # Whether the handler may get dynamic batches.
        self.started = time.time()  # Seconds since the epoch.
        self.pid: int | None = None
        self.stacks: Sequence[Stack] = ()  # The stacks of its threads, if the worker was ended because it hung.
        self._plan = plan
        self._on_end = on_end
        self._receivers: dict[int, AnswerReceiver] = {}
        self._engine_calls: dict[int, EngineCall] = {}
        # The origin of each running call, keyed by the call's number. The handler's calls to the engine get this
        # origin. It is never sent to the worker.
        self._origins: dict[int, Origin] = {}
        self._has_keys = False  # Whether at least one call came with an API key.
        self.calls = 0  # The number of calls that were sent to the worker.
        # The reason why the handler could not be loaded. Empty if the handler was loaded.
        self._loaded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ended = False
        self._patience = _EXIT_PATIENCE
        self._reason = ""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)  # The last lines of the worker's output.
        self._writer: asyncio.StreamWriter | None = None
        self._watching: asyncio.Task[None] | None = None
        self._hanging: asyncio.Task[None] | None = None  # Ends the worker after it has written its stacks.

    async def start(self) -> None:
        """Start the process and load the handler.

        The caller must kill the worker if this method fails or is cancelled.

        Raises:
            EngineStartError: The process cannot be started, or the load failed or took too long.
        """
        await self._spawn()
        load_request = json.dumps(dataclasses.asdict(self._plan.load_request)).encode()
        self._send(Message(kind=MessageKind.LOAD, contents=((None, load_request),)))
        await asyncio.wait({self._loaded}, timeout=self._plan.load_timeout)
        if not self._loaded.done():
            seconds = f"{self._plan.load_timeout:g} seconds (model_loading_timeout)"
            raise EngineStartError(f"the handler did not load within {seconds}")
        if failure := self._loaded.result():
            raise EngineStartError(failure)
        self.ready = True

    async def _spawn(self) -> None:
        server_end, worker_end = socket.socketpair()
        output, pipe = os.pipe()
        # A thread reads the pipe, because asyncio would wait until all processes that the handler started have closed
        # the pipe.
        log = asyncio.ensure_future(in_daemon_thread(partial(self._log_output, output)))
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=server_end, limit=CREDIT_BYTES)
            process = await asyncio.create_subprocess_exec(
                *(self._plan.python, "-u", "-X", "faulthandler", _LAUNCH, str(worker_end.fileno())),
                *(_SDK, stacks.__file__),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                cwd=self._plan.load_request.model_dir,
                env=dict(self._plan.environment),
                pass_fds=(worker_end.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            self._close_connection()
            raise EngineStartError(f"cannot run {self._plan.python}: {error}") from error
        except BaseException:
            self._close_connection()
            raise
        finally:
            worker_end.close()
            os.close(pipe)
        self.pid = process.pid
        self._watching = asyncio.create_task(self._watch(process, reader, log))

    def call(self, message: Message, receiver: AnswerReceiver, origin: Origin = NO_ORIGIN) -> int:
        """Send a call to the worker and return the call's number. The answer goes to `receiver`."""
        self.calls += 1
        if self._ended:
            asyncio.get_running_loop().call_soon(receiver.on_lost, self._reason)
            return self.calls
        self._receivers[self.calls] = receiver
        self._origins[self.calls] = origin
        self._has_keys = self._has_keys or bool(origin.key_salt)
        self._send(replace(message, kind=MessageKind.CALL, call=self.calls))
        return self.calls

    def credit(self, call: int) -> None:
        """Allow the worker to send CREDIT_BYTES more of a call's answer."""
        self._send(Message(kind=MessageKind.CREDIT, call=call))

    def cancel(self, call: int) -> None:
        """Cancel a call. DONE follows when the handler has ended the call."""
        self._send(Message(kind=MessageKind.CANCEL, call=call))

    def end(self, reason: str) -> None:
        """Kill the worker's process group. The receivers and `on_end` are called soon after."""
        self._reason = self._reason or reason
        self._signal_group(signal.SIGKILL)

    def end_hung(self, reason: str) -> None:
        """Let the process write its stacks for at most `_STACK_SECONDS`, then end the process."""
        if self._hanging is None:
            self._hanging = asyncio.create_task(self._end_hung(reason))

    async def _end_hung(self, reason: str) -> None:
        try:
            if self.pid is not None and not self._ended:
                written = partial(stacks_of, (self.pid,), _STACK_SECONDS)
                self.stacks = (await in_daemon_thread(written)).get(self.pid, ())
        finally:
            self.end(reason)

    async def kill(self, reason: str) -> None:
        """Kill the process and wait for its end."""
        self.end(reason)
        if self._watching is not None:
            await asyncio.shield(self._watching)

    async def stop(self, grace: float) -> None:
        """Give the worker up to `grace` seconds to finish its calls, then end it."""
        if self._watching is None or self._watching.done():
            return
        self.ready = False
        self._reason = "was stopped"
        self._patience = grace + _EXIT_PATIENCE
        self._send(Message(kind=MessageKind.STOP))
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
                    # An error in the server must not close the connection: that would end all calls of the worker.
                    logger.exception(
                        "%s: cannot handle a message of the worker", self.name, extra={"worker": self.name}
                    )
                    self.cancel(message.call)
        except (asyncio.IncompleteReadError, OSError) as error:  # The connection is closed.
            error.with_traceback(None)  # The stream keeps the error, whose traceback holds this frame.

    def _on_message(self, message: Message) -> None:
        if message.kind is MessageKind.LOADED:
            self.takes_batches = message.properties != ONE_BY_ONE
            self._settle_load(message.error or "")
        elif message.kind is MessageKind.CALL:
            on_end = partial(self._engine_calls.pop, message.call, None)
            origin = self._origin(message.within)
            self._engine_calls[message.call] = EngineCall(self._plan.load_engine, message, origin, self._send, on_end)
        elif message.kind is MessageKind.CANCEL:
            if (call := self._engine_calls.pop(message.call, None)) is not None:
                call.cancel()
        elif (receiver := self._receivers.get(message.call)) is not None:
            if message.kind is MessageKind.DONE:
                del self._receivers[message.call]
                del self._origins[message.call]
            receiver.on_message(message)

    def _origin(self, call: int) -> Origin:
        """Return the origin of a call to the engine.

        A task that the handler has started may hold prompts of calls with different API keys. So the calls of such a
        task share the KV cache with no other call.
        """
        origin = self._origins.get(call, NO_ORIGIN)
        return replace(origin, key_salt=uuid.uuid4().hex) if self._has_keys and not origin.key_salt else origin

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(message.encode())

    def _close_connection(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    def _signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the worker's process group: the process and its children that have not left the group."""
        if self.pid is not None and not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _settle_load(self, failure: str) -> None:
        if not self._loaded.done():
            self._loaded.set_result(failure)

    async def _watch(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, log: asyncio.Future[None]
    ) -> None:
        """Wait until the process has ended or closed its connection, clean up, and report the end."""
        exit_ = asyncio.create_task(process.wait())
        reading = asyncio.create_task(self._read(reader))
        await asyncio.wait({exit_, reading}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({exit_}, timeout=self._patience)
        self._signal_group(signal.SIGKILL)  # Child processes must end with the worker.
        code = await exit_
        await asyncio.wait({reading}, timeout=_EXIT_PATIENCE)  # The socket may still hold the last answers.
        reading.cancel()
        # A child process that has left the group may keep the pipe open.
        await asyncio.wait({log}, timeout=_PIPE_PATIENCE)
        self._close_connection()
        self._finish(f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}")

    def _finish(self, ending: str) -> None:
        was_ready, self.ready, self._ended = self.ready, False, True
        reason = self._reason = self._reason or ending
        output = "".join(f"\n  {line}" for line in self._tail)
        self._settle_load(
            f"the worker {reason} before the handler was loaded{'; its last output:' if output else ''}{output}"
        )
        if was_ready:
            logger.error("%s (pid %s) %s", self.name, self.pid, reason, extra={"worker": self.name})
            self._on_end(self, reason)  # `_on_end` comes first, so that the worker gets no more requests.
        calls, self._engine_calls = self._engine_calls, {}
        for call in calls.values():
            call.cancel()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.on_lost(reason)

    def _log_output(self, pipe: int) -> None:
        """Log the worker's output line by line until the pipe is closed. A full pipe would block the worker."""
        with open(pipe, "rb") as stream:
            while line := stream.readline(_MAX_LINE):
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                self._tail.append(text)
                self._plan.metrics.read(text)
                logger.info("%s: %s", self.name, text, extra={"worker": self.name})
