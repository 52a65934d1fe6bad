"""What LMI's management API answers, byte for byte.

Source: contracts/lmi.md sections 1.6 and 1.10; sagemaker_hosting.md section 8 for the form of multi-model endpoints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from handlers.contracts.lmi.errors import HTML_SAFE, JSON
from handlers.contracts.protocol import Reply


@dataclass(frozen=True, slots=True)
class Listed:
    """A model, as a list shows it."""

    name: str
    version: str | None
    url: str
    status: str


@dataclass(frozen=True, slots=True)
class WorkerShown:
    """One worker; an engine is one."""

    id: int
    started: float
    """Seconds since the epoch."""
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A model in full."""

    name: str
    version: str | None
    url: str
    batch_size: int
    max_batch_delay: float
    """Seconds."""
    max_idle_time: float
    """Seconds."""
    queue_size: int
    waiting: int
    status: str
    at_startup: bool
    on_gpu: bool
    min_workers: int
    max_workers: int
    workers: Sequence[WorkerShown]


def status_reply(text: str, status: int = 200) -> Reply:
    """`{"status": ...}`."""
    return _reply({"status": text}, status)


def registered(name: str) -> Reply:
    """The model is loaded."""
    return status_reply(f'Model "{name}" registered.')


def registration_scheduled(name: str) -> Reply:
    """The model is going to be loaded."""
    return status_reply(f'Model "{name}" registration scheduled.', 202)


def unregistered(name: str) -> Reply:
    """The model is gone."""
    return status_reply(f'Model or workflow "{name}" unregistered')


def scaled(name: str, least: int, most: int) -> Reply:
    """The numbers of workers as they are now."""
    return status_reply(
        f'Workflow "{name}" worker scaled. New Worker configuration min workers:{least} max workers:{most}'
    )


def model_list(models: Sequence[Listed], start: int, limit: int) -> Reply:
    """`GET /models`."""
    return _page(
        "models",
        [
            {"modelName": m.name, "version": m.version, "modelUrl": m.url, "status": m.status}
            for m in models[start : start + limit]
        ],
        _next(models, start, limit),
    )


def workflow_list(models: Sequence[Listed], start: int, limit: int) -> Reply:
    """`GET /workflows`."""
    return _page(
        "workflows",
        [{"workflowName": m.name, "version": m.version} for m in models[start : start + limit]],
        _next(models, start, limit),
    )


def description(models: Sequence[Described]) -> Reply:
    """`GET /models/<m>`: each version of a model."""
    return _reply([_workflow(model) for model in models])


def sagemaker_list(models: Sequence[Listed], start: int, limit: int) -> Reply:
    """`GET /models` of a multi-model endpoint."""
    document: dict[str, Any] = {"models": [_sagemaker_model(model) for model in models[start : start + limit]]}
    if (token := _next(models, start, limit)) is not None:
        document["nextPageToken"] = token
    return Reply(200, JSON, msgspec.json.encode(document))


def sagemaker_description(model: Listed) -> Reply:
    """`GET /models/<m>` of a multi-model endpoint."""
    return Reply(200, JSON, msgspec.json.encode(_sagemaker_model(model)))


def _sagemaker_model(model: Listed) -> dict[str, str]:
    return {"modelName": model.name, "modelUrl": model.url}


def _workflow(model: Described) -> dict[str, Any]:
    delay, idle = round(model.max_batch_delay * 1000), round(model.max_idle_time)
    group = {
        "device": {"deviceType": "gpu" if model.on_gpu else "cpu", "deviceId": 0 if model.on_gpu else -1},
        "minWorkers": model.min_workers,
        "maxWorkers": model.max_workers,
        "workers": [{"id": w.id, "startTime": _timestamp(w.started), "status": w.status} for w in model.workers],
    }
    shown = {
        "modelName": model.name,
        "modelUrl": model.url,
        "batchSize": model.batch_size,
        "maxBatchDelayMillis": delay,
        "maxIdleSeconds": idle,
        "queueSize": model.queue_size,
        "requestInQueue": model.waiting,
        "status": model.status,
        "loadedAtStartup": model.at_startup,
        "workerGroups": [group],
    }
    return _present({"workflowName": model.name, "version": model.version}) | {"models": [shown]}


def _timestamp(seconds: float) -> str:
    milliseconds = int(seconds * 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000)) + f".{milliseconds % 1000:03d}Z"


def _next(models: Sequence[Listed], start: int, limit: int) -> str | None:
    return str(start + limit) if start + limit < len(models) else None


def _page(name: str, entries: Sequence[dict[str, Any]], token: str | None) -> Reply:
    return _reply(_present({"nextPageToken": token}) | {name: [_present(entry) for entry in entries]})


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _reply(document: Any, status: int = 200) -> Reply:
    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    return Reply(status, JSON, text.translate(HTML_SAFE).encode() + b"\n")
