"""Black boxes. A black box is a JSON file with the state of a server at the time when an engine stalled or died.

Until then, the server only collects a few numbers for each step of an engine (`engines.statistics.Step`). A separate
thread gathers the box, so a blocked event loop does not stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from starlette.responses import Response

from container.console.page import HEADERS
from container.models.life_cycle import State
from container.models.registry import Fault, Model, Models
from container.observability import logs
from container.observability.black_box_content import MOST_CHARACTERS, Box, gathered
from container.settings.server import ServerConfig
from container.settings.settings import ServerReport
from engines.cache_dir import cache_dir
from engines.daemon_thread import in_daemon_thread
from engines.interface import CopyState
from engines.memory.cpu_memory import killed_for_memory
from engines.stacks import catches, is_registered
from handlers.contract import JSON

logger = logging.getLogger(__name__)

SIGNAL = signal.SIGQUIT  # DJL Serving reacts similarly: on this signal, Java prints the stacks of all threads.
MOST_FILES = 10
ASKED = "asked"
_PREFIX = "blackbox-"
_PAUSE_SECONDS = 30.0  # The least time between two boxes of the same kind, unless a person asks for a box.
_BUSY_SECONDS = 10.0  # The time to wait for another box that is being written.
_HANDLER_SECONDS = 0.1  # The time in which the signal's handler writes its text to the pipe.
_LEFT_SECONDS = 60.0  # An incomplete file that is older than this belongs to a server that was killed.


class BlackBoxes:
    """Writes the black boxes of a server."""

    def __init__(
        self, models: Models, server_config: ServerConfig, report: ServerReport | None, late: Callable[[], float]
    ) -> None:
        """Create the black boxes. Nothing is written yet.

        Args:
            models: The server's models.
            server_config: The server's settings.
            report: The server's settings with their sources. None if the settings of the server's only model contain
                them.
            late: Returns the number of seconds by which the event loop is late.
        """
        self._models, self._report, self._late = models, report, late
        self._setting = server_config.blackbox_dir
        self._logs_short_form = server_config.blackbox_log
        self._lock = threading.Lock()  # Only one box is gathered at a time.
        self._latest: dict[tuple[object, ...], float] = {}  # The time of the latest box for each cause, model and part.
        self._killed_before = killed_for_memory()
        self._bell: int | None = None  # The pipe to which the signal's handler writes.

    def begin(self) -> None:
        """Write a box at each SIGQUIT."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # faulthandler's handler is written in C. It runs and wakes the thread even if the main thread hangs.
        faulthandler.register(SIGNAL, writer, all_threads=False)
        self._bell = writer
        threading.Thread(target=self._wait, args=(reader,), name="black-box", daemon=True).start()

    def end(self) -> None:
        """Stop waiting for SIGQUIT."""
        if self._bell is not None:
            faulthandler.unregister(SIGNAL)
            os.close(self._bell)  # This ends the thread.
            self._bell = None

    def _wait(self, reader: int) -> None:
        while os.read(reader, 1 << 20):
            time.sleep(_HANDLER_SECONDS)
            os.set_blocking(reader, False)
            try:
                os.read(reader, 1 << 20)
            except BlockingIOError:
                pass
            finally:
                os.set_blocking(reader, True)
            self.write_now(ASKED, f"the server got {SIGNAL.name}")
        os.close(reader)

    async def look(self, model: Model, stalled: str, fault: str) -> None:
        """Write a box if an engine has stalled since the last check, or if a copy or a worker has died.

        Args:
            model: The model.
            stalled: The reason why the model's engine counts as stalled. Empty if it is not stalled.
            fault: The reason to restart the model's engine. Empty if no restart is needed.
        """
        lifecycle, pool, before = model.lifecycle, model.lifecycle.pool, model.fault
        if lifecycle.stage is State.STOPPED:
            return  # Dead copies and workers are no fault now, because the server stops them.
        dead = frozenset((c.number, c.started_at) for c in lifecycle.copies if c.state is CopyState.DEAD)
        worker = pool.last_failed if pool is not None else None
        broken = stalled or fault or dead or lifecycle.unhealthy or lifecycle.missing
        model.fault = Fault(bool(stalled), dead, worker, before.black_box if broken else "")
        if stalled and not before.stalled:
            await self.write("stall", stalled, model)
        # The dead copies of a failed model get no box, because the server stops them before it loads the model again.
        elif (new := dead - before.dead) and lifecycle.stage is not State.FAILED:
            reason = lifecycle.reason or lifecycle.missing or "a copy has died"
            await self.write("death", reason, model, part=sorted(new))
        elif worker is not None and worker is not before.worker:
            # A crash and a hang are different kinds. A box about a crash does not suppress a box about a hang.
            part = [worker.name, bool(worker.stacks)]
            await self.write("worker", f"{worker.name} (pid {worker.pid}) {worker.reason}", model, part=part)

    async def write(
        self, cause: str, reason: str, model: Model | None = None, *, part: Iterable[object] = (), seconds: float = 5.0
    ) -> None:
        """Write a box, and wait at most `seconds` for it. The default is long enough to gather the stacks.

        Args:
            cause: The kind of the box, in one word. At most one box is written per half minute for each combination of
                cause, model and part.
            reason: A sentence for people.
            model: The broken model. `/ping` shows the path of the box next to the reason.
            part: The broken part of the model: the dead copies with their start times, or the worker.
            seconds: The maximum time to wait. If the box takes longer, it is still written.
        """
        if self._setting == "":
            return
        writing = in_daemon_thread(partial(self.write_now, cause, reason, model, tuple(part)))
        await asyncio.wait([asyncio.ensure_future(writing)], timeout=seconds)

    def write_now(self, cause: str, reason: str, model: Model | None = None, part: tuple[object, ...] = ()) -> None:
        """Write a box, and block until it is written. Errors are logged."""
        kind = cause, "" if model is None else model.title, *part
        directory = box_directory(self._setting)
        if directory is None or self._was_written(kind):
            return
        if not self._lock.acquire(timeout=_BUSY_SECONDS):
            logger.error("no black box: another one is still being written")
            return
        try:
            if not self._was_written(kind):  # Another thread may have written a box of this kind.
                self._write(directory, cause, reason, model)
                self._latest[kind] = time.monotonic()
        except Exception:
            logger.exception("no black box: internal error")
        finally:
            self._lock.release()

    def _was_written(self, kind: tuple[object, ...]) -> bool:
        now = time.monotonic()
        self._latest = {key: at for key, at in self._latest.items() if now - at < _PAUSE_SECONDS}
        return kind in self._latest and kind[0] != ASKED

    def _write(self, directory: Path, cause: str, reason: str, model: Model | None) -> None:
        began = time.monotonic()
        box = self._gathered(cause, reason)
        path, fault = "", ""
        try:
            path = str(_kept(directory, cause, box.encoded()))
        except OSError as error:
            fault = f"it cannot be written: {error}"
        if model is not None:
            model.fault.black_box = path
        seconds = time.monotonic() - began
        found = "".join(f"; {finding}" for finding in box.findings)
        fields = {"black_box": path or None, "cause": cause, "findings": box.findings, "seconds": round(seconds, 3)}
        place = fault or f"{path} ({seconds:.2f} s)"
        logger.error("black box: %s%s; %s", reason[:MOST_CHARACTERS], found, place, extra={logs.FIELDS: fields})
        if self._logs_short_form or fault:
            logger.error("black box, short form: %s", box.short(path))

    async def page(self) -> Response:
        """Return a reply with a new box that a person has requested. No file is written."""
        if not self._lock.acquire(blocking=False):
            return Response(b'{"error":"another black box is being gathered; try again"}\n', 503, HEADERS, JSON)

        def show() -> bytes:
            try:
                return self._gathered(ASKED, "GET /server/blackbox").encoded()
            finally:
                self._lock.release()

        return Response(await in_daemon_thread(show), 200, HEADERS, JSON)

    def _gathered(self, cause: str, reason: str) -> Box:
        killed = killed_for_memory() - self._killed_before
        return gathered(cause, reason, self._models, self._report, killed, self._late())


def box_directory(setting: str | None, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the directory of the boxes. None if no boxes are written.

    Args:
        setting: The value of the setting `blackbox_dir`.
        environ: The environment of the server.
    """
    if setting is None:
        return cache_dir(environ) / "blackbox"
    return Path(setting) if setting else None


def boxes_in(directory: Path) -> list[Path]:
    """Return the boxes in a directory, the oldest first."""
    return sorted(directory.glob(f"{_PREFIX}*.json"))


def ask_by_signal(server: int) -> bool:
    """Make a server write a box.

    Return False if the process is not a server. The process then gets no signal, because the signal would kill it.
    """
    if not catches(server, SIGNAL) or not is_registered(server):
        return False
    os.kill(server, SIGNAL)
    return True


def _kept(directory: Path, cause: str, data: bytes) -> Path:
    """Write a file that only its owner can read, and remove the oldest boxes."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in directory.glob(f"{_PREFIX}*.part"):
        with contextlib.suppress(OSError):  # Another server may remove the file first.
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                left.unlink()
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    path = directory / f"{_PREFIX}{moment}-{os.getpid()}-{cause.replace(' ', '-')}.json"
    begun = path.with_suffix(".part")
    descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        begun.rename(path)
    except OSError:
        begun.unlink(missing_ok=True)
        raise
    for old in boxes_in(directory)[:-MOST_FILES]:
        old.unlink(missing_ok=True)
    return path
