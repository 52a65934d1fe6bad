"""`/console/state`: the state of the server for the page, as JSON."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.responses import Response

from container.console.page import HEADERS
from container.http.route import AppState
from container.models.engine_restart import WINDOW_SECONDS
from container.models.registry import Model
from container.ping import ping
from container.settings.report import report_object
from container.settings.settings import ServerReport
from container.settings.values import masked
from engines.loaded_model import LoadedModel
from handlers.contract import JSON
from handlers.model_config import ModelConfig


def console_state(
    state: AppState, report: ServerReport | None, endpoints: tuple[str, ...], *, management: bool
) -> Response:
    """Return the reply of `/console/state`.

    Args:
        endpoints: The names of the local SageMaker endpoints.
        management: Whether the request came to the management API's listener. Only replies from this listener show
            settings and the sources of adapters.
    """
    health = ping(state.models, state.server_config, state.error_rates)
    document = {
        "version": version("slipway"),
        # The page reads the health here and does not call /ping, because a browser logs an error for each reply
        # of /ping that is not 2xx.
        "health": {"status": health.status, "models": msgspec.json.decode(health.body)},
        "models": [
            _model(model, management) | {"restarts": _restarts(model, state.server_config.engine_restart)}
            for model in state.models
        ],
        "single": state.models.only is not None,
        # If the server has exactly one model, the model's report contains the server's settings.
        "settings": report_object(report) if report is not None and management else None,
        "management": management,
        "endpoints": endpoints,
    }
    return Response(msgspec.json.encode(document), media_type=JSON, headers=HEADERS)


def _model(model: Model, management: bool) -> dict[str, Any]:
    view = model.lifecycle.view()
    config, loaded = view.config, view.loaded
    return {
        "name": model.name,
        "version": model.version,
        "names": config.public_names,
        "state": view.state,
        "reason": view.reason,
        "engine": view.engine,
        "engine_version": view.engine_version,
        "model_id": config.model_id,
        "contract": _contract(config),
        "tgi_compat": config.lmi.tgi_compat,
        "context": loaded.max_model_len if loaded is not None else None,
        "chat": loaded is not None and loaded.texts.has_chat_template,
        "images": loaded is not None and loaded.takes_images,
        **_kind(loaded),
        "copies": [
            {"number": copy.number, "state": copy.state.value, "gpus": copy.gpus} for copy in model.lifecycle.copies
        ],
        "startup": model.lifecycle.startup_times.seconds,
        "adapters": [
            {"name": adapter.name, "src": masked("src", adapter.src) if management else None, "pinned": adapter.pin}
            for adapter in view.adapters
        ],
        "settings": report_object(model.lifecycle.settings) if management else None,
    }


def _restarts(model: Model, most: int) -> dict[str, float] | None:
    """Return the number of restarts, the number of continued calls, and the downtime of a model.

    The restarts are those of the copy that was restarted most often. None if the engine would not be restarted after a
    failure.

    Args:
        most: The maximum number of restarts of a copy within the window.
    """
    engine = model.lifecycle.engine
    if not most or engine is None or not model.lifecycle.config.runs_on_vllm:
        return None
    since = time.monotonic() - WINDOW_SECONDS
    return {
        "recent": max((model.recent_restarts(copy.number, since) for copy in engine.copies), default=0),
        "most": most,
        "window_seconds": WINDOW_SECONDS,
        "continued_calls": engine.statistics.continued_requests,
        "down_seconds": engine.statistics.down_seconds,
    }


def _kind(loaded: LoadedModel | None) -> dict[str, Any]:
    """Return the kind of the model, and the names of a classifier's classes. The kind is None without a model."""
    if loaded is None:
        return {"kind": None, "labels": {}}
    if loaded.pooling is None:
        return {"kind": "generation", "labels": {}}
    kind = loaded.pooling.kind
    return {"kind": kind, "labels": loaded.pooling.labels if kind == "classifier" else {}}


def _contract(config: ModelConfig) -> str:
    """Return the name of the contract of `/invocations`."""
    if config.handler is not None:
        return "handler"
    if config.rolling_batch == "disable":
        return "dynamic batch"
    return "asynchronous" if config.lmi.async_mode else "rolling batch"
