"""The process: listens, loads, serves, drains.

`serve` reads as what happens: the port is opened at once, so that /ping can tell the truth while the model loads; a
first SIGTERM drains, a second one ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence

import psutil
import uvicorn

from container.app import Application, Mount, create_app
from container.cork import CorkedHttpProtocol
from container.home import ensure_home
from container.lifecycle import Lifecycle, State
from container.settings import Settings
from handlers.engines.protocol import EngineStartError

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED_TO_START, EXIT_ENGINE_DIED = 0, 1, 137
"""137 is what LMI exits with under SERVING_FAIL_FAST."""

_ENGINE_CHECK_SECONDS = 0.5
_KEEP_ALIVE_SECONDS = 75
_FAILED_SECONDS = 3.0
"""How long a model that failed to load can be asked for its reason."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: a signal has to drain before it closes anything."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(application: Application) -> uvicorn.Server:
    """An HTTP server for an ASGI application; it runs until `should_exit` is set, whatever signals come."""
    return _Server(
        uvicorn.Config(
            application,
            http=CorkedHttpProtocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=5,
        )
    )


class Process:
    """One container process serving one model."""

    def __init__(self, settings: Settings, mounts: Sequence[Mount] = ()) -> None:
        self._settings = settings
        self._mounts = mounts
        self._lifecycle = Lifecycle(settings)
        self._server = http_server(create_app(self._lifecycle, settings.server, mounts))
        self._exit_code = EXIT_OK
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until told to stop; returns the process's exit code."""
        listener = listen(self._settings.server.host, self._settings.server.port)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loading = asyncio.create_task(self._load())
        with listener:
            await self._server.serve([listener])
        for mount in self._mounts:
            await mount.close()
        loading.cancel()
        if self._stopping is not None:
            await self._stopping
        if self._exit_code == EXIT_FAILED_TO_START:
            _kill_children()  # an engine that was still being started
        elif self._lifecycle.state is not State.STOPPED:
            await self._lifecycle.stop()
        return self._exit_code

    async def _load(self) -> None:
        try:
            await self._lifecycle.start()
        except EngineStartError as error:
            logger.critical("the model cannot be served: %s", error)
            await self._fail_to_start()
            return
        except Exception:
            logger.critical("the model cannot be served: internal error", exc_info=True)
            await self._fail_to_start()
            return
        await self._watch_engine()

    async def _fail_to_start(self) -> None:
        """Let /ping say why for a while, as LMI does (lmi.md 1.9), then exit."""
        self._exit_code = EXIT_FAILED_TO_START
        await asyncio.sleep(_FAILED_SECONDS)
        self._server.should_exit = True

    async def _watch_engine(self) -> None:
        server = self._settings.server
        exit_when_stalled = server.fail_fast and server.fail_fast_when_stalled
        while self._lifecycle.state is not State.FAILED:
            await asyncio.sleep(_ENGINE_CHECK_SECONDS)
            if self._lifecycle.stalled and exit_when_stalled:  # looked at in any case, for the log
                break
        logger.critical("%s; /ping now answers 500", self._lifecycle.reason or self._lifecycle.stalled)
        if server.fail_fast:
            await self._lifecycle.drain(1.0)  # its clients get their errors first
            self._exit(EXIT_ENGINE_DIED)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stopping is not None or self._lifecycle.state is State.STARTING:
            logger.warning("%s: ending at once", name)
            _kill_children()
            os._exit(EXIT_OK if self._lifecycle.state is State.STARTING else 128 + number)
        logger.info("%s: draining for at most %g s", name, self._settings.server.drain_timeout)
        self._stopping = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._lifecycle.drain(self._settings.server.drain_timeout)
            await self._lifecycle.stop()
            logger.info("drained")
        finally:
            self._server.should_exit = True

    def _exit(self, code: int) -> None:
        self._exit_code = code
        self._server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections from now on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SystemExit(f"cannot listen on {host} port {port}: {error.strerror}") from None
    listener.listen(2048)
    return listener


def _kill_children() -> None:
    """While a model loads, the engine's processes are children that nobody else can stop."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def serve(settings: Settings, mounts: Sequence[Mount] = ()) -> int:
    """Run a server process with these settings, and with further applications, until it is told to stop.

    Returns:
        The exit code: 0 after a drain, 1 if the model could not be loaded, 137 if the engine died under fail_fast.
    """
    ensure_home()
    os.environ.update(settings.exports)
    # The engine's processes must not inherit our sockets and threads, as a fork would have them do.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    import uvloop

    if settings.model.formatters is not None:
        # LMI runs a model's code in its directory, and the code may read files from there.
        os.chdir(settings.model.model_dir)
    return uvloop.run(Process(settings, mounts).run())
