"""The process: listens, loads the models, serves and drains.

`serve` opens the port at once, so that /ping can report the state while the model loads. The first SIGTERM drains the
server, and the second one ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import uvicorn

from container.app import create_app
from container.http.router import Application, Mount
from container.http.uvicorn_protocol import HttpProtocol, check_uvicorn
from container.models.life_cycle import Lifecycle, State
from container.models.registration import Registrar
from container.models.registry import Model, Models
from container.observability import logs
from container.observability.black_box import BlackBoxes
from container.observability.event_loop_delay import EventLoopWatch
from container.settings.environment import KEY_VARIABLES
from container.settings.load import further_settings
from container.settings.server import address, url_of
from container.settings.settings import Settings, Startup
from container.settings.values import Value
from engines import stacks
from engines.cache_dir import cache_dir, is_writable
from engines.engine_choice import begin_import
from engines.interface import EngineStartError
from engines.memory.garbage_collection import importing
from handlers.lmi.sessions import remove_sessions

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED_TO_START, EXIT_ENGINE_DIED = 0, 1, 137  # LMI exits with 137 under SERVING_FAIL_FAST.
# The limit on open files, as in vLLM's own server. A server's calls and idle connections need fewer files.
ENOUGH = 65536

_SOCKETS = "VLLM_RPC_BASE_PATH"  # vLLM's variable for the directory of its sockets.
_SOCKET_PATH = 107  # The maximum length of a socket's path on Linux, in bytes (unix(7)).
_SOCKET_NAME = 37  # The length of the names that vLLM gives its sockets, in bytes: a slash and a UUID.

_SOCKETS_PREFIX = "slipway-sockets-"
# If an unlocked directory is older than this, a killed server has left it behind. A younger directory may belong to a
# server that has not locked it yet.
_LEFT_SECONDS = 60.0

_ENGINE_CHECK_SECONDS = 0.5
_KEEP_ALIVE_SECONDS = 75
_FAILED_SECONDS = 3.0  # If a load fails, the process exits after this time. Until then, /ping shows the reason.
# A process that was told to stop exits within 25 s, because SageMaker kills it after 30 s. If `drain_timeout` is longer
# than 20.5 s, the limit is `drain_timeout` plus 4.5 s instead.
_END_SECONDS, _STOP_SECONDS = 25.0, 4.5
_STEPS_SECONDS = 3.0  # The minimum time from the drain's limit to the black box of a process that does not stop.
_LAST_SECONDS = 3.0  # The time for clients to read the last data.
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
_ENGINES = {"vllm": "vLLM", "dynamic_batch": "transformers", "python": "Python"}  # Names in the log.
_PROGRESS_SECONDS = 30.0  # The time between two progress lines in the log while a server starts.
_BOX_SECONDS = 2.5  # The maximum time for a black box at the end of a drain, or of the process.
_EXIT_SECONDS = 3.0  # The maximum time for which running threads may delay the exit of the process.


def ensure_home() -> None:
    """Point HOME at a writable directory if it is missing or read-only."""
    home = os.environ.get("HOME") or os.path.expanduser("~")
    if os.path.isabs(home) and is_writable(Path(home)):
        return
    instead = cache_dir() / "home"
    instead.mkdir(parents=True, exist_ok=True)
    logger.warning("HOME is %s, which cannot be written; using %s", home, instead)
    os.environ["HOME"] = str(instead)


def allow_open_files() -> None:
    """Raise the soft limit of open files to `ENOUGH`, as far as the hard limit allows.

    A common soft limit is 1024. More than 1024 calls may wait in a server. Once the limit is reached, no further
    connection is accepted, not even for /ping.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def socket_directory() -> Iterator[None]:
    """Create a temporary directory for sockets, which exists during the `with` block.

    The directory contains the sockets of multiprocessing. It also contains vLLM's sockets, unless the environment names
    another directory for them. If the path of the temporary directory is too long for sockets, the libraries' default
    directories are used.
    """
    _remove_left_directories()
    ours = _SOCKETS not in os.environ
    # All processes that this process starts inherit this configuration.
    passed_on: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    before = passed_on.get("tempdir")
    with tempfile.TemporaryDirectory(prefix=_SOCKETS_PREFIX, ignore_cleanup_errors=True) as directory:
        lock = _lock(directory)  # The lock is held until this process ends, even if it is killed.
        if len(os.fsencode(directory)) + _SOCKET_NAME <= _SOCKET_PATH:
            passed_on["tempdir"] = directory
            if ours:
                os.environ[_SOCKETS] = directory
        try:
            yield
        finally:
            if ours:
                os.environ.pop(_SOCKETS, None)
            passed_on["tempdir"] = before
            if lock is not None:
                os.close(lock)


def _remove_left_directories() -> None:
    """Remove the directories of killed servers. Otherwise they would pile up in a container that restarts in place."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SOCKETS_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS and (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _lock(directory: str | Path) -> int | None:
    """Lock a directory. Return the lock's descriptor, or None if another process holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handling: on a signal, the server is drained before anything is closed."""

    def __init__(self, config: uvicorn.Config, last_seconds: float) -> None:
        super().__init__(config)
        self._last_seconds = last_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop even if clients do not read. uvicorn alone would cancel the calls of these clients and log errors."""
        dropping = asyncio.get_running_loop().call_later(self._last_seconds, self.drop_connections)
        await super().shutdown(sockets)
        dropping.cancel()

    def drop_connections(self) -> None:
        """Close all connections."""
        connections = list(self.server_state.connections)
        if connections:
            logger.warning("%d connections were still open, and are closed", len(connections))
        for connection in connections:
            connection.transport.abort()


def http_server(application: Application, last_seconds: float = _LAST_SECONDS) -> HttpServer:
    """Return an HTTP server for an ASGI application. It runs until `should_exit` is set, and ignores signals.

    Args:
        application: Serves the requests.
        last_seconds: The time for which connections may stay open after the server is told to stop.

    Raises:
        RuntimeError: Slipway does not support this release of uvicorn.
    """
    check_uvicorn()
    return HttpServer(
        uvicorn.Config(
            application,
            http=partial(HttpProtocol, cork=[]),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(last_seconds) + 2,
        ),
        last_seconds,
    )


class ModelServer:
    """Loads, watches, drains and stops the models of a server, and creates the applications. It opens no port."""

    def __init__(self, startup: Startup, mounts: Sequence[Mount] = ()) -> None:
        self.server_config = startup.server_config
        self._mounts = mounts
        self._loop_watch = EventLoopWatch(self._on_stuck_loop)
        self.models = Models(Model(Lifecycle(model.settings), model.url, model.version) for model in startup.models)

        def read_settings(url: Value, name: str, arguments: Mapping[str, Value]) -> Settings:
            return further_settings(url, name, startup.environment, startup.command_line, arguments)

        self.registrar = Registrar(self.models, startup.server_config, read_settings, said=startup.warnings)
        self.boxes = BlackBoxes(self.models, startup.server_config, startup.report, lambda: self._loop_watch.late)
        self.applications = create_app(
            self.models, startup.server_config, self.registrar, mounts, self._loop_watch.lag, startup.report, self.boxes
        )

    @property
    def loading(self) -> bool:
        return self.models.starting or self.registrar.loading

    async def load(self) -> None:
        """Load the startup models.

        Raises:
            EngineStartError: One of the models cannot be loaded.
        """
        self.boxes.begin()
        await self.registrar.start()
        self._loop_watch.start()  # Imports and the start of an engine block the event loop.

    async def watch(self) -> None:
        """Watch the engines until the process should exit because of `fail_fast`.

        If watching fails with an internal error, all ready models are marked as failed.
        """
        try:
            await self._watch_engines()
        except Exception:
            logger.critical("the engines are no longer watched: internal error; /ping now answers 500", exc_info=True)
            for model in self.models:
                model.lifecycle.fail("the engine is no longer watched: internal error")
            if not self.server_config.fail_fast:
                await asyncio.Event().wait()

    async def _watch_engines(self) -> None:
        """Restart engines and copies that die or stall.

        If a restart is impossible, log the failure. With `fail_fast`, return then.
        """
        server_config, restarts = self.server_config, self.registrar.engine_restarts
        ends_when_stalled = server_config.fail_fast and server_config.fail_fast_when_stalled
        reported: set[Model] = set()
        while True:
            for model in (*self.models, *self.models.leaving):
                lifecycle, fault = model.lifecycle, restarts.fault(model)
                stalled = lifecycle.stalled  # This property is always read, because reading it logs stalls.
                await self.boxes.look(model, stalled, fault)  # Before a restart, which kills the processes.
                fault, stalled = restarts.fault(model), lifecycle.stalled  # Read again: writing a box may take seconds.
                if (fault and restarts.begin(model, fault)) or model in self.models.leaving:
                    continue
                failed = lifecycle.state in (State.FAILED, State.RESTARTING)
                ended = lifecycle.reason if failed else lifecycle.lost or (stalled if ends_when_stalled else "")
                if ended and model not in reported:
                    reported.add(model)
                    logs.show_held()
                    logger.critical("%s; /ping now answers 500", ended)
            if reported and server_config.fail_fast:
                return
            reported.intersection_update(self.models)
            await asyncio.sleep(_ENGINE_CHECK_SECONDS)

    def _on_stuck_loop(self, seconds: float) -> None:
        self.boxes.write_now("event loop", f"the event loop has stood still for {seconds:.0f} s")

    async def drain(self) -> None:
        """Refuse new calls, and wait at most `drain_timeout` for running calls.

        If calls still run shortly before this limit, a black box is written, and the calls continue. If the limit is
        0 s, no box is written.
        """
        self.models.draining = True
        seconds = self.server_config.drain_timeout
        before_box = max(seconds - _BOX_SECONDS, seconds / 2)
        draining = asyncio.gather(
            # Loads are cancelled, and their callers get an error. A restart continues if calls wait for it.
            self.registrar.stop(draining=True),
            self.models.drain(seconds),
            self.drain_mounts(seconds),
        )
        await asyncio.wait([draining], timeout=before_box)
        if seconds and (running := sum(model.lifecycle.open_calls for model in self.models)):
            requests = "1 request was" if running == 1 else f"{running} requests were"
            reason = f"{requests} still running after {before_box:g} s of a drain of {seconds:g} s"
            await self.boxes.write("drain", reason, seconds=seconds - before_box)
        await draining

    async def drain_mounts(self, seconds: float) -> None:
        """Finish the background work of the mounted applications within `seconds`."""
        await asyncio.gather(*(mount.drain(seconds) for mount in self._mounts if mount.drain is not None))

    async def write_records(self, seconds: float) -> None:
        """Wait at most `seconds` until the records of captured requests are written."""
        if self.applications.records is not None:
            await self.applications.records.finish(seconds)

    async def stop(self) -> None:
        await self.registrar.stop()
        await self.models.stop()
        self._loop_watch.stop()
        self.boxes.end()


class Process:
    """One container process: a model server, its listeners, and its reactions to signals."""

    def __init__(
        self, startup: Startup, mounts: Sequence[Mount] = (), clean_up: Callable[[], None] = lambda: None
    ) -> None:
        """Create the process.

        Args:
            clean_up: Called if the process exits immediately.
        """
        self._server_config = startup.server_config
        self._clean_up = clean_up
        self.server = ModelServer(startup, mounts)
        applications = self.server.applications
        self.listeners = [(http_server(applications.main), startup.server_config.host, startup.server_config.port)]
        if applications.management is not None and startup.server_config.management_address is not None:
            host, port = address(startup.server_config.management_address)
            self.listeners.append((http_server(applications.management), host, int(port)))
        self.exit_code = EXIT_OK
        self._loading: asyncio.Task[None] | None = None
        self._unfinished = False  # Whether an engine was still being started when the process was stopped.
        self._stopping: asyncio.Task[None] | None = None
        self._end_at = 0.0  # The time by which `run` has to return after a signal, on the event loop's clock.

    async def run(self) -> int:
        """Serve until the process is told to stop. Return the exit code."""
        sockets = [listen(host, port) for _, host, port in self.listeners]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._loading = asyncio.create_task(self._load())
        listeners = zip(self.listeners, sockets, strict=True)
        await asyncio.gather(*(server.serve([listener]) for (server, _, _), listener in listeners))
        self._loading.cancel()
        if self._stopping is not None:
            await self._stopping
        left = max(0.0, self._end_at - loop.time())
        await asyncio.gather(self.server.drain_mounts(left), self.server.write_records(left))
        self._unfinished |= self.exit_code == EXIT_FAILED_TO_START or self.server.loading
        if self.exit_code != EXIT_FAILED_TO_START:
            await self.server.stop()
        if self._unfinished:
            _kill_children()
        return self.exit_code

    async def _load(self) -> None:
        telling = asyncio.create_task(_tell_progress())
        try:
            try:
                await self.server.load()
            finally:
                telling.cancel()
        except Exception as error:
            self.exit_code = EXIT_FAILED_TO_START
            logs.show_held()
            await asyncio.to_thread(logs.flush)  # Writes the engine's last lines before the reason.
            known = isinstance(error, EngineStartError)
            logger.critical("the model cannot be served: %s", error if known else "internal error", exc_info=not known)
            await asyncio.sleep(_FAILED_SECONDS)  # Meanwhile /ping shows the reason, as in LMI.
            await self.server.models.drain(self._server_config.drain_timeout)  # Other models may still have calls.
            self._end()
        else:
            self._greet()
            await self.watch()

    def _greet(self) -> None:
        """Log the models, their engines and the addresses, in several lines. The JSON log has them in one record."""
        server_config = self._server_config
        url = url_of(server_config.host, server_config.port)
        models = [model.lifecycle.view() for model in self.server.models]
        fields: dict[str, Any] = {
            "version": version("slipway"),
            "models": [model.config.name for model in models],
            "engines": sorted({f"{_ENGINES.get(m.engine, m.engine)} {m.engine_version}" for m in models}),
            "address": url,
            "console": f"{url}/console" if server_config.console else None,
            "docs": f"{url}/docs",
        }
        names = ", ".join(fields["models"]) or "no model yet"
        lines = [f"Slipway {fields['version']} serves {names} ({', '.join(fields['engines']) or 'no engine'}) at {url}"]
        lines += [f"  console:  {fields['console']}"] if server_config.console else []
        lines += [f"  API docs: {fields['docs']}"]
        logger.info("%s", "\n".join(lines), extra={logs.FIELDS: fields})

    async def watch(self) -> None:
        await self.server.watch()
        self.exit_code = EXIT_ENGINE_DIED
        await self.server.models.drain(1.0)  # Clients of the dead engine get their errors before the exit.
        self._end()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        models = self.server.models
        nothing_runs = models.starting and not models.loaded
        if self._stopping is not None or nothing_runs:
            if nothing_runs:
                logs.show_held()  # A person may stop the server because the start takes too long.
            logger.warning("%s: ending at once", name)
            self._end_now(EXIT_OK if nothing_runs else 128 + number)
        drain = self._server_config.drain_timeout
        logger.info("%s: draining for at most %g s", name, drain)
        # The timer runs in a thread of its own, so a step that hangs cannot delay it.
        seconds = max(_END_SECONDS, drain + _STOP_SECONDS)
        self._end_at = asyncio.get_running_loop().time() + seconds - _EXIT_SECONDS
        left = min(_BOX_SECONDS, seconds - drain - _STEPS_SECONDS)
        deadline = threading.Timer(seconds - left, self._end_late, (number, seconds, left))
        deadline.daemon = True
        deadline.start()
        self._stopping = asyncio.create_task(self._drain())

    def _end_late(self, number: int, seconds: float, left: float) -> None:
        reason = f"the server has not stopped, and has {left:g} s left"
        # The box is written in another thread, because the cause of the hang may block it, too. The server may still
        # stop meanwhile.
        threading.Thread(target=self.server.boxes.write_now, args=("end", reason), daemon=True).start()
        time.sleep(left)
        logger.critical("not stopped within %g s of the signal; ending at once", seconds)
        self._end_now(128 + number)

    def _end_now(self, code: int) -> None:
        try:
            _kill_children()
            self._clean_up()
        finally:
            _exit(code)

    async def _drain(self) -> None:
        try:
            self._unfinished = self.server.loading
            if self.server.models.starting and self._loading is not None:
                self._loading.cancel()
            await self.server.drain()
            self._unfinished |= self.server.loading
            await self.server.stop()
            logger.info("drained")
        finally:
            self._end()

    def _end(self) -> None:
        for server, _, _ in self.listeners:
            server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections from now on."""
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


async def _tell_progress() -> None:
    """Log regularly that the server is still starting, with the latest line that was held back."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        latest = logs.latest_held()
        logger.info("still loading after %.0f s%s", loop.time() - began, f": {latest}" if latest else "")


async def _run(process: Process, clean_up: Callable[[], None]) -> int:
    """Run the process. After that, make the process exit soon, even if threads still run.

    At exit, the interpreter waits for the threads of all executors. A thread may hang in a model's code, or while it
    accesses the file of a session.
    """
    code = await process.run()

    def end() -> None:
        clean_up()
        _exit(code)

    last = threading.Timer(_EXIT_SECONDS, end)
    last.daemon = True
    last.start()
    return code


def _exit(code: int) -> None:
    """Exit at once, even if threads hang or the log cannot be written."""
    try:
        logs.flush()
    finally:
        os._exit(code)


def _kill_children() -> None:
    """Kill all child processes. A cancelled or failed load may have left some, and an immediate exit would leave all.

    multiprocessing's resource trackers are not killed. When all processes that use a tracker have exited, the tracker
    frees their shared memory, and exits without a signal.
    """
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any(_RESOURCE_TRACKER in part for part in child.cmdline()):
                child.kill()


@contextlib.contextmanager
def prepared(startup: Startup) -> Iterator[None]:
    """Prepare this process for its models.

    Enter this context in a thread that lives as long as the models: the kernel kills the fork server, which forks
    vLLM's processes, when this thread ends.
    """
    ensure_home()
    os.environ.update(startup.exports)
    # The dynamic linker reads an empty entry of this path as the working directory, so empty entries are removed.
    if entries := list(filter(None, os.environ.pop("LD_LIBRARY_PATH", "").split(":"))):
        os.environ["LD_LIBRARY_PATH"] = ":".join(entries)
    if startup.server_config.api_keys is not None:
        for name in KEY_VARIABLES:  # The server's other processes do not need the keys.
            os.environ.pop(name, None)
        logger.info("callers need one of %d API keys", len(startup.server_config.api_keys.digests))
    # GPUs are chosen by their indices in nvidia-smi, so CUDA has to use the same order.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    allow_open_files()
    stacks.register()
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket_directory())
        stack.callback(remove_sessions)
        for model in startup.models:
            if model.temporary is not None:
                stack.callback(shutil.rmtree, model.temporary, ignore_errors=True)
            begin_import(model.settings.config)
        if len(startup.models) == 1 and (only := startup.models[0].settings.config).formatters is not None:
            # LMI runs a model's code in the model directory, and the code may read files from there.
            os.chdir(only.model_dir)
        yield


def serve(startup: Startup, mounts: Sequence[Mount] = ()) -> int:
    """Run a server process with these models and mounted applications until it is told to stop.

    Return the exit code: 0 after a drain, 1 if the model could not be loaded, 137 if the engine died and `fail_fast` is
    set.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(prepared(startup))
        with importing():  # Modules that were imported earlier become exempt from garbage collection, too.
            import uvloop
        return uvloop.run(_run(Process(startup, mounts, stack.close), stack.close))
