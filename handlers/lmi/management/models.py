"""LMI's management API for models: its calls and its replies. The replies match LMI's byte for byte.

Sources: "DJL Serving Management API"; for multi-model endpoints, Amazon SageMaker's "Build Your Own Container for
SageMaker AI Multi-Model Endpoints".
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engines.errors import SHOWN, InvalidRequest
from handlers.contract import JSON, Call, Reply, media_type
from handlers.djl_errors import HTML_SAFE, bad_request, front_end_reply, refused
from handlers.management import (
    Cause,
    DescribedGroup,
    DescribedModel,
    ListedModel,
    Management,
    Registration,
    RegistrationFailed,
)
from handlers.parsing.json_fields import JsonError, decode_json

MAX_LISTED = 100  # The maximum number of models in one reply.
MAX_WORKERS = 128  # Each worker is a process. No machine can use this many processes.
# `.` and `..` are refused: clients resolve them in a path, so no client could unload such a model.
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.-]{1,200}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")
# Parameters of a registration, and the keys of serving.properties that they override.
MODEL_KEYS = {
    "engine": "engine",
    "device": "load_on_devices",
    "job_queue_size": "job_queue_size",
    "batch_size": "batch_size",
    "max_batch_delay": "max_batch_delay",
    "max_idle_time": "max_idle_time",
    "min_worker": "minWorkers",
    "max_worker": "maxWorkers",
}
# The status and DJL's class name for each cause.
_REFUSALS: Mapping[Cause, tuple[int, str]] = {
    "url": (404, "ModelNotFoundException"),
    "registered": (409, "IllegalArgumentException"),
    "settings": (400, "IllegalConfigurationException"),
    "memory": (507, "WlmOutOfMemoryException"),
    "load": (500, "EngineException"),
}
_PARAMETERS = MODEL_KEYS.keys() | {"url", "model_name", "model_version", "synchronous"}


def read_registration(call: Call) -> Registration:
    """Read `POST /models`.

    The parameters are in the query or, if the content type is JSON, in an object. Unknown parameters are ignored.

    Raises:
        ContractError: A parameter is missing or wrong. The reply is a 400 that names it.
    """
    in_json = media_type(call.content_type) == JSON
    given = _json_parameters(call.body) if in_json else dict(call.query)
    url, name = given.get("url", "").strip(), given.get("model_name")
    if not url:
        raise bad_request("Parameter url is required.")
    if name is None and in_json:
        raise bad_request("Parameter model_name is required.")
    return Registration(
        url,
        _name("model_name", name),
        _name("model_version", given.get("model_version") or None),
        {key: given[parameter] for parameter, key in MODEL_KEYS.items() if parameter in given},
        _boolean("synchronous", given.get("synchronous", "true")),
    )


def read_scale(call: Call, current: tuple[int, int]) -> tuple[int, int]:
    """Return `min_worker` and `max_worker` of a PUT.

    If a value is absent, the current value remains, with two exceptions: a smaller `max_worker` lowers the minimum, and
    a larger `min_worker` raises the maximum.

    Args:
        call: The PUT.
        current: The current values.

    Raises:
        ContractError: Both values are absent, or a value is wrong. The reply is a 400.
    """
    given = dict(call.query)
    least, most = (
        _integer(name, given[name], 0, MAX_WORKERS) if name in given else None for name in ("min_worker", "max_worker")
    )
    if least is None and most is None:
        raise bad_request("Parameter min_worker or max_worker is required.")
    if least is None:
        least = current[0] if most is None else min(current[0], most)
    if most is None:
        most = max(current[1], least)
    if most < least:
        raise bad_request(f"Parameter max_worker is {most}; allowed: an integer of at least min_worker ({least})")
    return least, most


def read_page(call: Call) -> tuple[int, int]:
    """Read `next_page_token` and `limit`: the position of a page's first entry, and the page's maximum length.

    Raises:
        ContractError: A value is not an integer in its range. The reply is a 400.
    """
    given = dict(call.query)
    limit = _integer("limit", given.get("limit", str(MAX_LISTED)), 1)
    return _integer("next_page_token", given.get("next_page_token", "0"), 0), min(limit, MAX_LISTED)


def _json_parameters(body: bytes) -> dict[str, str]:
    try:
        document = decode_json(body)
    except JsonError as error:
        raise bad_request(f"The body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise bad_request("The body is not a JSON object.")
    return {name: _text(name, value) for name, value in document.items() if value is not None and name in _PARAMETERS}


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise bad_request(f"Parameter {name} is no string or number.")


def _name(parameter: str, text: str | None) -> str | None:
    if text is not None and not _NAME.fullmatch(text):
        raise bad_request(
            f'Parameter {parameter} is "{text[:SHOWN]}"; allowed: up to 200 letters, digits and _ . -, not . or ..'
        )
    return text


def _boolean(parameter: str, text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise bad_request(f'Parameter {parameter} is "{text[:SHOWN]}"; allowed: true, false')
    return text.strip().lower() == "true"


def _integer(parameter: str, text: str, least: int, most: int | None = None) -> int:
    number = int(text) if _INTEGER.fullmatch(text) else None
    if number is None or number < least or (most is not None and number > most):
        allowed = f"an integer from {least} to {most}" if most is not None else f"an integer of at least {least}"
        raise bad_request(f'Parameter {parameter} is "{text[:SHOWN]}"; allowed: {allowed}')
    return number


async def list_models(call: Call, management: Management) -> Reply:
    """`GET /models`."""
    start, limit = read_page(call)
    return (sagemaker_list if management.multi_model else model_list)(management.listed(), start, limit)


async def list_workflows(call: Call, management: Management) -> Reply:
    """`GET /workflows`."""
    return workflow_list(management.listed(), *read_page(call))


async def register(call: Call, management: Management) -> Reply:
    """`POST /models`."""
    order = read_registration(call)
    try:
        name = await management.register(order)
    except RegistrationFailed as error:
        raise refused(*_REFUSALS[error.cause], error.message) from None
    if order.synchronous:
        return _status(f'Model "{name}" registered.')
    return _status(f'Model "{name}" registration scheduled.', 202)


async def describe(call: Call, management: Management) -> Reply:
    """`GET /models/<m>`."""
    if management.multi_model:
        return sagemaker_description(management.listed(*_named(call))[0])
    return description(management.described(*_named(call)))


async def scale(call: Call, management: Management) -> Reply:
    """`PUT /models/<m>`."""
    name, version = _named(call)
    least, most = read_scale(call, management.workers(name, version))
    try:
        actual = management.scale(name, version, least, most)
    except InvalidRequest as error:
        parameter = "max_worker" if "max_worker" in dict(call.query) else "min_worker"
        raise bad_request(f"Parameter {parameter} is {most}; {error.message}") from None
    workers = f"min workers:{actual[0]} max workers:{actual[1]}"
    return _status(f'Workflow "{name}" worker scaled. New Worker configuration {workers}')


async def unregister(call: Call, management: Management) -> Reply:
    """`DELETE /models/<m>`."""
    name, version = _named(call)
    await management.unregister(name, version)
    return _status(f'Model or workflow "{name}" unregistered')


def wrong_method(_: Call) -> Reply:
    """Return the reply to a method that a path of the management API does not have."""
    message = "Requested method is not allowed, please refer to API document."
    return front_end_reply(405, "MethodNotAllowedException", message)


def _named(call: Call) -> tuple[str, str | None]:
    return call.path_parameters["model"], call.path_parameters.get("version")


def model_list(models: Sequence[ListedModel], start: int, limit: int) -> Reply:
    """Return the reply to `GET /models`."""
    entries = [
        {"modelName": model.name, "version": model.version, "modelUrl": model.url, "status": model.status}
        for model in models[start : start + limit]
    ]
    return _page("models", entries, _next(models, start, limit))


def workflow_list(models: Sequence[ListedModel], start: int, limit: int) -> Reply:
    """Return the reply to `GET /workflows`."""
    entries = [{"workflowName": model.name, "version": model.version} for model in models[start : start + limit]]
    return _page("workflows", entries, _next(models, start, limit))


def description(models: Sequence[DescribedModel]) -> Reply:
    """Return the reply to `GET /models/<m>`, with each version of the model."""
    return _reply([_workflow(model) for model in models])


def sagemaker_list(models: Sequence[ListedModel], start: int, limit: int) -> Reply:
    """Return the reply to `GET /models` on a multi-model endpoint."""
    document = {
        "models": [_sagemaker_model(model) for model in models[start : start + limit]],
        "nextPageToken": _next(models, start, limit),
    }
    return Reply(200, JSON, msgspec.json.encode(_present(document)))


def sagemaker_description(model: ListedModel) -> Reply:
    """Return the reply to `GET /models/<m>` on a multi-model endpoint."""
    return Reply(200, JSON, msgspec.json.encode(_sagemaker_model(model)))


def _sagemaker_model(model: ListedModel) -> dict[str, str]:
    return {"modelName": model.name, "modelUrl": model.url}


def _workflow(model: DescribedModel) -> dict[str, Any]:
    delay, idle = round(model.max_batch_delay * 1000), round(model.max_idle_time)
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
        "workerGroups": [_group(group) for group in model.groups],
    }
    return _present({"workflowName": model.name, "version": model.version}) | {"models": [shown]}


def _group(group: DescribedGroup) -> dict[str, Any]:
    on_cpu = group.gpu is None
    return {
        "device": {"deviceType": "cpu" if on_cpu else "gpu", "deviceId": -1 if on_cpu else group.gpu},
        "minWorkers": group.min_workers,
        "maxWorkers": group.max_workers,
        "workers": [{"id": w.id, "startTime": _timestamp(w.started), "status": w.status} for w in group.workers],
    }


def _timestamp(seconds: float) -> str:
    milliseconds = int(seconds * 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000)) + f".{milliseconds % 1000:03d}Z"


def _next(models: Sequence[ListedModel], start: int, limit: int) -> str | None:
    return str(start + limit) if start + limit < len(models) else None


def _page(name: str, entries: Sequence[dict[str, Any]], token: str | None) -> Reply:
    return _reply(_present({"nextPageToken": token}) | {name: [_present(entry) for entry in entries]})


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _status(text: str, status: int = 200) -> Reply:
    return _reply({"status": text}, status)


def _reply(document: Any, status: int = 200) -> Reply:
    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    return Reply(status, JSON, text.translate(HTML_SAFE).encode() + b"\n")
